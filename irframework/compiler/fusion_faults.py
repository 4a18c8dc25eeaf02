"""Why the body of a fused op cannot be a pattern, in the words and with the line of whoever wrote it.

Owns the three ways in which a body can be wrong (it overwrites something, it depends on data, it cannot be traced), and
the comparison of two ops' definitions. Does not decide what becomes of such an op (`fusable_ops.py`).

Private torch APIs, read in 2.11 and 2.13: `FakeTensorMode` and its `DataDependentOutputException` and
`DynamicOutputShapeException`, `GuardOnDataDependentSymNode`, `TorchDispatchMode`, `torch._C._cdata` of storages.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.utils._python_dispatch import TorchDispatchMode

from irframework.call_site import is_users, line_text
from irframework.compiler.call_arguments import Number, Value, constant
from irframework.compiler.definitions import fake_mode_of, fresh
from irframework.compiler.skeletons import Skeleton, Unfit, values_of_definition
from irframework.compiler.tracing import trace
from irframework.compiler.values import COMMUTATIVE, ValueTable
from irframework.conditions import Supports
from irframework.errors import DuplicateFusionError, InvalidFusionError

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp

_DEPENDS_ON_DATA = (DataDependentOutputException, DynamicOutputShapeException, GuardOnDataDependentSymNode)
_ADVICE = "A fused op's body is its pattern: a function of tensors that only calls torch ops and IR ops."


def fault_of(op: IrOp, body: IrOpImpl | None, unfit: Sequence[Unfit], *, usable: bool) -> InvalidFusionError | None:
    """What is wrong with a body that gave no skeleton for some calls.

    Args:
        op: The op.
        body: One of its spellings; None for native.
        unfit: The calls for which it gave none, each with what it raised on fake tensors, if that.
        usable: Whether it gave one for another call. Then only overwriting is a fault: what depends on data for some
            arguments is not looked for there.
    """
    impl = op.registered["native"] if body is None else body
    errors: list[InvalidFusionError] = []
    for call in unfit:
        line = _line_that_writes(impl, call.arguments)
        if line is not None:
            return _fault(op, impl, "overwrites a tensor that it was given", line, "Compute a new one instead.")
        if not usable:
            errors += _errors(op, impl, call)
    return errors[0] if errors else None


def _errors(op: IrOp, impl: IrOpImpl, call: Unfit) -> Iterator[InvalidFusionError]:
    error = call.error
    guessed = error is not None
    if error is None:
        with suppress(Exception):
            impl.apply(call.arguments)
            error = _error_of_trace(impl, call.arguments)
        if error is None:
            error = _error_of(impl, call.arguments)
    if error is None:
        return
    depends = isinstance(error, _DEPENDS_ON_DATA)
    if depends:
        what = "depends on the values of its tensors"
        advice = "A value that a body reads (.item(), nonzero, `if` on a tensor) is not known when a graph is compiled."
    elif guessed:
        return  # the guess need not be a call of this op
    else:
        text = str(error).splitlines()
        what = f"cannot be traced: {type(error).__name__}{': ' + text[0] if text else ''}"
        advice = _ADVICE
    yield _fault(op, impl, what, line_of(error, impl), advice)


def _error_of(impl: IrOpImpl, arguments: Sequence[Any]) -> Exception | None:
    try:
        impl.apply(tuple(arguments))
    except Exception as error:
        return error
    return None


def _error_of_trace(impl: IrOpImpl, arguments: Sequence[Any]) -> Exception | None:
    mode = fake_mode_of(arguments)
    if mode is None:
        return None
    own = [fresh(argument, mode) for argument in arguments]
    try:
        trace(lambda *given: impl.apply(given), own, mode)
    except Exception as error:
        return error
    return None


def _fault(op: IrOp, impl: IrOpImpl, what: str, line: str, advice: str) -> InvalidFusionError:
    which = "its body" if impl.provider == "native" else f"its spelling ({impl.source})"
    return InvalidFusionError(
        f"Op {op.name!r} ({op.source}) is declared with fuse, and {which} {what}.\n  at {line or impl.source}\n"
        f"{advice} Declare the op without fuse if it cannot be helped."
    )


def line_of(error: BaseException, impl: IrOpImpl) -> str:
    """The line of a body in which it failed: the innermost one of its own file, else of the user's code."""
    file = _file_of(impl)
    frames = list(traceback.walk_tb(error.__traceback__))
    for wanted in (lambda name: name == file, is_users):
        found = [(frame, line) for frame, line in frames if wanted(frame.f_code.co_filename)]
        if found:
            frame, line = found[-1]
            return line_text(frame.f_code, line, frame.f_globals)
    return ""


def _file_of(impl: IrOpImpl) -> str:
    code = getattr(impl.fn, "__code__", None)
    return code.co_filename if code is not None else ""


class _Writes(TorchDispatchMode):
    """Finds the first line that writes to one of some storages."""

    def __init__(self, storages: frozenset[int], file: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages, self.file = storages, file
        self.line: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)
        for index, parameter in enumerate(() if schema is None else schema.arguments):
            if self.line is None and parameter.alias_info is not None and parameter.alias_info.is_write:
                value = (kwargs or {}).get(parameter.name, args[index] if index < len(args) else None)
                values = value if isinstance(value, (list, tuple)) else (value,)
                if any(_storage(each) in self.storages for each in values):
                    self.line = self._here()
        return func(*args, **(kwargs or {}))

    def _here(self) -> str:
        frame: Any = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename == self.file:
                return line_text(frame.f_code, frame.f_lineno, frame.f_globals)
            frame = frame.f_back
        return ""


def _storage(value: object) -> int | None:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def _line_that_writes(impl: IrOpImpl, arguments: Sequence[Any]) -> str | None:
    """The line of a body that overwrites an argument; None if there is none, or it fails before."""
    mode = fake_mode_of(arguments)
    if mode is None:
        return None
    own = [fresh(argument, mode) for argument in arguments]
    tensors = [each for item in own for each in (item if isinstance(item, list) else [item])]
    storages = frozenset(number for each in tensors if (number := _storage(each)) is not None)
    watch = _Writes(storages, _file_of(impl))
    with suppress(Exception), torch.no_grad(), watch:
        impl.apply(tuple(own))
    return watch.line


# --- two ops with one definition -----------------------------------------------------------------------------------


def same_pattern(skeletons: Sequence[Skeleton], others: Sequence[Skeleton]) -> DuplicateFusionError | None:
    """The error for two ops all of whose definitions are equal, so that which one is found would be chance.

    Ops whose kernels take other dtypes may share a definition: whoever takes the call is asked.
    """
    if not skeletons or {each.size for each in skeletons} != {each.size for each in others}:
        return None
    one, other = skeletons[0].op, others[0].op
    if {_pattern(each) for each in skeletons} != {_pattern(each) for each in others}:
        return None
    if not all(any(_same_function(each, rest) for rest in others) for each in skeletons):
        return None
    if _dtypes(one) != _dtypes(other):
        return None
    first, second = sorted((one, other), key=lambda op: op.name)
    return DuplicateFusionError(
        f"Ops {first.name!r} ({first.source}) and {second.name!r} ({second.source}) are declared with fuse, and their "
        "bodies compute the same: which of them a graph gets would be chance. Register the kernels of one as "
        "implementations of the other, or let them take different dtypes, by fuse=ir.supports(dtype=...) or by the "
        "supports_args of their implementations."
    )


def _pattern(skeleton: Skeleton) -> str:
    """A definition as text in which parameters have no names."""
    return _Text(skeleton.table, frozenset(skeleton.marks)).of(
        [skeleton.outputs[skeleton.root_index], *skeleton.outputs]
    )


def _tensors_as_met(skeleton: Skeleton) -> list[str]:
    """The tensor parameters in the order in which the pattern meets them: their own order tells nothing."""
    text = _Text(skeleton.table, frozenset(skeleton.marks))
    text.of([skeleton.outputs[skeleton.root_index], *skeleton.outputs])
    return [skeleton.tensors[core] for core in text.numbers if core in skeleton.tensors]


@dataclass(slots=True)
class _Text:
    """Writes values so that equal definitions are written alike, however their parameters are called.

    Attributes:
        table: The values.
        marks: The numbers that stand for parameters.
    """

    table: ValueTable
    marks: frozenset[Any]
    hashes: dict[int, int] = field(default_factory=dict)
    numbers: dict[Any, int] = field(default_factory=dict)

    def of(self, items: Iterable[Any]) -> str:
        """What computes some values; each core is written once."""
        return " ".join(map(self._write, items))

    def _write(self, item: Any) -> str:
        if isinstance(item, Number):
            mark = constant(item)
            return f"n{self._number(('number', mark))}" if mark in self.marks else repr(item.value)
        if not isinstance(item, Value):
            return f"({','.join(map(self._write, item))})" if isinstance(item, tuple) else repr(item)
        core = self.table.cores[item.core]
        if core.target == "leaf" or item.core in self.numbers:
            return f"v{self._number(item.core)}"
        args = list(core.args)
        if core.target in COMMUTATIVE and len(args) >= 2 and all(isinstance(arg, Value) for arg in args[:2]):
            args[:2] = sorted(args[:2], key=self._hash)
        text = f"{core.target}({','.join(map(self._write, args))}){core.dtype}"
        return f"v{self._number(item.core)}={text}"

    def _number(self, key: Any) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def _hash(self, item: Any) -> int:
        """The same for values that differ in their parameters only."""
        if isinstance(item, Number):
            mark = constant(item)
            return hash("number" if mark in self.marks else repr(item.value))
        if not isinstance(item, Value):
            return hash(tuple(map(self._hash, item))) if isinstance(item, tuple) else hash(repr(item))
        if item.core not in self.hashes:
            core = self.table.cores[item.core]
            below = () if core.target == "leaf" else tuple(map(self._hash, core.args))
            self.hashes[item.core] = hash((core.target, str(core.dtype), below))
        return self.hashes[item.core]


def _same_function(one: Skeleton, other: Skeleton) -> bool:
    """Whether two definitions are equal in all dtypes: in float32 conversions are not seen."""
    return _pattern(one) == _pattern(other) and all(
        _as_dtype(one, dtype, count) == _as_dtype(other, dtype, count)
        for dtype in (torch.bfloat16, torch.float16)
        for count in (1, None)
    )


def _as_dtype(skeleton: Skeleton, dtype: torch.dtype, count: int | None) -> str:
    """The pattern where the tensors that it meets first, or all, have another dtype; empty where that is no call."""
    op = skeleton.op
    changed = _tensors_as_met(skeleton)[:count]
    arguments = [
        value.to(dtype) if name in changed and getattr(value, "dtype", None) is torch.float32 else value
        for name, value in zip(op.signature.parameters, skeleton.arguments, strict=True)
    ]
    found = values_of_definition(op, arguments, skeleton.body)
    if found is None:
        return ""
    table, flat, _ = found
    return _Text(table, frozenset(skeleton.marks)).of([flat[skeleton.root_index], *flat])


def _dtypes(op: IrOp) -> Any:
    """What an op says about dtypes: its domain, and of each provider what it takes."""
    domain = op.fuse.options.get("dtype") if isinstance(op.fuse, Supports) else None
    places = {name: f"p{index}" for index, name in enumerate(op.signature.parameters)}
    taken = {
        tuple(_placed(check.test, places) for check in impl.checks if ".dtype is torch." in check.test)
        for provider, impl in op.registered.items()
        if provider != "native"
    }
    return (str(domain), sorted(taken - {()}))


def _placed(test: str, places: dict[str, str]) -> str:
    return re.sub(r"\b(\w+)(?=\.dtype)", lambda match: places.get(match[1], match[1]), test)
