"""What forbids that a part of a graph becomes a fused op, and what does not. One fault per test."""

import torch
from fusion_support import W, X, Y, body_of, calls_of, fused_in, searched, traced
from torch import Tensor, tanh
from torch.fx.experimental.proxy_tensor import make_fx

import irframework as ir
from irframework.compiler.aliasing import storage_of
from irframework.compiler.clones import donate_op

B = X.bfloat16()
R = X.flip(0)


def gated(x: Tensor, y: Tensor) -> Tensor:
    return tanh(x) * y


def also_gated(x: Tensor, y: Tensor) -> Tensor:
    return y * tanh(x)


def total_and_gate(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return tanh(x + r) * w, x + r


def product_and_gate(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return tanh(x + r) * w, x * r


def copy_and_gate(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x.clone(), tanh(x) * y


def missed(report, op) -> str:
    """Why an op was not found, where it nearly was, and only there."""
    assert report.fusions.get(op.name, 0) == 0
    (miss,) = [miss for miss in report.missed_fusions if miss.op == op.name]
    return miss.reason


# --- other readers -------------------------------------------------------------------------------------------------


def test_what_is_computed_on_the_way_has_no_other_reader(fused):
    op = fused(gated)

    def program(x, y):
        bent = tanh(x)
        return bent * y, bent.sin()

    assert missed(searched(program, X, Y), op) == "tanh, which it computes on the way, is also used by sin"


def test_a_view_of_an_input_may_have_other_readers(fused):
    op = fused(gated, fuse=ir.supports(ndim={"x": 2}))

    def program(x, w):
        rows = x.view(2, 2, 8)
        return tanh(rows) * w, rows.sin()

    assert searched(program, X, W).fusions == {op.name: 1}


def test_an_output_may_have_other_readers(fused):
    op = fused(total_and_gate)

    def program(x, r, w):
        total = x + r
        return tanh(total) * w, total.sin()

    assert searched(program, X, R, W).fusions == {op.name: 1}


def test_a_place_that_computes_an_input_once_more_is_left_as_it_is(fused):
    op = fused(body_of(lambda h, y: tanh(h) * y + h))

    def program(x, y):
        return tanh(x.float()) * y + x.float()

    assert searched(program, B, Y).fusions == {op.name: 1}


def test_what_also_reads_something_else_is_not_replaced(fused):
    op = fused(body_of(lambda x, y: tanh(x) * 3.0 - y))
    module = make_fx(lambda x, y, z: tanh(x) * torch.full_like(z, 3.0) - y, tracing_mode="fake")(X, Y, R)
    assert missed(fused_in(module), op) == "it also reads z_1"


# --- outputs -------------------------------------------------------------------------------------------------------


def test_no_output_is_computed_that_the_program_does_not_compute(fused):
    op = fused(product_and_gate)
    reason = missed(searched(lambda x, r, w: tanh(x + r) * w, X, R, W), op)
    assert reason == "its output 1 is computed nowhere here, and would cost extra"


def test_an_output_off_the_way_to_the_others_is_found(fused):
    op = fused(product_and_gate)
    assert searched(lambda x, r, w: (x * r, tanh(x + r) * w), X, R, W).fusions == {op.name: 1}


def test_an_output_that_an_op_computes_for_nobody_costs_nothing(fused):
    inner = fused(product_and_gate)

    def sine_of_both(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        gate, product = product_and_gate(x, r, w)
        return gate.sin(), product

    op = fused(sine_of_both)
    assert searched(lambda x, r, w: inner(x, r, w)[0].sin(), X, R, W).fusions == {op.name: 1}


def test_a_half_that_nobody_reads_would_be_a_copy(fused):
    def halves(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        middle = x.shape[-1] // 2
        return tanh(x[..., :middle]) * y[..., :middle], x[..., middle:].clone()

    op = fused(halves)
    reason = missed(searched(lambda x, y: tanh(x.split(4, -1)[0]) * y.split(4, -1)[0], X, Y), op)
    assert "would cost extra" in reason


def test_an_output_that_is_an_input_is_replaced_as_the_others_are(fused):
    op = fused(copy_and_gate)
    module = traced(lambda x, y: (tanh(x) * y, x.clone()), X, Y)
    assert fused_in(module).fusions == {op.name: 1}
    assert "clone" not in str(module.graph)


# --- order ---------------------------------------------------------------------------------------------------------


def test_no_input_depends_on_an_output(fused):
    op = fused(total_and_gate)

    def program(x, r):
        total = x + r
        return tanh(total) * total.mean(0), total

    assert "one of its inputs depends on add" in missed(searched(program, X, R), op)


def test_no_input_depends_on_an_output_that_is_an_input_itself(fused):
    op = fused(copy_and_gate)

    def program(x):
        copy = x.clone()
        return tanh(x) * copy.sin(), copy

    assert "one of its inputs depends on clone" in missed(searched(program, X), op)


def test_an_input_is_what_it_was_when_the_program_read_it(fused):
    op = fused(gated)

    def program(x, y):
        copy = x.clone()
        x.add_(1)
        return tanh(copy) * y

    assert missed(searched(program, X, Y), op) == "add_ overwrites memory in between"


def test_nothing_is_overwritten_between_the_steps(fused):
    op = fused(body_of(lambda x, y: tanh(x.float()) * y))

    def program(x, y):
        wide = torch.ops.prims.convert_element_type(x, torch.float32)
        x.add_(1)
        return tanh(wide) * y

    assert missed(searched(program, X, Y), op) == "add_ overwrites memory in between"


def test_what_is_computed_again_behind_a_write_is_another_value(fused):
    op = fused(gated)

    def program(x, y):
        rows = x.view(2, 16)
        before = rows.sin()
        x.add_(1)
        return tanh(rows.sin()) * y, before

    assert searched(program, X, Y.view(2, 16)).fusions == {op.name: 1}


def test_two_places_that_become_one_are_not_overwritten_later(fused):
    def gate_and_total(x: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        return tanh(x + r) * (x + r), x + r

    op = fused(gate_and_total)

    def program(x, r):
        one, other = x + r, x + r
        return tanh(one) * other, one.add_(1), other

    assert missed(searched(program, X, R), op) == "add_ overwrites memory in between"


def test_two_places_that_become_one_are_not_both_returned(fused):
    op = fused(total_and_gate)

    def program(x, r, w):
        total = x + r
        copy = total.clone()
        return tanh(copy) * w, total, copy

    assert missed(searched(program, X, R, W), op).endswith("are returned, as tensors of their own")


def test_nor_are_views_of_two_places_that_become_one(fused):
    op = fused(total_and_gate)

    def program(x, r, w):
        total = x + r
        copy = total.clone()
        return tanh(copy) * w, total.view(2, 2, 8)[1:], copy

    assert "are returned, as tensors of their own" in missed(searched(program, X, R, W), op)


def test_one_of_two_places_that_become_one_may_be_returned_with_its_views(fused):
    op = fused(total_and_gate)

    def program(x, r, w):
        total = x + r
        rows = total.view(2, 2, 8)
        return tanh(rows.clone()) * w, total, rows

    assert searched(program, X, R, W).fusions == {op.name: 1}


# --- what an output is like ----------------------------------------------------------------------------------------


def test_an_output_has_the_dtype_of_native(fused):
    def narrowed(x: Tensor, y: Tensor) -> Tensor:
        return (y * tanh(x)).float() if x.dtype == torch.float64 else y * tanh(x)

    op = fused(body_of(lambda x, y: torch.sinh(x) / torch.cosh(x) * y))
    op.register_spelling(narrowed)
    report = searched(lambda x, y: (y * tanh(x)).float(), X.double(), Y.double())
    assert "has dtype torch.float32, the op's output torch.float64" in missed(report, op)


def test_an_output_is_contiguous(fused):
    op = fused(gated)
    reason = missed(searched(lambda x, y: tanh(x.t()) * y.t(), X, Y), op)
    assert reason == "mul is not contiguous"


def turned_gate(x: Tensor, y: Tensor) -> Tensor:
    return (tanh(x) * y).permute(1, 0)


def test_an_output_may_have_its_dimensions_in_another_order(fused):
    op = fused(turned_gate)
    assert searched(lambda x, y: tanh(x.t()) * y.t() + 1, X, Y).fusions == {op.name: 1}


def test_an_output_is_contiguous_in_the_order_of_the_op(fused):
    op = fused(turned_gate)
    reason = missed(searched(lambda x, y, z: tanh(x) * y + z.t(), X, Y, X.view(8, 4)), op)
    assert reason == "mul is not contiguous in the order of the op"


def test_an_output_in_another_order_has_the_shape_of_the_op(fused):
    op = fused(turned_gate)
    reason = missed(searched(lambda x, w, z: (tanh(x).view(2, 2, 8) * w, z.t().sin()), X, W, R), op)
    assert reason == "mul has another shape, and its dimensions another order"


def test_an_op_in_the_graph_has_its_dimensions_in_its_own_order(fused):
    inner = fused(turned_gate)

    def gate_and_sine(x: Tensor, y: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        gate = turned_gate(x, y)
        return (gate * z).sin(), gate

    op = fused(gate_and_sine)

    def program(x, y, z):
        gate = inner(x, y)
        return (gate * z).sin(), gate

    assert searched(program, X, Y, X.view(8, 4)).fusions == {op.name: 1}


# --- whose it is ---------------------------------------------------------------------------------------------------


def test_an_op_that_is_there_is_not_replaced_by_itself(fused):
    op = fused(body_of(lambda x, y: tanh(x.float()) * y))
    report = searched(lambda x, y: op(x.float(), y), B, Y)
    assert (report.fusions, report.missed_fusions) == ({}, [])


def test_an_op_that_is_there_is_not_replaced_by_one_with_its_definition(fused):
    there = fused(gated, supports_args=ir.supports(dtype=torch.bfloat16))
    fused(also_gated, supports_args=ir.supports(dtype=torch.float32))
    report = searched(lambda x, y: there(x, y), X, Y)
    assert (report.fusions, report.missed_fusions) == ({}, [])


def test_an_op_with_several_outputs_is_not_replaced_by_one_with_its_definition(fused):
    def gate_and_total(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return w * tanh(r + x), r + x

    there = fused(total_and_gate, supports_args=ir.supports(dtype=torch.bfloat16))
    fused(gate_and_total, supports_args=ir.supports(dtype=torch.float32))
    report = searched(lambda x, r, w: there(x, r, w), X, R, W)
    assert (report.fusions, report.missed_fusions) == ({}, [])


def test_an_op_on_a_view_is_not_replaced_by_one_with_its_definition(fused):
    def gated_matrix(x: Tensor, y: Tensor) -> Tensor:
        if x.dim() != 2:
            raise ValueError("x must be a matrix")
        return tanh(x) * y

    there = fused(gated, supports_args=ir.supports(dtype=torch.bfloat16))
    fused(gated_matrix, supports_args=ir.supports(dtype=torch.float32))
    report = searched(lambda x, w: there(x.view(2, 2, 8), w), X, W)
    assert (report.fusions, report.missed_fusions) == ({}, [])


def test_an_op_may_be_defined_by_itself(fused):
    def gate_times(x: Tensor, y: Tensor, scale: Tensor | None = None) -> Tensor:
        return tanh(x) * y if scale is None else op(x, y) * scale

    op = fused(gate_times)
    assert searched(lambda x, y, s: op(x, y) * s, X, Y, R).fusions == {op.name: 1}


def test_arguments_are_in_the_domain_of_the_op(fused):
    op = fused(gated, fuse=ir.supports(ndim={"y": 1}))
    assert "outside of the op's domain: " in missed(searched(gated, X, Y), op)


def test_what_native_would_run_is_not_replaced(fused):
    op = fused(gated, supports_args=lambda x, y: ir.reject("not today"))
    assert missed(searched(gated, X, Y), op) == "only native would run it (k: not today)"


def test_arguments_that_look_alike_are_asked_about_once(fused):
    asked = []
    op = fused(gated, supports_args=lambda x, y: not asked.append(x))
    module = traced(lambda x, y: tanh(tanh(tanh(x) * y) * y) * y, X, Y)
    assert fused_in(module).fusions == {op.name: 3}
    assert len(asked) == 1


def test_other_arguments_are_asked_about_again(fused):
    op = fused(gated, supports_args=lambda x, y: x.ndim == 2 or ir.reject("not two dimensions"))
    report = searched(lambda x, y: (tanh(x) * y, tanh(x[0]) * y[0]), X, Y)
    assert report.fusions == {op.name: 1}
    assert [miss.reason for miss in report.missed_fusions] == ["only native would run it (k: not two dimensions)"]


def test_arguments_that_share_memory_are_asked_about_again(fused):
    op = fused(gated, supports_args=lambda x, y: storage_of(x) != storage_of(y) or ir.reject("one memory"))
    report = searched(lambda x, y: (tanh(x) * y, tanh(x) * x), X, Y)
    assert report.fusions == {op.name: 1}
    assert [miss.reason for miss in report.missed_fusions] == ["only native would run it (k: one memory)"]


# --- what was given away -------------------------------------------------------------------------------------------


def given_to(fused, given: str, **options):
    op = fused(gated, **options)

    def program(x, y):
        x, y = (donate_op()(x), y) if given == "x" else (x, donate_op()(y))
        return tanh(x) * y

    module = traced(program, X, Y)
    assert fused_in(module).fusions == {op.name: 1}
    (call,) = calls_of(module, op)
    return [argument.target is donate_op() for argument in call.args]


def test_what_a_program_gives_away_is_given_to_the_op(fused):
    assert given_to(fused, "x", allow_inplace=True, activations=["x"]) == [True, False]


def test_what_an_op_may_not_overwrite_is_not_given_to_it(fused):
    assert given_to(fused, "y", allow_inplace=True, activations=["x"]) == [False, False]


def test_an_op_that_overwrites_nothing_is_given_nothing(fused):
    assert given_to(fused, "x", activations=["x"]) == [False, False]


# --- what costs more than it saves ---------------------------------------------------------------------------------


def test_what_is_widened_for_an_op_alone_stays_in_registers(fused):
    op = fused(gated)

    def program(x, y):
        return tanh(x.float()) * y

    assert missed(searched(program, B, Y), op) == "convert_element_type, which it reads, is widened for it alone"


def test_what_is_widened_for_others_too_is_read_where_it_is(fused):
    op = fused(gated)

    def program(x, y):
        wide = x.float()
        return tanh(wide) * y, wide + 1

    assert searched(program, B, Y).fusions == {op.name: 1}


def test_what_is_narrowed_is_read_where_it_is(fused):
    op = fused(gated)

    def program(x, y):
        return tanh(x.bfloat16()) * y

    assert searched(program, X, Y.bfloat16()).fusions == {op.name: 1}


# --- behind an output whose dimensions were put back in order ------------------------------------------------------


def bent(x: Tensor) -> Tensor:
    return tanh(x.t()).t()


def grown(x: Tensor) -> Tensor:
    return (x.t().exp() + 1).t()


def test_what_reads_an_output_in_another_order_is_found_too(fused):
    first, second = fused(bent), fused(grown)
    report = searched(lambda x: tanh(x.t()).exp() + 1, X)
    assert report.fusions == {first.name: 1, second.name: 1}
    assert report.missed_fusions == []
