"""The short convolution of LFM2, divided over a process group by channels.

Does not own what it means (`ops/causal_convolution.py`).
"""

from typing import Any

import torch
from torch import Tensor

from irframework.layers.causal_filter import CausalFilter
from irframework.layers.parallel_layer import ParallelLayer
from irframework.layers.parallel_linear import ColumnParallelLinear, RowParallelLinear
from irframework.ops.causal_convolution import short_conv


class ShortConv(ParallelLayer):
    """Project, gate, convolve, gate, and project again: the op `short_conv` between two linear layers.

    Args:
        hidden_size: Length of the rows that come in and go out, and the number of channels.
        conv_width: Length of a filter.
        bias: Whether filters and projections have biases.
        group: The processes; None for a layer that is not divided.
        dtype: Of the parameters.
        device: Of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        conv_width: int,
        bias: bool = False,
        *,
        group: Any = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(group)
        where: dict[str, Any] = {"group": self.group, "dtype": dtype, "device": device}
        self.conv = CausalFilter(hidden_size, conv_width, bias, **where)
        self.in_proj = ColumnParallelLinear(hidden_size, [hidden_size] * 3, bias, **where)
        self.out_proj = RowParallelLinear(hidden_size, hidden_size, bias, **where)

    def state_shape(self, sequences: int) -> tuple[int, ...]:
        """Return the shape of the states."""
        channels, _, width = self.conv.weight.shape
        return sequences, channels, width - 1

    def forward(
        self,
        x: Tensor,
        query_start_loc: Tensor | None = None,
        states: Tensor | None = None,
        has_initial_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run whole sequences, or steps: a padded batch of sequences of one token with their states.

        Args:
            x: Packed `[tokens, hidden_size]` or padded `[batch, length, hidden_size]`.
            query_start_loc: Where packed sequences start, and where the last one ends; None for a padded batch.
            states: `[sequences, channels, conv_width - 1]`, or None for zeros.
            has_initial_state: Which of these count, `[sequences]`, bool; None: all.

        Returns:
            `(y, states)`: `y` like x, and the states behind each sequence.
        """
        before = (query_start_loc, states, has_initial_state if states is not None else None)
        y, states = short_conv(self.in_proj(x), self.conv.filters, self.conv.bias, *before)
        return self.out_proj(y), states
