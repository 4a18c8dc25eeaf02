"""Owns which calls AITER takes, and the functions that are registered for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import irframework as ir
from irframework_aiter_rocm import operators
from irframework_aiter_rocm.library import ARCHITECTURES, AiterUnusableError, architecture_of, check_aiter

Call = Callable[..., Any]
HALVES = (torch.bfloat16, torch.float16)


def aiter_runs() -> bool | ir.Rejected:
    """Whether AITER is here and has the functions that are called; the reason when not."""
    try:
        check_aiter()
    except AiterUnusableError as error:
        return ir.reject(str(error))
    return True


# --- what AITER takes ---------------------------------------------------------------------------------------------


def made_for(x: Tensor) -> bool | ir.Rejected:
    """AITER has code for some architectures only. The first look at a device initialises ROCm, never earlier."""
    if x.device.type == "cuda":
        architecture = architecture_of(x.device.index)
        if architecture not in ARCHITECTURES:
            return ir.reject(f"the device is {architecture}, AITER has code for {', '.join(ARCHITECTURES)}")
    return True


def norm_fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> bool | ir.Rejected:
    """AITER always applies a weight."""
    return ir.reject("weight is None, AITER needs one") if weight is None else made_for(x)


def add_norm_fits(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool | ir.Rejected:
    """AITER always applies a weight."""
    return ir.reject("weight is None, AITER needs one") if weight is None else made_for(x)


def gelu_fits(x: Tensor, approximate: str = "none") -> bool | ir.Rejected:
    """See `made_for`."""
    return made_for(x)


NORM: dict[str, Any] = {
    "dtype": HALVES,
    "same_dtype": ("x", "weight"),
    "none": ("variance_size",),
    "contiguous": ("x", "weight"),
    "last_dim_of": {"weight": "x"},
}
ADD_NORM: dict[str, Any] = {
    **NORM,
    "same_dtype": ("x", "x_residual", "weight"),
    "same_shape": ("x", "x_residual"),
    "contiguous": ("x", "x_residual", "weight"),
}
# An odd half would be read and written in words that reach beyond the row.
GATED: dict[str, Any] = {"dtype": HALVES, "contiguous": ("x",), "multiple_of": {"x": 4}}


# --- what is registered -------------------------------------------------------------------------------------------


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor holds data and nobody traces it: then the way through torch's dispatcher is not needed."""
    return type(x) is Tensor or type(x) is torch.nn.Parameter


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """See `irframework.ops.rms_norm`. AITER rounds once, after the weight was applied."""
    call: Call = operators.rms_norm if _is_plain(x) else torch.ops.irframework_aiter_rocm.rms_norm.default
    y: Tensor = call(x, weight, epsilon)
    return y


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm`. AITER rounds the norm once, after the weight was applied."""
    graph_call = torch.ops.irframework_aiter_rocm.fused_add_rms_norm.default
    call: Call = operators.fused_add_rms_norm if _is_plain(x) else graph_call
    pair: tuple[Tensor, Tensor] = call(x, x_residual, weight, epsilon)
    return pair


def silu_and_mul(x: Tensor) -> Tensor:
    """See `irframework.ops.silu_and_mul`. AITER rounds once, after the product."""
    return _gated(x, "silu")


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See `irframework.ops.gelu_and_mul`. AITER rounds once, after the product."""
    return _gated(x, approximate)


def _gated(x: Tensor, activation: str) -> Tensor:
    call: Call = operators.gated if _is_plain(x) else torch.ops.irframework_aiter_rocm.gated.default
    y: Tensor = call(x, activation)
    return y


def register(provider: str) -> None:
    """Registers every implementation under `provider`. Whether AITER is batch invariant is not known."""
    common: dict[str, Any] = {"supported": aiter_runs, "device_types": ("cuda",)}
    ir.ops.rms_norm.register_impl(provider, supports_args=ir.supports(**NORM) & norm_fits, **common)(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(provider, supports_args=ir.supports(**ADD_NORM) & add_norm_fits, **common)(
        fused_add_rms_norm
    )
    ir.ops.silu_and_mul.register_impl(provider, supports_args=ir.supports(**GATED) & made_for, **common)(silu_and_mul)
    ir.ops.gelu_and_mul.register_impl(
        provider,
        supports_args=ir.supports(one_of={"approximate": ("none", "tanh")}, **GATED) & gelu_fits,
        **common,
    )(gelu_and_mul)
