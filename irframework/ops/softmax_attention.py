"""Meanings of the attention ops whose keys and values lie side by side. Does not hold kernels.

Latent attention is in `latent_attention.py`; writing to a cache is in `kv_cache.py`.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.layernorm import check_floating
from irframework.ops.packed_sequences import Sequences, blocks_of, collect, cut, heads_of
from irframework.ops.quantization import FP8, allow_one_code, check_scale_values, static_quant_fp8
from irframework.ops.quantization import check_scale as check_one_scale
from irframework.symbolic import same_sizes


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visible: Tensor | None,
    scale: float,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention over a padded batch: `[batch, queries, heads, value_size]`.

    Args:
        query: `[batch, queries, heads, head_size]`.
        key: `[batch, keys, kv_heads, head_size]`.
        value: `[batch, keys, kv_heads, value_size]`.
        visible: Which keys a query sees, `[batch, queries, keys]`; None: query i sees keys 0 to i.
        scale: Of the scores.
        soft_cap: Limit of the scores, or None.
        sinks: Score that each head gives to no key, `[heads]`, or None.
    """
    batch, count, heads, _ = query.shape
    kv_heads = key.shape[2]
    q, k, v = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    if soft_cap is None and sinks is None:
        if visible is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        elif count == 1:  # the queries of a group are rows of one product: keys are read once, not once per head
            q = q.reshape(batch, kv_heads, heads // kv_heads, q.shape[-1])
            mask = visible.unsqueeze(1).expand(batch, 1, heads // kv_heads, visible.shape[-1])
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
            out = out.reshape(batch, heads, 1, v.shape[-1])
        else:
            mask = visible.unsqueeze(1)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    else:
        out = _attend_step_by_step(q, k, v, visible, scale, soft_cap, sinks)
    out = out.transpose(1, 2)
    if visible is not None:  # a row that sees nothing: zeros, whatever kernel torch took
        out = out.masked_fill(~visible.any(-1)[:, :, None, None], 0.0)
    return out


def _attend_step_by_step(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, soft_cap: float | None, sinks: Tensor | None
) -> Tensor:
    batch, heads, count, size = q.shape
    kv_heads, keys = k.shape[1:3]
    group = heads // kv_heads
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = q.reshape(batch, kv_heads, group * count, size).to(wide)
    scores = (rows @ k.to(wide).transpose(-1, -2)).view(batch, kv_heads, group, count, keys) * scale
    if soft_cap is not None:
        scores = torch.tanh(scores / soft_cap) * soft_cap
    if visible is None:
        visible = torch.ones(count, keys, dtype=torch.bool, device=q.device).tril().unsqueeze(0)
    scores = scores.masked_fill(~visible[:, None, None], -torch.inf)
    # One column more, for no key. Without sinks it is so low that it counts only where nothing else does.
    nothing = scores.new_full((heads,), torch.finfo(wide).min) if sinks is None else sinks.to(wide)
    column = nothing.view(1, kv_heads, group, 1, 1).expand(batch, kv_heads, group, count, 1)
    weights = torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]
    out = weights.reshape(batch, kv_heads, group * count, keys) @ v.to(wide)
    return out.view(batch, heads, count, v.shape[-1]).to(q.dtype)


def check_heads(op: str, query: Tensor, key: Tensor, value: Tensor, names: tuple[str, str, str]) -> None:
    """Check that heads of queries, keys and values `[..., heads, size]` fit each other.

    Raises:
        ArgumentError: dtypes or head sizes differ, or the heads of queries are no multiple of those of keys.
    """
    for name, tensor in zip(names, (query, key, value), strict=True):
        check_floating(op, name, tensor)
        if tensor.dtype != query.dtype:
            raise ArgumentError(
                f"Op {op!r}: argument {name!r} has dtype {tensor.dtype}, {names[0]!r} has {query.dtype}; all need the "
                "same."
            )
    if not same_sizes(key.shape[:-1], value.shape[:-1]):
        raise ArgumentError(
            f"Op {op!r}: arguments {names[1]!r} and {names[2]!r} have shapes {tuple(key.shape)} and "
            f"{tuple(value.shape)}; they may differ in the last dimension only."
        )
    if not same_sizes(query.shape[-1:], key.shape[-1:]):
        raise ArgumentError(
            f"Op {op!r}: argument {names[1]!r} has heads of size {key.shape[-1]}, {names[0]!r} of size "
            f"{query.shape[-1]}; both need the same."
        )
    if key.shape[-2] == 0 or query.shape[-2] % key.shape[-2]:
        raise ArgumentError(
            f"Op {op!r}: {query.shape[-2]} heads of queries are no multiple of {key.shape[-2]} heads of keys."
        )


def check_scale(op: str, head_size: int, scale: float | None) -> float:
    """Return the scale of the scores: the given one, else `1 / sqrt(head_size)`.

    Raises:
        ArgumentError: None is given for heads without elements.
    """
    if scale is not None:
        return scale
    if head_size == 0:
        raise ArgumentError(f"Op {op!r}: heads have no elements.")
    return float(head_size**-0.5)


def _check_rank(op: str, name: str, tensor: Tensor, *shapes: str) -> None:
    if tensor.dim() not in [shape.count(",") + 1 for shape in shapes]:
        raise ArgumentError(
            f"Op {op!r}: argument {name!r} must have shape {' or '.join(shapes)}, it has {tuple(tensor.shape)}."
        )


_PACKED = "[tokens, heads, head_size]"
_BLOCKS = "[num_blocks, block_size, kv_heads, head_size]"


@register_op(activations=("query", "key", "value"), fuse=True)
def attention(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seq_lens: Tensor | None = None,
    max_seqlen_k: int | None = None,
    key_cache: Tensor | None = None,
    value_cache: Tensor | None = None,
    block_table: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    output_scale: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention of sequences of different lengths, packed one behind the other.

    For each sequence and head: `s = scale * q @ k^T`; with a soft cap `s = soft_cap * tanh(s / soft_cap)`; scores of
    keys that a query does not see are left out; `p = exp(s) / (sum(exp(s)) + exp(sink))`, without the sink's term where
    there are no sinks; `y = p @ v`. Query head h reads key head `h // (heads / kv_heads)`. The last query of a
    sequence stands at the place of its last key: query i of q queries and k keys has place `p = k - q + i`, and sees
    keys j with `j <= p` (causal), and with a window `p - window < j` (and `j < p + window` where not causal). A
    query that sees no key, and a token that belongs to no sequence, gives zeros.

    The softmax is computed in float32 (float64 for float64); fused kernels may round the weights p to the dtype of the
    values before they are summed. With an output scale, the result, rounded to its dtype, is quantised:
    `static_quant_fp8(attention(...), output_scale)`.

    Args:
        query: `[tokens, heads, head_size]`, floating point.
        key: `[key_tokens, kv_heads, head_size]`, sequences one behind the other; None where a cache is given.
        value: `[key_tokens, kv_heads, value_size]`; None where a cache is given.
        cu_seqlens_q: Where the queries of each sequence start, and where the last end, `[batch + 1]`, int32.
        max_seqlen_q: Queries of the longest sequence, or more.
        seq_lens: Keys of each sequence, `[batch]`, int32; None: as many as queries.
        max_seqlen_k: Keys of the longest sequence, or more; None: as many as there can be. With a block table that is
            wider than the sequences are long, give it: less is read.
        key_cache: `[num_blocks, block_size, kv_heads, head_size]`, or None.
        value_cache: `[num_blocks, block_size, kv_heads, value_size]`, or None.
        block_table: Blocks of each sequence in order, `[batch, max_blocks]`, int32. Needed with a cache; entries behind
            a sequence's end may be anything.
        scale: Of the scores; default: `1 / sqrt(head_size)`.
        causal: Queries do not see keys behind their place.
        window: How many keys at most a query sees, its own place included; None: all.
        soft_cap: Limit of the scores (Gemma 2), or None.
        sinks: Score of each head that goes to no key, `[heads]`, floating point (GPT-OSS), or None.
        output_scale: Scale of the codes to return, one float32 number; None: no codes.

    Returns:
        `[tokens, heads, value_size]`, the dtype of query; float8_e4m3fn with an output scale.

    Raises:
        ArgumentError: Shapes or dtypes do not fit each other; heads are no multiple of kv_heads; keys are given twice
            or not at all; window < 1; soft_cap <= 0; cu_seqlens_q does not start at 0, does not ascend, or runs past
            the tokens; seq_lens run past the keys, the block table or their bound; a block does not exist.

    Source: Vaswani et al. (2017); grouped queries: Ainslie et al. (2023); blocks: Kwon et al., "PagedAttention" (2023).
    """
    sequences = Sequences("attention", cu_seqlens_q, max_seqlen_q, seq_lens, max_seqlen_k, block_table)
    keys, values = _check_shapes(sequences, query, (key, value), (key_cache, value_cache))
    _check_options(query, window, soft_cap, sinks, output_scale)
    scale = check_scale("attention", query.shape[-1], scale)
    q, (k, v), visible = sequences.padded(query, (keys, values), causal, window)
    out = collect(attend(q, k, v, visible, scale, soft_cap, sinks), cu_seqlens_q, query.shape[0])
    return out if output_scale is None else static_quant_fp8.native(out, output_scale)


_Pair = tuple[Tensor | None, Tensor | None]


def _check_shapes(sequences: Sequences, query: Tensor, packed: _Pair, caches: _Pair) -> tuple[Tensor, Tensor]:
    """Return the keys and values, wherever they lie, after all shapes and dtypes were found to fit."""
    op = sequences.op
    _check_rank(op, "query", query, _PACKED)
    paged = any(cache is not None for cache in caches)
    if paged == any(tensor is not None for tensor in packed):
        raise ArgumentError(f"Op {op!r}: give either key and value, or key_cache and value_cache.")
    names = ("query", "key_cache", "value_cache") if paged else ("query", "key", "value")
    keys, values = caches if paged else packed
    if keys is None or values is None:
        raise ArgumentError(f"Op {op!r}: {names[1]!r} and {names[2]!r} belong together; one of them is None.")
    for name, tensor in zip(names[1:], (keys, values), strict=True):
        _check_rank(op, name, tensor, _BLOCKS if paged else _PACKED)
    check_heads(op, query, keys, values, names)
    sequences.check(query, keys, paged)
    return keys, values


def _check_options(
    query: Tensor, window: int | None, soft_cap: float | None, sinks: Tensor | None, output_scale: Tensor | None
) -> None:
    op = "attention"
    if output_scale is not None:
        check_one_scale(op, "output_scale", output_scale)
    if window is not None and window < 1:
        raise ArgumentError(f"Op {op!r}: window={window} must be at least 1; None is no window.")
    if soft_cap is not None and not soft_cap > 0:
        raise ArgumentError(f"Op {op!r}: soft_cap={soft_cap} must be more than 0; None is no cap.")
    if sinks is not None:
        check_floating(op, "sinks", sinks)
        if not same_sizes(sinks.shape, query.shape[1:2]):
            raise ArgumentError(
                f"Op {op!r}: argument 'sinks' has shape {tuple(sinks.shape)}, it must be [{query.shape[1]}], one score "
                "per head of queries."
            )


@attention.register_fake
def _attention_shape(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seq_lens: Tensor | None = None,
    max_seqlen_k: int | None = None,
    key_cache: Tensor | None = None,
    value_cache: Tensor | None = None,
    block_table: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    output_scale: Tensor | None = None,
) -> Tensor:
    """Models call attention in every layer: to run native on fake tensors each time would make compiling slow."""
    sequences = Sequences("attention", cu_seqlens_q, max_seqlen_q, seq_lens, max_seqlen_k, block_table)
    _, values = _check_shapes(sequences, query, (key, value), (key_cache, value_cache))
    _check_options(query, window, soft_cap, sinks, output_scale)
    check_scale("attention", query.shape[-1], scale)
    return query.new_empty(*query.shape[:2], values.shape[-1], dtype=query.dtype if output_scale is None else FP8)


@attention.register_spelling
def _coded(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seq_lens: Tensor | None = None,
    max_seqlen_k: int | None = None,
    key_cache: Tensor | None = None,
    value_cache: Tensor | None = None,
    block_table: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
    output_scale: Tensor | None = None,
) -> Tensor:
    """A call behind which its result is quantised, which takes the scale as well."""
    out: Tensor = attention(
        query, key, value, cu_seqlens_q, max_seqlen_q, seq_lens, max_seqlen_k, key_cache, value_cache, block_table,
        scale, causal, window, soft_cap, sinks,
    )  # fmt: skip
    return out if output_scale is None else static_quant_fp8.native(out, output_scale)


@attention.register_value_check
def _check_attention_values(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    seq_lens: Tensor | None,
    max_seqlen_k: int | None,
    key_cache: Tensor | None,
    value_cache: Tensor | None,
    block_table: Tensor | None,
    window: int | None,
    soft_cap: float | None,
    sinks: Tensor | None,
    output_scale: Tensor | None,
) -> None:
    sequences = Sequences("attention", cu_seqlens_q, max_seqlen_q, seq_lens, max_seqlen_k, block_table)
    keys, _ = _check_shapes(sequences, query, (key, value), (key_cache, value_cache))
    _check_options(query, window, soft_cap, sinks, output_scale)
    sequences.check_values(query, keys)
    if output_scale is not None:
        check_scale_values("attention", "output_scale", output_scale)


@attention.register_input_generator
def _attention_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of the queries, or of their rows with the heads side by side."""
    tokens, heads, size = heads_of(shape)
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    query = torch.randn(tokens, heads, size, **options)
    kv_heads = heads // 2 if heads % 2 == 0 else heads
    offsets, longest = cut(tokens, device)
    key, value = (torch.randn(tokens, kv_heads, size, **options) for _ in range(2))
    yield query, key, value, offsets, longest
    decoding = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    seen = torch.randint(1, 40, (tokens,), dtype=torch.int32, device=device)
    count, table = blocks_of(seen, 16)
    key_cache, value_cache = (torch.randn(count, 16, kv_heads, size, **options) for _ in range(2))
    paged = (key_cache, value_cache, table)
    yield query, None, None, decoding, 1, seen, 39, *paged  # one new token for each sequence
    sinks = torch.randn(heads, **options)
    rest = (None, 0.3, True, 7, 30.0, sinks)
    yield query, key, value, offsets, longest, None, *rest[:1], None, None, None, *rest[1:]
    yield query, None, None, decoding, 1, seen, None, *paged, *rest[1:4], None, sinks
    yield (
        query,
        key,
        value[..., : max(1, size // 2)],
        offsets,
        longest,
        offsets.diff(),
        longest,
        None,
        None,
        None,
        0.3,
        False,
        5,
    )
    more = offsets.diff() + 3  # the first keys of each sequence came before
    count, table = blocks_of(more, 4)
    key_cache, value_cache = (torch.randn(count, 4, kv_heads, size, **options) for _ in range(2))
    yield query, None, None, offsets, longest, more, longest + 3, key_cache, value_cache, table
    coded = torch.tensor([0.05], device=device)
    yield query, None, None, decoding, 1, seen, 39, *paged, 0.3, True, None, None, None, coded
    yield query, key, value, offsets, longest, None, *rest[:1], None, None, None, *rest[1:], coded


allow_one_code(attention, near_zero=2.0**-4)
