"""The search for skeletons among the values of a graph.

Owns what a candidate is: which core stands for which, and what it gives the parameters. Whether it is the same function
is computed in `fusion.py`; what is looked for comes from `skeletons.py`.

Most cores are no place for most skeletons, as `places.py` knows; what is left is searched, one way after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from irframework.compiler.call_arguments import Number, Value, constant, values_in
from irframework.compiler.places import Places
from irframework.compiler.routes import START, StopKind
from irframework.compiler.skeletons import Skeleton
from irframework.compiler.values import COMMUTATIVE, ERASED, ValueTable

_, _AGAIN, _TENSOR, _NUMBER, _END = StopKind  # asked for too often to be looked up each time
_STEPS = 4000  # of one search; more means that a definition fits in too many ways
_NEAR = 8  # places at which a further output is looked for


@dataclass(slots=True)
class Binding:
    """What a candidate gives the parameters.

    Attributes:
        cores: For each core of the skeleton the core of the graph that it was found at.
        tensors: For each tensor parameter the values that it may be, the innermost first.
        numbers: The wildcards.
        call: The core at which a call of the very op stands, of a definition that calls it with fewer arguments.
    """

    cores: dict[int, int] = field(default_factory=dict)
    tensors: dict[str, tuple[Value, ...]] = field(default_factory=dict)
    numbers: dict[str, Number] = field(default_factory=dict)
    call: int | None = None


class TooManyWaysError(Exception):
    """A definition fits in so many ways that the search was given up."""


@dataclass(slots=True)
class Search:
    """One search for a skeleton at one place of a graph.

    Each step binds something, lets what comes behind it be looked at, and takes it back: so a binding is what it is
    until the next one is asked for.

    Attributes:
        skeleton: What is looked for.
        graph: Where.
        places: What is known of its cores.
        binding: What is bound now.
        found: Where a core of the skeleton would stand whose arguments are being looked at.
        changes: What was bound, in order, and what stood there before.
        steps: How many were done.
    """

    skeleton: Skeleton
    graph: ValueTable
    places: Places
    binding: Binding = field(default_factory=Binding)
    found: dict[int, int] = field(default_factory=dict)
    changes: list[tuple[Any, Any, Any]] = field(default_factory=list)
    steps: int = 0

    def at(self, core: int, is_known: Callable[[Binding], bool]) -> Iterator[Binding]:
        """All ways in which the skeleton's root can stand at a core of the graph.

        Args:
            core: Where.
            is_known: Whether what the root is computed of makes a candidate of no use.

        Raises:
            TooManyWaysError: There are too many.
        """
        for _ in self._match(self.skeleton.root, core):
            if not is_known(self.binding):
                for _ in self._further(self.skeleton.others, core):
                    yield self.binding

    def _further(self, wanted: tuple[int, ...], root: int) -> Iterator[None]:
        """All ways in which further outputs can stand near to the root, each at a core of its own."""
        if not wanted:
            yield
            return
        taken = set(self.binding.cores.values())
        places = self.graph.by_target.get(self.skeleton.table.cores[wanted[0]].target, ())
        free = (core for core in places if core not in taken)
        for core in heapq.nsmallest(_NEAR, free, key=lambda core: abs(core - root)):
            for _ in self._match(wanted[0], core):
                yield from self._further(wanted[1:], root)

    def _match(self, wanted: int, core: int) -> Iterator[None]:
        """All ways in which a core of the skeleton can stand at a core of the graph, the last choice changed first."""
        route, behind, items_at = self.skeleton.routes[wanted], self.places.behind, self.places.items_at
        cores, changes, parts = self.binding.cores, self.changes, self.skeleton.parts
        items: dict[int, Sequence[Any]] = {START: (Value(core, self.graph.cores[core].shape),)}
        others: list[tuple[int, int, Sequence[Any]]] = []  # orders not looked at yet: where, behind how many changes
        before, at, is_way = len(changes), 0, True
        while True:
            while is_way and at < len(route):
                stop = route[at]
                at += 1
                kind, what = stop.kind, stop.what
                if kind is _END:
                    changes.append((cores, what, None))
                    cores[what] = self.found[what]
                    continue
                found = items[stop.of][stop.place]  # `fits` has seen that there are as many
                if (kind is _NUMBER) != isinstance(found, Number):
                    is_way = False
                elif kind is _NUMBER:
                    is_way = self._number(what, found)
                else:
                    self.steps += 1
                    if self.steps > _STEPS:
                        raise TooManyWaysError
                    if kind is _TENSOR:
                        is_way = self._bind(what, found)
                        continue
                    place = behind(found.core)
                    if kind is _AGAIN:
                        is_way = cores[what] == place
                        continue
                    part = parts[what]
                    is_way = self.places.fits(part, place)
                    if is_way:
                        self.found[what] = place
                        if part.is_call:  # what it is given is read off the call itself
                            changes.append((None, None, self.binding.call))
                            self.binding.call = place
                            continue
                        given = items[what] = items_at(place)
                        if part.target in COMMUTATIVE and len(given) >= 2 and given[0] != given[1]:
                            others.append((at, len(changes), [given[1], given[0], *given[2:]]))
            if is_way:
                yield
            if not others:
                self._take_back(before)
                return
            at, known, swapped = others.pop()
            self._take_back(known)
            items[route[at - 1].what] = swapped
            is_way = True

    def _take_back(self, known: int) -> None:
        """Undo all changes but the first ones."""
        while len(self.changes) > known:
            bound, key, value = self.changes.pop()
            if bound is None:
                self.binding.call = value
            elif value is None:
                del bound[key]
            else:
                bound[key] = value

    def _number(self, name: str, number: Number) -> bool:
        numbers = self.binding.numbers
        if name in numbers:
            return numbers[name] == number
        is_plain = constant(number) is not None
        if is_plain:
            self.changes.append((numbers, name, None))
            numbers[name] = number
        return is_plain

    def _bind(self, name: str, value: Value) -> bool:
        chain = [value]
        while self.graph.cores[chain[-1].core].target in ERASED:
            chain.append(next(iter(values_in(self.graph.cores[chain[-1].core].args))))
        possible = tuple(reversed(chain))
        tensors = self.binding.tensors
        before = tensors.get(name)
        if before is not None:
            cores = {each.core for each in possible}
            possible = tuple(each for each in before if each.core in cores)
            if not possible:
                return False
        self.changes.append((tensors, name, before))
        tensors[name] = possible
        return True
