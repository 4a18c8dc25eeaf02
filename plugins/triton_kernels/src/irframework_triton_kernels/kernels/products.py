# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Products of few rows with a matrix, and the gate behind them: what is read is the matrix, once.

Its rows are those of the gate, `hidden` of them, then those of what the gate multiplies. A program has some of both, so
that it can gate what it has summed up. Sums are in float32; a product is rounded as the op `linear` rounds it. Of codes
(`coded`) both have one scale each, the product is in bfloat16, and what is stored are codes under a third scale.
"""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.codes import codes_of
from irframework_triton_kernels.kernels.gated import SILU, activated
from irframework_triton_kernels.kernels.order import after_predecessor


@triton.jit
def store_gated(
    at, gates, ups, mask, x_scale, weight_scale, code_scale, y, coded: tl.constexpr, hardware: tl.constexpr
):
    """Stores `silu(gates) * ups` of float32 sums, rounded as product, SiLU and what it multiplies are; or codes."""
    dtype: tl.constexpr = tl.bfloat16 if coded else y.dtype.element_ty
    if coded:
        scale = tl.load(x_scale) * tl.load(weight_scale)
        gates, ups = gates * scale, ups * scale
    gates, ups = gates.to(dtype).to(tl.float32), ups.to(dtype).to(tl.float32)
    h = (activated(gates, SILU).to(dtype).to(tl.float32) * ups).to(dtype)
    if coded:
        inverse = tl.math.div_rn(1.0, tl.load(code_scale))
        tl.store(at, codes_of(h.to(tl.float32), inverse, hardware), mask=mask)
    else:
        tl.store(at, h, mask=mask)


@triton.jit
def block_start(index, blocks, block: tl.constexpr, turn: tl.constexpr):
    """Where a block of a row begins; each program begins `turn` blocks behind the one before, and goes around."""
    if turn:
        index = (index + tl.program_id(0) * turn) % blocks
    return index * block


@triton.jit(do_not_specialize=["rows"])
def row_product_kernel(
    x,
    weight,
    x_scale,
    weight_scale,
    code_scale,
    y,
    rows,
    length,
    hidden,
    coded: tl.constexpr,
    hardware: tl.constexpr,
    tile_columns: tl.constexpr,
    block: tl.constexpr,
    turn: tl.constexpr,
    divided: tl.constexpr,
    early: tl.constexpr,
):
    """Some columns of the gated product of the only row: all is read once, so nothing is gained by matrix units.

    Each element of a tile has a sum of its own, which are added up at the end. `divided`: into whole tiles.
    """
    if early:
        after_predecessor()
    column = tl.program_id(0).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)[:, None]
    within = tl.arange(0, block)[None, :]
    live = column < hidden
    weight += column * length
    behind = tl.cast(hidden, tl.int64) * length
    gates = tl.zeros((tile_columns, block), tl.float32)
    ups = tl.zeros((tile_columns, block), tl.float32)
    blocks = tl.cdiv(length, block)
    for index in range(0, blocks):
        at = block_start(index, blocks, block, turn) + within
        if divided:
            values = tl.load(x + at).to(tl.float32)
            gates += tl.load(weight + at).to(tl.float32) * values
            ups += tl.load(weight + behind + at).to(tl.float32) * values
        else:
            mask = live & (at < length)
            values = tl.load(x + at, mask=at < length, other=0.0).to(tl.float32)
            gates += tl.load(weight + at, mask=mask, other=0.0).to(tl.float32) * values
            ups += tl.load(weight + behind + at, mask=mask, other=0.0).to(tl.float32) * values
    gate, up = tl.sum(gates, 1)[:, None], tl.sum(ups, 1)[:, None]
    store_gated(y + column, gate, up, live, x_scale, weight_scale, code_scale, y, coded, hardware)


@triton.jit(do_not_specialize=["rows"])
def rows_product_kernel(
    x,
    weight,
    x_scale,
    weight_scale,
    code_scale,
    y,
    rows,
    x_stride,
    length,
    hidden,
    coded: tl.constexpr,
    hardware: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    block: tl.constexpr,
    turn: tl.constexpr,
    divided: tl.constexpr,
    early: tl.constexpr,
):
    """Some columns of the gated product of all rows, at most `tile_rows`; rows that do not exist are read as zeros."""
    if early:
        after_predecessor()
    row = tl.arange(0, tile_rows)[:, None].to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)[None, :]
    live, there = row < rows, column < hidden
    across, down = tl.arange(0, block)[None, :], tl.arange(0, block)[:, None]
    x += row * x_stride
    weight += column * length
    behind = tl.cast(hidden, tl.int64) * length
    gates = tl.zeros((tile_rows, tile_columns), tl.float32)
    ups = tl.zeros((tile_rows, tile_columns), tl.float32)
    blocks = tl.cdiv(length, block)
    for index in range(0, blocks):
        start = block_start(index, blocks, block, turn)
        if divided:
            values = tl.load(x + (start + across), mask=live, other=0.0)
            gate = tl.load(weight + (start + down))
            up = tl.load(weight + behind + (start + down))
        else:
            values = tl.load(x + (start + across), mask=live & (start + across < length), other=0.0)
            mask = there & (start + down < length)
            gate = tl.load(weight + (start + down), mask=mask, other=0.0)
            up = tl.load(weight + behind + (start + down), mask=mask, other=0.0)
        gates = tl.dot(values, gate, gates)
        ups = tl.dot(values, up, ups)
    at = y + row * hidden + column
    store_gated(at, gates, ups, live & there, x_scale, weight_scale, code_scale, y, coded, hardware)
