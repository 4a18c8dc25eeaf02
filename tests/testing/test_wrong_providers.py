"""Each provider that is wrong on purpose is caught by the rule meant for it; right ones are caught by none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import irframework as ir
from irframework import contract
from irframework.testing import Conformance, check_impl

from .wrong_providers import Wrong, inputs, right, right_in_place, scaled_sum
from .wrong_providers.numerics import NUMERICS
from .wrong_providers.outputs import OUTPUTS
from .wrong_providers.predicates import PREDICATES
from .wrong_providers.repetition import REPETITION

WRONG: tuple[Wrong, ...] = (*NUMERICS, *OUTPUTS, *PREDICATES, *REPETITION)
SLOW = ("opcheck", "compiled", "threads", "overhead")


@pytest.fixture
def op(declare: Callable[..., ir.IrOp]) -> ir.IrOp:
    op = declare(scaled_sum, allow_inplace=True)
    op.register_input_generator(inputs)
    return op


def checked(op: ir.IrOp, wrong: Wrong, rules: Any = None) -> Conformance:
    op.register_impl("wrong", **wrong.options)(wrong.fn)
    return check_impl(op, "wrong", "cuda" if wrong.cuda else "cpu", rules=rules)


def cases(cuda: bool) -> Any:
    chosen = [wrong for wrong in WRONG if wrong.cuda is cuda]
    predicates = [wrong.options.get("supports_args") for wrong in chosen]
    names = [getattr(p, "__name__", w.fn.__name__) for p, w in zip(predicates, chosen, strict=True)]
    return pytest.mark.parametrize("wrong", chosen, ids=names)


@cases(cuda=False)
def test_a_wrong_provider_is_caught_by_the_rule_meant_for_it(op: ir.IrOp, wrong: Wrong) -> None:
    asked = [rule for rule in contract.RULES if rule not in SLOW or rule in (wrong.rule, *wrong.also)]
    result = checked(op, wrong, asked)
    found = [violation for violation in result.violations if violation.rule == wrong.rule]
    assert [v for v in found if wrong.words in str(v)], str(result)
    assert {violation.rule for violation in result.violations} <= {wrong.rule, *wrong.also}, str(result)
    assert result.rule("ends").status == "passed"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@cases(cuda=True)
def test_a_provider_that_is_wrong_on_cuda_is_caught_by_the_rule_meant_for_it(op: ir.IrOp, wrong: Wrong) -> None:
    result = checked(op, wrong, [rule for rule in contract.RULES if rule not in SLOW or rule in wrong.also])
    found = [violation for violation in result.violations if violation.rule == wrong.rule]
    assert [v for v in found if wrong.words in str(v)], str(result)
    assert {violation.rule for violation in result.violations} <= {wrong.rule, *wrong.also}, str(result)


def test_every_rule_has_a_provider_that_breaks_it() -> None:
    elsewhere = {"ends"}  # a crash ends the process: tests/cli/test_check.py
    assert {wrong.rule for wrong in WRONG} == set(contract.RULES) - elsewhere


@pytest.mark.parametrize(("fn", "inplace"), [(right, False), (right_in_place, True)], ids=["right", "right_in_place"])
def test_a_right_provider_breaks_no_rule(op: ir.IrOp, fn: Callable[..., Any], inplace: bool) -> None:
    op.register_impl("right", inplace=inplace)(fn)
    result = check_impl(op, "right", "cpu")
    assert result.ok, str(result)
    skipped = {"streams", "graph_capture", "batch_invariant", "out_overload", "checks_tensors"}
    skipped |= set() if inplace else {"in_place"}
    assert {rule.rule for rule in result.rules if rule.status == "skipped"} == skipped
    assert [rule.rule for rule in result.rules] == list(contract.RULES)
    assert {each.dtype for each in result.accuracy} == {"float32", "bfloat16"}
    assert all(each.max_ulp <= each.native_max_ulp for each in result.accuracy)
    assert result.overhead is not None
    assert Conformance.from_dict(result.to_dict()) == result
