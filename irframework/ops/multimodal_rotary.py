"""Meanings of the rotary embeddings of multimodal and long-context models, and of the one with angles given directly.

Does not hold the usual one (`rotary.py`), nor kernels.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.layernorm import check_floating
from irframework.ops.rotary import check_heads, check_places, check_positions, rotated_heads, turned
from irframework.symbolic import same_sizes


@register_op(activations=("query", "key"), optional_outputs={1: "key"})
def mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    mrope_section: list[int],
    is_neox: bool = True,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rotate queries and keys of a multimodal model: each frequency by the time, the row or the column of a token.

    As `rotary_embedding`, but frequency j takes its row of the cache at `positions[axis(j)]`, where axis 0 is time, 1
    the row and 2 the column in an image. With sections `t, h, w`: the first t frequencies belong to axis 0, the next h
    to axis 1, the last w to axis 2 (Qwen2-VL). Interleaved, `axis(j) = j % 3` for `j % 3 = 1` and `j < 3 * h`, and for
    `j % 3 = 2` and `j < 3 * w`; all others belong to axis 0 (Qwen3-VL). A token of text has the same position on all
    axes, and is rotated as by `rotary_embedding`.

    Args:
        positions: `[3, ...]` (usually `[3, tokens]` or `[3, batch, tokens]`), int32 or int64.
        query: `[..., heads * head_size]` or `[..., heads, head_size]`, with the leading dimensions of one axis.
        key: Like query, with its own number of heads; or None.
        cos_sin_cache: `[max_positions, rotary_dim]`: cosines in the first half of a row, sines in the second.
        head_size: Elements of one head.
        mrope_section: Frequencies of the three axes; their sum is `rotary_dim / 2`.
        is_neox: Rotate halves (Qwen) instead of neighbours (GLM-4V).
        interleaved: Deal the frequencies out to the axes in turn.

    Returns:
        The rotated query and key, with their shapes and dtypes; without a key, the second is None.

    Raises:
        ArgumentError: Shapes or sections do not fit each other, or a dtype is wrong; a position is negative or has no
            row in the cache.

    Source: Wang et al., "Qwen2-VL" (2024); Qwen3-VL for the interleaved form.
    """
    check_positions("mrope", positions, cos_sin_cache, head_size)
    if positions.dim() == 0 or not same_sizes(positions.shape[:1], (3,)):
        raise ArgumentError(
            f"Op 'mrope': argument 'positions' must have shape [3, ...], it has {tuple(positions.shape)}."
        )
    half, lead = cos_sin_cache.shape[-1] // 2, positions.shape[1:]
    if len(mrope_section) != 3 or sum(mrope_section) != half or min(mrope_section) < 0:
        raise ArgumentError(
            f"Op 'mrope': mrope_section={list(mrope_section)} must hold three numbers whose sum is half the rotary_dim "
            f"of 'cos_sin_cache', {half}."
        )
    check_heads("mrope", "query", query, lead, head_size)
    frequency = torch.arange(half, device=positions.device)
    if interleaved:
        row = (frequency % 3 == 1) & (frequency < 3 * mrope_section[1])
        column = (frequency % 3 == 2) & (frequency < 3 * mrope_section[2])
    else:
        column = frequency >= mrope_section[0] + mrope_section[1]
        row = (frequency >= mrope_section[0]) & ~column
    axis = torch.where(row, 1, torch.where(column, 2, 0))
    places = positions.reshape(3, -1).index_select(0, axis).t()
    cos, sin = cos_sin_cache[places, frequency], cos_sin_cache[places, half + frequency]
    rotated = rotated_heads(query, cos, sin, query.dim() > len(lead) + 1, head_size, is_neox)
    if key is None:
        return rotated, None
    check_heads("mrope", "key", key, lead, head_size)
    return rotated, rotated_heads(key, cos, sin, key.dim() > len(lead) + 1, head_size, is_neox)


@register_op(activations=("query", "key"), optional_outputs={1: "key"})
def dual_chunk_rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    chunk_size: int,
    local_size: int,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Rotate keys by their place in a chunk, and queries five times, for the keys of near and of far chunks.

    A long text is cut into chunks of `n = chunk_size - local_size` tokens, so that no angle is larger than those the
    model was trained with. With `i = position % n`, keys are rotated as at position i, and queries as at

    * `i`, for keys of the same chunk;
    * `min(i + n, chunk_size)`, for keys of the chunk before (successive);
    * `min(2 * n - 1, chunk_size)`, for keys of all earlier chunks (inter);
    * `i + n`, and 5. `i + chunk_size`: the successive and the inter one without the bound, with which sparse attention
      estimates which keys matter.

    Each rotation is that of `rotary_embedding`.

    Args:
        positions: Positions of the tokens, `[...]`, int32 or int64; they may lie behind the end of the cache.
        query: `[..., heads * head_size]` or `[..., heads, head_size]`, with the leading dimensions of positions.
        key: Like query, with its own number of heads; or None.
        cos_sin_cache: `[max_positions, rotary_dim]`, as in `rotary_embedding`, with at least `chunk_size + n` rows.
        head_size: Elements of one head.
        chunk_size: The longest distance that is told apart; between 1 and the length the model was trained with.
        local_size: How much shorter chunks are, so that neighbours in different chunks keep their distance; between 0
            and `chunk_size - 1`.
        is_neox: Rotate halves instead of neighbours.

    Returns:
        The five rotated queries, one behind the other in the order above: `[..., 5 * heads * head_size]` or
        `[..., 5 * heads, head_size]`; and the rotated key with its shape, None without one.

    Raises:
        ArgumentError: Shapes or sizes do not fit each other, or a dtype is wrong; a position is negative.

    Source: An et al., "Training-Free Long-Context Scaling of Large Language Models" (2024); Qwen2.5-1M.
    """
    op = "dual_chunk_rotary_embedding"
    check_positions(op, positions, cos_sin_cache, head_size)
    if not 0 <= local_size < chunk_size:
        raise ArgumentError(
            f"Op {op!r}: local_size={local_size} must be at least 0 and less than chunk_size={chunk_size}."
        )
    length = chunk_size - local_size
    if cos_sin_cache.shape[0] < chunk_size + length:
        raise ArgumentError(
            f"Op {op!r}: argument 'cos_sin_cache' must have at least 2 * chunk_size - local_size = "
            f"{chunk_size + length} rows, it has {cos_sin_cache.shape[0]}."
        )
    check_heads(op, "query", query, positions.shape, head_size)
    lead = positions.dim()
    inside = positions.reshape(-1) % length
    places = (
        inside,
        (inside + length).clamp_max(chunk_size),
        torch.full_like(inside, min(2 * length - 1, chunk_size)),
        inside + length,
        inside + chunk_size,
    )
    angles = cos_sin_cache.index_select(0, torch.stack(places, 1).reshape(-1))
    cos, sin = angles.reshape(inside.shape[0], len(places), 1, angles.shape[-1]).chunk(2, -1)
    apart = query.dim() > lead + 1
    count = query.shape[-2] if apart else query.shape[-1] // head_size
    queries = turned(query.reshape(inside.shape[0], 1, count, head_size), cos, sin, is_neox)
    heads = (len(places) * count, head_size) if apart else (len(places) * count * head_size,)
    queries = queries.reshape(*positions.shape, *heads)
    if key is None:
        return queries, None
    check_heads(op, "key", key, positions.shape, head_size)
    cos, sin = cos[:, 0, 0], sin[:, 0, 0]
    return queries, rotated_heads(key, cos, sin, key.dim() > lead + 1, head_size, is_neox)


@register_op
def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, is_neox: bool = True, heads_dim: int = -2, doubled: bool = False
) -> Tensor:
    """Rotate heads by angles that are given directly, as in vision encoders and in the models of transformers.

    With `a, b` the two halves of the first `rotary_dim` elements of a head (neox) or its even and odd elements
    (interleaved): `a' = a*cos - b*sin`, `b' = b*cos + a*sin`. Elements behind `rotary_dim` are unchanged. Computed in
    float32 (float64 for float64 heads) and rounded once.

    Args:
        x: `[..., tokens, heads, head_size]`, or `[..., heads, tokens, head_size]` with `heads_dim=-3`; floating point.
        cos: `[..., tokens, rotary_dim / 2]`, floating point. Leading dimensions may be missing or 1; all heads of a
            token have the same angles.
        sin: Like cos.
        is_neox: Rotate halves instead of neighbours.
        heads_dim: Which dimension of x are the heads: -2, or -3 for the layout that attention takes.
        doubled: cos and sin hold every angle twice, `[..., tokens, rotary_dim]`: two halves that are equal for neox,
            else neighbours. The first of two is read.

    Returns:
        Like x.

    Raises:
        ArgumentError: Shapes do not fit each other, or an argument is not floating point.

    Source: Su et al., "RoFormer" (2021).
    """
    op = "apply_rotary_emb"
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        check_floating(op, name, tensor)
    if heads_dim not in (-2, -3):
        raise ArgumentError(f"Op {op!r}: heads_dim must be -2 or -3, counted from the end of 'x'; got {heads_dim}.")
    if x.dim() < 3 or not 2 <= cos.dim() < x.dim() or not same_sizes(sin.shape, cos.shape):
        raise _unfit(x, cos, sin)
    if doubled and cos.shape[-1] % 2:
        raise ArgumentError(f"Op {op!r}: with doubled=True the angles come in pairs, but {cos.shape[-1]} were given.")
    if doubled:
        half = cos.shape[-1] // 2
        cos, sin = ((t[..., :half] if is_neox else t[..., ::2]) for t in (cos, sin))
    cos, sin = cos.unsqueeze(heads_dim), sin.unsqueeze(heads_dim)
    fits = all(
        (type(given) is int and given == 1) or same_sizes((given,), (size,))
        for given, size in zip(cos.shape[-2::-1], x.shape[-2::-1], strict=False)
    )
    if not fits or 2 * cos.shape[-1] > x.shape[-1]:
        raise _unfit(x, cos.squeeze(heads_dim), sin.squeeze(heads_dim))
    return turned(x, cos, sin, is_neox)


def _unfit(x: Tensor, cos: Tensor, sin: Tensor) -> ArgumentError:
    return ArgumentError(
        f"Op 'apply_rotary_emb': arguments 'cos' and 'sin' have shapes {tuple(cos.shape)} and {tuple(sin.shape)}, 'x' "
        f"has {tuple(x.shape)}. Both must be [..., tokens, rotary_dim / 2] with at most half a head of 'x', and 'x' "
        "[..., tokens, heads, head_size], or [..., heads, tokens, head_size] with heads_dim=-3. Angles that are given "
        "twice need doubled=True."
    )


@mrope.register_value_check
def _check_mrope_values(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    mrope_section: list[int],
    is_neox: bool = True,
    interleaved: bool = False,
) -> None:
    check_places("mrope", positions, cos_sin_cache)


@dual_chunk_rotary_embedding.register_value_check
def _check_dual_chunk_values(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    chunk_size: int,
    local_size: int,
    is_neox: bool = True,
) -> None:
    check_places("dual_chunk_rotary_embedding", positions, None)


def _head_size_of(width: int) -> int:
    return 64 if width % 64 == 0 else width


def _cache(rows: int, half: int, dtype: torch.dtype, device: str) -> Tensor:
    angles = torch.randn(rows, half, device=device)
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


@mrope.register_input_generator
def _mrope_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of the query, heads side by side: heads of 64 where that divides, else one head."""
    size = _head_size_of(shape[-1])
    positions = torch.randint(0, 128, (3, *shape[:-1]), device=device)
    query, key = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    half = size // 2
    section = [half - 2 * (half // 3), half // 3, half // 3]
    cache = _cache(128, half, dtype, device)
    yield positions, query, key, cache, size, section
    yield positions, query, key, cache.float(), size, section, True, True
    part = size // 4
    yield positions, query, key, _cache(128, part, dtype, device), size, [part, 0, 0], False
    yield positions.int(), query, key[..., :size], cache, size, [0, half, 0]


@dual_chunk_rotary_embedding.register_input_generator
def _dual_chunk_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of the query, heads side by side: heads of 64 where that divides, else one head."""
    size = _head_size_of(shape[-1])
    positions = torch.randint(0, 1000, shape[:-1], device=device)
    query, key = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    cache = _cache(128, size // 2, dtype, device)
    yield positions, query, key, cache, size, 64, 16
    yield positions.int(), query, key[..., :size], cache.float(), size, 64, 0
    yield positions, query, key, _cache(128, size // 4, dtype, device), size, 48, 40, False


@apply_rotary_emb.register_input_generator
def _apply_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of the heads side by side: heads of 64 where that divides, else one head."""
    size = _head_size_of(shape[-1])
    x = torch.randn(shape, dtype=dtype, device=device).reshape(*shape[:-1], shape[-1] // max(size, 1), size)
    angles = torch.randn(*shape[:-1], size // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    yield x, cos.to(dtype), sin.to(dtype)
    yield x, cos, sin, False
    yield x.transpose(-2, -3), cos, sin, True, -3
    yield x, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), True, -2, True
    yield x, cos[..., : size // 4], sin[..., : size // 4]
