"""What makes Dynamo compile again: another choice of kernels or passes, and donated inputs that come to share memory.

Owns the guards, and the first moment at which the framework learns that an IR op is being compiled. Does not own the
priorities it watches.

Private torch APIs, read in 2.11 and 2.13: `torch._guards.TracingContext` and `Guard`,
`_dynamo.source.GlobalStateSource`, `_dynamo_source` on placeholders; the guard builder itself is met in `hooks.py`.
torch's own `StorageOverlap` guard cannot be used: it compares offsets and takes for granted that all of its tensors
share one storage.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch._guards import Guard, TracingContext
from torch.fx import Graph, Node

from irframework.compiler.foreign_passes import Given, registered_passes
from irframework.compiler.frames import root_of, sharing_argument
from irframework.execution import of_a_parameter, shares_storage
from irframework.priority import current_state, restored, snapshot

_MAX_STATES = 64
_OTHER_CHOICES = (  # Dynamo shows a guard's text as the reason why it compiles again, or no more
    "irframework: kernel priorities differ from those this was compiled for, or passes do (one compile per choice, "
    "torch._dynamo.config.recompile_limit in all; further choices run uncompiled)"
)
_state_of: weakref.WeakKeyDictionary[TracingContext, Any] = weakref.WeakKeyDictionary()
_passes_of: weakref.WeakKeyDictionary[TracingContext, Given] = weakref.WeakKeyDictionary()
_guard_of: weakref.WeakKeyDictionary[TracingContext, Guard] = weakref.WeakKeyDictionary()


def on_traced(op: object) -> None:
    """Called by the fake implementation of every IR op: fake implementations run also where the code that comes out
    is taken from a cache, so this is where guards are set and passes are installed."""
    from irframework.compiler import hooks

    hooks.install()
    watch_choices()


def watch_choices() -> None:
    """Let the compile that runs now be valid only while the same implementations would be chosen."""
    context = TracingContext.try_get()
    if context is None:
        return
    guard = _guard_of.get(context)
    if guard is None:
        guard = _guard_of[context] = _priority_guard(context)
        _state_of[context], _passes_of[context] = current_state(), registered_passes()
    if guard not in context.guards_context.dynamo_guards.inner:  # Dynamo rolls guards back when it retries
        context.guards_context.dynamo_guards.add(guard)


def choices_of_this_compile() -> AbstractContextManager[None]:
    """The priorities under which the running compile began: a backward graph is compiled at the first backward, when
    the `with ir.priority` around the forward is long over."""
    context = TracingContext.try_get()
    state = _state_of.get(context) if context is not None else None
    return nullcontext() if state is None else restored(state)


def passes_of_this_compile() -> Given:
    """The passes that the program had registered when the running compile began."""
    context = TracingContext.try_get()
    known = _passes_of.get(context) if context is not None else None
    return registered_passes() if known is None else known


def _priority_guard(context: TracingContext) -> Guard:
    from torch._dynamo.source import GlobalStateSource

    from irframework.compiler import hooks, report

    unchanged = _unchanged_choices()
    reference = weakref.ref(context)
    hits = hooks.cache_hits()

    def create(builder: Any, guard: Guard) -> None:
        hooks.add_lambda_guard(builder, unchanged, _OTHER_CHOICES, guard)
        alive = reference()
        if alive is not None:
            report.close_compile(alive, cached=hooks.cache_hits() > hits)

    return Guard(GlobalStateSource(), create)


def _unchanged_choices() -> Callable[[object], bool]:
    """A test that the current context chooses as this one does, for all ops: one may hide behind a cached graph."""
    expected = dict(snapshot("inductor"))
    known: dict[object, bool] = {current_state(): True}
    passes = registered_passes()

    def unchanged(_scope: object) -> bool:
        if registered_passes() != passes:
            return False
        state = current_state()
        answer = known.get(state)
        if answer is None:
            if len(known) >= _MAX_STATES:
                known.clear()
            now = snapshot("inductor")  # ops that were declared since then are in no graph compiled before
            answer = known[state] = all(now.get(op) == digest for op, digest in expected.items())
        return answer

    return unchanged


def new_guards_count(environment: Any) -> bool:
    """Whether a guard on a size that is added now will make Dynamo compile again.

    It will not in a backward graph that is compiled at its first run, nor in a program that was exported.
    """
    from irframework.compiler import hooks

    return TracingContext.try_get() is not None and not environment.frozen and not hooks.compiles_ahead_of_time()


def has_source(placeholder: Node) -> bool:
    """Whether Dynamo can look at this input again at the next call."""
    return getattr(placeholder, "_dynamo_source", None) is not None and TracingContext.try_get() is not None


def describe_input(placeholder: Node) -> str:
    """What the user calls a graph input; the placeholder's name if Dynamo does not say."""
    source = getattr(placeholder, "_dynamo_source", None)
    if source is None:
        return placeholder.name
    from irframework.compiler import hooks

    name = hooks.name_of(source)
    local = re.fullmatch(r"L\['(\w+)'\](.*)", name)
    return local[1] + local[2] if local else name


def inputs_stay_apart(graph: Graph, donated: list[Node]) -> None:
    """Compile again when inputs overlap that do not overlap now, or when a donated one is a view of a parameter.

    Args:
        graph: The pre-grad graph.
        donated: The placeholders that will be overwritten; at compile time they share memory with no other input.
    """
    context = TracingContext.try_get()
    if context is None:
        return
    from torch._dynamo.source import GlobalStateSource

    from irframework.compiler import hooks

    given: list[str] = []
    others: list[str] = []
    roots: list[str | None] = []
    for node in graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        if source is not None and isinstance(node.meta.get("example_value"), torch.Tensor):
            (given if node in donated else others).append(hooks.name_of(source))
            roots += [root_of(source)] if node in donated else []

    def create(builder: Any, guard: Guard) -> None:
        hooks.add_expression_guard(
            builder,
            f"___irframework_apart(({', '.join(given)},), ({', '.join(others)}{',' if others else ''}), L)",
            "irframework: donated inputs share memory with no other input and with no parameter",
            {"___irframework_apart": partial(_apart, tuple(roots))},
        )

    context.guards_context.dynamo_guards.add(Guard(GlobalStateSource(), create))


def _apart(
    roots: tuple[str | None, ...],
    given: tuple[torch.Tensor, ...],
    others: tuple[torch.Tensor, ...],
    arguments: Mapping[str, object],
) -> bool:
    """Whether no given tensor is a parameter's, shares storage with another input of the graph, or with another
    argument of the frame.

    The graph has only those arguments that it uses; the caller has all of them.
    """
    for index, tensor in enumerate(given):
        if of_a_parameter(tensor) or any(shares_storage(tensor, other) for other in (*given[index + 1 :], *others)):
            return False
    return all(sharing_argument(*pair, arguments) is None for pair in zip(given, roots, strict=True))
