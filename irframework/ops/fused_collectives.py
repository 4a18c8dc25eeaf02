"""Meanings of the fused ops that hold a collective. Each is its parts, one after the other, rounded as they round.

Does not hold kernels. Groups are named as in `collectives.py`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework.conditions import supports
from irframework.declaration import register_op
from irframework.ops.collectives import all_gather, all_reduce, reduce_scatter
from irframework.ops.fused_quantization import (
    fused_add_rms_norm_dynamic_quant_fp8,
    fused_add_rms_norm_static_quant_fp8,
)
from irframework.ops.layernorm import fused_add_rms_norm, rms_norm
from irframework.ops.projection import linear
from irframework.ops.quantization import allow_one_code, check_scale_values, scales

_ALONE = ""


@register_op(fuse=True)
def all_reduce_rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, group: str) -> tuple[Tensor, Tensor]:
    """Add up rows over the processes of a group, and norm the sum: `r = all_reduce(x); y = rms_norm(r, weight, eps)`.

    Args:
        x: Rows, `[..., hidden]`, floating point; the same shape and dtype in every process.
        weight: Scale of the norm, `[hidden]`, or None.
        epsilon: Added to the mean square.
        group: Name of a process group; the empty name for this process alone.

    Returns:
        `(y, r)`: the normed sum and the sum, both `[..., hidden]` in the dtype of x.

    Raises:
        ArgumentError: As `all_reduce` and `rms_norm`.
    """
    residual = all_reduce(x, group)
    return rms_norm.native(residual, weight, epsilon), residual


@register_op(allow_inplace=True, fuse=True)
def all_reduce_fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, group: str
) -> tuple[Tensor, Tensor]:
    """Add up rows over the processes of a group, add a residual, and norm the sum.

    `y, r = fused_add_rms_norm(all_reduce(x, group), x_residual, weight, epsilon)`.

    Args:
        x: Rows, `[..., hidden]`, floating point; the same shape and dtype in every process. Given away by
            `maybe_inplace`.
        x_residual: Like x, and the same in every process. Given away by `maybe_inplace`.
        weight: Scale of the norm, `[hidden]`, or None.
        epsilon: Added to the mean square.
        group: Name of a process group; the empty name for this process alone.

    Returns:
        `(y, r)`: the normed sum and the sum, both `[..., hidden]` in the dtype of x.

    Raises:
        ArgumentError: As `all_reduce` and `fused_add_rms_norm`.
    """
    pair: tuple[Tensor, Tensor] = fused_add_rms_norm.native(all_reduce(x, group), x_residual, weight, epsilon)
    return pair


@register_op(allow_inplace=True, fuse=True)
def all_reduce_fused_add_rms_norm_static_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float, group: str
) -> tuple[Tensor, Tensor]:
    """Add up rows over the processes of a group, add a residual, norm the sum and quantise the norm.

    `q, r = fused_add_rms_norm_static_quant_fp8(all_reduce(x, group), x_residual, weight, scale, epsilon)`.

    Args:
        x: Rows, `[..., hidden]`, floating point; the same shape and dtype in every process. Given away by
            `maybe_inplace`.
        x_residual: Like x, and the same in every process. Given away by `maybe_inplace`.
        weight: Scale of the norm, `[hidden]`, or None.
        scale: Scale of the codes, one float32 number.
        epsilon: Added to the mean square.
        group: Name of a process group; the empty name for this process alone.

    Returns:
        `(q, r)`: the codes, `[..., hidden]` in float8_e4m3fn, and the sum, like x.

    Raises:
        ArgumentError: As `all_reduce` and `fused_add_rms_norm_static_quant_fp8`.
    """
    pair: tuple[Tensor, Tensor] = fused_add_rms_norm_static_quant_fp8.native(
        all_reduce(x, group), x_residual, weight, scale, epsilon
    )
    return pair


@register_op(allow_inplace=True, fuse=True)
def all_reduce_fused_add_rms_norm_dynamic_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Add up rows over the processes of a group, add a residual, norm the sum and quantise each row of the norm.

    `q, scale, r = fused_add_rms_norm_dynamic_quant_fp8(all_reduce(x, group), x_residual, weight, epsilon)`.

    Args:
        x: Rows, `[..., hidden]`, floating point; the same shape and dtype in every process. Given away by
            `maybe_inplace`.
        x_residual: Like x, and the same in every process. Given away by `maybe_inplace`.
        weight: Scale of the norm, `[hidden]`, or None.
        epsilon: Added to the mean square.
        group: Name of a process group; the empty name for this process alone.

    Returns:
        `(q, scale, r)`: the codes, `[..., hidden]` in float8_e4m3fn, their scales, `[..., 1]` in float32, and the sum,
        like x.

    Raises:
        ArgumentError: As `all_reduce` and `fused_add_rms_norm_dynamic_quant_fp8`.
    """
    outputs: tuple[Tensor, Tensor, Tensor] = fused_add_rms_norm_dynamic_quant_fp8.native(
        all_reduce(x, group), x_residual, weight, epsilon
    )
    return outputs


@register_op(fuse=supports(ndim={"x": 2}))
def linear_reduce_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, group_size: int) -> Tensor:
    """Multiply rows by a matrix, add up over the processes of a group, and leave each process its rows.

    `y = reduce_scatter(linear(x, weight, bias), group, group_size)`, over the first dimension. What a layer does whose
    input columns are divided, where each process goes on with its part of the tokens.

    Args:
        x: `[..., in_features]`, floating point, at least two dimensions. The first is a multiple of the group's size.
        weight: `[out_features, in_features]`, the dtype of x.
        bias: `[out_features]`, the dtype of x, or None. Added up over the processes like all else: one of them has it.
        group: Name of a process group; the empty name for this process alone.
        group_size: How many processes the group has.

    Returns:
        Like `linear(x, weight)`, with one in `group_size` elements along the first dimension.

    Raises:
        ArgumentError: As `linear` and `reduce_scatter`.
    """
    y: Tensor = reduce_scatter(linear(x, weight, bias), group, group_size)
    return y


@register_op(fuse=supports(ndim={"x": 2}))
def all_gather_linear(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, group_size: int) -> Tensor:
    """Put the rows of the processes of a group one behind the other, and multiply them by a matrix.

    `y = linear(all_gather(x, group, group_size), weight, bias)`, over the first dimension. What a layer does whose
    output columns are divided, where each process comes with its part of the tokens.

    Args:
        x: `[..., in_features]`, floating point, at least two dimensions; the same shape in every process.
        weight: `[out_features, in_features]`, the dtype of x.
        bias: `[out_features]`, the dtype of x, or None.
        group: Name of a process group; the empty name for this process alone.
        group_size: How many processes the group has.

    Returns:
        Like `linear(x, weight)`, with `group_size` times as many elements along the first dimension.

    Raises:
        ArgumentError: As `all_gather` and `linear`.
    """
    y: Tensor = linear(all_gather(x, group, group_size), weight, bias)
    return y


@all_reduce_rms_norm.register_input_generator
def _normed_sums(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    """Of a process alone: calls of several processes need them."""
    x, weight = torch.randn(shape, **options), torch.randn(shape[-1], **options)
    yield x, weight, 1e-6, _ALONE
    yield x, None, 1e-5, _ALONE


@all_reduce_fused_add_rms_norm.register_input_generator
def _normed_residual_sums(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    residual = torch.randn(shape, **options)
    for x, *rest in _normed_sums(shape, **options):
        yield x, residual, *rest


@all_reduce_fused_add_rms_norm_static_quant_fp8.register_input_generator
def _static_quantised_sums(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    options: dict[str, Any] = {"dtype": dtype, "device": device}
    for (x, residual, weight, epsilon, group), scale in zip(
        _normed_residual_sums(shape, **options), scales(device), strict=False
    ):
        yield x, residual, weight, scale, epsilon, group


@all_reduce_fused_add_rms_norm_dynamic_quant_fp8.register_input_generator
def _dynamic_quantised_sums(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    yield from _normed_residual_sums(shape, **options)


@all_reduce_fused_add_rms_norm_static_quant_fp8.register_value_check
def _check_scale_values(scale: Tensor) -> None:
    check_scale_values("all_reduce_fused_add_rms_norm_static_quant_fp8", "scale", scale)


allow_one_code(all_reduce_fused_add_rms_norm_static_quant_fp8)
allow_one_code(all_reduce_fused_add_rms_norm_dynamic_quant_fp8)


def _products(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x, weight, bias = (torch.randn(size, **options) for size in (shape, (24, shape[-1]), (24,)))
    yield x, weight, None, _ALONE, 1
    yield x, weight, bias, _ALONE, 1


linear_reduce_scatter.register_input_generator(_products)
all_gather_linear.register_input_generator(_products)
