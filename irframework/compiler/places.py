"""Which cores of a graph can stand for which parts of the definitions that are looked for in it.

Owns that table. It is filled from the leaves up, once for each core: parts that look alike have one number in all
definitions, so what a core can stand for follows from what its arguments can, and one look tells it of all definitions.
Parameters are left open here. Which values they are given, and whether equal ones are, is `candidates.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from irframework.compiler.call_arguments import Core, Value, values_in
from irframework.compiler.skeletons import NUMBER, TENSOR, Part, items_of
from irframework.compiler.values import COMMUTATIVE, ERASED, ValueTable

_NO_PART = (0, TENSOR)  # stands for the first part among the arguments where there is none
_ANY_TENSOR, _ANY_NUMBER = frozenset((TENSOR,)), frozenset((NUMBER,))


@dataclass(slots=True)
class Places:
    """What is known of the cores of one graph, for all searches in it.

    Attributes:
        graph: Its values.
        rules: The parts of the definitions, by what they compute and by the first argument that is a part: place, kind.
        calls: Parts that are calls of the very op, by what they compute.
        standing: The cores that can stand for a part, by its kind, in order.
        own: How many cores the graph has; those behind them are of definitions that were computed for it.
    """

    graph: ValueTable
    rules: dict[str, dict[tuple[int, int], list[Part]]] = field(default_factory=dict)
    calls: dict[str, list[Part]] = field(default_factory=dict)
    standing: dict[int, list[int]] = field(default_factory=dict)
    own: int = 0
    _behind: list[int] = field(default_factory=list)
    _items: list[Sequence[Any]] = field(default_factory=list)
    _kinds: list[Iterable[int]] = field(default_factory=list)
    _told_by: dict[str, set[int]] = field(default_factory=dict)  # the places of dimensions and steps
    _alike: dict[Any, Iterable[int]] = field(default_factory=dict)

    def look_for(self, parts: Iterable[Part]) -> None:
        """State all parts that will be asked for, when the graph is read and before the first question."""
        self.own = len(self.graph.cores)
        parts = list(parts)
        for part in parts:
            self._told_by.setdefault(part.target, set()).update(place for place, _ in part.structure)
        for part in {part.kind: part for part in parts}.values():
            if part.is_call:
                self.calls.setdefault(part.target, []).append(part)
            elif part.target != "leaf":
                first = next(((place, kind) for place, kind in enumerate(part.items) if kind >= 0), _NO_PART)
                self.rules.setdefault(part.target, {}).setdefault(first, []).append(part)

    def behind(self, core: int) -> int:
        """The core behind conversions, reshapes and broadcasts."""
        behind = self._behind
        if core >= len(behind):
            for number in range(len(behind), core + 1):  # what a core is computed of comes before it
                known = self.graph.cores[number]
                source = next(iter(values_in(known.args))).core if known.target in ERASED else None
                behind.append(number if source is None else behind[source])
        return behind[core]

    def items_at(self, core: int) -> Sequence[Any]:
        """The arguments of a core, one after the other."""
        if core >= len(self._items):
            self._look_at_all(core)
        return self._items[core]

    def fits(self, part: Part, core: int) -> bool:
        """Whether a core, and what it is computed of, has all that a part needs, whatever the parameters are."""
        if core >= len(self._kinds):
            self._look_at_all(core)
        return part.kind in self._kinds[core]

    def of(self, part: Part) -> list[int]:
        """All cores of the graph that a part fits, in order."""
        self._look_at_all(self.own - 1)
        return list(self.standing.get(part.kind, ()))

    def _look_at_all(self, last: int) -> None:
        self.behind(last)
        for number in range(len(self._kinds), last + 1):
            core = self.graph.cores[number]
            self._items.append(items_of(core.args))
            self._kinds.append(self._kinds_of(core, self._items[number]))
            for kind in self._kinds[number]:
                self.standing.setdefault(kind, []).append(number)

    def _kinds_of(self, core: Core, items: Sequence[Any]) -> Iterable[int]:
        """The kinds of all parts that a core can stand for; any may stand for a parameter."""
        rules, calls = self.rules.get(core.target, {}), self.calls.get(core.target, ())
        if not rules and not calls:
            return _ANY_TENSOR
        given = [self._kinds[self._behind[i.core]] if isinstance(i, Value) else _ANY_NUMBER for i in items]
        # Layers repeat: most cores look like one before, and have the very set of kinds that it has.
        told = [core.args[place : place + 1] for place in self._told_by.get(core.target, ())]
        alike = (core.target, *map(id, given), *told)
        known = self._alike.get(alike)
        if known is not None:
            return known
        found = {TENSOR, *(part.kind for part in calls if _has_structure(part, core))}
        orders = [given]
        if core.target in COMMUTATIVE and len(given) >= 2:
            orders.append([given[1], given[0], *given[2:]])
        for order in orders:
            firsts = ((place, kind) for place, kinds in enumerate(order) for kind in kinds if kind >= 0)
            for first in (_NO_PART, *firsts):
                for part in rules.get(first, ()):
                    if _are_in(part.items, order) and _has_structure(part, core):
                        found.add(part.kind)
        self._alike[alike] = found
        return found


def _are_in(items: Sequence[int], given: Sequence[Iterable[int]]) -> bool:
    if len(items) != len(given):
        return False
    for kind, kinds in zip(items, given, strict=False):  # noqa: SIM110 -- asked too often for a generator
        if kind not in kinds:
            return False
    return True


def _has_structure(part: Part, core: Core) -> bool:
    """Whether dimensions and steps are those of the definition."""
    args = core.args
    return not part.structure or all(len(args) <= place or args[place] == mine for place, mine in part.structure)
