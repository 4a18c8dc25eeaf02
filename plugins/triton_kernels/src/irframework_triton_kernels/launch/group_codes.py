"""Launches of the quantisations with a scale for a group, gated or not, or for a whole tensor, and their torch ops."""

from typing import Any

import torch
from torch import Tensor

from irframework_triton_kernels.kernels.gated import NO_GATE
from irframework_triton_kernels.kernels.group_codes import group_codes_kernel, largest_kernel, tensor_codes_kernel
from irframework_triton_kernels.launch.call import (
    FP8,
    SMALLEST_SCALE,
    as_codes,
    code_dtype,
    launch,
    new_codes,
    rows_of,
    static,
    tiles_of,
    torch_op,
)
from irframework_triton_kernels.launch.gated import ACTIVATIONS
from irframework_triton_kernels.tiles import LARGEST_PARTS, LARGEST_TILE, Tile, elementwise_tile, group_tile


def new_group_scales(x: Tensor, groups: Any, column_major: bool) -> tuple[Tensor, Any]:
    """Memory for the scales of groups of rows, `[..., tokens, groups]` or `[..., groups, tokens]`.

    Returns:
        The scales, and how many batches of tokens they are for where the tokens lie side by side.
    """
    if not column_major:
        return x.new_empty((*x.shape[:-1], groups), dtype=torch.float32), 1
    batches = 1
    for size in x.shape[:-2]:
        batches *= size
    return x.new_empty((*x.shape[:-2], groups, x.shape[-2]), dtype=torch.float32), batches


def _groups(
    x: Tensor,
    activation: int,
    group_size: int,
    column_major_scales: bool,
    power_of_two_scales: bool,
    tile: Tile | None,
) -> tuple[Tensor, Tensor]:
    """Gate the rows of x, or do not, and quantise groups of them, each under a scale of its own."""
    length = x.shape[-1] if activation == NO_GATE.value else x.shape[-1] // 2
    groups = length // group_size
    q = x.new_empty((*x.shape[:-1], length), dtype=code_dtype(x))
    scales, batches = new_group_scales(x, groups, column_major_scales)
    if static(groups) == 0:
        return as_codes(q), scales
    x2 = rows_of(x)
    rows = x2.shape[0]
    tile = tile or group_tile(group_size)
    numbers = (
        groups, batches, x2.stride(0), activation, group_size, column_major_scales, power_of_two_scales,
        q.dtype is FP8, tile.rows, tile.block,
    )  # fmt: skip
    launch(group_codes_kernel, tiles_of(rows * groups, tile.rows), (x2, q, scales), rows, numbers, tile)
    return as_codes(q), scales


@torch_op()
def group_quant_fp8(
    x: Tensor, group_size: int, column_major_scales: bool, power_of_two_scales: bool, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Quantise groups of rows, `[..., tokens, hidden]`, each under a scale of its own.

    Returns:
        The codes, and the scales `[..., tokens, groups]` or `[..., groups, tokens]`.
    """
    return _groups(x, NO_GATE.value, group_size, column_major_scales, power_of_two_scales, tile)


@torch_op()
def gated_group_quant_fp8(
    x: Tensor,
    activation: str,
    group_size: int,
    column_major_scales: bool,
    power_of_two_scales: bool,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Gate rows, `[..., tokens, 2 * hidden]`, and quantise groups of them; `activation` as in `gated`."""
    kind = ACTIVATIONS[activation]
    return _groups(x, kind, group_size, column_major_scales, power_of_two_scales, tile)


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
