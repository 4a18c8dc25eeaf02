"""Launches of the writes to the paged cache, and their torch ops, which nobody looks into."""

from typing import Any

from torch import Tensor

from irframework_triton_kernels.kernels.kv_cache import cache_kernel, rotary_cache_kernel
from irframework_triton_kernels.launch.call import launch, new_like, opaque_op, tiles_of
from irframework_triton_kernels.launch.rotary import Norms, of_norms
from irframework_triton_kernels.tiles import copied_tile, heads_tile


def _heads(x: Tensor, size: Any) -> Tensor:
    """`[tokens, heads, size]`, a view of rows with stride 1 in the last dimension."""
    return x if x.dim() == 3 else x.unflatten(1, (x.shape[1] // size, size))


_CACHES = ("key_cache", "value_cache")


@opaque_op("reshape_and_cache_", _CACHES)
def reshape_and_cache_inplace(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Overwrite the slots of tokens with their keys and values.

    Raises:
        ValueError: A cache is not contiguous.
    """
    _check_overwritten(key_cache=key_cache, value_cache=value_cache)
    blocks, block_size, key_heads, key_size = key_cache.shape
    value_heads, value_size = value_cache.shape[2:]
    k, v = _heads(key, key_size), _heads(value, value_size)
    key_tile, value_tile = copied_tile(key_size, key_heads), copied_tile(value_size, value_heads)
    tensors = (slot_mapping, k, v, key_cache, value_cache)
    numbers = (
        key_heads, key_size, k.stride(0), k.stride(1), value_heads, value_size, v.stride(0), v.stride(1),
        key_tile.rows, key_tile.block, value_tile.rows, value_tile.block,
    )  # fmt: skip
    tiles = tiles_of(key_heads, key_tile.rows) + tiles_of(value_heads, value_tile.rows)
    tile = max(key_tile, value_tile, key=lambda tile: tile.warps)
    launch(cache_kernel, k.shape[0] * tiles, tensors, blocks * block_size, numbers, tile)


@opaque_op("rotary_embedding_reshape_and_cache_", _CACHES)
def rotary_embedding_reshape_and_cache_inplace(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox: bool,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys into new tensors, and overwrite the slots of tokens with rotated keys and values.

    Returns:
        The rotated query and key.

    Raises:
        ValueError: A cache is not contiguous.
    """
    given = (positions, query, key, value, key_cache, value_cache, slot_mapping, cos_sin_cache, head_size, is_neox)
    return _rotate_and_write(*given, None)


@opaque_op("qk_norm_rotary_embedding_reshape_and_cache_", _CACHES)
def qk_norm_rotary_embedding_reshape_and_cache_inplace(
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
    is_neox: bool,
) -> tuple[Tensor, Tensor]:
    """Norm and rotate queries and keys into new tensors, and overwrite the slots of tokens with keys and values.

    Returns:
        The rotated query and key.

    Raises:
        ValueError: A cache is not contiguous.
    """
    given = (positions, query, key, value, key_cache, value_cache, slot_mapping, cos_sin_cache, head_size, is_neox)
    return _rotate_and_write(*given, Norms((query_weight, key_weight), epsilon))


def _rotate_and_write(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox: bool,
    norms: Norms | None,
) -> tuple[Tensor, Tensor]:
    _check_overwritten(key_cache=key_cache, value_cache=value_cache)
    query_out, key_out = new_like(query), new_like(key)
    q, k = _heads(query, head_size), _heads(key, head_size)
    blocks, block_size, value_heads, value_size = value_cache.shape
    v = _heads(value, value_size)
    (tokens, query_heads, _), key_heads, half = q.shape, k.shape[1], cos_sin_cache.shape[1] // 2
    tile, value_tile = heads_tile(half, max(query_heads, key_heads)), copied_tile(value_size, value_heads)
    rest = head_size - 2 * half
    weights, epsilon, normed = of_norms(norms, cos_sin_cache)
    tensors = (
        positions, q, k, v, slot_mapping, cos_sin_cache, *weights, query_out, key_out, key_cache, value_cache,
    )  # fmt: skip
    numbers = (
        blocks * block_size, epsilon, query_heads, key_heads, head_size, half, value_heads, value_size,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), cos_sin_cache.stride(0),
        is_neox, *normed, tile.rows, tile.block, 1 << (rest - 1).bit_length() if rest else 0,
        value_tile.rows, value_tile.block,
    )  # fmt: skip
    tiles = tiles_of(query_heads, tile.rows) + tiles_of(key_heads, tile.rows) + tiles_of(value_heads, value_tile.rows)
    launch(rotary_cache_kernel, tokens * tiles, tensors, cos_sin_cache.shape[0], numbers, tile)
    return query_out, key_out


def _check_overwritten(**caches: Tensor) -> None:
    for name, cache in caches.items():
        if not cache.is_contiguous():
            raise ValueError(f"{name} has strides {cache.stride()}, must be contiguous to be overwritten")
