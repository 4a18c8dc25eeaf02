"""Meaning of the rotary position embedding. Does not hold kernels."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.layernorm import check_floating
from irframework.symbolic import same_sizes


@register_op(activations=("query", "key"))
def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor]:
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
        The rotated query and key, with their shapes and dtypes. Without a key, the second is an empty tensor `[0]`.

    Raises:
        ArgumentError: Shapes do not fit each other, or a dtype is wrong.

    Source: Su et al., "RoFormer" (2021).
    """
    if positions.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            f"Op 'rotary_embedding': argument 'positions' must have dtype int32 or int64, it has {positions.dtype}."
        )
    check_floating("rotary_embedding", "query", query)
    check_floating("rotary_embedding", "cos_sin_cache", cos_sin_cache)
    rotary_dim = cos_sin_cache.shape[-1] if cos_sin_cache.dim() == 2 else None
    if rotary_dim is None or rotary_dim % 2 or rotary_dim > head_size:
        raise ArgumentError(
            f"Op 'rotary_embedding': argument 'cos_sin_cache' must have shape [max_positions, rotary_dim] with an even "
            f"rotary_dim of at most head_size={head_size}, it has {tuple(cos_sin_cache.shape)}."
        )
    angles = cos_sin_cache.index_select(0, positions.reshape(-1))
    rotated = _rotate("query", query, positions, angles, head_size, is_neox)
    if key is None:
        return rotated, query.new_empty(0)
    check_floating("rotary_embedding", "key", key)
    return rotated, _rotate("key", key, positions, angles, head_size, is_neox)


def _rotate(name: str, x: Tensor, positions: Tensor, angles: Tensor, head_size: int, is_neox: bool) -> Tensor:
    lead = positions.dim()
    fits = (
        x.dim() in (lead + 1, lead + 2) and same_sizes(x.shape[:lead], positions.shape) and x.shape[-1] % head_size == 0
    )
    if not fits or (x.dim() == lead + 2 and x.shape[-1] != head_size):
        raise ArgumentError(
            f"Op 'rotary_embedding': argument {name!r} has shape {tuple(x.shape)}; with positions of shape "
            f"{tuple(positions.shape)} and head_size={head_size} it must be [..., heads * head_size] or "
            "[..., heads, head_size]."
        )
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    count = x.shape[-2] if x.dim() == lead + 2 else x.shape[-1] // head_size
    heads = x.reshape(angles.shape[0], count, head_size)
    cos, sin = angles.to(wide).unsqueeze(1).chunk(2, -1)
    half = cos.shape[-1]
    h = heads.to(wide)
    if is_neox:
        a, b = h[..., :half], h[..., half : 2 * half]
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:
        a, b = h[..., : 2 * half : 2], h[..., 1 : 2 * half : 2]
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    if 2 * half < head_size:
        turned = torch.cat((turned, h[..., 2 * half :]), -1)
    return turned.to(x.dtype).reshape(x.shape)


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
    yield positions.int(), query, key[..., :head_size], cache, head_size  # one head for all queries
    yield positions, query, key, cache.float(), head_size
    heads = query.unflatten(-1, (-1, head_size)) if head_size else query
    yield positions, heads, heads * 2, cache, head_size
