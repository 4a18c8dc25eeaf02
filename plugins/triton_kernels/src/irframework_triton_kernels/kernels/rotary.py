# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""The rotary embedding."""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.order import after_predecessor


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
    early: tl.constexpr,
):
    """Rotates some heads of one token: first the tiles of its query, then those of its key.

    A position outside the cache (`positions_count` rows) gives NaN, and reads nothing.
    """
    if early:
        after_predecessor()
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
