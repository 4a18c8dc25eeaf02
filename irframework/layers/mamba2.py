"""The mixer of Mamba-2 with its gated norm, divided over a process group by heads.

Does not own what its parts mean (`ops/`).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from irframework.errors import LayerSizeError
from irframework.layers.causal_filter import CausalFilter
from irframework.layers.parallel_layer import ParallelLayer
from irframework.layers.parallel_linear import ColumnParallelLinear, RowParallelLinear
from irframework.ops.causal_convolution import causal_conv1d, causal_conv1d_update
from irframework.ops.gated_norm import mixer2_gated_rms_norm
from irframework.ops.state_space import selective_state_update
from irframework.ops.state_space_dual import mamba2_chunk_scan


class Mixer2GatedRMSNorm(ParallelLayer):
    """Mamba-2's gated norm of groups of columns: the op `mixer2_gated_rms_norm`.

    Each process norms the groups that it holds. Where groups are spread over processes, it gathers rows first.

    Args:
        hidden_size: Length of a full row.
        num_groups: Groups of neighbouring columns that are normed together.
        epsilon: Added to the mean square.
        group: The processes; None for a norm that is not divided.
        dtype: Of the weight.
        device: Of the weight.

    Attributes:
        weight: `[columns of this process]`; all columns where it gathers.
    """

    def __init__(
        self,
        hidden_size: int,
        num_groups: int = 1,
        epsilon: float = 1e-5,
        *,
        group: Any = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(group)
        if num_groups < 1 or hidden_size % num_groups:
            raise LayerSizeError(f"{num_groups} groups do not divide {hidden_size} columns.")
        self.epsilon = epsilon
        self.group_size = hidden_size // num_groups
        self.whole_groups = num_groups % self.group.size == 0
        columns = self.group.share_of(hidden_size, "columns")
        self.weight = nn.Parameter(
            torch.ones(columns if self.whole_groups else hidden_size, dtype=dtype, device=device)
        )

    def local_part(self, name: str, full: Tensor) -> Tensor:
        """Return the weight of this process's columns, or of all where it gathers."""
        return self.group.part_of(full, 0) if self.whole_groups else full

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        """Return the normed columns of this process."""
        if not self.whole_groups:
            x = self.group.all_gather(x, -1)
            gate = None if gate is None else self.group.all_gather(gate, -1)
        y: Tensor = mixer2_gated_rms_norm(x, gate, self.weight, self.epsilon, self.group_size)
        return y if self.whole_groups else self.group.part_of(y, -1)


class MambaMixer2(ParallelLayer):
    """Project, convolve, scan, norm and gate, and project again: `causal_conv1d` and `mamba2_chunk_scan`.

    Args:
        hidden_size: Length of the rows that come in and go out.
        num_heads: Heads of the scan.
        head_dim: Elements of a head.
        state_size: State of one element.
        conv_width: Length of a filter.
        num_groups: Groups of heads that share the vectors which write to the state and read it.
        chunk_size: How many tokens an implementation may take at once.
        epsilon: Of the norm.
        time_step_limit: Least and largest time step.
        conv_bias: Whether the filters have a bias.
        bias: Whether the projections at both ends have one.
        group: The processes; None for a mixer that is not divided. Where there are fewer groups than processes,
            neighbours hold the same ones.
        dtype: Of the parameters.
        device: Of the parameters.

    Attributes:
        A_log: `[heads of this process]`; so are D and dt_bias.

    Raises:
        LayerSizeError: Heads or groups cannot be divided evenly.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int,
        state_size: int,
        conv_width: int,
        num_groups: int = 1,
        *,
        chunk_size: int = 256,
        epsilon: float = 1e-5,
        time_step_limit: tuple[float, float] = (0.0, math.inf),
        conv_bias: bool = True,
        bias: bool = False,
        group: Any = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(group)
        if num_groups < 1 or num_heads % num_groups:
            raise LayerSizeError(f"{num_groups} groups do not divide {num_heads} heads.")
        where: dict[str, Any] = {"group": self.group, "dtype": dtype, "device": device}
        heads = self.group.share_of(num_heads, "heads")
        copies = max(1, self.group.size // num_groups)
        self.head_dim = head_dim
        self.state_size = state_size
        self.chunk_size = chunk_size
        self.time_step_limit = tuple(time_step_limit)
        inner, shared = num_heads * head_dim, num_groups * state_size
        self.in_proj = ColumnParallelLinear(
            hidden_size,
            [inner, inner, shared, shared, num_heads],
            bias,
            copies=(1, 1, copies, copies, 1),
            **where,
        )
        self.conv1d = CausalFilter([inner, shared, shared], conv_width, conv_bias, copies=(1, copies, copies), **where)
        self.dt_bias = nn.Parameter(torch.ones(heads, dtype=dtype, device=device))
        self.A_log = nn.Parameter(torch.empty(heads, dtype=dtype, device=device))
        self.D = nn.Parameter(torch.ones(heads, dtype=dtype, device=device))
        self.norm = Mixer2GatedRMSNorm(inner, num_groups, epsilon, **where)
        self.out_proj = RowParallelLinear(inner, hidden_size, bias, **where)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Let the decays of the heads be 1, 2, 3, ..."""
        with torch.no_grad():
            first = 1 + self.group.rank * len(self.A_log)
            steps = torch.arange(first, first + len(self.A_log), dtype=torch.float32, device=self.A_log.device)
            self.A_log.copy_(steps.log())

    def local_part(self, name: str, full: Tensor) -> Tensor:
        """Return the numbers of this process's heads."""
        return self.group.part_of(full, 0)

    def state_shapes(self, sequences: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the states of the convolution and of the scan."""
        channels, _, width = self.conv1d.weight.shape
        return (sequences, channels, width - 1), (sequences, len(self.A_log), self.head_dim, self.state_size)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gate, what is convolved, and the time steps."""
        gate, hidden, b, c, dt = self.in_proj.output_sizes
        parts: tuple[Tensor, ...] = torch.split(self.in_proj(x), [gate, hidden + b + c, dt], -1)
        return parts[0], parts[1], parts[2]

    def _scanned(self, convolved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Heads, and the vectors of each group that write to the state and read it."""
        hidden, b, c = torch.split(convolved, list(self.conv1d.rows.local), -1)
        return (
            hidden.unflatten(-1, (-1, self.head_dim)),
            b.unflatten(-1, (-1, self.state_size)),
            c.unflatten(-1, (-1, self.state_size)),
        )

    def _time_steps(self, dt: Tensor) -> tuple[Tensor, Tensor | None, bool]:
        """Time steps, with the bias and the softplus that are still to come."""
        if self.time_step_limit == (0.0, math.inf):
            return dt, self.dt_bias, True
        limited = F.softplus(dt.float() + self.dt_bias.float()).clamp(*self.time_step_limit)
        return limited, None, False

    def forward(
        self,
        x: Tensor,
        query_start_loc: Tensor | None = None,
        conv_states: Tensor | None = None,
        ssm_states: Tensor | None = None,
        has_initial_state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run whole sequences; arguments and results as those of `MambaMixer`."""
        gate, hidden, dt = self._projected(x)
        before = (query_start_loc, conv_states, has_initial_state if conv_states is not None else None)
        hidden, conv_states = causal_conv1d(hidden, self.conv1d.filters, self.conv1d.bias, *before, "silu")
        heads, b, c = self._scanned(hidden)
        dt, dt_bias, softplus = self._time_steps(dt)
        a = -torch.exp(self.A_log.float())
        before = (query_start_loc, ssm_states, has_initial_state if ssm_states is not None else None)
        y, after = mamba2_chunk_scan(heads, dt, a, b, c, self.chunk_size, self.D, None, dt_bias, softplus, *before)
        return self.out_proj(self.norm(y.flatten(-2), gate)), conv_states, after

    def step(
        self, x: Tensor, conv_state: Tensor, ssm_state: Tensor, state_indices: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Take one token of each sequence. The states are given away: use those that come back.

        Args:
            x: `[batch, hidden_size]`.
            conv_state: `[slots, channels, conv_width - 1]`.
            ssm_state: `[slots, heads, head_dim, state_size]`.
            state_indices: The slot of each sequence, `[batch]`; None: row `i` has slot `i`.

        Returns:
            `(y, conv_state, ssm_state)`.
        """
        gate, hidden, dt = self._projected(x)
        hidden, conv_state = causal_conv1d_update.maybe_inplace(
            hidden.contiguous(), conv_state, self.conv1d.filters, self.conv1d.bias, state_indices, "silu"
        )
        heads, b, c = self._scanned(hidden)
        dt, dt_bias, softplus = self._time_steps(dt)
        a = -torch.exp(self.A_log.float())
        y, ssm_state = selective_state_update.maybe_inplace(
            heads.contiguous(), ssm_state, dt, a, b, c, self.D, None, dt_bias, softplus, state_indices
        )
        return self.out_proj(self.norm(y.flatten(-2), gate)), conv_state, ssm_state
