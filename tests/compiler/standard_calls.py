"""Calls of the standard ops, every form and argument variant, for tests that run them all.

Owns the arguments and fake providers of the standard ops. Does not own what is tested with them.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import irframework as ir

HIDDEN = 32
_POSITIONS = 64
_numbers = itertools.count()


@dataclass(frozen=True)
class Call:
    """A form of an op, and its arguments for a number of rows.

    Attributes:
        form: The op, or its `maybe_inplace`.
        make: Arguments for `rows` rows on a device; the same rows give the same numbers.
        batch: The dimension that is `rows` long, for each tensor that has one, by position.
    """

    form: Any
    make: Callable[..., tuple[Any, ...]]
    batch: dict[int, int]

    @property
    def op(self) -> Any:
        return getattr(self.form, "op", self.form)

    def arguments(self, rows: int, device: str = "cpu") -> tuple[Any, ...]:
        torch.manual_seed(rows)
        return tuple(a.to(device) if isinstance(a, Tensor) else a for a in self.make(rows))


def _norm(x: Tensor, *rest: Any, weight: bool = True) -> tuple[Any, ...]:
    return x, torch.randn(HIDDEN) if weight else None, 1e-6, *rest


_SCALE = 0.02


def _quantised(x: Tensor, *rest: Any) -> tuple[Any, ...]:
    return x, torch.full((1,), _SCALE), *rest


def _add_quantised(rows: int) -> tuple[Any, ...]:
    x, r, weight, epsilon = _add(rows)
    return x, r, weight, torch.full((1,), _SCALE), epsilon


def _add(rows: int, *rest: Any) -> tuple[Any, ...]:
    return torch.randn(rows, HIDDEN), *_norm(torch.randn(rows, HIDDEN), *rest)


def _rotary(rows: int, *, key: bool = True, neox: bool = True, apart: bool = False) -> tuple[Any, ...]:
    query = torch.randn((rows, 2, 16) if apart else (rows, 32))
    other = torch.randn((rows, 1, 16) if apart else (rows, 16))
    return torch.arange(rows) % _POSITIONS, query, other if key else None, torch.randn(_POSITIONS, 8), 16, neox


def _rotary_of_sequences(rows: int) -> tuple[Any, ...]:
    positions = torch.arange(3 * rows).view(3, rows) % _POSITIONS
    return positions, torch.randn(3, rows, 32), torch.randn(3, rows, 16), torch.randn(_POSITIONS, 8), 16


CALLS = {
    "rms_norm": Call(ir.ops.rms_norm, lambda n: _norm(torch.randn(n, HIDDEN)), {0: 0}),
    "rms_norm-3d": Call(ir.ops.rms_norm, lambda n: _norm(torch.randn(3, n, HIDDEN)), {0: 1}),
    "rms_norm-no_weight": Call(ir.ops.rms_norm, lambda n: _norm(torch.randn(n, HIDDEN), weight=False), {0: 0}),
    "rms_norm-part": Call(ir.ops.rms_norm, lambda n: _norm(torch.randn(n, HIDDEN), HIDDEN // 2), {0: 0}),
    "fused_add_rms_norm": Call(ir.ops.fused_add_rms_norm, _add, {0: 0, 1: 0}),
    "fused_add_rms_norm-part": Call(ir.ops.fused_add_rms_norm, lambda n: _add(n, HIDDEN // 2), {0: 0, 1: 0}),
    "fused_add_rms_norm-maybe_inplace": Call(ir.ops.fused_add_rms_norm.maybe_inplace, _add, {0: 0, 1: 0}),
    "silu_and_mul": Call(ir.ops.silu_and_mul, lambda n: (torch.randn(n, HIDDEN),), {0: 0}),
    "gelu_and_mul": Call(ir.ops.gelu_and_mul, lambda n: (torch.randn(n, HIDDEN),), {0: 0}),
    "gelu_and_mul-tanh": Call(ir.ops.gelu_and_mul, lambda n: (torch.randn(n, HIDDEN), "tanh"), {0: 0}),
    "static_quant_fp8": Call(ir.ops.static_quant_fp8, lambda n: _quantised(torch.randn(n, HIDDEN)), {0: 0}),
    "dynamic_quant_fp8": Call(ir.ops.dynamic_quant_fp8, lambda n: (torch.randn(n, HIDDEN),), {0: 0}),
    "rms_norm_static_quant_fp8": Call(
        ir.ops.rms_norm_static_quant_fp8,
        lambda n: (torch.randn(n, HIDDEN), *_quantised(torch.randn(HIDDEN), 1e-6)),
        {0: 0},
    ),
    "rms_norm_dynamic_quant_fp8": Call(
        ir.ops.rms_norm_dynamic_quant_fp8, lambda n: _norm(torch.randn(n, HIDDEN)), {0: 0}
    ),
    "fused_add_rms_norm_static_quant_fp8": Call(
        ir.ops.fused_add_rms_norm_static_quant_fp8, _add_quantised, {0: 0, 1: 0}
    ),
    "fused_add_rms_norm_dynamic_quant_fp8": Call(ir.ops.fused_add_rms_norm_dynamic_quant_fp8, _add, {0: 0, 1: 0}),
    "fused_add_rms_norm_dynamic_quant_fp8-maybe_inplace": Call(
        ir.ops.fused_add_rms_norm_dynamic_quant_fp8.maybe_inplace, _add, {0: 0, 1: 0}
    ),
    "silu_and_mul_static_quant_fp8": Call(
        ir.ops.silu_and_mul_static_quant_fp8, lambda n: _quantised(torch.randn(n, HIDDEN)), {0: 0}
    ),
    "silu_and_mul_dynamic_quant_fp8": Call(
        ir.ops.silu_and_mul_dynamic_quant_fp8, lambda n: (torch.randn(n, HIDDEN),), {0: 0}
    ),
    "rotary_embedding": Call(ir.ops.rotary_embedding, _rotary, {0: 0, 1: 0, 2: 0}),
    "rotary_embedding-no_key": Call(ir.ops.rotary_embedding, lambda n: _rotary(n, key=False), {0: 0, 1: 0}),
    "rotary_embedding-pairs": Call(ir.ops.rotary_embedding, lambda n: _rotary(n, neox=False), {0: 0, 1: 0, 2: 0}),
    "rotary_embedding-apart": Call(ir.ops.rotary_embedding, lambda n: _rotary(n, apart=True), {0: 0, 1: 0, 2: 0}),
    "rotary_embedding-3d": Call(ir.ops.rotary_embedding, _rotary_of_sequences, {0: 1, 1: 1, 2: 1}),
}

OPS = tuple(dict.fromkeys(name.partition("-")[0] for name in CALLS))

_NESTED = ("rms_norm", "fused_add_rms_norm", "silu_and_mul")


def _providers(call: Call, kernels: str) -> list[str]:
    if "_quant" in call.op.name and call.op.name not in ("static_quant_fp8", "dynamic_quant_fp8"):
        return [kernels]  # native is the native of the parts
    whole = "variance_size" not in call.op.signature.parameters or len(call.arguments(1)) < len(
        call.op.signature.parameters
    )
    overwriting = ["overwriting"] if call.op is ir.ops.fused_add_rms_norm and whole else []
    return ["native", kernels, *overwriting, *(["nested"] if call.op.name in _NESTED else [])]


def all_calls() -> pytest.MarkDecorator:
    """Every call as `call`."""
    return pytest.mark.parametrize("call", [pytest.param(call, id=name) for name, call in CALLS.items()])


def all_calls_and_providers(kernels: str = "vllm_c") -> pytest.MarkDecorator:
    """Every call with native, the provider of a plugin and the fake ones that take it, as `call` and `provider`."""
    pairs = [
        pytest.param(call, provider, id=f"{name}-{provider}")
        for name, call in CALLS.items()
        for provider in _providers(call, kernels)
    ]
    return pytest.mark.parametrize(("call", "provider"), pairs)


def same(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Equal but for the tolerance of kernels that add in another order; codes may be neighbours."""
    if isinstance(got, (tuple, list)):
        assert len(got) == len(want)
        for one, other in zip(got, want, strict=True):
            same(one, other, tolerance)
    elif isinstance(got, Tensor) and got.dtype == want.dtype == torch.float8_e4m3fn:
        torch.testing.assert_close(got.float(), want.float(), atol=2.0**-9, rtol=2.0**-3)
    else:
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def copies(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in arguments)


def expected(call: Call, arguments: tuple[Any, ...]) -> Any:
    """What native gives, on copies."""
    with torch.no_grad(), only(call.op.name, "native"):
        return call.op(*copies(arguments))


def only(op: str, provider: str) -> Any:
    return ir.priority({op: [provider]})


def prefer(provider: str) -> Any:
    """Prefer a provider for every standard op that it implements."""
    names = [name for name in OPS if provider in getattr(ir.ops, name).impls]
    return ir.priority({name: [provider] for name in names})


def available(provider: str) -> str:
    """Skip where a plugin's kernels are not here."""
    impl = ir.ops.rms_norm.impls.get(provider)
    if provider in ("vllm_c", "triton") and (impl is None or not impl.supported):
        pytest.skip(f"needs the kernels of provider {provider}")
    return provider


@contextlib.contextmanager
def fake_providers() -> Iterator[None]:
    """`overwriting`: kernels behind mutating torch ops; `nested`: implementations that call other IR ops."""
    namespace = f"standard_calls_{next(_numbers)}"
    library = torch.library.Library(namespace, "DEF")
    library.define("add_norm_(Tensor(a!) x, Tensor(b!) r, Tensor? w, float e) -> ()")

    def kernel(x: Tensor, r: Tensor, w: Tensor | None, e: float) -> None:
        r.add_(x)
        x.copy_(ir.ops.rms_norm.native(r, w, e))

    library.impl("add_norm_", kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{namespace}::add_norm_", lambda x, r, w, e: None, lib=library)
    overload = getattr(torch.ops, namespace).add_norm_
    whole_rows = ir.supports(none=("variance_size",))

    @ir.ops.fused_add_rms_norm.register_impl("overwriting", inplace=True, supports_args=whole_rows)
    def overwriting(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        overload(x, x_residual, weight, epsilon)
        return x, x_residual

    @ir.ops.fused_add_rms_norm.register_impl("nested")
    def nested(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        r = x + x_residual
        return ir.ops.rms_norm(r, weight, epsilon, variance_size=variance_size), r

    @ir.ops.rms_norm.register_impl("nested")
    def nested_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        y, _ = ir.ops.fused_add_rms_norm.native(x, torch.zeros_like(x), weight, epsilon, variance_size)
        return y

    @ir.ops.silu_and_mul.register_impl("nested", supports_args=ir.supports(dtype=torch.float32))
    def nested_gate(x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x[..., :half] * torch.sigmoid(x[..., :half]) * x[..., half:]

    try:
        yield
    finally:
        for op, provider in (
            (ir.ops.fused_add_rms_norm, "overwriting"),
            (ir.ops.fused_add_rms_norm, "nested"),
            (ir.ops.rms_norm, "nested"),
            (ir.ops.silu_and_mul, "nested"),
        ):
            op.unregister_impl(provider)
        library._destroy()
