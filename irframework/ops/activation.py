"""Meanings of the gated activations. Does not hold kernels."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.layernorm import check_floating


def _halves(op: str, x: Tensor) -> tuple[Tensor, Tensor]:
    check_floating(op, "x", x)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ArgumentError(
            f"Op {op!r}: the last dimension of argument 'x' holds gate and up side by side and must be even, x has "
            f"shape {tuple(x.shape)}."
        )
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


@register_op
def silu_and_mul(x: Tensor) -> Tensor:
    """Gate by SiLU: `silu(gate) * up`, where `x = [gate, up]` on the last dimension and `silu(v) = v * sigmoid(v)`.

    Args:
        x: `[..., 2 * hidden]`, floating point.

    Returns:
        `[..., hidden]`, the dtype of x; SiLU is rounded to that dtype before the product.

    Raises:
        ArgumentError: x is not floating point, or its last dimension is odd.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), SwiGLU.
    """
    gate, up = _halves("silu_and_mul", x)
    return F.silu(gate) * up


@register_op
def gelu_and_mul(x: Tensor, approximate: str = "none") -> Tensor:
    """Gate by GELU: `gelu(gate) * up`, where `x = [gate, up]` on the last dimension.

    Args:
        x: `[..., 2 * hidden]`, floating point.
        approximate: `none` for `v * Phi(v)`, `tanh` for the tanh approximation.

    Returns:
        `[..., hidden]`, the dtype of x; GELU is rounded to that dtype before the product.

    Raises:
        ArgumentError: x is not floating point, its last dimension is odd, or `approximate` is another word.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016); Shazeer (2020), GEGLU.
    """
    if approximate not in ("none", "tanh"):
        raise ArgumentError(f"Op 'gelu_and_mul': approximate must be 'none' or 'tanh', got {approximate!r}.")
    gate, up = _halves("gelu_and_mul", x)
    return F.gelu(gate, approximate=approximate) * up


@silu_and_mul.register_input_generator
def _silu_inputs(shape: tuple[int, ...], **options: Any) -> tuple[Any, ...]:
    return (torch.randn(shape, **options),)


@gelu_and_mul.register_input_generator
def _gelu_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, **options)
    yield (x,)
    yield x, "tanh"
