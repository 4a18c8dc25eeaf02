"""Launches of latent attention of one query for each sequence, and its torch op."""

from typing import Any

import torch
from torch import Tensor

from irframework_triton_kernels.kernels.decoding import shares_kernel
from irframework_triton_kernels.kernels.latent import latent_kernel
from irframework_triton_kernels.launch.call import (
    abilities_for,
    as_codes,
    as_float,
    code_dtype,
    device_of,
    launch,
    multiprocessors,
    shared_memory,
    static,
    tiles_of,
    torch_op,
)
from irframework_triton_kernels.launch.decoding import shares_of
from irframework_triton_kernels.tiles import Tile, latent_programs, latent_tile, power_of_two, shares_tile


def shares_among(most: int, programs: Any, wanted: int) -> Any:
    """Shares of the keys of each program (their number may be symbolic), at most `most`, so that as many run as wanted.

    A share is not free: it stores `rank` float32 sums for each head, with 128 heads about as many bytes as 256 keys.
    """
    if isinstance(programs, int):
        return max(1, min(most, wanted // max(1, programs)))
    return torch.sym_max(1, torch.sym_min(most, wanted // torch.sym_max(1, programs)))


@torch_op()
def decode_latent_attention(
    query: Tensor,
    query_rope: Tensor,
    latent_cache: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    max_seqlen_k: int | None,
    scale: float,
    output_scale: Tensor | None,
    tile: Tile | None = None,
) -> Tensor:
    """Attention of one absorbed query for each sequence over latent rows; `[tokens, heads, rank]`.

    With an output scale, codes. The tile, and how far a sequence is shared out, depend on the number of tokens and on
    the largest length, and so do the last bits. While a kernel is traced for any number of tokens, the tile is that of
    many, and only shares follow the number.
    """
    tokens, blocks = query.shape[0], latent_cache.shape[0]
    # What a kernel is compiled for is known while it is traced.
    heads, rank, rope, block_size = map(int, (*query.shape[1:], query_rope.shape[-1], latent_cache.shape[1]))
    codes, hardware = output_scale is not None, abilities_for(query).codes
    y = query.new_empty((tokens, heads, rank), dtype=code_dtype(query) if codes else query.dtype)
    batch, width = block_table.shape
    most = shares_of(width * block_size if max_seqlen_k is None else max_seqlen_k)
    rank_block, rope_block = (max(16, power_of_two(size)) for size in (rank, rope))
    device, known = device_of(query), static(tokens)
    processors = multiprocessors(device)
    tile = tile or latent_tile(
        heads, rank_block, rope_block, query.element_size(), processors, shared_memory(device),
        None if known is None else known * most,
    )  # fmt: skip
    programs = tokens * tiles_of(heads, tile.rows)
    shares = shares_among(most, programs, latent_programs(tile, processors))
    if known is not None:
        most = shares
    shared = most > 1
    out, largest, total = y, y, y
    if shared:
        # One dimension: while it is traced, torch asks of each whether it is 1, and that shares are for many tokens.
        rows = tokens * heads * shares
        out = query.new_empty(rows * rank, dtype=torch.float32)
        largest, total = (query.new_empty(rows, dtype=torch.float32) for _ in range(2))
    code_scale = query if output_scale is None else output_scale
    tensors = (
        query, query_rope, latent_cache, cu_seqlens_q, seq_lens, block_table, code_scale, out, largest, total,
    )  # fmt: skip
    numbers = (
        batch, width, blocks, query.stride(0), query.stride(1), query_rope.stride(0), query_rope.stride(1),
        latent_cache.stride(0), latent_cache.stride(1), block_table.stride(0), as_float(scale), shares,
        heads, rank, rope, block_size, codes, hardware, shared, tile.rows, tile.block, rank_block, rope_block,
    )  # fmt: skip
    launch(latent_kernel, programs * shares, tensors, tokens, numbers, tile)
    if shared:
        sums = (out, largest, total, query, query, code_scale, y)
        sizes = (shares, heads, rank, False, codes, hardware, power_of_two(most), rank_block)
        launch(shares_kernel, tokens * heads, sums, tokens * heads, sizes, shares_tile(rank_block))
    return as_codes(y) if codes else y
