"""Launches of norms of sums over the processes of a group, and their torch ops.

They are black boxes: what a kernel reads of other processes is no tensor of the call.
"""

from torch import Tensor

import irframework as ir
from irframework.distributed.shared_memory import PROGRAMS, SharedMemory
from irframework.distributed.symmetric_memory import memory_of
from irframework_triton_kernels.kernels.codes import DYNAMIC, STATIC, VALUES
from irframework_triton_kernels.kernels.sums import sum_norm_kernel
from irframework_triton_kernels.launch import norms
from irframework_triton_kernels.launch.call import (
    FP8,
    as_codes,
    as_float,
    is_launching,
    launch,
    new_codes,
    new_like,
    new_scales,
    opaque_op,
    rows_of,
)
from irframework_triton_kernels.tiles import ADD_NORM, power_of_two, row_tile


def sum_and_norm(
    memory: SharedMemory,
    x: Tensor,
    x_residual: Tensor | None,
    weight: Tensor | None,
    y: Tensor,
    residual: Tensor,
    epsilon: float,
    codes: int = VALUES.value,
    scale: Tensor | None = None,
) -> None:
    """Add up the rows of x over the processes, add x_residual, all into residual, and norm that into y.

    Launched also where this process has no rows: all programs of all processes wait for each other.
    """
    x2, xr2 = rows_of(x), rows_of(x if x_residual is None else x_residual)
    rows, hidden = x2.shape
    tile = row_tile(hidden, ADD_NORM)
    tensors = (
        x2, xr2, x2 if weight is None else weight, y, residual, x2 if scale is None else scale, memory.places,
        memory.counts,
    )  # fmt: skip
    numbers = (
        hidden, memory.capacity // x.element_size(), x2.stride(0), xr2.stride(0), as_float(epsilon),
        x_residual is not None, weight is not None, codes, codes != 0 and y.dtype is FP8,
        memory.rank, memory.size, power_of_two(memory.size), tile.rows, tile.block, tile.whole,
    )  # fmt: skip
    launch(sum_norm_kernel, PROGRAMS, tensors, rows, numbers, tile)


def _room(x: Tensor, group: str) -> SharedMemory | None:
    """The memory in which rows are added up by one kernel; None where there is too little, in all processes alike."""
    memory = memory_of(group)
    return memory if memory is not None and x.numel() * x.element_size() <= memory.capacity else None


@opaque_op("all_reduce_rms_norm", ())
def all_reduce_rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, group: str) -> tuple[Tensor, Tensor]:
    """Add up rows over a group and norm them; returns the norm and the sum."""
    y, residual = new_like(x), new_like(x)
    if not is_launching() or not x.numel():
        return y, residual
    memory = _room(x, group)
    if memory is None:
        residual = ir.ops.all_reduce.native(x, group)
        return norms.rms_norm(residual, weight, epsilon, None), residual
    sum_and_norm(memory, x, None, weight, y, residual, epsilon)
    return y, residual


@opaque_op("all_reduce_fused_add_rms_norm", ())
def all_reduce_fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, group: str
) -> tuple[Tensor, Tensor]:
    """Add up rows over a group, add a residual and norm them; returns the norm and the sum."""
    y, residual = new_like(x), new_like(x)
    if not is_launching() or not x.numel():
        return y, residual
    memory = _room(x, group)
    if memory is None:
        pair: tuple[Tensor, Tensor] = norms.fused_add_rms_norm(
            ir.ops.all_reduce.native(x, group), x_residual, weight, epsilon, None
        )
        return pair
    sum_and_norm(memory, x, x_residual, weight, y, residual, epsilon)
    return y, residual


@opaque_op("all_reduce_fused_add_rms_norm_static_quant_fp8", ())
def all_reduce_fused_add_rms_norm_static_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float, group: str
) -> tuple[Tensor, Tensor]:
    """Add up rows over a group, add a residual and norm them into codes under a scale; returns these and the sum."""
    q, residual = new_codes(x), new_like(x)
    if not is_launching() or not x.numel():
        return as_codes(q), residual
    memory = _room(x, group)
    if memory is None:
        pair: tuple[Tensor, Tensor] = norms.fused_add_rms_norm_static_quant_fp8(
            ir.ops.all_reduce.native(x, group), x_residual, weight, scale, epsilon
        )
        return pair
    sum_and_norm(memory, x, x_residual, weight, q, residual, epsilon, STATIC.value, scale)
    return as_codes(q), residual


@opaque_op("all_reduce_fused_add_rms_norm_dynamic_quant_fp8", ())
def all_reduce_fused_add_rms_norm_dynamic_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The same, each row under a scale of its own; returns the codes, the scales and the sum."""
    q, scales, residual = new_codes(x), new_scales(x), new_like(x)
    if not is_launching() or not x.numel():
        return as_codes(q), scales, residual
    memory = _room(x, group)
    if memory is None:
        outputs: tuple[Tensor, Tensor, Tensor] = norms.fused_add_rms_norm_dynamic_quant_fp8(
            ir.ops.all_reduce.native(x, group), x_residual, weight, epsilon
        )
        return outputs
    sum_and_norm(memory, x, x_residual, weight, q, residual, epsilon, DYNAMIC.value, scales)
    return as_codes(q), scales, residual
