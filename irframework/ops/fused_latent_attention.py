"""Meaning of latent attention that ends in codes of groups. Does not hold kernels."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework.declaration import register_op
from irframework.ops.block_quantization import group_quant_fp8
from irframework.ops.latent_attention import checked_rows, mla_attention
from irframework.ops.packed_sequences import Sequences
from irframework.ops.quantization import allow_one_code

_SHOWN = 6  # tokens of the calls by which graphs are searched


@register_op(activations=("query_nope", "query_rope", "latent"), fuse=True)
def mla_attention_group_quant_fp8(
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
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """Latent attention whose result is quantised, each group of a token with its own scale.

    `group_quant_fp8(mla_attention(...).flatten(-2), group_size, column_major_scales, power_of_two_scales)`: the heads
    of a token lie side by side, as the product behind attention reads them, and a group may reach over several.

    Args:
        query_nope: As all up to causal, as in `mla_attention`.
        query_rope: See `mla_attention`.
        latent: See `mla_attention`.
        cu_seqlens_q: See `mla_attention`.
        max_seqlen_q: See `mla_attention`.
        scale: See `mla_attention`.
        key_up: See `mla_attention`.
        value_up: See `mla_attention`.
        seq_lens: See `mla_attention`.
        max_seqlen_k: See `mla_attention`.
        latent_cache: See `mla_attention`.
        block_table: See `mla_attention`.
        causal: See `mla_attention`.
        group_size: Elements of a group; it divides heads * value_size.
        column_major_scales: Return the scales of one group of all tokens side by side, `[groups, tokens]`.
        power_of_two_scales: Raise scales to powers of two.

    Returns:
        `(q, scale)`: `[tokens, heads * value_size]` in float8_e4m3fn, and `[tokens, groups]`, or `[groups, tokens]`, in
        float32.

    Raises:
        ArgumentError: As `mla_attention` and `group_quant_fp8`.

    Source: As its two parts.
    """
    out = mla_attention.native(
        query_nope, query_rope, latent, cu_seqlens_q, max_seqlen_q, scale, key_up, value_up, seq_lens, max_seqlen_k,
        latent_cache, block_table, causal,
    )  # fmt: skip
    pair: tuple[Tensor, Tensor] = group_quant_fp8.native(
        out.flatten(-2), group_size, column_major_scales, power_of_two_scales
    )
    return pair


@mla_attention_group_quant_fp8.register_spelling
def _grouped(
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
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """A call behind which its result is quantised."""
    out: Tensor = mla_attention(
        query_nope, query_rope, latent, cu_seqlens_q, max_seqlen_q, scale, key_up, value_up, seq_lens, max_seqlen_k,
        latent_cache, block_table, causal,
    )  # fmt: skip
    pair: tuple[Tensor, Tensor] = group_quant_fp8.native(
        out.flatten(-2), group_size, column_major_scales, power_of_two_scales
    )
    return pair


@mla_attention_group_quant_fp8.register_value_check
def _check_grouped_values(
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
) -> None:
    op = "mla_attention_group_quant_fp8"
    sequences = Sequences(op, cu_seqlens_q, max_seqlen_q, seq_lens, max_seqlen_k, block_table)
    rows = checked_rows(sequences, (query_nope, query_rope), latent, latent_cache, (key_up, value_up))
    sequences.check_values(query_nope, rows)


@mla_attention_group_quant_fp8.register_fake
def _grouped_shapes(
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
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    op = "mla_attention_group_quant_fp8"
    sequences = Sequences(op, cu_seqlens_q, max_seqlen_q, seq_lens, max_seqlen_k, block_table)
    rows = checked_rows(sequences, (query_nope, query_rope), latent, latent_cache, (key_up, value_up))
    size = rows.shape[-1] - query_rope.shape[-1] if value_up is None else value_up.shape[-1]
    out = query_nope.new_empty(query_nope.shape[0], query_nope.shape[1] * size)
    pair: tuple[Tensor, Tensor] = group_quant_fp8.native(out, group_size, column_major_scales, power_of_two_scales)
    return pair


@mla_attention_group_quant_fp8.register_input_generator
def _grouped_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    """`shape` as that of `mla_attention`; groups of half a head.

    Graphs are searched for what the calls of 6 tokens look like (`compiler/shown_calls.py`). Among these is decoding
    with and without products and the length of the longest sequence, for each order and kind of scales. More calls of
    other sizes would show tests nothing.
    """
    made: Any = mla_attention.input_generator
    decoding = []
    for number, call in enumerate(made(shape=shape, dtype=dtype, device=device)):
        arguments = mla_attention.named(mla_attention.bind(call))
        if arguments.pop("output_scale") is not None:
            continue
        size = (arguments["query_nope"] if arguments["value_up"] is None else arguments["value_up"]).shape[-1]
        group = max(1, size // 2 if size % 2 == 0 else size)
        yield *arguments.values(), group, number % 2 == 1, number > 1
        if arguments["latent_cache"] is not None and len(arguments["query_nope"]) == _SHOWN:
            decoding.append((arguments, group))
    for (arguments, group), *ways in itertools.product(decoding, (39, None), (False, True), (False, True)):
        yield *(arguments | {"max_seqlen_k": ways[0]}).values(), group, *ways[1:]


allow_one_code(mla_attention_group_quant_fp8, near_zero=2.0**-4)
