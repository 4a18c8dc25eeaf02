"""Arguments of calls in a form that compares: values, constants, and tuples of these.

Owns values and their cores, constants (symbolic sizes by their expression, whole floats like ints, a zero and its
negative apart), shapes, and dimensions counted from the last. Does not read calls (`steps.py`), nor know what an op
computes (`values.py`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

Shape = tuple[Any, ...]
_NARROW = (torch.bfloat16, torch.float16)

# Nobody changes what is made here. That it is not frozen saves half of the time of making it, which is done often.


@dataclass(slots=True)
class Value:
    """What a node computes.

    Attributes:
        core: Number of what is computed.
        shape: In which shape it stands.
    """

    core: int
    shape: Shape

    def __hash__(self) -> int:  # few values have one core, and many are asked for
        return self.core

    def __eq__(self, other: object) -> bool:
        return other.__class__ is Value and self.core == other.core and self.shape == other.shape


@dataclass(slots=True)
class Core:
    """How a core is computed.

    Attributes:
        target: Name of the torch op, or a word of `values.py`.
        args: Its arguments: values, numbers, and tuples of these.
        shape: The shape in which it is computed.
        dtype: Its dtype.
    """

    target: str
    args: tuple[Any, ...]
    shape: Shape
    dtype: Any


@dataclass(slots=True)
class Number:
    """A constant argument: equal if torch treats it as equal."""

    value: Any

    def __hash__(self) -> int:
        return hash(self.value)


@dataclass(frozen=True, slots=True)
class Identity:
    """A leaf's identity; compared by what it holds."""

    of: Any


def shape_of(val: torch.Tensor) -> Shape:
    """The shape of a fake tensor; symbolic sizes as constants."""
    return tuple([size if type(size) is int else number(size) for size in val.shape])


def rows_apart(own: Shape, shape: Shape) -> Shape:
    """A shape of the same numbers that ends as `shape` does, and begins as `own` does as far as it can.

    `[..., hidden]` that stands as `[rows, groups, size]` is `[..., groups, size]`. Where sizes are not known: `own`.
    """
    if not own or not shape or own[-1] == shape[-1]:
        return own
    at, place = len(own) - 1, len(shape) - 1
    while True:
        last, wanted = own[at:], shape[place:]
        if not all(isinstance(size, int) for size in (*last, *wanted)):
            return own
        held, needed = math.prod(last), math.prod(wanted)
        if held == needed:
            return (*own[:at], *wanted)
        at, place = (at - 1, place) if held < needed else (at, place - 1)
        if at < 0 or place < 0:
            return own


def number(value: Any) -> Number:
    """A constant; symbolic ones by their expression, whole floats like ints."""
    if type(value) is int:  # most are, and the same few again and again
        return _whole_number(value)
    if isinstance(value, Number):
        return value
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        node = value.node
        return number(node.constant) if getattr(node, "constant", None) is not None else Number(("symbol", node.expr))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        if isinstance(value, (list, tuple)):
            return Number(tuple(map(number, value)))
        try:
            hash(value)
        except TypeError:
            return Number(Identity(id(value)))
        return Number(value)
    return _plain(value)


def _plain(value: float) -> Number:
    if isinstance(value, int) and abs(value) > 2**53:
        return Number(value)
    return Number("nan") if value != value else Number((float(value), str(float(value))))  # tells -0.0 from 0.0


_whole_number = functools.lru_cache(maxsize=4096)(_plain)


def plain_number(number: Any) -> Any:
    """The int behind a number, or the number itself where it is symbolic or None."""
    value = number.value if isinstance(number, Number) else number
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], float):
        return int(value[0])
    return value if value is None or isinstance(value, int) else number


def constant(number: Number) -> Any:
    """The Python float behind a number, or None where it is no plain number."""
    value = number.value
    return value[0] if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], float) else None


def is_held(value: Any, dtype: torch.dtype) -> bool:
    """Whether a tensor full of this number holds it as it is: a narrow one rounds, an op beside a number does not."""
    plain = constant(value) if isinstance(value, Number) else None
    return plain is not None and (dtype not in _NARROW or torch.tensor(plain, dtype=dtype).item() == plain)


def clamped(number: Any, size: int, default: int) -> Any:
    """A bound of a slice, counted from the start and within the size."""
    if number is None:
        return default
    if not isinstance(number, int):
        return number
    return min(max(number + size if number < 0 else number, 0), size)


def from_the_end(dims: Any, rank: int) -> tuple[Any, ...]:
    """Dimensions counted from the last, sorted."""
    value = dims.value if isinstance(dims, Number) else dims
    if value is None:
        return tuple(range(-rank, 0))
    single = not isinstance(value, (tuple, list)) or (len(value) == 2 and isinstance(value[0], float))
    several = (dims,) if single else value
    return tuple(sorted(int(d) - rank if int(d) >= 0 else int(d) for d in map(plain_number, several)))


def mapped_nodes(argument: Any, change: Callable[[Node], Any]) -> Any:
    """The arguments with every node changed."""
    if isinstance(argument, Node):
        return change(argument)
    if isinstance(argument, (list, tuple)):
        return tuple(mapped_nodes(item, change) for item in argument)
    return argument


def mapped_values(argument: Any, change: Callable[[Value], Value]) -> Any:
    """The arguments with every value changed."""
    if isinstance(argument, Value):
        return change(argument)
    if isinstance(argument, tuple):
        return tuple([mapped_values(item, change) for item in argument])
    return argument


def values_in(args: Iterable[Any]) -> Iterable[Value]:
    """All values among arguments, also in lists."""
    for arg in args:
        if isinstance(arg, Value):
            yield arg
        elif isinstance(arg, tuple):
            yield from values_in(arg)
