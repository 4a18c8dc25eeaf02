"""Launches of the rotary embedding, with or without norms of heads, and its torch ops."""

from typing import NamedTuple

from torch import Tensor

from irframework_triton_kernels.kernels.rotary import rotary_kernel
from irframework_triton_kernels.launch.call import as_float, launch, new_like, tiles_of, torch_op
from irframework_triton_kernels.tiles import heads_tile


class Norms(NamedTuple):
    """The norms of heads before they are rotated.

    Attributes:
        weights: Scales of query and key, or None.
        epsilon: Added to the mean squares.
    """

    weights: tuple[Tensor | None, Tensor | None]
    epsilon: float


def of_norms(norms: Norms | None, nothing: Tensor) -> tuple[tuple[Tensor, Tensor], float, tuple[bool, bool, bool]]:
    """What kernels are given for norms: weights, of which none is `nothing`; epsilon; and what there is of them."""
    if norms is None:
        return (nothing, nothing), 0.0, (False, False, False)
    query_weight, key_weight = (nothing if weight is None else weight.contiguous() for weight in norms.weights)
    there = (norms.weights[0] is not None, norms.weights[1] is not None)
    return (query_weight, key_weight), as_float(norms.epsilon), (True, *there)


def _heads(x: Tensor, positions: Tensor, head_size: int) -> Tensor:
    """`[tokens, heads, head_size]`; a copy only where the leading dimensions have no common stride."""
    apart = x.dim() == positions.dim() + 2
    return x.reshape(positions.numel(), x.shape[-2] if apart else x.shape[-1] // head_size, head_size)


def _rotate(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cache: Tensor,
    head_size: int,
    is_neox: bool,
    query_out: Tensor,
    key_out: Tensor,
    norms: Norms | None = None,
) -> None:
    q = _heads(query, positions, head_size)
    k = q if key is None else _heads(key, positions, head_size)
    tokens, query_heads, _ = q.shape
    key_heads = 0 if key is None else k.shape[1]
    half = cache.shape[1] // 2
    tile = heads_tile(half, max(query_heads, key_heads))
    rest = head_size - 2 * half
    weights, epsilon, normed = of_norms(norms, cache)
    tensors = (positions.reshape(-1), q, k, cache, *weights, query_out, key_out)
    numbers = (
        epsilon, query_heads, key_heads, head_size, half,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), cache.stride(0),
        is_neox, *normed, key is not None, tile.rows, tile.block, 1 << (rest - 1).bit_length() if rest else 0,
    )  # fmt: skip
    programs = tokens * (tiles_of(query_heads, tile.rows) + tiles_of(key_heads, tile.rows))
    launch(rotary_kernel, programs, tensors, cache.shape[0], numbers, tile)


@torch_op("rotary_embedding")
def _with_key(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, head_size: int, is_neox: bool
) -> tuple[Tensor, Tensor]:
    query_out, key_out = new_like(query), new_like(key)
    _rotate(positions, query, key, cos_sin_cache, head_size, is_neox, query_out, key_out)
    return query_out, key_out


@torch_op("rotary_embedding_query")
def _without_key(positions: Tensor, query: Tensor, cos_sin_cache: Tensor, head_size: int, is_neox: bool) -> Tensor:
    query_out = new_like(query)
    _rotate(positions, query, None, cos_sin_cache, head_size, is_neox, query_out, query_out)
    return query_out


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, cos_sin_cache: Tensor, head_size: int, is_neox: bool
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys into new tensors; without a key, the second is an empty tensor `[0]`."""
    if key is None:
        return _without_key(positions, query, cos_sin_cache, head_size, is_neox), query.new_empty(0)
    return _with_key(positions, query, key, cos_sin_cache, head_size, is_neox)


@torch_op("qk_norm_rotary_embedding")
def _normed_with_key(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    epsilon: float,
    is_neox: bool,
) -> tuple[Tensor, Tensor]:
    query_out, key_out = new_like(query), new_like(key)
    norms = Norms((query_weight, key_weight), epsilon)
    _rotate(positions, query, key, cos_sin_cache, head_size, is_neox, query_out, key_out, norms)
    return query_out, key_out


@torch_op("qk_norm_rotary_embedding_query")
def _normed_without_key(
    positions: Tensor,
    query: Tensor,
    query_weight: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    epsilon: float,
    is_neox: bool,
) -> Tensor:
    query_out = new_like(query)
    norms = Norms((query_weight, None), epsilon)
    _rotate(positions, query, None, cos_sin_cache, head_size, is_neox, query_out, query_out, norms)
    return query_out


def qk_norm_rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    epsilon: float,
    is_neox: bool,
) -> tuple[Tensor, Tensor]:
    """Norm and rotate heads of queries and keys into new tensors; without a key, the second is an empty tensor."""
    if key is None:
        args = (query_weight, cos_sin_cache, head_size, epsilon, is_neox)
        return _normed_without_key(positions, query, *args), query.new_empty(0)
    return _normed_with_key(positions, query, key, query_weight, key_weight, cos_sin_cache, head_size, epsilon, is_neox)
