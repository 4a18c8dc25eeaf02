"""Owns the functional torch ops `torch.ops.irframework_aiter_rocm.*` that stand for AITER's functions in graphs.

Each allocates what AITER writes to, so no caller's tensor is ever overwritten. The kernels are also called directly,
in eager mode. Importing this module does not import AITER.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from irframework_aiter_rocm.library import aiter_function

NAMESPACE = "irframework_aiter_rocm"
_GATED = {"silu": "silu_and_mul", "none": "gelu_and_mul", "tanh": "gelu_tanh_and_mul"}
_CODES = torch.float8_e4m3fn
_LARGEST_CODE = torch.finfo(_CODES).max
_LARGEST_CALL = 2**31 - 1  # AITER's quantisation counts elements in 32 bits
_library: Any = torch.library.Library(NAMESPACE, "FRAGMENT")


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """AITER's `rmsnorm2d_fwd` over contiguous rows, `[..., hidden]`."""
    if x.numel() == 0:  # a launch of nothing is an error on ROCm
        return torch.empty_like(x)
    y: Tensor = aiter_function("rmsnorm", "rmsnorm2d_fwd")(_rows(x), weight, epsilon)
    return y.view(x.shape)


def fused_add_rms_norm(x: Tensor, x_residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """AITER's `rmsnorm2d_fwd_with_add` over contiguous rows; returns the norm and the sum."""
    y, residual = torch.empty_like(x), torch.empty_like(x)
    if x.numel():
        add = aiter_function("rmsnorm", "rmsnorm2d_fwd_with_add")
        add(_rows(y), _rows(x), _rows(x_residual), _rows(residual), weight, epsilon)
    return y, residual


def gated(x: Tensor, activation: str) -> Tensor:
    """AITER's gated activation over contiguous rows, `[..., 2 * hidden]`; `silu`, `none` or `tanh`."""
    y = _halved(x)
    if y.numel():
        aiter_function("activation", _GATED[activation])(_rows(y), _rows(x))
    return y


def static_quant(x: Tensor, scale: Tensor) -> Tensor:
    """AITER's `static_per_tensor_quant` over contiguous rows, after a clamp to what has a code.

    The conversion of AITER's kernel does not saturate: what is too large would become NaN. The bound may be rounded up
    in the dtype of x, by less than what the conversion rounds down to the largest code.
    """
    codes = torch.empty_like(x, dtype=_CODES)
    if x.numel() == 0:
        return codes
    bound = (scale.reshape(()) * _LARGEST_CODE).clamp_max(torch.finfo(x.dtype).max)
    quantise = aiter_function("quant", "static_per_tensor_quant")
    rows = max(_LARGEST_CALL // x.shape[-1], 1)
    for out, part in zip(_rows(codes).split(rows), _rows(x.clamp(-bound, bound)).split(rows), strict=True):
        quantise(out, part, scale)
    return codes


def _halved(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _like_x(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x.new_empty(x.shape)


def _like_x_twice(x: Tensor, x_residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _codes_like_x(x: Tensor, scale: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=_CODES)


def _halved_whatever(x: Tensor, activation: str) -> Tensor:
    return _halved(x)


def _define(schema: str, kernel: Callable[..., object], fake: Callable[..., object]) -> None:
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)


_define("rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor", rms_norm, _like_x)
_define(
    "fused_add_rms_norm(Tensor x, Tensor x_residual, Tensor weight, float epsilon) -> (Tensor, Tensor)",
    fused_add_rms_norm,
    _like_x_twice,
)
_define("gated(Tensor x, str activation) -> Tensor", gated, _halved_whatever)
_define("static_quant(Tensor x, Tensor scale) -> Tensor", static_quant, _codes_like_x)
