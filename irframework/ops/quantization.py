"""Meanings of the quantisations to 8-bit floating point with one scale for a tensor or for a row.

Does not hold those with a scale for a block of a row, other formats, and the way back (`block_quantization.py`), nor
kernels.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.op import IrOp
from irframework.ops.layernorm import check_floating, check_rows, widened

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max  # 448
SMALLEST_SCALE = 1 / (FP8_MAX * 512)  # a row of zeros is divided by this, not by zero


def allow_one_code(op: IrOp, near_zero: float = 2.0**-9) -> None:
    """Let an implementation's codes differ from native's by one step: 1/8 of a normal number, 2^-9 of a small one.

    Args:
        op: The op.
        near_zero: How far small codes may be apart, where they are codes of sums whose terms cancel.
    """
    op.override_tolerance(FP8, atol=near_zero, rtol=2.0**-3)


def check_scale(op: str, name: str, scale: Tensor) -> None:
    """Raise unless a scale is one float32 number.

    Raises:
        ArgumentError: Names the op, the argument, its dtype and its shape.
    """
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise ArgumentError(
            f"Op {op!r}: argument {name!r} must hold one float32 number, it has dtype {scale.dtype} and shape "
            f"{tuple(scale.shape)}."
        )


def check_scale_values(op: str, name: str, scale: Tensor) -> None:
    """Raise where a scale is zero or not finite. Reads values, so it has no place in a native body.

    Raises:
        ArgumentError: Names the op, the argument and the scale.
    """
    if scale.is_floating_point() and scale.numel():
        values = scale.reshape(-1)
        wrong = values[~values.isfinite() | (values == 0)] if scale.numel() > 1 else values
        for value in wrong[:1].tolist():
            if value == 0 or not math.isfinite(value):
                raise ArgumentError(f"Op {op!r}: argument {name!r} holds {value}; a scale is finite and not zero.")


def fp8_codes(h: Tensor, scale: Tensor) -> Tensor:
    """Return the codes of numbers in a wide dtype."""
    return (h * (1.0 / scale)).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def divided(largest: Tensor, by: float) -> Tensor:
    """Divide by a number. torch multiplies with its inverse on some devices, which rounds otherwise."""
    return largest / torch.full_like(largest, by)


def fp8_scale(largest: Tensor) -> Tensor:
    """Return the scale that gives the largest magnitude the largest code."""
    return divided(largest, FP8_MAX).clamp_min(SMALLEST_SCALE)


def largest_of_rows(h: Tensor) -> Tensor:
    """Return the largest magnitude of each row, `[..., 1]`; 0 for rows without elements."""
    return h.new_zeros((*h.shape[:-1], 1)) if h.shape[-1] == 0 else h.abs().amax(-1, keepdim=True)


@register_op(fuse=True)
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
        ArgumentError: x is not floating point, or the scale is not one float32 number, is zero or is not finite.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), E4M3.
    """
    check_floating("static_quant_fp8", "x", x)
    check_scale("static_quant_fp8", "scale", scale)
    return fp8_codes(widened(x), scale.reshape(()))


@register_op(fuse=True)
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
    check_rows("dynamic_quant_fp8", x)
    h = widened(x)
    scale = fp8_scale(largest_of_rows(h))
    return fp8_codes(h, scale), scale.to(torch.float32)


@register_op
def tensor_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise with one scale for the whole tensor: `scale = max(|x|) / 448; q = round(x * (1 / scale))`.

    The scale is at least `1 / (448 * 512)`, so zeros give zeros. Computed and rounded as `static_quant_fp8`. One NaN
    makes the scale and all codes NaN; an infinity makes the scale infinite, its own code NaN and the others zero. A
    token's codes depend on all tokens of the tensor: where batches are composed anew, take `dynamic_quant_fp8`.

    Args:
        x: `[...]`, floating point.

    Returns:
        `(q, scale)`: `[...]` in float8_e4m3fn, and `[1]` in float32. `x ~ q * scale`.

    Raises:
        ArgumentError: x is not floating point.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), E4M3.
    """
    check_floating("tensor_quant_fp8", "x", x)
    h = widened(x)
    rows = largest_of_rows(h) if h.dim() else h.abs()
    largest = torch.cat((rows.reshape(-1), rows.new_zeros(1))).amax(0, keepdim=True)  # there may be no rows
    scale = fp8_scale(largest)
    return fp8_codes(h, scale.reshape(())), scale.to(torch.float32)


def scales(device: Any) -> tuple[Tensor, ...]:
    """Scales worth testing: usual; without dimensions, and so small that codes are clamped; large."""
    return tuple(torch.full(shape, value, device=device) for shape, value in (((1,), 0.02), ((), 1e-3), ((1,), 3.0)))


@static_quant_fp8.register_value_check
def _check_static_values(x: Tensor, scale: Tensor) -> None:
    check_scale_values("static_quant_fp8", "scale", scale)


@static_quant_fp8.register_input_generator
def _static_quant_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, dtype=dtype, device=device)
    for scale in scales(device):
        yield x, scale


@dynamic_quant_fp8.register_input_generator
def _dynamic_quant_inputs(shape: tuple[int, ...], **options: Any) -> tuple[Any, ...]:
    return (torch.randn(shape, **options),)


@tensor_quant_fp8.register_input_generator
def _tensor_quant_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, **options)
    yield (x,)
    yield (x * 1e-3,)


for _op in (static_quant_fp8, dynamic_quant_fp8, tensor_quant_fp8):
    allow_one_code(_op)
