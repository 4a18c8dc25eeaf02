"""Providers that are wrong on purpose, one fault each, and the rule that must catch it.

Owns the op that they implement and the table `WRONG`. The faults are in the modules beside it, by what is wrong.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Implementation = Callable[..., Any]
LENGTHS = (33, 34, 64)  # of rows; few calls show enough


@dataclass(frozen=True, slots=True)
class Wrong:
    """One fault.

    Attributes:
        rule: The rule that must catch it.
        words: What must be in the violation or in the call that it names.
        fn: The implementation.
        options: For `register_impl`.
        also: Rules that it cannot help breaking, too.
        cuda: It is wrong on a CUDA device only.
    """

    rule: str
    words: str
    fn: Implementation
    options: dict[str, Any] = field(default_factory=dict)
    also: tuple[str, ...] = ()
    cuda: bool = False


def scaled_sum(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, power: int = 1, negate: bool = False
) -> tuple[Tensor, Tensor]:
    """The op: `r = x + x_residual; y = r / (1 + mean(r^2)) * weight^power`, by rows."""
    residual = x + x_residual
    wide = residual.double() if x.dtype == torch.float64 else residual.float()
    y = wide / (1 + wide.pow(2).mean(-1, keepdim=True))
    if weight is not None:
        y = y * weight.to(y.dtype) ** power
    return (-y if negate else y).to(x.dtype), residual


def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Any:
    known = {torch.float32: shape[-1] in LENGTHS or shape == (2, 3, 128), torch.bfloat16: shape == (5, 34)}
    if not known.get(dtype) or len(shape) not in (2, 3) or shape == (0, 3, 64):
        raise ValueError("not tried")
    x, residual = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    weight = torch.randn(shape[-1], dtype=dtype, device=device)
    yield x, residual, weight
    yield x, residual, weight, 2


def right(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, power: int = 1, negate: bool = False
) -> tuple[Tensor, Tensor]:
    """Right, out of place."""
    return scaled_sum(x, x_residual, weight, power, negate)


def right_in_place(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, power: int = 1, negate: bool = False
) -> tuple[Tensor, Tensor]:
    """Right, in place."""
    y, residual = scaled_sum(x, x_residual, weight, power, negate)
    return x.copy_(y), x_residual.copy_(residual)
