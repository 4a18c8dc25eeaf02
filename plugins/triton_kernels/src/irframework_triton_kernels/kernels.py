# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""The kernels. Owns the arithmetic, and which element of which tensor each program reads and writes.

Every kernel computes in float32 and rounds where the op's meaning rounds (`irframework.ops`): values are widened after
each load and narrowed before each store, never computed with in a 16-bit type. Row numbers are 64-bit, so that offsets
are. Does not choose tiles (`tiles`) or launch (`launch`); knows nothing of irframework.

The functions are in Triton's language: their parameters have no Python types.
"""

import triton
import triton.language as tl

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)


@triton.jit
def _tile_of_rows(rows, tile_rows: tl.constexpr):
    """The row numbers of this program, [tile_rows, 1], and which of them exist."""
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    return row[:, None], (row < rows)[:, None]


@triton.jit
def _squares(h, columns, variance_size, partial: tl.constexpr):
    """What a tile adds to the sums of squares."""
    if partial:
        h = tl.where(columns < variance_size, h, 0.0)
    return h * h


@triton.jit
def _scaled(h, scale, weight, columns, inside, has_weight: tl.constexpr):
    """The normed tile, rounded to the weight's dtype before and after the weight is applied."""
    h = h * scale
    if has_weight:
        w = tl.load(weight + columns, mask=inside, other=0.0)
        h = (h.to(w.dtype).to(tl.float32) * w.to(tl.float32)).to(w.dtype).to(tl.float32)
    return h


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x,
    weight,
    y,
    rows,
    hidden,
    variance_size,
    x_stride,
    y_stride,
    epsilon,
    has_weight: tl.constexpr,
    partial: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    whole: tl.constexpr,
):
    """`y = rms_norm(x, weight)` for `tile_rows` rows; the mean is over the first `variance_size` elements."""
    row, live = _tile_of_rows(rows, tile_rows)
    x += row * x_stride
    y += row * y_stride
    columns = tl.arange(0, block)[None, :]
    if whole:
        inside = columns < hidden
        h = tl.load(x + columns, mask=live & inside, other=0.0).to(tl.float32)
        total = tl.sum(_squares(h, columns, variance_size, partial), 1)
        scale = tl.rsqrt(total / variance_size + epsilon)[:, None]
        h = _scaled(h, scale, weight, columns, inside, has_weight)
        tl.store(y + columns, h.to(y.dtype.element_ty), mask=live & inside)
    else:
        squares = tl.zeros((tile_rows, block), tl.float32)
        for start in range(0, variance_size, block):
            at = start + columns
            h = tl.load(x + at, mask=live & (at < variance_size), other=0.0).to(tl.float32)
            squares += h * h
        scale = tl.rsqrt(tl.sum(squares, 1) / variance_size + epsilon)[:, None]
        for start in range(0, hidden, block):
            at = start + columns
            inside = at < hidden
            h = tl.load(x + at, mask=live & inside, other=0.0).to(tl.float32)
            h = _scaled(h, scale, weight, at, inside, has_weight)
            tl.store(y + at, h.to(y.dtype.element_ty), mask=live & inside)


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_kernel(
    x,
    x_residual,
    weight,
    y,
    residual,
    rows,
    hidden,
    variance_size,
    x_stride,
    x_residual_stride,
    y_stride,
    residual_stride,
    epsilon,
    has_weight: tl.constexpr,
    partial: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    whole: tl.constexpr,
):
    """`residual = x + x_residual; y = rms_norm(residual, weight)` for `tile_rows` rows.

    `y` may be `x`, and `residual` may be `x_residual`: a program reads its rows before it overwrites them.
    """
    row, live = _tile_of_rows(rows, tile_rows)
    x += row * x_stride
    x_residual += row * x_residual_stride
    y += row * y_stride
    residual += row * residual_stride
    columns = tl.arange(0, block)[None, :]
    if whole:
        inside = columns < hidden
        h = _sum(x, x_residual, residual, columns, live & inside)
        total = tl.sum(_squares(h, columns, variance_size, partial), 1)
        scale = tl.rsqrt(total / variance_size + epsilon)[:, None]
        h = _scaled(h, scale, weight, columns, inside, has_weight)
        tl.store(y + columns, h.to(y.dtype.element_ty), mask=live & inside)
    else:
        squares = tl.zeros((tile_rows, block), tl.float32)
        for start in range(0, hidden, block):
            at = start + columns
            h = _sum(x, x_residual, residual, at, live & (at < hidden))
            squares += _squares(h, at, variance_size, partial)
        scale = tl.rsqrt(tl.sum(squares, 1) / variance_size + epsilon)[:, None]
        # What other threads of this program stored is read next.
        tl.debug_barrier()
        for start in range(0, hidden, block):
            at = start + columns
            inside = at < hidden
            h = tl.load(residual + at, mask=live & inside, other=0.0).to(tl.float32)
            h = _scaled(h, scale, weight, at, inside, has_weight)
            tl.store(y + at, h.to(y.dtype.element_ty), mask=live & inside)


@triton.jit
def _sum(x, x_residual, residual, columns, mask):
    """Stores the sum of a tile, rounded to the residual's dtype, and returns it as float32."""
    h = tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
    h += tl.load(x_residual + columns, mask=mask, other=0.0).to(tl.float32)
    rounded = h.to(residual.dtype.element_ty)
    tl.store(residual + columns, rounded, mask=mask)
    return rounded.to(tl.float32)


@triton.jit
def _activated(gate, activation: tl.constexpr):
    """The activation of float32 values."""
    if activation == SILU:
        return gate / (1.0 + tl.exp(-gate))
    elif activation == GELU:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # 0.5 * (1 + tanh(u)) is sigmoid(2u), which keeps its digits where tanh is near -1.
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-2.0 * u))


@triton.jit(do_not_specialize=["rows"])
def gated_kernel(
    x,
    y,
    rows,
    length,
    x_stride,
    y_stride,
    activation: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    """`y = activation(x[:, :length]) * x[:, length:]` for one tile; the blocks of a row follow each other."""
    blocks = tl.cdiv(length, block)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    columns = (program % blocks) * block + tl.arange(0, block)[None, :]
    mask = (row < rows) & (columns < length)
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + length + columns, mask=mask, other=0.0).to(tl.float32)
    out = y.dtype.element_ty
    gate = _activated(gate, activation).to(out).to(tl.float32)
    tl.store(y + row * y_stride + columns, (gate * up).to(out), mask=mask)


@triton.jit
def _rotate(
    x,
    y,
    cos,
    sin,
    first,
    heads,
    head_stride,
    head_size,
    half,
    is_neox: tl.constexpr,
    tile_heads: tl.constexpr,
    block: tl.constexpr,
    rest_block: tl.constexpr,
):
    """Rotates `tile_heads` heads of one token and copies what is behind the rotated elements."""
    head = first + tl.arange(0, tile_heads)[:, None]
    x += head.to(tl.int64) * head_stride
    y += head * head_size
    angle = tl.arange(0, block)[None, :]
    mask = (head < heads) & (angle < half)
    if is_neox:
        at_a = angle
        at_b = angle + half
    else:
        at_a = 2 * angle
        at_b = 2 * angle + 1
    a = tl.load(x + at_a, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(x + at_b, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at_a, (a * cos - b * sin).to(y.dtype.element_ty), mask=mask)
    tl.store(y + at_b, (b * cos + a * sin).to(y.dtype.element_ty), mask=mask)
    if rest_block > 0:
        rest = 2 * half + tl.arange(0, rest_block)[None, :]
        mask = (head < heads) & (rest < head_size)
        tl.store(y + rest, tl.load(x + rest, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["positions_count"])
def rotary_kernel(
    positions,
    query,
    key,
    cache,
    query_out,
    key_out,
    positions_count,
    query_heads,
    key_heads,
    head_size,
    half,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    cache_stride,
    is_neox: tl.constexpr,
    has_key: tl.constexpr,
    tile_heads: tl.constexpr,
    block: tl.constexpr,
    rest_block: tl.constexpr,
):
    """Rotates some heads of one token: first the tiles of its query, then those of its key.

    A position outside the cache (`positions_count` rows) gives NaN, and reads nothing.
    """
    query_tiles = tl.cdiv(query_heads, tile_heads)
    if has_key:
        tiles = query_tiles + tl.cdiv(key_heads, tile_heads)
    else:
        tiles = query_tiles
    program = tl.program_id(0)
    token = (program // tiles).to(tl.int64)
    tile = program % tiles
    position = tl.load(positions + token).to(tl.int64)
    angle = tl.arange(0, block)[None, :]
    known = (angle < half) & (position >= 0) & (position < positions_count)
    cache += position * cache_stride
    cos = tl.load(cache + angle, mask=known, other=float("nan")).to(tl.float32)
    sin = tl.load(cache + half + angle, mask=known, other=float("nan")).to(tl.float32)
    if tile < query_tiles:
        x = query + token * query_stride
        y = query_out + token * query_heads * head_size
        first = tile * tile_heads
        _rotate(
            x, y, cos, sin, first, query_heads, query_head_stride, head_size, half,
            is_neox, tile_heads, block, rest_block,
        )  # fmt: skip
    elif has_key:
        x = key + token * key_stride
        y = key_out + token * key_heads * head_size
        first = (tile - query_tiles) * tile_heads
        _rotate(
            x, y, cos, sin, first, key_heads, key_head_stride, head_size, half,
            is_neox, tile_heads, block, rest_block,
        )  # fmt: skip
