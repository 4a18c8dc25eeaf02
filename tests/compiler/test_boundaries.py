"""Donation where a graph ends: what is returned, graph breaks, graphs that are split and lowered part by part."""

import pytest
import torch
import torch._dynamo.testing
from compiler_support import lowered, report, run, tensors
from test_functionalize import donation_error
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.split_module import split_module

import irframework as ir

ARGUMENTS = ((4, 8), (4, 8), (8,))
BACKENDS = {"lowered": lowered, "irframework": "irframework", "inductor": "inductor"}


@pytest.fixture(autouse=True)
def _no_cache():
    """A hit runs no pass and has no report."""
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield


def both(add, function, backend=lowered):
    """Run with the in-place kernel and functionally; return x afterwards, x as it was, and why what was kept."""
    x, r, w = tensors(*ARGUMENTS)
    given = x.clone()
    with torch.no_grad(), add.priority("native"):
        want = function(x.clone(), r.clone(), w)
    earlier = ir.compiler.recent_reports()
    with add.priority("inp"):
        got = run(function, given, r.clone(), w, backend=backend)
    torch.testing.assert_close(got, want)
    new = [each for each in ir.compiler.recent_reports() if not any(each is one for one in earlier)]
    return given, x, [d.reason for each in new for d in each.donated if d.kind == "kept"]


# What Dynamo hands on itself, past the graph


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_a_donated_argument_that_is_returned_is_an_error_though_no_graph_shows_it(add, backend):
    def f(x, r, w):
        return add.op.maybe_inplace(x, r, w), x

    with add.priority("inp"):
        message = donation_error(f, *tensors(*ARGUMENTS), backend=backend)
    assert "'x' was donated" in message
    assert "is returned afterwards" in message
    assert message.count("return add.op.maybe_inplace(x, r, w), x") == 2


@pytest.mark.parametrize(
    "held",
    [lambda x: [x], lambda x: {"x": (x,)}, lambda x: x.view(-1), lambda x: x[1:]],
    ids=["list", "nested", "view", "slice"],
)
def test_a_donated_argument_that_is_returned_in_something_is_an_error(add, held):
    def f(x, r, w):
        return held(x), add.op.maybe_inplace(x, r, w)

    assert "is returned" in donation_error(f, *tensors(*ARGUMENTS))


def test_the_base_of_a_donated_part_may_not_be_returned(add):
    def f(x, r, w):
        return add.op.maybe_inplace(x[:2], r[:2], w), x

    assert "is returned" in donation_error(f, *tensors(*ARGUMENTS))


def test_the_part_of_an_argument_that_was_not_donated_may_be_returned(add):
    def f(x, r, w):
        return add.op.maybe_inplace(x[:2], r[:2] * 1, w), x[2:], r

    both(add, f)


# Graph breaks


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_an_argument_that_is_used_after_a_break_is_not_overwritten(add, backend):
    def f(x, r, w):
        y, r2 = add.op.maybe_inplace(x, r, w)
        torch._dynamo.graph_break()
        return y, r2, x + 1

    given, before, (reason,) = both(add, f, backend)
    torch.testing.assert_close(given, before)
    assert reason.startswith("x may be used after the graph break at")
    assert "test_boundaries.py" in reason
    assert reason.endswith("torch._dynamo.graph_break()")


def test_an_intermediate_that_is_used_after_a_break_is_not_overwritten(add):
    def f(x, r, w):
        h = x * 2
        y, r2 = add.op.maybe_inplace(h, r, w)
        torch._dynamo.graph_break()
        return y, r2, h + 1

    *_, (reason,) = both(add, f)
    assert reason.startswith("h may be used after the graph break")


def test_the_size_of_a_donated_tensor_may_be_asked_after_a_break(add):
    def f(x, r, w):
        h = x * 2
        y, r2 = add.op.maybe_inplace(h, r, w)
        torch._dynamo.graph_break()
        return y.view(h.shape[0] * x.shape[1]), r2

    both(add, f)


def test_a_view_that_is_used_after_a_break_keeps_its_base(add):
    def f(x, r, w):
        v = x[:2]
        y, r2 = add.op.maybe_inplace(x, r, w)
        torch._dynamo.graph_break()
        return y, r2, v + 1

    given, before, _ = both(add, f)
    torch.testing.assert_close(given, before)


def test_a_view_that_the_graph_never_saw_keeps_its_base(add):
    """`v` passes by the second graph, which donates `h`, and is used in the third."""

    def f(x, r, w):
        h = x * 2
        v = h[:2]
        torch._dynamo.graph_break()
        y, r2 = add.op.maybe_inplace(h, r, w)
        torch._dynamo.graph_break()
        return y, r2, v + 1

    both(add, f)


def test_an_argument_that_no_code_behind_the_break_uses_is_overwritten(add):
    def f(x, r, w):
        y, r2 = add.op.maybe_inplace(x, r, w)
        torch._dynamo.graph_break()
        return y + 1, r2

    given, before, kept = both(add, f)
    assert not torch.equal(given, before)
    assert kept == []


def test_what_an_earlier_graph_made_is_overwritten_after_the_break(add):
    def f(x, r, w):
        h = x * 2
        torch._dynamo.graph_break()
        return add.op.maybe_inplace(h, r, w)

    both(add, f)
    assert [d.kind for d in report().donated] == ["input", "input"]
    assert report().clones_inserted == report().clones_removed == 2


def test_donation_in_one_branch_of_a_break_is_right_in_both(add):
    def f(x, r, w):
        if r.sum() > 0:  # a break: the value decides
            y, r2 = add.op.maybe_inplace(x, r, w)
        else:
            y, r2 = x + 1, r - 1
        return y * 2, r2

    compiled = torch.compile(f, backend=lowered)
    for sign in (1, -1, 1):
        x, _, w = tensors(*ARGUMENTS)
        r = sign * torch.rand(4, 8)
        with torch.no_grad(), add.priority("native"):
            want = f(x.clone(), r.clone(), w)
        given = x.clone()
        with torch.no_grad(), add.priority("inp"):
            got = compiled(given, r.clone(), w)
        torch.testing.assert_close(got, want)
        assert torch.equal(given, x) is (sign < 0)


def test_use_behind_a_branch_that_donated_is_an_error_in_that_branch_only(add):
    def f(x, r, w):
        y = x * 1
        if r.sum() > 0:
            y, _ = add.op.maybe_inplace(x, r, w)
        return y + x

    x, r, w = tensors((4, 8), (4, 8), (8,))
    with add.priority("inp"):
        torch.testing.assert_close(run(f, x, -r.abs(), w), x * 2)
        assert "used by" in donation_error(f, x, r.abs(), w)


# Graphs that are split


def split_at(position):
    """A backend that splits what the pre-grad pass made, and lowers each part by itself."""

    def backend(module, inputs):
        ir.compiler.run_pre_grad_stage(module)
        calls = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
        first = set(calls[:position])
        parts = split_module(module, None, lambda node: 0 if node in first else 1)
        fakes = [node.meta["example_value"] for node in parts.graph.find_nodes(op="placeholder")]
        _LowerParts(parts).run(*fakes)
        return parts

    return backend


class _LowerParts(torch.fx.Interpreter):
    def call_module(self, target, args, kwargs):
        part = getattr(self.module, target)
        with torch.no_grad():
            results = part(*args)
            traced = make_fx(part)(*args)
        setattr(self.module, target, ir.compiler.lower(traced, inference=True))
        return results


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own, for a part that is given a tuple
@pytest.mark.parametrize("position", range(1, 7))
def test_donations_survive_a_split_anywhere(add, position):
    """The nodes: donate x, donate r, the op, its two items, tanh, the op again."""

    def f(x, r, w):
        y, r = add.op.maybe_inplace(x, r, w)
        return add.op.maybe_inplace(y.tanh(), r, w)

    given, before, _ = both(add, f, split_at(position))
    assert torch.equal(given, before) is (position < 3)  # a part that has the donation without the op can only copy
    assert "irframework." not in list(report().graphs.values())[-1]


def test_a_part_that_is_given_a_tensor_and_its_view_overwrites_neither(add):
    def f(x, r, w):
        v = x[:2]
        y, r = add.op.maybe_inplace(x, v.sum() + r, w)
        return y, r

    given, before, _ = both(add, f, split_at(1))
    torch.testing.assert_close(given, before)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
def test_a_donated_part_of_an_argument_is_right_across_a_split(add):
    def f(x, r, w):
        a, b = x.split(2)
        y, r = add.op.maybe_inplace(a, r[:2] * 1, w)
        return y, r, b.exp()

    for position in (1, 3, 5):
        torch._dynamo.reset()
        given, before, _ = both(add, f, split_at(position))
        torch.testing.assert_close(given[2:], before[2:])


# Arguments that the graph does not have


def unused(op):
    return lambda x, r, w, other: op.maybe_inplace(x, r + 1, w)


def returned(op):
    return lambda x, r, w, other: (op.maybe_inplace(x, r + 1, w), other)


HOLDERS = {
    "itself": lambda x: x,
    "view": lambda x: x[1:],
    "list": lambda x: [None, x.view(-1)],
    "nested": lambda x: {"a": (x,)},
}


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
@pytest.mark.parametrize("backend", [lowered, "irframework"], ids=["lowered", "irframework"])
def test_an_argument_that_is_not_used_keeps_the_memory_that_it_shares(add, backend, holder):
    x, r, w = tensors(*ARGUMENTS)
    before = x.clone()
    with add.priority("inp"):
        run(unused(add.op), x, r, w, holder(x), backend=backend)
    torch.testing.assert_close(x, before)
    (donation,) = [each for each in report().donated if each.argument == "x"]
    assert "argument 'other' shares the memory of x" in donation.reason


@pytest.mark.parametrize("holder", HOLDERS.values(), ids=HOLDERS)
def test_an_argument_that_is_not_used_keeps_the_memory_that_it_shares_at_a_later_call(add, holder):
    compiled = torch.compile(unused(add.op), backend=lowered)
    x, r, w = tensors(*ARGUMENTS)
    apart = torch.ones(4, 8)
    before = x.clone()
    with torch.no_grad(), add.priority("inp"):
        compiled(apart, r, w, holder(torch.ones(4, 8)))
        assert not (apart == 1).all()
        compiled(x, r, w, holder(x))
    torch.testing.assert_close(x, before)


def test_returning_what_shares_donated_memory_at_a_later_call_is_an_error(add):
    compiled = torch.compile(returned(add.op), backend=lowered)
    x, r, w = tensors(*ARGUMENTS)
    with torch.no_grad(), add.priority("inp"):
        compiled(x, r, w, torch.ones(4, 8))
    assert "is returned afterwards" in donation_error(compiled, x, r, w, x.view(-1))


def test_arguments_that_stay_apart_compile_once(add):
    counter = torch._dynamo.testing.CompileCounterWithBackend(lowered)
    compiled = torch.compile(unused(add.op), backend=counter)
    with torch.no_grad(), add.priority("inp"):
        for _ in range(3):
            x, r, w = tensors(*ARGUMENTS)
            compiled(x, r, w, [torch.ones(4, 8)])
    assert counter.frame_count == 1


def test_a_donated_item_of_a_list_is_overwritten(add):
    x, r, w = tensors(*ARGUMENTS)
    before = x.clone()
    with add.priority("inp"):
        run(lambda xs, r, w: add.op.maybe_inplace(xs[0], r + 1, w), [x, r], r, w)
    assert not torch.equal(x, before)
