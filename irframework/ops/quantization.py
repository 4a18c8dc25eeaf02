"""Meanings of the quantisations to 8-bit floating point. Does not hold kernels."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.op import IrOp
from irframework.ops.layernorm import check_floating

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448
SMALLEST_SCALE = 1 / (FP8_MAX * 512)  # a row of zeros is divided by this, not by zero


def allow_one_code(op: IrOp) -> None:
    """Let an implementation's codes differ from native's by one step: 1/8 of a normal number, 2^-9 of a small one."""
    op.override_tolerance(FP8, atol=2.0**-9, rtol=2.0**-3)


def _check_scale(op: str, scale: Tensor) -> None:
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise ArgumentError(
            f"Op {op!r}: argument 'scale' must hold one float32 number, it has dtype {scale.dtype} and shape "
            f"{tuple(scale.shape)}."
        )


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def _codes(h: Tensor, scale: Tensor) -> Tensor:
    return (h * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


@register_op
def static_quant_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Quantise with a scale that is known before: `q = round(clamp(x * (1 / scale), -448, 448))`, so `x ~ q * scale`.

    Computed in float32 and rounded to nearest even once (float64 x in float64, which torch rounds to float32 first).
    Infinities become the largest code, NaN stays NaN. For gradients rounding is the identity, clamping a stop, and the
    gradient of codes is float8 as well (`docs/training.md`).

    Args:
        x: `[...]`, floating point.
        scale: One float32 number, shape `[]` or `[1]`, the same for all elements.

    Returns:
        `[...]`, float8_e4m3fn.

    Raises:
        ArgumentError: x is not floating point, or the scale is not one float32 number.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), E4M3.
    """
    check_floating("static_quant_fp8", "x", x)
    _check_scale("static_quant_fp8", scale)
    return _codes(_wide(x), scale.reshape(()))


@register_op
def dynamic_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row (token) with a scale of its own: `scale = max(|row|) / 448; q = round(row * (1 / scale))`.

    The scale is at least `1 / (448 * 512)`, so a row of zeros gives zeros. Computed and rounded as `static_quant_fp8`.
    A NaN in a row makes its scale and its codes NaN; an infinity makes the scale infinite, its own code NaN and the
    others zero.

    Args:
        x: `[..., hidden]`, floating point.

    Returns:
        `(q, scale)`: `[..., hidden]` in float8_e4m3fn, and `[..., 1]` in float32. `x ~ q * scale`.

    Raises:
        ArgumentError: x is not floating point, or is a scalar.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), E4M3.
    """
    check_floating("dynamic_quant_fp8", "x", x)
    if x.dim() == 0:
        raise ArgumentError("Op 'dynamic_quant_fp8': argument 'x' must have at least one dimension, it is a scalar.")
    h = _wide(x)
    if x.shape[-1] == 0:
        largest = h.new_zeros((*x.shape[:-1], 1))
    else:
        largest = h.abs().amax(-1, keepdim=True)
    # Divided by a tensor: by a number, torch multiplies with its inverse on some devices, which rounds otherwise.
    scale = (largest / torch.full_like(largest, FP8_MAX)).clamp_min(SMALLEST_SCALE)
    return _codes(h, scale), scale.to(torch.float32)


def scales(device: Any) -> tuple[Tensor, ...]:
    """Scales worth testing: usual; without dimensions, and so small that codes are clamped; large."""
    return tuple(torch.full(shape, value, device=device) for shape, value in (((1,), 0.02), ((), 1e-3), ((1,), 3.0)))


@static_quant_fp8.register_input_generator
def _static_quant_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, dtype=dtype, device=device)
    for scale in scales(device):
        yield x, scale


@dynamic_quant_fp8.register_input_generator
def _dynamic_quant_inputs(shape: tuple[int, ...], **options: Any) -> tuple[Any, ...]:
    return (torch.randn(shape, **options),)


allow_one_code(static_quant_fp8)
allow_one_code(dynamic_quant_fp8)
