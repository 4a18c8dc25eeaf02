"""Linear layers, whole and divided over a process group by rows or by columns of the weight.

Does not own what a product means (`ops/projection.py`), nor how weights are loaded (`parallel_layer.py`).
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from irframework.errors import ConfigError, LayerSizeError
from irframework.layers.parallel_layer import Group, ParallelLayer, Rows
from irframework.ops.fused_collectives import all_gather_linear, linear_reduce_scatter
from irframework.ops.projection import linear


class _Linear(ParallelLayer):
    """A weight and a bias of the size that this process holds."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, dtype: torch.dtype | None, device: Any, group: Any
    ) -> None:
        super().__init__(group)
        self.weight = nn.Parameter(torch.empty((out_features, in_features), dtype=dtype, device=device))
        self.bias = nn.Parameter(torch.empty(out_features, dtype=dtype, device=device)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the parameters with random numbers, as torch's linear layer does."""
        bound = 1 / math.sqrt(max(1, self.weight.shape[1]))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)


class ReplicatedLinear(_Linear):
    """A linear layer that every process holds as a whole.

    Args:
        in_features: Length of the rows that come in.
        out_features: Length of the rows that go out.
        bias: Whether a bias is added.
        dtype: Of the parameters.
        device: Of the parameters.

    Attributes:
        weight: `[out_features, in_features]`.
        bias: `[out_features]`, or None.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, dtype, device, None)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias`."""
        y: Tensor = linear(x, self.weight, self.bias)
        return y


class ColumnParallelLinear(_Linear):
    """A linear layer whose output columns are divided: each process computes some of them.

    Several layers with the same input may be merged into one product: each is divided on its own, so that a process
    has its heads of queries, keys and values, or its part of gate and up, side by side. `split` takes them apart.

    Args:
        in_features: Length of the rows that come in; every process has them whole.
        out_features: Length of the rows that go out, or a list with that of each merged layer.
        bias: Whether a bias is added.
        group: The processes; None for a layer that is not divided.
        gather_output: Give every process all columns, in the order of the full layer.
        copies: How many neighbouring processes hold the same columns of each merged layer; default: 1. Used for heads
            of keys and values where there are fewer of them than processes.
        merged_from: Names of the merged layers in the model that weights come from, e.g. `("gate_proj", "up_proj")`.
        sequence_parallel: Each process comes with its part of the tokens, the first dimension, and all are gathered
            by the product itself: the op `all_gather_linear`.
        dtype: Of the parameters.
        device: Of the parameters.

    Attributes:
        weight: `[columns of this process, in_features]`.
        bias: `[columns of this process]`, or None.
        output_sizes: Columns of each merged layer that `forward` gives.

    Raises:
        LayerSizeError: The columns of a merged layer cannot be divided evenly.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        bias: bool = False,
        *,
        group: Any = None,
        gather_output: bool = False,
        copies: Sequence[int] | None = None,
        merged_from: Sequence[str] = (),
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        rows = Rows.of(Group.of(group), out_features, copies)
        super().__init__(in_features, sum(rows.local), bias, dtype, device, rows.group)
        if gather_output and set(rows.copies) != {1}:
            raise LayerSizeError("gather_output does not go with copies: columns would come more than once.")
        if merged_from and len(merged_from) != len(rows.sizes):
            raise LayerSizeError(f"merged_from={tuple(merged_from)} must name all {len(rows.sizes)} merged layers.")
        self.rows = rows
        self.gather_output = gather_output
        self.merged_from = tuple(merged_from)
        self.sequence_parallel = sequence_parallel
        self.output_sizes = rows.sizes if gather_output else rows.local

    def local_part(self, name: str, full: Tensor) -> Tensor:
        """Return this process's rows of a full weight or bias, merged layers one behind the other."""
        return self.rows.part_of(full)

    def split(self, y: Tensor) -> tuple[Tensor, ...]:
        """Take the output of merged layers apart (views)."""
        return torch.split(y, list(self.output_sizes), -1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the columns of `x @ weight.T + bias` that this process holds, or all of them."""
        y: Tensor
        if self.sequence_parallel and self.group.size > 1:
            y = all_gather_linear(x, self.weight, self.bias, self.group.name, self.group.size)
        else:
            y = linear(x, self.weight, self.bias)
        if not self.gather_output or self.group.size == 1:
            return y
        if len(self.rows.sizes) == 1:
            return self.group.all_gather(y, -1)
        parts = y.split(self.rows.local, -1)
        return torch.cat([self.group.all_gather(part, -1) for part in parts], -1)


class RowParallelLinear(_Linear):
    """A linear layer whose input columns are divided: each process adds up some of them, and the sums are added.

    Args:
        in_features: Length of the full rows that come in.
        out_features: Length of the rows that go out; every process gets them whole.
        bias: Whether a bias is added. The first process adds it, so that it is in the sum once.
        group: The processes; None for a layer that is not divided.
        input_is_parallel: Rows come in divided, as a `ColumnParallelLinear` gives them; else they are cut here.
        reduce: Add up over the processes. Else each has its part of the sum, which the caller adds up.
        sequence_parallel: Give each process its part of the tokens, the first dimension, which the processes divide
            evenly, and let the product itself add up: the op `linear_reduce_scatter`.
        dtype: Of the parameters.
        device: Of the parameters.

    Attributes:
        weight: `[out_features, columns of this process]`.
        bias: `[out_features]`, or None.

    Raises:
        LayerSizeError: The input columns cannot be divided evenly.
        ConfigError: Tokens are to be divided, and sums are not to be added up.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        group: Any = None,
        input_is_parallel: bool = True,
        reduce: bool = True,
        sequence_parallel: bool = False,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        divided = Group.of(group)
        share = divided.share_of(in_features, "input columns")
        super().__init__(share, out_features, bias, dtype, device, divided)
        self.input_is_parallel = input_is_parallel
        self.reduce = reduce
        self.sequence_parallel = sequence_parallel
        if sequence_parallel and not reduce:
            raise ConfigError("reduce=False leaves parts of sums: sequence_parallel=True has nothing to divide.")

    def local_part(self, name: str, full: Tensor) -> Tensor:
        """Return this process's columns of a full weight, or the whole bias."""
        return self.group.part_of(full, 1) if name == "weight" else full

    def forward(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias`, or this process's part of it."""
        if not self.input_is_parallel:
            x = self.group.part_of(x, -1)
        bias = self.bias if self.group.rank == 0 else None
        y: Tensor
        if self.sequence_parallel and self.group.size > 1:
            y = linear_reduce_scatter(x, self.weight, bias, self.group.name, self.group.size)
            return y
        y = linear(x, self.weight, bias)
        return self.group.all_reduce(y) if self.reduce else y
