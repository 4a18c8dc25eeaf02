"""The gated activations of decoders. Does not own their meanings."""

from typing import Any

from torch import Tensor

from irframework.layers.quantization import Quantization, QuantizingLayer
from irframework.ops.activation import gelu_and_mul, silu_and_mul


class SiluAndMul(QuantizingLayer):
    """Gate by SiLU: the op `silu_and_mul`. It has no weights, and works on the columns that a process holds.

    Args:
        quantization: Quantise the result in the same kernel: the ops `silu_and_mul_*_quant_fp8` and `_quant_nvfp4`.
        device: Of the scale that is kept for it.

    Raises:
        ConfigError: No op quantises so.
    """

    def __init__(self, *, quantization: Quantization | None = None, device: Any = None) -> None:
        super().__init__(quantization=quantization, device=device)
        (self._op,) = self.fused(silu_and_mul)

    def forward(self, x: Tensor) -> Any:
        """Return `silu(gate) * up` of `x = [gate, up]`; or, quantised, its codes and their scales."""
        if self.quantization is None:
            return silu_and_mul(x)
        return self.with_scale(self._op(x, **self.options()))


class GeluAndMul(QuantizingLayer):
    """Gate by GELU: the op `gelu_and_mul`.

    Args:
        approximate: `none`, or `tanh` for the approximation.
        quantization: Quantise the result in the same kernel: the ops `gelu_and_mul_*_quant_fp8`.
        device: Of the scale that is kept for it.

    Raises:
        ConfigError: No op quantises so.
    """

    def __init__(
        self, approximate: str = "none", *, quantization: Quantization | None = None, device: Any = None
    ) -> None:
        super().__init__(quantization=quantization, device=device)
        self.approximate = approximate
        (self._op,) = self.fused(gelu_and_mul)

    def forward(self, x: Tensor) -> Any:
        """Return `gelu(gate) * up` of `x = [gate, up]`; or, quantised, its codes and their scales."""
        if self.quantization is None:
            return gelu_and_mul(x, self.approximate)
        return self.with_scale(self._op(x, approximate=self.approximate, **self.options()))
