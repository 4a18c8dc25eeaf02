"""Meanings of the fused ops that begin with a matrix product. Each is its parts, rounded as they round.

Does not hold kernels, nor products behind or in front of which processes exchange something (`fused_collectives.py`).
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.activation import silu_and_mul
from irframework.ops.projection import check_projection, linear
from irframework.ops.quantization import allow_one_code, check_scale, check_scale_values, scales, static_quant_fp8
from irframework.ops.scaled_projection import check_scaled_projection, scaled_linear, scaled_products


def _check_halves(op: str, weight: Tensor) -> None:
    if weight.dim() == 2 and weight.shape[0] % 2:
        raise ArgumentError(
            f"Op {op!r}: argument 'weight' holds the rows of the gate and then as many of what it multiplies, so their "
            f"number must be even; it has shape {tuple(weight.shape)}."
        )


@register_op(fuse=True)
def linear_silu_and_mul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows by a matrix, and gate by SiLU: `silu_and_mul(linear(x, weight, bias))`.

    The first half of a gated feed-forward layer, with the weights of gate and up in one matrix.

    Args:
        x: `[..., in_features]`, floating point.
        weight: `[2 * hidden, in_features]`, the dtype of x: the rows of the gate, then those of what it multiplies.
        bias: `[2 * hidden]`, the dtype of x, or None.

    Returns:
        `[..., hidden]`, the dtype of x; the product, its SiLU, and what comes of both halves are each rounded to that.

    Raises:
        ArgumentError: As `linear`; or the weight has an odd number of rows.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), SwiGLU.
    """
    _check_halves("linear_silu_and_mul", weight)
    check_projection("linear_silu_and_mul", x, weight, bias)
    y: Tensor = silu_and_mul.native(linear.native(x, weight, bias))
    return y


@linear_silu_and_mul.register_spelling
def _of_the_op(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """With the product as the op `linear`, which is one op in graphs."""
    y: Tensor = silu_and_mul.native(linear(x, weight, bias))
    return y


@register_op(activations=("x",), fuse=True)
def scaled_linear_silu_and_mul_static_quant_fp8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulation: bool = True,
) -> Tensor:
    """Multiply rows of codes by a matrix of codes, gate by SiLU, and quantise for the next product.

    `static_quant_fp8(silu_and_mul(scaled_linear(x, weight, x_scale, weight_scale, dtype, fast_accumulation)), scale)`.

    Args:
        x: Codes, `[rows, in_features]`, float8_e4m3fn.
        weight: Codes, `[2 * hidden, in_features]`, float8_e4m3fn: the rows of the gate, then those of what it
            multiplies.
        x_scale: float32: one number, or `[rows, 1]`.
        weight_scale: float32: one number, or `[1, 2 * hidden]`, where x_scale has one for each row.
        scale: Scale of the codes that are returned, one float32 number.
        dtype: Of the product, and of what the gate is computed in: bfloat16, float16 or float32.
        fast_accumulation: As for `scaled_linear`.

    Returns:
        `[rows, hidden]`, float8_e4m3fn; the product, its SiLU, and what comes of both halves are each rounded to dtype
        before.

    Raises:
        ArgumentError: As `scaled_linear` and `static_quant_fp8`; or the weight has an odd number of rows.

    Source: as of `linear_silu_and_mul`, `scaled_linear` and `static_quant_fp8`.
    """
    op = "scaled_linear_silu_and_mul_static_quant_fp8"
    _check_halves(op, weight)
    check_scaled_projection(op, x, weight, x_scale, weight_scale, dtype)
    check_scale(op, "scale", scale)
    product = scaled_linear.native(x, weight, x_scale, weight_scale, dtype, fast_accumulation)
    q: Tensor = static_quant_fp8.native(silu_and_mul.native(product), scale)
    return q


@scaled_linear_silu_and_mul_static_quant_fp8.register_spelling
def _of_the_scaled_op(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulation: bool = True,
) -> Tensor:
    """With the product as the op `scaled_linear`, which is one op in graphs."""
    product = scaled_linear(x, weight, x_scale, weight_scale, dtype, fast_accumulation)
    q: Tensor = static_quant_fp8.native(silu_and_mul.native(product), scale)
    return q


@scaled_linear_silu_and_mul_static_quant_fp8.register_value_check
def _check_values(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulation: bool = True,
) -> None:
    for name, each in (("x_scale", x_scale), ("weight_scale", weight_scale), ("scale", scale)):
        check_scale_values("scaled_linear_silu_and_mul_static_quant_fp8", name, each)


@linear_silu_and_mul.register_input_generator
def _linear_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, **options)
    weight = torch.randn((48, shape[-1]), **options) / max(shape[-1], 1) ** 0.5
    yield x, weight
    yield x, weight[:14], torch.randn(14, **options)


@scaled_linear_silu_and_mul_static_quant_fp8.register_input_generator
def _scaled_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    """Of any dtype the same: the rows are codes."""
    for product, scale in zip(scaled_products(shape, device), scales(device), strict=False):
        yield *product, scale
    for product in scaled_products(shape, device):
        yield *product, scale, torch.bfloat16, False
        yield *product, scale, torch.float16
        yield *product, scale, torch.float32


# Long sums, added up in any order.
linear_silu_and_mul.override_tolerance(torch.float32, atol=5e-5, rtol=1e-5)
allow_one_code(scaled_linear_silu_and_mul_static_quant_fp8, near_zero=2.0**-4)
