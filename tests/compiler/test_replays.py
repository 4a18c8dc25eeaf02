"""A definition is numbered once for inputs that look alike, and what is found so is what looking would find."""

import itertools

import pytest
import torch
from fusion_support import body_of
from torch import Tensor, tanh
from torch._subclasses.fake_tensor import FakeTensorMode

from irframework.compiler.call_arguments import number
from irframework.compiler.definitions import Definitions
from irframework.compiler.values import ValueTable

WORDS = (("aten::tanh",), ("aten::abs",), ("aten::full", 2.0))


def numbered(op, ways, *, replayed: bool):
    """The outputs of an op's definition for each way of giving it inputs, in one table, and all cores of that."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fake = mode.from_tensor(torch.empty(4, 8, dtype=torch.bfloat16))
    definitions = Definitions()
    expansion = definitions.expand(op, [fake, fake], None)
    expansion.replays.clear()
    table = ValueTable(definitions.expand)
    found = []
    for way in ways:
        found.append(table.outputs(expansion, way(table, fake)))
        if not replayed:
            expansion.replays.clear()
    return found, table.cores, len(expansion.replays)


def leaves(first: str, second: str):
    """Two inputs by name; the same name is the same input."""
    return lambda table, fake: [table.leaf(name, fake) for name in (first, second)]


def other_way_round(first: str, second: str):
    """Two inputs of which the second was computed first."""
    return lambda table, fake: [table.leaf(name, fake) for name in (second, first)][::-1]


def computed(name: str, word: str, *more):
    """An input, and what a torch op computes of it."""

    def way(table, fake):
        x = table.leaf(name, fake)
        return [x, type(x)(table._core(word, (x, *map(number, more)), x.shape, fake.dtype), x.shape)]

    return way


def other_shape(name: str):
    """An input that is a reshape of another shape."""

    def way(table, fake):
        x = table.leaf(name, fake.view(8, 4))
        return [type(x)(x.core, (4, 8)), table.leaf((name, "beside"), fake)]

    return way


def later(name: str):
    """An input, and another that comes behind what the graph computes of the first."""

    def way(table, fake):
        x, _ = computed(name, "aten::tanh")(table, fake)
        return [x, table.leaf((name, "later"), fake)]

    return way


def reshaped(way):
    """Both inputs, computed in another shape."""

    def other(table, fake):
        return [type(x)(x.core, (4, 8)) for x in way(table, fake.view(8, 4))]

    return other


WAYS = [
    leaves("a", "b"),
    leaves("c", "d"),
    leaves("e", "e"),
    other_way_round("f", "g"),
    other_way_round("a", "b"),
    other_shape("h"),
    later("j"),
    reshaped(leaves("k", "l")),
    reshaped(computed("m", "aten::tanh")),
    *(computed(name, *word) for word in WORDS for name in ("a", "i")),
]
BODIES = {
    "product": lambda x, y: tanh(x) * y,
    "sum of products": lambda x, y: tanh(x) * y + x.float().to(x.dtype),
    "conversion": lambda x, y: x * y.float(),
    "difference": lambda x, y: y - tanh(x),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_replay_finds_what_looking_finds(fused, body):
    op = fused(body_of(body))
    for ways in itertools.permutations(WAYS, 2):
        quick, cores, _ = numbered(op, ways * 2, replayed=True)
        looked, others, _ = numbered(op, ways * 2, replayed=False)
        assert quick == looked
        assert cores == others


def test_what_looks_alike_is_looked_at_once(fused, monkeypatch):
    op, runs = fused(body_of(BODIES["product"])), []
    run = ValueTable._run
    monkeypatch.setattr(ValueTable, "_run", lambda *given: runs.append(1) or run(*given))
    assert numbered(op, [leaves(f"x{n}", f"y{n}") for n in range(9)], replayed=True)[2] == len(runs) == 1


def test_what_is_given_is_looked_into(fused):
    op = fused(body_of(BODIES["conversion"]))
    assert numbered(op, [computed("a", "aten::abs")], replayed=True)[2] == 0


def test_what_is_given_and_computed_is_not_kept(fused):
    op = fused(body_of(BODIES["product"]))
    assert numbered(op, [computed("a", "aten::tanh")], replayed=True)[2] == 0


def test_symbolic_sizes_are_kept_with_what_belongs_to_one_graph(fused):
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    def gated(x: Tensor, y: Tensor) -> Tensor:
        return tanh(x) * y

    op, mode = fused(gated), FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    dynamic = mode.from_tensor(torch.empty(6, 8), symbolic_context=context)
    static = mode.from_tensor(torch.empty(6, 8), static_shapes=True)
    definitions = Definitions()
    for value, given in ((dynamic, dynamic), (static, static), (static, dynamic)):
        expansion = definitions.expand(op, [value, value], None)
        expansion.replays.clear()
        table = ValueTable(definitions.expand)
        table.outputs(expansion, [table.leaf(name, given) for name in "ab"])
        assert len(expansion.replays) == (value is given)
        assert expansion.is_symbolic == (value is dynamic)
