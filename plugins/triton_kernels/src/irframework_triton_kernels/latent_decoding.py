"""Owns which calls of latent attention the kernel for one query per sequence takes, and what is registered for them.

The kernel works in the latent space. The products with `key_up` before it and `value_up` behind it are torch's, as in
native, and so rounded as there; behind the latter, codes are made by the kernels that quantise.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import irframework as ir
from irframework_triton_kernels.conditions import FLOATS, launches
from irframework_triton_kernels.quantizations import groups_divide
from irframework_triton_kernels.tiles import LONGEST_HEAD, LONGEST_LATENT


def mla_attention(
    query_nope: Tensor,
    query_rope: Tensor,
    latent: Tensor | None,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    scale: float,
    key_up: Tensor | None = None,
    value_up: Tensor | None = None,
    seq_lens: Tensor | None = None,
    max_seqlen_k: int | None = None,
    latent_cache: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = True,
    output_scale: Tensor | None = None,
) -> Tensor:
    """See `irframework.ops.mla_attention`. The last query of a sequence sees all of its keys, causal or not.

    Raises:
        ValueError: Latent rows are not in a paged cache; or there are not as many queries of both kinds, or not as many
            lengths, rows of the block table and sequences.
    """
    if seq_lens is None or block_table is None:
        raise ValueError("needs seq_lens and block_table")
    if query_rope.shape[0] != query_nope.shape[0]:
        raise ValueError(f"query_rope has {query_rope.shape[0]} tokens, query_nope has {query_nope.shape[0]}")
    for count in (seq_lens.shape[0], block_table.shape[0]):
        if count != cu_seqlens_q.shape[0] - 1:
            raise ValueError(f"cu_seqlens_q has {cu_seqlens_q.shape[0]} entries, does not fit {count} sequences")
    if key_up is not None:
        query_nope = torch.bmm(query_nope.transpose(0, 1), key_up).transpose(0, 1)
    y: Tensor = launches().decode_latent_attention(
        query_nope, query_rope, latent_cache, cu_seqlens_q, seq_lens, block_table, max_seqlen_k, scale,
        output_scale if value_up is None else None,
    )  # fmt: skip
    if value_up is None:
        return y
    y = torch.einsum("thr,hrv->thv", y, value_up).contiguous()  # a product of heads, which lie apart
    return y if output_scale is None else launches().static_quant_fp8(y, output_scale)


def mla_attention_group_quant_fp8(
    query_nope: Tensor,
    query_rope: Tensor,
    latent: Tensor | None,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    scale: float,
    key_up: Tensor | None = None,
    value_up: Tensor | None = None,
    seq_lens: Tensor | None = None,
    max_seqlen_k: int | None = None,
    latent_cache: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = True,
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.mla_attention_group_quant_fp8`.

    Raises:
        ValueError: As `mla_attention`.
    """
    y = mla_attention(
        query_nope, query_rope, latent, cu_seqlens_q, max_seqlen_q, scale, key_up, value_up, seq_lens, max_seqlen_k,
        latent_cache, block_table,
    )  # fmt: skip
    pair: tuple[Tensor, Tensor] = launches().group_quant_fp8(
        y.flatten(-2), group_size, column_major_scales, power_of_two_scales
    )
    return pair


def one_query_each(
    query_nope: Tensor,
    query_rope: Tensor,
    latent: Tensor | None,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    scale: float,
    key_up: Tensor | None = None,
    value_up: Tensor | None = None,
    seq_lens: Tensor | None = None,
    max_seqlen_k: int | None = None,
    latent_cache: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = True,
    output_scale: Tensor | None = None,
) -> bool | ir.Rejected:
    """Decoding from a paged cache, with rows that fit the queries and are held in registers."""
    if latent_cache is None or seq_lens is None or block_table is None:
        return ir.reject("latent rows are not in a paged cache")
    if latent is not None:
        return ir.reject("latent rows are given twice")
    if max_seqlen_q != 1:
        return ir.reject(f"max_seqlen_q is {max_seqlen_q}, needs one query per sequence")
    _, heads, nope = query_nope.shape
    rope = query_rope.shape[-1]
    rank = latent_cache.shape[-1] - rope
    if query_rope.shape[1] != heads or not heads:
        return ir.reject(f"query_rope has {query_rope.shape[1]} heads, query_nope has {heads}")
    if not 0 < rope <= LONGEST_HEAD or not 0 < rank <= LONGEST_LATENT:
        return ir.reject(
            f"latent_cache has rows of {rank} and {rope} elements, needs 1 to {LONGEST_LATENT} and 1 to {LONGEST_HEAD}"
        )
    if not latent_cache.shape[1]:
        return ir.reject("latent_cache has blocks of no rows")
    if nope != rank if key_up is None else key_up.shape != (heads, nope, rank):
        return ir.reject(f"query_nope has {nope} elements, which do not become the {rank} of latent rows")
    if value_up is not None and value_up.shape[:2] != (heads, rank):
        return ir.reject(f"value_up has shape {tuple(value_up.shape)}, does not fit {heads} heads and rows of {rank}")
    return True


def one_query_in_groups(
    query_nope: Tensor,
    query_rope: Tensor,
    latent: Tensor | None,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    scale: float,
    key_up: Tensor | None = None,
    value_up: Tensor | None = None,
    seq_lens: Tensor | None = None,
    max_seqlen_k: int | None = None,
    latent_cache: Tensor | None = None,
    block_table: Tensor | None = None,
    causal: bool = True,
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> bool | ir.Rejected:
    """As `one_query_each`, and the heads of a token are whole groups."""
    fits = one_query_each(
        query_nope, query_rope, latent, cu_seqlens_q, max_seqlen_q, scale, key_up, value_up, seq_lens, max_seqlen_k,
        latent_cache, block_table,
    )  # fmt: skip
    if fits is not True or latent_cache is None:
        return fits
    size = latent_cache.shape[-1] - query_rope.shape[-1] if value_up is None else value_up.shape[-1]
    return groups_divide(query_nope.shape[1] * size, 2, group_size, column_major_scales)


def register(add: Callable[..., Any]) -> None:
    """Register latent attention by `add`, a function of an implementation and its conditions."""
    numbers: dict[str, Any] = dict.fromkeys(("cu_seqlens_q", "seq_lens", "block_table"), torch.int32)
    ranks = {"query_nope": 3, "query_rope": 3, "latent_cache": 3, "key_up": 3, "value_up": 3}
    stated: dict[str, Any] = {
        "same_dtype": ("query_nope", "query_rope", "latent_cache", "key_up", "value_up"),
        "ndim": {**ranks, "block_table": 2, "cu_seqlens_q": 1, "seq_lens": 1},
        "contiguous": ("cu_seqlens_q", "seq_lens"),
        "row_contiguous": ("query_nope", "query_rope", "latent_cache", "block_table"),
    }
    dtypes = {"query_nope": FLOATS, **numbers}
    # How a sequence is shared out depends on how many there are.
    add(
        mla_attention,
        ir.supports(dtype=dtypes | {"output_scale": (torch.float32,)}, one_element=("output_scale",), **stated)
        & one_query_each,
        batch_invariant=False,
    )
    add(
        mla_attention_group_quant_fp8,
        ir.supports(dtype=dtypes, **stated) & one_query_in_groups,
        batch_invariant=False,
    )
