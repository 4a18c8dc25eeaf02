"""Launches of the norms that end in a scale for each group of a row, and their torch ops."""

from torch import Tensor

from irframework_triton_kernels.kernels.norms import add_rms_norm_groups_kernel, rms_norm_groups_kernel
from irframework_triton_kernels.launch.call import (
    FP8,
    as_codes,
    as_float,
    check_overwritten,
    launch,
    new_codes,
    new_like,
    rows_of,
    static,
    tiles_of,
    torch_op,
)
from irframework_triton_kernels.launch.group_codes import new_group_scales
from irframework_triton_kernels.tiles import ADD_NORM, NORM, Tile, row_tile


@torch_op()
def rms_norm_group_quant_fp8(
    x: Tensor,
    weight: Tensor | None,
    epsilon: float,
    group_size: int,
    column_major_scales: bool,
    power_of_two_scales: bool,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Norm rows, `[..., tokens, hidden]`, into codes, each group of a row under a scale of its own.

    Returns:
        The codes, and the scales `[..., tokens, groups]` or `[..., groups, tokens]`.
    """
    q = new_codes(x)
    scales, batches = new_group_scales(x, x.shape[-1] // group_size, column_major_scales)
    x2 = rows_of(x)
    rows, hidden = x2.shape
    if static(hidden) != 0:
        tile = tile or row_tile(static(hidden), NORM)
        tensors = (x2, x2 if weight is None else weight, q, scales)
        numbers = (
            hidden, batches, x2.stride(0), as_float(epsilon), weight is not None, group_size, column_major_scales,
            power_of_two_scales, q.dtype is FP8, tile.rows, tile.block, tile.tail, tile.whole,
        )  # fmt: skip
        launch(rms_norm_groups_kernel, tiles_of(rows, tile.rows), tensors, rows, numbers, tile)
    return as_codes(q), scales


def _add_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    residual: Tensor,
    epsilon: float,
    group_size: int,
    column_major_scales: bool,
    power_of_two_scales: bool,
    tile: Tile | None,
) -> tuple[Tensor, Tensor]:
    """Add the rows of x and x_residual into residual, or x_residual itself; returns codes of the norm, and scales."""
    q = new_codes(x)
    scales, batches = new_group_scales(x, x.shape[-1] // group_size, column_major_scales)
    x2, xr2 = rows_of(x), rows_of(x_residual)
    rows, hidden = x2.shape
    if static(hidden) != 0:
        tile = tile or row_tile(static(hidden), ADD_NORM)
        tensors = (x2, xr2, x2 if weight is None else weight, q, residual, scales)
        numbers = (
            hidden, batches, x2.stride(0), xr2.stride(0), as_float(epsilon), weight is not None, group_size,
            column_major_scales, power_of_two_scales, q.dtype is FP8, tile.rows, tile.block, tile.tail, tile.whole,
        )  # fmt: skip
        launch(add_rms_norm_groups_kernel, tiles_of(rows, tile.rows), tensors, rows, numbers, tile)
    return as_codes(q), scales


@torch_op()
def fused_add_rms_norm_group_quant_fp8(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    group_size: int,
    column_major_scales: bool,
    power_of_two_scales: bool,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add and norm rows into codes, each group of a row under a scale of its own; returns codes, scales and the sum."""
    residual = new_like(x)
    q, scales = _add_norm(
        x, x_residual, weight, residual, epsilon, group_size, column_major_scales, power_of_two_scales, tile
    )
    return q, scales, residual


@torch_op("fused_add_rms_norm_group_quant_fp8_", mutates=("x_residual",))
def fused_add_rms_norm_group_quant_fp8_inplace(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    group_size: int,
    column_major_scales: bool,
    power_of_two_scales: bool,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Overwrite x_residual with the sum; returns codes of its norm, and the scales of groups.

    Raises:
        ValueError: x_residual is not contiguous.
    """
    check_overwritten(x_residual=x_residual)
    return _add_norm(
        x, x_residual, weight, x_residual, epsilon, group_size, column_major_scales, power_of_two_scales, tile
    )
