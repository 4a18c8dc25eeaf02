# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""The rotary embedding, with or without a norm of each head before it."""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.codes import summed
from irframework_triton_kernels.kernels.norms import inverse_root, scaled
from irframework_triton_kernels.kernels.order import after_predecessor


@triton.jit
def rotate_heads(
    x,
    y,
    also,
    writes,
    cos,
    sin,
    weight,
    epsilon,
    first,
    heads,
    head_stride,
    head_size,
    half,
    is_neox: tl.constexpr,
    normed: tl.constexpr,
    has_weight: tl.constexpr,
    twice: tl.constexpr,
    tile_heads: tl.constexpr,
    block: tl.constexpr,
    rest_block: tl.constexpr,
):
    """Rotates `tile_heads` heads of one token into y and copies what is behind the rotated elements.

    With `normed`, each head is normed first and rounded to its dtype. With `twice`, writes the same to `also` if
    `writes` is true. Both hold their heads side by side.
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
    if normed:
        total = summed(a * a + b * b, tile_heads)
        if rest_block > 0:
            behind = 2 * half + tl.arange(0, rest_block)[None, :]
            inside = (head < heads) & (behind < head_size)
            rows = tl.load(x + behind, mask=inside, other=0.0).to(tl.float32)
            total += summed(rows * rows, tile_heads)
        root = inverse_root(total, head_size, epsilon)
        a = scaled(a, root, _scales(weight + at_a, angle < half, has_weight), x, has_weight)
        b = scaled(b, root, _scales(weight + at_b, angle < half, has_weight), x, has_weight)
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
        if normed:
            rows = tl.load(x + rest, mask=mask, other=0.0).to(tl.float32)
            rows = scaled(rows, root, _scales(weight + rest, rest < head_size, has_weight), x, has_weight)
            kept = rows.to(y.dtype.element_ty)
        else:
            kept = tl.load(x + rest, mask=mask)
        tl.store(y + rest, kept, mask=mask)
        if twice:
            tl.store(also + rest, kept, mask=mask & writes)


@triton.jit
def _scales(at, mask, has_weight: tl.constexpr):
    if has_weight:
        return tl.load(at, mask=mask, other=0.0)
    else:
        return 0


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
    query_weight,
    key_weight,
    query_out,
    key_out,
    positions_count,
    epsilon,
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
    normed: tl.constexpr,
    has_query_weight: tl.constexpr,
    has_key_weight: tl.constexpr,
    has_key: tl.constexpr,
    tile_heads: tl.constexpr,
    block: tl.constexpr,
    rest_block: tl.constexpr,
    early: tl.constexpr,
):
    """Rotates some heads of one token, normed first or not: the tiles of its query, then those of its key.

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
            x, y, y, True, cos, sin, query_weight, epsilon, first, query_heads, query_head_stride, head_size, half,
            is_neox, normed, has_query_weight, False, tile_heads, block, rest_block,
        )  # fmt: skip
    elif has_key:
        x = key + token * key_stride
        y = key_out + token * key_heads * head_size
        first = (tile - query_tiles) * tile_heads
        rotate_heads(
            x, y, y, True, cos, sin, key_weight, epsilon, first, key_heads, key_head_stride, head_size, half,
            is_neox, normed, has_key_weight, False, tile_heads, block, rest_block,
        )  # fmt: skip
