"""Launches of products with a gate behind them, and their torch ops.

They are black boxes, for how many rows there are decides what is done: few are a kernel that reads the matrix once and
writes what is gated; more are torch's product and a gate.
"""

import torch
from torch import Tensor

from irframework_triton_kernels.kernels.products import row_product_kernel, rows_product_kernel
from irframework_triton_kernels.launch.call import (
    device_of,
    is_launching,
    launch,
    opaque_op,
    rows_of,
    shared_memory,
    tiles_of,
)
from irframework_triton_kernels.launch.gated import gated
from irframework_triton_kernels.tiles import FEW_ROWS, Tile, product_tile


def divides(tile: Tile, length: int, hidden: int) -> bool:
    """Whether whole tiles cover the rows and the columns of a matrix."""
    return length % tile.block == 0 and hidden % tile.columns == 0


@opaque_op("linear_silu_and_mul", ())
def linear_silu_and_mul(x: Tensor, weight: Tensor, tile: Tile | None = None) -> Tensor:
    """Multiply rows by a matrix and gate the product by SiLU; `[..., hidden]`.

    Args:
        x: Rows, `[..., in_features]`, with stride 1 in the last dimension.
        weight: `[2 * hidden, in_features]`, contiguous, the dtype of x.
        tile: Another tile than the usual one, for few rows; with `rows` for all of them.
    """
    hidden, length = weight.shape[0] // 2, weight.shape[1]
    shape = (*x.shape[:-1], hidden)
    if not is_launching():
        return x.new_empty(shape)
    x2 = rows_of(x)
    rows = x2.shape[0]
    if rows > FEW_ROWS:
        product = torch.mm(x2, weight.t())
        y: Tensor = gated(product, "silu")
        return y.view(shape)
    y = x.new_empty(shape)
    if not y.numel():
        return y
    tile = tile or product_tile(rows, x.element_size(), shared_memory(device_of(x)))
    sizes = (length, hidden)
    constants = (tile.columns, tile.block, divides(tile, length, hidden))
    programs = tiles_of(hidden, tile.columns)
    if tile.rows == 1:
        launch(row_product_kernel, programs, (x2, weight, y), rows, (*sizes, *constants), tile)
    else:
        numbers = (x2.stride(0), *sizes, tile.rows, *constants)
        launch(rows_product_kernel, programs, (x2, weight, y), rows, numbers, tile)
    return y
