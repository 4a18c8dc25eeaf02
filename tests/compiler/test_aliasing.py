"""Which values may share memory."""

import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from irframework.compiler.aliasing import Aliasing, effects_of


def analysed(function, *shapes):
    graph = make_fx(function, tracing_mode="fake")(*(torch.ones(shape) for shape in shapes)).graph
    return graph, Aliasing(graph), {node.name: node for node in graph.nodes}


def together(aliasing, a, b):
    return aliasing.find(a) is aliasing.find(b)


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(-1),
        lambda x: x.t(),
        lambda x: x[1:],
        lambda x: x.split(2)[1],
        lambda x: x.chunk(2, -1)[0],
        lambda x: x.unbind()[0],
        lambda x: x.as_strided((2,), (1,)),
        lambda x: x.detach(),
        lambda x: x.view(torch.int32),
        lambda x: x.expand(2, 4, 8),
        lambda x: x.t()[2:].unsqueeze(0),
    ],
)
def test_views_share_memory_with_their_base(view):
    graph, aliasing, nodes = analysed(lambda x: view(x) + 1, (4, 8))
    (add,) = [node for node in graph.nodes if node.name.startswith("add")]
    assert together(aliasing, nodes["x_1"], add.args[0])
    assert not together(aliasing, nodes["x_1"], add)


def test_schemas_count_where_fake_tensors_are_stale():
    graph, _, nodes = analysed(lambda x: x.exp().view(-1).sin(), (4, 8))
    nodes["view"].meta["val"] = torch.empty(32)  # as after the replacement of the view's base
    aliasing = Aliasing(graph)
    assert together(aliasing, nodes["exp"], nodes["view"])


def test_storages_count_where_schemas_say_nothing():
    graph, _, nodes = analysed(lambda x: x.exp() + x.sin(), (4, 8))
    nodes["sin"].meta["val"] = nodes["exp"].meta["val"].view(4, 8)
    assert together(Aliasing(graph), nodes["exp"], nodes["sin"])


def test_two_fresh_outputs_of_one_op_are_apart():
    graph, aliasing, _ = analysed(lambda x: torch.aminmax(x), (4, 8))
    first, second = (node for node in graph.nodes if node.target is operator.getitem)
    assert not together(aliasing, first, second)


def test_making_a_view_is_no_read():
    _, aliasing, nodes = analysed(lambda x: x.exp().view(-1).sin(), (4, 8))
    assert [access.node.name for access in aliasing.reads(nodes["exp"])] == ["sin"]


def test_an_unknown_call_reads_and_writes_everything():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(torch.ops.higher_order.cond, (x, x))
    effects = effects_of(call)
    assert effects.reads == effects.writes == effects.views == [x, x]


def test_an_out_argument_is_written():
    graph = torch.fx.Graph()
    x, out = graph.placeholder("x"), graph.placeholder("out")
    call = graph.call_function(torch.ops.aten.exp.out, (x,), {"out": out})
    effects = effects_of(call)
    assert effects.reads == [x]
    assert effects.writes == [out]
    assert effects.views == [out]


def test_arithmetic_on_sizes_touches_no_memory():
    graph = torch.fx.Graph()
    size = graph.placeholder("size")
    size.meta["val"] = 3
    call = graph.call_function(operator.mul, (size, 2))
    call.meta["val"] = 6
    assert effects_of(call).writes == []


def test_roots_of_a_view_are_its_base_alone():
    _, aliasing, nodes = analysed(lambda x: x.exp().t().view(torch.int32) + 1, (4, 8))
    assert aliasing.roots(nodes["view"]) == {nodes["exp"]}
