"""Which torch ops a definition cannot be without: a graph that lacks one need not be searched for it.

Owns the quick look that saves deriving skeletons, which costs a trace for each way in which an op's arguments steer it.
It may say yes where there is no match, never no where there is one; and says no as soon as it knows. Does not look at
how ops are connected.

Private torch APIs, read in 2.11 and 2.13: `TorchDispatchMode`, `_inductor.decomposition.select_decomp_table`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from irframework.compiler.call_arguments import Core
from irframework.compiler.definitions import known_by_spelling
from irframework.compiler.shown_calls import shown_calls
from irframework.compiler.values import ROW_REDUCTIONS
from irframework.torch_ops import op_of

if TYPE_CHECKING:
    from irframework.op import IrOp

_SPELT_OTHERWISE = {"aten::pow", "aten::clone", "aten::_to_copy"}  # in values.py under other names, or not at all
_CODES = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.int8, torch.uint8}

Needs = frozenset[tuple[str, frozenset[str]]]
"""What must occur, each with the IR ops one of which, as one node, stands for it."""


def ingredients_of(cores: Iterable[Core]) -> set[str]:
    """What occurs in a graph: names of torch ops and IR ops, and dtypes of codes."""
    found: set[str] = set()
    for core in cores:
        found.add(core.target.partition("[")[0])
        if core.dtype in _CODES:
            found.add(str(core.dtype))
    return found


@dataclass(slots=True)
class Way:
    """One call of one body, and what it needs, as far as that had to be found out.

    A body runs until it needs what a graph lacks: bodies as that of attention are long, and most graphs lack what they
    begin with. For the next graph it runs again, if that one has all that is known of it.

    Attributes:
        op: The op.
        body: The body.
        arguments: What it is called with.
        needs: What it needs.
        is_done: Whether that is all.
    """

    op: IrOp
    body: Callable[..., Any]
    arguments: tuple[Any, ...]
    needs: Needs | None = frozenset()
    is_done: bool = False

    def may_occur(self, present: set[str]) -> bool:
        """Whether a graph with these ingredients has all that is needed."""
        if not self.is_done and self._is_met(present):
            self._run(present)
        return self._is_met(present)

    def _is_met(self, present: set[str]) -> bool:
        return self.needs is not None and all(is_there(need, present) for need in self.needs)

    def _run(self, present: set[str]) -> None:
        recorder = _Recorder(present)
        try:
            with torch.no_grad(), recorder:
                self.body(*self.arguments)
        except _LackingError:
            self.needs = frozenset(recorder.needs)
            return
        except Exception:  # who derives the definition says what is wrong with it
            recorder.needs = set()
        self.is_done, self.needs = True, frozenset(recorder.needs)
        if recorder.needs and all(f"irframework::{self.op.name}" in whole for _, whole in recorder.needs):
            self.needs = None  # nothing but a call of the op itself


class _LackingError(BaseException):
    """A body needs what a graph lacks; no body may catch it."""


def is_there(need: tuple[str, frozenset[str]], present: set[str]) -> bool:
    """Whether a graph has what is needed, or an IR op that stands for it."""
    name, whole = need
    return name in present or not whole.isdisjoint(present)


def may_occur(ways: Iterable[Way] | None, present: set[str]) -> bool:
    """Whether one way of computing a definition has all that it needs."""
    return ways is None or any(way.may_occur(present) for way in ways)


def ways_of(op: IrOp, bodies: Iterable[Callable[..., Any]]) -> list[Way] | None:
    """Each call that an op's input generator yields, of each body; None where that is not known."""
    if op.input_generator is None:
        return None
    try:
        calls = shown_calls(op)
    except Exception:  # who derives the definition says what is wrong with it
        return None
    found = [body for body in bodies if not (body is op.native and known_by_spelling(op))]
    return [Way(op, body, arguments) for arguments in calls for body in found]


@cache
def _stays(target: Any) -> bool:
    """Whether a torch op is in graphs what it is in a body."""
    from torch._inductor.decomposition import select_decomp_table

    name = target._schema.name
    if name in _SPELT_OTHERWISE or target in select_decomp_table():
        return False
    if target._schema.is_mutable:  # graphs hold its functional form
        return False
    return torch.Tag.pointwise in target.tags or name in ROW_REDUCTIONS


class _Recorder(TorchDispatchMode):
    """Writes down what a body calls, until it calls what is not there."""

    def __init__(self, present: set[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.present = present
        self.needs: set[tuple[str, frozenset[str]]] = set()
        self.inside: frozenset[str] = frozenset()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op_of(func)
        if found is not None:
            op = found[0]
            name = f"irframework::{op.name}"
            if not op.fuse:  # one op in graphs, too
                self._note(name)
                return func(*args, **(kwargs or {}))
            outside = self.inside
            self.inside = outside | {name}
            try:
                with self:
                    return op.native(*op.bind(args, kwargs or {}))
            finally:
                self.inside = outside
        result = func(*args, **(kwargs or {}))
        if _stays(func):
            self._note(func._schema.name)
        for each in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(each, torch.Tensor) and each.dtype in _CODES and not _is_code(args):
                self._note(str(each.dtype))
        return result

    def _note(self, name: str) -> None:
        need = (name, self.inside)
        self.needs.add(need)
        if not is_there(need, self.present):
            raise _LackingError(name)


def _is_code(args: Any) -> bool:
    return any(isinstance(each, torch.Tensor) and each.dtype in _CODES for each in args)
