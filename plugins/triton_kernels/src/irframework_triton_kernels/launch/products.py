"""Launches of products with a gate behind them, and their torch ops.

They are black boxes, for how many rows there are decides what is done: few are a kernel that reads the matrix once and
writes what is gated; of more, and where the tile would be a poor one, torch's product and a gate.
"""

import torch
from torch import Tensor

import irframework as ir
from irframework_triton_kernels.kernels.codes import STATIC, VALUES
from irframework_triton_kernels.kernels.products import gated_product_kernel, gated_product_of_one_kernel
from irframework_triton_kernels.launch.call import (
    FP8,
    as_codes,
    code_dtype,
    device_of,
    is_launching,
    launch,
    multiprocessors,
    opaque_op,
    rows_of,
    shared_memory,
    tiles_of,
)
from irframework_triton_kernels.launch.gated import gated, silu_and_mul_static_quant_fp8
from irframework_triton_kernels.product_tiles import ProductTile, product_tile


def _tile_for(x: Tensor, weight: Tensor) -> ProductTile | None:
    """The tile for few rows; None where torch multiplies."""
    (rows, length), device = x.shape, device_of(x)
    sizes = rows, length, weight.shape[0] // 2, x.element_size()
    return product_tile(*sizes, multiprocessors(device), shared_memory(device))


def _gated_product(x: Tensor, weight: Tensor, y: Tensor, scales: tuple[Tensor, ...] | None, tile: ProductTile) -> None:
    """Multiply few rows by a matrix and gate the product into y: values, or codes under the last of three scales."""
    rows, length = x.shape
    hidden = y.shape[-1]
    if tile.rows < rows:
        raise ValueError(f"A tile of {tile.rows} rows was given for {rows} rows.")
    tensors = (x, weight, y, *(scales or (x, x, x)))
    codes = VALUES.value if scales is None else STATIC.value
    kind = (codes, scales is not None and y.dtype is FP8)
    if tile.rows == 1:
        of_one = (length, hidden, weight.stride(0), *kind, tile.block)
        launch(gated_product_of_one_kernel, hidden, tensors, rows, of_one, tile)
    else:
        numbers = (length, hidden, x.stride(0), weight.stride(0), *kind, tile.rows, tile.columns, tile.block, tile.turn)
        launch(gated_product_kernel, tiles_of(hidden, tile.columns), tensors, rows, numbers, tile)


@opaque_op("linear_silu_and_mul", ())
def linear_silu_and_mul(x: Tensor, weight: Tensor, tile: ProductTile | None = None) -> Tensor:
    """Multiply rows by a matrix and gate the product by SiLU.

    Args:
        x: Rows, `[..., in_features]`, in half precision, with stride 1 in the last dimension.
        weight: `[2 * hidden, in_features]`, with stride 1 in the last dimension, the dtype of x.
        tile: Another tile than the usual one; it must have all rows.

    Returns:
        `[..., hidden]`, the dtype of x, contiguous.

    Raises:
        ValueError: A tile was given that has fewer rows than x.
    """
    shape = (*x.shape[:-1], weight.shape[0] // 2)
    x2 = rows_of(x)
    if is_launching() and tile is None and x2.shape[0] and shape[-1]:
        tile = _tile_for(x2, weight)
        if tile is None:
            many: Tensor = gated(torch.mm(x2, weight.t()), "silu")
            return many.view(shape)
    y = x.new_empty(shape)
    if tile is not None:
        _gated_product(x2, weight, y, None, tile)
    return y


@opaque_op("scaled_linear_silu_and_mul_static_quant_fp8", ())
def scaled_linear_silu_and_mul_static_quant_fp8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, scale: Tensor, tile: ProductTile | None = None
) -> Tensor:
    """Multiply rows of codes by a matrix of codes and gate the product, in bfloat16, into codes.

    Args:
        x: Codes, `[rows, in_features]`, float8_e4m3fn, with stride 1 in the last dimension.
        weight: Codes, `[2 * hidden, in_features]`, float8_e4m3fn, with stride 1 in the last dimension.
        x_scale: One float32 number.
        weight_scale: The same.
        scale: The same, of what is returned.
        tile: As for `linear_silu_and_mul`.

    Returns:
        `[rows, hidden]`, float8_e4m3fn, contiguous.

    Raises:
        ValueError: A tile was given that has fewer rows than x.
    """
    shape = x.shape[0], weight.shape[0] // 2
    if is_launching() and tile is None and shape[0] and shape[1]:
        tile = _tile_for(x, weight)
        if tile is None:
            product = ir.ops.scaled_linear.native(x, weight, x_scale, weight_scale)
            many: Tensor = silu_and_mul_static_quant_fp8(product, scale)
            return many
    q = x.new_empty(shape, dtype=code_dtype(x))
    if tile is not None:
        _gated_product(x, weight, q, (x_scale, weight_scale, scale), tile)
    return as_codes(q)
