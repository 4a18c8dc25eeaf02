"""What is checked after a pass that is not ours: each way to break a graph is found, said, and undone."""

import operator
import sys
from pathlib import Path

import pytest
import torch
from compiler_support import run, tensors
from torch.fx.experimental.proxy_tensor import make_fx

import irframework as ir
from irframework.compiler import foreign_passes
from irframework.compiler.pass_checks import Before, BrokenGraph
from irframework.compiler.report import graph_text
from irframework.errors import VerifyError

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from distributions import answer, run_python, write_distribution

aten = torch.ops.aten


def program(x, w):
    y = x * 2 + w
    return y.sum(-1), (y * 1).view(8, 4)


def graph_of(function=program, *shapes):
    return make_fx(function, tracing_mode="fake")(*tensors(*(shapes or ((4, 8), (8,)))))


def find(graph, target):
    return next(iter(graph.find_nodes(op="call_function", target=target)))


def returns(graph, *outputs):
    graph.output_node().args = (outputs,)


# --- faults ----------------------------------------------------------------------------------------------------------


def another_dtype(graph):
    product = find(graph, aten.add.Tensor)
    with graph.inserting_after(product):
        half = graph.call_function(aten.to.dtype, (product, torch.bfloat16))
    product.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)


def another_shape(graph):
    find(graph, aten.view.default).args = (find(graph, aten.view.default).args[0], [2, 16])


def other_strides(graph):
    view = find(graph, aten.view.default)
    with graph.inserting_after(view):
        turned = graph.call_function(aten.as_strided.default, (view, [8, 4], [1, 8]))
    view.replace_all_uses_with(turned, delete_user_cb=lambda user: user is not turned)


def fewer_outputs(graph):
    returns(graph, graph.output_node().args[0][0])


def an_output_that_is_no_tensor(graph):
    returns(graph, graph.output_node().args[0][0], None)


def one_input_less(graph):
    w = graph.find_nodes(op="placeholder")[1]
    w.replace_all_uses_with(graph.find_nodes(op="placeholder")[0])
    graph.erase_node(w)


def one_input_more(graph):
    with graph.inserting_before(find(graph, aten.mul.Tensor)):
        graph.placeholder("surprise")


def a_reader_before_its_value(graph):
    find(graph, aten.mul.Tensor).prepend(find(graph, aten.view.default))


def a_node_that_was_erased(graph):
    product = find(graph, aten.mul.Tensor)
    product.users.clear()
    graph.erase_node(product)


def arguments_that_do_not_fit(graph):
    product = find(graph, aten.add.Tensor)
    with graph.inserting_before(product):
        short = graph.call_function(aten.slice.Tensor, (product.args[1], 0, 0, 3))
    product.args = (product.args[0], short)


def a_packet(graph):
    find(graph, aten.mul.Tensor).target = aten.mul
    with graph.inserting_after(find(graph, aten.mul)):
        graph.call_function(aten.mul, find(graph, aten.mul).args)


def an_op_itself(graph):
    product = find(graph, aten.mul.Tensor)
    with graph.inserting_after(product):
        graph.call_function(ir.ops.rms_norm, (product, None, 1e-6))


def a_function_without_value(graph):
    product = find(graph, aten.mul.Tensor)
    with graph.inserting_after(product):
        graph.call_function(program, (product, product))


def the_memory_of_an_input(graph):
    x = graph.find_nodes(op="placeholder")[0]
    product = find(graph, aten.view.default)
    product.args = (x, product.args[1])


def an_input_overwritten(graph):
    x, product = graph.find_nodes(op="placeholder")[0], find(graph, aten.add.Tensor)
    with graph.inserting_before(graph.output_node()):
        graph.call_function(aten.copy_.default, (x, product))


FAULTS = {
    another_dtype: r"output 0 was f32\[4\]\[1\], and is bf16\[4\]\[1\]",
    another_shape: r"output 1 was f32\[8, 4\]\[4, 1\], and is f32\[2, 16\]\[16, 1\]",
    other_strides: r"output 1 was f32\[8, 4\]\[4, 1\], and is f32\[8, 4\]\[1, 8\]",
    fewer_outputs: r"returned 2 values, and returns 1",
    an_output_that_is_no_tensor: r"output 1 was f32\[8, 4\]\[4, 1\], and is None",
    one_input_less: r"inputs were \w+, \w+, and are \w+[.:]? ?",
    one_input_more: r"inputs were \w+, \w+, and are \w+, \w+, surprise",
    a_reader_before_its_value: r"malformed: .*before it has been defined",
    a_node_that_was_erased: r"malformed: ",
    arguments_that_do_not_fit: r"node add\w* \(aten.add.Tensor\) cannot be computed from its arguments: RuntimeError",
    a_packet: r"calls aten.mul, and must call an overload of it, e.g. aten.mul.Tensor",
    an_op_itself: r"must call irframework.rms_norm.default, its torch_op",
    a_function_without_value: r"has no fake value; a pass must give it meta\['val'\]",
    the_memory_of_an_input: r"output 1 shares memory with input \w+ now",
    an_input_overwritten: r"the graph writes to its input \w+, which is its caller's",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_pass_that_breaks_the_graph_is_named_and_the_graph_is_as_it_was(monkeypatch, fault):
    monkeypatch.setattr(
        foreign_passes, "compiler_passes", lambda stage: [("plug", fault)] if stage == "after_fusion" else []
    )
    module = graph_of()
    before = graph_text(module.graph)
    with pytest.raises(VerifyError, match=FAULTS[fault]) as caught:
        ir.compiler.lower(module, inference=True)
    said = str(caught.value)
    assert f"Compiler pass 'plug.{fault.__name__}' broke the graph: " in said
    assert f"It is of plugin 'plug'. IRFRAMEWORK_DISABLE_PASSES=plug.{fault.__name__} switches it off." in said
    assert graph_text(module.graph) == before


def test_outputs_that_begin_to_share_memory_are_found():
    graph = graph_of(lambda x, w: (x + w, x - w)).graph
    before = Before.of(graph)
    first = graph.output_node().args[0][0]
    with graph.inserting_after(first):
        view = graph.call_function(aten.view.default, (first, [4, 8]))
    returns(graph, first, view)
    with pytest.raises(BrokenGraph, match="output 1 shares memory with output 0 now"):
        before.check(graph, inference=True)


def test_a_write_to_an_input_that_is_dropped_is_found():
    def f(x, w):
        x.copy_(x + w)
        return x * 2

    graph = graph_of(f).graph
    before = Before.of(graph)
    written = find(graph, aten.copy_.default)
    written.replace_all_uses_with(written.args[1])
    graph.erase_node(written)
    with pytest.raises(BrokenGraph, match=r"wrote to its input \w+, and does not any more"):
        before.check(graph, inference=True)


def test_what_a_training_graph_saves_may_be_an_input():
    module = graph_of()
    ir.compiler.lower(module, ir_passes={"after_fusion": [the_memory_of_an_input]})


# --- what is no fault ------------------------------------------------------------------------------------------------


def nothing(graph):
    pass


def dead_code(graph):
    with graph.inserting_before(find(graph, aten.add.Tensor)):
        graph.call_function(aten.neg.default, find(graph, aten.add.Tensor).args[:1])


def an_equal_computation(graph):
    product = find(graph, aten.mul.Tensor)
    with graph.inserting_before(product):
        same = graph.call_function(aten.add.Tensor, (product.args[0], product.args[0]))
    product.replace_all_uses_with(same)
    graph.erase_node(product)


def there_and_back(graph):
    product = find(graph, aten.add.Tensor)
    with graph.inserting_after(product):
        wide = graph.call_function(aten.to.dtype, (product, torch.float64))
    with graph.inserting_after(wide):
        pair = graph.call_function(aten.split.Tensor, (wide, 8, 1))
    with graph.inserting_after(pair):
        only = graph.call_function(operator.getitem, (pair, 0))
    with graph.inserting_after(only):
        back = graph.call_function(aten.to.dtype, (only, torch.float32))
    product.replace_all_uses_with(back, delete_user_cb=lambda user: user is not wide)


@pytest.mark.parametrize("change", [nothing, dead_code, an_equal_computation, there_and_back])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_pass_that_keeps_the_function_is_let_through_and_its_nodes_get_values(change, dynamic):
    graphs = []

    def watch(graph):
        graphs.append({node.name: node.meta["val"] for node in graph.nodes if node.op == "call_function"})

    with ir.compiler.register_pass("after_fusion", change), ir.compiler.register_pass("after_fusion", watch):
        x, w = tensors((4, 8), (8,))
        got = run(program, x, w, dynamic=dynamic)
    torch.testing.assert_close(got, program(x, w))
    assert all(isinstance(value, (torch.Tensor, tuple, list)) or dynamic for value in graphs[0].values())


def test_values_behind_a_change_are_computed_anew():
    graph = graph_of(lambda x, w: ((x * w) + 1).sum() > 0).graph
    before = Before.of(graph)
    product = find(graph, aten.mul.Tensor)
    with graph.inserting_before(product):
        half = graph.call_function(aten.to.dtype, (product.args[0], torch.float64))
    product.args = (half, product.args[1])
    behind = find(graph, aten.add.Tensor)
    before.check(graph, inference=True)
    assert behind.meta["val"].dtype is torch.float64


def test_a_constant_that_a_pass_adds_gets_a_value():
    module = graph_of()

    def constant(graph):
        module.register_buffer("extra", torch.ones(8))
        product = find(graph, aten.add.Tensor)
        with graph.inserting_before(product):
            node = graph.get_attr("extra")
            total = graph.call_function(aten.add.Tensor, (product.args[1], node))
        product.args = (product.args[0], total)

    x, w = tensors((4, 8), (8,))
    ir.compiler.lower(module, ir_passes={"after_fusion": [constant]})
    torch.testing.assert_close(module(x, w), program(x, w + 1))


def test_donated_inputs_are_overwritten_between_the_checks(add):
    x, r, w = tensors((4, 8), (4, 8), (8,))
    wanted = add.op.native(x, r, w)
    with ir.compiler.register_pass("after_lowering", nothing), add.priority("inp"):
        got = run(lambda x, r, w: add.op.maybe_inplace(x, r, w), x, r, w)
    torch.testing.assert_close(got, wanted)


def test_sizes_that_only_a_run_can_tell_keep_their_names():
    def f(x):
        rows = x[x[:, 0] > 0]
        return rows * 2 + rows

    x = torch.randn(6, 4)
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True),
        ir.compiler.register_pass("after_fusion", an_equal_computation),
    ):
        torch.testing.assert_close(run(f, x, fullgraph=True), f(x))


def test_other_sizes_under_symbolic_shapes_are_a_fault():
    def one_row_less(graph):
        total = find(graph, aten.add.Tensor)
        with graph.inserting_after(total):
            cut = graph.call_function(aten.slice.Tensor, (total, 0, 1, 9223372036854775807))
        total.replace_all_uses_with(cut, delete_user_cb=lambda user: user is not cut)

    with ir.compiler.register_pass("after_fusion", one_row_less), pytest.raises(Exception, match="output 0 was f32"):
        run(lambda x, w: x * 2 + w, *tensors((4, 8), (8,)), dynamic=True)


def test_a_stock_compile_says_who_broke_its_graph():
    ir.install()
    with (
        ir.compiler.register_pass("before_fusion", fewer_outputs),
        pytest.raises(Exception, match=r"'user.fewer_outputs' broke the graph: .*It is of the program \(.*\.py:\d+\)"),
    ):
        run(program, *tensors((4, 8), (8,)), backend="inductor")


def test_a_plugins_version_is_said(tmp_path):
    body = """
        def spoil(graph):
            graph.output_node().args = ((),)

        @ir.hookimpl
        def irframework_passes(stage):
            return [spoil] if stage == "before_fusion" else None
    """
    write_distribution(tmp_path, "a-spoiler", body, version="2.5")
    code = """
        import json, torch, irframework as ir
        from torch.fx.experimental.proxy_tensor import make_fx
        module = make_fx(lambda x: x + 1, tracing_mode="fake")(torch.ones(2))
        try:
            ir.compiler.lower(module)
        except ir.errors.VerifyError as error:
            print(json.dumps(str(error)))
    """
    said = answer(run_python(code, tmp_path))
    assert "'a-spoiler.spoil' broke the graph: the graph returned 1 values, and returns 0" in said
    assert "plugin 'a-spoiler' (a-spoiler 2.5, a_spoiler)" in said
