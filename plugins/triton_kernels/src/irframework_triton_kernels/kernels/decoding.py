# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Attention of one query for each sequence over a paged cache, its keys shared out to several programs or not.

A share of keys gives the largest score, the sum of exponentials over that, and the sum of values by these weights; a
second kernel adds up the shares. While there are as many shares as the longest sequence may need, how a sequence is
shared out depends on its own length alone.
"""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.codes import codes_of
from irframework_triton_kernels.kernels.order import after_predecessor

LEAST_SHARE = tl.constexpr(256)  # keys; a shorter sequence is one share


@triton.jit
def _tanh(z):
    """tanh; near zero by its series, for the difference loses digits there."""
    square = z * z
    series = z * (1.0 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    return tl.where(square < 0.04, series, 1.0 - 2.0 / (1.0 + tl.exp(2.0 * z)))


@triton.jit
def sequence_of(token, offsets, batch):
    """Which sequence a token belongs to, which is usually that of its number; `batch` if to none."""
    guess = tl.minimum(token, batch - 1)
    start = tl.load(offsets + guess)
    end = tl.load(offsets + guess + 1)
    low = guess
    if (token < start) | (token >= end):
        low = tl.zeros_like(guess)
        high = low + batch
        while low < high:  # the first sequence that ends behind the token
            middle = (low + high) // 2
            behind = tl.load(offsets + middle + 1) > token
            high = tl.where(behind, middle, high)
            low = tl.where(behind, low, middle + 1)
    return low


@triton.jit(do_not_specialize=["tokens", "batch", "table_width", "shares"])
def decode_kernel(
    query,
    key_cache,
    value_cache,
    offsets,
    lengths,
    table,
    sinks,
    code_scale,
    out,
    largest,
    total,
    tokens,
    batch,
    table_width,
    blocks,
    query_stride,
    query_head_stride,
    key_block_stride,
    key_slot_stride,
    key_head_stride,
    value_block_stride,
    value_slot_stride,
    value_head_stride,
    table_stride,
    scale,
    soft_cap,
    window,
    shares,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_size: tl.constexpr,
    value_size: tl.constexpr,
    block_size: tl.constexpr,
    has_cap: tl.constexpr,
    has_window: tl.constexpr,
    has_sinks: tl.constexpr,
    has_codes: tl.constexpr,
    hardware: tl.constexpr,
    shared: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_keys: tl.constexpr,
    head_block: tl.constexpr,
    value_block: tl.constexpr,
    early: tl.constexpr,
):
    """`tile_heads` heads of one token over one share of its keys, all of which read the same head of keys.

    `out` is the result, or its codes under `code_scale`, or the sums of shares, `[tokens, heads, shares, value_size]`
    in float32, with their `largest` and `total`. What a table or a length says that does not exist is not read.
    """
    if early:
        after_predecessor()
    program = tl.program_id(0)
    share = program % shares
    program = program // shares
    tiles: tl.constexpr = (group + tile_heads - 1) // tile_heads
    tile = program % tiles
    kv_head = (program // tiles) % kv_heads
    token = (program // (tiles * kv_heads)).to(tl.int64)
    member = tile * tile_heads + tl.arange(0, tile_heads)
    head = kv_head * group + member
    live = member < group

    sequence = sequence_of(token, offsets, batch)
    known = sequence < batch
    length = tl.load(lengths + sequence, mask=known, other=0).to(tl.int32)
    length = tl.minimum(length, table_width * block_size)
    # Whole tiles; the last share may be shorter.
    each = tl.maximum(tl.cdiv(tl.cdiv(length, shares), tile_keys) * tile_keys, LEAST_SHARE)
    begin = share * each
    end = tl.minimum(begin + each, length)
    if has_window:
        first_seen = tl.maximum(length - window, 0)
        begin = tl.maximum(begin, first_seen // tile_keys * tile_keys)
    else:
        first_seen = 0

    sizes = tl.arange(0, head_block)
    value_sizes = tl.arange(0, value_block)
    at = query + token * query_stride + head.to(tl.int64)[:, None] * query_head_stride + sizes[None, :]
    q = tl.load(at, mask=live[:, None] & (sizes[None, :] < head_size), other=0.0)
    most = tl.full((tile_heads,), float("-inf"), tl.float32)
    summed = tl.zeros((tile_heads,), tl.float32)
    y = tl.zeros((tile_heads, value_block), tl.float32)
    scale = tl.cast(scale, tl.float32)
    soft_cap = tl.cast(soft_cap, tl.float32)
    keys_at = key_cache + kv_head.to(tl.int64) * key_head_stride
    values_at = value_cache + kv_head.to(tl.int64) * value_head_stride
    table += sequence.to(tl.int64) * table_stride
    for start in range(begin, end, tile_keys):
        place = start + tl.arange(0, tile_keys)
        seen = (place < end) & (place >= first_seen)
        block = tl.load(table + place // block_size, mask=seen, other=-1).to(tl.int64)
        seen = seen & (block >= 0) & (block < blocks)
        slot = (place % block_size).to(tl.int64)
        key_at = keys_at + block * key_block_stride + slot * key_slot_stride
        k = tl.load(key_at[None, :] + sizes[:, None], mask=seen[None, :] & (sizes[:, None] < head_size), other=0.0)
        value_at = values_at + block * value_block_stride + slot * value_slot_stride
        v = tl.load(
            value_at[:, None] + value_sizes[None, :],
            mask=seen[:, None] & (value_sizes[None, :] < value_size),
            other=0.0,
        )
        score = tl.dot(q, k, input_precision="ieee") * scale
        if has_cap:
            score = soft_cap * _tanh(score / soft_cap)
        score = tl.where(seen[None, :], score, float("-inf"))
        most, summed, y = weighted(score, v, most, summed, y)
    heads: tl.constexpr = kv_heads * group
    row = token * heads + head
    if shared:
        row = row * shares + share
        tl.store(largest + row, most, mask=live)
        tl.store(total + row, summed, mask=live)
    else:
        y = divided(y, most, summed, sinks, head, live, has_sinks)
    at = out + row[:, None] * value_size + value_sizes[None, :]
    mask = live[:, None] & (value_sizes[None, :] < value_size)
    if has_codes and not shared:
        tl.store(at, coded(y, query, code_scale, hardware), mask=mask)
    else:
        tl.store(at, y.to(out.dtype.element_ty), mask=mask)


@triton.jit
def weighted(score, values, most, summed, y):
    """The largest score, the sum of weights and that of weighted values, after a tile of keys more.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018).
    """
    above = tl.maximum(most, tl.max(score, 1))
    # Where nothing was seen, -inf is not subtracted from itself.
    base = tl.where(above == float("-inf"), 0.0, above)
    weight = tl.exp(score - base[:, None])
    kept = tl.exp(most - base)
    summed = summed * kept + tl.sum(weight, 1)
    y = y * kept[:, None] + tl.dot(weight.to(values.dtype), values, input_precision="ieee")
    return above, summed, y


@triton.jit
def coded(y, query, code_scale, hardware: tl.constexpr):
    """Codes of a result that is rounded to the dtype of query first."""
    inverse = tl.math.div_rn(1.0, tl.load(code_scale))
    return codes_of(y.to(query.dtype.element_ty).to(tl.float32), inverse, hardware)


@triton.jit
def divided(y, most, summed, sinks, head, live, has_sinks: tl.constexpr):
    """Sums of values by weights, divided by the weights' sum; zeros where nothing was seen."""
    if has_sinks:
        sink = tl.load(sinks + head, mask=live, other=0.0).to(tl.float32)
        # A sink far above the scores: its exponential is infinite, and the result zero, which it is.
        summed = tl.where(summed == 0.0, 1.0, summed + tl.exp(sink - most))
    else:
        summed = tl.where(summed == 0.0, 1.0, summed)
    return y / summed[:, None]


@triton.jit(do_not_specialize=["rows", "shares"])
def shares_kernel(
    parts,
    largest,
    total,
    sinks,
    query,
    code_scale,
    out,
    rows,
    shares,
    heads,
    value_size,
    has_sinks: tl.constexpr,
    has_codes: tl.constexpr,
    hardware: tl.constexpr,
    share_block: tl.constexpr,
    value_block: tl.constexpr,
    early: tl.constexpr,
):
    """Adds up the shares of one head of one token; `out` as in `decode_kernel`. Of `query`, the dtype is looked at."""
    if early:
        after_predecessor()
    row = tl.program_id(0).to(tl.int64)
    share = tl.arange(0, share_block)
    value = tl.arange(0, value_block)
    there = share < shares
    most = tl.load(largest + row * shares + share, mask=there, other=float("-inf"))
    summed = tl.load(total + row * shares + share, mask=there, other=0.0)
    # Shares without keys hold zeros.
    above = tl.max(most, 0)
    kept = tl.exp(most - tl.where(above == float("-inf"), 0.0, above))
    mask = there[:, None] & (value[None, :] < value_size)
    y = tl.load(parts + (row * shares + share[:, None]) * value_size + value[None, :], mask=mask, other=0.0)
    # As one tile of one head.
    y = tl.sum(y * kept[:, None], 0)[None, :]
    summed = tl.sum(summed * kept, 0) + tl.zeros((1,), tl.float32)
    head = (row % heads).to(tl.int32) + tl.zeros((1,), tl.int32)
    y = divided(y, above + tl.zeros((1,), tl.float32), summed, sinks, head, head >= 0, has_sinks)
    at = out + row * value_size + value[None, :]
    if has_codes:
        tl.store(at, coded(y, query, code_scale, hardware), mask=value[None, :] < value_size)
    else:
        tl.store(at, y.to(out.dtype.element_ty), mask=value[None, :] < value_size)
