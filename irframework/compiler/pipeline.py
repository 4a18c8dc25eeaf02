"""The order of the passes, their cache keys and their timings.

Owns the stages and the pass objects that Inductor calls. Does not own a pass: each has a module of its own.

Private torch APIs, read in 2.11 and 2.13: `_inductor.custom_graph_pass.CustomGraphPass` and, where it exists,
`CustomInferenceAwareGraphPass`; `GraphTransformObserver`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch._inductor import custom_graph_pass
from torch.fx import Graph, GraphModule
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

import irframework

from irframework.compiler.clones import COPY, materialize, remove_copies
from irframework.compiler.functionalize import functionalize
from irframework.compiler.lowering import Lowering
from irframework.compiler.report import Report, current_report
from irframework.compiler.verify import verify
from irframework.errors import IrError, VerifyError
from irframework.plugins import compiler_passes
from irframework.priority import fingerprint, option_scope
from irframework.settings import settings
from irframework.torch_ops import NAMESPACE

STAGES = ("pre_grad", "post_grad_pre", "post_grad_post")

_CustomGraphPass: Any = custom_graph_pass.CustomGraphPass
_InferenceAware: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", _CustomGraphPass)


@dataclass(frozen=True, slots=True)
class Context:
    """What a pass may know beside the graph.

    Attributes:
        report: Where it says what it did.
        inference: Whether the graph is known to be for inference.
    """

    report: Report
    inference: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of a stage: its name (as in `IRFRAMEWORK_DISABLE_PASSES`), what it does, and its part of the key."""

    name: str
    run: Callable[[Graph, Context], None]
    key: str | None


@cache
def _source_digest() -> str:
    """Digest of the compiler's own source and the framework's version."""
    digest = hashlib.sha256(irframework.__version__.encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _lower(lowering: Lowering) -> Step:
    return Step(lowering.name, lambda graph, context: lowering(graph, context.report), "1")


def _foreign(stage: str) -> list[Step]:
    """Passes of plugins: callables that take a graph, with a `uuid()` if their result may be cached."""
    steps = []
    for plugin, each in compiler_passes(stage):
        name = getattr(each, "name", None) or getattr(each, "__name__", type(each).__name__)
        identity = each.uuid() if hasattr(each, "uuid") else None
        steps.append(Step(f"{plugin}.{name}", _call_with_graph(each), None if identity is None else repr(identity)))
    return steps


def _call_with_graph(graph_pass: Callable[[Graph], object]) -> Callable[[Graph, Context], None]:
    def run(graph: Graph, context: Context) -> None:
        graph_pass(graph)

    return run


def steps_of(stage: str, lowering: Lowering | None = None) -> list[Step]:
    """The passes of a stage in the order in which they run, without those that are switched off.

    Fusion passes have their place at the head of `post_grad_pre`: IR ops are whole there, and nothing is lowered yet.
    """
    if stage == "pre_grad":
        steps = _foreign(stage)
    elif stage == "post_grad_pre":
        steps = [*_foreign(stage), _lower(lowering or Lowering(inplace=False))]
    else:
        steps = [
            *_foreign(stage),
            _lower(lowering or Lowering(inplace=True)),
            Step("materialize", lambda graph, context: materialize(graph, context.report), "1"),
            Step("remove_copies", lambda graph, context: remove_copies(graph, context.report, context.inference), "1"),
            Step("verify", lambda graph, context: verify(graph, context.report), "1"),
        ]
    disabled = settings().disable_passes
    steps = [step for step in steps if step.name not in disabled]
    if {"lower_functional", "lower_inplace"} & set(disabled):  # what is left on purpose is no fault
        steps = [step for step in steps if step.name != "verify"]
    return steps


def _key(steps: Sequence[Step]) -> str | None:
    if any(step.key is None for step in steps):
        return None
    digest = hashlib.sha256(_source_digest().encode())
    digest.update(repr([(step.name, step.key) for step in steps]).encode())
    digest.update(fingerprint("inductor").encode())
    return digest.hexdigest()


def _run(stage: str, steps: Sequence[Step], graph: Graph, context: Context) -> None:
    module = graph.owning_module
    _keep_text(context.report, f"before {stage}", graph)
    for step in steps:
        began = time.perf_counter()
        if isinstance(module, GraphModule):
            observer = GraphTransformObserver(module, step.name, subsystem="irframework")
            observer.apply_graph_pass(partial(_guarded, step, context))
        else:
            _guarded(step, context, graph)
        context.report.add_time(step.name, time.perf_counter() - began)
    _keep_text(context.report, f"after {stage}", graph)


def _keep_text(report: Report, stage: str, graph: Graph) -> None:
    began = time.perf_counter()
    report.add_graph(stage, graph)
    report.add_time("report", time.perf_counter() - began)


def _guarded(step: Step, context: Context, graph: Graph) -> None:
    try:
        step.run(graph, context)
    except IrError:
        raise
    except Exception as error:
        raise VerifyError(
            f"Compiler pass {step.name!r} failed: {type(error).__name__}: {error}. "
            f"IRFRAMEWORK_DISABLE_PASSES={step.name} switches it off."
        ) from error


def _holds_ir_ops(graph: Graph) -> bool:
    return any(
        node.op == "call_function" and getattr(node.target, "namespace", None) == NAMESPACE for node in graph.nodes
    )


def _concerns_us(graph: Graph) -> bool:
    """Whether a post-grad graph holds IR ops, or what an earlier stage made of them."""
    return _holds_ir_ops(graph) or any(COPY in node.meta for node in graph.nodes)


class PreGradPass(_CustomGraphPass):  # type: ignore[misc]
    """Before autograd: `maybe_inplace` becomes functional, then passes of plugins."""

    def __call__(self, graph: Graph) -> None:
        """Rewrite a graph of torch functions in place."""
        run_pre_grad(graph)

    def uuid(self) -> str | None:
        """The cache key of what runs now; None (no caching) if a plugin's pass has none."""
        return _key(steps_of("pre_grad"))


def run_pre_grad(graph: Graph) -> None:
    """Run the pre-grad stage on one graph; a second run changes nothing."""
    from irframework.compiler import hooks

    foreign = steps_of("pre_grad")
    if _holds_ir_ops(graph) or any(node.op == "get_attr" for node in graph.nodes):
        began = time.perf_counter()
        report = current_report(create=_holds_ir_ops(graph)) or Report()
        functionalize(graph, report, donate_inputs=hooks.donation_is_in_the_key())
        report.add_time("functionalize", time.perf_counter() - began)
    if foreign:
        _run("pre_grad", foreign, graph, Context(current_report() or Report(), inference=False))


class _PostGradPass(_InferenceAware):  # type: ignore[misc]
    """A stage after autograd, for one set of compile options."""

    stage: str

    def __init__(self, option_priority: Mapping[str, Any] | None = None) -> None:
        self.option_priority = dict(option_priority or {})
        self.lowering = Lowering(inplace=self.stage == "post_grad_post")

    @property
    def selected_impls(self) -> dict[str, dict[str, str]]:
        """{op: {node: provider}} of what this pass lowered last."""
        return self.lowering.selected_impls

    def __call__(self, graph: Graph, is_inference: bool = False) -> None:
        """Run the stage on a graph, in place."""
        with option_scope(self.option_priority):
            steps = steps_of(self.stage, self.lowering)
            if _concerns_us(graph) or any(step.key is None for step in steps):
                report = current_report()
                assert report is not None
                _run(self.stage, steps, graph, Context(report, is_inference))

    def uuid(self) -> str | None:
        """The cache key of the very list that runs; None (no caching) if a plugin's pass has none."""
        with option_scope(self.option_priority):
            return _key(steps_of(self.stage, self.lowering))


class PrePass(_PostGradPass):
    """After autograd, before Inductor's own patterns: fusion, plugins' passes, functional implementations."""

    stage = "post_grad_pre"


class PostPass(_PostGradPass):
    """After Inductor's own patterns: in-place implementations, their copies, verification."""

    stage = "post_grad_post"
