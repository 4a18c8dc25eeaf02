"""Launches of attention of one query for each sequence, and its torch op."""

from typing import Any

import torch
from torch import Tensor

from irframework_triton_kernels.kernels.decoding import LEAST_SHARE, decode_kernel, shares_kernel
from irframework_triton_kernels.launch.call import (
    abilities_for,
    as_codes,
    as_float,
    code_dtype,
    launch,
    static,
    tiles_of,
    torch_op,
)
from irframework_triton_kernels.tiles import MOST_SHARES, Tile, keys_tile, power_of_two, shares_tile


def shares_of(bound: Any) -> int:
    """Programs that the keys of a sequence are shared out to; all of them while their number is not known."""
    known = static(bound)
    return MOST_SHARES if known is None else max(1, min(MOST_SHARES, tiles_of(known, LEAST_SHARE.value)))


@torch_op()
def decode_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seqlen_k: int | None,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    output_scale: Tensor | None,
    tile: Tile | None = None,
) -> Tensor:
    """Attention of one query for each sequence over a paged cache; `[tokens, heads, value_size]`.

    With an output scale, codes.
    """
    tokens, blocks = query.shape[0], value_cache.shape[0]
    # What a kernel is compiled for is known while it is traced.
    heads, head_size, block_size, kv_heads, value_size = map(int, (*query.shape[1:], *value_cache.shape[1:]))
    codes, hardware = output_scale is not None, abilities_for(query).codes
    y = query.new_empty((tokens, heads, value_size), dtype=code_dtype(query) if codes else query.dtype)
    batch, width = block_table.shape
    group = heads // kv_heads
    shares = shares_of(width * block_size if max_seqlen_k is None else max_seqlen_k)
    tile = tile or keys_tile(group, power_of_two(max(head_size, value_size)), query.element_size())
    value_block = max(16, power_of_two(value_size))
    out, largest, total = y, y, y
    if shares > 1:
        out = query.new_empty((tokens, heads, shares, value_size), dtype=torch.float32)
        largest, total = (query.new_empty((tokens, heads, shares), dtype=torch.float32) for _ in range(2))
    k, v = key_cache.stride(), value_cache.stride()
    given = (query if sinks is None else sinks, query if output_scale is None else output_scale)
    tensors = (
        query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, *given, out, largest, total,
    )  # fmt: skip
    numbers = (
        batch, width, blocks, query.stride(0), query.stride(1), *k[:3], *v[:3], block_table.stride(0), as_float(scale),
        1.0 if soft_cap is None else as_float(soft_cap), 0 if window is None else window, shares,
        kv_heads, group, head_size, value_size, block_size,
        soft_cap is not None, window is not None, sinks is not None, codes, hardware, shares > 1,
        tile.rows, tile.block, max(16, power_of_two(head_size)), value_block,
    )  # fmt: skip
    programs = tokens * kv_heads * tiles_of(group, tile.rows) * shares
    launch(decode_kernel, programs, tensors, tokens, numbers, tile)
    if shares > 1:
        parts = (out, largest, total, given[0], query, given[1], y)
        sizes = (shares, heads, value_size, sinks is not None, codes, hardware, power_of_two(shares), value_block)
        launch(shares_kernel, tokens * heads, parts, tokens * heads, sizes, shares_tile(value_block))
    return as_codes(y) if codes else y
