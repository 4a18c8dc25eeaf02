"""Gradients of ops."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

import irframework as ir
from irframework import errors


def product(x: Tensor, weight: Tensor | None = None, factor: float = 2.0) -> Tensor:
    y = x * x * factor
    return y if weight is None else y * weight


def detached(x, weight=None, factor=2.0):
    """A kernel that autograd cannot look into."""
    return product(x.detach(), None if weight is None else weight.detach(), factor)


@pytest.fixture
def op(declare):
    op = declare(product, allow_inplace=True)
    op.register_impl("kernel")(detached)
    with ir.priority({op.name: "kernel"}):
        op(torch.ones(1))
        yield op


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize("form", ["default", "maybe_inplace", "torch_op"])
def test_gradients_do_not_depend_on_the_provider(op, form):
    call = {"default": op, "maybe_inplace": op.maybe_inplace, "torch_op": op.torch_op}[form]
    x, weight = double(3, 4), double(4)
    assert gradcheck(call, (x, weight, 3.0))
    assert gradgradcheck(call, (x, weight, 3.0))
    assert gradcheck(call, (x,))


def test_only_the_inputs_that_need_it_get_a_gradient(op):
    x, weight = double(3), torch.ones(3, dtype=torch.float64)
    op(x, weight).sum().backward()
    assert weight.grad is None
    assert torch.equal(x.grad, 4 * x.detach())


def test_input_computed_from_another_input_is_not_counted_twice(op):
    x = double(3)
    expected = torch.autograd.grad(product(x, x * 2).sum(), x)[0]
    assert torch.allclose(torch.autograd.grad(op(x, x * 2).sum(), x)[0], expected)


def test_same_tensor_given_twice_gets_both_gradients(op):
    x = double(3)
    expected = torch.autograd.grad(product(x, x).sum(), x)[0]
    assert torch.allclose(torch.autograd.grad(op(x, x).sum(), x)[0], expected)


def test_third_derivative(op):
    x = torch.tensor([2.0], dtype=torch.float64, requires_grad=True)
    y = op(op(x)).sum()  # 2 (2 x^2)^2 = 8 x^4
    for expected in (8 * 4 * 2**3, 8 * 12 * 2**2, 8 * 24 * 2):
        (y,) = torch.autograd.grad(y, x, create_graph=True)
        assert y.item() == pytest.approx(expected)


def test_maybe_inplace_does_not_overwrite_when_gradients_are_needed(declare):
    op = declare(product, allow_inplace=True)

    @op.register_impl("inp", inplace=True)
    def inp(x, weight=None, factor=2.0):
        return x.mul_(x).mul_(factor)

    with ir.priority({op.name: "inp"}):
        for _ in range(3):
            x = double(2)
            h = x * 1
            y = op.maybe_inplace(h)
            assert torch.equal(h, x)
            (gradient,) = torch.autograd.grad(y.sum(), x)
            assert torch.allclose(gradient, 4 * x)


def test_no_gradient_is_recorded_without_grad_mode(op):
    x = double(2)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert not op(x).requires_grad
    assert not op(x.detach()).requires_grad
    assert op(x).requires_grad


def test_inference_mode_gives_inference_tensors(op):
    with torch.inference_mode():
        for _ in range(3):
            assert op(torch.ones(2)).is_inference()


def test_parameter_without_grad_mode_takes_the_plain_path(op):
    weight = torch.nn.Parameter(torch.ones(2))
    with torch.no_grad():
        assert op(torch.ones(2), weight).tolist() == [2, 2]


def test_unused_output_gets_no_gradient(declare):
    def native(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return x * w, x + w

    op = declare(native)
    x, w = double(2), double(2)
    for index in (0, 1):
        got = torch.autograd.grad(op(x, w)[index].sum(), (x, w))
        expected = torch.autograd.grad(native(x, w)[index].sum(), (x, w))
        assert all(map(torch.equal, got, expected))


def test_output_that_cannot_have_a_gradient(declare):
    def native(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.argmax(-1)

    op = declare(native)
    x = double(2, 3)
    y, index = op(x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 2.0, dtype=torch.float64))
    assert index.dtype == torch.int64


def test_list_of_tensors_gets_gradients(declare):
    def native(xs: list[Tensor], factor: float) -> Tensor:
        return sum(xs, start=torch.zeros_like(xs[0])) * factor

    op = declare(native)
    a, b = double(2), double(2)
    got = torch.autograd.grad(op([a, b], 3.0).sum(), (a, b))
    assert [g.tolist() for g in got] == [[3, 3], [3, 3]]


def test_list_of_outputs_gets_gradients(declare):
    def native(x: Tensor) -> list[Tensor]:
        return list(x.chunk(2))

    op = declare(native)
    x = double(4)
    a, b = op(x)
    (gradient,) = torch.autograd.grad(a.sum() * 2 + b.sum() * 3, x)
    assert gradient.tolist() == [2, 2, 3, 3]


# --- registered backward ---------------------------------------------------------------------------------------------


def test_registered_backward_replaces_the_vjp_of_native(op):
    seen = []

    @op.register_backward
    def backward(grads, x, weight, factor):
        seen.append((len(grads), factor))
        return grads[0] * 100, None

    x = double(2)
    op(x, None, 3.0).sum().backward()
    assert x.grad.tolist() == [100, 100]
    assert seen == [(1, 3.0)]


def test_registered_backward_may_be_an_op(declare):
    def cube(x: Tensor) -> Tensor:
        return x**3

    def cube_backward(grad: Tensor, x: Tensor) -> Tensor:
        return grad * 3 * x**2

    forward, back = declare(cube), declare(cube_backward)
    forward.register_backward(lambda grads, x: (back(grads[0], x),))
    x = double(3)
    assert gradcheck(forward, (x,))
    assert gradgradcheck(forward, (x,))


@pytest.mark.parametrize("spelling", [lambda g: g, lambda g: (g,), lambda g: [g]])
def test_registered_backward_of_one_tensor_may_return_it_bare(declare, spelling):
    def native(x: Tensor) -> Tensor:
        return x * 2

    op = declare(native)
    op.register_backward(lambda grads, x: spelling(grads[0] * 5))
    x = double(2, 3)
    op(x).sum().backward()
    assert torch.equal(x.grad, torch.full((2, 3), 5.0, dtype=torch.float64))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_registered_backward_with_the_wrong_number_of_gradients_is_an_error(op, count):
    op.register_backward(lambda grads, x, weight, factor: tuple(grads[0] for _ in range(count)))
    with pytest.raises(errors.ImplementationContractError, match=f"returned {count} gradients.*x, weight"):
        op(double(2)).sum().backward()


@pytest.mark.parametrize(
    ("returned", "said"),
    [(None, "a NoneType"), ({"x": None, "weight": None}, "a dict"), ((1.0, None), "a float for x")],
)
def test_registered_backward_that_returns_no_gradients_is_an_error_that_names_the_op(op, returned, said):
    op.register_backward(lambda grads, x, weight, factor: returned)
    with pytest.raises(errors.ImplementationContractError, match=f"op '{op.name}' returned {said}"):
        op(double(2)).sum().backward()


# --- modules, checkpoints, other ways to differentiate ---------------------------------------------------------------


class Block(torch.nn.Module):
    def __init__(self, op):
        super().__init__()
        self.op = op
        self.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x):
        return self.op(x, self.weight)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_module_has_the_same_gradients(op, reentrant):
    x = double(2, 4)
    block = Block(op)
    block(x * 1).sum().backward()
    expected = x.grad.clone(), block.weight.grad.clone()
    x.grad = block.weight.grad = None
    torch.utils.checkpoint.checkpoint(block, x * 1, use_reentrant=reentrant).sum().backward()
    assert torch.allclose(x.grad, expected[0])
    assert torch.allclose(block.weight.grad, expected[1])


def test_func_grad_and_vmap_of_grad(op):
    x = torch.randn(3, 4, dtype=torch.float64)
    assert torch.allclose(torch.func.grad(lambda t: op(t).sum())(x), 4 * x)
    assert torch.allclose(torch.func.vmap(torch.func.grad(lambda t: op(t).sum()))(x), 4 * x)


def test_func_vjp(op):
    x = torch.randn(4, dtype=torch.float64)
    _, pull = torch.func.vjp(op, x)
    assert torch.allclose(pull(torch.ones(4, dtype=torch.float64))[0], 4 * x)


def test_backward_runs_with_the_priorities_of_its_own_context(op):
    """The backward recomputes native: no provider is asked, whatever the priorities are by then."""
    x = double(2)
    y = op(x)
    with ir.priority({op.name: "native"}):
        y.sum().backward()
    assert torch.allclose(x.grad, 4 * x)


def test_outputs_that_a_kernel_returns_as_views_may_be_written_to(declare):
    def halves(x: Tensor) -> tuple[Tensor, Tensor]:
        return (x * 2).reshape(2, -1), (x * 3).reshape(2, -1)

    x = double(4)
    first, second = declare(halves)(x)
    first.mul_(5)
    second.add_(1)
    assert torch.equal(torch.autograd.grad((first.sum() + second.sum()), x)[0], torch.full_like(x, 13.0))


def test_a_dtype_that_a_call_leaves_at_its_default_is_one_in_the_backward(declare):
    seen = []

    def native(x: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
        seen.append(dtype)
        return x.to(dtype) * 2

    declare(native)(torch.ones(2, requires_grad=True)).sum().backward()
    assert set(seen) == {torch.float64}
