"""The ops of the decoder that `decoder_layer.py` measures, in four sets of one signature each.

All native; all IR ops; for each thing that is done an IR op of its own; and kernels that only move the bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import irframework as ir

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Ops:
    """The ops that the model calls, each with its op's signature: all native, all IR ops, or the parts of these."""

    add_norm: Callable[..., Any]
    add_norm_static: Callable[..., Any]
    add_norm_dynamic: Callable[..., Any]
    quant_static: Callable[..., Any]
    quant_dynamic: Callable[..., Any]
    product_silu: Callable[..., Any]
    product_silu_static: Callable[..., Any]
    product_silu_dynamic: Callable[..., Any]
    rotary_and_cache: Callable[..., Any]


def scaled_product(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor) -> Tensor:
    """Codes [tokens, in] times a matrix of codes [out, in], in bfloat16."""
    result: Tensor = torch._scaled_mm(
        x, weight.t(), x_scale, weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return result


def behind_products(
    silu: Callable[..., Any], static: Callable[..., Any], dynamic: Callable[..., Any]
) -> tuple[Callable[..., Any], ...]:
    """The last of the ops of a set that calls torch's products, and gates that end in values or codes behind them."""

    def product_silu_static(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, scale: Tensor) -> Tensor:
        codes: Tensor = static(scaled_product(x, weight, x_scale, weight_scale), scale)
        return codes

    return (
        lambda x, weight: silu(F.linear(x, weight)),
        product_silu_static,
        lambda *scaled: dynamic(scaled_product(*scaled)),
    )


def write_in_place(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    cos_sin: Tensor,
    head: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Plain torch: the rotary embedding, and writes to rows of the cache."""
    query, key = ir.ops.rotary_embedding.native(positions, query, key, cos_sin, head)
    keys.index_copy_(0, slots, key)
    values.index_copy_(0, slots, value)
    return query, key, keys, values


def native_ops() -> Ops:
    return Ops(
        ir.ops.fused_add_rms_norm.native,
        ir.ops.fused_add_rms_norm_static_quant_fp8.native,
        ir.ops.fused_add_rms_norm_dynamic_quant_fp8.native,
        ir.ops.static_quant_fp8.native,
        ir.ops.dynamic_quant_fp8.native,
        *behind_products(
            ir.ops.silu_and_mul.native,
            ir.ops.silu_and_mul_static_quant_fp8.native,
            ir.ops.silu_and_mul_dynamic_quant_fp8.native,
        ),
        write_in_place,
    )


def ir_ops() -> Ops:
    return Ops(
        ir.ops.fused_add_rms_norm.maybe_inplace,
        ir.ops.fused_add_rms_norm_static_quant_fp8.maybe_inplace,
        ir.ops.fused_add_rms_norm_dynamic_quant_fp8.maybe_inplace,
        ir.ops.static_quant_fp8,
        ir.ops.dynamic_quant_fp8,
        ir.ops.linear_silu_and_mul,
        ir.ops.scaled_linear_silu_and_mul_static_quant_fp8,
        lambda *scaled: ir.ops.silu_and_mul_dynamic_quant_fp8(scaled_product(*scaled)),
        ir.ops.rotary_embedding_reshape_and_cache.maybe_inplace,
    )


def part_ops() -> Ops:
    """Nothing that is fused: one IR op, or one torch op, for each thing that is done."""
    norm, silu = ir.ops.rms_norm, ir.ops.silu_and_mul
    static, dynamic = ir.ops.static_quant_fp8, ir.ops.dynamic_quant_fp8

    def add_norm(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        residual = x + residual
        return norm(residual, weight, epsilon), residual

    def add_norm_static(
        x: Tensor, residual: Tensor, weight: Tensor, scale: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        y, residual = add_norm(x, residual, weight, epsilon)
        return static(y, scale), residual

    def add_norm_dynamic(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
        y, residual = add_norm(x, residual, weight, epsilon)
        return *dynamic(y), residual

    def rotary_and_cache(
        positions: Tensor, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor,
        cos_sin: Tensor, head: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        query, key = ir.ops.rotary_embedding(positions, query, key, cos_sin, head)
        keys, values = ir.ops.reshape_and_cache.maybe_inplace(key, value, keys, values, slots)
        return query, key, keys, values

    return Ops(
        add_norm,
        add_norm_static,
        add_norm_dynamic,
        static,
        dynamic,
        *behind_products(silu, lambda x, scale: static(silu(x), scale), lambda x: dynamic(silu(x))),
        rotary_and_cache,
    )


def moving_ops() -> Ops:
    """In place of each op, one kernel of stock Inductor that reads and writes as many bytes, or fewer.

    Scales of tokens are not written, nor is the cache. What they give has about the variance of what they were given.
    """

    @cache
    def ones(tokens: int, device: torch.device) -> Tensor:
        return torch.ones(tokens, 1, device=device)

    def add_norm(x: Tensor, residual: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return ((x + residual) * 0.7).to(dtype), (x - residual) * 0.7

    def gated(x: Tensor, dtype: torch.dtype) -> Tensor:
        gate, up = x.chunk(2, -1)
        return ((gate + up) * 0.7).to(dtype)

    def converted(x: Tensor) -> Tensor:
        return x.to(FP8)

    def one_behind_another(*parts: Tensor) -> Tensor:
        return torch.cat(parts, -1) * 1.0

    add_norm, gated, converted, one_behind_another = (
        torch.compile(fn, dynamic=False, fullgraph=True) for fn in (add_norm, gated, converted, one_behind_another)
    )

    def add_norm_dynamic(x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
        codes, residual = add_norm(x, residual, FP8)
        return codes, ones(x.shape[0], x.device), residual

    def rotary_and_cache(
        positions: Tensor, query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slots: Tensor,
        cos_sin: Tensor, head: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        sizes = [part.shape[-1] for part in (query, key, value)]
        query, key, value = one_behind_another(query, key, value).split(sizes, -1)
        return query, key, keys, values

    return Ops(
        lambda x, residual, weight, epsilon: add_norm(x, residual, x.dtype),
        lambda x, residual, weight, scale, epsilon: add_norm(x, residual, FP8),
        add_norm_dynamic,
        lambda x, scale: converted(x),
        lambda x: (converted(x), ones(x.shape[0], x.device)),
        *behind_products(
            lambda x: gated(x, x.dtype),
            lambda x, scale: gated(x, FP8),
            lambda x: (gated(x, FP8), ones(x.shape[0], x.device)),
        ),
        rotary_and_cache,
    )
