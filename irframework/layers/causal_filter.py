"""The filters of causal convolutions, one per channel, divided over a process group with the channels.

Does not own the convolutions (`ops/causal_convolution.py`), which the layers that hold filters call.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from irframework.layers.parallel_layer import Group, ParallelLayer, Rows


class CausalFilter(ParallelLayer):
    """Weight and bias of a depthwise convolution, in the shapes of torch's `Conv1d`. It is read, not called.

    Args:
        channels: How many channels there are, or a list with those of each part that is divided on its own.
        width: Length of a filter.
        bias: Whether there is a bias.
        group: The processes; None for filters that are not divided.
        copies: As for `ColumnParallelLinear`.
        dtype: Of the parameters.
        device: Of the parameters.

    Attributes:
        weight: `[channels of this process, 1, width]`.
        bias: `[channels of this process]`, or None.
    """

    def __init__(
        self,
        channels: int | Sequence[int],
        width: int,
        bias: bool = True,
        *,
        group: Any = None,
        copies: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(group)
        self.rows = Rows.of(Group.of(group), channels, copies)
        count = sum(self.rows.local)
        self.weight = nn.Parameter(torch.empty((count, 1, width), dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.zeros(count, dtype=dtype, device=device)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the filters with random numbers."""
        bound = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound)

    def local_part(self, name: str, full: Tensor) -> Tensor:
        """Return the filters of this process's channels."""
        return self.rows.part_of(full)

    @property
    def filters(self) -> Tensor:
        """The weight as the ops take it, `[channels, width]`."""
        return self.weight.squeeze(1)
