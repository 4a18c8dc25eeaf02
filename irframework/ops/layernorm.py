"""Meanings of the norms. Does not hold kernels."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
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


def widened(x: Tensor) -> Tensor:
    """Return a tensor in the dtype that it is computed in: float64 as it is, all others in float32."""
    return x if x.dtype == torch.float64 else x.to(torch.float32)


def check_rows(op: str, x: Tensor, **vectors: Tensor | None) -> None:
    """Raise unless x has floating-point rows, and each vector that is given is floating point and as long as a row.

    Raises:
        ArgumentError: Names the op and the argument.
    """
    check_floating(op, "x", x)
    if x.dim() == 0:
        raise ArgumentError(f"Op {op!r}: argument 'x' must have at least one dimension, it is a scalar.")
    for name, vector in vectors.items():
        if vector is None:
            continue
        check_floating(op, name, vector)
        if not same_sizes(vector.shape, x.shape[-1:]):
            raise ArgumentError(
                f"Op {op!r}: argument {name!r} must be a vector as long as a row of 'x', {x.shape[-1]}; it has shape "
                f"{tuple(vector.shape)}."
            )


def _check_residual(op: str, x: Tensor, residual: Tensor) -> None:
    if x.dtype != residual.dtype:
        raise ArgumentError(
            f"Op {op!r}: argument 'x_residual' has dtype {residual.dtype}, 'x' has {x.dtype}; both need the same."
        )
    if not same_sizes(x.shape, residual.shape):
        raise ArgumentError(
            f"Op {op!r}: argument 'x_residual' has shape {tuple(residual.shape)}, 'x' has {tuple(x.shape)}; both need "
            "the same."
        )


def _check_norm(op: str, x: Tensor, weight: Tensor | None, variance_size: int | None) -> None:
    check_rows(op, x, weight=weight)
    if variance_size is not None and not 0 < variance_size <= x.shape[-1]:
        raise ArgumentError(
            f"Op {op!r}: variance_size={variance_size} must be between 1 and the length of a row, {x.shape[-1]}."
        )


@register_op(fuse=True)
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
    h = widened(x)
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


@register_op(allow_inplace=True, fuse=True)
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
    _check_residual("fused_add_rms_norm", x, x_residual)
    residual = x + x_residual
    return rms_norm.native(residual, weight, epsilon, variance_size), residual


@fused_add_rms_norm.register_input_generator
def _fused_add_rms_norm_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    residual = torch.randn(shape, **options)
    for x, *rest in _rms_norm_inputs(shape, **options):
        yield x, residual, *rest
    yield x, -x, *rest[:2]  # the sum is zero


# --- Gemma -----------------------------------------------------------------------------------------------------------


@register_op(fuse=True)
def gemma_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Divide each row by its root mean square, and scale it by one plus a weight.

    `y = x / sqrt(mean(x^2) + epsilon) * (1 + weight)`, over the last dimension. All of it is computed in float32
    (float64 for float64 rows) and rounded once, to the dtype of x; `rms_norm` rounds before it scales.

    Args:
        x: Rows, `[..., hidden]`, floating point.
        weight: How far the scale is from one, `[hidden]`.
        epsilon: Added to the mean square.

    Returns:
        `[..., hidden]`, the dtype of x.

    Raises:
        ArgumentError: x or weight is not floating point; x is a scalar; the weight is not as long as a row.

    Source: Zhang and Sennrich (2019); scale and rounding as in Gemma.
    """
    check_rows("gemma_rms_norm", x, weight=weight)
    h = widened(x)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + epsilon)
    return (h * (1.0 + weight.to(h.dtype))).to(x.dtype)


@register_op(allow_inplace=True, fuse=True)
def fused_add_gemma_rms_norm(x: Tensor, x_residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """Add a residual, and norm the sum: `r = x + x_residual; y = gemma_rms_norm(r, weight, epsilon)`.

    Args:
        x: Rows, `[..., hidden]`, floating point. Given away by `maybe_inplace`.
        x_residual: Like x. Given away by `maybe_inplace`.
        weight: How far the scale is from one, `[hidden]`.
        epsilon: Added to the mean square.

    Returns:
        `(y, r)`: the normed sum and the sum, both `[..., hidden]` in the dtype of x.

    Raises:
        ArgumentError: As `gemma_rms_norm`; or x and x_residual differ in shape or dtype.

    Source: As `gemma_rms_norm`.
    """
    check_rows("fused_add_gemma_rms_norm", x, weight=weight)
    _check_residual("fused_add_gemma_rms_norm", x, x_residual)
    residual = x + x_residual
    return gemma_rms_norm.native(residual, weight, epsilon), residual


@gemma_rms_norm.register_spelling
def _of_heads_before_tokens(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """As Gemma 3 norms heads that attention is to have, `[batch, heads, tokens, head_size]`."""
    normed: Tensor = gemma_rms_norm.native(x.transpose(1, 2) if x.dim() == 4 else x, weight, epsilon)
    return normed.transpose(1, 2) if x.dim() == 4 else normed


@gemma_rms_norm.register_input_generator
def _gemma_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x, weight = torch.randn(shape, **options), torch.randn(shape[-1], **options)
    yield x, weight, 1e-6
    yield x * 1e-3, weight, 1e-5
    yield x, weight.float(), 1e-6
    if len(shape) == 2:
        yield torch.stack((x, 2 * x)).unsqueeze(2), weight, 1e-6  # heads of two sequences


@fused_add_gemma_rms_norm.register_input_generator
def _fused_add_gemma_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    residual = torch.randn(shape, **options)
    for x, *rest in itertools.islice(_gemma_inputs(shape, **options), 3):
        yield x, residual, *rest
    yield x, -x, *rest


# --- layer norm ------------------------------------------------------------------------------------------------------


@register_op
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """Give each row mean zero and variance one, scale it and shift it.

    `y = (x - mean(x)) / sqrt(var(x) + epsilon) * weight + bias`, over the last dimension; the variance is the mean
    squared distance from the mean. All of it is computed in float32 (float64 for float64 rows) and rounded once, to the
    dtype of x.

    Args:
        x: Rows, `[..., hidden]`, floating point.
        weight: Scale, `[hidden]`, or None.
        bias: Shift, `[hidden]`, or None.
        epsilon: Added to the variance.

    Returns:
        `[..., hidden]`, the dtype of x.

    Raises:
        ArgumentError: An argument is not floating point; x is a scalar; weight or bias is not as long as a row.

    Source: Ba, Kiros and Hinton, "Layer Normalization" (2016).
    """
    check_rows("layer_norm", x, weight=weight, bias=bias)
    h = widened(x)
    weight, bias = (None if vector is None else vector.to(h.dtype) for vector in (weight, bias))
    if weight is None and bias is not None:  # torch's own has a wrong second derivative there
        return (F.layer_norm(h, h.shape[-1:], None, None, epsilon) + bias).to(x.dtype)
    return F.layer_norm(h, h.shape[-1:], weight, bias, epsilon).to(x.dtype)


@register_op(allow_inplace=True)
def fused_add_layer_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Add a residual, and norm the sum: `r = x + x_residual; y = layer_norm(r, weight, bias, epsilon)`.

    Args:
        x: Rows, `[..., hidden]`, floating point. Given away by `maybe_inplace`.
        x_residual: Like x. Given away by `maybe_inplace`.
        weight: Scale, `[hidden]`, or None.
        bias: Shift, `[hidden]`, or None.
        epsilon: Added to the variance.

    Returns:
        `(y, r)`: the normed sum and the sum, both `[..., hidden]` in the dtype of x.

    Raises:
        ArgumentError: As `layer_norm`; or x and x_residual differ in shape or dtype.

    Source: As `layer_norm`; the sum before the norm as in GPT-2.
    """
    check_rows("fused_add_layer_norm", x, weight=weight, bias=bias)
    _check_residual("fused_add_layer_norm", x, x_residual)
    residual = x + x_residual
    return layer_norm.native(residual, weight, bias, epsilon), residual


@layer_norm.register_input_generator
def _layer_norm_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x, weight, bias = (torch.randn(size, **options) for size in (shape, shape[-1], shape[-1]))
    yield x, weight, bias, 1e-5
    yield x + 3, weight, bias, 1e-5  # the mean decides
    yield x * 1e-3, weight, bias, 1e-5
    yield x, weight.float(), bias.float(), 1e-6


@fused_add_layer_norm.register_input_generator
def _fused_add_layer_norm_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    residual = torch.randn(shape, **options)
    for x, *rest in _layer_norm_inputs(shape, **options):
        yield x, residual, *rest
    yield x, -x, *rest
