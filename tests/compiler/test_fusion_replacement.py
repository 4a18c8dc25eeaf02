"""What stands in a graph where a fused op was found, and what is told where it was not. One fault per test."""

import pytest
import torch
from compiler_support import report, run
from fusion_support import W, X, Y, body_of, calls_of, fused_in, searched, traced
from torch import Tensor, tanh

import irframework as ir

R = X.flip(0)


def gated(x: Tensor, y: Tensor) -> Tensor:
    return tanh(x) * y


def total_and_gate(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return tanh(x + r) * w, x + r


# --- the graph -----------------------------------------------------------------------------------------------------


def test_what_an_op_is_made_of_is_gone(fused):
    fused(gated)
    module = traced(gated, X, Y)
    fused_in(module)
    assert not [node for node in module.graph.nodes if "aten" in str(node.target)]


def test_what_others_read_stays(fused):
    op = fused(gated, fuse=ir.supports(ndim={"x": 2}))

    def program(x, w):
        rows = x.view(2, 2, 8)
        return tanh(rows) * w, rows.sin()

    module = traced(program, X, W)
    assert fused_in(module).fusions == {op.name: 1}
    torch.testing.assert_close(module(X, W), program(X, W))


def test_an_op_stands_behind_all_its_inputs_and_before_all_readers(fused):
    op = fused(total_and_gate)

    def program(x, r, w):
        total = x + r
        sine = total.sin()
        return tanh(total) * w.cos(), sine

    assert searched(program, X, R, W).fusions == {op.name: 1}


def test_each_output_is_read_in_its_place(fused):
    op = fused(total_and_gate)

    def program(x, r, w):
        total = x + r
        return total, tanh(total) * w

    assert searched(program, X, R, W).fusions == {op.name: 1}


def test_an_output_has_the_shape_that_is_read(fused):
    op = fused(gated)
    assert searched(lambda x, w: (tanh(x).view(2, 2, 8) * w).sin(), X, W).fusions == {op.name: 1}


def test_an_output_has_the_order_of_dimensions_that_is_read(fused):
    op = fused(body_of(lambda x, y: (tanh(x) * y).permute(1, 2, 0)))
    op.register_input_generator(lambda shape, **options: (torch.ones(2, 3, 4), torch.ones(2, 3, 4)))
    inputs = torch.randn(3, 4, 2), torch.randn(3, 4, 2)
    found = searched(lambda x, y: tanh(x.permute(2, 0, 1)) * y.permute(2, 0, 1) + 1, *inputs)
    assert found.fusions == {op.name: 1}


def test_an_op_may_read_what_another_one_computes(fused):
    def larger(x: Tensor, y: Tensor) -> Tensor:
        return (x * y + x).sin()

    ops = fused(gated), fused(larger)
    assert searched(lambda x, y: gated(larger(x, y), y), X, Y).fusions == {op.name: 1 for op in ops}


def test_an_op_may_read_one_of_several_outputs(fused):
    ops = fused(body_of(lambda x, y: (x * y).cos())), fused(total_and_gate)

    def program(x, r, w):
        gate, total = total_and_gate(x, r, w)
        return (total * gate.sin()).cos()

    assert searched(program, X, R, W).fusions == {op.name: 1 for op in ops}


def test_what_depends_on_an_op_is_known_by_its_place(fused):
    op = fused(total_and_gate)
    larger = fused(body_of(lambda x, y: ((x * y + x).sin() + y).cos()))

    def program(x, r, y):
        total = x + r
        return tanh(total) * ((total * y + total).sin() + y).cos(), total

    found = searched(program, X, R, Y)
    assert found.fusions == {larger.name: 1}
    assert any("one of its inputs depends on" in miss.reason for miss in found.missed_fusions if miss.op == op.name)


def test_a_call_has_what_later_passes_ask_for(fused):
    op = fused(body_of(lambda x, y: (y.t().contiguous() * tanh(x.t().contiguous())).t()))
    op.register_spelling(gated)
    module = traced(gated, X, Y)
    for node in module.graph.nodes:
        node.stack_trace = f"line of {node.name}"
    fused_in(module)
    (call,) = calls_of(module, op)
    assert call.meta["val"].is_contiguous()
    assert call.stack_trace == "line of mul"


def spelt_by_itself(fused, **options):
    """An op whose graphs hold it as one op, and that is known behind a call of itself."""

    def long_gate(
        x: Tensor, y: Tensor, scale: Tensor | None = None, factor: float = 0.5, shift: Tensor | None = None
    ) -> Tensor:
        gate = tanh(x) * y * factor
        gate = gate if shift is None else gate + shift
        return gate if scale is None else gate * scale

    op = fused(long_gate, **options)

    @op.register_fake
    def shape(
        x: Tensor, y: Tensor, scale: Tensor | None = None, factor: float = 0.5, shift: Tensor | None = None
    ) -> Tensor:
        return torch.empty_like(x)

    @op.register_spelling
    def spelling(
        x: Tensor, y: Tensor, scale: Tensor | None = None, factor: float = 0.5, shift: Tensor | None = None
    ) -> Tensor:
        gate = op(x, y, None, factor, shift)
        return gate if scale is None else gate * scale

    @op.register_input_generator
    def inputs(shape, **options):
        return tuple(torch.ones(shape, **options) for _ in range(3))

    return op


def test_what_is_given_to_the_op_itself_is_read_off_its_call(fused):
    op = spelt_by_itself(fused)
    module = traced(lambda x, y, s: op(x, y, None, 0.25, y) * s, X, Y, R)
    assert fused_in(module).fusions == {op.name: 1}
    (call,) = calls_of(module, op)
    assert [str(argument) for argument in call.args] == ["x_1", "y_1", "s_1", "0.25", "y_1"]


def test_a_copy_of_a_call_is_no_call(fused):
    op = spelt_by_itself(fused, fuse=ir.supports(ndim={"scale": 1}))
    found = searched(lambda x, y, s: op(x, y).clone() * s, X, Y, R)
    assert [miss.op for miss in found.missed_fusions] == [op.name]


# --- sizes that are not known --------------------------------------------------------------------------------------


def test_an_output_may_have_sizes_that_are_inputs_of_the_graph(fused):
    op = fused(gated)
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    run(lambda x, w: (tanh(x)[None] * w).sin(), x, W)
    assert report().fusions == {op.name: 1}


def test_a_reshape_may_read_a_size_and_the_size_be_read_elsewhere(fused):
    op = fused(gated)
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    run(lambda x, w: (tanh(x).view(x.shape[0], 1, 8) * w, x.view(1, x.shape[0], 8) + 1), x, W)
    assert report().fusions == {op.name: 1}


def test_rows_that_are_cut_are_other_rows_however_many_there_are(fused):
    fused(body_of(lambda x: tanh(x).amax(-1, keepdim=True)))
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    run(lambda x: tanh(x).view(-1, 4).amax(-1, keepdim=True), x)
    assert report().fusions == {}


def test_what_a_predicate_would_guard_stays_as_it_is(fused):
    """Of a call of the op it is an error; nobody called it."""
    op = fused(gated)
    op.unregister_impl("k")
    op.register_impl("k", supports_args=lambda x, y: x.shape[0] % 4 == 0)(op.native)
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    run(lambda x, w: tanh(x) * w, x, W)
    assert report().fusions == {}
    (miss,) = [miss for miss in report().missed_fusions if miss.op == op.name]
    assert "k" in miss.reason
    assert "% 4" in miss.reason or "Mod" in miss.reason


def test_one_size_of_an_output_may_follow_from_the_others(fused):
    op = fused(gated)
    x = X.clone()
    torch._dynamo.mark_dynamic(x, 0)
    run(lambda x, w: (tanh(x).view(2, -1, 8) * w).sin(), x, W)
    assert report().fusions == {op.name: 1}


@pytest.mark.parametrize("where", [0, 1])
def test_a_size_of_an_output_does_not_follow_from_others_that_may_be_zero(fused, where):
    op = fused(gated)
    x = torch.rand(4, 6, 2, 8)
    for dim in (0, 1):
        torch._dynamo.mark_dynamic(x, dim)
    by = (lambda x: (x.shape[0], -1, 8), lambda x: (x.shape[0] * 2, x.shape[1] // 2 * 2, 8))[where]
    run(lambda x, w: (tanh(x).reshape(by(x)) * w).sin(), x, W)
    (miss,) = [miss for miss in report().missed_fusions if miss.op == op.name]
    assert miss.reason.endswith("has another shape, with a size that is no input of the graph")


# --- what is told --------------------------------------------------------------------------------------------------


def test_only_the_largest_miss_at_a_place_is_told(fused):
    small = fused(gated, fuse=ir.supports(ndim={"y": 1}))
    large = fused(body_of(lambda x, y: tanh(x.cos()) * y), fuse=ir.supports(ndim={"y": 1}))
    found = searched(lambda x, y: tanh(x.cos()) * y, X, Y)
    assert [miss.op for miss in found.missed_fusions if miss.op in (small.name, large.name)] == [large.name]


def test_where_a_smaller_op_was_found_no_larger_one_is_missed(fused):
    small = fused(gated)
    fused(body_of(lambda x, y: tanh(x.cos()) * y), fuse=ir.supports(ndim={"y": 1}))
    found = searched(lambda x, y: tanh(x.cos()) * y, X, Y)
    assert (found.fusions, found.missed_fusions) == ({small.name: 1}, [])


def test_where_an_op_stands_that_is_as_large_nothing_is_missed(fused):
    def gate_and_sum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return tanh(x) * y, x + y

    there = fused(gate_and_sum)
    fused(body_of(lambda x, y: tanh(x.cos()) * y), fuse=ir.supports(ndim={"y": 1}))
    found = searched(lambda x, y: there(x.cos(), y)[0], X, Y)
    assert (found.fusions, found.missed_fusions) == ({}, [])


def test_an_op_stands_where_its_result_is_the_only_part_of_a_split(fused):
    def gate_and_sum(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return tanh(x) * y, x + y

    there = fused(gate_and_sum)
    fused(body_of(lambda x, y: tanh(x.cos()) * y), fuse=ir.supports(ndim={"y": 1}))

    def program(x, y):
        gate = there(x.cos(), y)[0]
        return gate, gate.split(5)[0]

    found = searched(program, X, Y)
    assert (found.fusions, found.missed_fusions) == ({}, [])


def test_what_is_computed_from_a_larger_op_may_be_missed(fused):
    there = fused(body_of(lambda x, y: tanh(x) * y))
    op = fused(body_of(lambda h: (h * h).sin()), fuse=ir.supports(ndim={"h": 1}))

    def program(x, y):
        gate = there(x, y)
        return (gate * gate).sin()

    found = searched(program, X, Y)
    assert [miss.op for miss in found.missed_fusions] == [op.name]


def test_misses_are_those_of_the_last_search(fused):
    first = fused(body_of(lambda x, y: (tanh(x) * y).permute(1, 0)))
    second = fused(body_of(lambda h, z: z * h.permute(1, 0).sin()))
    missed = fused(body_of(lambda x: x.exp() + x), fuse=ir.supports(ndim={"x": 1}))

    def program(x, y, z):
        return z * (tanh(x.t()) * y.t()).sin(), z.exp() + z

    found = searched(program, X, Y, R.reshape(8, 4))
    assert found.fusions == {first.name: 1, second.name: 1}
    assert [miss.op for miss in found.missed_fusions] == [missed.name]
