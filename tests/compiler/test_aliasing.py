"""Which values may share memory."""

import operator

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from irframework.compiler.aliasing import Aliasing, effects_of, stand_in


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


@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.ops.aten._unsafe_view(x, (32,)),
        lambda x: torch.ops.aten.unsafe_split(x, 2)[1],
        lambda x: torch.ops.aten.unsafe_split_with_sizes(x, (1, 3))[1],
    ],
    ids=["_unsafe_view", "unsafe_split", "unsafe_split_with_sizes"],
)
def test_a_view_is_one_though_its_schema_denies_it(view):
    graph, aliasing, nodes = analysed(lambda x: view(x.exp()).sin(), (4, 8))
    (sin,) = [node for node in graph.nodes if node.name.startswith("sin")]
    assert together(aliasing, nodes["exp"], sin.args[0])
    assert aliasing.roots(sin.args[0]) == {nodes["exp"]}


def test_a_view_whose_schema_denies_it_is_one_of_what_replaced_its_base():
    """As when an op is lowered: its result is another node now, and views keep the fake values that they had."""
    graph, _, nodes = analysed(lambda x: torch.ops.aten._unsafe_view(x.exp(), (32,)).sin(), (4, 8))
    old = nodes["exp"]
    with graph.inserting_before(old):
        new = graph.call_function(torch.ops.aten.exp2.default, old.args)
    new.meta["val"] = torch.empty(4, 8)
    stand_in(new, old.meta["val"], old)
    graph.erase_node(old)
    assert together(Aliasing(graph), new, nodes["_unsafe_view"])


def test_schemas_count_where_fake_tensors_are_stale():
    graph, _, nodes = analysed(lambda x: x.exp().view(-1).sin(), (4, 8))
    nodes["view"].meta["val"] = torch.empty(32)  # as after the replacement of the view's base
    aliasing = Aliasing(graph)
    assert together(aliasing, nodes["exp"], nodes["view"])


def test_items_of_a_view_are_views_where_fake_tensors_are_stale():
    graph, _, nodes = analysed(lambda x: x.exp().split(2)[1].sin(), (4, 8))
    item = nodes["sin"].args[0]
    nodes["split"].meta["val"] = torch.empty(4, 8).split(2)
    item.meta["val"] = nodes["split"].meta["val"][1]
    assert together(Aliasing(graph), nodes["exp"], item)


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


def test_an_argument_by_keyword_is_written():
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    effects = effects_of(graph.call_function(torch.ops.aten.add_.Tensor, (), {"self": x, "other": y}))
    assert (effects.reads, effects.writes, effects.views) == ([y], [x], [x])


def test_every_tensor_of_a_mutated_list_is_written():
    graph = torch.fx.Graph()
    x, y, z = (graph.placeholder(name) for name in "xyz")
    effects = effects_of(graph.call_function(torch.ops.aten._foreach_add_.List, ([x, y], [z, z])))
    assert (effects.reads, effects.writes) == ([z, z], [x, y])


@pytest.mark.parametrize("write", [lambda x: x.mul_(2), lambda x: x[1:].zero_(), lambda x: x.t().copy_(x.t() + 1)])
def test_a_write_through_a_view_is_a_write_to_the_base(write):
    def f(x):
        h = x.exp()
        write(h)
        return h

    _, aliasing, nodes = analysed(f, (4, 8))
    assert len(aliasing.writes(nodes["exp"])) == 1


def test_a_write_is_no_write_to_another_tensor():
    _, aliasing, nodes = analysed(lambda x: (x.exp().mul_(2), x.sin()), (4, 8))
    assert aliasing.writes(nodes["sin"]) == aliasing.writes(nodes["x_1"]) == []


def test_a_node_without_a_value_is_taken_for_a_tensor():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(torch.nn.functional.relu, (x,))
    assert effects_of(call).writes == [x]


def test_functional_higher_order_ops_write_nothing():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    target = torch.ops.higher_order.auto_functionalized
    effects = effects_of(graph.call_function(target, (torch.ops.aten.exp.out,), {"out": x}))
    assert (effects.reads, effects.writes, effects.views) == ([x], [], [])


def test_returning_is_reading():
    _, aliasing, nodes = analysed(lambda x: x.exp(), (4, 8))
    assert [access.node.op for access in aliasing.reads(nodes["exp"])] == ["output"]


def test_inputs_that_share_memory_are_together():
    base = torch.ones(4, 8)
    graph = make_fx(lambda x, y: x + y, tracing_mode="fake")(base[:2], base[1:3]).graph
    x, y = graph.find_nodes(op="placeholder")
    assert together(Aliasing(graph), x, y)


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
