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
from irframework_vllm_c.library import NAMESPACE, KernelsNotLoadedError, instruction_set, load_cpu_kernels

# The namespace exists before the library is loaded; looking it up once saves 0.1 us a call.
KERNELS = torch.ops.irframework_vllm_c
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def kernels_load() -> bool | ir.Rejected:
    """Whether the CPU kernels load here; the reason when they do not."""
    try:
        load_cpu_kernels()
        instruction_set()
    except (KernelsNotLoadedError, ValueError) as error:
        return ir.reject(str(error))
    out_variants()
    return True


@cache
def out_variants() -> Library:
    """Declares the `.out` overloads of the functional kernels, once; their kernels are in the library.

    Returns:
        What keeps them declared.
    """
    library = Library(NAMESPACE, "FRAGMENT")
    for name in ("rms_norm", "silu_and_mul", "gelu_and_mul", "rotary_embedding", "rotary_embedding_query"):
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
    """See `irframework.ops.rotary_embedding`. A position outside the cache is a RuntimeError."""
    if key is None:
        rotated = KERNELS.rotary_embedding_query.default(positions, query, cos_sin_cache, head_size, is_neox)
        return rotated, query.new_empty(0)
    pair: tuple[Tensor, Tensor] = KERNELS.rotary_embedding.default(
        positions, query, key, cos_sin_cache, head_size, is_neox
    )
    return pair


def register(provider: str) -> None:
    """Registers every implementation under `provider`."""

    def add(name: str, fn: Callable[..., Any], conditions: Supports, *, inplace: bool = False) -> None:
        registered = getattr(ir.ops, name).register_impl(
            provider,
            supported=kernels_load,
            supports_args=conditions,
            inplace=inplace,
            device_types=("cpu",),
            batch_invariant=True,
        )
        registered(fn)

    norm = ir.supports(dtype={"x": FLOATS, "weight": FLOATS}, none=("variance_size",), last_dim_of={"weight": "x"})
    # An odd last dimension is left to native, whose error is the op's own.
    gated = ir.supports(dtype=FLOATS, row_contiguous=("x",), multiple_of={"x": 2})
    add("rms_norm", rms_norm, norm & ir.supports(row_contiguous=("x",)))
    add(
        "fused_add_rms_norm",
        fused_add_rms_norm,
        norm
        & ir.supports(
            same_dtype=("x", "x_residual"),
            same_shape=("x", "x_residual"),
            row_contiguous=("x", "x_residual"),
        ),
        inplace=True,
    )
    add("silu_and_mul", silu_and_mul, gated)
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
