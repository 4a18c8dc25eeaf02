"""Meanings of the fused ops that end in a quantisation with one scale for a tensor or for a row.

Each is its parts, one after the other, rounded as they round. Does not hold those with a scale for a block of a row
(`fused_block_quantization.py`), nor kernels.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework.declaration import register_op
from irframework.ops.activation import gelu_and_mul, silu_and_mul
from irframework.ops.layernorm import fused_add_rms_norm, rms_norm
from irframework.ops.quantization import allow_one_code, check_scale_values, dynamic_quant_fp8, scales, static_quant_fp8


@register_op(fuse=True)
def rms_norm_static_quant_fp8(x: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float) -> Tensor:
    """Norm rows and quantise them: `static_quant_fp8(rms_norm(x, weight, epsilon), scale)`.

    Args:
        x: Rows, `[..., hidden]`, floating point.
        weight: Scale of the norm, `[hidden]`, or None.
        scale: Scale of the codes, one float32 number.
        epsilon: Added to the mean square.

    Returns:
        `[..., hidden]`, float8_e4m3fn.

    Raises:
        ArgumentError: As `rms_norm` and `static_quant_fp8`.
    """
    q: Tensor = static_quant_fp8.native(rms_norm.native(x, weight, epsilon), scale)
    return q


@register_op(fuse=True)
def rms_norm_dynamic_quant_fp8(x: Tensor, weight: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """Norm rows and quantise each with its own scale: `dynamic_quant_fp8(rms_norm(x, weight, epsilon))`.

    Args:
        x: Rows, `[..., hidden]`, floating point.
        weight: Scale of the norm, `[hidden]`, or None.
        epsilon: Added to the mean square.

    Returns:
        `(q, scale)`: `[..., hidden]` in float8_e4m3fn, and `[..., 1]` in float32.

    Raises:
        ArgumentError: As `rms_norm`.
    """
    pair: tuple[Tensor, Tensor] = dynamic_quant_fp8.native(rms_norm.native(x, weight, epsilon))
    return pair


@register_op(allow_inplace=True, fuse=True)
def fused_add_rms_norm_static_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Add a residual, norm the sum and quantise the norm.

    `y, r = fused_add_rms_norm(x, x_residual, weight, epsilon); q = static_quant_fp8(y, scale)`.

    Args:
        x: Rows, `[..., hidden]`, floating point. Given away by `maybe_inplace`.
        x_residual: Like x. Given away by `maybe_inplace`.
        weight: Scale of the norm, `[hidden]`, or None.
        scale: Scale of the codes, one float32 number.
        epsilon: Added to the mean square.

    Returns:
        `(q, r)`: the codes, `[..., hidden]` in float8_e4m3fn, and the sum, like x.

    Raises:
        ArgumentError: As `fused_add_rms_norm` and `static_quant_fp8`.
    """
    y, residual = fused_add_rms_norm.native(x, x_residual, weight, epsilon)
    return static_quant_fp8.native(y, scale), residual


@register_op(allow_inplace=True, fuse=True)
def fused_add_rms_norm_dynamic_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a residual, norm the sum and quantise each row of the norm with its own scale.

    `y, r = fused_add_rms_norm(x, x_residual, weight, epsilon); q, scale = dynamic_quant_fp8(y)`.

    Args:
        x: Rows, `[..., hidden]`, floating point. Given away by `maybe_inplace`.
        x_residual: Like x. Given away by `maybe_inplace`.
        weight: Scale of the norm, `[hidden]`, or None.
        epsilon: Added to the mean square.

    Returns:
        `(q, scale, r)`: the codes, `[..., hidden]` in float8_e4m3fn, their scales, `[..., 1]` in float32, and the sum,
        like x.

    Raises:
        ArgumentError: As `fused_add_rms_norm`.
    """
    y, residual = fused_add_rms_norm.native(x, x_residual, weight, epsilon)
    q, scale = dynamic_quant_fp8.native(y)
    return q, scale, residual


@register_op(fuse=True)
def silu_and_mul_static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Gate by SiLU and quantise: `static_quant_fp8(silu_and_mul(x), scale)`.

    Args:
        x: `[..., 2 * hidden]`, floating point.
        scale: Scale of the codes, one float32 number.

    Returns:
        `[..., hidden]`, float8_e4m3fn.

    Raises:
        ArgumentError: As `silu_and_mul` and `static_quant_fp8`.
    """
    q: Tensor = static_quant_fp8.native(silu_and_mul.native(x), scale)
    return q


@register_op(fuse=True)
def silu_and_mul_dynamic_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Gate by SiLU and quantise each row with its own scale: `dynamic_quant_fp8(silu_and_mul(x))`.

    Args:
        x: `[..., 2 * hidden]`, floating point.

    Returns:
        `(q, scale)`: `[..., hidden]` in float8_e4m3fn, and `[..., 1]` in float32.

    Raises:
        ArgumentError: As `silu_and_mul`.
    """
    pair: tuple[Tensor, Tensor] = dynamic_quant_fp8.native(silu_and_mul.native(x))
    return pair


@register_op(fuse=True)
def gelu_and_mul_static_quant_fp8(x: Tensor, scale: Tensor, approximate: str = "none") -> Tensor:
    """Gate by GELU and quantise: `static_quant_fp8(gelu_and_mul(x, approximate), scale)`.

    Args:
        x: `[..., 2 * hidden]`, floating point.
        scale: Scale of the codes, one float32 number.
        approximate: As for `gelu_and_mul`.

    Returns:
        `[..., hidden]`, float8_e4m3fn.

    Raises:
        ArgumentError: As `gelu_and_mul` and `static_quant_fp8`.
    """
    q: Tensor = static_quant_fp8.native(gelu_and_mul.native(x, approximate), scale)
    return q


@register_op(fuse=True)
def gelu_and_mul_dynamic_quant_fp8(x: Tensor, approximate: str = "none") -> tuple[Tensor, Tensor]:
    """Gate by GELU and quantise each row with its own scale: `dynamic_quant_fp8(gelu_and_mul(x, approximate))`.

    Args:
        x: `[..., 2 * hidden]`, floating point.
        approximate: As for `gelu_and_mul`.

    Returns:
        `(q, scale)`: `[..., hidden]` in float8_e4m3fn, and `[..., 1]` in float32.

    Raises:
        ArgumentError: As `gelu_and_mul`.
    """
    pair: tuple[Tensor, Tensor] = dynamic_quant_fp8.native(gelu_and_mul.native(x, approximate))
    return pair


@rms_norm_static_quant_fp8.register_input_generator
def _norm_static_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    x, weight, epsilon, *_ = rms_norm.generate_inputs(shape=shape, dtype=dtype, device=device)
    for scale in scales(device):
        yield x, weight, scale, epsilon
    yield x, weight.float(), scale, epsilon
    yield x, None, scale, epsilon


@rms_norm_dynamic_quant_fp8.register_input_generator
def _norm_dynamic_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x, weight, epsilon, *_ = rms_norm.generate_inputs(shape=shape, **options)
    yield x, weight, epsilon
    yield x * 1e-3, weight.float(), 1e-5
    yield x, None, epsilon


@fused_add_rms_norm_static_quant_fp8.register_input_generator
def _add_norm_static_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    x, residual, weight, epsilon, *_ = fused_add_rms_norm.generate_inputs(shape=shape, dtype=dtype, device=device)
    for scale in scales(device):
        yield x, residual, weight, scale, epsilon
    yield x, residual, weight.float(), scale, epsilon
    yield x, residual, None, scale, epsilon


@fused_add_rms_norm_dynamic_quant_fp8.register_input_generator
def _add_norm_dynamic_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x, residual, weight, epsilon, *_ = fused_add_rms_norm.generate_inputs(shape=shape, **options)
    yield x, residual, weight, epsilon
    yield x * 1e-3, residual * 1e-3, weight.float(), 1e-5
    yield x, residual, None, epsilon


@silu_and_mul_static_quant_fp8.register_input_generator
def _silu_static_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, dtype=dtype, device=device)
    for scale in scales(device):
        yield x, scale


@silu_and_mul_dynamic_quant_fp8.register_input_generator
def _silu_dynamic_inputs(shape: tuple[int, ...], **options: Any) -> tuple[Any, ...]:
    return (torch.randn(shape, **options),)


@gelu_and_mul_static_quant_fp8.register_input_generator
def _gelu_static_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, dtype=dtype, device=device)
    for scale in scales(device):
        yield x, scale
    yield x, scale, "tanh"


@gelu_and_mul_dynamic_quant_fp8.register_input_generator
def _gelu_dynamic_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, **options)
    yield (x,)
    yield x, "tanh"


@rms_norm_static_quant_fp8.register_value_check
def _check_norm_static_values(scale: Tensor) -> None:
    check_scale_values("rms_norm_static_quant_fp8", "scale", scale)


@fused_add_rms_norm_static_quant_fp8.register_value_check
def _check_add_norm_static_values(scale: Tensor) -> None:
    check_scale_values("fused_add_rms_norm_static_quant_fp8", "scale", scale)


@silu_and_mul_static_quant_fp8.register_value_check
def _check_silu_static_values(scale: Tensor) -> None:
    check_scale_values("silu_and_mul_static_quant_fp8", "scale", scale)


@gelu_and_mul_static_quant_fp8.register_value_check
def _check_gelu_static_values(scale: Tensor) -> None:
    check_scale_values("gelu_and_mul_static_quant_fp8", "scale", scale)


for _op in (
    rms_norm_static_quant_fp8,
    rms_norm_dynamic_quant_fp8,
    fused_add_rms_norm_static_quant_fp8,
    fused_add_rms_norm_dynamic_quant_fp8,
    silu_and_mul_static_quant_fp8,
    silu_and_mul_dynamic_quant_fp8,
    gelu_and_mul_static_quant_fp8,
    gelu_and_mul_dynamic_quant_fp8,
):
    allow_one_code(_op)
