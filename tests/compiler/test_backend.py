"""The entries: the Dynamo backend, lowering for other backends, platforms with a compiler of their own."""

import pytest
import torch
from compiler_support import lowered, run, tensors
from torch.fx.experimental.proxy_tensor import make_fx

import irframework as ir
from irframework.compiler import backend
from irframework.errors import VerifyError

ARGUMENTS = ((4, 8), (4, 8), (8,))


def test_import_does_not_import_inductor():
    import subprocess
    import sys

    code = "import torch, sys, irframework, irframework.compiler; print('torch._inductor.compile_fx' in sys.modules)"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_lower_takes_graphs_without_fake_values(add):
    class Model(torch.nn.Module):
        def forward(self, x, r, w):
            return add.op.torch_op(x, r, w)

    graph = torch.fx.symbolic_trace(Model())
    arguments = tensors(*ARGUMENTS)
    with add.priority("inp"):
        module = ir.compiler.lower(graph, arguments)
    assert not any("irframework" in str(node.target) for node in module.graph.nodes)
    torch.testing.assert_close(module(*arguments), add.op.native(*arguments))


def test_lower_overwrites_no_input_of_a_graph_that_says_nothing(add):
    arguments = tensors(*ARGUMENTS)
    before = [t.clone() for t in arguments]
    traced = make_fx(lambda *a: add.op.maybe_inplace.torch_op(*a), tracing_mode="fake")(*arguments)
    with add.priority("inp"):
        ir.compiler.lower(traced, inference=True)(*arguments)
    torch.testing.assert_close(arguments, before)


def test_lower_takes_priorities(add):
    add.op.register_impl("zero")(lambda x, x_residual, weight: (x * 0, x_residual * 0))
    arguments = tensors(*ARGUMENTS)
    traced = make_fx(lambda *a: add.op.torch_op(*a), tracing_mode="fake")(*arguments)
    module = ir.compiler.lower(traced, ir_op_priority={add.op.name: ["zero"]})
    assert not module(*arguments)[0].any()


def test_an_op_left_in_the_graph_is_an_error(add, monkeypatch):
    from irframework.compiler import pipeline

    original = pipeline.steps_of
    monkeypatch.setattr(
        pipeline, "steps_of", lambda *a: [step for step in original(*a) if not step.name.startswith("lower")]
    )
    with pytest.raises(Exception, match="was not lowered") as caught:
        run(lambda *a: add.op(*a), *tensors(*ARGUMENTS))
    assert VerifyError.__name__ in str(caught.value)


def test_a_platforms_own_compiler_gets_lowered_graphs(add, monkeypatch):
    given = []

    def compiler(module, inputs):
        given.append([str(node.target) for node in module.graph.nodes])
        return module.forward

    monkeypatch.setattr(backend, "platform_compiler", lambda platform: compiler)
    arguments = tensors(*ARGUMENTS)
    got = run(lambda *a: add.op(*a), *arguments, backend="irframework")
    torch.testing.assert_close(got, add.op.native(*arguments))
    assert len(given) == 1
    assert not any("irframework" in target for target in given[0])


@pytest.mark.parametrize("provider", ["native", "inp"])
def test_gradients_are_those_of_native(add, provider):
    arguments = [t.requires_grad_() for t in tensors(*ARGUMENTS)]

    def f(x, r, w):
        y, r2 = add.op.maybe_inplace(x * 1, r, w)
        return (y * r2.sin()).sum()

    want = torch.autograd.grad(f(*arguments), arguments)
    with add.priority(provider):
        got = torch.autograd.grad(torch.compile(f, backend=lowered)(*arguments), arguments)
    torch.testing.assert_close(got, want)


def test_the_whole_model_is_one_graph(add):
    run(lambda *a: add.op.maybe_inplace(*a), *tensors(*ARGUMENTS), fullgraph=True)


def test_inference_mode_compiles(add):
    arguments = tensors(*ARGUMENTS)
    want = add.op.native(*arguments)
    with torch.inference_mode(), add.priority("inp"):
        inside = [t.clone() for t in arguments]
        got = torch.compile(lambda *a: add.op.maybe_inplace(*a), backend="irframework")(*inside)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_keep_ops_whole_and_lower_later(add, strict):
    class Model(torch.nn.Module):
        def forward(self, x, r, w):
            return add.op(x, r, w)

    arguments = tuple(tensors(*ARGUMENTS))
    program = torch.export.export(Model(), arguments, strict=strict)
    assert any(node.target is add.op.torch_op for node in program.graph.nodes)
    with add.priority("inp"):
        got = run(program.module(), *arguments)
    torch.testing.assert_close(got, add.op.native(*arguments))


@pytest.mark.parametrize("value", ["rms_norm=native", {"rms_norm": "native"}, ir.IrOpPriorityConfig(rms_norm="native")])
def test_priority_option_takes_what_a_configuration_takes(value):
    def function(x):
        return ir.ops.rms_norm(x, None, 1e-6)

    x = torch.randn(2, 8)
    compiled = torch.compile(function, backend="irframework", options={"ir_op_priority": value})
    assert torch.allclose(compiled(x), function(x), atol=1e-5)
