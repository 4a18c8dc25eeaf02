"""Launches of the quantisations to NVFP4, alone and behind a gate or a norm, and their torch ops."""

from typing import Any

import torch
from torch import Tensor

from irframework_triton_kernels.kernels.gated import NO_GATE
from irframework_triton_kernels.kernels.nvfp4 import add_rms_norm_nvfp4_kernel, nvfp4_kernel, rms_norm_nvfp4_kernel
from irframework_triton_kernels.launch.call import (
    as_codes,
    as_float,
    check_overwritten,
    code_dtype,
    launch,
    new_like,
    rows_of,
    static,
    tiles_of,
    torch_op,
)
from irframework_triton_kernels.launch.gated import ACTIVATIONS
from irframework_triton_kernels.tiles import ADD_NORM, NORM, NVFP4_BLOCK, Tile, elementwise_tile, row_tile


def _outputs(x: Tensor, length: Any) -> tuple[Tensor, Tensor]:
    """Memory for codes of rows of a length, two in a byte, and for the scales of their blocks."""
    lead = x.shape[:-1]
    scales = x.new_empty((*lead, length // NVFP4_BLOCK), dtype=code_dtype(x))
    return x.new_empty((*lead, length // 2), dtype=torch.uint8), scales


def _blocks(x: Tensor, global_scale: Tensor, activation: int, tile: Tile | None) -> tuple[Tensor, Tensor]:
    """Gate the rows of x, or do not, and quantise them."""
    gate = activation != NO_GATE.value
    length = x.shape[-1] // 2 if gate else x.shape[-1]
    q, scales = _outputs(x, length)
    if static(length) != 0:
        x2 = rows_of(x)
        rows = x2.shape[0]
        tile = tile or elementwise_tile(static(length), gate, True)
        numbers = (length, x2.stride(0), activation, tile.rows, tile.block)
        tiles = tiles_of(rows, tile.rows) * tiles_of(length, tile.block)
        launch(nvfp4_kernel, tiles, (x2, global_scale, q, scales), rows, numbers, tile)
    return q, as_codes(scales)


@torch_op()
def quant_nvfp4(x: Tensor, global_scale: Tensor, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Quantise rows, `[..., hidden]` with hidden a multiple of 16 and stride 1 in the last dimension.

    Returns:
        The codes, `[..., hidden / 2]`, and the scales, `[..., hidden / 16]`.
    """
    return _blocks(x, global_scale, NO_GATE.value, tile)


@torch_op()
def gated_quant_nvfp4(
    x: Tensor, global_scale: Tensor, activation: str, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Gate rows, `[..., 2 * hidden]`, and quantise them; `activation` as in `gated`."""
    return _blocks(x, global_scale, ACTIVATIONS[activation], tile)


@torch_op()
def rms_norm_quant_nvfp4(
    x: Tensor, weight: Tensor | None, global_scale: Tensor, epsilon: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Norm rows and quantise them; returns the codes and the scales of blocks."""
    q, scales = _outputs(x, x.shape[-1])
    x2 = rows_of(x)
    rows, hidden = x2.shape
    if static(hidden) != 0:
        tile = tile or row_tile(static(hidden), NORM)
        tensors = (x2, x2 if weight is None else weight, global_scale, q, scales)
        numbers = (
            hidden, x2.stride(0), as_float(epsilon), weight is not None, tile.rows, tile.block, tile.tail, tile.whole,
        )  # fmt: skip
        launch(rms_norm_nvfp4_kernel, tiles_of(rows, tile.rows), tensors, rows, numbers, tile)
    return q, as_codes(scales)


def _add_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    residual: Tensor,
    global_scale: Tensor,
    epsilon: float,
    tile: Tile | None,
) -> tuple[Tensor, Tensor]:
    """Add the rows of x and x_residual into residual, or x_residual itself; returns codes of the norm, and scales."""
    q, scales = _outputs(x, x.shape[-1])
    x2, xr2 = rows_of(x), rows_of(x_residual)
    rows, hidden = x2.shape
    if static(hidden) != 0:
        tile = tile or row_tile(static(hidden), ADD_NORM)
        tensors = (x2, xr2, x2 if weight is None else weight, global_scale, q, residual, scales)
        numbers = (
            hidden, x2.stride(0), xr2.stride(0), as_float(epsilon), weight is not None,
            tile.rows, tile.block, tile.tail, tile.whole,
        )  # fmt: skip
        launch(add_rms_norm_nvfp4_kernel, tiles_of(rows, tile.rows), tensors, rows, numbers, tile)
    return q, as_codes(scales)


@torch_op()
def fused_add_rms_norm_quant_nvfp4(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    global_scale: Tensor,
    epsilon: float,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add and norm rows and quantise them; returns the codes, the scales of blocks and the sum."""
    residual = new_like(x)
    q, scales = _add_norm(x, x_residual, weight, residual, global_scale, epsilon, tile)
    return q, scales, residual


@torch_op("fused_add_rms_norm_quant_nvfp4_", mutates=("x_residual",))
def fused_add_rms_norm_quant_nvfp4_inplace(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    global_scale: Tensor,
    epsilon: float,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Overwrite x_residual with the sum; returns codes of its norm, and the scales of blocks.

    Raises:
        ValueError: x_residual is not contiguous.
    """
    check_overwritten(x_residual=x_residual)
    return _add_norm(x, x_residual, weight, x_residual, global_scale, epsilon, tile)
