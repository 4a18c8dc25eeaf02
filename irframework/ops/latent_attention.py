"""Meaning of multi-head latent attention: all heads share one row of latent keys and values.

Does not hold kernels, and does not own what quantises its result by groups: `fused_latent_attention.py`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.layernorm import check_floating
from irframework.ops.packed_sequences import Sequences, blocks_of, collect, cut, heads_of
from irframework.ops.quantization import FP8, allow_one_code, check_scale, check_scale_values, static_quant_fp8
from irframework.ops.softmax_attention import attend
from irframework.symbolic import same_sizes


@register_op(activations=("query_nope", "query_rope", "latent"), fuse=True)
def mla_attention(
    query_nope: Tensor,
    query_rope: Tensor,
    latent: Tensor | None,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    scale: float,
    key_up: Tensor | None = None,
    value_up: Tensor | None = None,
    seq_lens: Tensor | None = None,
    max_seqlen_k: int | None = None,
    latent_cache: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = True,
    output_scale: Tensor | None = None,
) -> Tensor:
    """Attention of DeepSeek's models, whose keys and values are made from one latent row per token.

    A latent row is `[c, k_rope]`, of `rank` and `rope` elements. Head h has the keys `[key_up[h] @ c, k_rope]` and the
    values `c @ value_up[h]`. The native form never makes them: `q = [query_nope[h] @ key_up[h], query_rope[h]]` meets
    latent rows, `s = scale * q . [c, k_rope]`, `y = (softmax(s) @ c) @ value_up[h]`, which is the same (the absorbed
    form). Sequences and what their queries see are as in `attention`. Without key_up, query_nope has been multiplied
    already; without value_up, what comes back still has to be.

    The softmax is computed in float32 (float64 for float64). Products with key_up and value_up are rounded to the dtype
    of query_nope, as matrix products of models are. With an output scale, the result, rounded to its dtype, is
    quantised: `static_quant_fp8(mla_attention(...), output_scale)`.

    Args:
        query_nope: Parts of the queries without a position, `[tokens, heads, nope]`, floating point; `[tokens, heads,
            rank]` without key_up.
        query_rope: Parts that the rotary embedding has turned, `[tokens, heads, rope]`.
        latent: `[key_tokens, rank + rope]`, normed and turned, sequences one behind the other; None with a cache.
        cu_seqlens_q: Where the queries of each sequence start, and where the last end, `[batch + 1]`, int32.
        max_seqlen_q: Queries of the longest sequence, or more.
        scale: Of the scores; models state it, e.g. `1 / sqrt(nope + rope)`.
        key_up: `[heads, nope, rank]`, or None.
        value_up: `[heads, rank, value_size]`, or None.
        seq_lens: Keys of each sequence, `[batch]`, int32; None: as many as queries.
        max_seqlen_k: Keys of the longest sequence, or more; None: as many as there can be.
        latent_cache: `[num_blocks, block_size, rank + rope]`, or None.
        block_table: Blocks of each sequence in order, `[batch, max_blocks]`, int32. Needed with a cache.
        causal: Queries do not see keys behind their place.
        output_scale: Scale of the codes to return, one float32 number; None: no codes.

    Returns:
        `[tokens, heads, value_size]`, or `[tokens, heads, rank]` without value_up; the dtype of query_nope, or
        float8_e4m3fn with an output scale.

    Raises:
        ArgumentError: Shapes or dtypes do not fit each other, or latent rows are given twice or not at all; lengths
            and blocks as in `attention`.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.
    """
    sequences = Sequences("mla_attention", cu_seqlens_q, max_seqlen_q, seq_lens, max_seqlen_k, block_table)
    rows = checked_rows(sequences, (query_nope, query_rope), latent, latent_cache, (key_up, value_up))
    if output_scale is not None:
        check_scale(sequences.op, "output_scale", output_scale)
    rank = rows.shape[-1] - query_rope.shape[-1]
    if key_up is not None:
        query_nope = torch.einsum("thn,hnr->thr", query_nope, key_up)
    queries = torch.cat((query_nope, query_rope), -1)
    q, (k,), visible = sequences.padded(queries, (rows,), causal)
    k = k.unsqueeze(2)
    # The values are the first part of the keys. torch's fused kernels want heads of one size: sum all, and cut.
    out = collect(attend(q, k, k, visible, scale), cu_seqlens_q, query_nope.shape[0])[..., :rank]
    out = out if value_up is None else torch.einsum("thr,hrv->thv", out, value_up)
    return out if output_scale is None else static_quant_fp8.native(out, output_scale)


_Pair = tuple[Tensor | None, Tensor | None]


def checked_rows(
    sequences: Sequences, queries: tuple[Tensor, Tensor], latent: Tensor | None, cache: Tensor | None, up: _Pair
) -> Tensor:
    """Return the latent rows, wherever they lie, after all shapes and dtypes were found to fit."""
    rows = latent if cache is None else cache
    if rows is None or (latent is not None and cache is not None):
        raise ArgumentError(f"Op {sequences.op!r}: give either latent or latent_cache.")
    _check_shapes(sequences.op, *queries, "latent" if cache is None else "latent_cache", rows, *up)
    sequences.check(queries[0], rows, cache is not None, "latent rows")
    return rows


def _check_shapes(
    op: str,
    query_nope: Tensor,
    query_rope: Tensor,
    name: str,
    rows: Tensor,
    key_up: Tensor | None,
    value_up: Tensor | None,
) -> None:
    wanted = {
        "query_nope": (query_nope, "[tokens, heads, nope]"),
        "query_rope": (query_rope, "[tokens, heads, rope]"),
        name: (rows, "[key_tokens, rank + rope]" if name == "latent" else "[num_blocks, block_size, rank + rope]"),
        "key_up": (key_up, "[heads, nope, rank]"),
        "value_up": (value_up, "[heads, rank, value_size]"),
    }
    for argument, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        check_floating(op, argument, tensor)
        if tensor.dtype != query_nope.dtype:
            raise ArgumentError(
                f"Op {op!r}: argument {argument!r} has dtype {tensor.dtype}, 'query_nope' has {query_nope.dtype}; all "
                "need the same."
            )
        if tensor.dim() != shape.count(",") + 1:
            raise ArgumentError(
                f"Op {op!r}: argument {argument!r} must have shape {shape}, it has {tuple(tensor.shape)}."
            )
    _, heads, nope = query_nope.shape
    rope = query_rope.shape[-1]
    if not same_sizes(query_nope.shape[:-1], query_rope.shape[:-1]):
        raise ArgumentError(
            f"Op {op!r}: arguments 'query_nope' and 'query_rope' have shapes {tuple(query_nope.shape)} and "
            f"{tuple(query_rope.shape)}; they may differ in the last dimension only."
        )
    rank = rows.shape[-1] - rope
    if key_up is None and not same_sizes((nope,), (rank,)):
        raise ArgumentError(
            f"Op {op!r}: argument {name!r} has rows of {rows.shape[-1]}; without key_up they are as long as query_nope "
            f"({nope}) and query_rope ({rope}) together."
        )
    if key_up is not None and not same_sizes(key_up.shape, (heads, nope, rank)):
        raise ArgumentError(
            f"Op {op!r}: argument 'key_up' has shape {tuple(key_up.shape)}, it must be [{heads}, {nope}, {rank}]."
        )
    if value_up is not None and not same_sizes(value_up.shape[:2], (heads, rank)):
        raise ArgumentError(
            f"Op {op!r}: argument 'value_up' has shape {tuple(value_up.shape)}, it must be [{heads}, {rank}, "
            "value_size]."
        )


@mla_attention.register_fake
def _latent_shape(
    query_nope: Tensor,
    query_rope: Tensor,
    latent: Tensor | None,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    scale: float,
    key_up: Tensor | None = None,
    value_up: Tensor | None = None,
    seq_lens: Tensor | None = None,
    max_seqlen_k: int | None = None,
    latent_cache: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = True,
    output_scale: Tensor | None = None,
) -> Tensor:
    sequences = Sequences("mla_attention", cu_seqlens_q, max_seqlen_q, seq_lens, max_seqlen_k, block_table)
    rows = checked_rows(sequences, (query_nope, query_rope), latent, latent_cache, (key_up, value_up))
    if output_scale is not None:
        check_scale(sequences.op, "output_scale", output_scale)
    size = rows.shape[-1] - query_rope.shape[-1] if value_up is None else value_up.shape[-1]
    return query_nope.new_empty(*query_nope.shape[:2], size, dtype=query_nope.dtype if output_scale is None else FP8)


@mla_attention.register_spelling
def _coded(
    query_nope: Tensor,
    query_rope: Tensor,
    latent: Tensor | None,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    scale: float,
    key_up: Tensor | None = None,
    value_up: Tensor | None = None,
    seq_lens: Tensor | None = None,
    max_seqlen_k: int | None = None,
    latent_cache: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = True,
    output_scale: Tensor | None = None,
) -> Tensor:
    """A call behind which its result is quantised, which takes the scale as well."""
    out: Tensor = mla_attention(
        query_nope, query_rope, latent, cu_seqlens_q, max_seqlen_q, scale, key_up, value_up, seq_lens, max_seqlen_k,
        latent_cache, block_table, causal,
    )  # fmt: skip
    return out if output_scale is None else static_quant_fp8.native(out, output_scale)


@mla_attention.register_value_check
def _check_latent_values(
    query_nope: Tensor,
    query_rope: Tensor,
    latent: Tensor | None,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    key_up: Tensor | None,
    value_up: Tensor | None,
    seq_lens: Tensor | None,
    max_seqlen_k: int | None,
    latent_cache: Tensor | None,
    block_table: Tensor | None,
    output_scale: Tensor | None,
) -> None:
    sequences = Sequences("mla_attention", cu_seqlens_q, max_seqlen_q, seq_lens, max_seqlen_k, block_table)
    rows = checked_rows(sequences, (query_nope, query_rope), latent, latent_cache, (key_up, value_up))
    sequences.check_values(query_nope, rows)
    if output_scale is not None:
        check_scale_values("mla_attention", "output_scale", output_scale)


@mla_attention.register_input_generator
def _latent_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of query_nope as multiplied by key_up, or of its rows with the heads side by side."""
    tokens, heads, rank = heads_of(shape)
    rope = max(2, rank // 8)
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    nope, turned = torch.randn(tokens, heads, rank, **options), torch.randn(tokens, heads, rope, **options)
    offsets, longest = cut(tokens, device)
    latent = torch.randn(tokens, rank + rope, **options)
    scale = (rank + rope) ** -0.5
    yield nope, turned, latent, offsets, longest, scale
    decoding = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    seen = torch.randint(1, 40, (tokens,), dtype=torch.int32, device=device)
    count, table = blocks_of(seen, 16)
    cache = torch.randn(count, 16, rank + rope, **options)
    yield nope, turned, None, decoding, 1, scale, None, None, seen, 39, cache, table  # one new token for each sequence
    if rank <= 512:
        key_up = torch.randn(heads, 6, rank, **options) * rank**-0.5
        value_up = torch.randn(heads, rank, 5, **options) * rank**-0.5
        short, up = nope[..., :6], (key_up[:, : min(6, rank)], value_up)
        yield short, turned, latent, offsets, longest, 0.3, *up
        yield short, turned, None, decoding, 1, 0.3, *up, seen, None, cache, table
    lengths = offsets.diff()
    yield nope, turned, latent, offsets, longest, scale, None, None, lengths, longest, None, None, False
    coded = torch.tensor(0.02, device=device)
    yield nope, turned, None, decoding, 1, scale, None, None, seen, 39, cache, table, True, coded


allow_one_code(mla_attention, near_zero=2.0**-4)
