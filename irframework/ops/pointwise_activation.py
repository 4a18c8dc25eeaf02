"""Meanings of the activations of one element each. Does not hold kernels, nor the gated ones (`activation.py`)."""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.layernorm import check_floating, widened

_TANH_FACTOR = 0.7978845608  # sqrt(2 / pi), with the digits that `gelu_fast` was published with


@register_op
def gelu_new(x: Tensor) -> Tensor:
    """GELU by its tanh approximation: `x / 2 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3)))`.

    Computed in float32 (float64 for float64 elements) and rounded once.

    Args:
        x: `[...]`, floating point.

    Returns:
        `[...]`, the dtype of x.

    Raises:
        ArgumentError: x is not floating point.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016); GPT-2.
    """
    check_floating("gelu_new", "x", x)
    return F.gelu(widened(x), approximate="tanh").to(x.dtype)


@register_op
def gelu_fast(x: Tensor) -> Tensor:
    """GELU by its tanh approximation, factored: `x / 2 * (1 + tanh(0.7978845608 x (1 + 0.044715 x^2)))`.

    Differs from `gelu_new` by the digits of the factor only, which shows in float64. Computed in float32 (float64 for
    float64 elements) and rounded once.

    Args:
        x: `[...]`, floating point.

    Returns:
        `[...]`, the dtype of x.

    Raises:
        ArgumentError: x is not floating point.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016); GPT-J.
    """
    check_floating("gelu_fast", "x", x)
    h = widened(x)
    return (0.5 * h * (1.0 + torch.tanh(h * _TANH_FACTOR * (1.0 + 0.044715 * h * h)))).to(x.dtype)


@register_op
def quick_gelu(x: Tensor) -> Tensor:
    """GELU by its sigmoid approximation: `x * sigmoid(1.702 x)`.

    Computed in float32 (float64 for float64 elements) and rounded once.

    Args:
        x: `[...]`, floating point.

    Returns:
        `[...]`, the dtype of x.

    Raises:
        ArgumentError: x is not floating point.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016); CLIP.
    """
    check_floating("quick_gelu", "x", x)
    h = widened(x)
    return (h * torch.sigmoid(1.702 * h)).to(x.dtype)


@register_op
def relu2(x: Tensor) -> Tensor:
    """Square of ReLU: `max(x, 0)^2`, rounded once.

    Args:
        x: `[...]`, floating point.

    Returns:
        `[...]`, the dtype of x.

    Raises:
        ArgumentError: x is not floating point.

    Source: So et al., "Primer" (2021); Arcee and Nemotron.
    """
    check_floating("relu2", "x", x)
    return F.relu(x).square()


@register_op
def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, epsilon: float = -1e-6) -> Tensor:
    """Integral of ELU, with two numbers that are learnt.

    `a_p x^2 + beta x` for `x > 0`, else `a_n (expm1(min(x, epsilon)) - x) + beta x`, where `a_p = softplus(alpha_p)`
    and `a_n = beta + softplus(alpha_n)`. Computed in float32 (float64 for float64 elements) and rounded once. (In half
    precision the model itself rounds after each step.)

    Args:
        x: `[...]`, floating point.
        alpha_p: One floating-point number, shape `[]` or `[1]`, before softplus.
        alpha_n: The same for the negative side.
        beta: Slope at zero.
        epsilon: Where `expm1` stops, a small negative number.

    Returns:
        `[...]`, the dtype of x.

    Raises:
        ArgumentError: An argument is not floating point, or `alpha_p` or `alpha_n` is not one number.

    Source: Huang and Schlag, "Deriving Activation Functions Using Integration" (2024); Apertus.
    """
    check_floating("xielu", "x", x)
    for name, alpha in (("alpha_p", alpha_p), ("alpha_n", alpha_n)):
        check_floating("xielu", name, alpha)
        if alpha.numel() != 1:
            raise ArgumentError(
                f"Op 'xielu': argument {name!r} must hold one number, it has shape {tuple(alpha.shape)}."
            )
    h = widened(x)
    positive = F.softplus(alpha_p.to(h.dtype).reshape(()))
    negative = beta + F.softplus(alpha_n.to(h.dtype).reshape(()))
    # Each branch sees only numbers of its own side: an overflow of the other would make its gradient NaN.
    above, below = h.clamp(min=0), h.clamp(max=0)
    curved = torch.where(h > 0, positive * above * above, negative * (torch.expm1(below.clamp(max=epsilon)) - below))
    return (curved + beta * h).to(x.dtype)


def _inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, **options)
    yield (x,)
    yield (x * 8,)  # where the curves are straight


for _op in (gelu_new, gelu_fast, quick_gelu, relu2):
    _op.register_input_generator(_inputs)


@xielu.register_input_generator
def _xielu_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, **options)
    alpha_p, alpha_n = (torch.full((1,), math.log(math.expm1(start)), **options) for start in (0.8, 0.3))
    yield x, alpha_p, alpha_n
    yield x * 8, alpha_p.float(), alpha_n.float().reshape(()), 0.25, -1e-3
