"""Copies: how many are made, which go away, and what keeps the others."""

import pytest
import torch
from compiler_support import report, run, tensors

from irframework.compiler.clones import GRANTED, donate_op, remove_copies
from irframework.compiler.materialize import mark_copy
from irframework.compiler.report import Report

ARGUMENTS = ((4, 8), (4, 8), (8,))


def copies_left():
    return report().clones_inserted - report().clones_removed


def test_fresh_activations_need_no_copy(add):
    with add.priority("inp"):
        run(lambda x, r, w: add.op(x.sin(), r.cos(), w), *tensors(*ARGUMENTS))
    assert report().clones_inserted == 2
    assert copies_left() == 0


def test_each_input_that_is_not_donated_costs_one_copy(add):
    with add.priority("inp"):
        run(lambda x, r, w: add.op(x, r, w), *tensors(*ARGUMENTS))
    assert copies_left() == 2
    assert {kept.reason.split(" ", 1)[1] for kept in report().kept_copies} == {"belongs to the caller"}


@pytest.mark.parametrize("layers", [2, 32])
def test_a_residual_stack_copies_nothing(add, layers):
    def f(x, r, w):
        for _ in range(layers):
            x, r = add.op.maybe_inplace(x.tanh(), r, w)
        return x, r

    x, r, w = tensors(*ARGUMENTS)
    with add.priority("native"):
        want = run(f, x.clone(), r.clone(), w)
    with add.priority("inp"):
        got = run(f, x.clone(), r2 := r.clone(), w)
    torch.testing.assert_close(got, want)
    assert report().clones_inserted == 2 * layers
    assert copies_left() == 0
    assert got[1].data_ptr() == r2.data_ptr()
    assert "clone" not in list(report().graphs.values())[-1]


def test_without_donation_the_first_layer_alone_copies_the_residual(add):
    def f(x, r, w):
        for _ in range(3):
            x, r = add.op(x.tanh(), r, w)
        return x, r

    with add.priority("inp"):
        run(f, *tensors(*ARGUMENTS))
    assert copies_left() == 1


@pytest.mark.parametrize(
    ("keep", "reason"),
    [
        (lambda op, h, r, w: (*op(h, r, w), h), "returned"),
        (lambda op, h, r, w: (*op(h, r, w), h.exp()), "read later by exp"),
        (lambda op, h, r, w: (lambda v: (*op(h, r, w), v.exp()))(h.view(-1)), "through view"),
        (lambda op, h, r, w: (*op(h.view(2, 16), r.view(2, 16), torch.cat((w, w))), h), "returned"),
        (lambda op, h, r, w: (*op(h, h, w), h), "returned"),
        (lambda op, h, r, w: (lambda t: (*op(t, r, w), h.exp()))(h.t().t()), "read later"),
        (lambda op, h, r, w: (lambda a, b: (*op(a, r[:, :4], w[:4]), h.exp()))(*h.split(4, -1)), ""),
    ],
    ids=["returned", "read", "read through a view", "view given", "twice", "transposes", "split"],
)
def test_a_copy_with_a_later_reader_stays(add, keep, reason):
    def f(x, r, w):
        return keep(add.op, x * 2, r * 2, w)

    arguments = tensors(*ARGUMENTS)
    with add.priority("native"):
        want = run(f, *arguments)
    with add.priority("inp"):
        got = run(f, *arguments)
    torch.testing.assert_close(got, want)
    if reason:
        assert copies_left() >= 1
        assert any(reason in kept.reason for kept in report().kept_copies)


REASONS = {
    "returned": (lambda op, h, r, w: (*op(h, r, w), h), "mul is returned"),
    "returned as a view": (lambda op, h, r, w: (*op(h, r, w), h[1:]), "mul is returned through slice_1"),
    "read": (lambda op, h, r, w: (*op(h, r, w), h.exp()), "mul is read later by exp"),
    "read through a view": (
        lambda op, h, r, w: (lambda v: (*op(h, r, w), v.exp()))(h.t()),
        "mul is read later by exp through t",
    ),
    "first of two readers": (lambda op, h, r, w: (*op(h, r, w), h.sin(), h.exp()), "mul is read later by sin"),
    "read by another op": (lambda op, h, r, w: (*op(h, r, w), *op(h.exp(), h, w)), "mul is read later by exp"),
    "read by the kernel itself": (
        lambda op, h, r, w: op(h, r, h[0]),
        "mul is read later by k__default through select",
    ),
    "postponed": (
        lambda op, h, r, w: (lambda e: (*op(h, r, w), e))(h.exp()),
        "mul is read by exp, which may be computed only when it is needed",
    ),
    "a view of what is computed later": (
        lambda op, h, r, w: op(h.view(2, 16), r.view(2, 16).exp(), torch.cat((w, w))),
        "view is a view that the compiler may have to copy",
    ),
    "columns": (
        lambda op, h, r, w: op(h[:, :4], r[:, :4] * 1, w[:4]),
        "slice_1 is not contiguous, and the output that takes its memory over must be",
    ),
}


@pytest.mark.parametrize(("function", "reason"), REASONS.values(), ids=REASONS)
def test_the_report_says_which_reader_keeps_a_copy(add, function, reason):
    with add.priority("inp"):
        run(lambda x, r, w: function(add.op, x * 2, r * 2, w), *tensors(*ARGUMENTS))
    assert (report().kept_copies[0].op, report().kept_copies[0].reason) == (add.op.name, reason)
    assert copies_left() == len(report().kept_copies)


def test_the_report_says_that_an_input_belongs_to_the_caller(add):
    with add.priority("inp"):
        run(lambda x, r, w: add.op(x, r, w), *tensors(*ARGUMENTS))
    assert [kept.reason for kept in report().kept_copies] == [
        "arg0_1 belongs to the caller",
        "arg1_1 belongs to the caller",
    ]


def test_the_report_says_why_a_donation_is_a_copy_after_all(add):
    """x is read by what may be computed late."""

    def f(x, r, w):
        e = x.exp()
        y, r2 = add.op.maybe_inplace(x, r, w)
        return y, r2 + e

    with add.priority("inp"):
        run(f, *tensors(*ARGUMENTS))
    (kept,) = report().kept_copies
    assert (kept.op, kept.reason) == ("donate", "arg0_1 is read by exp, which may be computed only when it is needed")


@pytest.mark.parametrize("shared", [True, False])
def test_a_donated_input_that_shares_memory_with_another_is_copied(shared):
    """The pre-grad pass does not donate such inputs; a graph that comes from elsewhere may."""
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"] = base = torch.empty(4, 8)
    y.meta["val"] = base.view(-1) if shared else torch.empty(32)
    donation = graph.call_function(donate_op(), (x,))
    donation.meta["val"] = torch.empty(4, 8)
    write = graph.call_function(torch.ops.aten.exp_.default, (donation,))
    write.meta["val"] = donation.meta["val"]
    read = graph.call_function(torch.ops.aten.sin.default, (y,))
    read.meta["val"] = torch.empty_like(y.meta["val"])
    graph.output((write, read))
    found = Report()
    remove_copies(graph, found, inference=True)
    assert [kept.reason for kept in found.kept_copies] == (["x and y share memory"] if shared else [])


def test_what_was_a_view_of_a_removed_copy_is_one_of_its_source():
    """A donated view of it gives away the source, which the check of the lowered graph must know."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 8)
    copy = graph.call_function(torch.ops.aten.clone.default, (x,))
    copy.meta["val"] = torch.empty(4, 8)
    mark_copy(copy, "op", "provider")
    view = graph.call_function(torch.ops.aten.view.default, (copy, (32,)))
    view.meta["val"] = copy.meta["val"].view(32)
    donation = graph.call_function(donate_op(), (view,))
    donation.meta["val"] = torch.empty(32)
    write = graph.call_function(torch.ops.aten.exp_.default, (donation,))
    write.meta["val"] = donation.meta["val"]
    graph.output((write,))
    found = Report()
    remove_copies(graph, found, inference=True)
    assert found.kept_copies == []
    assert GRANTED in x.meta


@pytest.mark.parametrize("constant", [True, False], ids=["constant", "input of a training graph"])
def test_what_nobody_may_overwrite_is_copied_though_it_was_donated(constant):
    graph = torch.fx.Graph(torch.nn.Module())
    graph.owning_module.register_buffer("x", torch.empty(4))
    x = graph.get_attr("x") if constant else graph.placeholder("x")
    x.meta["val"] = torch.empty(4)
    donation = graph.call_function(donate_op(), (x,))
    donation.meta["val"] = torch.empty(4)
    write = graph.call_function(torch.ops.aten.exp_.default, (donation,))
    write.meta["val"] = donation.meta["val"]
    graph.output((write,))
    found = Report()
    remove_copies(graph, found, inference=constant)
    assert [kept.reason for kept in found.kept_copies] == ["x belongs to the caller"]


def test_a_reader_that_is_done_before_the_kernel_does_not_keep_the_copy(add):
    def f(x, r, w):
        h = x * 2
        e = h.exp() @ torch.ones(8, 8)
        y, r2 = add.op(h, r * 2, w)
        return y + e, r2

    with add.priority("inp"):
        run(f, *tensors(*ARGUMENTS))
    assert copies_left() == 0


def test_a_reader_that_may_be_postponed_keeps_the_copy(add):
    def f(x, r, w):
        h = x * 2
        e = h.exp()
        y, r2 = add.op(h, r * 2, w)
        return y + e, r2

    with add.priority("inp"):
        run(f, *tensors(*ARGUMENTS))
    assert copies_left() == 1
    assert "computed only when it is needed" in report().kept_copies[0].reason


def test_inductor_computes_an_earlier_view_of_a_donated_input_in_time(add):
    def f(x, r, w):
        half = x.chunk(2, 0)[1]
        both = torch.cat((half, half))
        y, r2 = add.op.maybe_inplace(x, r, w)
        return both + y, r2

    arguments = tensors(*ARGUMENTS)
    with add.priority("native"):
        want = run(f, *(t.clone() for t in arguments))
    with add.priority("inp"):
        got = run(f, *arguments, backend="irframework", options={"fx_graph_cache": False})
    torch.testing.assert_close(got, want)


def test_the_unused_part_of_a_split_does_not_keep_the_copy(add):
    def f(x, r, w):
        a, b = (x @ torch.eye(8)).split(2, 0)
        y, r2 = add.op(a, r[:2] * 2, w)
        return y, r2, b.exp()

    arguments = tensors(*ARGUMENTS)
    with add.priority("native"):
        want = run(f, *arguments)
    with add.priority("inp"):
        got = run(f, *arguments)
    torch.testing.assert_close(got, want)
    assert copies_left() == 0


def test_a_view_of_what_is_computed_later_keeps_the_copy(add):
    def f(x, r, w):
        return add.op(x.sin().view(2, 16), r.cos().view(2, 16), torch.cat((w, w)))

    with add.priority("inp"):
        run(f, *tensors(*ARGUMENTS))
    assert copies_left() == 2
    assert "may have to copy" in report().kept_copies[0].reason


def test_a_view_of_a_product_needs_no_copy(add):
    def f(x, r, w):
        eye = torch.eye(8)
        return add.op((x @ eye).view(2, 16), (r @ eye).view(2, 16), torch.cat((w, w)))

    with add.priority("inp"):
        run(f, *tensors(*ARGUMENTS))
    assert copies_left() == 0


def test_users_copies_are_left_alone(add):
    def f(x, r, w):
        snapshot = x.clone()
        return (snapshot, *add.op.maybe_inplace(x, r, w))

    x, r, w = tensors(*ARGUMENTS)
    before = x.clone()
    with add.priority("inp"):
        snapshot, *_ = run(f, x, r, w)
    torch.testing.assert_close(snapshot, before)
    assert snapshot.data_ptr() != x.data_ptr()


def test_a_kernel_that_fills_a_fresh_tensor_gets_no_copy(add):
    library = add.library
    library.define("fill_(Tensor(a!) out, Tensor x, Tensor r, Tensor w) -> ()")
    library.impl("fill_", _fill, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{library.ns}::fill_", lambda out, x, r, w: None, lib=library)
    fill = getattr(torch.ops, library.ns).fill_

    @add.op.register_impl("out")
    def out_style(x, x_residual, weight):
        y = torch.empty_like(x)
        fill(y, x, x_residual, weight)
        return y, x + x_residual

    arguments = tensors(*ARGUMENTS)
    with add.priority("out"):
        got = run(lambda *a: add.op(*a), *arguments)
    torch.testing.assert_close(got, add.op.native(*arguments))
    assert copies_left() == 0
    assert "clone" not in list(report().graphs.values())[-1]


def _fill(out, x, r, w):
    torch.mul(x + r, w, out=out)


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
def test_two_kernels_on_parts_of_one_tensor_are_right(add, axis):
    @add.op.register_impl("halves", inplace=True)
    def halves(x, x_residual, weight):
        for a, b, w in zip(*(t.chunk(2, axis) for t in (x, x_residual, weight.expand(x.shape))), strict=True):
            add.kernel(a, b, w)
        return x, x_residual

    arguments = tensors(*ARGUMENTS)
    with add.priority("halves"):
        got = run(lambda x, r, w: add.op(x * 2, r * 2, w), *arguments)
    x, r, w = arguments
    torch.testing.assert_close(got, add.op.native(x * 2, r * 2, w))
    # `clone` closes gaps: a copy of columns that were said to keep them would be another tensor than the graph states
    assert "f32[4, 4][8, 1] = aten.clone" not in list(report().graphs.values())[-1]


def test_passes_switched_off_change_speed_only(add, monkeypatch):
    from irframework.settings import settings

    x, r, w = tensors(*ARGUMENTS)
    want = add.op.native(x, r, w)
    for disabled in ("remove_copies", "materialize", "lower_inplace", "lower_functional,lower_inplace"):
        monkeypatch.setenv("IRFRAMEWORK_DISABLE_PASSES", disabled)
        settings.cache_clear()
        with add.priority("inp"):
            got = run(lambda x, r, w: add.op.maybe_inplace(x, r, w), x.clone(), r.clone(), w)
        torch.testing.assert_close(got, want)
        torch._dynamo.reset()
    settings.cache_clear()


@pytest.mark.parametrize("offset", [2, None])
def test_a_view_that_counts_from_the_start_of_memory_keeps_the_copy_of_an_input_that_lies_elsewhere(add, offset):
    def f(x, r, w):
        return add.op.maybe_inplace(x, r, w)[1].as_strided((2, 3), (4, 1), offset)

    base, r, w = tensors((5, 8), (5, 8), (8,))
    with add.priority("native"):
        want = run(f, base[1:].clone(), r[1:].clone(), w)
    with add.priority("inp"):
        got = run(f, base[1:], r[1:], w)
    torch.testing.assert_close(got, want)
    assert any("counts from the start" in kept.reason for kept in report().kept_copies) == (offset is not None)


def test_asking_for_a_size_is_no_read_of_the_memory(add):
    def f(x, r, w):
        y, s = add.op.maybe_inplace(x, r, w)
        return y.reshape(-1), s, x.shape[0]

    with add.priority("inp"):
        run(f, *tensors(*ARGUMENTS), dynamic=True)
    assert copies_left() == 0


def with_functional_form(add):
    ran = []

    def functional(x, x_residual, weight):
        ran.append("functional")
        total = x + x_residual
        return total * weight, total

    def inplace(x, x_residual, weight):
        ran.append("inplace")
        add.kernel(x, x_residual, weight)
        return x, x_residual

    add.op.register_impl("both", inplace=True, functional=functional)(inplace)
    return ran


def test_inputs_that_are_not_donated_go_to_the_functional_form_and_cost_no_copy(add):
    ran = with_functional_form(add)
    arguments = tensors(*ARGUMENTS)
    with add.priority("native"):
        want = run(lambda x, r, w: add.op(x, r, w), *arguments)
    with add.priority("both"):
        got = run(lambda x, r, w: add.op(x, r, w), *arguments)
    torch.testing.assert_close(got, want)
    assert ran == ["functional"]
    assert report().clones_inserted == 0


@pytest.mark.parametrize("given", ["donated", "fresh"])
def test_memory_that_may_be_overwritten_is_worked_on_in_place(add, given):
    ran = with_functional_form(add)

    def f(x, r, w):
        return add.op.maybe_inplace(x, r, w) if given == "donated" else add.op(x.sin(), r.cos(), w)

    with add.priority("both"):
        run(f, *tensors(*ARGUMENTS))
    assert ran == ["inplace"]
    assert copies_left() == 0
