"""Owns the fused ops that only the CPU library has kernels for: what ends in fp8 codes, and normed heads, rotated.

Those for every device are in `implementations`. What does not fit is left to the kernels, which refuse it, and to the
op, which says why.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import irframework as ir
from irframework.conditions import Supports
from irframework_vllm_c.implementations import FLOATS, KERNELS, kernels_load, out_variants

FUNCTIONAL_KERNELS = (
    "rms_norm_group_quant_fp8",
    "fused_add_rms_norm_group_quant_fp8_functional",
    "silu_and_mul_group_quant_fp8",
    "gelu_and_mul_static_quant_fp8",
    "gelu_and_mul_dynamic_quant_fp8",
    "gelu_and_mul_group_quant_fp8",
    "qk_norm_rotary_embedding",
    "qk_norm_rotary_embedding_query",
)


def supported() -> bool | ir.Rejected:
    """Whether the CPU kernels load here; the reason when they do not."""
    loaded = kernels_load()
    if loaded is True:
        out_variants(FUNCTIONAL_KERNELS)
    return loaded


# --- what ends in codes ----------------------------------------------------------------------------------------------


def rms_norm_group_quant_fp8(
    x: Tensor,
    weight: Tensor | None,
    epsilon: float,
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.rms_norm_group_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = KERNELS.rms_norm_group_quant_fp8.default(
        x, weight, epsilon, group_size, column_major_scales, power_of_two_scales
    )
    return pair


def fused_add_rms_norm_group_quant_fp8(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_group_quant_fp8`; overwrites x_residual with the sum."""
    q, scale = KERNELS.fused_add_rms_norm_group_quant_fp8.default(
        x, x_residual, weight, epsilon, group_size, column_major_scales, power_of_two_scales
    )
    return q, scale, x_residual


def fused_add_rms_norm_group_quant_fp8_functional(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_group_quant_fp8`; overwrites nothing."""
    three: tuple[Tensor, Tensor, Tensor] = KERNELS.fused_add_rms_norm_group_quant_fp8_functional.default(
        x, x_residual, weight, epsilon, group_size, column_major_scales, power_of_two_scales
    )
    return three


def silu_and_mul_group_quant_fp8(
    x: Tensor, group_size: int = 128, column_major_scales: bool = False, power_of_two_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.silu_and_mul_group_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = KERNELS.silu_and_mul_group_quant_fp8.default(
        x, group_size, column_major_scales, power_of_two_scales
    )
    return pair


def gelu_and_mul_static_quant_fp8(x: Tensor, scale: Tensor, approximate: str = "none") -> Tensor:
    """See `irframework.ops.gelu_and_mul_static_quant_fp8`."""
    q: Tensor = KERNELS.gelu_and_mul_static_quant_fp8.default(x, scale, approximate == "tanh")
    return q


def gelu_and_mul_dynamic_quant_fp8(x: Tensor, approximate: str = "none") -> tuple[Tensor, Tensor]:
    """See `irframework.ops.gelu_and_mul_dynamic_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = KERNELS.gelu_and_mul_dynamic_quant_fp8.default(x, approximate == "tanh")
    return pair


def gelu_and_mul_group_quant_fp8(
    x: Tensor,
    approximate: str = "none",
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.gelu_and_mul_group_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = KERNELS.gelu_and_mul_group_quant_fp8.default(
        x, approximate == "tanh", group_size, column_major_scales, power_of_two_scales
    )
    return pair


# --- normed heads that are rotated -----------------------------------------------------------------------------------


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
    """See `irframework.ops.qk_norm_rotary_embedding`."""
    positions = positions.to(torch.int64)
    if key is None:
        if key_weight is not None:
            raise ValueError("key_weight is given without a key")  # the op says it better
        rotated = KERNELS.qk_norm_rotary_embedding_query.default(
            positions, query, query_weight, cos_sin_cache, head_size, epsilon, is_neox
        )
        return rotated, None
    pair: tuple[Tensor, Tensor] = KERNELS.qk_norm_rotary_embedding.default(
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
    """See `irframework.ops.qk_norm_rotary_embedding_reshape_and_cache`; overwrites the caches."""
    query, key = KERNELS.qk_norm_rotary_embedding_reshape_and_cache.default(
        positions.to(torch.int64),
        query,
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        query_weight,
        key_weight,
        cos_sin_cache,
        head_size,
        epsilon,
        is_neox,
    )
    return query, key, key_cache, value_cache


def register(provider: str) -> None:
    """Registers every implementation under `provider`."""

    def add(fn: Callable[..., Any], conditions: Supports, **options: Any) -> None:
        registered = getattr(ir.ops, fn.__name__).register_impl(
            provider, supported={"cpu": supported}, supports_args=conditions, batch_invariant=True, **options
        )
        registered(fn)

    rows = ir.supports(row_contiguous=("x",))
    norm = ir.supports(dtype={"x": FLOATS, "weight": FLOATS}, last_dim_of={"weight": "x"})
    pair = ir.supports(
        same_dtype=("x", "x_residual"), same_shape=("x", "x_residual"), row_contiguous=("x", "x_residual")
    )
    # An odd last dimension is left to native, whose error is the op's own.
    halves = ir.supports(row_contiguous=("x",), multiple_of={"x": 2})
    gelu = halves & ir.supports(one_of={"approximate": ("none", "tanh")})
    floats = ir.supports(dtype={"x": FLOATS})
    with_scale = ir.supports(dtype={"x": FLOATS, "scale": (torch.float32,)}, one_element=("scale",))

    add(rms_norm_group_quant_fp8, norm & rows)
    add(
        fused_add_rms_norm_group_quant_fp8,
        norm & pair,
        inplace=True,
        functional=fused_add_rms_norm_group_quant_fp8_functional,
        checks_tensors=True,
    )
    add(silu_and_mul_group_quant_fp8, floats & halves)
    add(gelu_and_mul_static_quant_fp8, with_scale & gelu, checks_values=True)
    add(gelu_and_mul_dynamic_quant_fp8, floats & gelu)
    add(gelu_and_mul_group_quant_fp8, floats & gelu)

    integers = (torch.int64, torch.int32)
    heads: dict[str, tuple[torch.dtype, ...]] = {"positions": integers} | dict.fromkeys(
        ("query", "query_weight", "key_weight", "cos_sin_cache"), FLOATS
    )
    add(
        qk_norm_rotary_embedding,
        ir.supports(
            dtype=heads,
            same_dtype=("query", "key"),
            ndim={"cos_sin_cache": 2},
            contiguous=("positions",),
            row_contiguous=("query", "key", "cos_sin_cache"),
        ),
        checks_values=True,
    )
    add(
        qk_norm_rotary_embedding_reshape_and_cache,
        ir.supports(
            dtype=heads | {"value": FLOATS, "slot_mapping": integers},
            same_dtype=("query", "key"),
            ndim={"positions": 1, "cos_sin_cache": 2},
            contiguous=("positions", "slot_mapping"),
            row_contiguous=("query", "key", "value", "cos_sin_cache"),
        ),
        inplace=True,
        checks_values=True,
    )
