"""Epsilons of norms in plain torch that `torch.compile(dynamic=True)` made symbols: such norms are raised as well."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config

import irframework as ir
from irframework.compiler.norm_epsilons import specialize_epsilons


def bent_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * torch.tanh(x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon))


@pytest.fixture(scope="module")
def op():
    """A norm that has a kernel on every machine."""
    declared = ir.register_op(name="bent_norm_of_epsilons", fuse=True)(bent_norm)
    declared.register_impl("k")(bent_norm)
    return declared


class Norm(nn.Module):
    def __init__(self, epsilon: float) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 64))

    def forward(self, x: Tensor) -> Tensor:
        return bent_norm(x, self.weight, self.epsilon)


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.factor).tanh() * self.factor


@pytest.fixture(autouse=True)
def _clean():
    torch._dynamo.reset()
    hooks = ("pre_grad_custom_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass")
    with config.patch({**dict.fromkeys(hooks), "fallback_by_default": True, "fx_graph_cache": False}):
        yield
    torch._dynamo.reset()


X = torch.linspace(-1, 1, 256).reshape(4, 64) / 10


@pytest.mark.parametrize("backend", ["irframework", "inductor"])
def test_each_epsilon_has_its_own_compile_and_is_raised(op, backend):
    ir.install()
    first, second = Norm(1e-5), Norm(0.5)
    run = torch.compile(lambda module, x: module(x), backend=backend, dynamic=True)
    compiled = counters["stats"]["unique_graphs"]
    with torch.no_grad(), ir.priority({op.name: ["k", "native"]}):
        for module in (first, second, first):
            torch.testing.assert_close(run(module, X), module(X))
            assert ir.last_report().fusions == {op.name: 1}
    assert counters["stats"]["unique_graphs"] - compiled == 2


def test_other_numbers_stay_symbols():
    run = torch.compile(lambda module, x: module(x), backend="irframework", dynamic=True)
    compiled = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        for factor in (0.5, 0.25, 2.5):
            torch.testing.assert_close(run(Scale(factor), X), Scale(factor)(X))
    assert counters["stats"]["unique_graphs"] - compiled == 1


def _epsilons_of(module: nn.Module, x: Tensor) -> list[object]:
    """What is added in the graph that Dynamo makes, after the epsilons were put into it."""
    found: list[object] = []

    def backend(graph, inputs):
        specialize_epsilons(graph.graph)
        found.extend(node.args[1] for node in graph.graph.nodes if node.name == "add")
        return graph

    torch.compile(module, backend=backend, dynamic=True)(x)
    return found


def test_an_epsilon_is_a_number_where_nothing_is_trained():
    with torch.no_grad():
        assert _epsilons_of(Norm(0.25), X) == [0.25]


def test_training_keeps_the_symbol():
    (added,) = _epsilons_of(Norm(0.25), X)
    assert isinstance(added, torch.fx.Node)


def test_without_fusion_the_symbol_stays(configured):
    configured(fusion=False)
    with torch.no_grad():
        (added,) = _epsilons_of(Norm(0.25), X)
    assert isinstance(added, torch.fx.Node)
