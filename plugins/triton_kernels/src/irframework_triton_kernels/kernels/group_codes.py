# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Quantisation to float8_e4m3fn under one scale for a group of a row, gated or not, or for a whole tensor."""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.codes import (
    STATIC,
    group_scale_of,
    largest_of,
    magnitudes,
    scale_of,
    scale_place,
    stored,
)
from irframework_triton_kernels.kernels.gated import value_of
from irframework_triton_kernels.kernels.order import after_predecessor


@triton.jit(do_not_specialize=["rows"])
def group_codes_kernel(
    x,
    y,
    code_scale,
    rows,
    groups,
    batches,
    x_stride,
    activation: tl.constexpr,
    group_size: tl.constexpr,
    column_major: tl.constexpr,
    power_of_two: tl.constexpr,
    hardware: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    early: tl.constexpr,
):
    """Codes of `tile_rows` groups, which follow each other in a row and over rows, each under a scale of its own.

    Rows are gated, or are not. Scales lie as the groups do, or with those of one group of all rows of a batch side by
    side.
    """
    if early:
        after_predecessor()
    group = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    row = group // groups
    of_row = group - row * groups
    live = row < rows
    columns = tl.arange(0, block)[None, :]
    mask = live & (columns < group_size)
    h = value_of(x + row * x_stride + of_row * group_size, columns, groups * group_size, mask, activation)
    scale = group_scale_of(largest_of(magnitudes(h), tile_rows), power_of_two)
    tl.store(code_scale + scale_place(row, of_row, rows, groups, batches, column_major), scale, mask=live)
    stored(y + group * group_size, columns, h, tl.math.div_rn(1.0, scale), mask, x, STATIC, hardware)


@triton.jit(do_not_specialize=["rows"])
def largest_kernel(
    x,
    most,
    rows,
    length,
    x_stride,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    early: tl.constexpr,
):
    """The largest magnitude (its bits) of what each program reads: every tile of rows whose turn it is."""
    if early:
        after_predecessor()
    blocks = tl.cdiv(length, block)
    largest = tl.zeros((tile_rows, block), tl.int32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, tile_rows) * blocks, tl.num_programs(0)):
        row = (tile // blocks).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
        columns = (tile % blocks) * block + tl.arange(0, block)[None, :]
        mask = (row < rows) & (columns < length)
        h = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitudes(h))
    tl.store(most + tl.program_id(0), tl.max(largest))


@triton.jit(do_not_specialize=["rows"])
def tensor_codes_kernel(
    x,
    y,
    most,
    code_scale,
    rows,
    length,
    x_stride,
    parts: tl.constexpr,
    hardware: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    early: tl.constexpr,
):
    """Codes of one tile under the scale of all: the largest of `parts` magnitudes gets the largest code."""
    if early:
        after_predecessor()
    scale = scale_of(tl.max(tl.load(most + tl.arange(0, parts))))
    program = tl.program_id(0)
    if program == 0:
        tl.store(code_scale, scale)
    blocks = tl.cdiv(length, block)
    row = (program // blocks).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    columns = (program % blocks) * block + tl.arange(0, block)[None, :]
    mask = (row < rows) & (columns < length)
    h = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    stored(y + row * length, columns, h, tl.math.div_rn(1.0, scale), mask, x, STATIC, hardware)
