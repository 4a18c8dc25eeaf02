"""Launches of the gated activations and of the quantisations, and their torch ops."""

from typing import Any

import torch
from torch import Tensor

from irframework_triton_kernels.kernels.codes import DYNAMIC, INT8, SMALLEST_INT8_SCALE, STATIC, VALUES
from irframework_triton_kernels.kernels.gated import (
    GELU,
    GELU_TANH,
    NO_GATE,
    SILU,
    gated_kernel,
    gated_rows_kernel,
    gates_apart_kernel,
)
from irframework_triton_kernels.launch.call import (
    FP8,
    as_codes,
    code_dtype,
    launch,
    new_codes,
    new_like,
    new_scales,
    rows_of,
    static,
    tiles_of,
    torch_op,
)
from irframework_triton_kernels.tiles import CODES, FEW_ROWS, GATED_CODES, MANY_ROWS, Tile, elementwise_tile, row_tile

ACTIVATIONS: dict[str, int] = {"silu": SILU.value, "none": GELU.value, "tanh": GELU_TANH.value}


def _are_few(rows: Any) -> bool:
    known = static(rows)
    return known is not None and known <= FEW_ROWS


def _elements(
    x: Tensor,
    y: Tensor,
    activation: int,
    codes: int = VALUES.value,
    scale: Tensor | None = None,
    tile: Tile | None = None,
) -> None:
    """Gate the rows of x, or do not, into y: values, or codes under one scale."""
    x2 = rows_of(x)
    rows, length = x2.shape[0], y.shape[-1]
    if static(length) == 0:
        return
    gate = activation != NO_GATE.value
    tile = tile or elementwise_tile(static(length), gate, codes != VALUES.value, _are_few(rows))
    tensors = (x2, y, x2 if scale is None else scale)
    blocks = tiles_of(length, tile.block)
    numbers = (
        length, x2.stride(0), activation, codes, codes != 0 and y.dtype is FP8, tile.rows, tile.block,
        static(blocks) or 0,
    )  # fmt: skip
    tiles = tiles_of(rows, tile.rows) * blocks
    launch(gated_kernel, tiles, tensors, rows, numbers, tile)


def _rows(x: Tensor, q: Tensor, scales: Tensor, activation: int, tile: Tile | None, codes: int = DYNAMIC.value) -> None:
    """Gate the rows of x, or do not, into codes; each row under a scale of its own."""
    x2 = rows_of(x)
    rows, length = x2.shape[0], q.shape[-1]
    if static(length) == 0:
        return
    if tile is None:
        kind = CODES if activation == NO_GATE.value else GATED_CODES
        tile = row_tile(static(length), kind, (static(rows) or 0) >= MANY_ROWS)
    numbers = (
        length, x2.stride(0), activation, codes, q.dtype is FP8,
        tile.rows, tile.block, tile.tail, tile.whole, tile.resident,
    )  # fmt: skip
    launch(gated_rows_kernel, tiles_of(rows, tile.rows), (x2, q, scales), rows, numbers, tile)


def _halved(x: Tensor) -> tuple[Any, ...]:
    return (*x.shape[:-1], x.shape[-1] // 2)


@torch_op()
def gated(x: Tensor, activation: str, tile: Tile | None = None) -> Tensor:
    """Gate rows, `[..., 2 * hidden]` with stride 1 in the last dimension, into a new tensor.

    Args:
        x: Rows of gate and up, side by side.
        activation: `silu`, or what `gelu_and_mul` calls its approximation: `none` or `tanh`.
        tile: Another tile than the usual one.
    """
    y = x.new_empty(_halved(x))
    _elements(x, y, ACTIVATIONS[activation], tile=tile)
    return y


@torch_op()
def gated_apart(x: Tensor, x_up: Tensor, activation: str, tile: Tile | None = None) -> Tensor:
    """Multiply rows by gates of the same shape and dtype into a new tensor; both have stride 1 in the last dimension.

    Args:
        x: The gates.
        x_up: What they multiply.
        activation: See `gated`.
        tile: Another tile than the usual one.
    """
    y = new_like(x)
    x2, x_up2 = rows_of(x), rows_of(x_up)
    rows, length = x2.shape
    if static(length) == 0:
        return y
    tile = tile or elementwise_tile(static(length), True, False, _are_few(rows))
    blocks = tiles_of(length, tile.block)
    numbers = (
        length, x2.stride(0), x_up2.stride(0), ACTIVATIONS[activation], tile.rows, tile.block, static(blocks) or 0,
    )  # fmt: skip
    tiles = tiles_of(rows, tile.rows) * blocks
    launch(gates_apart_kernel, tiles, (x2, x_up2, y), rows, numbers, tile)
    return y


@torch_op()
def silu_and_mul_static_quant_fp8(x: Tensor, scale: Tensor, tile: Tile | None = None) -> Tensor:
    """Gate rows by SiLU into codes under a scale, one float32 number."""
    q = x.new_empty(_halved(x), dtype=code_dtype(x))
    _elements(x, q, SILU.value, STATIC.value, scale, tile)
    return as_codes(q)


@torch_op()
def silu_and_mul_dynamic_quant_fp8(x: Tensor, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Gate rows by SiLU into codes, each row under a scale of its own; returns the codes and the scales."""
    q = x.new_empty(_halved(x), dtype=code_dtype(x))
    scales = new_scales(q)
    _rows(x, q, scales, SILU.value, tile)
    return as_codes(q), scales


@torch_op()
def gelu_and_mul_static_quant_fp8(x: Tensor, scale: Tensor, approximate: str, tile: Tile | None = None) -> Tensor:
    """Gate rows by GELU into codes under a scale, one float32 number."""
    q = x.new_empty(_halved(x), dtype=code_dtype(x))
    _elements(x, q, ACTIVATIONS[approximate], STATIC.value, scale, tile)
    return as_codes(q)


@torch_op()
def gelu_and_mul_dynamic_quant_fp8(x: Tensor, approximate: str, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Gate rows by GELU into codes, each row under a scale of its own; returns the codes and the scales."""
    q = x.new_empty(_halved(x), dtype=code_dtype(x))
    scales = new_scales(q)
    _rows(x, q, scales, ACTIVATIONS[approximate], tile)
    return as_codes(q), scales


@torch_op()
def static_quant_fp8(x: Tensor, scale: Tensor, tile: Tile | None = None) -> Tensor:
    """Quantise rows under a scale, one float32 number."""
    q = new_codes(x)
    _elements(x, q, NO_GATE.value, STATIC.value, scale, tile)
    return as_codes(q)


@torch_op()
def dynamic_quant_fp8(x: Tensor, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Quantise rows, each under a scale of its own; returns the codes and the scales."""
    q, scales = new_codes(x), new_scales(x)
    _rows(x, q, scales, NO_GATE.value, tile)
    return as_codes(q), scales


@torch_op()
def dynamic_quant_int8(x: Tensor, tile: Tile | None = None) -> tuple[Tensor, Tensor]:
    """Quantise rows to int8, each under a scale of its own; returns the codes and the scales."""
    q = torch.empty_like(x, dtype=torch.int8, memory_format=torch.contiguous_format)
    scales = new_scales(x, SMALLEST_INT8_SCALE.value)
    _rows(x, q, scales, NO_GATE.value, tile, INT8.value)
    return q, scales
