# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Latent attention of one query for each sequence over a paged cache: all heads read the same row for a token.

A row is `[c, k_rope]`. A program reads `c` once, as keys and as values. Shares of a sequence, and what adds them up,
are those of `decoding`; but how many there are, the launch decides by the number of sequences, too.
"""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.decoding import LEAST_SHARE, coded, divided, sequence_of, weighted
from irframework_triton_kernels.kernels.order import after_predecessor


@triton.jit(do_not_specialize=["tokens", "batch", "table_width", "shares"])
def latent_kernel(
    query,
    query_rope,
    cache,
    offsets,
    lengths,
    table,
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
    rope_stride,
    rope_head_stride,
    block_stride,
    slot_stride,
    table_stride,
    scale,
    shares,
    heads: tl.constexpr,
    rank: tl.constexpr,
    rope: tl.constexpr,
    block_size: tl.constexpr,
    has_codes: tl.constexpr,
    hardware: tl.constexpr,
    shared: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_keys: tl.constexpr,
    rank_block: tl.constexpr,
    rope_block: tl.constexpr,
    early: tl.constexpr,
):
    """`tile_heads` heads of one token over one share of its keys.

    `out` is the result, or its codes under `code_scale`, or the sums of shares, `[tokens, heads, shares, rank]` in
    float32, with their `largest` and `total`. What a table or a length says that does not exist is not read.
    """
    if early:
        after_predecessor()
    program = tl.program_id(0)
    share = program % shares
    program = program // shares
    tiles: tl.constexpr = (heads + tile_heads - 1) // tile_heads
    token = (program // tiles).to(tl.int64)
    head = program % tiles * tile_heads + tl.arange(0, tile_heads)
    live = head < heads

    sequence = sequence_of(token, offsets, batch)
    length = tl.load(lengths + sequence, mask=sequence < batch, other=0).to(tl.int32)
    length = tl.minimum(length, table_width * block_size)
    # Whole tiles; the last share may be shorter.
    each = tl.maximum(tl.cdiv(tl.cdiv(length, shares), tile_keys) * tile_keys, LEAST_SHARE)
    begin = share * each
    end = tl.minimum(begin + each, length)

    columns = tl.arange(0, rank_block)
    turned = tl.arange(0, rope_block)
    at = query + token * query_stride + head.to(tl.int64)[:, None] * query_head_stride + columns[None, :]
    q = tl.load(at, mask=live[:, None] & (columns[None, :] < rank), other=0.0)
    at = query_rope + token * rope_stride + head.to(tl.int64)[:, None] * rope_head_stride + turned[None, :]
    q_rope = tl.load(at, mask=live[:, None] & (turned[None, :] < rope), other=0.0)
    most = tl.full((tile_heads,), float("-inf"), tl.float32)
    summed = tl.zeros((tile_heads,), tl.float32)
    y = tl.zeros((tile_heads, rank_block), tl.float32)
    scale = tl.cast(scale, tl.float32)
    table += sequence.to(tl.int64) * table_stride
    for start in range(begin, end, tile_keys):
        place = start + tl.arange(0, tile_keys)
        seen = place < end
        block = tl.load(table + place // block_size, mask=seen, other=-1).to(tl.int64)
        seen = seen & (block >= 0) & (block < blocks)
        row_at = cache + block * block_stride + (place % block_size).to(tl.int64) * slot_stride
        c = tl.load(row_at[:, None] + columns[None, :], mask=seen[:, None] & (columns[None, :] < rank), other=0.0)
        rope_at = row_at[None, :] + (rank + turned[:, None])
        k_rope = tl.load(rope_at, mask=seen[None, :] & (turned[:, None] < rope), other=0.0)
        score = tl.dot(q, tl.trans(c), input_precision="ieee")
        score = tl.dot(q_rope, k_rope, score, input_precision="ieee") * scale
        score = tl.where(seen[None, :], score, float("-inf"))
        most, summed, y = weighted(score, c, most, summed, y)
    row = token * heads + head
    if shared:
        row = row * shares + share
        tl.store(largest + row, most, mask=live)
        tl.store(total + row, summed, mask=live)
    else:
        y = divided(y, most, summed, query, head, live, False)
    at = out + row[:, None] * rank + columns[None, :]
    mask = live[:, None] & (columns[None, :] < rank)
    if has_codes and not shared:
        tl.store(at, coded(y, query, code_scale, hardware), mask=mask)
    else:
        tl.store(at, y.to(out.dtype.element_ty), mask=mask)
