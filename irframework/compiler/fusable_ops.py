"""Which fused ops are looked for in graphs: their definitions, further spellings included, and what is wrong with some.

Owns the skeletons that are kept for the process, and what becomes of an op whose declaration is wrong. A mistake of the
program is an error, raised before any graph is changed; an op of a plugin or of this framework is left out with a
warning, so that it never breaks the host (`IRFRAMEWORK_STRICT=1`: an error as well). Does not derive
(`skeletons.py`), nor know what can be wrong (`fusion_faults.py`, `spelling_check.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from irframework import bisecting, fusion_state
from irframework.compiler.definitions import known_by_spelling
from irframework.compiler.fusion_faults import fault_of, same_pattern
from irframework.compiler.ingredients import Way, may_occur, ways_of
from irframework.compiler.matches import Match, Refused
from irframework.compiler.report import graph_number, source_line
from irframework.compiler.skeletons import Skeleton, Unfit, derive
from irframework.compiler.spelling_check import wrong_spelling
from irframework.compiler.tracing import apart
from irframework.errors import IrError
from irframework.impl import IrOpImpl
from irframework.notices import say_once
from irframework.op import IrOp
from irframework.registry import registry
from irframework.settings import effective

_Bodies = tuple[Callable[..., Any], ...]
_kept: dict[str, tuple[_Bodies, list[Skeleton]]] = {}
_ways: dict[str, tuple[_Bodies, list[Way] | None]] = {}


def looked_for() -> list[IrOp]:
    """The ops that are declared with `fuse`, without those that are left out by `IRFRAMEWORK_DISABLE_FUSIONS`."""
    without = fusion_state.current().without
    return [op for op in registry.ops.values() if op.fuse and op.name not in without]


def skeletons_of(op: IrOp, present: set[str]) -> list[Skeleton]:
    """The skeletons of an op, derived at first need and again when one of its bodies is another function.

    Args:
        op: The op.
        present: The ingredients of the graph. An op that needs others is not derived for it.

    Raises:
        InvalidFusionError: Its body cannot be a pattern.
        DuplicateFusionError: Another op has the same.
        SpellingError: One of its spellings computes something else.
    """
    bodies = (op.native, *(spelling.fn for spelling in op.spellings))
    ways = _ways.get(op.name)
    with apart():  # what is known of an op belongs to no graph
        if ways is None or ways[0] != bodies:
            ways = _ways[op.name] = (bodies, ways_of(op, bodies))
        if not may_occur(ways[1], present):
            return []
    kept = _kept.get(op.name)
    if kept is None or kept[0] != bodies:
        with apart():
            kept = _kept[op.name] = (bodies, _derived(op))
    return kept[1]


def _derived(op: IrOp) -> list[Skeleton]:
    unfit: list[Unfit] = []
    found = [] if known_by_spelling(op) else derive(op, None, unfit)
    fault = fault_of(op, None, unfit, usable=bool(found))
    if fault is not None:
        _tell(op, fault)
        return []
    for spelling in op.spellings:
        wrong = None if _is_standard(spelling) else wrong_spelling(op, spelling)
        if wrong is not None:
            _tell(spelling, wrong)
            continue
        unfit = []
        more = derive(op, spelling, unfit)
        fault = fault_of(op, spelling, unfit, usable=bool(more))
        if fault is not None:
            _tell(spelling, fault)
        found += more
    if not found and not _is_standard(op):
        say_once(
            logging.WARNING,
            ("fuse", op.name),
            "Op %s (%s) is declared with fuse, and no part of a graph can become it: no arguments that it takes could "
            "be guessed, or its body is too long. @ir.ops.%s.register_input_generator shows how it is called.",
            op.name,
            op.source,
            op.name,
        )
    for name, (bodies, others) in list(_kept.items()):
        other = registry.ops.get(name)
        if other is None or other is op or not other.fuse or bodies[0] is not other.native:
            continue
        duplicate = same_pattern(found, others)
        if duplicate is not None:
            if _rank(op) <= _rank(other):
                _tell(op, duplicate)
                return []
            _tell(other, duplicate)
            _kept[name] = (bodies, [])
    return found


def _rank(op: IrOp) -> int:
    """Of two ops with one definition the lower gives way: a plugin's to the program's, all to the standard ones."""
    return 2 if _is_standard(op) else int(op.plugin is None)


def _is_standard(body: IrOp | IrOpImpl) -> bool:
    """Whether an op or a spelling is this framework's own; its tests have looked at those."""
    fn = body.native if isinstance(body, IrOp) else body.fn
    return str(getattr(fn, "__module__", "")).startswith("irframework.")


def _tell(body: IrOp | IrOpImpl, error: IrError) -> None:
    """Raise what the program did wrong; warn of what a plugin did."""
    if (body.plugin is None and not _is_standard(body)) or effective("strict"):
        raise error
    by = f" of plugin {body.plugin}" if body.plugin else ""
    say_once(logging.WARNING, ("fuse", body.name, str(error)), "%s%s is left out of fusion: %s", body.name, by, error)


def take_number(match: Match) -> None:
    """Number a fusion, for `irframework bisect`.

    Raises:
        Refused: The numbers are used up.
    """
    if not bisecting.active():
        return
    node = match.outputs[0][0]
    place = bisecting.Lowered(source_line(node), node.name, graph_number(), fusion_state.PASS)
    if not bisecting.takes_fusion(match.op, place):
        raise Refused(bisecting.used_up())
