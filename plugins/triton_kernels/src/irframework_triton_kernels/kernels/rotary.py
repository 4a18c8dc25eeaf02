# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""The rotary embedding."""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.order import after_predecessor


@triton.jit
def rotate_heads(
    x,
    y,
    also,
    writes,
    cos,
    sin,
    first,
    heads,
    head_stride,
    head_size,
    half,
    is_neox: tl.constexpr,
    twice: tl.constexpr,
    tile_heads: tl.constexpr,
    block: tl.constexpr,
    rest_block: tl.constexpr,
):
    """Rotates `tile_heads` heads of one token into y and copies what is behind the rotated elements.

    With `twice`, writes the same to `also` if `writes` is true. Both hold their heads side by side.
    """
    head = first + tl.arange(0, tile_heads)[:, None]
    x += head.to(tl.int64) * head_stride
    y += head * head_size
    also += head * head_size
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
    turned_a = (a * cos - b * sin).to(y.dtype.element_ty)
    turned_b = (b * cos + a * sin).to(y.dtype.element_ty)
    tl.store(y + at_a, turned_a, mask=mask)
    tl.store(y + at_b, turned_b, mask=mask)
    if twice:
        tl.store(also + at_a, turned_a, mask=mask & writes)
        tl.store(also + at_b, turned_b, mask=mask & writes)
    if rest_block > 0:
        rest = 2 * half + tl.arange(0, rest_block)[None, :]
        mask = (head < heads) & (rest < head_size)
        kept = tl.load(x + rest, mask=mask)
        tl.store(y + rest, kept, mask=mask)
        if twice:
            tl.store(also + rest, kept, mask=mask & writes)


@triton.jit
def angles_of(positions, token, cache, positions_count, cache_stride, half, block: tl.constexpr):
    """Cosines and sines of a token, `[1, block]`; NaN for a position outside the cache, which is not read then."""
    position = tl.load(positions + token).to(tl.int64)
    angle = tl.arange(0, block)[None, :]
    known = (angle < half) & (position >= 0) & (position < positions_count)
    cache += position * cache_stride
    cos = tl.load(cache + angle, mask=known, other=float("nan")).to(tl.float32)
    sin = tl.load(cache + half + angle, mask=known, other=float("nan")).to(tl.float32)
    return cos, sin


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
    cos, sin = angles_of(positions, token, cache, positions_count, cache_stride, half, block)
    if tile < query_tiles:
        x = query + token * query_stride
        y = query_out + token * query_heads * head_size
        first = tile * tile_heads
        rotate_heads(
            x, y, y, True, cos, sin, first, query_heads, query_head_stride, head_size, half,
            is_neox, False, tile_heads, block, rest_block,
        )  # fmt: skip
    elif has_key:
        x = key + token * key_stride
        y = key_out + token * key_heads * head_size
        first = (tile - query_tiles) * tile_heads
        rotate_heads(
            x, y, y, True, cos, sin, first, key_heads, key_head_stride, head_size, half,
            is_neox, False, tile_heads, block, rest_block,
        )  # fmt: skip
