"""The mixer of Mamba, divided over a process group by channels. Does not own what its parts mean (`ops/`)."""

from typing import Any

import torch
from torch import Tensor, nn

from irframework.layers.causal_filter import CausalFilter
from irframework.layers.parallel_layer import ParallelLayer
from irframework.layers.parallel_linear import ColumnParallelLinear, RowParallelLinear
from irframework.ops.causal_convolution import causal_conv1d, causal_conv1d_update
from irframework.ops.projection import linear
from irframework.ops.state_space import selective_scan, selective_state_update


class MambaMixer(ParallelLayer):
    """Project, convolve, scan, gate, and project again: the ops `causal_conv1d` and `selective_scan`.

    Args:
        hidden_size: Length of the rows that come in and go out.
        intermediate_size: How many channels there are.
        state_size: State of one channel.
        conv_width: Length of a filter.
        time_step_rank: Rank of the time steps.
        conv_bias: Whether the filters have a bias.
        bias: Whether the projections at both ends have one.
        group: The processes; None for a mixer that is not divided.
        dtype: Of the parameters.
        device: Of the parameters.

    Attributes:
        A_log: `[channels of this process, state_size]`.
        D: `[channels of this process]`.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        state_size: int,
        conv_width: int,
        time_step_rank: int,
        *,
        conv_bias: bool = True,
        bias: bool = False,
        group: Any = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(group)
        where: dict[str, Any] = {"group": self.group, "dtype": dtype, "device": device}
        self.state_size = state_size
        self.time_step_rank = time_step_rank
        channels = self.group.share_of(intermediate_size, "channels")
        self.in_proj = ColumnParallelLinear(hidden_size, [intermediate_size] * 2, bias, **where)
        self.conv1d = CausalFilter(intermediate_size, conv_width, conv_bias, **where)
        self.x_proj = RowParallelLinear(intermediate_size, time_step_rank + 2 * state_size, **where)
        self.dt_proj = ColumnParallelLinear(time_step_rank, intermediate_size, bias=True, **where)
        self.A_log = nn.Parameter(torch.empty((channels, state_size), dtype=dtype, device=device))
        self.D = nn.Parameter(torch.ones(channels, dtype=dtype, device=device))
        self.out_proj = RowParallelLinear(intermediate_size, hidden_size, bias, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Let the decays of a channel be those of the real S4D: 1, 2, 3, ..."""
        with torch.no_grad():
            steps = torch.arange(1, self.state_size + 1, dtype=torch.float32, device=self.A_log.device)
            self.A_log.copy_(steps.log().expand_as(self.A_log))

    def local_part(self, name: str, full: Tensor) -> Tensor:
        """Return the rows of this process's channels."""
        return self.group.part_of(full, 0)

    def state_shapes(self, sequences: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the states of the convolution and of the scan."""
        channels, _, width = self.conv1d.weight.shape
        return (sequences, channels, width - 1), (sequences, channels, self.state_size)

    def _time_steps(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Time steps without their bias, and the vectors that write to the state and read it."""
        sizes = [self.time_step_rank, self.state_size, self.state_size]
        dt, b, c = self.x_proj(hidden).split(sizes, -1)
        return linear(dt, self.dt_proj.weight), b, c

    def forward(
        self,
        x: Tensor,
        query_start_loc: Tensor | None = None,
        conv_states: Tensor | None = None,
        ssm_states: Tensor | None = None,
        has_initial_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run whole sequences.

        Args:
            x: Packed `[tokens, hidden_size]` or padded `[batch, length, hidden_size]`.
            query_start_loc: Where packed sequences start, and where the last one ends; None for a padded batch.
            conv_states: The inputs of the convolution before each sequence, or None for zeros.
            ssm_states: The state of the scan before each sequence, or None for zeros.
            has_initial_state: Which of these count, `[sequences]`, bool; None: all.

        Returns:
            `(y, conv_states, ssm_states)`: `y` like x, and the states behind each sequence.
        """
        hidden, gate = self.in_proj.split(self.in_proj(x))
        before = (query_start_loc, conv_states, has_initial_state if conv_states is not None else None)
        hidden, conv_states = causal_conv1d(hidden, self.conv1d.filters, self.conv1d.bias, *before, "silu")
        dt, b, c = self._time_steps(hidden)
        a = -torch.exp(self.A_log.float())
        before = (query_start_loc, ssm_states, has_initial_state if ssm_states is not None else None)
        y, after = selective_scan(hidden, dt, a, b, c, self.D, gate, self.dt_proj.bias, True, *before)
        return self.out_proj(y), conv_states, after

    def step(
        self, x: Tensor, conv_state: Tensor, ssm_state: Tensor, state_indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take one token of each sequence. The states are given away: use those that come back.

        Args:
            x: `[batch, hidden_size]`.
            conv_state: `[slots, channels, conv_width - 1]`.
            ssm_state: `[slots, channels, state_size]`.
            state_indices: The slot of each sequence, `[batch]`; None: row `i` has slot `i`.

        Returns:
            `(y, conv_state, ssm_state)`.
        """
        hidden, gate = self.in_proj.split(self.in_proj(x))
        hidden, conv_state = causal_conv1d_update.maybe_inplace(
            hidden.contiguous(), conv_state, self.conv1d.filters, self.conv1d.bias, state_indices, "silu"
        )
        dt, b, c = self._time_steps(hidden)
        a = -torch.exp(self.A_log.float())
        y, ssm_state = selective_state_update.maybe_inplace(
            hidden, ssm_state, dt, a, b, c, self.D, gate, self.dt_proj.bias, True, state_indices
        )
        return self.out_proj(y), conv_state, ssm_state
