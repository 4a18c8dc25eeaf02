"""The gated activations of decoders. Does not own their meanings."""

from torch import Tensor

from irframework.layers.parallel_layer import ParallelLayer
from irframework.ops.activation import gelu_and_mul, silu_and_mul


class SiluAndMul(ParallelLayer):
    """Gate by SiLU: the op `silu_and_mul`. It has no weights, and works on the columns that a process holds."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `silu(gate) * up` of `x = [gate, up]`."""
        y: Tensor = silu_and_mul(x)
        return y


class GeluAndMul(ParallelLayer):
    """Gate by GELU: the op `gelu_and_mul`.

    Args:
        approximate: `none`, or `tanh` for the approximation.
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        """Return `gelu(gate) * up` of `x = [gate, up]`."""
        y: Tensor = gelu_and_mul(x, self.approximate)
        return y
