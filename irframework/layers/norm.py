"""The norm of a decoder, alone and behind the sum with the residual stream. Does not own the norms' meanings."""

from typing import Any, overload

import torch
from torch import Tensor, nn

from irframework.errors import ConfigError
from irframework.layers.parallel_layer import Group, ParallelLayer
from irframework.layers.quantization import Quantization, QuantizingLayer
from irframework.op import IrOp
from irframework.ops.fused_collectives import all_reduce_fused_add_rms_norm, all_reduce_rms_norm
from irframework.ops.layernorm import fused_add_gemma_rms_norm, fused_add_rms_norm, gemma_rms_norm, rms_norm


class RMSNorm(QuantizingLayer):
    """Divide rows by their root mean square and scale them: the ops `rms_norm` and `fused_add_rms_norm`.

    Args:
        hidden_size: Length of a row.
        epsilon: Added to the mean square.
        variance_size: How many leading elements of a row the mean is taken over; default: all.
        has_weight: Whether rows are scaled.
        dtype: Of the weight.
        device: Of the weight.
        donate: Let the residual form overwrite both its inputs; the caller does not read them again.
        quantization: Quantise the normed rows in the same kernel: the ops `[fused_add_]rms_norm_*_quant_fp8` and
            `_quant_nvfp4`.
        summed_over: Rows come as the parts of a sum over these processes, as `RowParallelLinear(reduce=False)` gives
            them, and are added up first: `all_reduce_rms_norm` and `all_reduce_fused_add_rms_norm`.

    Attributes:
        weight: `[hidden_size]`, or None.
        scale: As `QuantizingLayer`.

    Raises:
        ConfigError: No op does all that is asked for.
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
        quantization: Quantization | None = None,
        summed_over: Any = None,
    ) -> None:
        super().__init__(quantization=quantization, device=device)
        self.summed_over = None if summed_over is None else Group.of(summed_over)
        if sum((quantization is not None, variance_size is not None, summed_over is not None)) > 1:
            raise ConfigError(
                "A norm takes one of quantization, variance_size and summed_over: no op does two of them."
            )
        self.epsilon = epsilon
        self.variance_size = variance_size
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=device)) if has_weight else None
        self.donate = donate
        self._norm, self._add_norm = self.fused(rms_norm, fused_add_rms_norm)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Any:
        """Norm x; or, with a residual, return `(norm(x + residual), x + residual)`.

        Quantised, codes and their scales take the place of the normed rows: `(codes, scales)` and
        `(codes, scales, x + residual)`. Where x is a sum over processes, the sum comes back in both forms.
        """
        if self.quantization is not None:
            return self._quantised(x, residual)
        if self.summed_over is not None:
            return self._of_a_sum(x, residual, self.summed_over.name)
        if residual is None:
            return rms_norm(x, self.weight, self.epsilon, self.variance_size)
        return self._form(fused_add_rms_norm)(x, residual, self.weight, self.epsilon, self.variance_size)

    def _quantised(self, x: Tensor, residual: Tensor | None) -> Any:
        options = {"weight": self.weight, "epsilon": self.epsilon, **self.options()}
        if residual is None:
            return self.with_scale(self._norm(x, **options))
        return self.with_scale(self._form(self._add_norm)(x, residual, **options))

    def _of_a_sum(self, x: Tensor, residual: Tensor | None, group: str) -> Any:
        if residual is None:
            return all_reduce_rms_norm(x, self.weight, self.epsilon, group)
        return self._form(all_reduce_fused_add_rms_norm)(x, residual, self.weight, self.epsilon, group)

    def _form(self, op: IrOp) -> Any:
        return op.maybe_inplace if self.donate else op


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
