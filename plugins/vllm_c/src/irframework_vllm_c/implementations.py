"""Owns which ops the kernels implement, for which arguments, and how an op's call becomes a kernel's.

Does not load the kernels at import: `supported` does, at first need.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

import irframework as ir
from irframework.conditions import Supports
from irframework_vllm_c.graphs import COMPILED_WHERE
from irframework_vllm_c.library import (
    NAMESPACE,
    KernelsNotLoadedError,
    instruction_set,
    load_cpu_kernels,
    load_cuda_kernels,
)

# The namespace exists before the library is loaded; looking it up once saves 0.1 us a call.
KERNELS = torch.ops.irframework_vllm_c
FLOATS: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
FUNCTIONAL_KERNELS = (
    "rms_norm",
    "fused_add_rms_norm_functional",
    "fused_add_rms_norm_static_quant_fp8_functional",
    "fused_add_rms_norm_dynamic_quant_fp8_functional",
    "silu_and_mul",
    "gelu_and_mul",
    "rotary_embedding",
    "rotary_embedding_query",
    "decode_attention",
    "static_quant_fp8",
    "dynamic_quant_fp8",
    "rms_norm_static_quant_fp8",
    "rms_norm_dynamic_quant_fp8",
    "silu_and_mul_static_quant_fp8",
    "silu_and_mul_dynamic_quant_fp8",
)


_LOOK_AT_VALUES = (  # the kernels themselves refuse wrong scales, positions and slots
    "static_quant_fp8",
    "rms_norm_static_quant_fp8",
    "fused_add_rms_norm_static_quant_fp8",
    "silu_and_mul_static_quant_fp8",
    "rotary_embedding",
    "reshape_and_cache",
    "rotary_embedding_reshape_and_cache",
)


_LOOK_AT_TENSORS = (  # and other shapes of x_residual, and what overlaps memory that they overwrite
    "fused_add_rms_norm",
    "fused_add_rms_norm_static_quant_fp8",
    "fused_add_rms_norm_dynamic_quant_fp8",
)


def kernels_load() -> bool | ir.Rejected:
    """Whether the CPU kernels load here; the reason when they do not."""
    try:
        load_cpu_kernels()
        instruction_set()
    except (KernelsNotLoadedError, ValueError) as error:
        return ir.reject(str(error))
    out_variants(FUNCTIONAL_KERNELS)
    return True


def cuda_kernels_load() -> bool | ir.Rejected:
    """Whether the CUDA kernels load here; the reason when they do not."""
    try:
        load_cuda_kernels()
    except KernelsNotLoadedError as error:
        return ir.reject(str(error))
    out_variants(FUNCTIONAL_KERNELS)
    return True


@cache
def out_variants(kernels: tuple[str, ...]) -> Library:
    """Declares the `.out` overloads of functional kernels, once; their kernels are in the library.

    Args:
        kernels: Names of their torch ops.

    Returns:
        What keeps them declared.
    """
    library = Library(NAMESPACE, "FRAGMENT")
    for name in kernels:
        ir.define_out_variant(library, name)
    return library


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """See `irframework.ops.rms_norm`; the mean is taken over whole rows."""
    y: Tensor = KERNELS.rms_norm.default(x, weight, epsilon)
    return y


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm`; overwrites x with the norm and x_residual with the sum."""
    KERNELS.fused_add_rms_norm.default(x, x_residual, weight, epsilon)
    return x, x_residual


def fused_add_rms_norm_functional(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm`; overwrites nothing."""
    pair: tuple[Tensor, Tensor] = KERNELS.fused_add_rms_norm_functional.default(x, x_residual, weight, epsilon)
    return pair


def silu_and_mul(x: Tensor) -> Tensor:
    """See `irframework.ops.silu_and_mul`."""
    y: Tensor = KERNELS.silu_and_mul.default(x)
    return y


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See `irframework.ops.gelu_and_mul`."""
    y: Tensor = KERNELS.gelu_and_mul.default(x, approximate == "tanh")
    return y


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.rotary_embedding`.

    A position outside the cache is a RuntimeError on the CPU; on a GPU, where reading positions would wait for the
    device, it makes that token NaN.
    """
    if key is None:
        rotated = KERNELS.rotary_embedding_query.default(positions, query, cos_sin_cache, head_size, is_neox)
        return rotated, query.new_empty(0)
    pair: tuple[Tensor, Tensor] = KERNELS.rotary_embedding.default(
        positions, query, key, cos_sin_cache, head_size, is_neox
    )
    return pair


def reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.reshape_and_cache`; overwrites the caches."""
    KERNELS.reshape_and_cache.default(key, value, key_cache, value_cache, slot_mapping)
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
    """See `irframework.ops.rotary_embedding_reshape_and_cache`; overwrites the caches."""
    query, key = KERNELS.rotary_embedding_reshape_and_cache.default(
        positions.to(torch.int64),
        query,
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        cos_sin_cache,
        head_size,
        is_neox,
    )
    return query, key, key_cache, value_cache


def caches_fit(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> bool | ir.Rejected:
    """The caches have the dtypes of key and value. What does not fit otherwise is a mistake, which native explains."""
    for name, x, kept in (("key", key, key_cache), ("value", value, value_cache)):
        if kept.dtype is not x.dtype:
            return ir.reject(f"{name}_cache is {kept.dtype}, {name} is {x.dtype}")
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
    """See `caches_fit`."""
    return caches_fit(key, value, key_cache, value_cache, slot_mapping)


def static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """See `irframework.ops.static_quant_fp8`."""
    q: Tensor = KERNELS.static_quant_fp8.default(x, scale)
    return q


def dynamic_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.dynamic_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = KERNELS.dynamic_quant_fp8.default(x)
    return pair


def rms_norm_static_quant_fp8(x: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float) -> Tensor:
    """See `irframework.ops.rms_norm_static_quant_fp8`."""
    q: Tensor = KERNELS.rms_norm_static_quant_fp8.default(x, weight, scale, epsilon)
    return q


def rms_norm_dynamic_quant_fp8(x: Tensor, weight: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.rms_norm_dynamic_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = KERNELS.rms_norm_dynamic_quant_fp8.default(x, weight, epsilon)
    return pair


def fused_add_rms_norm_static_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_static_quant_fp8`; overwrites x_residual with the sum."""
    q: Tensor = KERNELS.fused_add_rms_norm_static_quant_fp8.default(x, x_residual, weight, scale, epsilon)
    return q, x_residual


def fused_add_rms_norm_dynamic_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_dynamic_quant_fp8`; overwrites x_residual with the sum."""
    q, scale = KERNELS.fused_add_rms_norm_dynamic_quant_fp8.default(x, x_residual, weight, epsilon)
    return q, scale, x_residual


def fused_add_rms_norm_static_quant_fp8_functional(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_static_quant_fp8`; overwrites nothing."""
    pair: tuple[Tensor, Tensor] = KERNELS.fused_add_rms_norm_static_quant_fp8_functional.default(
        x, x_residual, weight, scale, epsilon
    )
    return pair


def fused_add_rms_norm_dynamic_quant_fp8_functional(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_dynamic_quant_fp8`; overwrites nothing."""
    three: tuple[Tensor, Tensor, Tensor] = KERNELS.fused_add_rms_norm_dynamic_quant_fp8_functional.default(
        x, x_residual, weight, epsilon
    )
    return three


def silu_and_mul_static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """See `irframework.ops.silu_and_mul_static_quant_fp8`."""
    q: Tensor = KERNELS.silu_and_mul_static_quant_fp8.default(x, scale)
    return q


def silu_and_mul_dynamic_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.silu_and_mul_dynamic_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = KERNELS.silu_and_mul_dynamic_quant_fp8.default(x)
    return pair


def register(provider: str) -> None:
    """Registers every implementation under `provider`."""

    def add(
        name: str,
        fn: Callable[..., Any],
        conditions: Supports,
        *,
        functional: Callable[..., Any] | None = None,
        overwrites: bool = False,
    ) -> None:
        """`functional`: what the in-place function `fn` is where nothing may be overwritten.

        `overwrites`: it has no such form, and only the CPU has the kernel.
        """
        registered = getattr(ir.ops, name).register_impl(
            provider,
            supported={"cpu": kernels_load} if overwrites else {"cpu": kernels_load, "cuda": cuda_kernels_load},
            supports_args=conditions,
            inplace=overwrites or functional is not None,
            functional=functional,
            batch_invariant=True,
            checks_values=name in _LOOK_AT_VALUES,
            checks_tensors=name in _LOOK_AT_TENSORS,
            compiled_where=COMPILED_WHERE.get(name),
        )
        registered(fn)

    scale: dict[str, tuple[torch.dtype, ...]] = {"scale": (torch.float32,)}
    weighted: dict[str, tuple[torch.dtype, ...]] = {"x": FLOATS, "weight": FLOATS}
    shapes = ir.supports(last_dim_of={"weight": "x"})
    one_scale = ir.supports(one_element=("scale",))
    rows = ir.supports(row_contiguous=("x",))
    pair = ir.supports(
        same_dtype=("x", "x_residual"), same_shape=("x", "x_residual"), row_contiguous=("x", "x_residual")
    )
    norm = ir.supports(dtype=weighted) & shapes
    norm_with_scale = ir.supports(dtype=weighted | scale) & shapes & one_scale
    whole_rows = ir.supports(none=("variance_size",))
    # An odd last dimension is left to native, whose error is the op's own.
    halves = rows & ir.supports(multiple_of={"x": 2})
    gated = ir.supports(dtype=FLOATS) & halves
    with_scale = ir.supports(dtype={"x": FLOATS} | scale) & one_scale

    add("rms_norm", rms_norm, norm & whole_rows & rows)
    add("rms_norm_static_quant_fp8", rms_norm_static_quant_fp8, norm_with_scale & rows)
    add("rms_norm_dynamic_quant_fp8", rms_norm_dynamic_quant_fp8, norm & rows)
    add("fused_add_rms_norm", fused_add_rms_norm, norm & whole_rows & pair, functional=fused_add_rms_norm_functional)
    add(
        "fused_add_rms_norm_static_quant_fp8",
        fused_add_rms_norm_static_quant_fp8,
        norm_with_scale & pair,
        functional=fused_add_rms_norm_static_quant_fp8_functional,
    )
    add(
        "fused_add_rms_norm_dynamic_quant_fp8",
        fused_add_rms_norm_dynamic_quant_fp8,
        norm & pair,
        functional=fused_add_rms_norm_dynamic_quant_fp8_functional,
    )
    add("static_quant_fp8", static_quant_fp8, with_scale & rows)
    add("dynamic_quant_fp8", dynamic_quant_fp8, ir.supports(dtype=FLOATS) & rows)
    add("silu_and_mul", silu_and_mul, gated)
    add("silu_and_mul_static_quant_fp8", silu_and_mul_static_quant_fp8, with_scale & halves)
    add("silu_and_mul_dynamic_quant_fp8", silu_and_mul_dynamic_quant_fp8, gated)
    add("gelu_and_mul", gelu_and_mul, gated & ir.supports(one_of={"approximate": ("none", "tanh")}))
    add(
        "rotary_embedding",
        rotary_embedding,
        ir.supports(
            dtype={"positions": (torch.int64,), "query": FLOATS, "cos_sin_cache": FLOATS},
            same_dtype=("query", "key"),
            ndim={"cos_sin_cache": 2},
            contiguous=("positions",),
            row_contiguous=("query", "key", "cos_sin_cache"),
        ),
    )
    integers = (torch.int64, torch.int32)
    add(
        "reshape_and_cache",
        reshape_and_cache,
        ir.supports(
            dtype={"key": FLOATS, "value": FLOATS, "slot_mapping": integers},
            contiguous=("slot_mapping",),
            row_contiguous=("key", "value"),
        )
        & caches_fit,
        overwrites=True,
    )
    add(
        "rotary_embedding_reshape_and_cache",
        rotary_embedding_reshape_and_cache,
        ir.supports(
            dtype={"positions": integers, "query": FLOATS, "value": FLOATS, "cos_sin_cache": FLOATS}
            | {"slot_mapping": integers},
            same_dtype=("query", "key"),
            ndim={"positions": 1, "cos_sin_cache": 2},
            contiguous=("positions", "slot_mapping"),
            row_contiguous=("query", "key", "value", "cos_sin_cache"),
        )
        & rotated_caches_fit,
        overwrites=True,
    )
