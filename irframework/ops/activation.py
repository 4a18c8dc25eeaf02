"""Meanings of the gated activations: those with a gate and what it multiplies in one tensor, or in two.

Does not hold kernels, nor the activations without a gate (`pointwise_activation.py`).
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.layernorm import check_floating, widened
from irframework.symbolic import same_sizes


def _halves(op: str, x: Tensor) -> tuple[Tensor, Tensor]:
    check_floating(op, "x", x)
    if x.dim() == 0 or x.shape[-1] % 2:
        raise ArgumentError(
            f"Op {op!r}: the last dimension of argument 'x' holds gate and up side by side and must be even, x has "
            f"shape {tuple(x.shape)}."
        )
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]


@register_op(fuse=True)
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


@register_op(fuse=True)
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


# --- gate and up in two tensors --------------------------------------------------------------------------------------


def _check_alike(op: str, gate: Tensor, up: Tensor) -> None:
    check_floating(op, "gate", gate)
    if gate.dtype != up.dtype or not same_sizes(gate.shape, up.shape):
        raise ArgumentError(
            f"Op {op!r}: arguments 'gate' and 'up' must have the same shape and dtype, they have {tuple(gate.shape)} "
            f"in {gate.dtype} and {tuple(up.shape)} in {up.dtype}."
        )


@register_op(activations=("gate", "up"), fuse=True)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Gate by SiLU: `silu(gate) * up`, as where gate and up are projections of their own.

    `silu_and_mul` has both in one tensor.

    Args:
        gate: `[..., hidden]`, floating point.
        up: Like gate.

    Returns:
        `[..., hidden]`, the dtype of gate; SiLU is rounded to that dtype before the product.

    Raises:
        ArgumentError: gate is not floating point, or up has another shape or dtype.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), SwiGLU; spelt as in Llama.
    """
    _check_alike("silu_mul", gate, up)
    return F.silu(gate) * up


@register_op(activations=("gate", "up"), fuse=True)
def gelu_mul(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """Gate by GELU: `gelu(gate) * up`, as where gate and up are projections of their own.

    `gelu_and_mul` has both in one tensor.

    Args:
        gate: `[..., hidden]`, floating point.
        up: Like gate.
        approximate: `none` for `v * Phi(v)`, `tanh` for the tanh approximation.

    Returns:
        `[..., hidden]`, the dtype of gate; GELU is rounded to that dtype before the product.

    Raises:
        ArgumentError: gate is not floating point, up has another shape or dtype, or `approximate` is another word.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016); Shazeer (2020), GEGLU; spelt as in Gemma.
    """
    if approximate not in ("none", "tanh"):
        raise ArgumentError(f"Op 'gelu_mul': approximate must be 'none' or 'tanh', got {approximate!r}.")
    _check_alike("gelu_mul", gate, up)
    return F.gelu(gate, approximate=approximate) * up


@silu_mul.register_input_generator
def _silu_mul_inputs(shape: tuple[int, ...], **options: Any) -> tuple[Any, ...]:
    return torch.randn(shape, **options), torch.randn(shape, **options)


@gelu_mul.register_input_generator
def _gelu_mul_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    gate, up = torch.randn(shape, **options), torch.randn(shape, **options)
    yield gate, up
    yield gate, up, "tanh"


# --- other gates -----------------------------------------------------------------------------------------------------


@register_op
def mul_and_silu(x: Tensor) -> Tensor:
    """Gate by SiLU, the gate second: `up * silu(gate)`, where `x = [up, gate]` on the last dimension.

    `silu_and_mul` has the gate first.

    Args:
        x: `[..., 2 * hidden]`, floating point.

    Returns:
        `[..., hidden]`, the dtype of x; SiLU is rounded to that dtype before the product.

    Raises:
        ArgumentError: x is not floating point, or its last dimension is odd.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), SwiGLU.
    """
    up, gate = _halves("mul_and_silu", x)
    return up * F.silu(gate)


@register_op
def gelu_and_mul_sparse(x: Tensor, activation_sparsity: float, approximate: str = "tanh") -> Tensor:
    """Keep the largest gates of a row, and gate by GELU: `gelu(relu(gate - cutoff)) * up`, where `x = [gate, up]`.

    `cutoff = mean(gate) + sqrt(var(gate)) * q` over a row of gates; the variance is the mean squared distance from the
    mean, and q the standard normal quantile of `activation_sparsity`: that share of normally distributed gates becomes
    zero. A sparsity of 0 means no cutoff, and gives `gelu_and_mul`.

    All but the product is computed in float32 (float64 for float64 rows). (In half precision the model itself rounds
    after each step, q included.)

    Args:
        x: `[..., 2 * hidden]`, floating point.
        activation_sparsity: Share of the gates to drop, at least 0 and less than 1.
        approximate: `none` for `v * Phi(v)`, `tanh` for the tanh approximation.

    Returns:
        `[..., hidden]`, the dtype of x; GELU is rounded to that dtype before the product.

    Raises:
        ArgumentError: x is not floating point, its last dimension is odd, the sparsity is out of range, or
            `approximate` is another word.

    Source: Gemma 3n.
    """
    if approximate not in ("none", "tanh"):
        raise ArgumentError(f"Op 'gelu_and_mul_sparse': approximate must be 'none' or 'tanh', got {approximate!r}.")
    if not 0 <= activation_sparsity < 1:
        raise ArgumentError(
            "Op 'gelu_and_mul_sparse': activation_sparsity must be at least 0 and less than 1, got "
            f"{activation_sparsity!r}."
        )
    gate, up = _halves("gelu_and_mul_sparse", x)
    h = widened(gate)
    if activation_sparsity > 0:
        mean = h.mean(-1, keepdim=True)
        # As a norm: `std` warns where there are no rows, and the root of a variance of zero has no gradient.
        deviation = torch.linalg.vector_norm(h - mean, dim=-1, keepdim=True) / gate.shape[-1] ** 0.5
        quantile = torch.special.ndtri(torch.full((), activation_sparsity, dtype=h.dtype, device=h.device))
        h = F.relu(h - (mean + deviation * quantile))
    return F.gelu(h, approximate=approximate).to(x.dtype) * up


@register_op
def swigluoai_and_mul(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """Gate by a clamped SiLU, gate and up interleaved: `g * sigmoid(alpha * g) * (u + 1)`.

    `g = min(gate, limit)` and `u = clamp(up, -limit, limit)`, where `gate = x[..., 0::2]` and `up = x[..., 1::2]`.
    Computed in float32 (float64 for float64 rows) and rounded once. (In half precision the model itself rounds after
    each step.)

    Args:
        x: `[..., 2 * hidden]`, floating point.
        alpha: Steepness of the sigmoid.
        limit: Largest gate, and largest size of up; more than 0.

    Returns:
        `[..., hidden]`, the dtype of x.

    Raises:
        ArgumentError: x is not floating point, its last dimension is odd, or the limit is not more than 0.

    Source: gpt-oss.
    """
    _halves("swigluoai_and_mul", x)
    if not limit > 0:
        raise ArgumentError(f"Op 'swigluoai_and_mul': limit must be more than 0, got {limit!r}.")
    h = widened(x)
    gate, up = h[..., 0::2].clamp(max=limit), h[..., 1::2].clamp(-limit, limit)
    return (gate * torch.sigmoid(gate * alpha) * (up + 1)).to(x.dtype)


@register_op
def fatrelu_and_mul(x: Tensor, threshold: float = 0.0) -> Tensor:
    """Gate by FATReLU: `(gate if gate > threshold else 0) * up`, where `x = [gate, up]` on the last dimension.

    Gates are compared in float32 (float64 for float64 rows), so the threshold is not rounded to half precision.

    Args:
        x: `[..., 2 * hidden]`, floating point.
        threshold: Gates up to it, included, become zero.

    Returns:
        `[..., hidden]`, the dtype of x.

    Raises:
        ArgumentError: x is not floating point, or its last dimension is odd.

    Source: Song et al., "ProSparse" (2024), as in MiniCPM-S.
    """
    gate, up = _halves("fatrelu_and_mul", x)
    return gate.masked_fill(widened(gate) <= threshold, 0) * up


mul_and_silu.register_input_generator(_silu_inputs)


@gelu_and_mul_sparse.register_input_generator
def _gelu_sparse_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, **options)
    yield x, 0.95
    yield x + 1, 0.3, "none"
    yield x, 0.0


@swigluoai_and_mul.register_input_generator
def _swigluoai_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, **options)
    yield (x,)
    yield x * 4, 1.0, 2.5  # much is clamped


@fatrelu_and_mul.register_input_generator
def _fatrelu_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, **options)
    yield (x,)
    yield x, 0.01
    yield x, -0.5
