"""Meanings of the writes to a paged cache of keys and values, alone and behind the rotary embedding.

Does not hold kernels, and does not own attention, which reads the cache.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.layernorm import check_floating
from irframework.ops.rotary import check_places, rotary_embedding
from irframework.symbolic import same_sizes

_CACHES = ("key_cache", "value_cache")


@register_op(activations=_CACHES, allow_inplace=True, fuse=True)
def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the keys and values of tokens to their slots in a paged cache.

    `key_cache[slot // block_size, slot % block_size] = key[token]`, where `slot = slot_mapping[token]`; so for values.
    A token with a negative slot is left out, as padding is. Values are copied bit for bit.

    Args:
        key: `[tokens, kv_heads, head_size]` or `[tokens, kv_heads * head_size]`, floating point; rows may be parts of
            longer ones.
        value: Like key, with its own `value_size`.
        key_cache: `[num_blocks, block_size, kv_heads, head_size]`, the dtype of key. Given away by `maybe_inplace`.
        value_cache: `[num_blocks, block_size, kv_heads, value_size]`, the dtype of value. Given away as well.
        slot_mapping: `[tokens]`, int32 or int64. Each slot at most once: which of two tokens stays is not said.

    Returns:
        `(key_cache, value_cache)` as they are after the write.

    Raises:
        ArgumentError: Shapes or dtypes do not fit each other; or, where values are checked, a slot lies behind the end
            of the cache. Where they are not, such a token is left out.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention" (2023).
    """
    check_write("reshape_and_cache", key, value, key_cache, value_cache, slot_mapping)
    return _written(key, key_cache, slot_mapping), _written(value, value_cache, slot_mapping)


def check_write(
    op: str, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Raise unless keys and values fit their caches and the slots.

    Raises:
        ArgumentError: Names the op and the argument.
    """
    _check_slots(op, slot_mapping)
    _check_written(op, "key", key, key_cache, slot_mapping)
    _check_written(op, "value", value, value_cache, slot_mapping)
    if not same_sizes(key_cache.shape[:2], value_cache.shape[:2]):
        raise ArgumentError(
            f"Op {op!r}: argument 'value_cache' has shape {tuple(value_cache.shape)}, 'key_cache' has "
            f"{tuple(key_cache.shape)}; both need the same number of blocks, of the same size."
        )


def _check_slots(op: str, slots: Tensor) -> None:
    if slots.dtype not in (torch.int32, torch.int64) or slots.dim() != 1:
        raise ArgumentError(
            f"Op {op!r}: argument 'slot_mapping' must be a vector of int32 or int64, it has dtype {slots.dtype} and "
            f"shape {tuple(slots.shape)}."
        )


def _check_written(op: str, name: str, x: Tensor, cache: Tensor, slots: Tensor) -> None:
    check_floating(op, name, x)
    if cache.dtype != x.dtype or cache.dim() != 4:
        raise ArgumentError(
            f"Op {op!r}: argument '{name}_cache' must have dtype {x.dtype}, as {name!r}, and shape [num_blocks, "
            f"block_size, kv_heads, size]; it has {cache.dtype} and {tuple(cache.shape)}."
        )
    heads, size = cache.shape[2:]
    fits = same_sizes(x.shape[1:], (heads, size) if x.dim() == 3 else (heads * size,))
    if x.dim() not in (2, 3) or not fits or not same_sizes(x.shape[:1], slots.shape):
        raise ArgumentError(
            f"Op {op!r}: argument {name!r} has shape {tuple(x.shape)}; with {slots.shape[0]} slots and a cache of "
            f"shape {tuple(cache.shape)} it must be [tokens, kv_heads, size] or [tokens, kv_heads * size]."
        )


def _written(x: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """The cache with the rows of x in their slots."""
    blocks, block_size, heads, size = cache.shape
    count = blocks * block_size
    flat = cache.reshape(count, heads * size)
    # A row more than there are slots: what is left out goes there, without asking which tokens those are.
    index = slots.to(torch.int64)
    index = torch.where((index >= 0) & (index < count), index, count)
    written = torch.cat((flat, flat.new_zeros(1, heads * size))).index_copy(0, index, x.reshape(-1, heads * size))
    return written[:count].reshape(cache.shape)


@register_op(activations=_CACHES, allow_inplace=True, fuse=True)
def rotary_embedding_reshape_and_cache(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rotate queries and keys, and write the rotated keys and the values to their slots in a paged cache.

    `query, key = rotary_embedding(positions, query, key, cos_sin_cache, head_size, is_neox)`, then
    `key_cache, value_cache = reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)`: all that a decoder
    does between its product for queries, keys and values and its attention.

    Args:
        positions: `[tokens]`, int32 or int64.
        query: `[tokens, heads, head_size]` or `[tokens, heads * head_size]`, floating point.
        key: Like query, with `kv_heads`. Query, key and value may be parts of one tensor.
        value: `[tokens, kv_heads, value_size]` or `[tokens, kv_heads * value_size]`.
        key_cache: `[num_blocks, block_size, kv_heads, head_size]`, the dtype of key. Given away by `maybe_inplace`.
        value_cache: `[num_blocks, block_size, kv_heads, value_size]`, the dtype of value. Given away as well.
        slot_mapping: `[tokens]`, int32 or int64, as in `reshape_and_cache`.
        cos_sin_cache: `[max_positions, rotary_dim]`, as in `rotary_embedding`.
        head_size: Elements of one head of query and key.
        is_neox: Rotate halves instead of neighbours.

    Returns:
        `(query, key, key_cache, value_cache)`: the rotated query and key with their shapes, and the caches as they are
        after the write.

    Raises:
        ArgumentError: As `rotary_embedding` and `reshape_and_cache`.

    Source: Su et al., "RoFormer" (2021), and Kwon et al. (2023), as its two parts.
    """
    check_tokens("rotary_embedding_reshape_and_cache", positions)
    query, key = rotary_embedding.native(positions, query, key, cos_sin_cache, head_size, is_neox)
    return query, key, *reshape_and_cache.native(key, value, key_cache, value_cache, slot_mapping)


def check_tokens(op: str, positions: Tensor) -> None:
    """Raise unless there is one position for each token.

    Raises:
        ArgumentError: Names the op and the argument's shape.
    """
    if positions.dim() != 1:
        raise ArgumentError(f"Op {op!r}: argument 'positions' must be a vector, it has shape {tuple(positions.shape)}.")


@reshape_and_cache.register_value_check
def _check_slot_numbers(key_cache: Tensor, slot_mapping: Tensor) -> None:
    check_slot_values("reshape_and_cache", key_cache, slot_mapping)


@rotary_embedding_reshape_and_cache.register_value_check
def _check_positions_and_slots(
    positions: Tensor, key_cache: Tensor, slot_mapping: Tensor, cos_sin_cache: Tensor
) -> None:
    check_places("rotary_embedding_reshape_and_cache", positions, cos_sin_cache)
    check_slot_values("rotary_embedding_reshape_and_cache", key_cache, slot_mapping)


def check_slot_values(op: str, cache: Tensor, slots: Tensor) -> None:
    """Raise where a slot lies behind the end of the cache. A negative one is none. Reads values.

    Raises:
        ArgumentError: Names the op and the slot.
    """
    if not slots.numel() or cache.dim() != 4 or slots.is_floating_point():
        return  # native's own checks come next
    count, largest = cache.shape[0] * cache.shape[1], int(slots.max())
    if largest >= count:
        raise ArgumentError(f"Op {op!r}: argument 'slot_mapping' holds {largest}, but the cache has {count} slots.")


def _state(tokens: int, width: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Caches with room for more tokens than there are, in blocks of 2, and slots in no order."""
    blocks = 1 << max(0, tokens - 1).bit_length()
    head_size = 64 if width % 64 == 0 else width
    shape = (blocks, 2, width // max(head_size, 1), head_size)
    caches = [torch.randn(shape, dtype=dtype, device=device) for _ in range(2)]
    return caches[0], caches[1], torch.randperm(blocks * 2, device=device)[:tokens]


def _padded(slots: Tensor) -> Tensor:
    """The same slots with every third token left out, in int32."""
    return torch.where(torch.arange(len(slots), device=slots.device) % 3 == 1, -1, slots).to(torch.int32)


@reshape_and_cache.register_input_generator
def _reshape_and_cache_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Tensor, ...]]:
    """`shape` is that of the keys, heads side by side; all but the last dimension are tokens."""
    key, value = (torch.randn(shape, dtype=dtype, device=device).reshape(-1, shape[-1]) for _ in range(2))
    *caches, slots = _state(len(key), shape[-1], dtype, device)
    yield key, value, *caches, slots
    yield key, value, *caches, _padded(slots)
    apart = [x.reshape(len(key), *cache.shape[2:]) for x, cache in zip((key, value), caches, strict=True)]
    yield *apart, *caches, slots
    half = max(1, caches[1].shape[-1] // 2)  # values shorter than keys
    yield apart[0], apart[1][..., :half], caches[0], caches[1][..., :half].contiguous(), slots


@rotary_embedding_reshape_and_cache.register_input_generator
def _rotary_and_cache_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of the query, heads side by side; there are as many keys."""
    tokens = torch.Size(shape[:-1]).numel()
    calls = rotary_embedding.input_generator(shape=(tokens, shape[-1]), dtype=dtype, device=device)  # type: ignore[misc]
    for number, (positions, query, key, cos_sin_cache, head_size, *rest) in enumerate(calls):
        if key is None:
            continue
        width = key.shape[-1] if key.dim() == 2 else key.shape[-2] * key.shape[-1]
        *caches, slots = _state(tokens, width, dtype, device)
        value = torch.randn_like(key)
        slots = _padded(slots) if number else slots
        yield positions, query, key, value, *caches, slots, cos_sin_cache, head_size, *rest
