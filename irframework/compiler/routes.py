"""In which order the parts of a definition are looked at, where one of its cores is looked for in a graph.

Owns that order, which is the same at all places: so it is told once for each definition. Does not look
(`candidates.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

START = -1  # the core whose only argument is what a route begins with


class StopKind(Enum):
    """What a stop is: a core that is looked into, one that an earlier stop was, a parameter, or the end of a core."""

    PART = auto()
    AGAIN = auto()
    TENSOR = auto()
    NUMBER = auto()
    END = auto()


@dataclass(frozen=True, slots=True)
class Stop:
    """What is looked at in one step.

    Attributes:
        kind: What is looked at; `END` comes behind all that a core is computed of.
        what: The core; of a parameter the name.
        of: The core that it is an argument of, which was looked at before.
        place: Its place among the arguments of that one.
    """

    kind: StopKind
    what: Any
    of: int = START
    place: int = 0


def routes_to(
    cores: Collection[int],
    items: Mapping[int, tuple[tuple[int, Any], ...]],
    tensors: Mapping[int, str],
    calls: Collection[int],
) -> dict[int, tuple[Stop, ...]]:
    """For each of these cores, which are looked for one after the other, the stops from it to its parameters.

    Args:
        cores: The root of a definition, and further outputs.
        items: For each core that is not a parameter which arguments tell something, by their places.
        tensors: The names of tensor parameters by core.
        calls: The cores that are calls of the op, whose arguments are not looked at.
    """
    seen: set[int] = set()
    stops: list[Stop] = []

    def look(item: Any, of: int, place: int) -> None:
        if isinstance(item, str):
            stops.append(Stop(StopKind.NUMBER, item, of, place))
        elif item in tensors:
            stops.append(Stop(StopKind.TENSOR, tensors[item], of, place))
        elif item in seen:
            stops.append(Stop(StopKind.AGAIN, item, of, place))
        else:
            stops.append(Stop(StopKind.PART, item, of, place))
            for at, each in () if item in calls else items[item]:
                look(each, item, at)
            stops.append(Stop(StopKind.END, item))
            seen.add(item)

    found: dict[int, tuple[Stop, ...]] = {}
    for core in cores:
        stops.clear()
        look(core, START, 0)
        found[core] = tuple(stops)
    return found
