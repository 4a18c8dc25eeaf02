"""Owns which calls the kernels of vllm-xpu-kernels take, and the functions that are registered for them.

The package fuses a norm and SiLU with a quantisation by a given scale as the ops mean it. Its norm with a scale for
each row rounds at other places, and for SiLU it has none: there an op is its parts, one kernel after the other.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import irframework as ir
from irframework_xpu_sycl import operators
from irframework_xpu_sycl.library import XpuKernelsError, check_ops
from irframework_xpu_sycl.rotary_shapes import heads_of, misfit

Call = Callable[..., Any]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def kernels_load(*names: str) -> bool | ir.Rejected:
    """Whether the kernels load here and have these ops; the reason when not."""
    try:
        check_ops(*names)
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


def quant_norm_fits(x: Tensor, weight: Tensor | None, epsilon: float) -> bool | ir.Rejected:
    """Their meaning without a weight was never seen."""
    return norm_fits(x, weight, epsilon)


def quant_add_norm_fits(x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float) -> bool | ir.Rejected:
    """Their meaning without a weight was never seen."""
    return norm_fits(x, weight, epsilon)


def scale_fits(x: Tensor, scale: Tensor) -> bool | ir.Rejected:
    """One number; they take more, with other meanings."""
    return True if scale.numel() == 1 else ir.reject(f"scale has shape {tuple(scale.shape)}, needs one element")


def scaled_norm_fits(x: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float) -> bool | ir.Rejected:
    """A weight, and a scale of one number."""
    fits = norm_fits(x, weight, epsilon)
    return scale_fits(x, scale) if fits is True else fits


def scaled_add_norm_fits(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float
) -> bool | ir.Rejected:
    """A weight, and a scale of one number."""
    return scaled_norm_fits(x, weight, scale, epsilon)


def heads_fit(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox: bool = True,
) -> bool | ir.Rejected:
    """Ranks and sizes fit each other; how many tokens there are is not looked at."""
    problem = misfit(positions, query, key, cos_sin_cache, head_size)
    if problem is not None:
        return ir.reject(problem)
    heads = [heads_of(x, positions, head_size) for x in (query, key) if x is not None]
    if len(heads) == 2 and (heads[1] == 0 or heads[0] % heads[1]):
        return ir.reject(f"{heads[0]} heads of queries are not a multiple of {heads[1]} heads of keys")
    return True


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


def _quant_call(x: Tensor, name: str) -> Call:
    call: Call = getattr(operators if _is_plain(x) else torch.ops.irframework_xpu_sycl, name)
    return call


def static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """See `irframework.ops.static_quant_fp8`. A NaN becomes the largest code."""
    q: Tensor = _quant_call(x, "static_quant")(x, scale)
    return q


def dynamic_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.dynamic_quant_fp8`. A NaN becomes the largest code, and is left out of the scale."""
    pair: tuple[Tensor, Tensor] = _quant_call(x, "dynamic_quant")(x)
    return pair


def rms_norm_static_quant_fp8(x: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float) -> Tensor:
    """See `irframework.ops.rms_norm_static_quant_fp8`."""
    q: Tensor = _quant_call(x, "rms_norm_static_quant")(x, weight, scale, epsilon)
    return q


def rms_norm_dynamic_quant_fp8(x: Tensor, weight: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.rms_norm_dynamic_quant_fp8`; two kernels."""
    return dynamic_quant_fp8(rms_norm(x, weight, epsilon))


def fused_add_rms_norm_static_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_static_quant_fp8`; overwrites x_residual with the sum."""
    q = _quant_call(x, "fused_add_rms_norm_static_quant_")(x, x_residual, weight, scale, epsilon)
    return q, x_residual


def fused_add_rms_norm_dynamic_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_dynamic_quant_fp8`; two kernels, which overwrite x and x_residual."""
    y, residual = fused_add_rms_norm(x, x_residual, weight, epsilon)
    q, scale = dynamic_quant_fp8(y)
    return q, scale, residual


def silu_and_mul_static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """See `irframework.ops.silu_and_mul_static_quant_fp8`."""
    q: Tensor = _quant_call(x, "silu_static_quant")(x, scale)
    return q


def silu_and_mul_dynamic_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.silu_and_mul_dynamic_quant_fp8`; two kernels."""
    return dynamic_quant_fp8(silu_and_mul(x))


def register(provider: str) -> None:
    """Registers every implementation under `provider`. Whether the kernels are batch invariant is not known."""

    def add(fn: Call, accepted: Any, *called: str, inplace: bool = False) -> None:
        getattr(ir.ops, fn.__name__).register_impl(
            provider,
            supported=functools.partial(kernels_load, *called),
            supports_args=accepted,
            inplace=inplace,  # the framework gives it contiguous activations
            device_types=("xpu",),
        )(fn)

    weight = ir.supports(same_dtype=("x", "weight"), contiguous=("weight",), last_dim_of={"weight": "x"})
    total = ir.supports(
        same_dtype=("x", "x_residual", "weight"),
        same_shape=("x", "x_residual"),
        contiguous=("weight",),
        last_dim_of={"weight": "x"},
    )
    whole = ir.supports(dtype=FLOATS, none=("variance_size",))
    add(rms_norm, whole & weight & ir.supports(ndim=(1, 2, 3, 4), row_contiguous=("x",)) & norm_fits, "rms_norm")
    add(fused_add_rms_norm, whole & total & add_norm_fits, "fused_add_rms_norm", inplace=True)
    gated = ir.supports(**GATED)
    add(silu_and_mul, gated, "silu_and_mul")
    gelus = ir.supports(one_of={"approximate": ("none", "tanh")})
    add(gelu_and_mul, gated & gelus, "gelu_and_mul", "gelu_tanh_and_mul")
    add(rotary_embedding, ir.supports(**ROTARY) & heads_fit, "rotary_embedding")
    _register_quantisations(add)


def _register_quantisations(add: Call) -> None:
    rows: dict[str, Any] = {"ndim": (1, 2, 3, 4), "max_last_dim": 2**30}  # the kernels count in 32 bits along a row
    floats = ir.supports(dtype=FLOATS, **rows)
    scaled = ir.supports(dtype={"x": FLOATS, "scale": (torch.float32,)}, **rows)
    plain = ir.supports(contiguous=("x",))
    even = ir.supports(multiple_of={"x": 2})
    weight = ir.supports(same_dtype=("x", "weight"), contiguous=("x", "weight"), last_dim_of={"weight": "x"})
    total = ir.supports(
        same_dtype=("x", "x_residual", "weight"),
        same_shape=("x", "x_residual"),
        contiguous=("weight",),
        last_dim_of={"weight": "x"},
    )
    per_row = "dynamic_per_token_scaled_fp8_quant"
    add(static_quant_fp8, scaled & plain & scale_fits, "static_scaled_fp8_quant")
    add(dynamic_quant_fp8, floats & plain, per_row)
    add(rms_norm_static_quant_fp8, scaled & weight & scaled_norm_fits, "rms_norm_static_fp8_quant")
    add(rms_norm_dynamic_quant_fp8, floats & weight & quant_norm_fits, "rms_norm", per_row)
    called = "fused_add_rms_norm_static_fp8_quant"
    add(fused_add_rms_norm_static_quant_fp8, scaled & total & scaled_add_norm_fits, called, inplace=True)
    called = "fused_add_rms_norm"
    add(fused_add_rms_norm_dynamic_quant_fp8, floats & total & quant_add_norm_fits, called, per_row, inplace=True)
    add(silu_and_mul_static_quant_fp8, scaled & plain & even & scale_fits, "silu_and_mul_quant")
    add(silu_and_mul_dynamic_quant_fp8, floats & plain & even, "silu_and_mul", per_row)
