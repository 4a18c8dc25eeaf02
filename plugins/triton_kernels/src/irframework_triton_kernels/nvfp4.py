"""Owns which calls the kernels that end in NVFP4 take, and the functions that are registered for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import irframework as ir
from irframework_triton_kernels.conditions import ADD_NORM, FLOATS, NORM, launches
from irframework_triton_kernels.tiles import NVFP4_BLOCK


def quant_nvfp4(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.quant_nvfp4`."""
    pair: tuple[Tensor, Tensor] = launches().quant_nvfp4(x, global_scale)
    return pair


def silu_and_mul_quant_nvfp4(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.silu_and_mul_quant_nvfp4`."""
    pair: tuple[Tensor, Tensor] = launches().gated_quant_nvfp4(x, global_scale, "silu")
    return pair


def rms_norm_quant_nvfp4(
    x: Tensor, weight: Tensor | None, global_scale: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.rms_norm_quant_nvfp4`."""
    pair: tuple[Tensor, Tensor] = launches().rms_norm_quant_nvfp4(x, weight, global_scale, epsilon)
    return pair


def fused_add_rms_norm_quant_nvfp4(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, global_scale: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_quant_nvfp4`."""
    outputs: tuple[Tensor, Tensor, Tensor] = launches().fused_add_rms_norm_quant_nvfp4(
        x, x_residual, weight, global_scale, epsilon
    )
    return outputs


def fused_add_rms_norm_quant_nvfp4_inplace(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, global_scale: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_quant_nvfp4`; overwrites x_residual with the sum."""
    q, scales = launches().fused_add_rms_norm_quant_nvfp4_inplace(x, x_residual, weight, global_scale, epsilon)
    return q, scales, x_residual


def register(add: Callable[..., Any]) -> None:
    """Register the quantisations by `add`, a function of an implementation and its conditions.

    Rows that are no whole number of blocks are a mistake, which native explains.
    """
    scale: dict[str, Any] = {"global_scale": (torch.float32,)}
    values = {"x": FLOATS, "weight": FLOATS}
    blocks: dict[str, Any] = {"one_element": ("global_scale",), "multiple_of": {"x": NVFP4_BLOCK}}
    gated: dict[str, Any] = {"one_element": ("global_scale",), "multiple_of": {"x": 2 * NVFP4_BLOCK}}
    add(quant_nvfp4, ir.supports(dtype={"x": FLOATS} | scale, row_contiguous=("x",), **blocks))
    add(silu_and_mul_quant_nvfp4, ir.supports(dtype={"x": FLOATS} | scale, row_contiguous=("x",), **gated))
    add(rms_norm_quant_nvfp4, ir.supports(dtype=values | scale, **NORM, **blocks))
    add(
        fused_add_rms_norm_quant_nvfp4,
        ir.supports(dtype=values | scale, **ADD_NORM, **blocks),
        fused_add_rms_norm_quant_nvfp4_inplace,
    )
