"""Owns which calls the kernels of further quantisations take, and the functions that are registered for them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

import irframework as ir
from irframework_triton_kernels.conditions import FLOATS, launches
from irframework_triton_kernels.tiles import LONGEST_GROUP


def tensor_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.tensor_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = launches().tensor_quant_fp8(x)
    return pair


def group_quant_fp8(
    x: Tensor, group_size: int = 128, column_major_scales: bool = False, power_of_two_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.group_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = launches().group_quant_fp8(x, group_size, column_major_scales, power_of_two_scales)
    return pair


def dynamic_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.dynamic_quant_int8`."""
    pair: tuple[Tensor, Tensor] = launches().dynamic_quant_int8(x)
    return pair


def groups_fit(
    x: Tensor, group_size: int = 128, column_major_scales: bool = False, power_of_two_scales: bool = False
) -> bool | ir.Rejected:
    """A group is held in registers as a whole. One that does not fit rows is a mistake that native explains."""
    return groups_divide(x.shape[-1], x.dim(), group_size, column_major_scales)


def groups_divide(hidden: int, dims: int, group_size: int, column_major_scales: bool) -> bool | ir.Rejected:
    """Whether rows of codes, `hidden` long, in a tensor of so many dimensions, are whole groups that a kernel takes."""
    if not 0 < group_size <= LONGEST_GROUP:
        return ir.reject(f"group_size is {group_size}, needs 1 to {LONGEST_GROUP}")
    if hidden % group_size:
        return ir.reject(f"x has a last dimension of {hidden}, must be a multiple of group_size={group_size}")
    if column_major_scales and dims < 2:
        return ir.reject(f"x has {dims} dimensions, column-major scales need 2 or more")
    return True


def register(add: Callable[..., Any]) -> None:
    """Register the quantisations by `add`, a function of an implementation and its conditions."""
    rows = ir.supports(dtype=FLOATS, row_contiguous=("x",))
    add(tensor_quant_fp8, rows, batch_invariant=False)  # by its meaning
    add(group_quant_fp8, rows & groups_fit)
    add(dynamic_quant_int8, rows)
