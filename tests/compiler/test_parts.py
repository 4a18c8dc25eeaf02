"""Parts of one tensor: only the donated part may be overwritten."""

import pytest
import torch
from compiler_support import lowered, report, run, tensors

import irframework as ir

BACKENDS = [None, lowered, "irframework", "inductor"]
NAMES = ["eager", "lowered", "irframework", "inductor"]


@pytest.fixture(autouse=True)
def _no_cache():
    """A hit runs no pass and has no report."""
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield


@pytest.fixture(params=BACKENDS, ids=NAMES)
def call(request, add):
    """Run a function with the in-place kernel, in one of the four ways."""

    def call(function, *arguments, **options):
        with add.priority("inp"):
            if request.param is None:
                with torch.no_grad():
                    return function(*arguments)
            return run(function, *arguments, backend=request.param, **options)

    return call


def halves(axis):
    return (slice(0, 4), slice(4, 8)) if axis == 0 else ((slice(None), slice(0, 4)), (slice(None), slice(4, 8)))


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
def test_the_other_part_of_an_intermediate_is_read_afterwards(add, call, axis):
    """Read twice, once by a matrix product: neither a pointwise reader nor a call of its own may see the kernel's."""
    given, other = halves(axis)

    def f(x, r, w):
        h = x @ torch.eye(8)
        y, r2 = add.op.maybe_inplace(h[given], r, w)
        return y, r2, h[other] + 1, h[other] @ torch.ones(h[other].shape[1], 2)

    x, r, w = torch.randn(8, 8), torch.randn(8, 8)[given].clone(), torch.randn(8)[: 8 if axis == 0 else 4]
    want = x[given] + r
    y, r2, plus, product = call(f, x, r.clone(), w)
    torch.testing.assert_close((y, r2), (want * w, want))
    torch.testing.assert_close(plus, x[other] + 1)
    torch.testing.assert_close(product, x[other].sum(1, keepdim=True).expand(-1, 2))


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
def test_the_other_part_of_a_graph_input_is_left_alone_and_may_be_returned(add, call, axis):
    given, other = halves(axis)

    def f(x, r, w):
        y, r2 = add.op.maybe_inplace(x[given], r, w)
        return y, r2, x[other]

    x, r, w = torch.randn(8, 8), torch.randn(8, 8)[given].clone(), torch.randn(8)[: 8 if axis == 0 else 4]
    before = x.clone()
    want = before[given] + r
    y, r2, returned = call(f, x, r, w)
    torch.testing.assert_close((y, r2), (want * w, want))
    torch.testing.assert_close(x[other], before[other])
    torch.testing.assert_close(returned, before[other])
    assert returned.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
def test_a_graph_input_that_is_part_of_a_tensor_leaves_the_rest_alone(add, call, axis):
    given, other = halves(axis)
    base, w = torch.randn(8, 8), torch.randn(8)[: 8 if axis == 0 else 4]
    before = base.clone()
    r = torch.randn(8, 8)[given].clone()
    want = before[given] + r
    got = call(lambda x, r, w: add.op.maybe_inplace(x, r, w), base[given], r.clone(), w)
    torch.testing.assert_close(got, (want * w, want))
    torch.testing.assert_close(base[other], before[other])


@pytest.mark.parametrize(
    "part",
    [lambda x: x[:, :4], lambda x: x[:, :1].expand(-1, 4)],
    ids=["columns", "expanded"],
)
@pytest.mark.parametrize("outside", [False, True], ids=["in the graph", "before it"])
def test_an_in_place_kernel_is_never_given_a_part_with_gaps(add, call, part, outside):
    """Whatever its conditions say: its activations become the outputs, and those are contiguous."""
    add.library.define("strict_(Tensor(a!) x, Tensor(b!) r, Tensor w) -> ()")
    add.library.impl("strict_", _strict, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{add.library.ns}::strict_", lambda x, r, w: None, lib=add.library)
    add.op.unregister_impl("inp")

    @add.op.register_impl("inp", inplace=True, supports_args=ir.supports(row_contiguous=("x", "x_residual")))
    def strict(x, x_residual, weight):
        getattr(torch.ops, add.library.ns).strict_(x, x_residual, weight)
        return x, x_residual

    x, w = torch.randn(8, 8), torch.randn(4)
    before = x.clone()
    if outside:
        got = call(lambda x, r, w: add.op.maybe_inplace(x, r, w), part(x), part(x).contiguous() + 1, w)
    else:
        got = call(lambda x, w: add.op.maybe_inplace(part(x), part(x).contiguous() + 1, w), x, w)
    want = part(before) * 2 + 1
    torch.testing.assert_close(got, (want * w, want))
    assert [output.is_contiguous() for output in got] == [True, True]
    torch.testing.assert_close(x, before)


def _strict(x, r, w):
    assert x.is_contiguous(), x.stride()
    assert r.is_contiguous(), r.stride()
    r.add_(x)
    torch.mul(r, w, out=x)


def test_both_parts_may_be_donated_to_one_call(add, call):
    """Two views of one base as the two activations of a call."""

    def f(x, w):
        return add.op.maybe_inplace(x[0], x[1], w)

    x, w = torch.randn(2, 4, 8), torch.randn(8)
    want = x[0] + x[1]
    torch.testing.assert_close(call(f, x, w), (want * w, want))


def test_rows_of_one_base_that_are_not_donated_are_left_alone(add, call):
    x, w = torch.randn(2, 4, 8), torch.randn(8)
    before = x.clone()
    got = call(lambda x, w: add.op(x[0], x[1], w), x, w)
    torch.testing.assert_close(got, ((before[0] + before[1]) * w, before[0] + before[1]))
    torch.testing.assert_close(x, before)


@pytest.mark.parametrize("axis", [0, 1], ids=["rows", "columns"])
def test_the_other_part_may_be_used_whatever_the_batch_size_is(add, axis):
    def f(x, w):
        a, b = (x * 2).chunk(2, axis)
        return (*add.op.maybe_inplace(a, a + 1, w), b + 1)

    compiled = torch.compile(f, backend=lowered)
    for rows in (6, 10):
        x = torch.randn(rows, 8)
        torch._dynamo.mark_dynamic(x, 0)
        a, b = (x * 2).chunk(2, axis)
        w = torch.randn(a.shape[1])
        with torch.no_grad(), add.priority("inp"):
            got = compiled(x, w)
        torch.testing.assert_close(got, ((a + a + 1) * w, a + a + 1, b + 1))


def test_rows_are_overwritten_without_a_copy(add):
    def f(x, r, w):
        a, b = (x @ torch.eye(8)).chunk(2, 0)
        return (*add.op.maybe_inplace(a, r, w), b.exp())

    with add.priority("inp"):
        run(f, *tensors((8, 8), (4, 8), (8,)))
    assert (report().clones_inserted, report().clones_removed) == (2, 2)
    assert "clone" not in list(report().graphs.values())[-1]


def test_columns_cost_the_one_copy_that_makes_the_output_contiguous(add):
    """As `qkv[:, :hidden]`: the op promises contiguous outputs, and the part has gaps."""

    def f(x, r, w):
        qkv = x @ torch.ones(8, 24)
        q, rest = qkv.split((8, 16), 1)
        return (*add.op.maybe_inplace(q, r, w), rest.exp())

    with add.priority("inp"):
        run(f, *tensors((4, 8), (4, 8), (8,)))
    assert report().clones_inserted - report().clones_removed == 1
    assert list(report().graphs.values())[-1].count("= aten.clone") == 1
    (kept,) = report().kept_copies
    assert kept.op == add.op.name
    assert kept.reason == "getitem is not contiguous, and the output that takes its memory over must be"
