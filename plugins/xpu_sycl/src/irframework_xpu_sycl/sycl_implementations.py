"""Owns the functions that are registered for our own SYCL kernels. Which calls they take: see `sycl_conditions`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import irframework as ir
from irframework_xpu_sycl import route, sycl_operators
from irframework_xpu_sycl import sycl_conditions as conditions

Call = Callable[..., Any]
OPS = torch.ops.irframework_xpu_sycl


def _call(x: Tensor, body: Call, op: Any) -> Call:
    """The function itself for a tensor that nobody traces: then the way through torch's dispatcher is not needed."""
    return body if type(x) is Tensor or type(x) is torch.nn.Parameter else op.default


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """See `irframework.ops.rms_norm`."""
    y: Tensor = _call(x, sycl_operators.rms_norm, OPS.sycl_rms_norm)(x, weight, epsilon)
    return y


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm`; overwrites x with the norm and x_residual with the sum."""
    call = _call(x, sycl_operators.fused_add_rms_norm_, OPS.sycl_fused_add_rms_norm_)
    call(x, x_residual, weight, epsilon)
    return x, x_residual


def silu_and_mul(x: Tensor) -> Tensor:
    """See `irframework.ops.silu_and_mul`."""
    y: Tensor = _call(x, sycl_operators.gated, OPS.sycl_gated)(x, "silu")
    return y


def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """See `irframework.ops.gelu_and_mul`."""
    y: Tensor = _call(x, sycl_operators.gated, OPS.sycl_gated)(x, approximate)
    return y


def rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox: bool = True,
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.rotary_embedding`. A position outside the cache gives NaN."""
    call = _call(query, sycl_operators.rotary_embedding, OPS.sycl_rotary_embedding)
    pair: tuple[Tensor, Tensor] = call(positions, query, key, cos_sin_cache, head_size, is_neox)
    return pair


def static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """See `irframework.ops.static_quant_fp8`."""
    q: Tensor = _call(x, sycl_operators.static_quant, OPS.sycl_static_quant)(x, scale)
    return q


def dynamic_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.dynamic_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = _call(x, sycl_operators.dynamic_quant, OPS.sycl_dynamic_quant)(x)
    return pair


def rms_norm_static_quant_fp8(x: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float) -> Tensor:
    """See `irframework.ops.rms_norm_static_quant_fp8`."""
    call = _call(x, sycl_operators.rms_norm_static_quant, OPS.sycl_rms_norm_static_quant)
    q: Tensor = call(x, weight, scale, epsilon)
    return q


def rms_norm_dynamic_quant_fp8(x: Tensor, weight: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.rms_norm_dynamic_quant_fp8`."""
    call = _call(x, sycl_operators.rms_norm_dynamic_quant, OPS.sycl_rms_norm_dynamic_quant)
    pair: tuple[Tensor, Tensor] = call(x, weight, epsilon)
    return pair


def fused_add_rms_norm_static_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_static_quant_fp8`; overwrites x_residual with the sum."""
    call = _call(x, sycl_operators.fused_add_rms_norm_static_quant_, OPS.sycl_fused_add_rms_norm_static_quant_)
    return call(x, x_residual, weight, scale, epsilon), x_residual


def fused_add_rms_norm_dynamic_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `irframework.ops.fused_add_rms_norm_dynamic_quant_fp8`; overwrites x_residual with the sum."""
    call = _call(x, sycl_operators.fused_add_rms_norm_dynamic_quant_, OPS.sycl_fused_add_rms_norm_dynamic_quant_)
    q, scale = call(x, x_residual, weight, epsilon)
    return q, scale, x_residual


def silu_and_mul_static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """See `irframework.ops.silu_and_mul_static_quant_fp8`."""
    q: Tensor = _call(x, sycl_operators.silu_static_quant, OPS.sycl_silu_static_quant)(x, scale)
    return q


def silu_and_mul_dynamic_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.silu_and_mul_dynamic_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = _call(x, sycl_operators.silu_dynamic_quant, OPS.sycl_silu_dynamic_quant)(x)
    return pair


def register(provider: str) -> None:
    """Registers every implementation under `provider`. A row is computed by one work-group, whatever the others are."""
    device_types = ("xpu", "cpu") if route.runs_on_cpu() else ("xpu",)

    def add(fn: Call, accepted: Any, *, inplace: bool = False) -> None:
        op = getattr(ir.ops, fn.__name__)
        op.register_impl(
            provider,
            supported=conditions.kernels_run,
            supports_args=accepted,
            inplace=inplace,
            device_types=device_types,
            batch_invariant=True,
        )(fn)

    add(rms_norm, conditions.NORM & conditions.norm_fits)
    add(fused_add_rms_norm, conditions.ADD_NORM & conditions.add_norm_fits, inplace=True)
    add(silu_and_mul, conditions.GATED & conditions.rows_fit)
    add(gelu_and_mul, conditions.GATED & conditions.GELU & conditions.gelu_fits)
    add(static_quant_fp8, conditions.SCALED & conditions.scaled_rows_fit)
    add(dynamic_quant_fp8, conditions.ROWS & conditions.rows_fit)
    add(rms_norm_static_quant_fp8, conditions.SCALED & conditions.WEIGHT & conditions.scaled_norm_fits)
    add(rms_norm_dynamic_quant_fp8, conditions.ROWS & conditions.WEIGHT & conditions.quant_norm_fits)
    add(
        fused_add_rms_norm_static_quant_fp8,
        conditions.SCALED & conditions.WEIGHT & conditions.SUM & conditions.scaled_add_norm_fits,
        inplace=True,
    )
    add(
        fused_add_rms_norm_dynamic_quant_fp8,
        conditions.ROWS & conditions.WEIGHT & conditions.SUM & conditions.quant_add_norm_fits,
        inplace=True,
    )
    add(silu_and_mul_static_quant_fp8, conditions.SCALED & conditions.EVEN & conditions.scaled_rows_fit)
    add(silu_and_mul_dynamic_quant_fp8, conditions.GATED & conditions.rows_fit)
    add(rotary_embedding, conditions.ROTARY & conditions.heads_fit)
