"""The norm of a decoder, alone and behind the sum with the residual stream. Does not own the norms' meanings."""

from typing import Any, overload

import torch
from torch import Tensor, nn

from irframework.layers.parallel_layer import ParallelLayer
from irframework.ops.layernorm import fused_add_gemma_rms_norm, fused_add_rms_norm, gemma_rms_norm, rms_norm


class RMSNorm(ParallelLayer):
    """Divide rows by their root mean square and scale them: the ops `rms_norm` and `fused_add_rms_norm`.

    Args:
        hidden_size: Length of a row.
        epsilon: Added to the mean square.
        variance_size: How many leading elements of a row the mean is taken over; default: all.
        has_weight: Whether rows are scaled.
        dtype: Of the weight.
        device: Of the weight.
        donate: Let the residual form overwrite both its inputs; the caller does not read them again.

    Attributes:
        weight: `[hidden_size]`, or None.
    """

    def __init__(
        self,
        hidden_size: int,
        epsilon: float = 1e-6,
        *,
        variance_size: int | None = None,
        has_weight: bool = True,
        dtype: torch.dtype | None = None,
        device: Any = None,
        donate: bool = False,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.variance_size = variance_size
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=device)) if has_weight else None
        self.donate = donate

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Norm x; or, with a residual, return `(norm(x + residual), x + residual)`."""
        if residual is None:
            return rms_norm(x, self.weight, self.epsilon, self.variance_size)
        form = fused_add_rms_norm.maybe_inplace if self.donate else fused_add_rms_norm
        return form(x, residual, self.weight, self.epsilon, self.variance_size)


class GemmaRMSNorm(ParallelLayer):
    """Gemma's norm, whose scale is one plus the weight: `gemma_rms_norm` and `fused_add_gemma_rms_norm`.

    Args:
        hidden_size: Length of a row.
        epsilon: Added to the mean square.
        dtype: Of the weight.
        device: Of the weight.
        donate: As for `RMSNorm`.

    Attributes:
        weight: `[hidden_size]`.
    """

    def __init__(
        self,
        hidden_size: int,
        epsilon: float = 1e-6,
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
        donate: bool = False,
    ) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.zeros(hidden_size, dtype=dtype, device=device))
        self.donate = donate

    @overload
    def forward(self, x: Tensor, residual: None = None) -> Tensor: ...

    @overload
    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Norm x; or, with a residual, return `(norm(x + residual), x + residual)`."""
        if residual is None:
            return gemma_rms_norm(x, self.weight, self.epsilon)
        form = fused_add_gemma_rms_norm.maybe_inplace if self.donate else fused_add_gemma_rms_norm
        return form(x, residual, self.weight, self.epsilon)
