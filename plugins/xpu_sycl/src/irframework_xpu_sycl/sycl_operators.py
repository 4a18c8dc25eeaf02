"""Owns the torch ops `torch.ops.irframework_xpu_sycl.sycl_*`: our own kernels, as graphs see them.

Each allocates its results, which are contiguous; ops whose name ends in `_` overwrite what their schema says, and
nothing else. What the kernels do not take is refused by the predicates of `sycl_implementations`; shapes that only a
call can tell are checked here, before anything is launched.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from irframework_xpu_sycl.sycl_kernels import launch_rotary, launch_rows

NAMESPACE = "irframework_xpu_sycl"
FP8 = torch.float8_e4m3fn
_GATES = {"silu": "silu", "none": "gelu", "tanh": "gelu_tanh"}
_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")


def _codes_like(x: Tensor, columns: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], columns), dtype=FP8)


def _scales_like(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _kernel(name: str, x: Tensor, weight: Tensor | None) -> str:
    return f"{name}_own" if weight is None or weight.dtype is x.dtype else f"{name}_float"


# ---- norms -------------------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    """Norm rows into a new tensor."""
    y = x.new_empty(x.shape)
    launch_rows(_kernel("norm", x, weight), x, x.shape[-1], weight=weight, y=y, epsilon=epsilon)
    return y


def fused_add_rms_norm_(x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    """Overwrite x with the norm of the sum, and x_residual with the sum."""
    name, columns = _kernel("norm", x, weight), x.shape[-1]
    launch_rows(name, x, columns, residual=x_residual, weight=weight, y=x, total=x_residual, epsilon=epsilon)


def rms_norm_static_quant(x: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float) -> Tensor:
    """Norm rows, into codes of a given scale."""
    q = _codes_like(x, x.shape[-1])
    name = _kernel("norm_quant", x, weight)
    launch_rows(name, x, x.shape[-1], weight=weight, scale=scale, codes=q, epsilon=epsilon)
    return q


def rms_norm_dynamic_quant(x: Tensor, weight: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """Norm rows, into codes with a scale for each row."""
    q, scales = _codes_like(x, x.shape[-1]), _scales_like(x)
    name = _kernel("norm_quant", x, weight)
    launch_rows(name, x, x.shape[-1], weight=weight, codes=q, scales=scales, epsilon=epsilon)
    return q, scales


def fused_add_rms_norm_static_quant_(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float
) -> Tensor:
    """Overwrite x_residual with the sum; the norm of it becomes codes of a given scale."""
    q, name = _codes_like(x, x.shape[-1]), _kernel("norm_quant", x, weight)
    more: dict[str, Any] = {"residual": x_residual, "total": x_residual, "epsilon": epsilon}
    launch_rows(name, x, x.shape[-1], weight=weight, scale=scale, codes=q, **more)
    return q


def fused_add_rms_norm_dynamic_quant_(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Overwrite x_residual with the sum; the norm of it becomes codes with a scale for each row."""
    q, scales, name = _codes_like(x, x.shape[-1]), _scales_like(x), _kernel("norm_quant", x, weight)
    more: dict[str, Any] = {"residual": x_residual, "total": x_residual, "epsilon": epsilon}
    launch_rows(name, x, x.shape[-1], weight=weight, codes=q, scales=scales, **more)
    return q, scales


# ---- gates and quantisations -------------------------------------------------------------------------------------


def gated(x: Tensor, gate: str) -> Tensor:
    """Gate rows `[gate, up]` into a new tensor; `silu`, `none` (GELU) or `tanh` (its approximation)."""
    half = x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], half))
    launch_rows(_GATES[gate], x, half, y=y)
    return y


def silu_static_quant(x: Tensor, scale: Tensor) -> Tensor:
    """Gate rows by SiLU, into codes of a given scale."""
    q = _codes_like(x, x.shape[-1] // 2)
    launch_rows("silu_quant", x, q.shape[-1], scale=scale, codes=q)
    return q


def silu_dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Gate rows by SiLU, into codes with a scale for each row."""
    q, scales = _codes_like(x, x.shape[-1] // 2), _scales_like(x)
    launch_rows("silu_quant", x, q.shape[-1], codes=q, scales=scales)
    return q, scales


def static_quant(x: Tensor, scale: Tensor) -> Tensor:
    """Quantise with a given scale."""
    q = _codes_like(x, x.shape[-1])
    launch_rows("quant", x, x.shape[-1], scale=scale, codes=q)
    return q


def dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row with a scale of its own."""
    q, scales = _codes_like(x, x.shape[-1]), _scales_like(x)
    launch_rows("quant", x, x.shape[-1], codes=q, scales=scales)
    return q, scales


# ---- rotary_embedding --------------------------------------------------------------------------------------------


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, cos_sin_cache: Tensor, head_size: int, is_neox: bool
) -> tuple[Tensor, Tensor]:
    """Rotate query and key into new tensors; without a key, the second is an empty tensor `[0]`.

    A position outside the cache gives NaN.

    Raises:
        ValueError: The leading dimensions of query or key are not those of positions.
    """
    for name, x in (("query", query), ("key", key)):
        if x is not None and x.shape[: positions.dim()] != positions.shape:
            raise ValueError(
                f"irframework_xpu_sycl::sycl_rotary_embedding: {name} has shape {tuple(x.shape)}, its leading "
                f"dimensions must be those of positions, {tuple(positions.shape)}"
            )
    out = query.new_empty(query.shape)
    key_out = None if key is None else key.new_empty(key.shape)
    name = _kernel("rotary", query, cos_sin_cache)
    launch_rotary(name, positions, query, key, cos_sin_cache, out, key_out, head_size, is_neox)
    return out, query.new_empty(0) if key_out is None else key_out


# ---- as torch ops ------------------------------------------------------------------------------------------------


def _rotated(positions: Tensor, query: Tensor, key: Tensor | None, *_: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(0) if key is None else key.new_empty(key.shape)


def _like_x(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _half(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _codes(x: Tensor, *_: Any) -> Tensor:
    return _codes_like(x, x.shape[-1])


def _half_codes(x: Tensor, *_: Any) -> Tensor:
    return _codes_like(x, x.shape[-1] // 2)


def _nothing(*_: Any) -> None:
    return None


def _with_scales(codes: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda x, *_: (codes(x), _scales_like(x))


_HEADS = "Tensor positions, Tensor query, Tensor? key, Tensor cos_sin_cache, int head_size, bool is_neox"
_SUM = "Tensor x, Tensor(a!) x_residual, Tensor? weight"
_OPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "rms_norm(Tensor x, Tensor? weight, float epsilon) -> Tensor": (rms_norm, _like_x),
    "fused_add_rms_norm_(Tensor(a!) x, Tensor(b!) x_residual, Tensor? weight, float epsilon) -> ()": (
        fused_add_rms_norm_,
        _nothing,
    ),
    "rms_norm_static_quant(Tensor x, Tensor? weight, Tensor scale, float epsilon) -> Tensor": (
        rms_norm_static_quant,
        _codes,
    ),
    "rms_norm_dynamic_quant(Tensor x, Tensor? weight, float epsilon) -> (Tensor, Tensor)": (
        rms_norm_dynamic_quant,
        _with_scales(_codes),
    ),
    f"fused_add_rms_norm_static_quant_({_SUM}, Tensor scale, float epsilon) -> Tensor": (
        fused_add_rms_norm_static_quant_,
        _codes,
    ),
    f"fused_add_rms_norm_dynamic_quant_({_SUM}, float epsilon) -> (Tensor, Tensor)": (
        fused_add_rms_norm_dynamic_quant_,
        _with_scales(_codes),
    ),
    "gated(Tensor x, str gate) -> Tensor": (gated, _half),
    "silu_static_quant(Tensor x, Tensor scale) -> Tensor": (silu_static_quant, _half_codes),
    "silu_dynamic_quant(Tensor x) -> (Tensor, Tensor)": (silu_dynamic_quant, _with_scales(_half_codes)),
    "static_quant(Tensor x, Tensor scale) -> Tensor": (static_quant, _codes),
    "dynamic_quant(Tensor x) -> (Tensor, Tensor)": (dynamic_quant, _with_scales(_codes)),
    f"rotary_embedding({_HEADS}) -> (Tensor, Tensor)": (rotary_embedding, _rotated),
}
for _schema, (_body, _fake) in _OPS.items():
    _name = f"sycl_{_schema.partition('(')[0]}"
    _library.define(f"sycl_{_schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=_library)
