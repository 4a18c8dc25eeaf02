# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Quantisation to NVFP4, of rows that are gated first or not, and of norms with a residual or without.

Owns these kernels; what codes and scales are made of is in `block_codes`, the norm in `norms`.
"""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.block_codes import stored_blocks
from irframework_triton_kernels.kernels.codes import NVFP4
from irframework_triton_kernels.kernels.gated import value_of
from irframework_triton_kernels.kernels.norms import norm_rows
from irframework_triton_kernels.kernels.order import after_predecessor


@triton.jit(do_not_specialize=["rows"])
def nvfp4_kernel(
    x,
    global_scale,
    packed,
    block_scale,
    rows,
    length,
    x_stride,
    activation: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    early: tl.constexpr,
):
    """Codes and scales of rows, gated or not, `length` long, for one tile; the tiles of a row follow each other."""
    if early:
        after_predecessor()
    whole = tl.load(global_scale)
    tiles = tl.cdiv(length, block)
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    start = (program % tiles) * block
    columns = start + tl.arange(0, block)[None, :]
    mask = (row < rows) & (columns < length)
    h = value_of(x + row * x_stride, columns, length, mask, activation)
    stored_blocks(packed + row * (length // 2), start, h, x, block_scale, whole, row, rows, length, tile_rows, block)


@triton.jit(do_not_specialize=["rows"])
def rms_norm_nvfp4_kernel(
    x,
    weight,
    global_scale,
    packed,
    block_scale,
    rows,
    hidden,
    x_stride,
    epsilon,
    has_weight: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    tail: tl.constexpr,
    whole: tl.constexpr,
    early: tl.constexpr,
):
    """Codes and scales of `rms_norm(x, weight)`."""
    if early:
        after_predecessor()
    norm_rows(
        tl.program_id(0), x, x, weight, packed, packed, block_scale, rows, hidden, hidden, x_stride, x_stride, epsilon,
        False, has_weight, False, NVFP4, False, tile_rows, block, tail, whole, global_scale=tl.load(global_scale),
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_nvfp4_kernel(
    x,
    x_residual,
    weight,
    global_scale,
    packed,
    residual,
    block_scale,
    rows,
    hidden,
    x_stride,
    x_residual_stride,
    epsilon,
    has_weight: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    tail: tl.constexpr,
    whole: tl.constexpr,
    early: tl.constexpr,
):
    """`residual = x + x_residual`, and codes and scales of its norm; `residual` as in `add_rms_norm_kernel`."""
    if early:
        after_predecessor()
    norm_rows(
        tl.program_id(0), x, x_residual, weight, packed, residual, block_scale, rows, hidden, hidden, x_stride,
        x_residual_stride, epsilon,
        True, has_weight, False, NVFP4, False, tile_rows, block, tail, whole, global_scale=tl.load(global_scale),
    )  # fmt: skip
