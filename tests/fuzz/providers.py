"""The ops that random programs call, and providers of every kind for them.

Owns the ops' meanings for the reference (`MEANINGS`: plain torch, outputs contiguous and of their own) and the kernels:
in place, into a fresh tensor, functional with an `.out` overload, nested, in parts, and ones that return what an op may
not return, which the framework has to repair.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from fused_ops import declare_fused, fused_priorities
from torch import Tensor
from torch.library import Library

import irframework as ir

NAMESPACE = "irfuzz"
_SCHEMAS = (
    "add_(Tensor(a!) x, Tensor(b!) r, Tensor w) -> ()",
    "add_into(Tensor(a!) y, Tensor(b!) s, Tensor x, Tensor r, Tensor w) -> ()",
    "scale_(Tensor(a!) x, float factor) -> ()",
    "scale_into(Tensor(a!) y, Tensor x, float factor) -> ()",
    "scaled(Tensor x, float factor) -> Tensor",
    "norm_(Tensor(a!) x, Tensor(b!) r, Tensor? w, float epsilon) -> ()",
    "normed(Tensor x, Tensor? w, float epsilon) -> Tensor",
    "gate_into(Tensor(a!) y, Tensor x) -> ()",
    "added(Tensor x, Tensor r, Tensor w) -> (Tensor, Tensor)",
    "poke_(Tensor(a!) x) -> ()",  # the user's own, no kernel of an op
    "blend_(Tensor(a!) x, Tensor y) -> Tensor",
)


def add(x: Tensor, x_residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The sum, and the sum times a weight."""
    r = x + x_residual
    return r * weight, r


def scale(x: Tensor, factor: float = 2.0) -> Tensor:
    """A multiple."""
    return x * factor


def spread(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Three outputs of different shapes."""
    return x * 0.5, x.sum(-1) * 0.25, x.transpose(0, -1) + 1


def _add_(x: Tensor, r: Tensor, w: Tensor) -> None:
    r.add_(x)
    x.copy_(r * w)


def _add_into(y: Tensor, s: Tensor, x: Tensor, r: Tensor, w: Tensor) -> None:
    torch.add(x, r, out=s)
    torch.mul(s, w, out=y)


def _added(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y, s = _like_first(x), _like_first(x)  # contiguous, as the fake implementation says
    _add_into(y, s, x, r, w)
    return y, s


def _added_out(x: Tensor, r: Tensor, w: Tensor, *, out0: Tensor, out1: Tensor) -> None:
    _add_into(out0, out1, x, r, w)


def _scale_(x: Tensor, factor: float) -> None:
    x.mul_(factor)


def _scale_into(y: Tensor, x: Tensor, factor: float) -> None:
    torch.mul(x, factor, out=y)


def _scaled_out(x: Tensor, factor: float, *, out: Tensor) -> None:
    torch.mul(x, factor, out=out)


def _norm_(x: Tensor, r: Tensor, w: Tensor | None, epsilon: float) -> None:
    r.add_(x)
    x.copy_(ir.ops.rms_norm.native(r, w, epsilon))


def _normed(x: Tensor, w: Tensor | None, epsilon: float) -> Tensor:
    return ir.ops.rms_norm.native(x, w, epsilon).contiguous()


def _normed_out(x: Tensor, w: Tensor | None, epsilon: float, *, out: Tensor) -> None:
    out.copy_(ir.ops.rms_norm.native(x, w, epsilon))


def _gate_into(y: Tensor, x: Tensor) -> None:
    y.copy_(ir.ops.silu_and_mul.native(x))


def _poke_(x: Tensor) -> None:
    x.mul_(0.5).add_(0.25)


def _blend_(x: Tensor, y: Tensor) -> Tensor:
    result = y * 2
    x.add_(0.125)
    return result


def _nothing(*args: object, **kwargs: object) -> None:
    return None


def _like_first(x: Tensor, *args: object, **kwargs: object) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


_KERNELS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "add_": (_add_, _nothing),
    "add_into": (_add_into, _nothing),
    "added": (_added, lambda x, r, w: (_like_first(x), _like_first(x))),
    "scale_": (_scale_, _nothing),
    "scale_into": (_scale_into, _nothing),
    "scaled": (lambda x, factor: (x * factor).contiguous(), _like_first),
    "norm_": (_norm_, _nothing),
    "normed": (_normed, _like_first),
    "gate_into": (_gate_into, _nothing),
    "poke_": (_poke_, _nothing),
    "blend_": (_blend_, lambda x, y: torch.empty_like(y)),
}


@dataclass(frozen=True, slots=True)
class Ops:
    """The ops by the names that programs use, and the providers of each."""

    library: Library
    called: dict[str, Any]
    providers: dict[str, tuple[str, ...]]


@cache
def declare() -> Ops:
    """Declare the ops and their kernels, once per process."""
    library = Library(NAMESPACE, "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    for name, (kernel, fake) in _KERNELS.items():
        library.impl(name, kernel, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    for name, filling in (("scaled", _scaled_out), ("normed", _normed_out), ("added", _added_out)):
        ir.define_out_variant(library, name)
        library.impl(f"{name}.out", filling, "CompositeExplicitAutograd")
    ops = {
        "add": ir.register_op(name="fuzz_add", allow_inplace=True)(add),
        "scale": ir.register_op(name="fuzz_scale", allow_inplace=True)(scale),
        "spread": ir.register_op(name="fuzz_spread")(spread),
    }
    inner = ir.register_op(name="fuzz_inner", allow_inplace=True)(add)
    kernels = getattr(torch.ops, NAMESPACE)
    _provide_add(ops["add"], inner, kernels)
    _provide_scale(ops["scale"], kernels)
    ops["spread"].register_impl("strided")(_strided_spread)
    ops |= {
        "fused_norm": ir.ops.fused_add_rms_norm,
        "norm": ir.ops.rms_norm,
        "gate": ir.ops.silu_and_mul,
        "rotate": ir.ops.rotary_embedding,
        "gemma": ir.ops.gemma_rms_norm,
        "added_gemma": ir.ops.fused_add_gemma_rms_norm,
        "gelu_gate": ir.ops.gelu_and_mul,
        "quant_static": ir.ops.static_quant_fp8,
        "quant_dynamic": ir.ops.dynamic_quant_fp8,
        "quant_group": ir.ops.group_quant_fp8,
        **declare_fused(),
    }
    providers = {
        "fuzz_add": ("native", "inp", "inp", "aten", "nested", "fresh", "out", "halves", "into_activation"),
        "fuzz_scale": ("native", "inp", "inp", "out", "fresh", "lazy", "strided", "aten", "twice"),
        "fuzz_spread": ("native", "strided"),
        "fuzz_inner": ("inp", "native", "aten"),
        "fused_add_rms_norm": ("native", "fuzz_inp", "fuzz_inp", "fuzz_nested", "vllm_c"),
        "rms_norm": ("native", "fuzz_out", "vllm_c"),
        "silu_and_mul": ("native", "fuzz_fresh", "vllm_c"),
        "rotary_embedding": ("native", "vllm_c"),
    }
    return Ops(library, ops, providers)


def _provide_add(op: Any, inner: Any, kernels: Any) -> None:
    @inner.register_impl("inp", inplace=True)
    @op.register_impl("inp", inplace=True)
    def inp(x: Tensor, x_residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        kernels.add_(x, x_residual, weight)
        return x, x_residual

    @inner.register_impl("aten", inplace=True)
    @op.register_impl("aten", inplace=True)
    def aten(x: Tensor, x_residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x_residual.add_(x)
        x.copy_(x_residual)
        x.mul_(weight)
        return x, x_residual

    @op.register_impl("nested", inplace=True)
    def nested(x: Tensor, x_residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return inner.maybe_inplace(x * 1, x_residual, weight)

    @op.register_impl("fresh")
    def fresh(x: Tensor, x_residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y, s = torch.empty(x.shape, dtype=x.dtype, device=x.device), torch.zeros_like(x).contiguous()
        kernels.add_into(y, s, x, x_residual, weight)
        return y, s

    @op.register_impl("out")
    def out(x: Tensor, x_residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.added(x, x_residual, weight)

    def is_static(x: Tensor, x_residual: Tensor, weight: Tensor) -> bool:
        return isinstance(x.shape[0], int) and x.shape[0] > 1  # without the first row, a row may be left: a guard

    @op.register_impl("halves", inplace=True, supports_args=is_static)
    def halves(x: Tensor, x_residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        for part in (slice(0, 1), slice(1, None)):
            kernels.add_(x[part], x_residual[part], weight if x.dim() > 1 else weight[part])
        return x, x_residual

    @op.register_impl("into_activation", inplace=True)
    def into_activation(x: Tensor, x_residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.empty_like(x)
        kernels.add_into(y, x_residual, x, x_residual, weight)
        return y, x_residual


def _provide_scale(op: Any, kernels: Any) -> None:
    @op.register_impl("inp", inplace=True)
    def inp(x: Tensor, factor: float = 2.0) -> Tensor:
        kernels.scale_(x, factor)
        return x

    @op.register_impl("aten", inplace=True)
    def aten(x: Tensor, factor: float = 2.0) -> Tensor:
        return x.mul_(factor)

    @op.register_impl("twice", inplace=True)
    def twice(x: Tensor, factor: float = 2.0) -> Tensor:
        kernels.scale_(x, factor)
        y = x + 1
        kernels.scale_(x, 0.0)
        return y - 1

    @op.register_impl("out")
    def out(x: Tensor, factor: float = 2.0) -> Tensor:
        return kernels.scaled(x, factor)

    @op.register_impl("fresh")
    def fresh(x: Tensor, factor: float = 2.0) -> Tensor:
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        kernels.scale_into(y, x, factor)
        return y

    @op.register_impl("lazy")
    def lazy(x: Tensor, factor: float = 2.0) -> Tensor:
        return x if factor == 1.0 else x * factor

    @op.register_impl("strided")
    def strided(x: Tensor, factor: float = 2.0) -> Tensor:
        return (x.transpose(0, -1).contiguous() * factor).transpose(0, -1)


def _strided_spread(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    both = torch.stack((x * 0.5, x + 1), -1)
    return both[..., 0], x.sum(-1) * 0.25, both[..., 1].transpose(0, -1)


@contextmanager
def standard_providers() -> Iterator[None]:
    """Give the standard ops providers of ours, for a while."""
    kernels = getattr(torch.ops, NAMESPACE)
    ops = ir.ops

    def in_place(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        kernels.norm_(x, x_residual, weight, epsilon)
        return x, x_residual

    def nested(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> tuple[Tensor, Tensor]:
        x_residual.add_(x)
        return ops.rms_norm(x_residual, weight, epsilon), x_residual

    def out(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
        return kernels.normed(x, weight, epsilon)

    def fresh(x: Tensor) -> Tensor:
        y = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype, device=x.device)
        kernels.gate_into(y, x)
        return y

    added = (
        (ops.fused_add_rms_norm, "fuzz_inp", in_place, True),
        (ops.fused_add_rms_norm, "fuzz_nested", nested, True),
        (ops.rms_norm, "fuzz_out", out, False),
        (ops.silu_and_mul, "fuzz_fresh", fresh, False),
    )

    def both_whole(
        x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
    ) -> bool:
        return variance_size is None

    def whole(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
        return variance_size is None

    asks = {ops.fused_add_rms_norm: both_whole, ops.rms_norm: whole}
    for op, provider, function, inplace in added:
        op.register_impl(provider, inplace=inplace, supports_args=asks.get(op))(function)
    try:
        yield
    finally:
        for op, provider, _, _ in added:
            op.unregister_impl(provider)


def priorities(numbers: Sequence[int]) -> dict[str, list[str]]:
    """The provider of each op that a program's numbers choose; where it does not take a call, native does."""
    found = declare().providers
    chosen = {op: names[number % len(names)] for number, (op, names) in zip(numbers, found.items(), strict=True)}
    fused = fused_priorities(numbers)
    return fused | {
        op: ([] if name == "native" else [name]) + fused.get(op, ["native"])
        for op, name in chosen.items()
        if name in getattr(ir.ops, op).impls
    }


class Meaning:
    """An op as a torch function of its own: outputs are contiguous and share memory with nothing."""

    def __init__(self, op: Any) -> None:
        self.op = op

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.op.native(*(_apart(a) for a in args), **{name: _apart(a) for name, a in kwargs.items()})
        return tuple(r.contiguous() for r in result) if isinstance(result, tuple) else result.contiguous()

    maybe_inplace = __call__


def _apart(argument: Any) -> Any:
    return argument.clone() if isinstance(argument, Tensor) else argument


class Overwriting:
    """An op that tells autograd that each tensor given away was overwritten, as a kernel in place may do.

    A call that needs a gradient overwrites nothing.
    """

    def __init__(self, op: Any) -> None:
        self.op = op

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.op(*args, **kwargs)

    def maybe_inplace(self, *args: Any, **kwargs: Any) -> Any:
        results = self.op(*args, **kwargs)
        values = dict(zip(self.op.signature.parameters, self.op.bind(args, kwargs), strict=True))
        if not any(isinstance(value, Tensor) and value.requires_grad for value in values.values()):
            torch.autograd.graph.increment_version([values[name] for name in self.op.activations])
        return results


def overwriting() -> dict[str, Any]:
    """What stands for the ops in `scope` where it is asked what autograd refuses."""
    return {name: Overwriting(op) for name, op in declare().called.items()}


def scope(device: str, *, meanings: bool) -> dict[str, Any]:
    """What the source of a program refers to: the ops, or their meanings."""
    called = declare().called
    angles = torch.linspace(0, 3, 128).reshape(8, 16)
    # As many positions as rows may be: on a GPU an index beyond the table ends the process.
    table = torch.cat((angles[:, :8].cos(), angles[:, 8:].sin()), -1).repeat(64, 1).to(device)
    ops = {name: Meaning(op) for name, op in called.items()} if meanings else called
    scales = torch.tensor((0.02, 0.5, 0.004), device=device)
    return {"torch": torch, "user": getattr(torch.ops, NAMESPACE), "table": table, "scales": scales, **ops}
