"""The search for skeletons among the values of a graph.

Owns what a candidate is: which core stands for which, and what it gives the parameters. Whether it is the same function
is computed in `fusion.py`; what is looked for comes from `skeletons.py`.

Most cores are no place for most skeletons. That is found out once for each core and each part of a definition, whatever
stands for the parameters (`Places`); only what is left is searched, one way after the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from irframework.compiler.call_arguments import Number, Value, constant, values_in
from irframework.compiler.skeletons import Part, Skeleton, items_of, stripped
from irframework.compiler.values import COMMUTATIVE, ERASED, ValueTable

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

    def copy(self) -> Binding:
        """The same, to be added to."""
        return Binding(dict(self.cores), dict(self.tensors), dict(self.numbers), self.call)


class TooManyWaysError(Exception):
    """A definition fits in so many ways that the search was given up."""


@dataclass(slots=True)
class Places:
    """What is known of the cores of one graph, for all searches in it.

    Attributes:
        graph: Its values.
        stripped: For each core the one behind conversions, reshapes and broadcasts.
        items: The arguments of each core, one after the other.
        fitting: Whether a core can stand for a part of a definition.
    """

    graph: ValueTable
    stripped: dict[int, int] = field(default_factory=dict)
    items: dict[int, list[Any]] = field(default_factory=dict)
    fitting: dict[tuple[int, int], bool] = field(default_factory=dict)

    def behind(self, core: int) -> int:
        """The core behind conversions, reshapes and broadcasts."""
        found = self.stripped.get(core)
        if found is None:
            found = self.stripped[core] = stripped(self.graph, core)
        return found

    def items_at(self, core: int) -> list[Any]:
        """The arguments of a core, one after the other."""
        found = self.items.get(core)
        if found is None:
            found = self.items[core] = items_of(self.graph.cores[core].args)
        return found

    def fits(self, part: Part, core: int) -> bool:
        """Whether a core, and what it is computed of, has all that a part needs, whatever the parameters are."""
        known = self.fitting.get((part.kind, core))
        if known is None:
            known = self.fitting[part.kind, core] = self._is_fit(part, core)
        return known

    def _is_fit(self, part: Part, core: int) -> bool:
        theirs = self.graph.cores[core]
        if part.target != theirs.target or part.target == "leaf":
            return False
        if any(len(theirs.args) > index and theirs.args[index] != mine for index, mine in part.structure):
            return False
        if part.is_call:
            return True
        other = self.items_at(core)
        if len(part.items) != len(other):
            return False
        if all(map(self._item_fits, part.items, other)):
            return True
        swapped = part.target in COMMUTATIVE and len(other) >= 2
        return swapped and all(map(self._item_fits, part.items, (other[1], other[0], *other[2:])))

    def _item_fits(self, ours: Any, theirs: Any) -> bool:
        if isinstance(ours, Part):
            return isinstance(theirs, Value) and self.fits(ours, self.behind(theirs.core))
        return isinstance(theirs, Value) == isinstance(ours, Value)


@dataclass(slots=True)
class Search:
    """One search for a skeleton at one place of a graph."""

    skeleton: Skeleton
    graph: ValueTable
    places: Places
    steps: int = 0

    def at(self, core: int, is_known: Callable[[Binding], bool]) -> Iterator[Binding]:
        """All ways in which the skeleton's root can stand at a core of the graph.

        Args:
            core: Where.
            is_known: Whether what the root is computed of makes a candidate of no use.

        Raises:
            TooManyWaysError: There are too many.
        """
        for found in self._match(self.skeleton.root, Value(core, self.graph.cores[core].shape), Binding()):
            if not is_known(found):
                yield from self._further(self.skeleton.others, core, found)

    def _further(self, wanted: tuple[int, ...], root: int, binding: Binding) -> Iterator[Binding]:
        """All ways in which further outputs can stand near to the root, each at a core of its own."""
        if not wanted:
            yield binding
            return
        taken = set(binding.cores.values())
        places = self.graph.by_target.get(self.skeleton.table.cores[wanted[0]].target, ())
        free = (core for core in places if core not in taken)
        for core in heapq.nsmallest(_NEAR, free, key=lambda core: abs(core - root)):
            for found in self._match(wanted[0], Value(core, self.graph.cores[core].shape), binding):
                yield from self._further(wanted[1:], root, found)

    def _match(self, wanted: int, value: Value, binding: Binding) -> Iterator[Binding]:
        self.steps += 1
        if self.steps > _STEPS:
            raise TooManyWaysError
        wanted = stripped(self.skeleton.table, wanted)
        name = self.skeleton.tensors.get(wanted)
        if name is not None:
            yield from self._bind(name, value, binding)
            return
        core = self.places.behind(value.core)
        known = binding.cores.get(wanted)
        if known is not None:
            if known == core:
                yield binding
            return
        part = self.skeleton.parts[wanted]
        if not self.places.fits(part, core):
            return
        if part.is_call:  # what it is given is read off the call itself
            found = binding.copy()
            found.cores[wanted] = found.call = core
            yield found
            return
        one, other = items_of(self.skeleton.table.cores[wanted].args), self.places.items_at(core)
        orders = [other]
        if part.target in COMMUTATIVE and len(other) >= 2 and other[0] != other[1]:
            orders.append([other[1], other[0], *other[2:]])
        for order in orders:
            for found in self._all(one, order, binding):
                found = found.copy()
                found.cores[wanted] = core
                yield found

    def _all(self, ours: list[Any], theirs: list[Any], binding: Binding) -> Iterator[Binding]:
        if not ours:  # `fits` has seen that there are as many
            yield binding
            return
        for found in self._one(ours[0], theirs[0], binding):
            yield from self._all(ours[1:], theirs[1:], found)

    def _one(self, ours: Any, theirs: Any, binding: Binding) -> Iterator[Binding]:
        if isinstance(ours, Value):
            if isinstance(theirs, Value):
                yield from self._match(ours.core, theirs, binding)
            return
        mark = constant(ours)
        name = self.skeleton.marks.get(mark) if mark is not None else None
        if name is None:
            yield binding  # constants are compared when the definition is computed
        elif binding.numbers.get(name, theirs) == theirs and constant(theirs) is not None:
            found = binding.copy()
            found.numbers[name] = theirs
            yield found

    def _bind(self, name: str, value: Value, binding: Binding) -> Iterator[Binding]:
        chain = [value]
        while self.graph.cores[chain[-1].core].target in ERASED:
            chain.append(next(iter(values_in(self.graph.cores[chain[-1].core].args))))
        possible = tuple(reversed(chain))
        if name in binding.tensors:
            cores = {each.core for each in possible}
            possible = tuple(each for each in binding.tensors[name] if each.core in cores)
            if not possible:
                return
        found = binding.copy()
        found.tensors[name] = possible
        yield found


def whole_numbers(skeleton: Skeleton, graph: ValueTable, binding: Binding, sample: int) -> list[int]:
    """Whole numbers that a candidate shows in its constants and sizes, the likeliest for a parameter first.

    Those are the ones that stand where the definition shows the sample that it was derived with; the more often, the
    likelier. Where there is none, all that it shows.
    """
    votes: dict[int, int] = {sample: 0}
    for ours, theirs in binding.cores.items():
        own, other = skeleton.table.cores[ours], graph.cores[theirs]
        shapes = zip(reversed(own.shape), reversed(other.shape), strict=False)  # there may be more dimensions in front
        for mine, found in (*shapes, *zip(items_of(own.args), items_of(other.args), strict=False)):
            whole = _whole(found)
            if whole is not None:
                votes[whole] = votes.get(whole, 0) + (_whole(mine) == sample)
    likely = [whole for whole in votes if votes[whole]] or list(votes)
    return sorted(likely, key=lambda whole: -votes[whole])


def _whole(value: Any) -> int | None:
    plain = constant(value) if isinstance(value, Number) else value
    return int(plain) if isinstance(plain, (int, float)) and float(plain).is_integer() else None
