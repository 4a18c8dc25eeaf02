"""Meanings of the norms that are gated by a second tensor. Does not hold kernels, nor the norms without a gate."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.layernorm import check_floating, check_rows, widened
from irframework.symbolic import same_sizes


def _check(op: str, x: Tensor, gate: Tensor | None, weight: Tensor | None, group_size: int | None) -> None:
    check_rows(op, x, weight=weight)
    if gate is not None:
        check_floating(op, "gate", gate)
        if not same_sizes(gate.shape, x.shape):
            raise ArgumentError(
                f"Op {op!r}: argument 'gate' has shape {tuple(gate.shape)}, 'x' has {tuple(x.shape)}; both need the "
                "same."
            )
    if group_size is not None and (group_size < 1 or x.shape[-1] % group_size):
        raise ArgumentError(
            f"Op {op!r}: group_size={group_size} must be at least 1 and divide the length of a row, {x.shape[-1]}."
        )


def _divided(h: Tensor, epsilon: float, group_size: int | None) -> Tensor:
    """Divide each group of a row by its root mean square."""
    if group_size is None:
        return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + epsilon)
    groups: Tensor = h.unflatten(-1, (h.shape[-1] // group_size, group_size))
    groups = groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + epsilon)
    return groups.flatten(-2)


@register_op
def rms_norm_gated(
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    epsilon: float,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    activation: str = "silu",
) -> Tensor:
    """Norm each group of a row, and gate it before or after.

    With `norm_before_gate`, `y = norm(x) * weight * act(gate)`; else `y = norm(x * act(gate)) * weight`. `norm` divides
    by `sqrt(mean(x^2) + epsilon)` over groups of `group_size` neighbouring elements. All of it is computed in float32
    (float64 for float64 rows) and rounded once, to the dtype of x. (Qwen3-Next also rounds before it scales.)

    Args:
        x: Rows, `[..., hidden]`, floating point.
        gate: Like x, of any floating-point dtype; None for no gate.
        weight: Scale, `[hidden]`, or None.
        epsilon: Added to the mean square.
        group_size: Elements that are normed together; default: a row.
        norm_before_gate: Norm first, then gate; or the other way round.
        activation: `silu` for `v * sigmoid(v)` of the gate, `sigmoid` for `sigmoid(v)`.

    Returns:
        `[..., hidden]`, the dtype of x.

    Raises:
        ArgumentError: An argument is not floating point; x is a scalar; the weight is not as long as a row; the gate
            has another shape than x; `group_size` does not divide the row; `activation` is another word.

    Source: Dao and Gu, "Transformers are SSMs" (2024), gated norm; after the norm as in Qwen3-Next and, with `sigmoid`,
        Kimi Linear.
    """
    _check("rms_norm_gated", x, gate, weight, group_size)
    if activation not in ("silu", "sigmoid"):
        raise ArgumentError(f"Op 'rms_norm_gated': activation must be 'silu' or 'sigmoid', got {activation!r}.")
    h = widened(x)
    factor = None
    if gate is not None:
        opened = gate.to(h.dtype)
        factor = F.silu(opened) if activation == "silu" else torch.sigmoid(opened)
    if factor is not None and not norm_before_gate:
        h = h * factor
    h = _divided(h, epsilon, group_size)
    if weight is not None:
        h = h * weight.to(h.dtype)
    if factor is not None and norm_before_gate:
        h = h * factor
    return h.to(x.dtype)


@register_op
def mixer2_gated_rms_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, epsilon: float, group_size: int | None = None
) -> Tensor:
    """Mamba 2's norm: gate, norm each group of a row, round, and scale.

    `y = weight * norm(x * silu(gate))`, where `norm` divides by `sqrt(mean(x^2) + epsilon)` over groups of `group_size`
    neighbouring elements. Gate and norm are computed in float32 (float64 for float64 rows), rounded to the dtype of x,
    multiplied by the weight, and rounded to the dtype of x. `rms_norm_gated(norm_before_gate=False)` is the same with
    one rounding.

    The op exchanges nothing between processes. Under tensor parallelism each process calls it on the groups that it
    holds, with the `group_size` of the whole model; it must hold whole groups, else gather the rows first.

    Args:
        x: Rows, `[..., hidden]`, floating point.
        gate: Like x, of any floating-point dtype; None for no gate.
        weight: Scale, `[hidden]`.
        epsilon: Added to the mean square.
        group_size: Elements that are normed together; default: a row. In Mamba 2, `intermediate_size / n_groups`.

    Returns:
        `[..., hidden]`, the dtype of x.

    Raises:
        ArgumentError: An argument is not floating point; x is a scalar; the weight is not as long as a row; the gate
            has another shape than x; `group_size` does not divide the row.

    Source: Dao and Gu, "Transformers are SSMs" (2024); rounding as in the Mamba 2 of transformers.
    """
    _check("mixer2_gated_rms_norm", x, gate, weight, group_size)
    h = widened(x)
    if gate is not None:
        h = h * F.silu(gate.to(h.dtype))
    return (weight * _divided(h, epsilon, group_size).to(x.dtype)).to(x.dtype)


def _half_of(size: int) -> int | None:
    return size // 2 if size % 2 == 0 and size else None


@rms_norm_gated.register_input_generator
def _rms_norm_gated_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x, gate, weight = (torch.randn(size, **options) for size in (shape, shape, shape[-1]))
    yield x, gate, weight, 1e-5
    yield x, gate, weight, 1e-5, _half_of(shape[-1]), False
    yield x, gate, weight, 1e-5, None, True, "sigmoid"
    yield x * 1e-3, gate.float(), weight.float(), 1e-5, _half_of(shape[-1]), True


@mixer2_gated_rms_norm.register_input_generator
def _mixer2_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x, gate, weight = (torch.randn(size, **options) for size in (shape, shape, shape[-1]))
    yield x, gate, weight, 1e-5
    yield x, gate, weight, 1e-5, _half_of(shape[-1])
    yield x * 1e-3, gate, weight, 1e-5, _half_of(shape[-1])
