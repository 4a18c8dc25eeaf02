"""Meanings of the convolutions over images and videos.

Does not hold kernels, nor the causal convolutions of state-space models (`causal_convolution.py`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.layernorm import check_floating
from irframework.symbolic import same_sizes

_AXES = {2: "[batch, channels, height, width]", 3: "[batch, channels, depth, height, width]"}


def _steps(op: str, name: str, given: Sequence[int] | None, usual: int, least: int, dims: int) -> list[int]:
    """One number for each spatial dimension; a list of one number serves all of them, as in torch."""
    if given is None:
        return [usual] * dims
    numbers = list(given) if isinstance(given, (list, tuple)) else []
    if len(numbers) not in (1, dims) or any(number < least for number in numbers):
        raise ArgumentError(
            f"Op {op!r}: {name} must be a list of {dims} numbers (or of one that serves all) of at least {least}, got "
            f"{given!r}."
        )
    return numbers * dims if len(numbers) == 1 else numbers


def _check_tensors(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int, dims: int) -> None:
    check_floating(op, "x", x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise ArgumentError(
                f"Op {op!r}: argument {name!r} has dtype {tensor.dtype}, 'x' has {x.dtype}; both need the same."
            )
    if x.dim() not in (dims + 1, dims + 2):
        raise ArgumentError(
            f"Op {op!r}: argument 'x' must be {_AXES[dims]}, or the same without a batch; it has shape "
            f"{tuple(x.shape)}."
        )
    if weight.dim() != dims + 2 or 0 in weight.shape:
        raise ArgumentError(
            f"Op {op!r}: argument 'weight' must be [out_channels, channels / groups, *kernel], {dims + 2} dimensions "
            f"none of which is empty; it has shape {tuple(weight.shape)}."
        )
    channels, out_channels = x.shape[-dims - 1], weight.shape[0]
    if groups < 1 or out_channels % groups:
        raise ArgumentError(
            f"Op {op!r}: groups={groups} must be at least 1 and divide the {out_channels} output channels of 'weight'."
        )
    if not same_sizes((channels,), (weight.shape[1] * groups,)):
        raise ArgumentError(
            f"Op {op!r}: argument 'x' has {channels} channels; 'weight' of shape {tuple(weight.shape)} with "
            f"groups={groups} takes {weight.shape[1] * groups}."
        )
    if bias is not None and not same_sizes(bias.shape, (out_channels,)):
        raise ArgumentError(
            f"Op {op!r}: argument 'bias' must be a vector of the {out_channels} output channels, it has shape "
            f"{tuple(bias.shape)}."
        )


def _check_kernel(op: str, x: Tensor, weight: Tensor, padding: list[int], dilation: list[int], dims: int) -> None:
    for axis in range(dims):
        size = x.shape[axis - dims]
        padded, kernel = size + 2 * padding[axis], dilation[axis] * (weight.shape[axis - dims] - 1) + 1
        # torch itself looks at a size that is not known yet.
        if type(padded) is int and type(kernel) is int and padded < kernel:
            raise ArgumentError(
                f"Op {op!r}: the kernel reaches over {kernel} elements of spatial dimension {axis}, where 'x' with its "
                f"padding has {padded}."
            )


def _convolve(
    op: str,
    convolution: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lists: tuple[list[int] | None, list[int] | None, list[int] | None],
    groups: int,
    dims: int,
) -> Tensor:
    stride = _steps(op, "stride", lists[0], 1, 1, dims)
    padding = _steps(op, "padding", lists[1], 0, 0, dims)
    dilation = _steps(op, "dilation", lists[2], 1, 1, dims)
    _check_tensors(op, x, weight, bias, groups, dims)
    _check_kernel(op, x, weight, padding, dilation, dims)
    return convolution(x, weight, bias, stride, padding, dilation, groups)


@register_op
def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: list[int] | None = None,
    padding: list[int] | None = None,
    dilation: list[int] | None = None,
    groups: int = 1,
) -> Tensor:
    """Convolve images with a kernel (cross-correlation, as torch's `conv2d`).

    `y[n, o, i, j] = bias[o] + sum over c, k, l of weight[o, c, k, l] * x[n, g + c, i s + k d - p, j s + l d - p]`, with
    stride s, dilation d, padding p (x is zero outside) and g the first channel of o's group. Added up as torch does on
    the device: in float32 for half precision.

    Args:
        x: `[batch, channels, height, width]`, or without the batch; floating point.
        weight: `[out_channels, channels / groups, kernel_height, kernel_width]`, the dtype of x.
        bias: `[out_channels]`, the dtype of x, or None.
        stride: Two numbers of at least 1, or one for both; default: 1.
        padding: Zeros on each side, two numbers or one for both; default: 0. Words such as `same` are torch's only.
        dilation: Distance of the kernel's elements, two numbers of at least 1 or one for both; default: 1.
        groups: Parts that the channels are divided into; each is convolved on its own.

    Returns:
        `[batch, out_channels, out_height, out_width]`, the dtype of x, where
        `out = floor((size + 2 padding - dilation (kernel - 1) - 1) / stride) + 1`.

    Raises:
        ArgumentError: x is not floating point, dtypes differ, shapes, channels and groups do not fit together, a list
            has another length or too small a number, or the kernel is larger than the padded image.

    Source: LeCun et al., "Gradient-based learning applied to document recognition" (1998); the patch embedding of ViT.
    """
    return _convolve("conv2d", F.conv2d, x, weight, bias, (stride, padding, dilation), groups, 2)


@register_op
def conv3d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: list[int] | None = None,
    padding: list[int] | None = None,
    dilation: list[int] | None = None,
    groups: int = 1,
) -> Tensor:
    """Convolve videos with a kernel: `conv2d` with one more dimension (as torch's `conv3d`).

    Args:
        x: `[batch, channels, depth, height, width]`, or without the batch; floating point.
        weight: `[out_channels, channels / groups, kernel_depth, kernel_height, kernel_width]`, the dtype of x.
        bias: `[out_channels]`, the dtype of x, or None.
        stride: Three numbers of at least 1, or one for all; default: 1.
        padding: Zeros on each side, three numbers or one for all; default: 0.
        dilation: Distance of the kernel's elements, three numbers of at least 1 or one for all; default: 1.
        groups: Parts that the channels are divided into; each is convolved on its own.

    Returns:
        `[batch, out_channels, out_depth, out_height, out_width]`, the dtype of x; sizes as in `conv2d`.

    Raises:
        ArgumentError: As `conv2d`.

    Source: Tran et al., "Learning Spatiotemporal Features with 3D Convolutional Networks" (2015); the patch embedding
        of Qwen2-VL.
    """
    return _convolve("conv3d", F.conv3d, x, weight, bias, (stride, padding, dilation), groups, 3)


def _images(shape: tuple[int, ...], spatial: tuple[int, ...], options: dict[str, Any]) -> Tensor:
    """Of the shape asked for, if that has all dimensions; else a batch as long as its first dimension."""
    dims = len(spatial)
    return torch.randn(shape if len(shape) == dims + 2 else (shape[0], 6, *spatial), **options)


def _calls(shape: tuple[int, ...], spatial: tuple[int, ...], options: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    x = _images(shape, spatial, options)
    dims, channels = len(spatial), x.shape[1]
    kernel = [min(2, size) for size in x.shape[2:]]

    def weight(out_channels: int, groups: int, *size: int) -> Tensor:
        made = torch.randn((out_channels, channels // groups, *size), **options)
        return made / math.sqrt(made[0].numel())

    bias = torch.randn(5, **options)
    yield x, weight(5, 1, *kernel), bias, kernel  # patches that do not overlap
    yield x, weight(5, 1, *[3] * dims), bias, None, [1] * dims
    yield x, weight(5, 1, *[2] * dims), None, [2], [2], [2]
    yield x, weight(2 * channels, channels, *kernel), None, None, None, None, channels  # each channel on its own
    yield x[:, :, 1:].transpose(-1, -2), weight(5, 1, *[1] * dims), None, list(range(1, dims + 1))


@conv2d.register_input_generator
def _conv2d_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    yield from _calls(shape, (6, 8), options)


@conv3d.register_input_generator
def _conv3d_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    yield from _calls(shape, (4, 6, 4), options)
