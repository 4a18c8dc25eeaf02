"""Random programs with chains, fused, equal eager native and the graph as it was; and faults of the search show.

A failure prints the program's source; `python tests/fuzz/run.py --fusions --seed N --graphs 1` draws it again.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
from fused_ops import fused_providers
from fusing import check_fused
from programs import drawn
from statements import FUSABLE

from irframework.compiler import matches, values
from irframework.compiler.aliasing import Effects

FIRST, COUNT = 1, 40


@pytest.fixture(autouse=True)
def _fused():
    with fused_providers():
        yield


def program(seed: int) -> Any:
    return drawn(random.Random(seed), **FUSABLE)


@pytest.mark.slow
def test_fused_programs_equal_eager_native_and_their_graphs_unfused(tally):
    for seed in range(FIRST, FIRST + COUNT):
        check_fused(program(seed), "lowered", tally=tally)
    assert tally.counts["with chains"] > COUNT / 2
    assert tally.counts["with fusions"] > COUNT / 3


# --- the fuzzer sees faults ------------------------------------------------------------------------------------------

Patch = tuple[Any, str, Callable[..., Any]]


def _no_effects(*arguments: object) -> Effects:
    return Effects()


def _always(*arguments: object) -> bool:
    return True


def _nothing(*arguments: object) -> None:
    return None


# What is switched off in the engine, and the first seed from 0 on of a program that shows it. Other seeds do when other
# programs are drawn.
FAULTS: dict[str, tuple[tuple[Patch, ...], int]] = {
    "an intermediate with another reader": (((matches.Judge, "_is_free", _always),), 3),
    "writes": (((values, "effects_of", _no_effects),), 13),
    "an input that depends on an output": (((matches.Judge, "_check_order", _nothing),), 77),
    "an output that nobody computes": (((matches.Judge, "_is_dropped", _always),), 105),
    "dtypes and strides": (((matches.Judge, "_check_layout", _nothing),), 11),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_search_is_a_difference(fault, monkeypatch):
    patches, seed = FAULTS[fault]
    check_fused(program(seed), "lowered")
    for place, name, stand_in in patches:
        monkeypatch.setattr(place, name, stand_in)
    with pytest.raises(AssertionError):
        check_fused(program(seed), "lowered")
