"""Faults of torch that the fuzzer leaves out, all without IR ops. A test that fails says: its rule can go."""

import pytest
import torch
from comparing import quiet
from functorch.compile import make_boxed_func
from programs import storage
from providers import NAMESPACE
from statements import AS_STRIDED_FAULT, ZERO_FAULT
from torch._dynamo.backends.common import aot_autograd


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
        try:
            got = compiled(one[:4], other[:4])[0]
        except AssertionError:  # torch 2.11 notices, inside AOTAutograd
            return
    assert got != 4


def test_inductor_returns_a_summand_itself_if_the_other_is_zero():
    def f(x, y):
        return torch.zeros_like(x) + y

    y = torch.ones(4, 8)
    with quiet(), torch.no_grad():
        assert storage(f(y, y)) != storage(y)
        assert storage(torch.compile(f)(torch.ones(4, 8), y)) == storage(y)


def test_equal_calls_of_an_operator_with_several_results_share_memory_in_training():
    def f(x):
        return torch.var_mean(x, -1)[1], torch.var_mean(x, -1)[1]

    with quiet():
        mean, again = f(torch.ones(4, 8, requires_grad=True))
        assert storage(mean) != storage(again)
        mean, again = torch.compile(f)(torch.ones(4, 8, requires_grad=True))
        assert storage(mean) == storage(again)


@pytest.mark.skipif(not AS_STRIDED_FAULT, reason="torch was mended")
def test_inductor_takes_another_place_for_as_strided_without_an_offset():
    def f(x):
        return x[1:].as_strided((2, 8), (8, 1)) * 1

    x = torch.arange(32.0).reshape(4, 8)
    with quiet(), torch.no_grad():
        assert torch.equal(torch.compile(f)(x), x[:2])
        assert torch.equal(f(x), x[1:3])


@pytest.mark.skipif(not ZERO_FAULT, reason="torch was mended")
def test_a_tensor_set_to_zero_is_taken_for_contiguous():
    taken = []

    def note(graph, inputs):
        taken.extend(
            node.meta["val"].stride() for node in graph.graph.nodes if node.target is torch.ops.aten.zero.default
        )
        return make_boxed_func(graph.forward)

    def f(x):
        return x.zero_() + 1

    with quiet(), torch.no_grad():
        x = torch.ones(8, 4).t()
        torch.compile(f, backend=aot_autograd(fw_compiler=note))(x)
    assert taken == [(8, 1)]
