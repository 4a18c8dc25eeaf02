"""Owns which calls the kernels take that end in a scale for each group, or are gated by GELU, and what is registered.

The other fused quantisations are in `implementations`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import irframework as ir
from irframework_triton_kernels.conditions import ADD_NORM, FLOATS, GATED, NORM, launches
from irframework_triton_kernels.quantizations import groups_divide, groups_fit
from irframework_triton_kernels.tiles import LONGEST_PART

# --- GELU ---------------------------------------------------------------------------------------------------------


def gelu_and_mul_static_quant_fp8(x: Tensor, scale: Tensor, approximate: str = "none") -> Tensor:
    """See `irframework.ops.gelu_and_mul_static_quant_fp8`."""
    q: Tensor = launches().gelu_and_mul_static_quant_fp8(x, scale, approximate)
    return q


def gelu_and_mul_dynamic_quant_fp8(x: Tensor, approximate: str = "none") -> tuple[Tensor, Tensor]:
    """See `irframework.ops.gelu_and_mul_dynamic_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = launches().gelu_and_mul_dynamic_quant_fp8(x, approximate)
    return pair


# --- groups -------------------------------------------------------------------------------------------------------


def silu_and_mul_group_quant_fp8(
    x: Tensor, group_size: int = 128, column_major_scales: bool = False, power_of_two_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.silu_and_mul_group_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = launches().gated_group_quant_fp8(
        x, "silu", group_size, column_major_scales, power_of_two_scales
    )
    return pair


def gelu_and_mul_group_quant_fp8(
    x: Tensor,
    approximate: str = "none",
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.gelu_and_mul_group_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = launches().gated_group_quant_fp8(
        x, approximate, group_size, column_major_scales, power_of_two_scales
    )
    return pair


def rms_norm_group_quant_fp8(
    x: Tensor,
    weight: Tensor | None,
    epsilon: float,
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.rms_norm_group_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = launches().rms_norm_group_quant_fp8(
        x, weight, epsilon, group_size, column_major_scales, power_of_two_scales
    )
    return pair


def fused_add_rms_norm_group_quant_fp8(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_group_quant_fp8`."""
    outputs: tuple[Tensor, Tensor, Tensor] = launches().fused_add_rms_norm_group_quant_fp8(
        x, x_residual, weight, epsilon, group_size, column_major_scales, power_of_two_scales
    )
    return outputs


def fused_add_rms_norm_group_quant_fp8_inplace(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_group_quant_fp8`; overwrites x_residual with the sum."""
    q, scales = launches().fused_add_rms_norm_group_quant_fp8_inplace(
        x, x_residual, weight, epsilon, group_size, column_major_scales, power_of_two_scales
    )
    return q, scales, x_residual


# --- what the kernels take ----------------------------------------------------------------------------------------


def gated_groups_fit(
    x: Tensor, group_size: int = 128, column_major_scales: bool = False, power_of_two_scales: bool = False
) -> bool | ir.Rejected:
    """See `groups_fit`; groups are those of one half of a row."""
    return groups_divide(x.shape[-1] // 2, x.dim(), group_size, column_major_scales)


def gelu_groups_fit(
    x: Tensor,
    approximate: str = "none",
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> bool | ir.Rejected:
    """See `gated_groups_fit`."""
    return gated_groups_fit(x, group_size, column_major_scales, power_of_two_scales)


def normed_groups_fit(
    x: Tensor,
    weight: Tensor | None,
    epsilon: float,
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> bool | ir.Rejected:
    """A row is held as a whole, and divided into groups there, which must be powers of two."""
    if not 0 < group_size <= LONGEST_PART or group_size & (group_size - 1):
        return ir.reject(f"group_size is {group_size}, needs a power of two of at most {LONGEST_PART}")
    return groups_fit(x, group_size, column_major_scales, power_of_two_scales)


def add_normed_groups_fit(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> bool | ir.Rejected:
    """See `normed_groups_fit`."""
    return normed_groups_fit(x, weight, epsilon, group_size, column_major_scales, power_of_two_scales)


def register(add: Callable[..., Any]) -> None:
    """Register the fused quantisations by `add`, a function of an implementation and its conditions."""
    values = {"x": FLOATS, "weight": FLOATS}
    scaled = {"x": FLOATS, "scale": (torch.float32,)}
    gelu: dict[str, Any] = {"one_of": {"approximate": ("none", "tanh")}, **GATED}
    add(gelu_and_mul_static_quant_fp8, ir.supports(dtype=scaled, one_element=("scale",), **gelu))
    add(gelu_and_mul_dynamic_quant_fp8, ir.supports(dtype=FLOATS, **gelu))
    add(gelu_and_mul_group_quant_fp8, ir.supports(dtype=FLOATS, **gelu) & gelu_groups_fit)
    add(silu_and_mul_group_quant_fp8, ir.supports(dtype=FLOATS, **GATED) & gated_groups_fit)
    add(rms_norm_group_quant_fp8, ir.supports(dtype=values, **NORM) & normed_groups_fit)
    add(
        fused_add_rms_norm_group_quant_fp8,
        ir.supports(dtype=values, **ADD_NORM) & add_normed_groups_fit,
        fused_add_rms_norm_group_quant_fp8_inplace,
    )
