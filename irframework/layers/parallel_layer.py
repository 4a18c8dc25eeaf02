"""What layers over ops share: their process group, and how the weights of a whole model get into them.

Owns the group that a layer is divided over, how a full tensor is divided, and loading. Does not own what a layer
computes, nor its replacement by plugins (`replacement.py`).

Private torch API, read in 2.11 and 2.13: `nn.Module._parameters`, `_buffers` and `_non_persistent_buffers_set`;
`nn.Module._apply`, which `.to`, `.half` and `.to_empty` go through.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from irframework.errors import LayerSizeError, WeightError
from irframework.layers.pluggable_layer import PluggableLayer
from irframework.layers.replacement import add_base
from irframework.ops.collectives import all_gather, all_reduce, reduce_scatter


@dataclass(frozen=True, slots=True)
class Group:
    """The processes that share a layer, as constants that compiled code may hold.

    Attributes:
        name: The process group's name; empty for one process.
        size: How many processes there are.
        rank: Which one this is.
    """

    name: str = ""
    size: int = 1
    rank: int = 0

    @classmethod
    def of(cls, group: Any) -> "Group":
        """Return the group behind a `ProcessGroup`, a `DeviceMesh` of one dimension, or None: this process alone.

        Raises:
            LayerSizeError: The value is none of these, or this process is not in the group.
        """
        if group is None or isinstance(group, Group):
            return group or cls()
        if hasattr(group, "get_group"):
            group = group.get_group()
        if not isinstance(group, torch.distributed.ProcessGroup):
            raise LayerSizeError(
                "group must be a ProcessGroup, a DeviceMesh of one dimension, or None for a layer that is not divided; "
                f"got {group!r:.60}."
            )
        return cls() if group.size() == 1 else cls(group.group_name, group.size(), group.rank())

    def share_of(self, count: int, what: str) -> int:
        """Return how many of `count` things each process holds.

        Raises:
            LayerSizeError: They cannot be divided evenly.
        """
        if count % self.size:
            raise LayerSizeError(f"{count} {what} cannot be divided evenly over the {self.size} processes of a group.")
        return count // self.size

    def part_of(self, full: Tensor, dim: int) -> Tensor:
        """Return this process's part of a tensor, along a dimension that the group's size divides."""
        return full.chunk(self.size, dim)[self.rank] if self.size > 1 else full

    def all_reduce(self, x: Tensor) -> Tensor:
        """Add up over the processes; x itself where there is one."""
        return x if self.size == 1 else all_reduce(x, self.name)

    def all_gather(self, x: Tensor, dim: int) -> Tensor:
        """Put the processes' tensors side by side; x itself where there is one."""
        return x if self.size == 1 else all_gather(x, self.name, self.size, dim)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        """Add up over the processes, and keep this one's part; x itself where there is one."""
        return x if self.size == 1 else reduce_scatter(x, self.name, self.size, dim)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a weight in several parts, each divided over a group on its own.

    Attributes:
        group: The processes.
        sizes: Rows of each part of the full weight.
        copies: How many neighbouring processes hold the same rows of each part: 1, or more where there are fewer heads
            of keys than processes.
    """

    group: Group
    sizes: tuple[int, ...]
    copies: tuple[int, ...]

    @classmethod
    def of(cls, group: Group, sizes: int | Sequence[int], copies: Sequence[int] | None = None) -> "Rows":
        """Check and keep.

        Raises:
            LayerSizeError: A part cannot be divided, or the numbers of copies do not fit the parts and the group.
        """
        sizes = (sizes,) if isinstance(sizes, int) else tuple(sizes)
        copies = (1,) * len(sizes) if copies is None else tuple(copies)
        if len(copies) != len(sizes) or any(count < 1 or group.size % count for count in copies):
            raise LayerSizeError(
                f"copies={copies} must be one number for each of {len(sizes)} parts, that divides the group's size, "
                f"{group.size}."
            )
        rows = cls(group, sizes, copies)
        for size, count in zip(sizes, copies, strict=True):
            if size < 1 or size * count % group.size:
                raise LayerSizeError(
                    f"{size} rows, held {count} times, cannot be divided evenly over the {group.size} processes of a "
                    "group."
                )
        return rows

    @property
    def local(self) -> tuple[int, ...]:
        """Rows of each part that this process holds."""
        return tuple(s * c // self.group.size for s, c in zip(self.sizes, self.copies, strict=True))

    def part_of(self, full: Tensor) -> Tensor:
        """Return this process's rows of all parts, one behind the other."""
        if self.group.size == 1:
            return full
        pieces = [
            part.narrow(0, self.group.rank // count * rows, rows)
            for part, count, rows in zip(full.split(self.sizes), self.copies, self.local, strict=True)
        ]
        return torch.cat(pieces)


@add_base
class ParallelLayer(PluggableLayer):
    """A layer over ops whose weights may be divided over the processes of a group.

    Its parameters are called as those of the transformers module of its kind. A plugin may replace it as a whole.

    Attributes:
        group: The processes that it is divided over.
        merged_from: Names of the neighbouring modules whose weights it holds one behind the other, or none.
        exact_buffers: Names of the buffers that keep their dtype when the model's is changed.
    """

    group: Group
    merged_from: tuple[str, ...] = ()
    exact_buffers: tuple[str, ...] = ()

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = Group.of(group)

    def extra_repr(self) -> str:
        """Show the shapes of the parameters that this process holds, and its place in the group."""
        shown = [f"{name}={list(tensor.shape)}" for name, tensor in _own_tensors(self)]
        return ", ".join([*shown, *[f"rank {self.group.rank} of {self.group.size}"][: self.group.size > 1]])

    def exact_buffer(self, name: str, device: Any) -> Tensor:
        """Return an exact buffer as it is when the layer is built."""
        raise NotImplementedError(
            f"{type(self).__name__} has the exact buffer {name!r}, and does not say what is in it."
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ParallelLayer":
        """Move exact buffers without rounding them; build those that only now get memory."""
        before = {name: getattr(self, name) for name in self.exact_buffers}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, exact in before.items():
            now = getattr(self, name)
            if exact.is_meta and not now.is_meta:
                setattr(self, name, self.exact_buffer(name, now.device))
            elif now.dtype != exact.dtype:
                setattr(self, name, exact.to(now.device))
        return self

    def local_part(self, name: str, full: Tensor) -> Tensor:
        """Return what this process holds of a full parameter; here all of it.

        Args:
            name: Name of the parameter.
            full: As in a model that is not divided.
        """
        return full

    def load_full(self, **weights: Tensor) -> None:
        """Load parameters of a model that is not divided, by name: `layer.load_full(weight=..., bias=...)`.

        Raises:
            WeightError: There is no such parameter, or its shape is another.
        """
        own = dict(_own_tensors(self))
        for name, full in weights.items():
            if name not in own:
                raise WeightError(
                    f"{type(self).__name__} has no parameter {name!r}; it has {', '.join(own) or 'none'}."
                )
            _copy(f"{type(self).__name__}.{name}", own[name], full, self, name)


def load_full(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load the state dict of a model that is not divided, e.g. of a transformers model, into modules that are.

    Each parameter takes the entry of its name. A merged layer takes its parts, e.g. `mlp.gate_up_proj.weight` those of
    `mlp.gate_proj.weight` and `mlp.up_proj.weight`. Every entry is used, and every parameter gets one.

    Args:
        module: The modules, divided or not.
        weights: Full tensors by name.

    Raises:
        WeightError: Names are missing or left over, or a shape is another.
    """
    unused, missing = set(weights), []
    for path, layer in module.named_modules():
        for name, tensor in _own_tensors(layer):
            key = f"{path}.{name}" if path else name
            parts = [key] if key in weights else _parts(path, layer, name)
            if not parts or any(part not in weights for part in parts):
                missing.append(key)
                continue
            unused -= set(parts)
            full = weights[key] if parts == [key] else torch.cat([weights[part] for part in parts])
            _copy(key, tensor, full, layer, name)
    if missing or unused:
        raise WeightError(
            "The weights are not those of this model."
            + (f" Missing: {', '.join(missing)}." if missing else "")
            + (f" Left over: {', '.join(sorted(unused))}." if unused else "")
        )


def _parts(path: str, layer: nn.Module, name: str) -> list[str]:
    above = path.rpartition(".")[0]
    neighbours = getattr(layer, "merged_from", ())
    return [".".join(filter(None, (above, neighbour, name))) for neighbour in neighbours]


def _own_tensors(layer: nn.Module) -> Iterator[tuple[str, Tensor]]:
    kept = ((name, buffer) for name, buffer in layer._buffers.items() if name not in layer._non_persistent_buffers_set)
    for name, tensor in chain(layer._parameters.items(), kept):
        if tensor is not None:
            yield name, tensor


@torch.no_grad()
def _copy(key: str, tensor: Tensor, full: Tensor, layer: nn.Module, name: str) -> None:
    if tensor.is_meta:
        raise WeightError(f"{key} has no memory yet; call module.to_empty(device=...) before its weights are loaded.")
    try:
        part = layer.local_part(name, full) if isinstance(layer, ParallelLayer) else full
    except (RuntimeError, IndexError) as error:
        raise WeightError(f"{key}: a weight of shape {tuple(full.shape)} does not fit: {error}.") from None
    if part.shape != tensor.shape:
        held = "" if part is full else f", of which this process would hold {tuple(part.shape)}"
        raise WeightError(f"{key} has shape {tuple(tensor.shape)}; the weight has {tuple(full.shape)}{held}.")
    tensor.copy_(part)
