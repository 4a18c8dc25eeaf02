"""How a definition was numbered once, so that arguments that look alike are numbered the same way without looking.

Owns what is written down meanwhile and how it is done again. What an op is, and which spellings are one, is told by
`values.py` alone: it looks at the shapes and dtypes of values, at whether two of them are equal, and at which of two
was computed first. Where all of that is as before, the same cores are asked for in the same order, of other values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from irframework.compiler.call_arguments import Core, Shape, Value

CoreOf = Callable[[str, tuple[Any, ...], Shape, Any], int]


@dataclass(frozen=True, slots=True)
class _At:
    """A value whose core is told by its place: among the inputs, then in the order in which cores are asked for."""

    place: int
    shape: Shape


@dataclass(frozen=True, slots=True)
class _Call:
    """A core that is asked for, its values by their places; of each pair in `order` the first was computed earlier."""

    order: tuple[tuple[int, int], ...]
    core: Core


@dataclass(frozen=True, slots=True)
class Replay:
    """What numbering a definition came to, for inputs that look alike.

    Attributes:
        calls: The cores that were asked for.
        outputs: What was returned.
    """

    calls: tuple[_Call, ...]
    outputs: tuple[Any, ...]

    def again(self, inputs: Sequence[int], core_of: CoreOf) -> tuple[Any, ...] | None:
        """The outputs for other inputs; None where the numbering has to look.

        Args:
            inputs: Their distinct cores, in order of number.
            core_of: Gives the number of a core.
        """
        cores = list(inputs)
        for call in self.calls:
            for first, second in call.order:
                if cores[first] >= cores[second]:
                    return None
            asked = call.core
            core = core_of(asked.target, _filled(asked.args, cores), asked.shape, asked.dtype)
            if core in inputs:  # what it computes was given as well
                return None
            cores.append(core)
        return _filled(self.outputs, cores)


def look_of(inputs: Sequence[Any], cores: Sequence[Core], special: frozenset[str]) -> tuple[Any, list[int]] | None:
    """All of some inputs that numbering looks at, and their distinct cores in order of number.

    None where it looks deeper: into how an input was computed, which it does for a few targets.

    Args:
        inputs: Values and numbers.
        cores: All cores by number.
        special: These targets.
    """
    order = sorted({each.core for each in inputs if isinstance(each, Value)})
    look: list[Any] = []
    for each in inputs:
        if isinstance(each, Value):
            core = cores[each.core]
            if core.target in special:
                return None
            look.append((order.index(each.core), each.shape, core.shape, core.dtype))
        else:
            look.append(each)
    return tuple(look), order


def is_plain(look: tuple[Any, ...]) -> bool:
    """Whether no input is symbolic, nor any of its sizes."""
    return all(type(each) is tuple and all(type(size) is int for size in (*each[1], *each[2])) for each in look)


@dataclass(slots=True)
class Recorder:
    """Writes down one numbering.

    Attributes:
        places: The place of each core.
        is_whole: Whether all was told by places.
    """

    places: dict[int, int]
    is_whole: bool = True
    _calls: list[_Call] = field(default_factory=list)
    _order: list[tuple[int, int]] = field(default_factory=list)
    _inputs: int = field(init=False)

    def __post_init__(self) -> None:
        self._inputs = len(self.places)

    def asked(self, core: int, target: str, args: tuple[Any, ...], shape: Shape, dtype: Any) -> None:
        """A core was asked for."""
        if core in self.places:  # again; or one that is an input as well, of which nothing follows for others
            self.is_whole &= self.places[core] >= self._inputs
            return
        self._calls.append(_Call(tuple(self._order), Core(target, self._placed(args), shape, dtype)))
        self._order.clear()
        self.places[core] = len(self.places)

    def compared(self, first: int, second: int) -> None:
        """Of two cores it was found which one was computed first."""
        if first in self.places and second in self.places:
            self._order.append((self.places[first], self.places[second]))
        else:
            self.is_whole = False

    def replay(self, outputs: tuple[Any, ...]) -> Replay | None:
        """What was written down; None where it holds for these very inputs only."""
        placed = self._placed(outputs)
        return Replay(tuple(self._calls), placed) if self.is_whole and not self._order else None

    def _placed(self, argument: Any) -> Any:
        if isinstance(argument, Value):
            self.is_whole &= argument.core in self.places
            return _At(self.places.get(argument.core, 0), argument.shape)
        return tuple(map(self._placed, argument)) if isinstance(argument, tuple) else argument


def in_order(x: Value, y: Value, recorder: Recorder | None) -> tuple[Value, Value]:
    """Two values that may change places, in the order that they have in all spellings: by their cores."""
    if x.core == y.core:
        return (y, x) if repr(y.shape) < repr(x.shape) else (x, y)
    if y.core < x.core:
        x, y = y, x
    if recorder is not None:
        recorder.compared(x.core, y.core)
    return x, y


def _filled(template: tuple[Any, ...], cores: Sequence[int]) -> tuple[Any, ...]:
    """What was placed, of other cores."""
    return tuple(
        [
            Value(cores[each.place], each.shape)
            if type(each) is _At
            else _filled(each, cores)
            if type(each) is tuple
            else each
            for each in template
        ]
    )
