"""Owns which calls the kernels of the first families take, the functions that are registered for them, and how.

Further ones are in `activations`, `decoding`, `fused_quantizations`, `gemma_norms`, `latent_decoding`, `normed_rotary`,
`nvfp4`, `products`, `quantizations`, `routing`, `sums` and `written_out`. The kernels, and with them Triton, are
imported at the first call.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import irframework as ir
from irframework.conditions import Supports
from irframework_triton_kernels import (
    activations,
    decoding,
    fused_quantizations,
    gemma_norms,
    latent_decoding,
    normed_rotary,
    nvfp4,
    products,
    quantizations,
    routing,
    sums,
    written_out,
)
from irframework_triton_kernels.availability import triton_runs
from irframework_triton_kernels.conditions import ADD_NORM, FLOATS, GATED, INTEGERS, NORM
from irframework_triton_kernels.conditions import launches as _launch

DEVICES = ("cuda", "xpu")


# --- what the kernels take ----------------------------------------------------------------------------------------


def variance_fits(x: Tensor, variance_size: int | None) -> bool | ir.Rejected:
    """A mean over no element, or over more than there are, is a mistake that native explains."""
    if variance_size is None or 0 < variance_size <= x.shape[-1]:
        return True
    return ir.reject(f"variance_size={variance_size} does not fit rows of {x.shape[-1]} elements")


def norm_fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool | ir.Rejected:
    """See `variance_fits`."""
    return variance_fits(x, variance_size)


def add_norm_fits(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool | ir.Rejected:
    """See `variance_fits`."""
    return variance_fits(x, variance_size)


def heads_fit(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox: bool = True,
) -> bool | ir.Rejected:
    """Ranks and sizes fit each other; how many tokens there are is not looked at."""
    rotary_dim = cos_sin_cache.shape[-1]
    if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
        return ir.reject(
            f"rotates {rotary_dim} elements of a head of {head_size}, needs an even number of at most that"
        )
    for name, x in (("query", query), ("key", key)):
        if x is None:
            continue
        apart = x.dim() == positions.dim() + 2
        if not apart and x.dim() != positions.dim() + 1:
            return ir.reject(f"{name} has {x.dim()} dimensions, does not fit positions with {positions.dim()}")
        if x.shape[-1] != head_size if apart else x.shape[-1] % head_size:
            return ir.reject(f"{name} has a last dimension of {x.shape[-1]}, does not fit head_size={head_size}")
    return True


def caches_fit(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> bool | ir.Rejected:
    """Dtypes, ranks and sizes of heads fit the caches; how many tokens and blocks there are is not looked at."""
    for name, x, cache in (("key", key, key_cache), ("value", value, value_cache)):
        if cache.dtype is not x.dtype:
            return ir.reject(f"{name}_cache is {cache.dtype}, {name} is {x.dtype}")
        _, block_size, heads, size = cache.shape
        apart = x.dim() == 3
        if not heads * size or (x.shape[1:] != (heads, size) if apart else x.shape[1:] != (heads * size,)):
            return ir.reject(f"{name} has shape {tuple(x.shape)}, does not fit a cache of shape {tuple(cache.shape)}")
    if block_size != key_cache.shape[1]:
        return ir.reject("the caches have blocks of different sizes")
    return True


def rotated_caches_fit(
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
) -> bool | ir.Rejected:
    """See `caches_fit` and `heads_fit`."""
    fits = caches_fit(key, value, key_cache, value_cache, slot_mapping)
    return heads_fit(positions, query, key, cos_sin_cache, head_size, is_neox) if fits is True else fits


SCALE: dict[str, tuple[torch.dtype, ...]] = {"scale": (torch.float32,)}
ONE_SCALE: dict[str, Any] = {"one_element": ("scale",)}


# --- what is registered -------------------------------------------------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """See `irframework.ops.rms_norm`."""
    y: Tensor = _launch().rms_norm(x, weight, epsilon, variance_size)
    return y


def rms_norm_static_quant_fp8(x: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float) -> Tensor:
    """See `irframework.ops.rms_norm_static_quant_fp8`."""
    q: Tensor = _launch().rms_norm_static_quant_fp8(x, weight, scale, epsilon)
    return q


def rms_norm_dynamic_quant_fp8(x: Tensor, weight: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.rms_norm_dynamic_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = _launch().rms_norm_dynamic_quant_fp8(x, weight, epsilon)
    return pair


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm`."""
    pair: tuple[Tensor, Tensor] = _launch().fused_add_rms_norm(x, x_residual, weight, epsilon, variance_size)
    return pair


def fused_add_rms_norm_inplace(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm`; overwrites x with the norm and x_residual with the sum."""
    _launch().fused_add_rms_norm_inplace(x, x_residual, weight, epsilon, variance_size)
    return x, x_residual


def fused_add_rms_norm_static_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_static_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = _launch().fused_add_rms_norm_static_quant_fp8(x, x_residual, weight, scale, epsilon)
    return pair


def fused_add_rms_norm_static_quant_fp8_inplace(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_static_quant_fp8`; overwrites x_residual with the sum."""
    q = _launch().fused_add_rms_norm_static_quant_fp8_inplace(x, x_residual, weight, scale, epsilon)
    return q, x_residual


def fused_add_rms_norm_dynamic_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_dynamic_quant_fp8`."""
    outputs: tuple[Tensor, Tensor, Tensor] = _launch().fused_add_rms_norm_dynamic_quant_fp8(
        x, x_residual, weight, epsilon
    )
    return outputs


def fused_add_rms_norm_dynamic_quant_fp8_inplace(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_dynamic_quant_fp8`; overwrites x_residual with the sum."""
    q, scales = _launch().fused_add_rms_norm_dynamic_quant_fp8_inplace(x, x_residual, weight, epsilon)
    return q, scales, x_residual


def silu_and_mul(x: Tensor) -> Tensor:
    """See `irframework.ops.silu_and_mul`."""
    y: Tensor = _launch().gated(x, "silu")
    return y


def silu_and_mul_static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """See `irframework.ops.silu_and_mul_static_quant_fp8`."""
    q: Tensor = _launch().silu_and_mul_static_quant_fp8(x, scale)
    return q


def silu_and_mul_dynamic_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.silu_and_mul_dynamic_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = _launch().silu_and_mul_dynamic_quant_fp8(x)
    return pair


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See `irframework.ops.gelu_and_mul`."""
    y: Tensor = _launch().gated(x, approximate)
    return y


def static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """See `irframework.ops.static_quant_fp8`."""
    q: Tensor = _launch().static_quant_fp8(x, scale)
    return q


def dynamic_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.dynamic_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = _launch().dynamic_quant_fp8(x)
    return pair


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.rotary_embedding`. A position outside the cache gives NaN.

    Raises:
        ValueError: query or key is not for as many tokens as there are positions.
    """
    for name, x in (("query", query), ("key", key)):
        if x is not None and x.shape[: positions.dim()] != positions.shape:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, positions have shape {tuple(positions.shape)}")
    pair: tuple[Tensor, Tensor] = _launch().rotary_embedding(positions, query, key, cos_sin_cache, head_size, is_neox)
    return pair


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.reshape_and_cache`; overwrites the caches.

    Raises:
        ValueError: There are not as many keys, values and slots, or not as many blocks of both.
    """
    _as_many(slot_mapping, key=key, value=value)
    _as_many(key_cache, value_cache=value_cache)
    _launch().reshape_and_cache_inplace(key, value, key_cache, value_cache, slot_mapping)
    return key_cache, value_cache


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
    """See `irframework.ops.rotary_embedding_reshape_and_cache`; overwrites the caches.

    Raises:
        ValueError: There are not as many positions, queries, keys, values and slots, or not as many blocks of both.
    """
    _as_many(positions, query=query, key=key, value=value, slot_mapping=slot_mapping)
    _as_many(key_cache, value_cache=value_cache)
    query, key = _launch().rotary_embedding_reshape_and_cache_inplace(
        positions, query, key, value, key_cache, value_cache, slot_mapping, cos_sin_cache, head_size, is_neox
    )
    return query, key, key_cache, value_cache


def _as_many(first: Tensor, **others: Tensor) -> None:
    for name, x in others.items():
        if x.shape[0] != first.shape[0]:
            raise ValueError(f"{name} has shape {tuple(x.shape)}, does not fit one of shape {tuple(first.shape)}")


def register(provider: str) -> None:
    """Registers every implementation under `provider`. A row's result depends on other rows where its op says so only.

    See `tiles` for how that is.
    """

    def add(
        fn: Callable[..., Any],
        conditions: Supports,
        inplace: Callable[..., Any] | None = None,
        overwrites: bool = False,
        batch_invariant: bool = True,
        compiled_where: Callable[..., Any] | None = None,
        supported: Callable[[], Any] = triton_runs,
    ) -> None:
        op: ir.IrOp = getattr(ir.ops, fn.__name__)
        op.register_impl(
            provider,
            supported=supported,
            supports_args=conditions,
            inplace=overwrites or inplace is not None,
            functional=fn if inplace else None,
            device_types=DEVICES,
            batch_invariant=batch_invariant,
            compiled_where=compiled_where,
        )(inplace or fn)

    values = {"x": FLOATS, "weight": FLOATS}
    add(rms_norm, ir.supports(dtype=values, **NORM) & norm_fits)
    add(rms_norm_static_quant_fp8, ir.supports(dtype=values | SCALE, **NORM, **ONE_SCALE))
    add(rms_norm_dynamic_quant_fp8, ir.supports(dtype=values, **NORM))
    add(fused_add_rms_norm, ir.supports(dtype=values, **ADD_NORM) & add_norm_fits, fused_add_rms_norm_inplace)
    add(
        fused_add_rms_norm_static_quant_fp8,
        ir.supports(dtype=values | SCALE, **ADD_NORM, **ONE_SCALE),
        fused_add_rms_norm_static_quant_fp8_inplace,
    )
    add(
        fused_add_rms_norm_dynamic_quant_fp8,
        ir.supports(dtype=values, **ADD_NORM),
        fused_add_rms_norm_dynamic_quant_fp8_inplace,
    )
    add(silu_and_mul, ir.supports(dtype=FLOATS, **GATED))
    add(silu_and_mul_static_quant_fp8, ir.supports(dtype={"x": FLOATS} | SCALE, **GATED, **ONE_SCALE))
    add(silu_and_mul_dynamic_quant_fp8, ir.supports(dtype=FLOATS, **GATED))
    add(gelu_and_mul, ir.supports(dtype=FLOATS, one_of={"approximate": ("none", "tanh")}, **GATED))
    add(static_quant_fp8, ir.supports(dtype={"x": FLOATS} | SCALE, row_contiguous=("x",), **ONE_SCALE))
    add(dynamic_quant_fp8, ir.supports(dtype=FLOATS, row_contiguous=("x",)))
    add(
        rotary_embedding,
        ir.supports(
            dtype={"positions": INTEGERS, "query": FLOATS, "key": FLOATS, "cos_sin_cache": FLOATS},
            ndim={"cos_sin_cache": 2},
            contiguous=("positions",),
            row_contiguous=("query", "key", "cos_sin_cache"),
        )
        & heads_fit,
    )
    tokens: dict[str, Any] = {
        "dtype": {"key": FLOATS, "value": FLOATS, "slot_mapping": INTEGERS},
        "ndim": {"key": (2, 3), "value": (2, 3), "key_cache": 4, "value_cache": 4, "slot_mapping": 1},
        "contiguous": ("slot_mapping",),
        "row_contiguous": ("key", "value"),
    }
    # A cache that is not given away is copied whole, which no kernel would do better.
    add(reshape_and_cache, ir.supports(**tokens) & caches_fit, overwrites=True)
    add(
        rotary_embedding_reshape_and_cache,
        ir.supports(
            dtype=tokens["dtype"] | {"positions": INTEGERS, "query": FLOATS, "cos_sin_cache": FLOATS},
            ndim=tokens["ndim"] | {"positions": 1, "query": (2, 3), "cos_sin_cache": 2},
            contiguous=("positions", "slot_mapping"),
            row_contiguous=("query", "key", "value", "cos_sin_cache"),
        )
        & rotated_caches_fit,
        overwrites=True,
    )
    activations.register(add)
    written_out.register(add)
    quantizations.register(add)
    fused_quantizations.register(add)
    nvfp4.register(add)
    gemma_norms.register(add)
    routing.register(add)
    decoding.register(add)
    latent_decoding.register(add)
    products.register(add)
    normed_rotary.register(add, heads_fit, caches_fit)
    sums.register(add)
