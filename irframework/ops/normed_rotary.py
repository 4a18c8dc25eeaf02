"""Meanings of what decoders with normed queries and keys do before attention: a norm of each head, then the rotation.

Each op is its parts, one after the other, rounded as they round. Does not hold kernels.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.kv_cache import (
    check_slot_values,
    check_tokens,
    check_write,
    reshape_and_cache,
    rotary_embedding_reshape_and_cache,
)
from irframework.ops.layernorm import check_floating, rms_norm
from irframework.ops.rotary import check_heads, check_places, check_positions, rotary_embedding
from irframework.symbolic import same_sizes

_CACHES = ("key_cache", "value_cache")


@register_op(activations=("query", "key"), optional_outputs={1: "key"}, fuse=True)
def qk_norm_rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    epsilon: float,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Norm each head of queries and keys, and rotate them by angles that depend on their positions.

    `q = rms_norm(q, query_weight, epsilon)` and `k = rms_norm(k, key_weight, epsilon)`, over the elements of a head;
    then `rotary_embedding(positions, q, k, cos_sin_cache, head_size, is_neox)`. Normed heads are rounded to their dtype
    before they are rotated.

    Args:
        positions: Positions of the tokens, `[...]`, int32 or int64.
        query: `[..., heads * head_size]` or `[..., heads, head_size]`, with the leading dimensions of positions.
        key: Like query, with its own number of heads; or None.
        query_weight: Scale of the queries' norm, `[head_size]`, the same for all heads; or None.
        key_weight: Scale of the keys' norm, `[head_size]`; or None. None without a key.
        cos_sin_cache: `[max_positions, rotary_dim]`: cosines in the first half of a row, sines in the second.
        head_size: Elements of one head.
        epsilon: Added to the mean squares.
        is_neox: Rotate halves (GPT-NeoX, Llama) instead of neighbours (GPT-J).

    Returns:
        The rotated query and key, with their shapes and dtypes. Without a key, the second is None.

    Raises:
        ArgumentError: As `rms_norm` and `rotary_embedding`; or a weight is given for keys that are not.

    Source: Dehghani et al., "Scaling Vision Transformers to 22 Billion Parameters" (2023), the norms, with the root
    mean square of Zhang and Sennrich (2019), as in Qwen3; Su et al., "RoFormer" (2021).
    """
    _check(positions, query, key, query_weight, key_weight, cos_sin_cache, head_size)
    lead = positions.dim()
    query = _normed(query, query_weight, query.dim() > lead + 1, head_size, epsilon)
    key = None if key is None else _normed(key, key_weight, key.dim() > lead + 1, head_size, epsilon)
    pair: tuple[Tensor, Tensor | None] = rotary_embedding.native(
        positions, query, key, cos_sin_cache, head_size, is_neox
    )
    return pair


def _check(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
) -> None:
    op = "qk_norm_rotary_embedding"
    check_positions(op, positions, cos_sin_cache, head_size)
    for name, x, weight in (("query", query, query_weight), ("key", key, key_weight)):
        if x is not None:
            check_heads(op, name, x, positions.shape, head_size)
        if weight is None:
            continue
        if x is None:
            raise ArgumentError(f"Op {op!r}: argument '{name}_weight' is given, but {name!r} is None.")
        check_floating(op, f"{name}_weight", weight)
        if not same_sizes(weight.shape, (head_size,)):
            raise ArgumentError(
                f"Op {op!r}: argument '{name}_weight' must have shape [{head_size}], one scale for each element of a "
                f"head; it has {tuple(weight.shape)}."
            )


def _normed(x: Tensor, weight: Tensor | None, apart: bool, head_size: int, epsilon: float) -> Tensor:
    """The heads of x, each normed, in the shape of x. `apart`: heads have a dimension of their own."""
    heads = x if apart else x.unflatten(-1, (x.shape[-1] // head_size, head_size))
    normed: Tensor = rms_norm.native(heads, weight, epsilon)
    return normed if apart else normed.flatten(-2)


@qk_norm_rotary_embedding.register_fake
def _shapes(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    epsilon: float,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Models call this in every layer: to run native on fake tensors each time would make compiling slow."""
    _check(positions, query, key, query_weight, key_weight, cos_sin_cache, head_size)
    return query.new_empty(query.shape), None if key is None else key.new_empty(key.shape)


@register_op(activations=_CACHES, allow_inplace=True, fuse=True)
def qk_norm_rotary_embedding_reshape_and_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    epsilon: float,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Norm and rotate heads of queries and keys, and write the keys and the values to their slots in a paged cache.

    `query, key = qk_norm_rotary_embedding(positions, query, key, query_weight, key_weight, cos_sin_cache, head_size,
    epsilon, is_neox)`, then `key_cache, value_cache = reshape_and_cache(key, value, key_cache, value_cache,
    slot_mapping)`: all that a decoder as Qwen3 does between its product for queries, keys and values and its attention.

    Args:
        positions: `[tokens]`, int32 or int64.
        query: `[tokens, heads, head_size]` or `[tokens, heads * head_size]`, floating point.
        key: Like query, with `kv_heads`. Query, key and value may be parts of one tensor.
        value: `[tokens, kv_heads, value_size]` or `[tokens, kv_heads * value_size]`.
        key_cache: `[num_blocks, block_size, kv_heads, head_size]`, the dtype of key. Given away by `maybe_inplace`.
        value_cache: `[num_blocks, block_size, kv_heads, value_size]`, the dtype of value. Given away as well.
        slot_mapping: `[tokens]`, int32 or int64, as in `reshape_and_cache`.
        query_weight: Scale of the queries' norm, `[head_size]`, or None.
        key_weight: Scale of the keys' norm, `[head_size]`, or None.
        cos_sin_cache: `[max_positions, rotary_dim]`, as in `rotary_embedding`.
        head_size: Elements of one head of query and key.
        epsilon: Added to the mean squares.
        is_neox: Rotate halves instead of neighbours.

    Returns:
        `(query, key, key_cache, value_cache)`: the rotated query and key with their shapes, and the caches as they are
        after the write.

    Raises:
        ArgumentError: As `qk_norm_rotary_embedding` and `reshape_and_cache`.

    Source: As its two parts.
    """
    check_tokens("qk_norm_rotary_embedding_reshape_and_cache", positions)
    query, key = qk_norm_rotary_embedding.native(
        positions, query, key, query_weight, key_weight, cos_sin_cache, head_size, epsilon, is_neox
    )
    return query, key, *reshape_and_cache.native(key, value, key_cache, value_cache, slot_mapping)


@qk_norm_rotary_embedding_reshape_and_cache.register_fake
def _shapes_with_caches(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    epsilon: float,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `_shapes`."""
    check_tokens("qk_norm_rotary_embedding_reshape_and_cache", positions)
    _check(positions, query, key, query_weight, key_weight, cos_sin_cache, head_size)
    check_write("reshape_and_cache", key, value, key_cache, value_cache, slot_mapping)
    return (
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        key_cache.new_empty(key_cache.shape),
        value_cache.new_empty(value_cache.shape),
    )


@qk_norm_rotary_embedding.register_value_check
def _check_positions(positions: Tensor, cos_sin_cache: Tensor) -> None:
    check_places("qk_norm_rotary_embedding", positions, cos_sin_cache)


@qk_norm_rotary_embedding_reshape_and_cache.register_value_check
def _check_positions_and_slots(
    positions: Tensor, key_cache: Tensor, slot_mapping: Tensor, cos_sin_cache: Tensor
) -> None:
    check_places("qk_norm_rotary_embedding_reshape_and_cache", positions, cos_sin_cache)
    check_slot_values("qk_norm_rotary_embedding_reshape_and_cache", key_cache, slot_mapping)


def _weights(head_size: int, dtype: torch.dtype, device: torch.device, number: int) -> tuple[Tensor, Tensor]:
    """Scales for a call of this number: of the heads' dtype, or of float32."""
    wide = torch.promote_types(dtype, torch.float32) if number % 2 else dtype
    query_weight, key_weight = (torch.randn(head_size, dtype=dtype, device=device).to(wide) for _ in range(2))
    return query_weight, key_weight


@qk_norm_rotary_embedding.register_input_generator
def _qk_norm_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of the query, heads side by side; there are as many keys."""
    made: Any = rotary_embedding.input_generator
    calls = [call if len(call) == 6 else (*call, True) for call in made(shape=shape, dtype=dtype, device=device)]
    for number, (positions, query, key, table, head_size, is_neox) in enumerate(calls):
        query_weight, key_weight = _weights(head_size, dtype, query.device, number)
        weights = (query_weight, None if key is None else key_weight)
        yield positions, query, key, *weights, table, head_size, 1e-6 if number % 2 else 1e-5, is_neox
    positions, query, key, table, head_size, is_neox = calls[0]
    yield positions, query * 1e-3, key, None, None, table, head_size, 1e-5, is_neox  # epsilon decides


@qk_norm_rotary_embedding_reshape_and_cache.register_input_generator
def _qk_norm_and_cache_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of the query, heads side by side; there are as many keys."""
    made: Any = rotary_embedding_reshape_and_cache.input_generator
    calls = [call if len(call) == 10 else (*call, True) for call in made(shape=shape, dtype=dtype, device=device)]
    for number, (*state, table, head_size, is_neox) in enumerate(calls):
        weights = _weights(head_size, dtype, state[1].device, number)
        yield *state, *weights, table, head_size, 1e-6 if number % 2 else 1e-5, is_neox
    *state, table, head_size, is_neox = calls[0]
    yield *state, None, None, table, head_size, 1e-5, is_neox
