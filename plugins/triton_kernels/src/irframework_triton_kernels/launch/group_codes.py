"""Launches of the quantisations with a scale for a group or for a whole tensor, and their torch ops."""

import torch
from torch import Tensor

from irframework_triton_kernels.kernels.group_codes import group_codes_kernel, largest_kernel, tensor_codes_kernel
from irframework_triton_kernels.launch.call import (
    FP8,
    SMALLEST_SCALE,
    as_codes,
    launch,
    new_codes,
    rows_of,
    static,
    tiles_of,
    torch_op,
)
from irframework_triton_kernels.tiles import LARGEST_PARTS, LARGEST_TILE, Tile, elementwise_tile, group_tile


@torch_op()
def group_quant_fp8(
    x: Tensor, group_size: int, column_major_scales: bool, power_of_two_scales: bool, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise groups of rows, `[..., tokens, hidden]`, each under a scale of its own.

    Returns:
        The codes, and the scales `[..., tokens, groups]` or `[..., groups, tokens]`.
    """
    groups = x.shape[-1] // group_size
    lead = x.shape[:-2] if column_major_scales else x.shape[:-1]
    q = new_codes(x)
    scales = x.new_empty(
        (*lead, groups, x.shape[-2]) if column_major_scales else (*lead, groups), dtype=torch.float32
    )  # fmt: skip
    if static(groups) == 0:
        return as_codes(q), scales
    x2 = rows_of(x)
    rows, batches = x2.shape[0], 1
    if column_major_scales:
        for size in lead:
            batches *= size
    tile = tile or group_tile(group_size)
    numbers = (
        groups, batches, x2.stride(0), group_size, column_major_scales, power_of_two_scales, q.dtype is FP8,
        tile.rows, tile.block,
    )  # fmt: skip
    launch(group_codes_kernel, tiles_of(rows * groups, tile.rows), (x2, q, scales), rows, numbers, tile)
    return as_codes(q), scales


@torch_op()
def tensor_quant_fp8(x: Tensor, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Quantise all rows under one scale; returns the codes and the scale, `[1]`."""
    q, scale = new_codes(x), x.new_empty(1, dtype=torch.float32)
    x2 = rows_of(x)
    rows, length = x2.shape
    if static(length) == 0:
        return as_codes(q), scale.fill_(SMALLEST_SCALE)
    most = x.new_empty(LARGEST_PARTS, dtype=torch.int32)
    reads = LARGEST_TILE
    launch(largest_kernel, LARGEST_PARTS, (x2, most), rows, (length, x2.stride(0), 1, reads.block), reads)
    tile = tile or elementwise_tile(static(length), False, True)
    numbers = (length, x2.stride(0), LARGEST_PARTS, q.dtype is FP8, tile.rows, tile.block)
    # One program more than there are tiles: the scale is stored where there are no rows, too.
    tiles = tiles_of(rows, tile.rows) * tiles_of(length, tile.block) + 1
    launch(tensor_codes_kernel, tiles, (x2, q, most, scale), rows, numbers, tile)
    return as_codes(q), scale
