"""Registering implementations."""

import copy
import functools
import pickle

import pytest
import torch
from torch import Tensor

import irframework as ir
from irframework import errors
from irframework.dispatch import why_never


def plain(x, weight=None, epsilon=1e-6):
    return x * 10


def test_registered_function_stays_callable(declare):
    impl = declare().register_impl("p")(plain)
    assert isinstance(impl, ir.IrOpImpl)
    assert impl(torch.ones(1)).item() == 10
    assert (impl.provider, impl.fn, impl.plugin) == ("p", plain, None)


def test_source_is_the_place_of_the_function(declare):
    assert declare().register_impl("p")(plain).source.endswith(f"test_impl.py:{plain.__code__.co_firstlineno}")


@pytest.mark.parametrize("provider", ["native"])
def test_reserved_provider_is_refused(declare, provider):
    with pytest.raises(errors.ReservedNameError, match="reserved"):
        declare().register_impl(provider)(plain)


@pytest.mark.parametrize("provider", ["", "a b", "a,b", "a;b", "a=b", "a?"])
def test_provider_name_that_priority_strings_cannot_hold_is_refused(declare, provider):
    with pytest.raises(errors.ReservedNameError, match="provider's name"):
        declare().register_impl(provider)(plain)


def test_decorator_without_parentheses_says_how(declare):
    with pytest.raises(errors.IrError, match=r"register_impl\("):
        declare().register_impl(plain)


def test_second_implementation_of_a_provider_is_refused_and_names_both_places(declare):
    op = declare()
    op.register_impl("p")(plain)
    with pytest.raises(errors.DuplicateImplementationError, match=r"test_impl\.py:\d+, and again at .*test_impl\.py"):
        op.register_impl("p")(lambda x, weight=None, epsilon=1e-6: x)
    assert op.impls["p"].fn is plain


@pytest.mark.parametrize(
    ("fn", "problem"),
    [
        (lambda x: x, "'weight' is missing"),
        (lambda x, w, epsilon=1e-6: x, "called 'w' instead of 'weight'"),
        (lambda weight, x, epsilon=1e-6: x, "called 'weight' instead of 'x'"),
        (lambda x, weight, epsilon=1e-5: x, "default 1e-05 instead of the default 1e-06"),
        (lambda x, weight, epsilon: x, "no default instead of"),
        (lambda x, weight, epsilon=1e-6, extra=1: x, "'extra' is unknown"),
        (lambda x, weight, *, epsilon=1e-6: x, "keyword-only instead of"),
        (lambda x, weight, *rest: x, "called 'rest'"),
        (lambda *args: args[0], "called 'args'"),
        (lambda x, weight, epsilon=1e-6, **more: x, "'more' is unknown"),
    ],
)
def test_signature_must_be_the_ops(declare, fn, problem):
    def native(x: Tensor, weight: Tensor | None, epsilon: float = 1e-6) -> Tensor:
        return x + 1

    op = declare(native)
    with pytest.raises(errors.SignatureError, match=problem) as raised:
        op.register_impl("p")(fn)
    assert f"{op.name}(x, weight, epsilon=1e-06)" in str(raised.value)
    assert set(op.impls) == {"native"}


def test_default_of_another_type_is_another_default(declare):
    def native(x: Tensor, flag: bool = True) -> Tensor:
        return x + 1

    with pytest.raises(errors.SignatureError, match="default 1 instead of"):
        declare(native).register_impl("p")(lambda x, flag=1: x)


def test_predicate_needs_the_ops_signature(declare):
    op = declare()
    with pytest.raises(errors.SignatureError, match="predicate"):
        op.register_impl("p", supports_args=lambda y: True)(plain)
    with pytest.raises(errors.SignatureError, match="predicate"):
        op.register_impl("p", supports_args=ir.supports(none=("weight",)) & (lambda y: True))(plain)
    assert set(op.impls) == {"native"}


@pytest.mark.parametrize("wrong", [True, "x", 3])
def test_predicate_must_be_a_function_or_conditions(declare, wrong):
    with pytest.raises(errors.ConditionError, match="supports_args"):
        declare().register_impl("p", supports_args=wrong)(plain)


def test_implementation_must_be_a_function(declare):
    with pytest.raises(errors.ConditionError, match="expects a function"):
        declare().register_impl("p")(3)


@pytest.mark.parametrize("types", [(), ("",), (3,)])
def test_device_types_must_be_names(declare, types):
    with pytest.raises(errors.ConditionError, match="device_types"):
        declare().register_impl("p", device_types=types)(plain)


def test_inplace_needs_allow_inplace(declare):
    with pytest.raises(errors.InplaceError, match="allow_inplace"):
        declare().register_impl("p", inplace=True)(plain)


@pytest.mark.parametrize(
    "fn",
    [
        functools.partial(plain),
        type("Callable", (), {"__call__": lambda self, x, weight=None, epsilon=1e-6: x * 10})(),
        type("Holder", (), {"method": lambda self, x, weight=None, epsilon=1e-6: x * 10})().method,
        torch.no_grad()(plain),
    ],
    ids=["partial", "object", "method", "decorated"],
)
def test_any_callable_with_the_signature_will_do(declare, fn):
    op = declare()
    impl = op.register_impl("p")(fn)
    assert [op(torch.ones(1)).item() for _ in range(3)] == [10, 10, 10]
    assert impl.digest()


def test_one_function_may_serve_two_ops(declare):
    first, second = declare(), declare()
    impl = first.register_impl("p")(second.register_impl("p")(plain))
    assert impl.op is first
    assert second.impls["p"].fn is plain


def test_impls_is_a_copy_with_native_first(declare):
    op = declare()
    op.register_impl("a")(plain)
    op.impls.clear()
    assert list(op.impls) == ["native", "a"]


def test_unregistered_implementation_is_gone(declare):
    op = declare()
    op.register_impl("a")(plain)
    assert op(torch.ones(1)).item() == 10
    op.unregister_impl("a")
    op.unregister_impl("native")
    assert op(torch.ones(1)).item() == 2
    assert set(op.impls) == {"native"}


def test_supported_is_asked_once_and_only_at_first_need(declare):
    asked = []
    op = declare()
    impl = op.register_impl("p", supported=lambda: asked.append(1) or True)(plain)
    assert asked == []
    assert impl.supported
    assert impl.supported
    op(torch.ones(1))
    assert asked == [1]


@pytest.mark.parametrize(
    ("supported", "reason"),
    [
        (False, "supported=False"),
        (lambda: False, "said no"),
        (lambda: None, "said no"),
        (lambda: ir.reject("needs AMX"), "needs AMX"),
        (lambda: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_unsupported_implementation_has_a_reason_and_never_runs(declare, supported, reason):
    op = declare()
    impl = op.register_impl("p", supported=supported)(plain)
    assert op(torch.ones(1)).item() == 2
    assert not impl.supported
    assert reason in impl.unsupported_reason
    assert op.supported_providers() == ["native"]


def test_supported_implementation_has_no_reason(declare):
    assert declare().register_impl("p")(plain).unsupported_reason is None


def test_keyboard_interrupt_in_supported_is_not_swallowed(declare):
    def stop():
        raise KeyboardInterrupt

    op = declare()
    impl = op.register_impl("p", supported=stop)(plain)
    with pytest.raises(KeyboardInterrupt):
        _ = impl.supported
    op.unregister_impl("p")  # or the next snapshot of all ops would be interrupted


def test_supports_args_takes_any_spelling_of_a_call(declare):
    impl = declare().register_impl("p", supports_args=ir.supports(none=("weight",)))(plain)
    x = torch.ones(1)
    assert impl.supports_args(x) is True
    assert not impl.supports_args(x, x)
    assert not impl.supports_args(weight=x, x=x)


def test_supports_args_does_not_look_at_devices(declare):
    impl = declare().register_impl("p", device_types=("cuda",))(plain)
    assert impl.supports_args(torch.ones(1)) is True


@pytest.mark.parametrize("raised", [TypeError("no"), RuntimeError("no"), AssertionError("no")])
def test_exception_of_a_predicate_is_a_rejection_with_the_reason(declare, raised):
    def predicate(x, weight=None, epsilon=1e-6):
        raise raised

    impl = declare().register_impl("p", supports_args=predicate)(plain)
    assert f"{type(raised).__name__}: no" in impl.supports_args(torch.ones(1)).reason


def test_answer_without_a_truth_value_is_a_rejection(declare):
    op = declare()
    op.register_impl("p", supports_args=lambda x, weight=None, epsilon=1e-6: x > 0)(plain)
    with pytest.MonkeyPatch.context():
        assert "RuntimeError" in op.explain(torch.ones(2)).candidates[0].reason
        for _ in range(3):
            assert op(torch.ones(2)).tolist() == [2, 2]


def test_implementation_of_an_older_op_serves_calls_without_the_new_parameter(declare):
    def native(x: Tensor, epsilon: float, size: int | None = None, mode: str = "a") -> Tensor:
        return x + 1

    op = declare(native)
    op.register_impl("old", supports_args=lambda x, epsilon: True)(lambda x, epsilon, size=None: x + 2)
    x = torch.zeros(1)
    for _ in range(3):
        assert op(x, 1.0).item() == 2
        assert op(x, 1.0, None, "a").item() == 2
        assert op(x, 1.0, 4).item() == 1
        assert op(x, 1.0, mode="b").item() == 1
    assert "written before the parameter mode" in op.explain(x, 1.0, None, "b").candidates[0].reason
    assert "written before the parameter size" in op.explain(x, 1.0, 4).candidates[0].reason


def test_message_about_an_implementation_names_op_provider_and_place(declare):
    op = declare()
    impl = op.register_impl("p")(plain)
    assert op.name in impl.described
    assert "'p'" in impl.described
    assert "test_impl.py:" in impl.described


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda impl: pickle.loads(pickle.dumps(impl))])
def test_copies_of_an_implementation_are_the_implementation(declare, clone):
    op = declare()
    impl = op.register_impl("p")(lambda x, weight=None, epsilon=1e-6: x * 10)
    assert clone(impl) is impl
    assert clone(op.explain(torch.ones(1))) == op.explain(torch.ones(1))


def test_pickled_implementation_that_is_not_here_is_named(declare):
    op = declare()
    data = pickle.dumps(op.register_impl("p")(plain))
    op.unregister_impl("p")
    with pytest.raises(errors.UnknownProviderError, match=f"{op.name}.*'p'"):
        pickle.loads(data)


@pytest.mark.parametrize("value", [None, 0, "no"])
@pytest.mark.parametrize("option", ["supported", "batch_invariant"])
def test_switch_that_is_neither_true_nor_false_is_refused(declare, option, value):
    with pytest.raises(errors.ConditionError, match=option):
        declare().register_impl("p", **{option: value})(plain)


def test_rejection_as_supported_is_a_no_with_its_reason(declare):
    op = declare()
    impl = op.register_impl("p", supported=ir.reject("needs a moon"))(plain)
    assert (impl.supported, impl.unsupported_reason) == (False, "needs a moon")
    assert op.dispatch(torch.ones(2)).provider == "native"


def test_supported_that_exits_is_a_no(declare):
    def exits():
        raise SystemExit(3)

    assert declare().register_impl("p", supported=exits)(plain).unsupported_reason == "supported() raised SystemExit: 3"


@pytest.mark.parametrize("reason", [None, "", 5])
def test_rejection_needs_a_reason(declare, reason):
    def predicate(x, weight=None, epsilon=1e-6):
        return ir.reject(reason)

    with pytest.raises(errors.ConditionError, match="reason"):
        ir.reject(reason)
    op = declare()
    op.register_impl("p", supports_args=predicate)(plain)
    assert {op(torch.ones(1)).item() for _ in range(3)} == {op.native(torch.ones(1)).item()}
    assert op.dispatch(torch.ones(1)).provider == "native"


@pytest.mark.parametrize("types", [5, (), ("cuda:0",), ("CPU",)])
def test_device_types_without_sense_are_refused(declare, types):
    with pytest.raises(errors.ConditionError, match="device_types"):
        declare().register_impl("p", device_types=types)(plain)


async def _coroutine(x, weight=None, epsilon=1e-6):
    return True


def _generator(x, weight=None, epsilon=1e-6):
    yield True


@pytest.mark.parametrize("function", [_coroutine, _generator])
def test_coroutine_and_generator_are_neither_implementation_nor_predicate(declare, function):
    with pytest.raises(errors.SignatureError, match="plain function"):
        declare().register_impl("p")(function)
    with pytest.raises(errors.SignatureError, match="plain function"):
        declare().register_impl("p", supports_args=function)(plain)


def test_op_cannot_implement_itself(declare):
    op = declare()
    with pytest.raises(errors.ConditionError, match="native"):
        op.register_impl("p")(op)


def test_implementation_that_calls_its_own_op_without_end_is_told_so(declare):
    op = declare()

    @op.register_impl("p")
    def endless(x, weight=None, epsilon=1e-6):
        return op(x, weight, epsilon)

    with pytest.raises(errors.ImplementationContractError, match=r"calls itself without end.*\.native"):
        op(torch.ones(2))


def test_support_may_differ_by_device_type(declare):
    op = declare()
    asked = []

    def on_cuda():
        asked.append("cuda")
        return ir.reject("no kernel image for sm_75")

    impl = op.register_impl("p", supported={"cpu": True, "cuda": on_cuda})(plain)
    assert impl.device_types == ("cpu", "cuda")
    assert impl.supported
    assert impl.unsupported_reason is None
    assert why_never(impl, "cpu") is None
    assert why_never(impl, "cuda") == why_never(impl, "cuda") == "no kernel image for sm_75"
    assert "runs on cpu, cuda" in why_never(impl, "xpu")
    assert asked == ["cuda"]


def test_support_of_no_device_gives_all_reasons(declare):
    impl = declare().register_impl("p", supported={"cpu": False, "cuda": ir.reject("not built")})(plain)
    assert not impl.supported
    assert impl.unsupported_reason == "on cpu: registered with supported=False; on cuda: not built"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"supported": {}}, "empty mapping"),
        ({"supported": {"cpu": 3}}, "must be True, False"),
        ({"supported": {"CPU:0": True}}, "without an index"),
        ({"supported": {"cpu": True}, "device_types": ("cuda",)}, "Leave device_types out"),
    ],
)
def test_support_by_device_type_that_makes_no_sense_is_refused(declare, options, words):
    with pytest.raises(errors.ConditionError, match=words):
        declare().register_impl("p", **options)(plain)


# --- an in-place implementation with a functional form ----------------------------------------------------------------


@pytest.fixture
def scaled(declare):
    """An op with an in-place implementation and its functional form, and the names of what ran."""
    ran = []

    def native(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    op = declare(native, allow_inplace=True)

    def functional(x, factor=2.0):
        ran.append("functional")
        return x * factor

    def inplace(x, factor=2.0):
        ran.append("inplace")
        return x.mul_(factor)

    op.register_impl("p", inplace=True, functional=functional)(inplace)
    with ir.priority({op.name: ["p"]}):
        yield op, ran


@pytest.mark.parametrize("calls", [1, 3])  # the first call is made with all checks
def test_a_call_that_gives_nothing_away_runs_the_functional_form(scaled, calls):
    op, ran = scaled
    for _ in range(calls):
        x = torch.ones(3)
        assert op(x).tolist() == [2, 2, 2]
        assert x.tolist() == [1, 1, 1]
    assert ran == ["functional"] * calls


@pytest.mark.parametrize("calls", [1, 3])
def test_a_donating_call_runs_in_place(scaled, calls):
    op, ran = scaled
    for _ in range(calls):
        x = torch.ones(3)
        assert op.maybe_inplace(x) is x
    assert ran == ["inplace"] * calls


@pytest.mark.parametrize("calls", [1, 3])
def test_what_must_not_be_overwritten_is_given_to_the_functional_form(scaled, calls):
    op, ran = scaled
    for _ in range(calls):
        parameter = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        assert op.maybe_inplace(parameter).tolist() == [2, 2, 2]
        assert parameter.tolist() == [1, 1, 1]
    assert ran == ["functional"] * calls


def test_a_functional_form_is_part_of_the_digest(declare):
    def other(x, weight=None, epsilon=1e-6):
        return x * 11

    digests = {
        declare(allow_inplace=True).register_impl("p", inplace=True, functional=form)(plain).digest()
        for form in (None, plain, other)
    }
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"functional": plain}, errors.ConditionError, "needs inplace=True"),
        ({"inplace": True, "functional": 3}, errors.ConditionError, "expects a function"),
        ({"inplace": True, "functional": lambda x: x}, errors.SignatureError, "functional form"),
        ({"inplace": True, "functional": lambda y: y}, errors.SignatureError, "functional form"),
    ],
)
def test_a_functional_form_that_does_not_fit_is_refused(declare, options, error, words):
    with pytest.raises(error, match=words):
        declare(allow_inplace=True).register_impl("p", **options)(plain)
