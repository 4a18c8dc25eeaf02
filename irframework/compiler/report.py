"""What one compile did: which kernel runs where, what was fused, donated, copied, and how long the passes took.

Owns the report's data, its text, and which report is the last one. Does not run passes.

Private torch API, read in 2.11 and 2.13: `torch._guards.TracingContext` and `CompileContext.current_compile_id`.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from irframework.call_site import site_in_trace

if TYPE_CHECKING:
    from irframework.compiler.clones import KeptCopy
    from irframework.decision import Decision

logger = logging.getLogger(__name__)

RAISED = "irframework_raised"  # marks the node of an op that fusion put into a graph


@dataclass(frozen=True, slots=True)
class Donation:
    """One tensor that a caller gave away.

    Attributes:
        op: The op it was given to.
        argument: The op's parameter.
        node: The value, by its name in the graph as the user wrote it.
        kind: `input` (may be overwritten), `intermediate` (the graph's own memory anyway) or `kept` (see `reason`).
        reason: Why a graph input is not overwritten; None otherwise.
    """

    op: str
    argument: str
    node: str
    kind: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class MissedFusion:
    """A place where a fused op nearly fitted.

    Attributes:
        op: The fused op.
        node: The node that would have been its output.
        reason: Why it is not.
        line: `FILE:LINE, in NAME: CODE` of the user's line that made the node; empty if not known.
    """

    op: str
    node: str
    reason: str
    line: str = ""


def by_reason(misses: Iterable[MissedFusion]) -> list[tuple[tuple[str, str], list[MissedFusion]]]:
    """Misses of each op for each reason, `((op, reason), misses)`: the most frequent first, then by name."""
    found: dict[tuple[str, str], list[MissedFusion]] = {}
    for miss in misses:
        found.setdefault((miss.op, miss.reason), []).append(miss)
    return sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))


@dataclass(frozen=True, slots=True)
class FailedPass:
    """A pass that failed; the module has the graph that it had before.

    Attributes:
        name: The pass.
        where: Op, node and source line that it was at, as far as it said so; else empty.
        reason: What went wrong.
        file: Where the graph before the pass can be read; None where nothing could be written.
    """

    name: str
    where: str
    reason: str
    file: str | None


@dataclass(slots=True)
class Report:
    """The report of one compiled graph (forward and backward of one training graph share one).

    Attributes:
        selected_impls: {op: {node: provider}}.
        decisions: {node: Decision}.
        fusions: {op: how often}.
        missed_fusions: Near misses with their reasons.
        donated: What callers gave away, as far as the pre-grad pass saw it.
        clones_inserted: Copies that lowering made so that in-place kernels have something to overwrite.
        clones_removed: How many of them were proved needless.
        kept_copies: The others, each with the reader that keeps it.
        graphs: {stage: text}, each stage that changed the graph, in order.
        timings: {stage: seconds}.
        failed: The pass that failed, if one did.
        visiting: The node that the running pass is at.
        from_cache: True if the compiled code came from a cache, so that no pass ran: the rest is what was kept when
            they ran (not the timings), or empty if nothing was kept.
        kept_as: The name under which the report is kept for a compile that comes from the cache; None if that
            was not asked yet, empty if it is not kept.
        quiet: True while all that is known of the graph is that it holds no IR op: nobody is shown the report yet.
    """

    selected_impls: dict[str, dict[str, str]] = field(default_factory=dict)
    decisions: dict[str, Decision] = field(default_factory=dict)
    fusions: dict[str, int] = field(default_factory=dict)
    missed_fusions: list[MissedFusion] = field(default_factory=list)
    donated: list[Donation] = field(default_factory=list)
    clones_inserted: int = 0
    clones_removed: int = 0
    kept_copies: list[KeptCopy] = field(default_factory=list)
    graphs: dict[str, str] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    failed: FailedPass | None = None
    visiting: Node | None = None
    from_cache: bool = False
    kept_as: str | None = None
    quiet: bool = False

    def add_selected(self, selected: dict[str, dict[str, str]]) -> None:
        """Add what one lowering pass chose."""
        for op, nodes in selected.items():
            self.selected_impls.setdefault(op, {}).update(nodes)

    def add_decision(self, node: str, decision: Decision) -> str:
        """Keep a decision and return its key: the node's name, numbered if another graph of the compile has it too."""
        number, key = 1, node
        while key in self.decisions:
            number += 1
            key = f"{node} #{number}"
        self.decisions[key] = decision
        return key

    def take_back(self, miss: MissedFusion) -> None:
        """What was fused could not be lowered: it counts as missed."""
        self.missed_fusions.append(miss)
        self.fusions[miss.op] -= 1
        if not self.fusions[miss.op]:
            del self.fusions[miss.op]

    def add_graph(self, stage: str, graph: Graph) -> None:
        """Keep the graph's text as it is after a stage; a second graph of the compile gets a number."""
        number, key = 1, stage
        while key in self.graphs:
            number += 1
            key = f"{stage} #{number}"
        self.graphs[key] = graph_text(graph)

    def add_time(self, stage: str, seconds: float) -> None:
        """Add to the time of a stage."""
        self.timings[stage] = self.timings.get(stage, 0.0) + seconds

    def summary(self) -> str:
        """One line: ops with their providers, fusions, copies, milliseconds."""
        if self.from_cache:
            kept = f"when they ran: {'; '.join(self._counts())}" if self.decisions else "no report was kept with it"
            return f"compiled from cache; passes not run; {kept}"
        if self.failed is not None:
            return f"pass {self.failed.name} failed{' at ' if self.failed.where else ''}{self.failed.where}"
        return "; ".join([*self._counts(), f"{1e3 * sum(self.timings.values()):.1f} ms"])

    def _counts(self) -> list[str]:
        ops = []
        for op, nodes in sorted(self.selected_impls.items()):
            counts = Counter(nodes.values())
            ops.append(f"{op} " + "+".join(f"{count}x{provider}" for provider, count in sorted(counts.items())))
        fused = ", ".join(f"{count}x{op}" for op, count in sorted(self.fusions.items()))
        return [
            f"lowered {', '.join(ops) or 'nothing'}",
            f"fused {fused or 'nothing'}",
            f"copies {self.clones_inserted} inserted, {self.clones_removed} removed",
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data, without the graphs."""
        return {
            "selected_impls": self.selected_impls,
            "decisions": {node: decision.to_dict() for node, decision in self.decisions.items()},
            "fusions": self.fusions,
            "missed_fusions": [asdict(miss) for miss in self.missed_fusions],
            "donated": [{"op": d.op, "argument": d.argument, "kind": d.kind, "reason": d.reason} for d in self.donated],
            "clones_inserted": self.clones_inserted,
            "clones_removed": self.clones_removed,
            "kept_copies": [{"node": k.node, "op": k.op, "reason": k.reason} for k in self.kept_copies],
            "timings": self.timings,
            "failed": None if self.failed is None else asdict(self.failed),
            "from_cache": self.from_cache,
        }

    def __str__(self) -> str:
        """The summary, and below it what was not fused: each op and reason once, with one of its places."""
        lines = [self.summary()]
        for (op, reason), misses in by_reason(self.missed_fusions):
            more = f" and at {len(misses) - 1} more" if len(misses) > 1 else ""
            where = f" ({misses[0].line})" if misses[0].line else ""
            lines.append(f"  not fused: {op} at {misses[0].node}{where}{more}: {reason}")
        return "\n".join(lines)


_lock = threading.Lock()
_by_context: weakref.WeakKeyDictionary[Any, Report] = weakref.WeakKeyDictionary()
_outside_dynamo: ContextVar[Report | None] = ContextVar("irframework_report", default=None)
_recent: deque[Report] = deque(maxlen=64)
_last: Report | None = None


def last_report() -> Report | None:
    """The report of the most recent compile that met an IR op, in any thread; None before the first one."""
    return _last


def recent_reports() -> list[Report]:
    """The reports of the latest compiles, oldest first: a model with graph breaks has several."""
    return list(_recent)


def current_report(*, create: bool = True, quiet: bool = False) -> Report | None:
    """The report of the compile that runs now: passes of one Dynamo compile share one.

    Args:
        create: Make a report if this compile has none yet.
        quiet: Do not show it before somebody asks for it who does not say so.
    """
    context = torch._guards.TracingContext.try_get()
    with _lock:
        report = _by_context.get(context) if context is not None else _outside_dynamo.get()
        if report is None and create:
            report = Report(quiet=True)
            if context is not None:
                _by_context[context] = report
        if report is not None and create and not quiet:
            _show(report)
        return report


@contextmanager
def one_report() -> Iterator[None]:
    """Let all passes inside share a report where no Dynamo compile makes them do so."""
    token = _outside_dynamo.set(Report(quiet=True))
    try:
        yield
    finally:
        _outside_dynamo.reset(token)


def _show(report: Report) -> None:
    global _last
    if report.quiet:
        report.quiet = False
        _recent.append(report)
    _last = report


def close_compile(context: object, *, cached: bool) -> None:
    """Finish the report when Dynamo has finished a compile that our passes were there for.

    Args:
        context: Dynamo's tracing context of the compile.
        cached: Whether compiled code was taken from a cache meanwhile.
    """
    with _lock:
        report = _by_context.get(context)
        passes_ran = report is not None and bool(report.timings.keys() - {"functionalize"})
        if not passes_ran and not cached:
            return  # a backend that runs IR ops as they are, or nothing to do
        if report is None:
            report = _by_context[context] = Report()
            _recent.append(report)
    report.from_cache = not passes_ran
    if report.from_cache:
        from irframework.compiler import kept_reports

        if not kept_reports.restore(report) and report.quiet:
            return  # plain torch, and nothing was done to it
    with _lock:
        _show(report)
    logger.info("%s", report.summary())


def graph_number() -> str:
    """Dynamo's number of the graph that is compiled now, as `TORCH_LOGS` shows it; empty outside of a compile."""
    number = torch._guards.CompileContext.current_compile_id()
    return "" if number is None else str(number)


def location(node: Node) -> str:
    """The source line that made a node, as the end of a sentence: ` (at FILE:LINE: CODE)`, or nothing."""
    line = source_line(node)
    return f" (at {line})" if line else ""


def source_line(node: Node) -> str:
    """`FILE:LINE, in NAME: CODE` of the innermost frame of the user's code that made a node; empty if not known."""
    return site_in_trace(node.meta.get("stack_trace") or node.stack_trace or "")


def graph_text(graph: Graph) -> str:
    """The graph as one assignment a line, with dtype, shape and strides."""
    return "\n".join(_node_text(node) for node in graph.nodes)


_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int64: "i64",
    torch.int32: "i32", torch.int8: "i8", torch.uint8: "u8", torch.bool: "b8",
}  # fmt: skip


def type_text(value: object) -> str:
    """Dtype, shape and strides of a value, as in `graph_text`; the type's name of what is no tensor."""
    if isinstance(value, torch.Tensor):
        dtype = _DTYPES.get(value.dtype, str(value.dtype).removeprefix("torch."))
        shape = ", ".join(map(str, value.shape))
        if value.layout is not torch.strided:
            return f"{dtype}[{shape}]"
        return f"{dtype}[{shape}][{', '.join(map(str, value.stride()))}]"
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(type_text, value))})"
    return type(value).__name__ if value is not None else ""


def _node_text(node: Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    kind = type_text(node.meta.get("val", node.meta.get("example_value")))
    left = f"{node.name}: {kind}" if kind else node.name
    if node.op == "placeholder":
        return f"{left} = input"
    if node.op == "get_attr":
        return f"{left} = self.{node.target}"
    arguments = [str(argument) for argument in node.args] + [f"{key}={value}" for key, value in node.kwargs.items()]
    name = getattr(node.target, "__name__", str(node.target))
    if isinstance(node.target, torch._ops.OpOverload):
        name = str(node.target)
    return f"{left} = {name}({', '.join(arguments)})"
