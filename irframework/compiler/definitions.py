"""What an op's definition is made of, for arguments of given kinds.

Owns the traces of native bodies: made once per kinds of arguments, kept for the process where all sizes are plain
numbers. Does not number values (`values.py`), nor compare anything.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph

from irframework.compiler.recording import BeyondError, recorded
from irframework.compiler.steps import Expansion
from irframework.compiler.tracing import fake_like, trace
from irframework.registry import registry

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp

_FAKE_LOG = logging.getLogger("torch._subclasses.fake_tensor")
_LARGEST = 96  # torch ops; an op with a longer definition stays one op wherever it is met
_kept: dict[Any, Expansion | None] = {}
_kept_for: list[int] = [-1]
_kinds: dict[Any, int] = {}  # a number for each kind of tensor, which is compared faster
_numbers = itertools.count()  # none is given twice


@dataclass(slots=True)
class Definitions:
    """Definitions met in one graph."""

    own: dict[Any, Expansion | None] = field(default_factory=dict)
    kinds: dict[int, tuple[torch.Tensor, Any, bool]] = field(default_factory=dict)

    def expand(self, op: IrOp, arguments: Sequence[Any], result: Any, body: IrOpImpl | None = None) -> Expansion | None:
        """The definition of an op, or None where it is too long, or cannot be traced.

        Args:
            op: The op.
            arguments: Fake tensors, numbers and lists of these, in the order of the signature.
            result: What the op returns, where that is known: tells the fake mode of calls without tensors.
            body: A further spelling of the op; None for native.
        """
        mode = fake_mode_of((*arguments, result))
        if mode is None or (body is None and known_by_spelling(op)):
            return None
        kinds = [self._kind(argument) for argument in arguments]
        key = (op.name, None if body is None else body.fn, *(kind for kind, _ in kinds))
        if registry.generation != _kept_for[0]:
            _kept.clear()
            _kinds.clear()
            _kept_for[0] = registry.generation
        kept = self.own if mode.shape_env is not None and any(symbolic for _, symbolic in kinds) else _kept
        if key not in kept:
            kept[key] = self._trace(body or op.registered["native"], arguments, mode)
        return kept[key]

    def _kind(self, argument: Any) -> tuple[Any, bool]:
        """What of an argument a trace depends on, and whether it is symbolic; asked of each tensor once."""
        if argument is None or type(argument) in (int, bool, str, float):
            return argument_key(argument, offsets=False), False
        if not isinstance(argument, torch.Tensor):
            return argument_key(argument, offsets=False), _symbolic(argument)
        known = self.kinds.get(id(argument))
        if known is None:
            kind, symbolic = argument_key(argument, offsets=False), _symbolic(argument)
            if not symbolic:  # else it is of one graph only
                kind = _kinds.setdefault(kind, next(_numbers))
            known = self.kinds[id(argument)] = (argument, kind, symbolic)
        return known[1:]

    def _trace(self, body: IrOpImpl, arguments: Sequence[Any], mode: FakeTensorMode) -> Expansion | None:
        own = [fresh(argument, mode) for argument in arguments]
        try:
            with refusals_unlogged():
                try:
                    return self._expansion(*recorded(lambda *given: body.apply(given), own, mode), None)
                except BeyondError:
                    own = [fresh(argument, mode) for argument in arguments]
                    traced = trace(lambda *given: body.apply(given), own, mode)
        except Exception:  # the definition refuses such arguments, or cannot be traced
            return None
        if traced.written:
            return None
        return self._expansion(traced.module.graph, traced.dynamic, traced.is_tuple, traced.module)

    def _expansion(self, graph: Graph, places: Sequence[Any], is_tuple: bool, owner: Any) -> Expansion | None:
        graph.eliminate_dead_code()
        return None if len(graph.nodes) > _LARGEST else Expansion(graph, places, is_tuple, owner)


def known_by_spelling(op: IrOp) -> bool:
    """Whether graphs are searched for an op's spellings only: its body is so long that it has a shape function."""
    return op.fake is not None and bool(op.spellings)


@contextmanager
def refusals_unlogged() -> Iterator[None]:
    """Keep torch from logging an error where a body refuses fake tensors, which is an answer here."""

    def nothing(record: logging.LogRecord) -> bool:
        return False

    _FAKE_LOG.addFilter(nothing)
    try:
        yield
    finally:
        _FAKE_LOG.removeFilter(nothing)


def fake_mode_of(values: Any) -> FakeTensorMode | None:
    """The fake mode of the first fake tensor among values."""
    for value in values:
        if isinstance(value, FakeTensor):
            return value.fake_mode
        if isinstance(value, (list, tuple)):
            found = fake_mode_of(value)
            if found is not None:
                return found
    return None


def fresh(value: Any, mode: FakeTensorMode) -> Any:
    """An argument whose fake tensors, also those in lists, have storages of their own."""
    if isinstance(value, (list, tuple)):
        return [fresh(item, mode) for item in value]
    return fake_like(value, mode) if isinstance(value, torch.Tensor) else value


def _symbolic(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_symbolic, value))
    if isinstance(value, torch.Tensor):
        return any(type(number) is not int for number in (*value.shape, *value.stride(), value.storage_offset()))
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


def argument_key(value: Any, offsets: bool) -> Any:
    """What of an argument a trace may depend on.

    Args:
        value: The argument.
        offsets: Whether where tensors start in their storages counts: an implementation may ask for it, a definition is
            the same wherever they start.
    """
    if value is None or type(value) in (int, bool, str):  # most are
        return (type(value), value)
    if isinstance(value, float):
        return (type(value), repr(value))  # nan, and 0.0 beside -0.0
    if isinstance(value, (list, tuple)):
        return (type(value), *(argument_key(item, offsets) for item in value))
    if isinstance(value, torch.Tensor):
        numbers: tuple[Any, ...] = (*value.shape, -1, *value.stride(), value.storage_offset() if offsets else 0)
        if any(type(number) is not int for number in numbers):
            numbers = tuple(argument_key(number, offsets) for number in numbers)
        return (value.dtype, value.device, value.layout, numbers)
    if _symbolic(value):
        return ("symbolic", value.node.expr)
    try:
        hash(value)
    except TypeError:
        return ("object", id(value))
    return (type(value), value)
