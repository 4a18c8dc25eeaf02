"""Owns which calls AITER takes, and the functions that are registered for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import irframework as ir
from irframework_aiter_rocm import operators
from irframework_aiter_rocm.library import (
    ARCHITECTURES,
    FP8_ARCHITECTURES,
    AiterUnusableError,
    architecture_of,
    check_aiter,
)

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


def made_for_codes(x: Tensor) -> bool | ir.Rejected:
    """Whether AITER's 8-bit floats are the ops' on the device."""
    if x.device.type == "cuda":
        architecture = architecture_of(x.device.index)
        if architecture == "gfx942":
            return ir.reject("the device is gfx942, whose 8-bit floats are float8_e4m3fnuz; the op gives float8_e4m3fn")
        if architecture not in FP8_ARCHITECTURES:
            return ir.reject(f"the device is {architecture}, AITER has float8_e4m3fn on {', '.join(FP8_ARCHITECTURES)}")
    return True


def static_quant_fits(x: Tensor, scale: Tensor) -> bool | ir.Rejected:
    """See `made_for_codes`."""
    return made_for_codes(x)


def norm_static_quant_fits(x: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float) -> bool | ir.Rejected:
    """AITER always applies a weight."""
    return ir.reject("weight is None, AITER needs one") if weight is None else made_for_codes(x)


def add_norm_static_quant_fits(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float
) -> bool | ir.Rejected:
    """AITER always applies a weight."""
    return ir.reject("weight is None, AITER needs one") if weight is None else made_for_codes(x)


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


# AITER quantises 16 elements at a time; the last of a row would write beyond it. It reads one float32 as the scale.
QUANT: dict[str, Any] = {
    "dtype": {"x": HALVES, "scale": torch.float32},
    "one_element": ("scale",),
    "contiguous": ("x",),
    "multiple_of": {"x": 16},
}
NORM_QUANT: dict[str, Any] = {
    **QUANT,
    "same_dtype": ("x", "weight"),
    "contiguous": ("x", "weight"),
    "last_dim_of": {"weight": "x"},
}
ADD_NORM_QUANT: dict[str, Any] = {
    **NORM_QUANT,
    "same_dtype": ("x", "x_residual", "weight"),
    "same_shape": ("x", "x_residual"),
    "contiguous": ("x", "x_residual", "weight"),
}
GATED_QUANT: dict[str, Any] = {**QUANT, "multiple_of": {"x": 32}}


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


def static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """See `irframework.ops.static_quant_fp8`."""
    call: Call = operators.static_quant if _is_plain(x) else torch.ops.irframework_aiter_rocm.static_quant.default
    q: Tensor = call(x, scale)
    return q


def rms_norm_static_quant_fp8(x: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float) -> Tensor:
    """See `irframework.ops.rms_norm_static_quant_fp8`. Two kernels: AITER's fused one does not round in between."""
    return static_quant_fp8(rms_norm(x, weight, epsilon), scale)


def fused_add_rms_norm_static_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_static_quant_fp8`. Two kernels, as `rms_norm_static_quant_fp8`."""
    y, residual = fused_add_rms_norm(x, x_residual, weight, epsilon)
    return static_quant_fp8(y, scale), residual


def silu_and_mul_static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """See `irframework.ops.silu_and_mul_static_quant_fp8`. Two kernels, as `rms_norm_static_quant_fp8`."""
    return static_quant_fp8(silu_and_mul(x), scale)


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
    quantising = {
        static_quant_fp8: ir.supports(**QUANT) & static_quant_fits,
        rms_norm_static_quant_fp8: ir.supports(**NORM_QUANT) & norm_static_quant_fits,
        fused_add_rms_norm_static_quant_fp8: ir.supports(**ADD_NORM_QUANT) & add_norm_static_quant_fits,
        silu_and_mul_static_quant_fp8: ir.supports(**GATED_QUANT) & static_quant_fits,
    }
    for function, fits in quantising.items():
        getattr(ir.ops, function.__name__).register_impl(provider, supports_args=fits, **common)(function)
