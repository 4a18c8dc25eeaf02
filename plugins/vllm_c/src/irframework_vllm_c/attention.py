"""Owns which calls of the op `attention` the CPU kernel takes: those with one new token for each sequence.

Does not load the kernels at import, see `implementations`.
"""

import torch
from torch import Tensor

import irframework as ir
from irframework_vllm_c.implementations import FLOATS, KERNELS, kernels_load

MAX_HEAD_SIZE = 256


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
) -> Tensor:
    """See `irframework.ops.attention`; a sequence's one query stands behind all keys, so `causal` says nothing.

    Weights are not rounded to the dtype of the values.
    """
    if key_cache is not None or value_cache is not None:
        if key is not None or value is not None:
            raise ValueError("keys are given twice")  # the op says it better
        key, value = key_cache, value_cache
    y: Tensor = KERNELS.decode_attention.default(
        query,
        key,
        value,
        cu_seqlens_q,
        seq_lens,
        max_seqlen_k,
        block_table,
        query.shape[-1] ** -0.5 if scale is None else scale,
        window,
        soft_cap,
        sinks,
    )
    return y


def register(provider: str) -> None:
    """Registers the implementation under `provider`."""
    sized = ("query", "value", "value_cache")
    integers = ("cu_seqlens_q", "seq_lens", "block_table")
    ir.ops.attention.register_impl(
        provider,
        supported={"cpu": kernels_load},
        supports_args=ir.supports(
            dtype={"query": FLOATS, "sinks": FLOATS} | dict.fromkeys(integers, (torch.int32,)),
            same_dtype=("query", "key", "value", "key_cache", "value_cache"),
            one_of={"max_seqlen_q": (1,)},
            multiple_of=dict.fromkeys(sized, 8),
            max_last_dim=dict.fromkeys(sized, MAX_HEAD_SIZE),
            contiguous=("cu_seqlens_q", "seq_lens"),
            row_contiguous=("query", "key", "value", "key_cache", "value_cache", "block_table"),
        ),
        batch_invariant=True,
        checks_values=True,
    )(attention)
