"""Donation: what may be overwritten, and uses after it."""

import pytest
import torch
from compiler_support import lowered, report, run, tensors

from irframework.errors import DonationError


def donation_error(function, *arguments, **options):
    with pytest.raises(Exception) as caught:
        run(function, *arguments, **options)
    cause = caught.value
    while cause is not None and not isinstance(cause, DonationError):
        cause = cause.__cause__ or getattr(cause, "inner_exception", None)
    assert cause is not None, f"no DonationError in {caught.value!r}"
    return str(cause)


ARGUMENTS = ((4, 8), (4, 8), (8,))


def test_use_after_donation_names_op_argument_use_and_both_lines(add):
    def f(x, r, w):
        y, _ = add.op.maybe_inplace(x, r, w)
        return y + x.sum()

    message = donation_error(f, *tensors(*ARGUMENTS))
    assert add.op.name in message
    assert "'x'" in message
    assert "'sum'" in message
    assert message.count("test_functionalize.py") == 2


@pytest.mark.parametrize(
    "use",
    [
        lambda op, h, r, w: (op.maybe_inplace(h, r, w), h),
        lambda op, h, r, w: (op.maybe_inplace(h.view(-1, 8), r, w), h + 1),
        lambda op, h, r, w: (op.maybe_inplace(h[:2], r[:2], w), h + 1),
        lambda op, h, r, w: (lambda t: (op.maybe_inplace(h, r, w), t + 1))(h.t()),
        lambda op, h, r, w: (op.maybe_inplace(h, r, w), op.maybe_inplace(h, w.expand(4, 8) * 1, w)),
        lambda op, h, r, w: (op.maybe_inplace(x=h, x_residual=r, weight=w), h.add_(1)),
        lambda op, h, r, w: (op.maybe_inplace(h.unbind()[0], r[0], w), h.chunk(2)[0] + 1),
    ],
    ids=["returned", "base of a view", "base of a slice", "earlier view", "again", "written", "part of the base"],
)
def test_use_after_donation_is_found_through_aliases(add, use):
    assert "donated" in donation_error(lambda x, r, w: use(add.op, x * 2, r * 2, w), *tensors(*ARGUMENTS))


def test_the_other_part_of_a_split_may_be_used(add):
    def f(x, w):
        a, b = (x * 2).split(4, -1)
        return (*add.op.maybe_inplace(a, a + 0, w), b + 1)

    x, w = tensors((4, 8), (4,))
    with add.priority("inp"):
        y, r, b = run(f, x, w)
    torch.testing.assert_close((y, r, b), (x[:, :4] * 4 * w, x[:, :4] * 4, x[:, 4:] * 2 + 1))


def test_sizes_of_a_donated_tensor_may_be_asked(add):
    def f(x, r, w):
        y, _ = add.op.maybe_inplace(x, r, w)
        return y.view(x.shape[0] * x.size(1))

    x, r, w = tensors(*ARGUMENTS)
    torch.testing.assert_close(run(f, x.clone(), r.clone(), w), ((x + r) * w).flatten())


def test_a_view_may_be_made_before_and_left_unused(add):
    def f(x, r, w):
        x.view(-1)
        return add.op.maybe_inplace(x, r, w)

    run(f, *tensors(*ARGUMENTS))


def test_a_donated_input_is_overwritten_and_reported(add):
    x, r, w = tensors(*ARGUMENTS)
    with add.priority("inp"):
        y, r2 = run(lambda x, r, w: add.op.maybe_inplace(x, r, w), x, r, w)
    assert (y.data_ptr(), r2.data_ptr()) == (x.data_ptr(), r.data_ptr())
    assert [d.kind for d in report().donated] == ["input", "input"]


def test_a_copy_that_simplifies_to_the_input_does_not_give_it_away(add):
    x, r, w = tensors(*ARGUMENTS)
    for copy in (lambda t: t.clone(), lambda t: t * 1, lambda t: t + 0):
        before = x.clone(), r.clone()
        with add.priority("inp"):
            run(lambda x, r, w, copy=copy: add.op.maybe_inplace(copy(x), copy(r), w), x, r, w, backend="irframework")
        torch.testing.assert_close((x, r), before)


def test_the_same_tensor_donated_twice_in_one_call_is_right(add):
    x, _, w = tensors(*ARGUMENTS)
    want = x * 2 * w, x * 2
    with add.priority("inp"):
        got = run(lambda x, w: add.op.maybe_inplace(x, x, w), x.clone(), w)
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("requires_grad", [True, False])
def test_a_donated_parameter_is_kept(add, requires_grad):
    parameter = torch.nn.Parameter(torch.randn(4, 8), requires_grad=requires_grad)
    before = parameter.detach().clone()
    r, w = tensors((4, 8), (8,))
    with add.priority("inp"):
        run(lambda r, w: add.op.maybe_inplace(parameter, r, w), r, w)
    torch.testing.assert_close(parameter.detach(), before)
    assert any(d.kind == "kept" and "parameter" in d.reason for d in report().donated)


def test_a_donated_view_of_a_frozen_parameter_is_kept_also_when_it_comes_at_a_later_call_only(add):
    parameter = torch.nn.Parameter(torch.randn(8, 8), requires_grad=False)
    before = parameter.detach().clone()
    r, w = tensors((4, 8), (8,))
    compiled = torch.compile(lambda x, r, w: add.op.maybe_inplace(x, r, w), backend=lowered)
    with add.priority("inp"), torch.no_grad():
        for x in (torch.randn(8, 8)[:4], parameter[:4]):
            compiled(x, r.clone(), w)
    torch.testing.assert_close(parameter.detach(), before)
    assert any(d.kind == "kept" and "parameter" in d.reason for d in report().donated)


def test_a_donated_tensor_that_requires_a_gradient_is_kept_without_gradients_too(add):
    x, r, w = tensors(*ARGUMENTS)
    x.requires_grad_()
    before = x.detach().clone()
    with add.priority("inp"):
        run(lambda x, r, w: add.op.maybe_inplace(x, r, w), x, r, w)
    torch.testing.assert_close(x.detach(), before)
    assert [d.reason for d in report().donated if d.kind == "kept"] == ["l_x_ requires a gradient"]


def test_inputs_that_share_memory_are_kept(add):
    base, (w,) = torch.randn(8, 8), tensors((8,))
    before = base.clone()
    with add.priority("inp"):
        run(lambda x, r, w: add.op.maybe_inplace(x, r, w), base[:4], base[4:], w)
    torch.testing.assert_close(base, before)


def test_inputs_that_share_memory_at_a_later_call_only_are_kept(add):
    compiled = torch.compile(lambda x, r, w: add.op.maybe_inplace(x, r + 1, w), backend=lowered)
    x, r, w = tensors(*ARGUMENTS)
    with torch.no_grad(), add.priority("inp"):
        compiled(x, r, w)
        shared = torch.randn(4, 8)
        before = shared.clone()
        compiled(shared, shared.view(4, 8), w)
    torch.testing.assert_close(shared, before)


def test_an_input_written_before_it_is_donated_is_right(add):
    def f(x, y, w):
        x.copy_(y)
        return add.op.maybe_inplace(x, y * 2, w)

    x, y, w = tensors(*ARGUMENTS)
    want = (y * 3 * w, y * 3)
    kept = y.clone()
    with add.priority("inp"):
        got = run(f, x, y, w, backend="irframework")
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(y, kept)


def test_donation_in_a_checkpointed_region_overwrites_nothing(add):
    from torch.utils.checkpoint import checkpoint

    def f(x, r, w):
        return checkpoint(lambda a, b: add.op.maybe_inplace(a, b, w)[0].sin(), x, r, use_reentrant=False)

    x, r, w = tensors(*ARGUMENTS)
    x.requires_grad_()
    before = r.clone()
    with add.priority("inp"):
        torch.compile(f, backend=lowered)(x, r, w).sum().backward()
    torch.testing.assert_close(r, before)
    torch.testing.assert_close(x.grad, torch.cos((x + r) * w) * w)


def test_training_inputs_are_not_overwritten(add):
    x, r, w = tensors(*ARGUMENTS)
    w.requires_grad_()
    before = x.clone(), r.clone()
    with add.priority("inp"):
        y, _ = torch.compile(lambda x, r, w: add.op.maybe_inplace(x, r, w), backend=lowered)(x, r, w)
        y.sum().backward()
    torch.testing.assert_close((x, r), before)
    torch.testing.assert_close(w.grad, (x + r).sum(0))


def test_overwriting_is_counted_for_autograd(add):
    x, r, w = tensors(*ARGUMENTS)
    factor = torch.ones((), requires_grad=True)
    older = (x * factor).sum()
    with add.priority("inp"):
        run(lambda x, r, w: add.op.maybe_inplace(x, r, w), x, r, w, backend="irframework")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        older.backward()
