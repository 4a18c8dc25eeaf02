"""Which parts of one storage are proved to be apart."""

import itertools
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from irframework.compiler.overlap import disjoint, disjoint_in_example


def bytes_of(value):
    """Every byte of the storage that the tensor shows."""
    size = value.element_size()
    found = set()
    for index in itertools.product(*map(range, value.shape)):
        first = value.storage_offset() + sum(i * stride for i, stride in zip(index, value.stride(), strict=True))
        found.update(range(first * size, first * size + size))
    return found


def drawn(draw, base):
    """Any strided view of the base, of any of three dtypes."""
    rank = draw.randint(0, 3)
    size = [draw.choice((0, 1, 1, 2, 2, 3, 4)) for _ in range(rank)]
    stride = [draw.choice((0, 1, 2, 3, 4, 8, 16)) for _ in range(rank)]
    dtype = draw.choice((torch.int8, torch.int16, torch.int32))
    return base.view(dtype).as_strided(size, stride, draw.randint(0, 24))


def test_what_is_called_disjoint_shares_no_byte():
    draw = random.Random(0)
    base = torch.zeros(1024, dtype=torch.int8)
    proved = 0
    for _ in range(3000):
        x, y = drawn(draw, base), drawn(draw, base)
        if disjoint(x, y):
            proved += 1
            assert not bytes_of(x) & bytes_of(y), (x.dtype, x.shape, x.stride(), y.dtype, y.shape, y.stride())
    assert proved > 1000


PARTS = {
    "columns": lambda x: (x[:, :4], x[:, 4:]),
    "rows": lambda x: (x[:2], x[2:]),
    "every other row": lambda x: (x[::2], x[1::2]),
    "every other element": lambda x: (x[:, ::2], x[:, 1::2]),
    "middle dimension": lambda x: (x.view(6, 2, 4)[:, 0], x.view(6, 2, 4)[:, 1]),
    "transposed": lambda x: (x.t()[:4], x[:, 4:]),
    "heads": lambda x: (x[:, :4].unflatten(-1, (2, 2)).transpose(0, 1), x[:, 4:].unflatten(-1, (2, 2))),
    "another dtype": lambda x: (x[:, :4], x.view(torch.int8)[:, 16:]),
    "an empty part": lambda x: (x[:0], x),
}
OVERLAPS = {
    "the same": lambda x: (x, x),
    "base and part": lambda x: (x, x[4:]),
    "rows": lambda x: (x[:4], x[3:]),
    "columns": lambda x: (x[:, :5], x[:, 4:]),
    "transposed": lambda x: (x.t()[:5], x[:, 4:]),
    "another dtype": lambda x: (x[3:], x.view(torch.int8)[3:, :4]),
    "a smaller offset of a larger dtype": lambda x: (x.view(-1)[4:], x.view(-1).view(torch.int8)[16:20]),
}


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_disjoint_parts_are_proved_to_be(parts):
    assert disjoint(*parts(torch.zeros(6, 8)))


@pytest.mark.parametrize("parts", OVERLAPS.values(), ids=OVERLAPS)
def test_overlapping_parts_are_not_disjoint(parts):
    assert not disjoint(*parts(torch.zeros(6, 8)))


def symbolic(dims):
    mode = FakeTensorMode(shape_env=ShapeEnv())
    sizes = [DimDynamic.DYNAMIC if dim in dims else DimDynamic.STATIC for dim in range(2)]
    return mode.from_tensor(
        torch.zeros(6, 8), symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes)
    ), mode.shape_env


@pytest.mark.parametrize("name", ["columns", "heads", "another dtype", "transposed", "rows"])
def test_parts_of_a_tensor_of_any_batch_size_are_proved_without_a_guard(name):
    x, environment = symbolic({0})
    first, second = PARTS[name](x)
    before = len(environment.guards)
    assert disjoint(first, second)
    assert len(environment.guards) == before


@pytest.mark.parametrize("name", OVERLAPS)
def test_overlapping_parts_of_a_tensor_of_any_batch_size_are_not_disjoint(name):
    assert not disjoint(*OVERLAPS[name](symbolic({0})[0]))


def test_what_depends_on_the_size_is_not_disjoint_but_may_be_in_the_example():
    x, environment = symbolic({0})
    first, second = x[: x.shape[0] - 2], x[4:]
    before = len(environment.guards)
    assert not disjoint(first, second)
    assert disjoint_in_example(first, second)
    assert not disjoint_in_example(x, second)
    assert len(environment.guards) == before


def test_two_storages_are_never_called_disjoint_parts():
    assert not disjoint(torch.empty(4), torch.empty(4))
    assert not disjoint(torch.empty(4), None)
