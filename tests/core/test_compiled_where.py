"""Implementations that compiled code is given only where a call of theirs pays: `compiled_where`."""

import pytest
import torch

import irframework as ir
from irframework import errors
from irframework.digest import digest_of
from irframework.dispatch import resolve
from irframework.priority import fingerprint

X = torch.ones(3, 8)


def kernel(x, weight=None, epsilon=1e-6):
    return x * 2 if weight is None else x * weight


def few_rows(x):
    return x.shape[0] > 4 or ir.reject("few rows: a loop of the compiler's costs less than a call")


def provided(declare, where=few_rows):
    op = declare()
    op.register_impl("k", compiled_where=where)(kernel)
    return op


def chosen(op, x=X, mode="inductor"):
    return resolve(op, op.bind((x,), {}), mode, stop_at_first=False)


def test_compiled_code_is_given_the_calls_that_pay(declare):
    op = provided(declare)
    assert chosen(op, torch.ones(5, 8)).provider == "k"
    assert chosen(op).provider == "native"


def test_the_reason_is_told(declare):
    (candidate, _) = chosen(provided(declare)).candidates
    assert not candidate.accepted
    assert candidate.reason == "few rows: a loop of the compiler's costs less than a call"


def test_eager_calls_do_not_ask(declare):
    assert chosen(provided(declare), mode="eager").provider == "k"


def test_the_next_provider_is_asked_before_native(declare):
    op = provided(declare)
    op.register_impl("later")(kernel)
    assert chosen(op).provider == "later"


def test_who_names_the_provider_gets_it(declare, configured):
    op = provided(declare)
    with ir.priority({op.name: "k"}):
        assert chosen(op).provider == "k"
    configured(ir_op_priority={op.name: "k"})
    assert chosen(op).provider == "k"


def test_who_names_another_provider_does_not_name_this_one(declare):
    op = provided(declare)
    op.register_impl("other", supports_args=lambda x, weight=None, epsilon=1e-6: False)(kernel)
    with ir.priority({op.name: "other"}):
        assert chosen(op).provider == "native"


def test_batch_invariant_mode_makes_one_choice_for_every_number_of_rows(declare, configured):
    op = declare()
    op.register_impl("k", batch_invariant=True, compiled_where=few_rows)(kernel)
    configured(batch_invariant=True)
    assert chosen(op).provider == "k"


def test_it_may_take_some_of_the_parameters(declare):
    op = provided(declare, lambda weight: weight is not None)
    assert chosen(op).candidates[0].reason == "compiled_where said no"
    assert resolve(op, op.bind((X, X), {}), "inductor").provider == "k"


def test_it_may_take_parameters_by_keyword_only(declare):
    def where(*, epsilon):
        return epsilon > 0

    assert chosen(provided(declare, where)).provider == "k"


def test_its_exception_means_no(declare):
    op = provided(declare, lambda x: x.nothing)
    assert chosen(op).provider == "native"
    assert chosen(op).candidates[0].reason.startswith("compiled_where raised AttributeError: ")


def test_what_is_no_function_is_refused(declare):
    with pytest.raises(errors.ConditionError, match="compiled_where must be a function of some of the op's parameters"):
        declare().register_impl("k", compiled_where=True)


def test_parameters_that_the_op_does_not_have_are_refused(declare):
    with pytest.raises(errors.SignatureError, match="compiled_where of provider 'k'"):
        provided(declare, lambda rows: True)


def test_a_function_without_a_signature_is_refused(declare):
    with pytest.raises(errors.SignatureError, match="has no signature that can be read"):
        provided(declare, torch.add)


def test_it_is_part_of_what_compiled_code_is_cached_under(declare):
    op = declare()
    digests = set()
    for where in (None, lambda x: True, lambda x: False):
        digests.add(digest_of(op.register_impl("k", compiled_where=where)(kernel)))
        op.unregister_impl("k")
    assert len(digests) == 3


def test_compiled_programs_follow_it(declare):
    op = provided(declare)
    program = torch.compile(lambda x: op(x), backend="irframework", dynamic=False)
    with torch.no_grad(), torch._inductor.config.patch(fallback_by_default=True):
        program(X)
        assert set(ir.last_report().selected_impls[op.name].values()) == {"native"}
        program(torch.ones(5, 8))
        assert set(ir.last_report().selected_impls[op.name].values()) == {"k"}


def test_who_names_the_first_provider_compiles_anew(declare):
    op = provided(declare)
    program = torch.compile(lambda x: op(x), backend="irframework", dynamic=False)
    with torch.no_grad(), torch._inductor.config.patch(fallback_by_default=True):
        program(X)
        with ir.priority({op.name: "k"}):
            program(X)
        assert set(ir.last_report().selected_impls[op.name].values()) == {"k"}


def test_cached_code_of_who_named_nobody_is_not_taken_for_who_names_the_first(declare):
    op = provided(declare)
    unasked = fingerprint("inductor")
    with ir.priority({op.name: "k"}):
        assert fingerprint("inductor") != unasked
