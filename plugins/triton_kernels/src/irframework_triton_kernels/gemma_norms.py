"""Owns which calls the norms with a weight around one take, and the functions that are registered for them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

import irframework as ir
from irframework_triton_kernels.conditions import ADD_NORM, FLOATS, NORM, launches


def gemma_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """See `irframework.ops.gemma_rms_norm`."""
    y: Tensor = launches().gemma_rms_norm(x, weight, epsilon)
    return y


def fused_add_gemma_rms_norm(x: Tensor, x_residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_gemma_rms_norm`."""
    pair: tuple[Tensor, Tensor] = launches().fused_add_gemma_rms_norm(x, x_residual, weight, epsilon)
    return pair


def fused_add_gemma_rms_norm_inplace(
    x: Tensor, x_residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_gemma_rms_norm`; overwrites x with the norm and x_residual with the sum."""
    launches().fused_add_gemma_rms_norm_inplace(x, x_residual, weight, epsilon)
    return x, x_residual


def register(add: Callable[..., Any]) -> None:
    """Register the norms by `add`, a function of an implementation, its conditions, and one that overwrites."""
    values = {"x": FLOATS, "weight": FLOATS}
    add(gemma_rms_norm, ir.supports(dtype=values, **NORM))
    add(fused_add_gemma_rms_norm, ir.supports(dtype=values, **ADD_NORM), fused_add_gemma_rms_norm_inplace)
