"""Meanings of the norms. Does not hold kernels."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.symbolic import same_sizes


def check_floating(op: str, name: str, tensor: Tensor) -> None:
    """Raise unless a tensor has a floating-point dtype.

    Raises:
        ArgumentError: Names the op, the argument and its dtype.
    """
    if not tensor.is_floating_point():
        raise ArgumentError(
            f"Op {op!r}: argument {name!r} must have a floating-point dtype, it has {tensor.dtype}. "
            f"Convert it first, e.g. {name}.float()."
        )


def _check_norm(op: str, x: Tensor, weight: Tensor | None, variance_size: int | None) -> None:
    check_floating(op, "x", x)
    if x.dim() == 0:
        raise ArgumentError(f"Op {op!r}: argument 'x' must have at least one dimension, it is a scalar.")
    if weight is not None:
        check_floating(op, "weight", weight)
        if not same_sizes(weight.shape, x.shape[-1:]):
            raise ArgumentError(
                f"Op {op!r}: argument 'weight' must be a vector as long as a row of 'x', {x.shape[-1]}; it has shape "
                f"{tuple(weight.shape)}."
            )
    if variance_size is not None and not 0 < variance_size <= x.shape[-1]:
        raise ArgumentError(
            f"Op {op!r}: variance_size={variance_size} must be between 1 and the length of a row, {x.shape[-1]}."
        )


@register_op
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Divide each row by its root mean square, and scale it by a weight.

    `y = x / sqrt(mean(x[..., :variance_size]^2) + epsilon) * weight`, over the last dimension. The norm is computed in
    float32 (float64 for float64 rows), rounded to the weight's dtype, multiplied by the weight in that dtype, and
    rounded to the dtype of x. A float32 weight `w + 1` therefore gives Gemma's norm.

    Args:
        x: Rows, `[..., hidden]`, floating point.
        weight: Scale, `[hidden]`, or None.
        epsilon: Added to the mean square.
        variance_size: How many leading elements of a row the mean is taken over; default: all.

    Returns:
        `[..., hidden]`, the dtype of x.

    Raises:
        ArgumentError: x or weight is not floating point; x is a scalar; the weight is not as long as a row;
            `variance_size` is larger than the row.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019); rounding as in Llama.
    """
    _check_norm("rms_norm", x, weight, variance_size)
    h = x if x.dtype == torch.float64 else x.to(torch.float32)
    part = h if variance_size is None else h[..., :variance_size]
    h = h * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + epsilon)
    if weight is not None:
        h = h.to(weight.dtype) * weight
    return h.to(x.dtype)


@rms_norm.register_input_generator
def _rms_norm_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x, weight = torch.randn(shape, **options), torch.randn(shape[-1], **options)
    yield x, weight, 1e-6
    yield x * 1e-3, weight, 1e-5  # epsilon decides
    yield x, weight, 1e-6, max(1, shape[-1] // 2)
    yield x, weight.float(), 1e-6


@register_op(allow_inplace=True)
def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Add a residual, and norm the sum: `r = x + x_residual; y = rms_norm(r, weight, epsilon, variance_size)`.

    Args:
        x: Rows, `[..., hidden]`, floating point. Given away by `maybe_inplace`.
        x_residual: Like x. Given away by `maybe_inplace`.
        weight: Scale, `[hidden]`, or None.
        epsilon: Added to the mean square.
        variance_size: How many leading elements of a row the mean is taken over; default: all.

    Returns:
        `(y, r)`: the normed sum and the sum, both `[..., hidden]` in the dtype of x.

    Raises:
        ArgumentError: As `rms_norm`; or x and x_residual differ in shape or dtype.
    """
    _check_norm("fused_add_rms_norm", x, weight, variance_size)
    if x.dtype != x_residual.dtype:
        raise ArgumentError(
            f"Op 'fused_add_rms_norm': argument 'x_residual' has dtype {x_residual.dtype}, 'x' has {x.dtype}; "
            "both need the same."
        )
    if not same_sizes(x.shape, x_residual.shape):
        raise ArgumentError(
            f"Op 'fused_add_rms_norm': argument 'x_residual' has shape {tuple(x_residual.shape)}, 'x' has "
            f"{tuple(x.shape)}; both need the same."
        )
    residual = x + x_residual
    return rms_norm.native(residual, weight, epsilon, variance_size), residual


@fused_add_rms_norm.register_input_generator
def _fused_add_rms_norm_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    residual = torch.randn(shape, **options)
    for x, *rest in _rms_norm_inputs(shape, **options):
        yield x, residual, *rest
    yield x, -x, *rest[:2]  # the sum is zero
