# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Products of few rows with a matrix, and the gate behind them: what is read is the matrix, once.

Its rows are those of the gate, `hidden` of them, then those of what the gate multiplies. A program has some of both, so
that it can gate what it has summed up. Sums are in float32; a product is rounded as the op `linear` rounds it.
"""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.gated import SILU, activated
from irframework_triton_kernels.kernels.order import after_predecessor


@triton.jit
def gated_product(gate, up, dtype: tl.constexpr):
    """`silu(gate) * up` of float32 sums, rounded to a dtype as product, SiLU and what it multiplies are, in float32."""
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return (activated(gate, SILU).to(dtype).to(tl.float32) * up).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def row_product_kernel(
    x,
    weight,
    y,
    rows,
    length,
    hidden,
    tile_columns: tl.constexpr,
    block: tl.constexpr,
    whole: tl.constexpr,
    early: tl.constexpr,
):
    """Some columns of the gated product of the only row: all is read once, so nothing is gained by matrix units.

    Each element of a tile has a sum of its own, which are added up at the end. `whole`: tiles divide both sizes.
    """
    if early:
        after_predecessor()
    column = tl.program_id(0).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)[:, None]
    within = tl.arange(0, block)[None, :]
    live = column < hidden
    weight += column * length
    behind = hidden * tl.cast(length, tl.int64)
    gates = tl.zeros((tile_columns, block), tl.float32)
    ups = tl.zeros((tile_columns, block), tl.float32)
    for start in range(0, length, block):
        at = start + within
        if whole:
            values = tl.load(x + at).to(tl.float32)
            gates += tl.load(weight + at).to(tl.float32) * values
            ups += tl.load(weight + behind + at).to(tl.float32) * values
        else:
            mask = live & (at < length)
            values = tl.load(x + at, mask=at < length, other=0.0).to(tl.float32)
            gates += tl.load(weight + at, mask=mask, other=0.0).to(tl.float32) * values
            ups += tl.load(weight + behind + at, mask=mask, other=0.0).to(tl.float32) * values
    dtype: tl.constexpr = y.dtype.element_ty
    h = gated_product(tl.sum(gates, 1)[:, None], tl.sum(ups, 1)[:, None], dtype)
    tl.store(y + column, h.to(dtype), mask=live)


@triton.jit
def summed_products(
    x,
    weight,
    rows,
    x_stride,
    length,
    hidden,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    block: tl.constexpr,
    whole: tl.constexpr,
):
    """Products of all rows with a program's rows of the matrix, in float32, and where they belong.

    Returns sums for the gate and for what it multiplies, `[tile_rows, tile_columns]`, the number of each element in y,
    and whether there is one. `whole`: tiles divide both sizes; rows that do not exist are read as zeros in any case.
    """
    row = tl.arange(0, tile_rows)[:, None].to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * tile_columns + tl.arange(0, tile_columns)[None, :]
    live, there = row < rows, column < hidden
    across, down = tl.arange(0, block)[None, :], tl.arange(0, block)[:, None]
    x += row * x_stride
    weight += column * length
    behind = hidden * tl.cast(length, tl.int64)
    gates = tl.zeros((tile_rows, tile_columns), tl.float32)
    ups = tl.zeros((tile_rows, tile_columns), tl.float32)
    for start in range(0, length, block):
        if whole:
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
    return gates, ups, row * hidden + column, live & there


@triton.jit(do_not_specialize=["rows"])
def rows_product_kernel(
    x,
    weight,
    y,
    rows,
    x_stride,
    length,
    hidden,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
    block: tl.constexpr,
    whole: tl.constexpr,
    early: tl.constexpr,
):
    """Some columns of the gated product of all rows, of which there are at most `tile_rows`."""
    if early:
        after_predecessor()
    gates, ups, place, mask = summed_products(
        x, weight, rows, x_stride, length, hidden, tile_rows, tile_columns, block, whole
    )
    dtype: tl.constexpr = y.dtype.element_ty
    tl.store(y + place, gated_product(gates, ups, dtype).to(dtype), mask=mask)
