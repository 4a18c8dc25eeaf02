"""Meanings of the attention ops of encoders: every query sees every key of its sequence. Does not hold kernels."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.layernorm import check_floating
from irframework.ops.packed_sequences import check_integers, check_offsets, collect, cut, heads_of, spread, visible_keys
from irframework.ops.softmax_attention import attend, check_heads, check_scale
from irframework.symbolic import same_sizes, starts_at_multiple


@register_op(activations=("query", "key", "value"))
def mm_encoder_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    seq_lens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Bidirectional attention of a vision or audio encoder: `y = softmax(scale * q @ k^T) @ v` for each sequence.

    Sequences (images, clips) are packed one behind the other, or padded to the same length. Query head h reads key head
    `h // (heads / kv_heads)`. The softmax is computed in float32 (float64 for float64); fused kernels may round its
    weights to the dtype of the values before they are summed. Tokens of no sequence, and those of padding, give zeros.

    Args:
        query: `[tokens, heads, head_size]` (packed) or `[batch, length, heads, head_size]` (padded), floating point.
        key: Like query, with `kv_heads`.
        value: Like key, its heads may have another size.
        cu_seqlens: Packed: where each sequence starts, and where the last ends, `[sequences + 1]`, int32; None: all
            tokens are one sequence.
        max_seqlen: With cu_seqlens: tokens of the longest sequence, or more; None: it is not known, and the native
            form compares all tokens with all.
        seq_lens: Padded: tokens of each sequence, `[batch]`, int32; None: no padding.
        scale: Of the scores; default: `1 / sqrt(head_size)`.

    Returns:
        `[tokens, heads, value_size]` or `[batch, length, heads, value_size]`, the dtype of query.

    Raises:
        ArgumentError: Shapes or dtypes do not fit each other; heads are no multiple of kv_heads; cu_seqlens of a padded
            batch, or seq_lens of packed sequences; cu_seqlens does not start at 0, does not ascend, or runs past the
            tokens; a sequence is longer than max_seqlen or the padded length.

    Source: Vaswani et al. (2017); packed as in Qwen2-VL's vision encoder.
    """
    scale = _check_encoder(query, key, value, cu_seqlens, max_seqlen, seq_lens, scale)
    if cu_seqlens is not None:
        if max_seqlen is None:
            return _attend_by_sequence(query, key, value, cu_seqlens, scale)
        starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
        q, k, v = (spread(tensor, starts, lengths, max_seqlen) for tensor in (query, key, value))
        visible = visible_keys(lengths, lengths, max_seqlen, max_seqlen, causal=False)
        return collect(attend(q, k, v, visible, scale), cu_seqlens, query.shape[0])
    if seq_lens is not None:
        visible = visible_keys(seq_lens, seq_lens, query.shape[1], query.shape[1], causal=False)
        return attend(_aligned(query), _aligned(key), _aligned(value), visible, scale)
    packed = query.dim() == 3
    batched = [tensor.unsqueeze(0) if packed else tensor for tensor in (query, key, value)]
    q, k, v = (_aligned(tensor).transpose(1, 2) for tensor in batched)
    out = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True).transpose(1, 2)
    return out.squeeze(0) if packed else out


def _aligned(x: Tensor) -> Tensor:
    """The tensor, each head at a multiple of 16 bytes: torch's attention on GPUs reads as much at a time, unasked.

    Unless its heads are of another length: then torch takes what reads single elements.
    """
    if x.device.type != "cuda":
        return x
    steps = [stride * x.element_size() for stride in x.stride()[:-1]]
    if not starts_at_multiple(x, 16) or any(isinstance(step, int) and step % 16 for step in steps):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def _check_encoder(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    seq_lens: Tensor | None,
    scale: float | None,
) -> float:
    """Return the scale, after all shapes and dtypes were found to fit."""
    op = "mm_encoder_attention"
    if query.dim() not in (3, 4) or key.dim() != query.dim() or value.dim() != query.dim():
        raise ArgumentError(
            f"Op {op!r}: query, key and value must have shape [tokens, heads, head_size] or [batch, length, heads, "
            f"head_size], they have {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}."
        )
    check_heads(op, query, key, value, ("query", "key", "value"))
    if not same_sizes(query.shape[:-2], key.shape[:-2]):
        raise ArgumentError(
            f"Op {op!r}: arguments 'query' and 'key' have shapes {tuple(query.shape)} and {tuple(key.shape)}; every "
            "token has a query, a key and a value."
        )
    packed = query.dim() == 3
    wrong = ("seq_lens", "cu_seqlens") if packed else ("cu_seqlens", "seq_lens")
    if (seq_lens if packed else cu_seqlens) is not None:
        raise ArgumentError(
            f"Op {op!r}: {wrong[0]} does not go with a query of {query.dim()} dimensions; {wrong[1]} does."
        )
    if max_seqlen is not None and (cu_seqlens is None or max_seqlen < 0):
        raise ArgumentError(
            f"Op {op!r}: max_seqlen={max_seqlen} must be the length of the longest sequence of cu_seqlens."
        )
    if cu_seqlens is not None:
        check_integers(op, "cu_seqlens", cu_seqlens, 1)
        if cu_seqlens.shape[0] == 0:
            raise ArgumentError(f"Op {op!r}: argument 'cu_seqlens' is empty; its first number is 0.")
    if seq_lens is not None:
        check_integers(op, "seq_lens", seq_lens, 1)
        if not same_sizes(seq_lens.shape, query.shape[:1]):
            raise ArgumentError(
                f"Op {op!r}: argument 'seq_lens' has {seq_lens.shape[0]} numbers for {query.shape[0]} sequences."
            )
    return check_scale(op, query.shape[-1], scale)


def _attend_by_sequence(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    tokens = torch.arange(query.shape[0], device=query.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), tokens, right=True)
    visible = (sequence.unsqueeze(1) == sequence) & (tokens < cu_seqlens[-1])
    q, k, v = (_aligned(tensor).unsqueeze(0) for tensor in (query, key, value))
    return attend(q, k, v, visible.unsqueeze(0), scale).squeeze(0)


@mm_encoder_attention.register_fake
def _encoder_shape(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    seq_lens: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    _check_encoder(query, key, value, cu_seqlens, max_seqlen, seq_lens, scale)
    return query.new_empty(*query.shape[:-1], value.shape[-1])


@mm_encoder_attention.register_value_check
def _check_encoder_values(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    seq_lens: Tensor | None = None,
    scale: float | None = None,
) -> None:
    _check_encoder(query, key, value, cu_seqlens, max_seqlen, seq_lens, scale)
    op = "mm_encoder_attention"
    if cu_seqlens is not None:
        bound = None if max_seqlen is None else ("max_seqlen", max_seqlen)
        check_offsets(op, "cu_seqlens", cu_seqlens, query.shape[0], bound)
    for sequence, length in enumerate([] if seq_lens is None else seq_lens.tolist()):
        if not 0 <= length <= query.shape[1]:
            raise ArgumentError(
                f"Op {op!r}: argument 'seq_lens' gives sequence {sequence} a length of {length}; sequences are padded "
                f"to {query.shape[1]}."
            )


@mm_encoder_attention.register_input_generator
def _encoder_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of the packed queries, or of their rows with the heads side by side."""
    tokens, heads, size = heads_of(shape)
    query, key, value = (torch.randn(tokens, heads, size, dtype=dtype, device=device) for _ in range(3))
    offsets, longest = cut(tokens, device)
    yield query, key, value, offsets, longest
    yield query, key, value, offsets, None, None, 0.3
    yield query, key[:, :1], value[:, :1, : max(1, size // 2)]  # one head of keys for all
    rows = [tensor.unflatten(0, (1, tokens)).expand(2, -1, -1, -1) for tensor in (query, key, value)]
    yield *rows, None, None, torch.tensor([tokens, tokens // 2], dtype=torch.int32, device=device)
    yield (*rows,)


@register_op(activations=("query", "key", "value"))
def rel_pos_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_pos_h: Tensor,
    rel_pos_w: Tensor,
    scale: float | None = None,
) -> Tensor:
    """Attention between places of two grids, with biases that depend on how far apart rows and columns are.

    For query place (a, b) and key place (c, d): `s = scale * q . k + q . rel_pos_h[dist(a, c)] + q . rel_pos_w[dist(b,
    d)]` and `y = softmax(s) @ v`. With grids of equal size n, `dist(a, c) = a - c + n - 1`; for m queries and n keys
    along an axis, places are stretched to the finer grid: `dist(a, c) = floor(a * max(n / m, 1) - c * max(m / n, 1) +
    (n - 1) * max(m / n, 1))`. A table whose length is not `2 * max(m, n) - 1` is interpolated linearly to it. Computed
    in float32 (float64 for float64) and rounded once.

    Args:
        query: `[batch, height, width, heads, head_size]`, floating point.
        key: `[batch, key_height, key_width, heads, head_size]`.
        value: Like key, its heads may have another size.
        rel_pos_h: Vectors for distances along the height, `[distances, head_size]`, floating point.
        rel_pos_w: Vectors for distances along the width, `[distances, head_size]`, floating point.
        scale: Of the products of queries and keys; default: `1 / sqrt(head_size)`.

    Returns:
        `[batch, height, width, heads, value_size]`, the dtype of query.

    Raises:
        ArgumentError: Shapes or dtypes do not fit each other.

    Source: Li et al., "MViTv2" (2022); as in ViTDet and SAM.
    """
    scale = _check_grids(query, key, value, rel_pos_h, rel_pos_w, scale)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    q, k, v = (tensor.to(wide).permute(0, 3, 1, 2, 4) for tensor in (query, key, value))
    by_row = _vectors(rel_pos_h.to(wide), query.shape[1], key.shape[1])
    by_column = _vectors(rel_pos_w.to(wide), query.shape[2], key.shape[2])
    bias = torch.einsum("bnhwc,hkc->bnhwk", q, by_row).unsqueeze(-1)
    bias = bias + torch.einsum("bnhwc,wkc->bnhwk", q, by_column).unsqueeze(-2)
    scores = q.flatten(2, 3) @ k.flatten(2, 3).transpose(-1, -2) * scale
    out = torch.softmax(scores + bias.flatten(-2).flatten(2, 3), -1) @ v.flatten(2, 3)
    grid = out.view(*out.shape[:2], *query.shape[1:3], out.shape[-1])
    return grid.permute(0, 2, 3, 1, 4).to(query.dtype)


def _check_grids(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_pos_h: Tensor,
    rel_pos_w: Tensor,
    scale: float | None,
) -> float:
    """Return the scale, after all shapes and dtypes were found to fit."""
    op = "rel_pos_attention"
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 5:
            raise ArgumentError(
                f"Op {op!r}: argument {name!r} must have shape [batch, height, width, heads, size], it has "
                f"{tuple(tensor.shape)}."
            )
    check_heads(op, query, key, value, ("query", "key", "value"))
    if not same_sizes(query.shape[:1], key.shape[:1]) or not same_sizes(query.shape[3:4], key.shape[3:4]):
        raise ArgumentError(
            f"Op {op!r}: arguments 'query' and 'key' have shapes {tuple(query.shape)} and {tuple(key.shape)}; batch "
            "and heads must be equal."
        )
    for name, table in (("rel_pos_h", rel_pos_h), ("rel_pos_w", rel_pos_w)):
        check_floating(op, name, table)
        if table.dim() != 2 or not same_sizes(table.shape[1:], query.shape[-1:]) or table.shape[0] == 0:
            raise ArgumentError(
                f"Op {op!r}: argument {name!r} must have shape [distances, {query.shape[-1]}], it has "
                f"{tuple(table.shape)}."
            )
    return check_scale(op, query.shape[-1], scale)


@rel_pos_attention.register_fake
def _grids_shape(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rel_pos_h: Tensor,
    rel_pos_w: Tensor,
    scale: float | None = None,
) -> Tensor:
    _check_grids(query, key, value, rel_pos_h, rel_pos_w, scale)
    return query.new_empty(*query.shape[:-1], value.shape[-1])


def _vectors(table: Tensor, queries: int, keys: int) -> Tensor:
    """The vector of each pair of a query's and a key's place along an axis, `[queries, keys, head_size]`."""
    distances = 2 * max(queries, keys) - 1
    if table.shape[0] != distances and distances > 0:
        table = F.interpolate(table.t().unsqueeze(0), size=distances, mode="linear").squeeze(0).t()
    rows, columns = (torch.arange(count, device=table.device) for count in (queries, keys))
    if queries == keys:
        places = rows.unsqueeze(1) - columns + (keys - 1)
    else:  # at places of the finer grid; in float64, so that a product of whole numbers stays one
        finer, coarser = max(keys / queries, 1.0) if queries else 1.0, max(queries / keys, 1.0) if keys else 1.0
        stretched = rows.double().unsqueeze(1) * finer - columns.double() * coarser + (keys - 1) * coarser
        places = stretched.long()
    return table.index_select(0, places.reshape(-1)).view(queries, keys, table.shape[1])


@rel_pos_attention.register_input_generator
def _rel_pos_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of the queries; or of rows with the heads side by side, one for each of several small grids."""
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    if len(shape) == 5:
        batch, height, width, heads, size = shape
    else:
        batch, heads, size = heads_of(shape)
        height, width = 3, 2
    query, key, value = (torch.randn(batch, height, width, heads, size, **options) for _ in range(3))
    by_row, by_column = (torch.randn(max(1, 2 * count - 1), size, **options) for count in (height, width))
    yield query, key, value, by_row, by_column
    yield query, key, value[..., : max(1, size // 2)], by_row, torch.randn(2 * width + 3, size, **options), 0.3
    if height > 1:
        yield query, key[:, : height // 2], value[:, : height // 2], by_row, by_column
