"""Owns which calls the kernels take, and the functions that are registered for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import irframework as ir
from irframework_xpu_sycl import operators
from irframework_xpu_sycl.library import XpuKernelsError, load_kernels

Call = Callable[..., Any]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def kernels_load() -> bool | ir.Rejected:
    """Whether the kernels load here; the reason when not."""
    try:
        load_kernels()
    except XpuKernelsError as error:
        return ir.reject(str(error))
    return True


# --- what the kernels take ----------------------------------------------------------------------------------------


def norm_fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool | ir.Rejected:
    """Their meaning without a weight was never seen."""
    return ir.reject("weight is None, the kernel needs one") if weight is None else True


def add_norm_fits(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool | ir.Rejected:
    """Their meaning without a weight was never seen."""
    return ir.reject("weight is None, the kernel needs one") if weight is None else True


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
    heads = []
    for name, x in (("query", query), ("key", key)):
        if x is None:
            continue
        apart = x.dim() == positions.dim() + 2
        if not apart and x.dim() != positions.dim() + 1:
            return ir.reject(f"{name} has {x.dim()} dimensions, does not fit positions with {positions.dim()}")
        if x.shape[-1] != head_size if apart else x.shape[-1] % head_size:
            return ir.reject(f"{name} has a last dimension of {x.shape[-1]}, does not fit head_size={head_size}")
        heads.append(x.shape[-2] if apart else x.shape[-1] // head_size)
    if len(heads) == 2 and (heads[1] == 0 or heads[0] % heads[1]):
        return ir.reject(f"{heads[0]} heads of queries are not a multiple of {heads[1]} heads of keys")
    return True


NORM: dict[str, Any] = {"dtype": FLOATS, "none": ("variance_size",), "last_dim_of": {"weight": "x"}}
# An odd last dimension is left to native, whose error message is the op's own.
GATED: dict[str, Any] = {"dtype": FLOATS, "contiguous": ("x",), "multiple_of": {"x": 2}}
ROTARY: dict[str, Any] = {
    "dtype": {"positions": torch.int64, "query": FLOATS},
    "same_dtype": ("query", "key", "cos_sin_cache"),
    "ndim": {"positions": (1, 2), "cos_sin_cache": 2},
    "contiguous": ("positions", "cos_sin_cache"),
}


# --- what is registered -------------------------------------------------------------------------------------------


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor holds data and nobody traces it: then the way through torch's dispatcher is not needed."""
    return type(x) is Tensor or type(x) is torch.nn.Parameter


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """See `irframework.ops.rms_norm`."""
    call: Call = operators.rms_norm if _is_plain(x) else torch.ops.irframework_xpu_sycl.rms_norm.default
    y: Tensor = call(x, weight, epsilon)
    return y


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm`; overwrites x with the norm and x_residual with the sum."""
    graph_call = torch.ops.irframework_xpu_sycl.fused_add_rms_norm_.default
    call: Call = operators.fused_add_rms_norm_ if _is_plain(x) else graph_call
    call(x, x_residual, weight, epsilon)
    return x, x_residual


def silu_and_mul(x: Tensor) -> Tensor:
    """See `irframework.ops.silu_and_mul`."""
    return _gated(x, "silu")


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See `irframework.ops.gelu_and_mul`."""
    return _gated(x, approximate)


def _gated(x: Tensor, activation: str) -> Tensor:
    call: Call = operators.gated if _is_plain(x) else torch.ops.irframework_xpu_sycl.gated.default
    y: Tensor = call(x, activation)
    return y


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.rotary_embedding`. The kernel computes in the dtype of query, and checks no position."""
    graph_call = torch.ops.irframework_xpu_sycl.rotary_embedding.default
    call: Call = operators.rotary_embedding if _is_plain(query) else graph_call
    pair: tuple[Tensor, Tensor] = call(positions, query, key, cos_sin_cache, head_size, is_neox)
    return pair


def register(provider: str) -> None:
    """Registers every implementation under `provider`. Whether the kernels are batch invariant is not known."""
    common: dict[str, Any] = {"supported": kernels_load, "device_types": ("xpu",)}
    ir.ops.rms_norm.register_impl(
        provider,
        supports_args=ir.supports(
            same_dtype=("x", "weight"), ndim=(1, 2, 3, 4), row_contiguous=("x",), contiguous=("weight",), **NORM
        )
        & norm_fits,
        **common,
    )(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(
        provider,
        supports_args=ir.supports(
            same_dtype=("x", "x_residual", "weight"), same_shape=("x", "x_residual"), contiguous=("weight",), **NORM
        )
        & add_norm_fits,
        inplace=True,  # the framework gives it contiguous activations
        **common,
    )(fused_add_rms_norm)
    ir.ops.silu_and_mul.register_impl(provider, supports_args=ir.supports(**GATED), **common)(silu_and_mul)
    ir.ops.gelu_and_mul.register_impl(
        provider, supports_args=ir.supports(one_of={"approximate": ("none", "tanh")}, **GATED), **common
    )(gelu_and_mul)
    ir.ops.rotary_embedding.register_impl(provider, supports_args=ir.supports(**ROTARY) & heads_fit, **common)(
        rotary_embedding
    )
