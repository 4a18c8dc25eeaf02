"""The order of the passes, their cache keys and their timings.

Owns the stages and the pass objects that Inductor calls. Does not own a pass: each has a module of its own.

Private torch APIs, read in 2.11 and 2.13: `_inductor.custom_graph_pass.CustomGraphPass` and, where it exists,
`CustomInferenceAwareGraphPass` (2.13); `TracingContext.fw_metadata.is_train`; `GraphTransformObserver`.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from torch._guards import TracingContext
from torch._inductor import custom_graph_pass
from torch.fx import Graph
from torch.fx.passes.graph_transform_observer import GraphTransformObserver

import irframework
from irframework import bisecting, fusion_state
from irframework.code_files import digest_files, digest_libraries, versions
from irframework.compiler import guards, inductor_fault, kept_reports, pass_checks
from irframework.compiler.attempts import Attempt
from irframework.compiler.clones import remove_copies, settle_donations
from irframework.compiler.foreign_passes import (
    AFTER_FUSION,
    AFTER_LOWERING,
    BEFORE_FUSION,
    STAGES,
    ForeignPass,
    Given,
    in_order,
    passes_at,
)
from irframework.compiler.functionalize import donates, functionalize
from irframework.compiler.fusion import fuse, worth_a_look
from irframework.compiler.inlining import LOWERED
from irframework.compiler.lowering import Lowering
from irframework.compiler.materialize import materialize
from irframework.compiler.norm_epsilons import specialize_epsilons
from irframework.compiler.planned_outputs import plan_outputs
from irframework.compiler.report import Report, current_report
from irframework.compiler.verify import verify
from irframework.compiler.version_counters import count_overwriting
from irframework.digest import digest_function, digest_of, digest_of_op
from irframework.distributed import sequence_parallel, symmetric_memory
from irframework.errors import suggest
from irframework.notices import say_once
from irframework.platform import device_types_here
from irframework.plugins import cache_key_factors
from irframework.priority import entries_for, fingerprint, option_scope
from irframework.registry import registry
from irframework.settings import effective, settings
from irframework.torch_ops import NAMESPACE

BEFORE, AFTER = "before_lowering", "after_lowering"  # what Inductor calls us for: before and after its own patterns
_NEEDED = frozenset({"settle_donations", "count_overwriting"})  # part of what a donation means, not improvements

CustomGraphPass: Any = custom_graph_pass.CustomGraphPass
InferenceAwarePass: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", CustomGraphPass)


@dataclass(frozen=True, slots=True)
class Context:
    """What a pass may know beside the graph.

    Attributes:
        report: Where it says what it did.
        inference: Whether the graph is known to be for inference.
        inductor: Whether Inductor compiles it.
    """

    report: Report
    inference: bool
    inductor: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One pass of a stage.

    Attributes:
        name: As in `IRFRAMEWORK_DISABLE_PASSES` and in the report.
        run: What it does, in place.
        key: Gives its part of the cache key; None means that the result may not be cached.
        origin: Who brought it; None if it is ours. Others' also see graphs without IR ops, and are checked.
    """

    name: str
    run: Callable[[Graph, Context], None]
    key: Callable[[], str | None] = lambda: "ours"
    origin: str | None = None


@cache
def _source_digest() -> str:
    """The framework's version and source (code under development is never served from an older cache), and what else
    is known by its version."""
    root = Path(irframework.__file__).parent
    files = [
        path for folder in (".", "ops", "compiler", "distributed") for path in sorted((root / folder).glob("*.py"))
    ]
    source = digest_files((str(path.relative_to(root)), path) for path in files)
    return f"{irframework.__version__} {source} {versions()}"


def _foreign(stage: str, given: Given, disabled: frozenset[str]) -> list[Step]:
    """The passes of plugins and of the program at a stage, without those that are switched off."""
    every = passes_at(stage, given)
    wanted = [each for each in every if each.name not in disabled]
    return [
        Step(each.name, _call_with_graph(each), each.key, each.origin)
        for each in in_order(stage, wanted, disabled & {each.name for each in every})
    ]


def _call_with_graph(foreign: ForeignPass) -> Callable[[Graph, Context], None]:
    return lambda graph, context: foreign.run(graph)


def steps_of(stage: str, lowering: Lowering, given: Given = ()) -> list[Step]:
    """The passes of a stage in the order in which they run, without those that are switched off.

    Fusion has its place in the first stage: IR ops are whole there, and nothing is lowered yet.

    Args:
        stage: `BEFORE` or `AFTER`.
        lowering: The stage's own lowering pass.
        given: Passes of the program.
    """
    disabled = frozenset(settings().disable_passes)
    if disabled:
        _warn_about_passes(disabled, given)
        disabled -= _NEEDED
    if disabled & {"lower_functional", "lower_inplace"}:  # what is left on purpose is no fault
        disabled |= {"verify"}
    steps = _all_steps(stage, lowering, given, disabled)
    return [step for step in steps if step.name not in disabled]


def _all_steps(stage: str, lowering: Lowering, given: Given, disabled: frozenset[str]) -> list[Step]:
    lower = Step(lowering.name, lambda graph, context: lowering(graph, context.report))
    if stage == BEFORE:
        fusing = [Step(fusion_state.PASS, _fuse)] if effective("fusion") else []
        foreign = [_foreign(at, given, disabled) for at in (BEFORE_FUSION, AFTER_FUSION)]
        return [*foreign[0], *_dividing(), *fusing, *foreign[1], lower]
    return [
        lower,
        Step("materialize", lambda graph, context: materialize(graph, context.report)),
        Step("remove_copies", lambda graph, context: remove_copies(graph, context.report, context.inference)),
        Step("settle_donations", lambda graph, context: settle_donations(graph)),
        Step("count_overwriting", lambda graph, context: count_overwriting(graph)),
        Step("plan_outputs", _plan_outputs),
        *_foreign(AFTER_LOWERING, given, disabled),
        Step("verify", lambda graph, context: verify(graph)),
    ]


def _dividing() -> list[Step]:
    """Sequence parallelism stands before fusion, which finds what it leaves and what it makes."""
    tokens = effective("sequence_parallel")
    if not tokens:
        return []

    def divide(graph: Graph, context: Context) -> None:
        if context.inference:
            sequence_parallel.divide_sequences(graph, context.report, tokens)

    return [Step(sequence_parallel.NAME, divide, lambda: sequence_parallel.step_key(tokens))]


def _fuse(graph: Graph, context: Context) -> None:
    if context.inference:  # a training graph keeps what it computes on the way for the backward
        fuse(graph, context.report)


def _plan_outputs(graph: Graph, context: Context) -> None:
    if context.inductor:
        plan_outputs(graph, context.report)


def _warn_about_passes(disabled: frozenset[str], given: Given) -> None:
    """Say once that IRFRAMEWORK_DISABLE_PASSES names what cannot be switched off."""
    foreign = [each.name for stage in STAGES for each in passes_at(stage, given)]
    without = frozenset(foreign)  # their order does not matter here, and may be what is wrong
    steps = [
        step
        for stage in (BEFORE, AFTER)
        for step in _all_steps(stage, Lowering(inplace=stage == AFTER), given, without)
    ]
    optional = {fusion_state.PASS, sequence_parallel.NAME}  # no steps where they are off
    known = {*foreign, *(step.name for step in steps), *optional} - _NEEDED
    for name in sorted(disabled - known):
        say_once(
            logging.WARNING,
            ("disable_passes", name),
            "IRFRAMEWORK_DISABLE_PASSES names %r, which is no pass that can be switched off.%s",
            name,
            suggest(name, known),
        )


def _key(steps: Sequence[Step]) -> str | None:
    """One digest of the passes that run, of every choice they can meet, and of the framework; None if the choices of
    this process are numbered, since a graph that comes from a cache takes no numbers."""
    keys = [(step.name, step.key()) for step in steps]
    if bisecting.active() or any(key is None for _, key in keys):
        return None
    digest = hashlib.sha256(_source_digest().encode())
    digest.update(repr(keys).encode())
    digest.update(fingerprint("inductor").encode() + _editable_code().encode())
    digest.update(digest_function(cache_key_factors()).encode() + digest_libraries().encode())
    digest.update(symmetric_memory.state().encode())
    return digest.hexdigest()


def _editable_code() -> str:
    """Digest of the choices that no plugin brought, made anew: a notebook, or a module that is loaded again, changes
    what they call while the program runs, and what is compiled then must not stand in a cache under the older code."""
    hasher = hashlib.sha256()
    for name, op in sorted(registry.ops.items()):
        chosen = dict.fromkeys(
            e.provider for device in device_types_here() for e in entries_for(op, device, "inductor")
        )
        own = [op.registered[provider] for provider in chosen if op.registered[provider].plugin is None]
        hasher.update(repr((name, digest_of_op(op), [digest_of(impl) for impl in own])).encode())
    return hasher.hexdigest()


def _run(stage: str, steps: Sequence[Step], graph: Graph, context: Context) -> None:
    module: Any = graph.owning_module
    if stage == BEFORE:
        _keep_text(context.report, "before lowering", graph)
    attempt = Attempt.at(graph, context.report)
    for number, step in enumerate(steps):
        with attempt.step(step.name, first=number == 0, optional=step.name not in _NEEDED, origin=step.origin):
            before = None if step.origin is None else pass_checks.Before.of(graph)
            began = time.perf_counter()
            observer = GraphTransformObserver(module, step.name, subsystem="irframework")
            observer.apply_graph_pass(_bound(step, context))
            ended = time.perf_counter()
            context.report.add_time(step.name, ended - began)
            if before is not None:
                before.check(graph, inference=context.inference)
                context.report.add_time("check_passes", time.perf_counter() - ended)
    _keep_text(context.report, "functional ops lowered" if stage == BEFORE else "lowered", graph)


def _keep_text(report: Report, stage: str, graph: Graph) -> None:
    began = time.perf_counter()
    report.add_graph(stage, graph)
    report.add_time("report", time.perf_counter() - began)


def _bound(step: Step, context: Context) -> Callable[[Graph], None]:
    return lambda graph: step.run(graph, context)


def _holds_ir_ops(graph: Graph) -> bool:
    return any(
        node.op == "call_function" and getattr(node.target, "namespace", None) == NAMESPACE for node in graph.nodes
    )


def _concerns_us(graph: Graph) -> bool:
    """Whether a post-grad graph holds IR ops, or what an earlier stage made of them."""
    return _holds_ir_ops(graph) or any(LOWERED in node.meta for node in graph.nodes)


def _is_inference_graph() -> bool:
    """What AOTAutograd said about the graph that is compiled now; False if it said nothing."""
    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    return not getattr(metadata, "is_train", True)


class PreGradPass(CustomGraphPass):  # type: ignore[misc]
    """Before autograd: `maybe_inplace` becomes functional."""

    def __call__(self, graph: Graph) -> None:
        """Rewrite a graph of torch functions in place."""
        from irframework.compiler import hooks

        guards.watch_choices()  # a plain torch program holds no IR op whose trace would do so
        run_pre_grad(graph, donate_inputs=hooks.donation_is_in_the_key())
        current_report(quiet=True)
        remember_place(graph)

    def uuid(self) -> str:
        """The cache key. What the pass decides by is in the graph, or in the graph that it makes."""
        return _source_digest()


def run_pre_grad(graph: Graph, *, donate_inputs: bool) -> None:
    """Run the pre-grad stage on one graph; a second run changes nothing.

    Args:
        graph: A graph of torch functions.
        donate_inputs: Whether graph inputs may be overwritten. Which inputs share memory is in no cache key, so this
            must be False where the key is not made from the rewritten graph.
    """
    specialize_epsilons(graph)
    report = current_report(create=_holds_ir_ops(graph))
    if donates(graph):
        began = time.perf_counter()
        report = report or Report()
        with Attempt.at(graph, report, nested=True).step("functionalize", first=True, optional=False):
            functionalize(graph, report, donate_inputs=donate_inputs)
        report.add_time("functionalize", time.perf_counter() - began)


def remember_place(graph: Graph, option_priority: Mapping[str, Any] | None = None, passes: Given = ()) -> None:
    """Give the report of a compile for Inductor its place beside Inductor's cache.

    Args:
        graph: The graph after the pre-grad stage.
        option_priority: The compile option `ir_op_priority`.
        passes: The compile option `ir_passes`.
    """
    report = current_report(create=False)
    if report is not None and report.kept_as is None:
        keys = [kind(option_priority, passes).uuid() for kind in (PrePass, PostPass)]
        with guards.choices_of_this_compile(), option_scope(option_priority):  # a decision says who asked for it
            keys += [repr(entries_for(op, mode="inductor")) for _, op in sorted(registry.ops.items())]
        report.kept_as = kept_reports.name_of(graph, keys) or ""


class _PostGradPass(InferenceAwarePass):  # type: ignore[misc]
    """A stage after autograd, for one set of compile options."""

    stage: str

    def __init__(
        self, option_priority: Mapping[str, Any] | None = None, passes: Given = (), *, inductor: bool = True
    ) -> None:
        self.option_priority = dict(option_priority or {})
        self.passes = passes
        self.inductor = inductor
        self.lowering = Lowering(inplace=self.stage == AFTER)

    @property
    def selected_impls(self) -> dict[str, dict[str, str]]:
        """{op: {node: provider}} of what this pass lowered last."""
        return self.lowering.selected_impls

    def __call__(self, graph: Graph, is_inference: bool | None = None) -> None:
        """Run the stage on a graph, in place; `is_inference` is None where Inductor does not say (2.11)."""
        inductor_fault.correct()
        guards.watch_choices()
        if is_inference is None:
            is_inference = _is_inference_graph()
        with guards.choices_of_this_compile(), option_scope(self.option_priority):
            if self.stage == BEFORE:
                fusion_state.warn()
            steps = self._steps()
            fusing = is_inference and self.stage == BEFORE and any(step.name == fusion_state.PASS for step in steps)
            dividing = is_inference and any(step.name == sequence_parallel.NAME for step in steps)
            looks = (fusing and worth_a_look(graph)) or (dividing and sequence_parallel.worth_a_look(graph))
            if looks or _concerns_us(graph) or any(step.origin for step in steps):
                report = current_report()
                assert report is not None
                bisecting.met_passes([step.name for step in steps if step.name not in _NEEDED])
                report.from_cache = False  # of a forward that was, the backward may not be
                _run(self.stage, steps, graph, Context(report, is_inference, self.inductor))
            if self.stage == AFTER:
                done = current_report(create=False)
                if done is not None and done.timings:
                    kept_reports.keep(done)

    def uuid(self) -> str | None:
        """The cache key of the very list that runs; None (no caching) if a plugin's pass has none."""
        guards.watch_choices()  # what the key depends on: on a hit nothing else of ours may run
        with guards.choices_of_this_compile(), option_scope(self.option_priority):
            return _key(self._steps())

    def _steps(self) -> list[Step]:
        return steps_of(self.stage, self.lowering, (*guards.passes_of_this_compile(), *self.passes))


class PrePass(_PostGradPass):
    """After autograd, before Inductor's own patterns: fusion, plugins' passes, functional implementations."""

    stage = BEFORE


class PostPass(_PostGradPass):
    """After Inductor's own patterns: in-place implementations, their copies, verification."""

    stage = AFTER
