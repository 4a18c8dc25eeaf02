"""Meaning of the rotary position embedding, and what all rotary embeddings share.

Does not hold the embeddings of other families (`multimodal_rotary.py`), nor kernels.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.layernorm import check_floating, widened
from irframework.symbolic import same_sizes


@register_op(activations=("query", "key"), optional_outputs={1: "key"}, fuse=True)
def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Rotate queries and keys by angles that depend on their positions.

    With `cos, sin = cos_sin_cache[positions].chunk(2, -1)`, and `a, b` the two halves of the first `rotary_dim`
    elements of a head (neox) or its even and odd elements (interleaved): `a' = a*cos - b*sin`, `b' = b*cos + a*sin`.
    Elements behind `rotary_dim` are unchanged. Computed in float32 (float64 for float64 heads) and rounded once.

    Args:
        positions: Positions of the tokens, `[...]` (usually `[tokens]` or `[batch, tokens]`), int32 or int64.
        query: `[..., heads * head_size]` or `[..., heads, head_size]`, with the leading dimensions of positions.
        key: Like query, with its own number of heads; or None.
        cos_sin_cache: `[max_positions, rotary_dim]`: cosines in the first half of a row, sines in the second.
        head_size: Elements of one head.
        is_neox: Rotate halves (GPT-NeoX, Llama) instead of neighbours (GPT-J).

    Returns:
        The rotated query and key, with their shapes and dtypes. Without a key, the second is None.

    Raises:
        ArgumentError: Shapes do not fit each other, or a dtype is wrong; a position is negative or has no row in the
            cache.

    Source: Su et al., "RoFormer" (2021).
    """
    check_positions("rotary_embedding", positions, cos_sin_cache, head_size)
    check_heads("rotary_embedding", "query", query, positions.shape, head_size)
    cos, sin = cos_sin_cache.index_select(0, positions.reshape(-1)).chunk(2, -1)
    lead = positions.dim()
    rotated = rotated_heads(query, cos, sin, query.dim() > lead + 1, head_size, is_neox)
    if key is None:
        return rotated, None
    check_heads("rotary_embedding", "key", key, positions.shape, head_size)
    return rotated, rotated_heads(key, cos, sin, key.dim() > lead + 1, head_size, is_neox)


def check_positions(op: str, positions: Tensor, cos_sin_cache: Tensor, head_size: int) -> None:
    """Raise unless positions are integers and the cache has rows for heads of this size.

    Raises:
        ArgumentError: Names the op and the argument.
    """
    if positions.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            f"Op {op!r}: argument 'positions' must have dtype int32 or int64, it has {positions.dtype}."
        )
    check_floating(op, "cos_sin_cache", cos_sin_cache)
    rotary_dim = cos_sin_cache.shape[-1] if cos_sin_cache.dim() == 2 else None
    if rotary_dim is None or rotary_dim % 2 or rotary_dim > head_size:
        raise ArgumentError(
            f"Op {op!r}: argument 'cos_sin_cache' must have shape [max_positions, rotary_dim] with an even "
            f"rotary_dim of at most head_size={head_size}, it has {tuple(cos_sin_cache.shape)}."
        )


def check_places(op: str, positions: Tensor, cos_sin_cache: Tensor | None) -> None:
    """Raise where a position is negative or has no row in the cache. Reads values, so it has no place in a native body.

    Raises:
        ArgumentError: Names the op and the position.
    """
    if positions.dtype not in (torch.int32, torch.int64) or not positions.numel():
        return  # the first is an error of its own
    lowest, highest = (int(place) for place in torch.aminmax(positions))
    if lowest < 0:
        raise ArgumentError(f"Op {op!r}: argument 'positions' holds {lowest}; positions are at least 0.")
    if cos_sin_cache is not None and cos_sin_cache.dim() == 2 and highest >= cos_sin_cache.shape[0]:
        raise ArgumentError(
            f"Op {op!r}: argument 'positions' holds {highest}, but 'cos_sin_cache' has {cos_sin_cache.shape[0]} rows."
        )


def check_heads(op: str, name: str, x: Tensor, lead: Sequence[Any], head_size: int) -> None:
    """Raise unless x holds heads of this size for tokens of this shape.

    Raises:
        ArgumentError: Names the op and the argument.
    """
    check_floating(op, name, x)
    tokens = len(lead)
    fits = x.dim() in (tokens + 1, tokens + 2) and same_sizes(x.shape[:tokens], lead) and x.shape[-1] % head_size == 0
    if not fits or (x.dim() == tokens + 2 and x.shape[-1] != head_size):
        raise ArgumentError(
            f"Op {op!r}: argument {name!r} has shape {tuple(x.shape)}; with positions of shape {tuple(lead)} and "
            f"head_size={head_size} it must be [..., heads * head_size] or [..., heads, head_size]."
        )


def rotated_heads(x: Tensor, cos: Tensor, sin: Tensor, apart: bool, head_size: int, is_neox: bool) -> Tensor:
    """Rotate all heads of a token by its angles.

    Args:
        x: Heads side by side or apart, as `check_heads` lets through.
        cos: `[tokens, rotary_dim / 2]`.
        sin: Like cos.
        apart: Whether heads have a dimension of their own.
        head_size: Elements of one head.
        is_neox: Rotate halves instead of neighbours.
    """
    count = x.shape[-2] if apart else x.shape[-1] // head_size
    heads = x.reshape(cos.shape[0], count, head_size)
    return turned(heads, cos.unsqueeze(1), sin.unsqueeze(1), is_neox).reshape(x.shape)


def turned(x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    """Rotate the start of the last dimension, and keep what is behind it.

    Args:
        x: `[..., head_size]`, floating point.
        cos: `[..., rotary_dim / 2]`; its leading dimensions and those of x are broadcast.
        sin: Like cos.
        is_neox: Rotate halves instead of neighbours.

    Returns:
        `[..., head_size]` in the dtype of x. Computed in float32 (float64 for float64 x) and rounded once.
    """
    h = widened(x)
    cos, sin = cos.to(h.dtype), sin.to(h.dtype)
    half = cos.shape[-1]
    if is_neox:
        a, b = h[..., :half], h[..., half : 2 * half]
        result = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:
        a, b = h[..., : 2 * half : 2], h[..., 1 : 2 * half : 2]
        result = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    if 2 * half < x.shape[-1]:
        result = torch.cat((result, h[..., 2 * half :].expand(*result.shape[:-1], -1)), -1)
    return result.to(x.dtype)


@rotary_embedding.register_value_check
def _check_rotary_values(
    positions: Tensor, query: Tensor, key: Tensor | None, cos_sin_cache: Tensor, head_size: int, is_neox: bool = True
) -> None:
    check_places("rotary_embedding", positions, cos_sin_cache)


@rotary_embedding.register_input_generator
def _rotary_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of the query, heads side by side: heads of 64 where that divides, else one head."""
    head_size = 64 if shape[-1] % 64 == 0 else shape[-1]
    positions = torch.randint(0, 128, shape[:-1], device=device)
    angles = torch.randn(128, head_size // 2, device=device)
    cache = torch.cat((angles.cos(), angles.sin()), -1).to(dtype)
    query, key = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    yield positions, query, key, cache, head_size
    part = head_size // 4
    narrow = torch.cat((angles[:, :part].cos(), angles[:, :part].sin()), -1).to(dtype)
    for is_neox in (True, False):  # only the first part of a head turns
        yield positions, query, key, narrow, head_size, is_neox
    yield positions, query, key, cache, head_size, False
    yield positions.int(), query, key[..., :head_size], cache, head_size  # one head for all queries
    yield positions, query, None, cache, head_size
    yield positions, query, key, cache.float(), head_size
    heads = query.unflatten(-1, (-1, head_size)) if head_size else query
    yield positions, heads, heads * 2, cache, head_size
