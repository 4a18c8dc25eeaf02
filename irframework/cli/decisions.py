"""Which kernel ran each op: the rows of the commands' decision tables.

Owns how decisions are gathered (from an eager model by watching its torch ops once, from a compiled one by its report)
and how equal ones are counted together. The decisions themselves are the core's.

Private torch API used here (read in 2.13): `torch.utils._python_dispatch.TorchDispatchMode`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from irframework.compiler.report import Report
from irframework.decision import Candidate, Decision
from irframework.dispatch import resolve, why_never
from irframework.priority import entries_for
from irframework.registry import find_op
from irframework.torch_ops import op_of


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """Equal decisions of one op, counted.

    Attributes:
        op: the op's name.
        count: calls (eager) or nodes (compiled).
        provider: whose implementation runs.
        others: providers that were asked before or after it, each with why it does not run.
    """

    op: str
    count: int
    provider: str
    others: tuple[tuple[str, str], ...]

    def to_dict(self) -> dict[str, Any]:
        """The row as plain JSON types."""
        others = [{"provider": provider, "reason": reason} for provider, reason in self.others]
        return {"op": self.op, "count": self.count, "provider": self.provider, "others": others}


def cells_and_notes(rows: Iterable[DecisionRow]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Rows of a table (op, count, provider, why not the others), and notes below it.

    A reason that several rows give (a library that is not on this machine) stands once, in a note with a number.
    """
    rows = list(rows)
    told = Counter(other for row in rows for other in row.others)
    numbers = {other: number for number, other in enumerate((o for o, n in told.items() if n > 1), start=1)}
    cells: list[tuple[str, ...]] = []
    for row in rows:
        why = [f"{p} [{numbers[p, r]}]" if (p, r) in numbers else f"{p}: {r}" for p, r in row.others]
        cells.append((row.op, str(row.count), row.provider, ", ".join(why) or "it is first in the list"))
    return cells, [f"[{number}] {provider}: {reason}" for (provider, reason), number in numbers.items()]


class CallRecorder(TorchDispatchMode):
    """Counts the IR ops that are called while it is active, with the decision for each.

    An active dispatch mode makes every op go through its torch op, so no op and no model has to know of this.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.decisions: list[Decision] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        found = op_of(func)
        if found is not None:
            op = found[0]
            self.decisions.append(resolve(op, op.bind(args, kwargs), stop_at_first=False))
        return func(*args, **(kwargs or {}))


def counted(decisions: Iterable[Decision]) -> list[DecisionRow]:
    """One row per op, provider and set of reasons, in order of the op's name."""
    rows = Counter((decision.op, decision.provider, _others(decision)) for decision in decisions)
    return [DecisionRow(op, count, provider, others) for (op, provider, others), count in sorted(rows.items())]


def rows_of_report(report: Report | None, device: str) -> list[DecisionRow]:
    """Rows for a graph that was compiled for a device type; its nodes are counted."""
    if report is None:
        return []
    rows = counted(_with_the_rest(decision, device) for decision in report.decisions.values())
    lowered = {row.op for row in rows}
    # What a cached artefact chose is known by its report's selection, not by decisions of this process.
    for op, nodes in sorted(report.selected_impls.items()):
        if op not in lowered:
            rows += [DecisionRow(op, n, provider, ()) for provider, n in sorted(Counter(nodes.values()).items())]
    return rows


def _with_the_rest(decision: Decision, device: str) -> Decision:
    """Add the candidates behind the chosen one: lowering stops there, and never asks their predicates."""
    op = find_op(decision.op)
    looked_at = {candidate.provider for candidate in decision.candidates}
    rest = tuple(
        Candidate(
            entry.provider,
            False,
            why_never(op.registered[entry.provider], device) or f"{decision.provider} comes first",
            entry.origin,
        )
        for entry in entries_for(op, device, "inductor")
        if entry.provider not in looked_at
    )
    return replace(decision, candidates=decision.candidates + rest)


def _others(decision: Decision) -> tuple[tuple[str, str], ...]:
    return tuple((c.provider, _reason(c)) for c in decision.candidates if c.provider != decision.provider)


def _reason(candidate: Candidate) -> str:
    return candidate.reason or ("not needed" if candidate.accepted else "no reason given")
