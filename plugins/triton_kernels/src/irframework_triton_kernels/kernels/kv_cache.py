# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Writes to the paged cache of keys and values, alone and behind the rotary embedding."""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.order import after_predecessor
from irframework_triton_kernels.kernels.rotary import angles_of, rotate_heads


@triton.jit
def _copy_heads(
    x,
    y,
    writes,
    first,
    heads,
    head_stride,
    size,
    tile_heads: tl.constexpr,
    block: tl.constexpr,
):
    """Copies `tile_heads` heads of one token to where they lie side by side, if `writes` is true."""
    head = first + tl.arange(0, tile_heads)[:, None]
    at = tl.arange(0, block)[None, :]
    mask = (head < heads) & (at < size) & writes
    x += head.to(tl.int64) * head_stride
    tl.store(y + head * size + at, tl.load(x + at, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["slot_count"])
def cache_kernel(
    slots,
    key,
    value,
    key_cache,
    value_cache,
    slot_count,
    key_heads,
    key_size,
    key_stride,
    key_head_stride,
    value_heads,
    value_size,
    value_stride,
    value_head_stride,
    key_tile_heads: tl.constexpr,
    key_block: tl.constexpr,
    value_tile_heads: tl.constexpr,
    value_block: tl.constexpr,
    early: tl.constexpr,
):
    """Copies some heads of one token to its slot: first the tiles of its key, then those of its value.

    Nothing is written for a slot that the cache does not have.
    """
    if early:
        after_predecessor()
    key_tiles = tl.cdiv(key_heads, key_tile_heads)
    tiles = key_tiles + tl.cdiv(value_heads, value_tile_heads)
    program = tl.program_id(0)
    token = (program // tiles).to(tl.int64)
    tile = program % tiles
    slot = tl.load(slots + token).to(tl.int64)
    writes = (slot >= 0) & (slot < slot_count)
    if tile < key_tiles:
        x = key + token * key_stride
        y = key_cache + slot * key_heads * key_size
        first = tile * key_tile_heads
        _copy_heads(x, y, writes, first, key_heads, key_head_stride, key_size, key_tile_heads, key_block)
    else:
        x = value + token * value_stride
        y = value_cache + slot * value_heads * value_size
        first = (tile - key_tiles) * value_tile_heads
        _copy_heads(x, y, writes, first, value_heads, value_head_stride, value_size, value_tile_heads, value_block)


@triton.jit(do_not_specialize=["positions_count", "slot_count"])
def rotary_cache_kernel(
    positions,
    query,
    key,
    value,
    slots,
    cache,
    query_weight,
    key_weight,
    query_out,
    key_out,
    key_cache,
    value_cache,
    positions_count,
    slot_count,
    epsilon,
    query_heads,
    key_heads,
    head_size,
    half,
    value_heads,
    value_size,
    query_stride,
    query_head_stride,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    cache_stride,
    is_neox: tl.constexpr,
    normed: tl.constexpr,
    has_query_weight: tl.constexpr,
    has_key_weight: tl.constexpr,
    tile_heads: tl.constexpr,
    block: tl.constexpr,
    rest_block: tl.constexpr,
    value_tile_heads: tl.constexpr,
    value_block: tl.constexpr,
    early: tl.constexpr,
):
    """Works on some heads of one token: tiles of its query, then those of its key, then those of its value.

    Query and key are rotated, normed first or not; key and value go to the token's slot. A position outside the angles
    gives NaN, and nothing is written for a slot that the cache does not have.
    """
    if early:
        after_predecessor()
    query_tiles = tl.cdiv(query_heads, tile_heads)
    turned_tiles = query_tiles + tl.cdiv(key_heads, tile_heads)
    tiles = turned_tiles + tl.cdiv(value_heads, value_tile_heads)
    program = tl.program_id(0)
    token = (program // tiles).to(tl.int64)
    tile = program % tiles
    slot = tl.load(slots + token).to(tl.int64)
    writes = (slot >= 0) & (slot < slot_count)
    if tile < turned_tiles:
        cos, sin = angles_of(positions, token, cache, positions_count, cache_stride, half, block)
        if tile < query_tiles:
            x = query + token * query_stride
            y = query_out + token * query_heads * head_size
            rotate_heads(
                x, y, y, True, cos, sin, query_weight, epsilon, tile * tile_heads, query_heads, query_head_stride,
                head_size, half, is_neox, normed, has_query_weight, False, tile_heads, block, rest_block,
            )  # fmt: skip
        else:
            x = key + token * key_stride
            y = key_out + token * key_heads * head_size
            also = key_cache + slot * key_heads * head_size
            first = (tile - query_tiles) * tile_heads
            rotate_heads(
                x, y, also, writes, cos, sin, key_weight, epsilon, first, key_heads, key_head_stride,
                head_size, half, is_neox, normed, has_key_weight, True, tile_heads, block, rest_block,
            )  # fmt: skip
    else:
        x = value + token * value_stride
        y = value_cache + slot * value_heads * value_size
        first = (tile - turned_tiles) * value_tile_heads
        _copy_heads(x, y, writes, first, value_heads, value_head_stride, value_size, value_tile_heads, value_block)
