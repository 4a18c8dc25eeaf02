"""Owns which calls of norms of heads and the rotation behind them the kernels take, and what is registered for them.

The kernels are those of the rotary embedding; what they take otherwise is in `implementations`.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

import irframework as ir
from irframework_triton_kernels.conditions import FLOATS, INTEGERS
from irframework_triton_kernels.conditions import launches as _launch


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
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.qk_norm_rotary_embedding`. A position outside the cache gives NaN.

    Raises:
        ValueError: query or key is not for as many tokens as there are positions.
    """
    for name, x in (("query", query), ("key", key)):
        if x is not None and x.shape[: positions.dim()] != positions.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, positions have shape {tuple(positions.shape)}")
    pair: tuple[Tensor, Tensor] = _launch().qk_norm_rotary_embedding(
        positions, query, key, query_weight, key_weight, cos_sin_cache, head_size, epsilon, is_neox
    )
    return pair


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
    """See `irframework.ops.qk_norm_rotary_embedding_reshape_and_cache`; overwrites the caches.

    Raises:
        ValueError: There are not as many positions, queries, keys, values and slots, or not as many blocks of both.
    """
    rows = [("query", query), ("key", key), ("value", value), ("slot_mapping", slot_mapping)]
    pairs = [(name, x, positions) for name, x in rows]
    for name, x, first in (*pairs, ("value_cache", value_cache, key_cache)):
        if x.shape[0] != first.shape[0]:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, does not fit one of shape {tuple(first.shape)}")
    query, key = _launch().qk_norm_rotary_embedding_reshape_and_cache_inplace(
        positions, query, key, value, key_cache, value_cache, slot_mapping, query_weight, key_weight, cos_sin_cache,
        head_size, epsilon, is_neox,
    )  # fmt: skip
    return query, key, key_cache, value_cache


def _weights_fit(query_weight: Tensor | None, key_weight: Tensor | None, head_size: int) -> bool | ir.Rejected:
    for name, weight in (("query_weight", query_weight), ("key_weight", key_weight)):
        if weight is not None and weight.shape != (head_size,):
            return ir.reject(
                f"{name} has shape {tuple(weight.shape)}, needs one scale for each of {head_size} elements"
            )
    return True


def register(add: Callable[..., Any], heads_fit: Callable[..., Any], caches_fit: Callable[..., Any]) -> None:
    """Register both by `add`, a function of an implementation and its conditions.

    Args:
        add: Registers.
        heads_fit: Whether queries and keys fit the rotary embedding.
        caches_fit: Whether keys and values fit the writes to the caches.
    """

    def normed_heads_fit(
        positions: Tensor,
        query: Tensor,
        key: Tensor | None,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        cos_sin_cache: Tensor,
        head_size: int,
        epsilon: float,
        is_neox: bool = True,
    ) -> bool | ir.Rejected:
        if key is None and key_weight is not None:
            return ir.reject("key_weight is given without a key")
        fits = _weights_fit(query_weight, key_weight, head_size)
        return heads_fit(positions, query, key, cos_sin_cache, head_size, is_neox) if fits is True else fits

    def normed_caches_fit(
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
    ) -> bool | ir.Rejected:
        fits = _weights_fit(query_weight, key_weight, head_size)
        fits = caches_fit(key, value, key_cache, value_cache, slot_mapping) if fits is True else fits
        return heads_fit(positions, query, key, cos_sin_cache, head_size, is_neox) if fits is True else fits

    heads: dict[str, Any] = {
        "positions": INTEGERS,
        **dict.fromkeys(("query", "key", "query_weight", "key_weight", "cos_sin_cache"), FLOATS),
    }
    rows = dict.fromkeys(("query", "key", "value"), (2, 3))
    ranks: dict[str, Any] = rows | {"positions": 1, "slot_mapping": 1, "cos_sin_cache": 2}
    ranks |= {"key_cache": 4, "value_cache": 4}
    add(
        qk_norm_rotary_embedding,
        ir.supports(
            dtype=heads,
            ndim={"cos_sin_cache": 2},
            contiguous=("positions",),
            row_contiguous=("query", "key", "cos_sin_cache"),
        )
        & normed_heads_fit,
    )
    add(
        qk_norm_rotary_embedding_reshape_and_cache,
        ir.supports(
            dtype=heads | {"value": FLOATS, "slot_mapping": INTEGERS},
            ndim=ranks,
            contiguous=("positions", "slot_mapping"),
            row_contiguous=("query", "key", "value", "cos_sin_cache"),
        )
        & normed_caches_fit,
        overwrites=True,
    )
