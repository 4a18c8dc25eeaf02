"""Faults of torch that the fuzzer leaves out, all without IR ops. A test that fails says: its rule can go."""

import pytest
import torch
from comparing import quiet
from providers import NAMESPACE


def poke(x):
    getattr(torch.ops, NAMESPACE).poke_(x[:2])
    return x * 1


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_custom_op_that_mutates_a_part_of_an_argument_with_an_offset_mutates_another_part(backend):
    memory, same = torch.ones(5, 8), torch.ones(5, 8)
    with quiet(), torch.no_grad():
        want = poke(memory[1:])
        got = torch.compile(poke, backend=backend)(same[1:])
    assert not torch.equal(got, want)
    assert not torch.equal(same, memory)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_code_for_arguments_that_share_memory_is_used_for_ones_that_do_not(backend):
    def f(x, y):
        x.mul_(2)
        return y.sum(0)

    compiled = torch.compile(f, backend=backend)
    memory, one, other = torch.ones(9, 8), torch.ones(9, 8), torch.ones(9, 8)
    with quiet(), torch.no_grad():
        assert compiled(memory[:4], memory[:4])[0] == 8
        got = compiled(one[:4], other[:4])[0]
    assert got != 4
