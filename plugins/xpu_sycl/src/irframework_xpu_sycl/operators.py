"""Owns the torch ops `torch.ops.irframework_xpu_sycl.*` that stand for vllm-xpu-kernels' ops in graphs.

Each allocates what the kernels write to; `fused_add_rms_norm_` alone overwrites what it is given, and says so. They do
not depend on vllm-xpu-kernels until they are called.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "irframework_xpu_sycl"
_GATED = {"silu": "silu_and_mul", "none": "gelu_and_mul", "tanh": "gelu_tanh_and_mul"}
_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")


def _rows(x: Tensor) -> Tensor:
    """The kernels read two to four dimensions."""
    return x.unsqueeze(0) if x.dim() == 1 else x


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Norm rows with stride 1 in the last dimension into a new tensor."""
    y = x.new_empty(x.shape)
    if x.numel():  # a launch of nothing is an error
        torch.ops._C.rms_norm.default(_rows(y), _rows(x), weight, epsilon)
    return y


def fused_add_rms_norm_(x: Tensor, x_residual: Tensor, weight: Tensor, epsilon: float) -> None:
    """Overwrite contiguous x with the norm of the sum, and contiguous x_residual with the sum."""
    if x.numel():
        torch.ops._C.fused_add_rms_norm.default(_rows(x), _rows(x_residual), weight, epsilon)


def gated(x: Tensor, activation: str) -> Tensor:
    """Gate contiguous rows, `[..., 2 * hidden]`, into a new tensor; `silu`, `none` or `tanh`."""
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    if y.numel():
        getattr(torch.ops._C, _GATED[activation]).default(y, x)
    return y


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, cos_sin_cache: Tensor, head_size: int, is_neox: bool
) -> tuple[Tensor, Tensor]:
    """Rotate copies of query and key; without a key, the second is an empty tensor `[0]`."""
    rotated = query.clone(memory_format=torch.contiguous_format)
    rotated_key = None if key is None else key.clone(memory_format=torch.contiguous_format)
    if rotated.numel():
        torch.ops._C.rotary_embedding.default(positions, rotated, rotated_key, head_size, cos_sin_cache, is_neox)
    return rotated, query.new_empty(0) if rotated_key is None else rotated_key


# ---- quantisations -----------------------------------------------------------------------------------------------


def _aligned(x: Tensor) -> Tensor:
    """The kernels read vectors of up to 16 bytes, and not all of them look where a tensor begins."""
    return x.clone() if x.data_ptr() % 16 else x


def _codes_like(x: Tensor, columns: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], columns), dtype=torch.float8_e4m3fn)


def _scales_like(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def static_quant(x: Tensor, scale: Tensor) -> Tensor:
    """Quantise contiguous rows with a given scale."""
    q = _codes_like(x, x.shape[-1])
    if x.numel():
        torch.ops._C.static_scaled_fp8_quant.default(_rows(q), _rows(_aligned(x)), scale)
    return q


def dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each contiguous row with a scale of its own."""
    q, scales = _codes_like(x, x.shape[-1]), _scales_like(x)
    if x.numel():
        torch.ops._C.dynamic_per_token_scaled_fp8_quant.default(_rows(q), _rows(_aligned(x)), _rows(scales), None)
    return q, scales


def rms_norm_static_quant(x: Tensor, weight: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    """Norm contiguous rows, into codes of a given scale."""
    q = _codes_like(x, x.shape[-1])
    if x.numel():
        rows = _rows(_aligned(x))
        torch.ops._C.rms_norm_static_fp8_quant.default(_rows(q), rows, _aligned(weight), scale, epsilon)
    return q


def fused_add_rms_norm_static_quant_(
    x: Tensor, x_residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float
) -> Tensor:
    """Overwrite contiguous x_residual with the sum; the norm of it becomes codes of a given scale."""
    q = _codes_like(x, x.shape[-1])
    if x.numel():
        total = _aligned(x_residual)
        torch.ops._C.fused_add_rms_norm_static_fp8_quant.default(
            _rows(q), _rows(_aligned(x)), _rows(total), _aligned(weight), scale, epsilon
        )
        if total is not x_residual:
            x_residual.copy_(total)
    return q


def silu_static_quant(x: Tensor, scale: Tensor) -> Tensor:
    """Gate contiguous rows by SiLU, into codes of a given scale."""
    q = _codes_like(x, x.shape[-1] // 2)
    if q.numel():
        torch.ops._C.silu_and_mul_quant.default(_rows(q), _rows(_aligned(x)), scale)
    return q


# ---- as torch ops ------------------------------------------------------------------------------------------------


def _like_x(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x.new_empty(x.shape)


def _nothing(x: Tensor, x_residual: Tensor, weight: Tensor, epsilon: float) -> None:
    return None


def _halved(x: Tensor, activation: str) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _like_heads(
    positions: Tensor, query: Tensor, key: Tensor | None, cos_sin_cache: Tensor, head_size: int, is_neox: bool
) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), query.new_empty(0) if key is None else key.new_empty(key.shape)


def _define(schema: str, kernel: Callable[..., object], fake: Callable[..., object]) -> None:
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


_define("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor", rms_norm, _like_x)
_define(
    "fused_add_rms_norm_(Tensor(a!) x, Tensor(b!) x_residual, Tensor weight, float epsilon) -> ()",
    fused_add_rms_norm_,
    _nothing,
)
_define("gated(Tensor x, str activation) -> Tensor", gated, _halved)
_define(
    "rotary_embedding(Tensor positions, Tensor query, Tensor? key, Tensor cos_sin_cache, int head_size, bool is_neox) "
    "-> (Tensor, Tensor)",
    rotary_embedding,
    _like_heads,
)
_define("static_quant(Tensor x, Tensor scale) -> Tensor", static_quant, lambda x, scale: _codes_like(x, x.shape[-1]))
_define(
    "dynamic_quant(Tensor x) -> (Tensor, Tensor)",
    dynamic_quant,
    lambda x: (_codes_like(x, x.shape[-1]), _scales_like(x)),
)
_define(
    "rms_norm_static_quant(Tensor x, Tensor weight, Tensor scale, float epsilon) -> Tensor",
    rms_norm_static_quant,
    lambda x, *_: _codes_like(x, x.shape[-1]),
)
_define(
    "fused_add_rms_norm_static_quant_(Tensor x, Tensor(a!) x_residual, Tensor weight, Tensor scale, float epsilon) "
    "-> Tensor",
    fused_add_rms_norm_static_quant_,
    lambda x, *_: _codes_like(x, x.shape[-1]),
)
_define(
    "silu_static_quant(Tensor x, Tensor scale) -> Tensor",
    silu_static_quant,
    lambda x, scale: _codes_like(x, x.shape[-1] // 2),
)
