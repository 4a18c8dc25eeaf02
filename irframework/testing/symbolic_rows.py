"""Asking a predicate about a number of rows that nobody knows yet, as the compiler does.

Owns arguments whose rows are symbolic: the dimensions that change with the number of rows are, all others are plain
numbers. Does not own noticing a guard (`irframework/symbolic.py`, `dispatch.why_not_now`).

Private torch API used here (read in 2.11 and 2.13): `torch._subclasses.fake_tensor.FakeTensorMode` and, of
`torch.fx.experimental.symbolic_shapes`, `DimDynamic`, `ShapeEnv` and `StatelessSymbolicContext`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from irframework import contract
from irframework.contract import described_call
from irframework.dispatch import why_not_now
from irframework.errors import PredicateGuardError
from irframework.testing.findings import Findings
from irframework.testing.samples import CLOSE, DTYPES, Sample, calls, laid_out

_ROWS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((5, 64), (7, 64), (0, 64), (1, 64), (600, 64)),
    ((5, 6, 64), (7, 11, 64), (0, 6, 64), (1, 1, 64)),
)
_LAYOUTS = (CLOSE, "with rows apart")


def try_symbolic_rows(findings: Findings, device: str) -> None:
    """Ask about calls with symbolic rows; the answer must be that for plain numbers, and leave no guard."""
    impl = findings.impl
    for dtype in DTYPES[:2]:
        for shape, *more in _ROWS:
            others = [dict(calls(impl.op, other, dtype, device)) for other in more]
            for kind, args in calls(impl.op, shape, dtype, device):
                if kind not in others[0]:
                    continue
                for layout in _LAYOUTS:
                    sample = Sample(shape, dtype, kind, layout, False, args)
                    laid = laid_out(impl, sample)
                    call = f"{described_call(impl.op, laid)}, {sample}"
                    _ask(findings, laid, _with_symbolic_rows(laid, others[0][kind]), f"{call}, rows symbolic")
                _ask_in_numbers(findings, args, [each[kind] for each in others if kind in each])


def _ask_in_numbers(findings: Findings, args: tuple[Any, ...], others: list[tuple[Any, ...]]) -> None:
    """A number of rows that is known is not to be looked at, either: a graph compiled for it serves other ones.

    Where another number of rows gives the call other arguments that are no tensors (the length of the longest
    sequence), the answer may differ: torch compiles again for those.
    """
    impl = findings.impl
    first = why_not_now(impl, args)
    for other in others:
        if _without_tensors(other) != _without_tensors(args):
            continue
        findings.tried("predicate_guards")
        answer = why_not_now(impl, other)
        if (answer is None) != (first is None):
            call = described_call(impl.op, other)
            text = f"it says {_said(answer)} for this call, and {_said(first)} for {described_call(impl.op, args)}"
            findings.note(contract.guard(text), "numbers", call)


def _without_tensors(args: tuple[Any, ...]) -> list[Any]:
    return [None if isinstance(arg, (Tensor, list, tuple)) else arg for arg in args]


def _said(reason: str | None) -> str:
    return "yes" if reason is None else f"no ({reason})"


def _ask(findings: Findings, args: tuple[Any, ...], symbolic: tuple[Any, ...], call: str) -> None:
    impl = findings.impl
    findings.tried("predicate_guards")
    try:
        answer = why_not_now(impl, symbolic)
    except PredicateGuardError as error:
        guard = str(error).partition(" added the guard ")[2].partition(";")[0]
        text = f"with symbolic rows it adds the guard {guard}" if guard else str(error).splitlines()[0]
        findings.note(contract.guard(text), "guard", call)
        return
    real = why_not_now(impl, args)
    if (answer is None) != (real is None):
        findings.note(contract.fickle(_said(real), _said(answer), "with symbolic rows"), "symbolic", call)


def _with_symbolic_rows(args: tuple[Any, ...], others: tuple[Any, ...]) -> tuple[Any, ...]:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def fake(value: Tensor, other: Tensor) -> Tensor:
        # DUCK: equal sizes are one symbol, so that comparing rows of two arguments needs no guard.
        rows = [a != b for a, b in zip(value.shape, other.shape, strict=True)]
        sizes: Any = [DimDynamic.DUCK if dynamic else DimDynamic.STATIC for dynamic in rows]
        made = mode.from_tensor(value, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))
        made.is_contiguous()  # adds a guard about strides once; in a graph it was asked before any predicate
        return made

    def fakes(value: Any, other: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(fakes(a, b) for a, b in zip(value, other, strict=True))
        return fake(value, other) if isinstance(value, Tensor) else value

    with torch.no_grad():
        return tuple(fakes(a, b) for a, b in zip(args, others, strict=True))
