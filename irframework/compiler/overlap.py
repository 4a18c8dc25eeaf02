"""Whether two tensors on one storage are proved to share no byte.

Owns the proof, which adds no guard. Does not know graphs.

A tensor is a set of bytes of its storage: an offset, plus any sum of `index * stride` over its dimensions, plus the
bytes of one element. Counting in bytes makes views of other dtypes comparable. Two sets are apart if one ends before
the other begins (parts along the outermost dimension), or if there is a period that divides some strides of both, so
that within one period each keeps to an interval of its own (parts along any other dimension, every other element).

Private torch API, read in 2.11 and 2.13: `SymInt.node.hint`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from irframework.compiler.aliasing import storage_of


def disjoint(x: object, y: object) -> bool:
    """True if two (fake) tensors lie on one storage and are proved to share no byte, whatever symbolic sizes are."""
    return x is not y and on_one_storage(x, y) and _apart(_Bytes.of(x), _Bytes.of(y))


def disjoint_in_example(x: object, y: object) -> bool:
    """As `disjoint`, for the sizes of the call that is compiled."""
    return on_one_storage(x, y) and _apart(_Bytes.of(x, _hint), _Bytes.of(y, _hint))


def on_one_storage(x: object, y: object) -> bool:
    """True if two (fake) tensors are known to lie on one storage."""
    return storage_of(x) is not None and storage_of(x) == storage_of(y)


def _hint(number: Any) -> Any:
    hint = number.node.hint if isinstance(number, torch.SymInt) else number
    return number if hint is None else hint


def _known(fact: Any) -> bool:
    return bool(statically_known_true(fact))


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Where a tensor lies: `steps` holds (size, stride) of each dimension that has more than one element."""

    offset: Any
    steps: tuple[tuple[Any, Any], ...]
    item: int
    empty: bool

    @classmethod
    def of(cls, value: Any, number: Callable[[Any], Any] = lambda number: number) -> _Bytes:
        item = value.element_size()
        sizes = [number(size) for size in value.size()]
        steps = tuple(
            (size, number(stride) * item)
            for size, stride in zip(sizes, value.stride(), strict=True)
            if not _known(size == 1)
        )
        return cls(number(value.storage_offset()) * item, steps, item, any(_known(size == 0) for size in sizes))

    def extent(self, steps: Iterable[tuple[Any, Any]]) -> Any:
        """From the first byte to the end of the last one, counting only some dimensions."""
        return sum(((size - 1) * stride for size, stride in steps), start=self.item)


def _apart(a: _Bytes, b: _Bytes) -> bool:
    if a.empty or b.empty or _known(a.offset + a.extent(a.steps) <= b.offset):
        return True
    if _known(b.offset + b.extent(b.steps) <= a.offset):
        return True
    return any(_apart_in_each(period, a, b) for period in _periods(a, b))


def _periods(a: _Bytes, b: _Bytes) -> list[Any]:
    found: list[Any] = []
    for _, stride in (*a.steps, *b.steps):
        if _known(stride > 0) and not any(_known(stride == other) for other in found):
            found.append(stride)
    return found


def _apart_in_each(period: Any, a: _Bytes, b: _Bytes) -> bool:
    """Whether both keep to intervals of their own within each period, counted from the storage's first byte."""
    begins, ends = [], []
    for each in (a, b):
        inner = [(size, stride) for size, stride in each.steps if not _known(stride % period == 0)]
        begin = each.offset % period
        end = begin + each.extent(inner)
        if not _known(end <= period):
            return False
        begins.append(begin)
        ends.append(end)
    return _known(ends[0] <= begins[1]) or _known(ends[1] <= begins[0])
