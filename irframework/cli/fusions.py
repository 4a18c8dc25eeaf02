"""What was fused in compiled graphs and what was not, as rows; and `irframework explain --fusions MODEL`.

Owns how fusions and misses are counted together and shown. The fusions are the compiler's, told by its reports.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from irframework import fusion_state

if TYPE_CHECKING:
    from irframework.compiler.report import Report


@dataclass(frozen=True, slots=True)
class MissRow:
    """Misses of one op for one reason.

    Attributes:
        op: The fused op.
        count: How often.
        reason: Why not.
        node: One of the nodes.
        line: The source line that made it; empty if not known.
    """

    op: str
    count: int
    reason: str
    node: str
    line: str


@dataclass(frozen=True, slots=True)
class Fusions:
    """What happened in some graphs.

    Attributes:
        graphs: How many.
        fused: {op: how often}, the most frequent first.
        missed: Those that nearly were.
        from_cache: Whether a graph came from a cache, so that it is told what was decided when it was compiled.
    """

    graphs: int
    fused: dict[str, int]
    missed: tuple[MissRow, ...]
    from_cache: bool

    @classmethod
    def of(cls, reports: Iterable[Report | None]) -> Fusions:
        """Count what reports say."""
        from irframework.compiler.report import by_reason

        counts: Counter[str] = Counter()
        found = [report for report in reports if report is not None]
        for report in found:
            counts.update(report.fusions)
        misses = by_reason(miss for report in found for miss in report.missed_fusions)
        rows = [MissRow(op, len(each), why, each[0].node, each[0].line) for (op, why), each in misses]
        fused = dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))
        return cls(len(found), fused, tuple(rows), any(report.from_cache for report in found))

    def to_dict(self) -> dict[str, Any]:
        """The counts as plain JSON types."""
        missed = [asdict(row) for row in self.missed]
        return {"graphs": self.graphs, "fused": self.fused, "missed": missed, "from_cache": self.from_cache}


def state_text(mode: str) -> str:
    """What is in force, in a few words, for a program in a mode (`eager` or `compile`)."""
    state = fusion_state.current()
    return f"enabled, not run (eager): {state}" if state.on and mode == "eager" else str(state)


def document(mode: str, fusions: Fusions | None) -> dict[str, Any]:
    """The state and the counts as plain JSON types; `fusions` is None where nothing was compiled."""
    counts = (fusions or Fusions(0, {}, (), from_cache=False)).to_dict()
    return {"state": state_text(mode), **fusion_state.current().to_dict(), **counts}


def print_fusions(mode: str, fusions: Fusions | None) -> None:
    """Print the state, what was fused, and what was not and why."""
    from irframework.cli.tables import print_table

    print(f"\nFusion: {state_text(mode)}")
    if fusions is None or not fusion_state.current().on:
        return
    if fusions.fused:
        print_table("Parts of the graph that became one op", ("op", "how often"), list(fusions.fused.items()))
    else:
        print("No part of the graph became a fused op.")
    if fusions.missed:
        rows = [(row.op, row.count, row.reason, f"{row.node} {row.line}".strip()) for row in fusions.missed]
        print_table("What nearly did", ("op", "how often", "why not", "for example"), rows)


def explain_fusions(arguments: argparse.Namespace) -> int:
    """Compile a model's forward for a few tokens, and show what is fused in it; 0."""
    from irframework.cli.dtype_names import dtype_called
    from irframework.cli.tables import progress
    from irframework.integrations.model_source import load_model

    with progress(f"loading {arguments.fusions}"):
        loaded = load_model(arguments.fusions, dtype=dtype_called(arguments.dtype), device=arguments.device, seed=0)
    if arguments.patched:
        from irframework.integrations.transformers import apply

        apply(loaded.model)
    ids = loaded.encode("What is fused?")
    with progress("compiling the forward"):
        fusions = Fusions.of(_reports_of(lambda: loaded.model(input_ids=ids, use_cache=False)))
    call = {"model": loaded.name, "dtype": arguments.dtype, "device": str(loaded.device), "patched": arguments.patched}
    if arguments.json:
        print(json.dumps({**call, **document("compile", fusions)}, indent=2))
    else:
        print(f"{loaded.name}, {arguments.dtype}, {loaded.device}: {ids.shape[1]} tokens, {fusions.graphs} graphs")
        print_fusions("compile", fusions)
    return 0


def _reports_of(call: Callable[[], Any]) -> list[Report]:
    """The reports of the graphs of a call, which are lowered and run, and not handed to Inductor's code generation."""
    import torch

    from irframework.compiler.report import recent_reports

    before = {id(report) for report in recent_reports()}
    torch._dynamo.reset()
    with torch.inference_mode():
        torch.compile(call, backend=_lowered, dynamic=False)()
    torch._dynamo.reset()
    return [report for report in recent_reports() if id(report) not in before]


def _lowered(module: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    from irframework.compiler import lower, run_pre_grad_stage

    def compiler(inference: bool) -> Callable[..., Any]:
        return lambda graph, given: make_boxed_func(lower(graph, given, inference=inference).forward)

    run_pre_grad_stage(module)
    backend = aot_autograd(
        fw_compiler=compiler(False),
        bw_compiler=compiler(False),
        inference_compiler=compiler(True),
        decompositions=select_decomp_table(),
        keep_inference_input_mutations=True,
    )
    compiled: Callable[..., Any] = backend(module, inputs)
    return compiled
