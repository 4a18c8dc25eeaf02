"""Passes that plugins and programs bring: at which stages, under which names, and in which order they run.

Owns the stages, `register_pass`, the reading of a pass (`name`, `after`, `before`, `uuid()`) and the order within a
stage. Does not run a pass (`pipeline.py`), nor check the graph that it leaves (`pass_checks.py`).
"""

from __future__ import annotations

import heapq
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, GraphModule
from torch.utils.hooks import RemovableHandle

from irframework.errors import PassError, VerifyError, suggest
from irframework.impl import place_of
from irframework.notices import say_once
from irframework.plugins import compiler_passes, describe

BEFORE_FUSION, AFTER_FUSION, AFTER_LOWERING = STAGES = ("before_fusion", "after_fusion", "after_lowering")
_OLD_NAMES = {"before_lowering": AFTER_FUSION}  # what the stage was called while there was no fusion
USER = "user"  # stands in the place of a plugin's name
Given = tuple[tuple[str, Any], ...]  # (stage, pass) of a program

_registered: OrderedDict[int, tuple[str, Any]] = OrderedDict()


@dataclass(frozen=True, slots=True)
class ForeignPass:
    """A pass of a plugin or of the program.

    Attributes:
        owner: The plugin's name, or `user`.
        own_name: Its name there.
        function: The callable that was given.
        origin: Who brought it, for messages.
    """

    owner: str
    own_name: str
    function: Any
    origin: str

    @property
    def name(self) -> str:
        """The name in reports and in IRFRAMEWORK_DISABLE_PASSES."""
        return f"{self.owner}.{self.own_name}"

    def run(self, graph: Graph) -> None:
        """Let it rewrite a graph in place.

        Raises:
            VerifyError: It returned another graph, which nobody would look at.
        """
        returned = self.function(graph)
        if isinstance(returned, (Graph, GraphModule)) and getattr(returned, "graph", returned) is not graph:
            raise VerifyError(
                f"Compiler pass {self.name!r} returned a {type(returned).__name__}; a pass changes the graph that it "
                "is given, in place, and what it returns is not looked at."
            )

    def key(self) -> str | None:
        """Its part of cache keys; None if it has no `uuid()`, or if that returns None.

        Raises:
            PassError: `uuid()` failed.
        """
        uuid = getattr(self.function, "uuid", None)
        if uuid is None:
            return None
        try:
            identity = uuid()
        except Exception as error:
            raise PassError(
                f"uuid() of compiler pass {self.name!r}, of {self.origin}, failed: {type(error).__name__}: {error}. "
                f"IRFRAMEWORK_DISABLE_PASSES={self.name} switches the pass off."
            ) from error
        return None if identity is None else f"{self.origin} {identity!r}"


def register_pass(stage: str, graph_pass: Callable[[Graph], object]) -> RemovableHandle:
    """Let a pass run at a stage of every compile from now on, in all threads, until the handle is removed.

    It runs wherever the framework's passes do: under `backend="irframework"`, in stock Inductor once they are installed
    (`ir.install()`), and in `ir.compiler.lower`. What was compiled before compiles again. For one compile, give it with
    `options={"ir_passes": {stage: [graph_pass]}}`.

    Args:
        stage: `before_fusion`, `after_fusion` or `after_lowering`; see the hook `irframework_passes`.
        graph_pass: A callable that rewrites an fx graph in place. Its attributes `name`, `after`, `before` and `uuid()`
            are those of a plugin's pass.

    Returns:
        A handle: `.remove()` takes the pass away, and so does the end of a `with` block over it.

    Raises:
        PassError: There is no such stage, or the pass cannot be called.
    """
    checked = (_checked_stage(stage, "ir.compiler.register_pass"), graph_pass)
    _check_callable(graph_pass, "ir.compiler.register_pass")
    handle = RemovableHandle(_registered)
    _registered[handle.id] = checked
    return handle


def registered_passes() -> Given:
    """The passes that the program registered and did not remove, in that order."""
    return tuple(_registered.values())


def read_passes(value: Any) -> Given:
    """Read the compile option `ir_passes`: a mapping from stages to lists of passes.

    Raises:
        PassError: It is no such mapping, or names a stage that does not exist.
    """
    where = 'options={"ir_passes": ...}'
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise PassError(f"{where}: expected a mapping from stages to lists of passes, got {value!r:.60}.")
    found = []
    for stage, passes in value.items():
        if not isinstance(passes, (list, tuple)):
            raise PassError(f"{where}: expected a list of passes for stage {stage!r}, got {passes!r:.60}.")
        for each in passes:
            _check_callable(each, where)
            found.append((_checked_stage(stage, where), each))
    return tuple(found)


def _checked_stage(stage: object, where: str) -> str:
    known = _OLD_NAMES.get(stage, stage) if isinstance(stage, str) else None
    if known not in STAGES:
        raise PassError(f"{where}: there is no stage {stage!r}.{suggest(str(stage), STAGES)}")
    return str(known)


def _check_callable(graph_pass: object, where: str) -> None:
    if isinstance(graph_pass, type):
        raise PassError(f"{where}: {graph_pass.__name__} is a class; give an instance of it, or a function.")
    if not callable(graph_pass):
        raise PassError(f"{where}: {graph_pass!r:.60} is no compiler pass: it cannot be called.")


def passes_at(stage: str, given: Given = ()) -> list[ForeignPass]:
    """All passes of a stage: plugins' by the plugin's name and as listed, then the program's.

    Args:
        stage: One of `STAGES`.
        given: The passes of the program, of all stages.

    Raises:
        PassError: What a plugin gives is no pass.
    """
    found: dict[str, ForeignPass] = {}
    for plugin, each in compiler_passes(stage):
        _add(found, plugin, each, describe(plugin))
    for old, new in _OLD_NAMES.items():
        for plugin, each in compiler_passes(old) if new == stage else ():
            if f"{plugin}.{_name_of(each)}" not in found:  # else it was given under both names, and runs once
                _add(found, plugin, each, describe(plugin))
    for at, each in given:
        if at == stage:
            place = place_of(
                each if hasattr(each, "__code__") else type(each)
            )  # an object's text would name its address
            _add(found, USER, each, f"the program ({place})")
    return list(found.values())


def _name_of(graph_pass: Any) -> str:
    return str(getattr(graph_pass, "name", None) or getattr(graph_pass, "__name__", type(graph_pass).__name__))


def _add(found: dict[str, ForeignPass], owner: str, graph_pass: Any, origin: str) -> None:
    _check_callable(graph_pass, f"irframework_passes of {origin}")
    number, name = 1, _name_of(graph_pass)
    own = name
    while f"{owner}.{own}" in found:
        number += 1
        own = f"{name}#{number}"
    found[f"{owner}.{own}"] = ForeignPass(owner, own, graph_pass, origin)


def in_order(stage: str, passes: Sequence[ForeignPass], known: Iterable[str] = ()) -> list[ForeignPass]:
    """Passes in the order in which they run: as they are, but for what their `after` and `before` ask for.

    Args:
        stage: Where they run, for messages.
        passes: As from `passes_at`.
        known: Names of passes that are switched off; naming one is no mistake.

    Raises:
        PassError: They wait for each other.
    """
    by_name = {each.name: each for each in passes}
    earlier: dict[str, set[str]] = {name: set() for name in by_name}
    every = {*by_name, *known}
    for each in passes:
        for other in _named(each, "after", stage, every):
            if other in by_name:
                earlier[each.name].add(other)
        for other in _named(each, "before", stage, every):
            if other in by_name:
                earlier[other].add(each.name)
    place = {name: number for number, name in enumerate(by_name)}
    ready = [place[name] for name, others in earlier.items() if not others]
    heapq.heapify(ready)
    order: list[ForeignPass] = []
    names = list(by_name)
    while ready:
        name = names[heapq.heappop(ready)]
        order.append(by_name[name])
        for later, others in earlier.items():
            if name in others:
                others.remove(name)
                if not others:
                    heapq.heappush(ready, place[later])
    if len(order) < len(passes):
        raise PassError(_circle(stage, {name: others for name, others in earlier.items() if others}, by_name))
    return order


def _named(graph_pass: ForeignPass, attribute: str, stage: str, known: set[str]) -> list[str]:
    """The full names in a pass's `after` or `before`; one that does not exist is said once and left out."""
    given = getattr(graph_pass.function, attribute, ())
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in names):
        raise PassError(
            f"Compiler pass {graph_pass.name!r}, of {graph_pass.origin}: {attribute}={given!r} is no list of names."
        )
    found = []
    for written in names:
        name = written.removesuffix("?")
        full = next((each for each in (name, f"{graph_pass.owner}.{name}") if each in known), None)
        if full is not None:
            found.append(full)
        elif name == written:
            say_once(
                logging.WARNING,
                ("pass order", graph_pass.name, attribute, name),
                "Compiler pass %r, of %s, runs %s %r, which is no pass of stage %s.%s If it may be missing, write %r.",
                graph_pass.name,
                graph_pass.origin,
                attribute,
                name,
                stage,
                suggest(name, known - {graph_pass.name}),
                f"{name}?",
            )
    return found


def _circle(stage: str, waiting: Mapping[str, set[str]], by_name: Mapping[str, ForeignPass]) -> str:
    path = [min(waiting)]
    while path[-1] not in path[:-1]:
        path.append(min(other for other in waiting[path[-1]] if other in waiting))
    circle = path[path.index(path[-1]) :]
    owners = "; ".join(f"{name} is of {by_name[name].origin}" for name in dict.fromkeys(circle))
    return (
        f"Compiler passes of stage {stage!r} wait for each other: {' waits for '.join(circle)}. {owners}. Change "
        f"their `after` and `before`; IRFRAMEWORK_DISABLE_PASSES={circle[0]} switches one of them off."
    )
