"""A pass that fails: what is said of it, the file with the graph before it, and the graph that is given back."""

import pytest
import torch
from compiler_support import report, run, tensors
from torch.fx.experimental.proxy_tensor import make_fx

import irframework as ir
from irframework.compiler import foreign_passes, pipeline
from irframework.compiler.pipeline import AFTER, BEFORE
from irframework.compiler.report import graph_text
from irframework.errors import DonationError, LoweringError, VerifyError
from irframework.registry import registry


def test_a_pass_that_fails_is_named(monkeypatch, add):
    def broken(graph):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(foreign_passes, "compiler_passes", lambda stage: [("plug", broken)])
    with pytest.raises(Exception, match=r"'plug.broken' failed: ZeroDivisionError: oops"):
        run(lambda *a: add.op(*a), *tensors((4, 8), (4, 8), (8,)))


def lowered_text_of_a_failing_pass(monkeypatch, add, stage, broken):
    """A graph with one call of `add`, lowered with a plugin's pass that fails; what was raised, and the graph after."""
    monkeypatch.setattr(foreign_passes, "compiler_passes", lambda s: [("plug", broken)] if s == stage else [])
    module = make_fx(lambda *a: add.op(*a), tracing_mode="fake")(*tensors((4, 8), (4, 8), (8,)))
    before = graph_text(module.graph)
    with add.priority("inp"), pytest.raises(VerifyError) as caught:
        ir.compiler.lower(module)
    return str(caught.value), before, module


@pytest.mark.parametrize("stage", [BEFORE, AFTER])
def test_a_pass_that_fails_leaves_the_graph_as_it_was(monkeypatch, add, stage):
    def broken(graph):
        graph.output_node().args = ((),)
        graph.eliminate_dead_code()
        raise ZeroDivisionError("oops")

    _, before, module = lowered_text_of_a_failing_pass(monkeypatch, add, stage, broken)
    assert graph_text(module.graph) == before
    arguments = tensors((4, 8), (4, 8), (8,))
    torch.testing.assert_close(module(*arguments), add.op.native(*arguments))


def test_the_graph_before_a_pass_that_fails_is_in_a_file(monkeypatch, add, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def broken(graph):
        graph.output_node().args = ((),)
        raise ZeroDivisionError("oops")

    message, _, _ = lowered_text_of_a_failing_pass(monkeypatch, add, AFTER, broken)
    (file,) = (tmp_path / "irframework" / "failed").iterdir()
    text = file.read_text()
    assert str(file) in message
    assert ".k_.default(" in text  # the kernel: the graph as it was before this pass, not before the stage
    assert "ZeroDivisionError: oops" in text
    assert "return ()" not in text


def test_a_pass_that_fails_says_at_which_op_and_node(monkeypatch, add):
    def broken(*_):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr("irframework.compiler.lowering.inline", broken)
    with pytest.raises(Exception, match=rf"failed at op '{add.op.name}', node \w+ .*test_failing_passes.py"):
        run(lambda *a: add.op(*a), *tensors((4, 8), (4, 8), (8,)))
    failed = report().failed
    assert failed.name == "lower_inplace"
    assert add.op.name in failed.where


@pytest.mark.parametrize(
    ("name", "can_be_switched_off"), [("remove_copies", True), ("settle_donations", False), ("functionalize", False)]
)
def test_only_a_pass_that_can_be_switched_off_is_said_to(monkeypatch, add, name, can_be_switched_off):
    def broken(*_, **__):
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(pipeline, name, broken)
    with pytest.raises(Exception, match=f"'{name}' failed") as caught:
        run(lambda *a: add.op.maybe_inplace(*a), *tensors((4, 8), (4, 8), (8,)))
    assert ("switches it off" in str(caught.value)) == can_be_switched_off


def test_a_failed_lowering_leaves_the_op_whole(add, scale):
    @scale.register_impl("broken")
    def broken(x, factor=2.0):
        raise ZeroDivisionError("oops")

    def both(x, r, w):
        y, _ = add.op(x, r, w)
        return scale(y)

    module = make_fx(both, tracing_mode="fake")(*tensors((4, 8), (4, 8), (8,)))
    before = graph_text(module.graph)
    with ir.priority({scale.name: ["broken"]}), pytest.raises(LoweringError, match="The graph before pass"):
        ir.compiler.lower(module)
    assert graph_text(module.graph) == before


def test_a_use_after_donation_leaves_the_captured_graph_as_it_was(add):
    kept = []

    def backend(module, inputs):
        before = graph_text(module.graph)
        with pytest.raises(DonationError):
            ir.compiler.run_pre_grad_stage(module)
        kept.append((before, graph_text(module.graph)))
        return module.forward

    def misuse(x, r, w):
        h = x * 2
        y, _ = add.op.maybe_inplace(x * 3, r * 3, w)
        z, _ = add.op.maybe_inplace(h, y, w)
        return z + h

    run(misuse, *tensors((4, 8), (4, 8), (8,)), backend=backend)
    ((before, after),) = kept
    assert before == after


def test_an_op_that_a_late_pass_brings_in_is_an_error_with_the_reason(monkeypatch, add, scale):
    def late(graph):
        output = graph.output_node()
        (first, *rest) = output.args[0]
        with graph.inserting_before(output):
            again = graph.call_function(scale.torch_op, (first,))
        again.meta["val"] = first.meta["val"]
        output.args = ((again, *rest),)

    message, _, _ = lowered_text_of_a_failing_pass(monkeypatch, add, AFTER, late)
    assert "must not bring in IR ops" in message


def test_an_op_that_nobody_declares_here_is_an_error_with_the_reason(monkeypatch, add):
    module = make_fx(lambda *a: add.op(*a), tracing_mode="fake")(*tensors((4, 8), (4, 8), (8,)))
    monkeypatch.delitem(registry.ops, add.op.name)
    with pytest.raises(VerifyError, match="declared in this process"):
        ir.compiler.lower(module)
