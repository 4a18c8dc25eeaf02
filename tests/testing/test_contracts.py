"""Implementations that lie about what they do, one lie each, are named with it."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import irframework as ir
from irframework import errors
from irframework.testing import Conformance, check_impl, check_provider, trial

_numbers = itertools.count()
_ASKED = (*trial.RULES, "compiled")
_SHAPES = ((5, 34), (0, 64), (1, 64))
Implementation = Callable[..., Any]


def native(x: Tensor, x_residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    residual = x + x_residual
    return residual * weight, residual


@pytest.fixture
def op(declare: Callable[..., ir.IrOp]) -> ir.IrOp:
    op = declare(native, allow_inplace=True)

    @op.register_input_generator
    def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
        if shape not in _SHAPES or dtype is not torch.float32:
            raise ValueError("few calls show enough")
        options: dict[str, Any] = {"device": device}
        return torch.randn(shape, **options), torch.randn(shape, **options), torch.randn(shape[-1], **options)

    return op


@pytest.fixture
def check(op: ir.IrOp) -> Callable[..., Conformance]:
    def check(fn: Implementation, **options: Any) -> Conformance:
        op.register_impl("liar", **options)(fn)
        return check_impl(op, "liar", "cpu", rules=_ASKED)

    return check


def honest(x: Tensor, x_residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return native(x, x_residual, weight)


def honest_in_place(x: Tensor, x_residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    x_residual.add_(x)
    torch.mul(x_residual, weight, out=x)
    return x, x_residual


# --- lies: (rule, words, function, options) ----------------------------------------------------------------------


def one_output(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    return (x + x_residual) * weight


def a_number(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    return (x + x_residual) * weight, 3


def wrong_dtype(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    y, r = native(x, x_residual, weight)
    return y.double(), r


def wrong_shape(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    y, r = native(x, x_residual, weight)
    return y[None], r


def columns(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    y, r = native(x, x_residual, weight)
    return y.transpose(0, -1).contiguous().transpose(0, -1), r


def part(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    y, r = native(x, x_residual, weight)
    return torch.cat((r, y))[y.shape[0] :].view(y.shape), r


def argument(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    return native(x, x_residual, weight)[0], x


def each_other(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    y, r = native(x, x_residual, weight)
    both = torch.stack((y, r))
    return both[0], both[1]


def overwrites(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    result = native(x, x_residual, weight)
    x.zero_()
    return result


def overwrites_weight(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    result = honest_in_place(x, x_residual, weight)
    weight.add_(1)
    return result


def reshapes(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    result = native(x, x_residual, weight)
    x.unsqueeze_(0)
    return result


def shrinks(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    result = native(x, x_residual, weight)
    x.resize_(1)
    return result


def writes_beside(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    y, r = native(x, x_residual, weight)
    x.as_strided((1,), (1,), max(x.storage_offset() - 1, 0)).fill_(7)
    return y, r


def writes_beside_in_place(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    result = honest_in_place(x, x_residual, weight)
    x.as_strided((1,), (1,), x.storage_offset() + x.numel()).fill_(7)
    return result


def not_in_place(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    return native(x, x_residual, weight)


def far_away(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    y, r = native(x, x_residual, weight)
    return y * 1.1, r


def not_a_number(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    y, r = native(x, x_residual, weight)
    return y * float("nan"), r


def fails(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    if x.shape[0] == 0:
        raise RuntimeError("no rows")
    return native(x, x_residual, weight)


def looks_at_values(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
    return native(x, x_residual, weight) if weight.sum().item() else (x * 0, x * 1)


WRITES = "overwrites its argument"
LIES: list[tuple[str, str, Implementation, dict[str, Any]]] = [
    ("count", "returns one tensor. The op returns a tuple of 2 tensors", one_output, {}),
    ("count", "returns Tensor, int. The op returns a tuple of 2 tensors", a_number, {}),
    ("output", "returns float64[5, 34]", wrong_dtype, {}),
    ("output", "returns float32[1, 5, 34]", wrong_shape, {}),
    ("strides", "returns output 0 with strides (1, 5) where the op promises (34, 1)", columns, {}),
    ("offset", "returns output 0 as a part of a larger tensor, at offset 170", part, {}),
    ("sharing", "returns output 1 in the memory of its argument 'x'", argument, {}),
    ("sharing", "returns output 1 in the memory of output 0", each_other, {}),
    ("writes", f"{WRITES} 'x'. Register it with inplace=True", overwrites, {}),
    ("writes", f"{WRITES} 'x'. Register it with inplace=True", reshapes, {}),
    ("writes", f"{WRITES} 'x'. Register it with inplace=True", shrinks, {}),
    ("writes", f"{WRITES} 'weight', which is no activation of the op", overwrites_weight, {"inplace": True}),
    ("writes", "writes to memory beside its argument 'x'", writes_beside, {}),
    ("writes", "writes to memory beside its argument 'x'", writes_beside_in_place, {"inplace": True}),
    ("in_place", "neither overwrites nor returns x or x_residual", not_in_place, {"inplace": True}),
    ("values", "returns an output 0 that is up to", far_away, {}),
    ("values", "up to inf away from native's", not_a_number, {}),
    ("raises", "raises RuntimeError where native does not: no rows", fails, {}),
    ("fake", "for tensors without data", looks_at_values, {}),
]


@pytest.mark.parametrize(("rule", "words", "fn", "options"), LIES, ids=[fn.__name__ for _, _, fn, _ in LIES])
def test_a_lie_is_named(
    check: Callable[..., Conformance], rule: str, words: str, fn: Implementation, options: dict[str, Any]
) -> None:
    result = check(fn, **options)
    found = [str(violation) for violation in result.violations if violation.rule == rule]
    assert [text for text in found if words in text], result.violations
    assert "Implementation 'liar' of op" in found[0]
    assert result.source in found[0]


@pytest.mark.parametrize("options", [{}, {"inplace": True}])
def test_an_honest_implementation_breaks_nothing(check: Callable[..., Conformance], options: dict[str, Any]) -> None:
    result = check(honest_in_place if options else honest, **options)
    assert result.violations == ()
    assert result.skipped is None
    assert result.calls > 20


def test_equal_violations_are_counted_and_the_first_call_is_shown(check: Callable[..., Conformance]) -> None:
    (violation,) = check(overwrites).violations
    assert violation.times > 10
    assert "x=float32[5, 34] strides (34, 1) at offset 64 on cpu" in violation.inputs
    assert f"and {violation.times - 1} more" in str(violation)


def test_a_write_to_a_closed_over_tensor_is_named(check: Callable[..., Conformance]) -> None:
    calls = torch.zeros(1)

    def counts(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
        calls.add_(1)
        return native(x, x_residual, weight)

    found = check(counts).violations
    assert [v.rule for v in found] == ["writes"]
    assert "overwrites a tensor that the implementation closes over" in found[0].what


class Holder:
    calls = torch.zeros(1)


def test_what_only_a_trace_shows_is_named(check: Callable[..., Conformance]) -> None:
    def counts(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
        Holder.calls.add_(1)
        return native(x, x_residual, weight)

    (violation,) = check(counts).violations
    assert violation.rule == "compiled"
    assert "'liar'" in violation.what
    assert "calls aten.add_.Tensor, which writes to a tensor that the implementation closes over" in violation.what


@pytest.fixture
def kernel() -> Callable[[str, Callable[..., Any], Callable[..., Any]], Any]:
    """A torch op that is told to be what it is not."""
    libraries = []

    def define(schema: str, body: Callable[..., Any], fake: Callable[..., Any]) -> Any:
        library = torch.library.Library(f"liars{next(_numbers)}", "DEF")
        libraries.append(library)
        library.define(f"kernel{schema}")
        library.impl("kernel", body, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{library.ns}::kernel", fake, lib=library)
        return getattr(torch.ops, library.ns).kernel

    return define


def test_a_kernel_whose_schema_hides_a_write_is_named(check: Callable[..., Conformance], kernel: Any) -> None:
    hidden = kernel("(Tensor x) -> Tensor", lambda x: x.neg_().clone(), torch.empty_like)

    def uses(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
        y, r = native(x, x_residual, weight)
        hidden(x)
        return y, r

    assert [v.what for v in check(uses).violations if v.rule == "writes" and "'x'" in v.what]


@pytest.mark.parametrize(
    ("fake", "words"),
    [
        (lambda x: x.new_empty((*x.shape, 1)), "returns float32[5, 34, 1]"),
        (lambda x: torch.empty_like(x, dtype=torch.float64), "returns float64"),
        (lambda x: torch.empty_like(x).transpose(0, -1).contiguous().transpose(0, -1), "strides (1, "),
        (lambda x: torch.cat((x, x))[x.shape[0] :], "at offset"),
        (lambda x: x.new_empty(()), "returns float32[]"),
    ],
)
def test_a_shape_function_that_differs_from_its_kernel_is_named(
    check: Callable[..., Conformance], kernel: Any, fake: Callable[..., Any], words: str
) -> None:
    lying = kernel("(Tensor x) -> Tensor", lambda x: x.clone(memory_format=torch.contiguous_format), fake)

    def uses(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
        y, r = native(x, x_residual, weight)
        return lying(y.contiguous()), r

    found = check(uses).violations
    assert {v.rule for v in found} == {"fake"}
    assert words in found[0].what


def test_a_shape_function_that_forgets_whose_memory_it_is_is_named(check: Callable[..., Conformance]) -> None:
    def uses(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
        y, r = honest_in_place(x, x_residual, weight)
        return y, r.clone() if type(x) is not Tensor else r

    found = check(uses, inplace=True).violations
    assert {v.rule for v in found} == {"fake"}
    assert "in the memory of 'x_residual'" in found[0].what


def test_layouts_that_are_declined_are_not_tried(op: ir.IrOp, check: Callable[..., Conformance]) -> None:
    def needs_rows(x: Tensor, x_residual: Tensor, weight: Tensor) -> Any:
        assert x.is_contiguous()
        return native(x, x_residual, weight)

    result = check(needs_rows, supports_args=ir.supports(contiguous=("x",)))
    assert result.violations == ()
    op.register_impl("other")(honest)
    everything = check_impl(op, "other", "cpu", rules=_ASKED).calls
    assert 0 < result.calls < everything


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"supported": False}, "registered with supported=False"),
        ({"device_types": "cuda"}, "runs on cuda, not on cpu"),
        ({"supports_args": lambda x, x_residual, weight: ir.reject("needs luck")}, "needs luck"),
    ],
)
def test_what_cannot_be_tried_is_skipped_with_the_reason(
    check: Callable[..., Conformance], options: dict[str, Any], why: str
) -> None:
    result = check(far_away, **options)
    assert result.calls == 0
    assert why in str(result.skipped)
    assert result.violations == ()


def test_an_op_without_a_generator_is_skipped_with_advice(declare: Callable[..., ir.IrOp]) -> None:
    op = declare()
    op.register_impl("p")(lambda x, weight=None, epsilon=1e-6: x * 2)
    result = check_impl(op, "p", "cpu")
    assert "register_input_generator" in str(result.skipped)


def test_the_plugin_and_its_version_are_in_the_result() -> None:
    results = (
        check_provider("vllm_c", [ir.ops.silu_and_mul], rules=["compiled"])
        if "vllm_c" in ir.ops.silu_and_mul.impls
        else None
    )
    if results is None:
        pytest.skip("needs the plugin vllm_c")
    assert (results[0].plugin, results[0].provider) == ("vllm_c", "vllm_c")
    assert results[0].version


def test_all_providers_but_native_are_checked_by_default(op: ir.IrOp) -> None:
    op.register_impl("a")(honest)
    op.register_impl("b")(far_away)
    assert [(r.provider, bool(r.violations)) for r in check_provider(ops=[op], rules=["values"])] == [
        ("a", False),
        ("b", True),
    ]
    assert [r.provider for r in check_provider("native", [op], rules=["values"])] == ["native"]


def test_an_unknown_provider_is_an_error_with_the_closest(op: ir.IrOp) -> None:
    op.register_impl("acme")(honest)
    with pytest.raises(errors.UnknownProviderError, match="Did you mean 'acme'"):
        check_provider("acne", [op])


def test_a_device_that_is_not_here_is_an_error(op: ir.IrOp) -> None:
    with pytest.raises(errors.DeviceUnavailableError, match="'xyz'"):
        check_provider(ops=[op], device="xyz")


def test_random_numbers_of_the_program_are_left_alone(check: Callable[..., Conformance]) -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    check(honest)
    assert torch.equal(torch.rand(2), expected)


# --- overloads that compiled code calls in a functional op's place ------------------------------------------------


def doubled(x: Tensor, out: Tensor) -> None:
    torch.mul(x, 2, out=out)


def half_of_it(x: Tensor, out: Tensor) -> None:
    torch.mul(x[..., :1], 2, out=out[..., :1])


def other_values(x: Tensor, out: Tensor) -> None:
    torch.mul(x, 3, out=out)


def resized(x: Tensor, out: Tensor) -> None:
    out.resize_(1).fill_(2.0)


def overwriting_x(x: Tensor, out: Tensor) -> None:
    torch.mul(x, 2, out=out)
    x.zero_()


def raising(x: Tensor, out: Tensor) -> None:
    raise ValueError("no such thing")


def nothing(x: Tensor, out: Tensor) -> None:
    return None


@pytest.mark.parametrize(
    ("overload", "problem"),
    [
        (half_of_it, "leaves other values in 'out'"),
        (other_values, "leaves other values in 'out'"),
        (nothing, "leaves other values in 'out'"),
        (resized, "another size or memory"),
        (overwriting_x, "overwrites an argument"),
        (raising, "raises ValueError: no such thing"),
        (doubled, None),
    ],
)
def test_an_out_overload_that_does_something_else_than_its_op_is_named(op, check, overload, problem):
    library = torch.library.Library(f"tt_out{next(_numbers)}", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::twice", torch.empty_like, lib=library)
    ir.define_out_variant(library, "twice")
    library.impl("twice.out", overload, "CompositeExplicitAutograd")
    kernel = getattr(torch.ops, library.ns).twice

    def fn(x, x_residual, weight):
        residual = kernel(x) / 2 + x_residual
        return residual * weight, residual

    found = [each for each in check(fn).violations if each.rule == "out_overload"]
    if problem is None:
        assert not found
    else:
        assert problem in str(found[0])
        assert f"{library.ns}.twice" in str(found[0])
