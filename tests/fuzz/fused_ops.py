"""Fused ops for random programs: some of the fuzzer's own, and providers that take every op that is looked for.

Owns the meanings that these providers run. Each is written anew in float64, rounded where the op's documentation says
so, and is one opaque torch op: it shares no line with the native bodies that the engine matches, so it cannot repeat a
mistake of theirs. What programs are made of is in `fusable.py`; what a search may do to a graph in `fusing.py`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache, partial, wraps
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

import irframework as ir

PROVIDER, OVERWRITING = "fuzz_fused", "fuzz_fused_inplace"
NAMESPACE = "irfuzz_fused"
_CODES, _LARGEST = torch.float8_e4m3fn, 448.0

# --- the fuzzer's own ------------------------------------------------------------------------------------------------


def shift(x: Tensor, by: Tensor) -> Tensor:
    """Add a vector to rows."""
    return x + by


def squash(x: Tensor, factor: float = 0.5) -> Tensor:
    """A multiple of the hyperbolic tangent."""
    return torch.tanh(x) * factor


def peak(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows less their largest element, and that."""
    largest = x.amax(-1, keepdim=True)
    return x - largest, largest


@cache
def declare_fused() -> dict[str, Any]:
    """Declare three base ops and four fused ones, once per process; by the names that programs use."""
    base = {
        "shift": ir.register_op(name="fuzz_shift")(shift),
        "squash": ir.register_op(name="fuzz_squash")(squash),
        "peak": ir.register_op(name="fuzz_peak")(peak),
    }

    @ir.register_op(name="fuzz_squash_shift", fuse=True)
    def squash_shift(x: Tensor, factor: float, by: Tensor) -> Tensor:
        return base["shift"](base["squash"](x, factor), by)

    @ir.register_op(name="fuzz_add_squash_peak", fuse=True, allow_inplace=True)
    def add_squash_peak(x: Tensor, x_residual: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
        total = x + x_residual
        lowered, largest = base["peak"](base["squash"](total, factor))
        return lowered, total, largest

    @ir.register_op(name="fuzz_center", fuse=True)
    def center(x: Tensor, weight: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        middle = x.mean(-1, keepdim=True)
        return (x - middle) * weight * factor, middle

    @ir.register_op(name="fuzz_squash_shift_crest", fuse=True)
    def squash_shift_crest(x: Tensor, factor: float, by: Tensor) -> tuple[Tensor, Tensor]:
        return base["shift"](base["squash"](x, factor), by), x.amax(-1, keepdim=True)  # not on the way to the first

    fused = (squash_shift, squash_shift_crest, add_squash_peak, center)
    return base | {op.name.removeprefix("fuzz_"): op for op in fused}


# --- meanings, in float64 --------------------------------------------------------------------------------------------


def _rows(x: Tensor) -> Tensor:
    return x.to(torch.float64, memory_format=torch.contiguous_format)


def _squares(h: Tensor, dtype: torch.dtype) -> Tensor:
    """Their sum, infinite where it is too large for what native adds up in: a program may read any bits as numbers."""
    total: Tensor = torch.linalg.vector_norm(h, dim=-1, keepdim=True).square()
    return total if dtype == torch.float64 else total.float().double()


def _norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    h = _rows(x)
    square = _squares(h[..., :variance_size], x.dtype)
    y = h / torch.sqrt(square / (variance_size or x.shape[-1]) + epsilon)
    if x.dtype != torch.float64:
        y = y.float()
    return (y if weight is None else torch.mul(y.to(weight.dtype), weight)).to(x.dtype)


def _gemma_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    h = _rows(x)
    square = _squares(h, x.dtype)
    return (h / torch.sqrt(square / x.shape[-1] + epsilon) * (weight.double() + 1)).to(x.dtype)


def _add(x: Tensor, other: Tensor) -> Tensor:
    return (_rows(x) + other).to(x.dtype)


def _gate(curve: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    gate, up = _rows(x).chunk(2, -1)
    return (curve(gate).to(x.dtype).double() * up).to(x.dtype)


def _silu(v: Tensor) -> Tensor:
    return v / (1 + torch.exp(-v))


def _gelu(v: Tensor, approximate: str) -> Tensor:
    if approximate == "tanh":
        return v / (1 + torch.exp(-1.5957691216057308 * (v + 0.044715 * v**3)))
    return v * torch.special.ndtr(v)


def _codes(x: Tensor, scale: Tensor) -> Tensor:
    inverse = scale.reciprocal().double()
    h = (_rows(x) * inverse).minimum(inverse.new_tensor(_LARGEST)).maximum(inverse.new_tensor(-_LARGEST))
    return h.float().to(_CODES)


def _static(x: Tensor, scale: Tensor) -> Tensor:
    return _codes(x, scale.reshape(()))


def _groups(
    x: Tensor, group_size: int = 128, column_major_scales: bool = False, power_of_two_scales: bool = False
) -> tuple[Tensor, Tensor]:
    groups = _rows(x).reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
    low, high = torch.aminmax(groups, dim=-1, keepdim=True)
    scale = torch.maximum(-low, high) / _LARGEST
    scale = scale.clamp_min(1 / (_LARGEST * 512))
    if x.dtype != torch.float64 or power_of_two_scales:
        scale = scale.float()
    if power_of_two_scales:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    codes = _codes(groups.to(x.dtype), scale).reshape(x.shape)
    scale = scale.float().squeeze(-1)
    return codes, (scale.transpose(-1, -2) if column_major_scales else scale).contiguous()


def _dynamic(x: Tensor) -> tuple[Tensor, Tensor]:
    return _groups(x, x.shape[-1])


def _rotate_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, cos.dtype)
    first, second = _rows(x).chunk(2, -1)
    straight, crossed = _rows(x) * cos.unsqueeze(2).double(), torch.cat((-second, first), -1) * sin.unsqueeze(2)
    return (straight.to(wide).double() + crossed.to(wide)).to(wide).to(x.dtype)


def _residual(
    norm: Callable[..., Tensor], x: Tensor, x_residual: Tensor, weight: Any, *numbers: Any
) -> tuple[Tensor, ...]:
    total = _add(x, x_residual)
    return norm(total, weight, *numbers), total


@cache
def _meanings() -> dict[str, Callable[..., Any]]:
    silu, gelu = partial(_gate, _silu), lambda x, approximate="none": _gate(partial(_gelu, approximate=approximate), x)
    add_norm = partial(_residual, _norm)

    def behind(pair: tuple[Tensor, Tensor], *rest: Any) -> tuple[Tensor, ...]:
        return (*_groups(pair[0], *rest), pair[1])

    return {
        "rms_norm": _norm,
        "fused_add_rms_norm": add_norm,
        "gemma_rms_norm": _gemma_norm,
        "fused_add_gemma_rms_norm": partial(_residual, _gemma_norm),
        "silu_and_mul": silu,
        "gelu_and_mul": gelu,
        "static_quant_fp8": _static,
        "dynamic_quant_fp8": _dynamic,
        "group_quant_fp8": _groups,
        "apply_rotary_pos_emb": _rotate_half,
        "rms_norm_static_quant_fp8": lambda x, weight, scale, e: _static(_norm(x, weight, e), scale),
        "rms_norm_dynamic_quant_fp8": lambda x, weight, e: _dynamic(_norm(x, weight, e)),
        "rms_norm_group_quant_fp8": lambda x, weight, e, *rest: _groups(_norm(x, weight, e), *rest),
        "fused_add_rms_norm_static_quant_fp8": lambda x, r, weight, scale, e: (
            _static(_norm(_add(x, r), weight, e), scale),
            _add(x, r),
        ),
        "fused_add_rms_norm_dynamic_quant_fp8": lambda x, r, weight, e: behind(add_norm(x, r, weight, e), x.shape[-1]),
        "fused_add_rms_norm_group_quant_fp8": lambda x, r, weight, e, *rest: behind(add_norm(x, r, weight, e), *rest),
        "silu_and_mul_static_quant_fp8": lambda x, scale: _static(silu(x), scale),
        "silu_and_mul_dynamic_quant_fp8": lambda x: _dynamic(silu(x)),
        "silu_and_mul_group_quant_fp8": lambda x, *rest: _groups(silu(x), *rest),
        "gelu_and_mul_static_quant_fp8": lambda x, scale, kind="none": _static(gelu(x, kind), scale),
        "gelu_and_mul_dynamic_quant_fp8": lambda x, kind="none": _dynamic(gelu(x, kind)),
        "gelu_and_mul_group_quant_fp8": lambda x, kind="none", *rest: _groups(gelu(x, kind), *rest),
        "fuzz_squash_shift": _squash_shift,
        "fuzz_squash_shift_crest": lambda x, factor, by: (_squash_shift(x, factor, by), _crest(x)),
        "fuzz_add_squash_peak": _add_squash_peak,
        "fuzz_center": _center,
    }


def _squash_shift(x: Tensor, factor: float, by: Tensor) -> Tensor:
    squashed = (_rows(_rows(x).tanh().to(x.dtype)) * factor).to(x.dtype)
    return (_rows(squashed) + by).to(torch.promote_types(x.dtype, by.dtype))


def _crest(x: Tensor) -> Tensor:
    return x.sort(-1).values[..., -1:].contiguous()


def _add_squash_peak(x: Tensor, x_residual: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
    total = _add(x, x_residual)
    squashed = _rows((_rows(_rows(total).tanh().to(x.dtype)) * factor).to(x.dtype))
    largest = _crest(squashed)
    return (squashed - largest).to(x.dtype), total, largest.to(x.dtype)


def _center(x: Tensor, weight: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    middle = (_rows(x) @ torch.full((x.shape[-1], 1), 1 / x.shape[-1], dtype=torch.float64, device=x.device)).to(
        x.dtype
    )
    wide = torch.promote_types(x.dtype, weight.dtype)
    scaled = ((_rows(x) - middle).to(x.dtype).double() * weight).to(wide)
    return (scaled.double() * factor).to(wide), middle


# --- providers -------------------------------------------------------------------------------------------------------

# Which output the providers that overwrite leave in which activation; one that holds none is set to zero.
_LEFT_IN = {
    "fused_add_rms_norm": {0: "x", 1: "x_residual"},
    "fused_add_gemma_rms_norm": {0: "x", 1: "x_residual"},
    "fused_add_rms_norm_static_quant_fp8": {1: "x_residual"},
    "fused_add_rms_norm_dynamic_quant_fp8": {2: "x_residual"},
    "fused_add_rms_norm_group_quant_fp8": {2: "x_residual"},
    "fuzz_add_squash_peak": {0: "x", 1: "x_residual"},
}


@cache
def _kernels() -> tuple[Library, dict[str, Any], dict[str, Any]]:
    """Opaque torch ops with the schemas of the fused ops: one for each, and one more that overwrites."""
    library = Library(NAMESPACE, "DEF")
    fresh: dict[str, Any] = {}
    overwriting: dict[str, Any] = {}
    declare_fused()
    for name, meaning in _meanings().items():
        schema = str(getattr(ir.ops, name).torch_op._schema).partition("::")[2]
        fresh[name] = _define(library, name, schema, meaning, meaning)
        if name in _LEFT_IN:
            schema = schema.replace("Tensor x, Tensor x_residual", "Tensor(a!) x, Tensor(b!) x_residual")
            count = schema.partition("->")[2].count("Tensor") - len(_LEFT_IN[name])
            schema = f"{name}_{schema[len(name) :].partition('->')[0]}-> ({', '.join(['Tensor'] * count)})"
            own = partial(_others, name, meaning)
            overwriting[name] = _define(library, f"{name}_", schema, partial(_overwrite, name, meaning), own)
    return library, fresh, overwriting


def _define(library: Library, name: str, schema: str, kernel: Any, fake: Any) -> Any:
    library.define(schema)
    library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=library)
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def _others(name: str, meaning: Callable[..., Any], *arguments: Any) -> Any:
    """The outputs that are left in no activation."""
    found = [each for index, each in enumerate(meaning(*arguments)) if index not in _LEFT_IN[name]]
    return found[0] if len(found) == 1 else tuple(found) or None


def _overwrite(name: str, meaning: Callable[..., Any], x: Tensor, x_residual: Tensor, *rest: Any) -> Any:
    outputs = meaning(x, x_residual, *rest)
    x.zero_()
    for index, activation in _LEFT_IN[name].items():
        (x if activation == "x" else x_residual).copy_(outputs[index])
    return _others(name, lambda *_: outputs)


@contextmanager
def fused_providers() -> Iterator[None]:
    """Give every op that is looked for, and whose meaning is known here, a provider that takes all calls."""
    _, fresh, overwriting = _kernels()
    with ExitStack() as added:
        for kernels, provider, inplace in ((fresh, PROVIDER, False), (overwriting, OVERWRITING, True)):
            for name, kernel in kernels.items():
                op = getattr(ir.ops, name)
                calling = _leaving(name, kernel) if inplace else _calling(kernel)
                op.register_impl(provider, inplace=inplace)(wraps(op.native)(calling))
                added.callback(op.unregister_impl, provider)
        yield


def _calling(kernel: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: kernel(*args, **kwargs)


def _leaving(name: str, kernel: Any) -> Callable[..., Any]:
    def call(x: Tensor, x_residual: Tensor, *rest: Any, **more: Any) -> tuple[Tensor, ...]:
        found = kernel(x, x_residual, *rest, **more)
        others = iter(found if isinstance(found, (list, tuple)) else [found])
        count = len(getattr(ir.ops, name).torch_op._schema.returns)
        left = _LEFT_IN[name]
        places = ({"x": x, "x_residual": x_residual}.get(left.get(index, "")) for index in range(count))
        return tuple(next(others) if place is None else place for place in places)

    return call


def fused_priorities(numbers: Sequence[int]) -> dict[str, list[str]]:
    """Who runs each fused op in a program with these numbers; empty where the providers are not registered.

    An op that native runs is not fused, so that what it is made of becomes smaller ones.
    """
    draw = random.Random(repr(numbers))
    found = {}
    for name in _meanings():
        op = getattr(ir.ops, name, None)
        if op is not None and PROVIDER in op.impls:
            kinds = ([], [PROVIDER], [PROVIDER], [PROVIDER], [OVERWRITING if name in _LEFT_IN else PROVIDER])
            found[name] = [*draw.choice(kinds), "native"]
    return found
