"""Owns which calls of attention the kernel for one query per sequence takes, and the function that is registered."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import irframework as ir
from irframework_triton_kernels.conditions import FLOATS, launches
from irframework_triton_kernels.tiles import LONGEST_HEAD


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
    """See `irframework.ops.attention`. The last query of a sequence sees all of its keys, causal or not.

    Raises:
        ValueError: Keys are not in a paged cache; or there are not as many lengths, rows of the block table and
            sequences.
    """
    if seq_lens is None or block_table is None:
        raise ValueError("needs seq_lens and block_table")
    for count in (seq_lens.shape[0], block_table.shape[0]):
        if count != cu_seqlens_q.shape[0] - 1:
            raise ValueError(f"cu_seqlens_q has {cu_seqlens_q.shape[0]} entries, does not fit {count} sequences")
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    y: Tensor = launches().decode_attention(
        query, key_cache, value_cache, cu_seqlens_q, seq_lens, block_table, max_seqlen_k, scale, window, soft_cap,
        sinks, output_scale,
    )  # fmt: skip
    return y


def one_query_each(
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
) -> bool | ir.Rejected:
    """Decoding from a paged cache, with heads that fit each other and are held in registers."""
    if key_cache is None or value_cache is None or seq_lens is None or block_table is None:
        return ir.reject("keys and values are not in a paged cache")
    if key is not None or value is not None:
        return ir.reject("keys are given twice")
    if max_seqlen_q != 1:
        return ir.reject(f"max_seqlen_q is {max_seqlen_q}, needs one query per sequence")
    heads, head_size = query.shape[1:]
    _, block_size, kv_heads, value_size = value_cache.shape
    if key_cache.shape[1:] != (block_size, kv_heads, head_size):
        return ir.reject(f"key_cache has shape {tuple(key_cache.shape)}, does not fit query or value_cache")
    known = isinstance(heads, int) and isinstance(kv_heads, int)  # symbolic ones were compared when the call was traced
    if known and (not kv_heads or heads % kv_heads or not block_size):
        return ir.reject(f"{heads} heads of queries do not fit a cache of shape {tuple(value_cache.shape)}")
    for name, size in (("query", head_size), ("value_cache", value_size)):
        if not 0 < size <= LONGEST_HEAD:
            return ir.reject(f"{name} has heads of {size}, needs 1 to {LONGEST_HEAD}")
    if sinks is not None and sinks.shape != (heads,):
        return ir.reject(f"sinks has shape {tuple(sinks.shape)}, needs one for each of {heads} heads")
    if window is not None and window < 1:
        return ir.reject(f"window is {window}, must be at least 1")
    if soft_cap is not None and not soft_cap > 0:
        return ir.reject(f"soft_cap is {soft_cap}, must be more than 0")
    return True


def register(add: Callable[..., Any]) -> None:
    """Register attention by `add`, a function of an implementation and its conditions."""
    numbers: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "seq_lens", "block_table"), torch.int32)
    add(
        attention,
        ir.supports(
            dtype={"query": FLOATS, "sinks": FLOATS, "output_scale": (torch.float32,), **numbers},
            same_dtype=("query", "key_cache", "value_cache"),
            ndim={"query": 3, "key_cache": 4, "value_cache": 4, "block_table": 2, "cu_seqlens_q": 1, "seq_lens": 1},
            contiguous=("cu_seqlens_q", "seq_lens", "sinks"),
            row_contiguous=("query", "key_cache", "value_cache", "block_table"),
            one_element=("output_scale",),
        )
        & one_query_each,
        # It is; what tests it takes the first rows of every argument, which no longer fit each other.
        batch_invariant=False,
    )
