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
from irframework.compiler.skeletons import Skeleton
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


class TooManyWaysError(Exception):
    """A definition fits in so many ways that the search was given up."""


@dataclass(slots=True)
class Search:
    """One search for a skeleton at one place of a graph.

    Each step binds something, lets what comes behind it be looked at, and takes it back: so a binding is what it is
    until the next one is asked for.
    """

    skeleton: Skeleton
    graph: ValueTable
    places: Places
    binding: Binding = field(default_factory=Binding)
    steps: int = 0

    def at(self, core: int, is_known: Callable[[Binding], bool]) -> Iterator[Binding]:
        """All ways in which the skeleton's root can stand at a core of the graph.

        Args:
            core: Where.
            is_known: Whether what the root is computed of makes a candidate of no use.

        Raises:
            TooManyWaysError: There are too many.
        """
        for _ in self._match(self.skeleton.root, Value(core, self.graph.cores[core].shape)):
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
            for _ in self._match(wanted[0], Value(core, self.graph.cores[core].shape)):
                yield from self._further(wanted[1:], root)

    def _match(self, wanted: int, value: Value) -> Iterator[None]:
        self.steps += 1
        if self.steps > _STEPS:
            raise TooManyWaysError
        name = self.skeleton.tensors.get(wanted)
        if name is not None:
            yield from self._bind(name, value)
            return
        core = self.places.behind(value.core)
        cores = self.binding.cores
        known = cores.get(wanted)
        if known is not None:
            if known == core:
                yield
            return
        part = self.skeleton.parts[wanted]
        if not self.places.fits(part, core):
            return
        if part.is_call:  # what it is given is read off the call itself
            before, self.binding.call = self.binding.call, core
            cores[wanted] = core
            yield
            del cores[wanted]
            self.binding.call = before
            return
        other = self.places.items_at(core)
        orders = [other]
        if part.target in COMMUTATIVE and len(other) >= 2 and other[0] != other[1]:
            orders.append([other[1], other[0], *other[2:]])
        for order in orders:
            for _ in self._all(self.skeleton.items[wanted], order):
                cores[wanted] = core
                yield
                del cores[wanted]

    def _all(self, ours: Sequence[tuple[int, Any]], theirs: Sequence[Any]) -> Iterator[None]:
        if not ours:
            yield
            return
        (place, wanted), *rest = ours
        found = theirs[place]  # `fits` has seen that there are as many
        if isinstance(wanted, str) != isinstance(found, Number):
            return
        for _ in self._number(wanted, found) if isinstance(wanted, str) else self._match(wanted, found):
            yield from self._all(rest, theirs)

    def _number(self, name: str, number: Number) -> Iterator[None]:
        numbers = self.binding.numbers
        if numbers.get(name) == number:
            yield
        elif name not in numbers and constant(number) is not None:
            numbers[name] = number
            yield
            del numbers[name]

    def _bind(self, name: str, value: Value) -> Iterator[None]:
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
                return
        tensors[name] = possible
        yield
        if before is None:
            del tensors[name]
        else:
            tensors[name] = before
