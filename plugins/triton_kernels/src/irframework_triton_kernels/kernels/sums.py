# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc, assignment"
"""Norms of rows that are first added up over the GPUs of a group, in memory that these share.

How they take turns in that memory, and why nobody reads too early or writes too early, is in
`irframework/distributed/shared_memory.py`. Owns the three steps that it lists, and the norm between them.
"""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.codes import (
    DYNAMIC,
    STATIC,
    largest_of,
    magnitudes,
    scale_of,
    stored,
    summed,
)
from irframework_triton_kernels.kernels.norms import inverse_root, scale_read_again, scaled, weight_at
from irframework_triton_kernels.kernels.order import after_predecessor


@triton.jit
def _meet(places, program, count, rank: tl.constexpr, size: tl.constexpr, size_block: tl.constexpr):
    """Tells the same program of the other processes that this call's data is there, and waits until theirs is."""
    tl.debug_barrier()  # what all threads wrote comes before the signal of one of them
    peers = tl.arange(0, size_block)
    others = (peers < size) & (peers != rank)
    theirs = tl.load(places + peers, mask=others, other=0).to(tl.pointer_type(tl.int32))
    at = program * size
    tl.atomic_xchg(theirs + (at + rank), count, mask=others, sem="release", scope="sys")
    own = tl.load(places + rank).to(tl.pointer_type(tl.int32)) + at
    for peer in tl.static_range(size):
        if peer != rank:
            # The difference, for counts begin anew behind the largest number.
            while tl.atomic_add(own + peer, 0, sem="acquire", scope="sys") - count < 0:
                pass
    tl.debug_barrier()  # no thread reads before the one that has waited


@triton.jit
def _data_of(x, places, size: tl.constexpr):
    """Where the data of each process begins: in registers, before they are needed."""
    starts = ()
    for peer in tl.static_range(size):
        starts = starts + (tl.multiple_of(tl.load(places + (size + peer)).to(x.dtype), 16),)
    return starts


@triton.jit
def _total(x, starts, at, mask, size: tl.constexpr):
    """A tile of the sum, rounded to its dtype, as float32. Added in the order of ranks, so it is the same in all."""
    total = tl.load(starts[0] + at, mask=mask, other=0.0).to(tl.float32)
    for peer in tl.static_range(1, size):
        total += tl.load(starts[peer] + at, mask=mask, other=0.0).to(tl.float32)
    return total.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _added(x, x_residual, residual, starts, at, columns, mask, size: tl.constexpr, has_residual: tl.constexpr):
    """A tile of what is normed, rounded to its dtype and stored at `residual`: the sum, or that and a residual."""
    h = _total(x, starts, at, mask, size)
    if has_residual:
        h += tl.load(x_residual + columns, mask=mask, other=0.0).to(tl.float32)
    rounded = h.to(residual.dtype.element_ty)
    tl.store(residual + columns, rounded, mask=mask)
    return rounded.to(tl.float32)


@triton.jit
def _norm_tile(
    tile,
    x,
    x_residual,
    weight,
    y,
    residual,
    code_scale,
    starts,
    half,
    rows,
    hidden,
    x_residual_stride,
    epsilon,
    has_residual: tl.constexpr,
    has_weight: tl.constexpr,
    codes: tl.constexpr,
    hardware: tl.constexpr,
    size: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    whole: tl.constexpr,
):
    """Norms the rows of one tile: in registers, or with `residual` as what is read again."""
    row = tl.full((tile_rows, 1), tile_rows, tl.int64) * tile + tl.arange(0, tile_rows)[:, None]
    live = row < rows
    at = half + row * hidden
    x_residual += row * x_residual_stride
    y += row * hidden
    residual += row * hidden
    if codes == STATIC:
        inverse = tl.math.div_rn(1.0, tl.load(code_scale))
    else:
        inverse = 1.0
    columns = tl.arange(0, block)[None, :]
    if whole:
        mask = live & (columns < hidden)
        w = weight_at(weight, columns, hidden, has_weight)
        h = _added(x, x_residual, residual, starts, at + columns, columns, mask, size, has_residual)
        scale = inverse_root(summed(h * h, tile_rows), hidden, epsilon)
        h = scaled(h, scale, w, x, has_weight)
        if codes == DYNAMIC:
            row_scale = scale_of(largest_of(magnitudes(h), tile_rows))
            tl.store(code_scale + row, row_scale, mask=live)
            inverse = tl.math.div_rn(1.0, row_scale)
        stored(y, columns, h, inverse, mask, x, codes, hardware)
    else:
        squares = tl.zeros((tile_rows, block), tl.float32)
        for start in range(0, hidden, block):
            here = start + columns
            mask = live & (here < hidden)
            h = _added(x, x_residual, residual, starts, at + here, here, mask, size, has_residual)
            squares += h * h
        scale = inverse_root(summed(squares, tile_rows), hidden, epsilon)
        tl.debug_barrier()  # what other threads of this program stored is read next
        if codes == DYNAMIC:
            row_scale = scale_read_again(residual, weight, x, scale, live, hidden, has_weight, tile_rows, block)
            tl.store(code_scale + row, row_scale, mask=live)
            inverse = tl.math.div_rn(1.0, row_scale)
        for start in range(0, hidden, block):
            here = start + columns
            mask = live & (here < hidden)
            h = tl.load(residual + here, mask=mask, other=0.0).to(tl.float32)
            h = scaled(h, scale, weight_at(weight, here, hidden, has_weight), x, has_weight)
            stored(y, here, h, inverse, mask, x, codes, hardware)


@triton.jit(do_not_specialize=["rows"])
def sum_norm_kernel(
    x,
    x_residual,
    weight,
    y,
    residual,
    code_scale,
    places,
    counts,
    rows,
    hidden,
    capacity,
    x_stride,
    x_residual_stride,
    epsilon,
    has_residual: tl.constexpr,
    has_weight: tl.constexpr,
    codes: tl.constexpr,
    hardware: tl.constexpr,
    rank: tl.constexpr,
    size: tl.constexpr,
    size_block: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    whole: tl.constexpr,
    early: tl.constexpr,
):
    """`residual = sum of x over the processes (+ x_residual); y = rms_norm(residual, weight)`, values or codes.

    A program has the same rows in all processes. `capacity` is that of a half of the data, in elements of x; `counts`
    and `places` are as in `SharedMemory`, whose address of the process's own data is among them.
    """
    if early:
        after_predecessor()
    program = tl.program_id(0)
    tiles = tl.cdiv(rows, tile_rows)
    count = tl.load(counts + program) + 1
    half = (count & 1) * tl.cast(capacity, tl.int64)
    starts = _data_of(x, places, size)
    own = starts[rank] + half
    columns = tl.arange(0, block)[None, :]
    for tile in range(program, tiles, tl.num_programs(0)):
        row = tl.full((tile_rows, 1), tile_rows, tl.int64) * tile + tl.arange(0, tile_rows)[:, None]
        for start in range(0, hidden, block):
            here = start + columns
            mask = (row < rows) & (here < hidden)
            tl.store(own + row * hidden + here, tl.load(x + row * x_stride + here, mask=mask), mask=mask)
    _meet(places, program, count, rank, size, size_block)
    for tile in range(program, tiles, tl.num_programs(0)):
        _norm_tile(
            tile, x, x_residual, weight, y, residual, code_scale, starts, half, rows, hidden, x_residual_stride,
            epsilon, has_residual, has_weight, codes, hardware, size, tile_rows, block, whole,
        )  # fmt: skip
    tl.store(counts + program, count)
