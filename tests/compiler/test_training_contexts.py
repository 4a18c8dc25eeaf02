"""Training around the ops: donation, checkpoints, autocast, hooks, modes without gradients, registered backwards."""

import contextlib

import pytest
import torch
from compiler_support import lowered, report, tensors
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from training_cases import CASES, backends, compiled, fake_providers, gradients, loss, named, near, need, prefer

import irframework as ir

GRAPHS = ("eager", "aot_eager", "aot_eager_decomp_partition", lowered)
INDUCTOR = ("irframework", "inductor")
norm, add = ir.ops.rms_norm, ir.ops.fused_add_rms_norm


@pytest.fixture(autouse=True, scope="module")
def _providers():
    with fake_providers():
        yield


def arguments():
    """x, residual and weight."""
    return CASES["fused_add_rms_norm"].arguments()[:3]


def exact(function):
    """The function's gradients with regard to `arguments`, in float64."""
    return gradients(function, [a.double() for a in arguments()])


# --- donation --------------------------------------------------------------------------------------------------------


@backends(None, *GRAPHS, *INDUCTOR)
def test_a_donated_input_is_kept_while_gradients_are_needed(backend):
    def f(x, r, w):
        return add.maybe_inplace(x, r, w, 1e-3)

    want = exact(lambda x, r, w: add.native(x, r, w, 1e-3))
    with prefer("t_overwriting"):
        given = [a.requires_grad_() for a in arguments()]
        near(list(torch.autograd.grad(loss(compiled(f, backend)(*given)), given)), want)
    assert all(map(torch.equal, given, arguments()))


@backends(None, *GRAPHS)
def test_a_donated_input_is_kept_where_only_the_weight_needs_a_gradient(backend):
    def f(x, r, w):
        return add.maybe_inplace(x, r, w, 1e-3)[0] * w

    x, r, w = arguments()
    w.requires_grad_()
    with prefer("t_overwriting"):
        total = loss(compiled(f, backend)(x, r, w))
        near(torch.autograd.grad(total, [w]), exact(lambda x, r, w: add.native(x, r, w, 1e-3)[0] * w)[2:])
    assert all(map(torch.equal, (x, r), arguments()[:2]))


@backends(None, *GRAPHS, *INDUCTOR)
def test_an_older_graph_that_saved_a_donated_input_is_never_wrong(backend):
    """Where the input is overwritten, the older backward is an error, as after any in-place operation of torch."""
    x, r, w = arguments()
    factor = torch.ones(6, requires_grad=True)
    older = (x * factor).sum()
    with prefer("t_overwriting"), torch.no_grad():
        compiled(lambda x, r, w: add.maybe_inplace(x, r, w, 1e-3), backend)(x, r, w)
    overwritten = not torch.equal(x, arguments()[0])
    assert overwritten == (backend in (None, lowered, *INDUCTOR))
    with pytest.raises(RuntimeError, match="modified by an inplace") if overwritten else contextlib.nullcontext():
        assert torch.equal(torch.autograd.grad(older, factor)[0], arguments()[0].sum(0))


@backends(lowered, "inductor")
def test_a_donated_input_that_nothing_overwrites_is_not_counted(backend):
    x, r, w = arguments()
    factor = torch.ones(6, requires_grad=True)
    older = (x * factor).sum()
    with prefer("native"), torch.no_grad():
        compiled(lambda x, r, w: add.maybe_inplace(x, r, w, 1e-3), backend)(x, r, w)
    assert torch.equal(torch.autograd.grad(older, factor)[0], arguments()[0].sum(0))


def test_counting_what_is_overwritten_cannot_be_switched_off(monkeypatch):
    monkeypatch.setenv("IRFRAMEWORK_DISABLE_PASSES", "count_overwriting,settle_donations")
    test_an_older_graph_that_saved_a_donated_input_is_never_wrong(lowered)


@backends(*GRAPHS, "inductor")
def test_what_a_graph_saved_for_its_backward_is_not_overwritten(backend):
    """Eager mode raises an error here; a graph keeps a copy."""

    def f(x, r, w, factor):
        h = x * 2
        z = h * factor
        y, _ = add.maybe_inplace(h, r * 1, w, 1e-3)
        return z + y

    x, r, w = arguments()
    factor = torch.ones(6, requires_grad=True)
    with prefer("t_overwriting"):
        total = compiled(f, backend)(x, r, w, factor).sum()
        near(torch.autograd.grad(total, [factor]), [(2 * x).sum(0)])


def test_eager_backward_of_what_was_saved_and_then_donated_is_an_error():
    x, r, w = arguments()
    factor = torch.ones(6, requires_grad=True)
    h = x * 2
    z = h * factor
    with prefer("t_overwriting"):
        add(x, r, w, 1e-3)  # only what has run once is served on the plain path
        add.maybe_inplace(h, r * 1, w, 1e-3)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        z.sum().backward()


@backends(*GRAPHS)
def test_two_donated_copies_of_one_value_stay_apart(backend):
    """A partitioner may merge equal copies; a donated one must not be overwritten under the other."""

    def f(x, r, w, factor):
        first, second = x.clone(), x.clone()
        y, s = add.maybe_inplace(first, r * 1, w, 1e-3)
        z, t = add.maybe_inplace(second, r * 3, w, 1e-3)
        return y * factor + z, s, t

    given = (*arguments(), torch.ones(6, requires_grad=True))
    with prefer("native"):
        want = f(*given)
    with prefer("t_overwriting"):
        near(compiled(f, backend)(*given), want)


@backends(None, *GRAPHS)
def test_a_residual_with_two_norms_keeps_the_gradient_that_a_kernel_would_overwrite(backend):
    """A donated value that the graph still needs for its backward, through two norms and a residual."""

    def network(norm, add):
        def f(x, r, w):
            h = norm(x, w, 1e-3)
            y, s = add(h * w, r + x, w, 1e-3)
            z, t = add(norm(y, w, 1e-3), s * 1, w, 1e-3)
            return z + h, t + y

        return f

    want = exact(network(norm.native, add.native))
    with prefer("t_overwriting", "t_writing"):
        near(gradients(compiled(network(norm, add.maybe_inplace), backend), arguments()), want)


# --- what of the outputs is used, and how ----------------------------------------------------------------------------


@pytest.mark.parametrize("used", [0, 1])
@backends(None, "aot_eager", lowered)
def test_one_used_output_gives_its_gradients_alone(backend, used):
    want = exact(lambda x, r, w: add.native(x, r, w * 1, 1e-3)[used] + 0 * w)
    with prefer("t_overwriting"):
        near(gradients(compiled(lambda x, r, w: add(x, r, w, 1e-3)[used] + 0 * w, backend), arguments()), want)


@backends(None, *GRAPHS)
def test_an_unused_output_adds_nothing_where_its_derivative_is_infinite(declare, backend):
    def native(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x.sqrt()

    op = declare(native)
    x = torch.zeros(3, requires_grad=True)
    y = compiled(lambda x: op(x)[0], backend)(x)
    assert torch.autograd.grad(y.sum(), x)[0].tolist() == [2, 2, 2]


GRADIENTS = {
    "expanded": lambda y: torch.ones(()).expand_as(y),
    "transposed": lambda y: torch.linspace(-1, 1, y.numel()).view(y.shape[::-1]).t(),
    "strided": lambda y: torch.linspace(-1, 1, 2 * y.numel()).view(*y.shape[:-1], -1)[..., ::2],
}


@pytest.mark.parametrize("layout", GRADIENTS)
@backends(None, "aot_eager", lowered)
def test_gradients_of_any_layout_are_taken(backend, layout):
    def pulled(call, dtype):
        x, _, w = (a.to(dtype).requires_grad_() for a in arguments())
        y = call(x, w)
        return torch.autograd.grad(y, [x, w], GRADIENTS[layout](y).to(dtype))

    want = pulled(lambda x, w: norm.native(x, w, 1e-3), torch.float64)
    with prefer("t_writing"):
        near(pulled(compiled(lambda x, w: norm(x, w, 1e-3), backend), torch.float32), want)


@backends(None, "aot_eager", lowered)
def test_hooks_on_tensors_see_and_change_gradients(backend):
    x, _, w = (a.requires_grad_() for a in arguments())
    seen = []
    with prefer("t_writing"):
        y = compiled(lambda x, w: norm(x, w, 1e-3), backend)(x, w)
        w.register_hook(seen.append)
        y.register_hook(lambda gradient: gradient * 3)
        loss(y).backward()
    want = gradients(lambda x, w: norm.native(x, w, 1e-3), [x.double(), w.double()])
    near([x.grad, w.grad], [3 * g for g in want])
    near(seen, [w.grad])


# --- regions and modes without gradients -----------------------------------------------------------------------------


@backends(None, *GRAPHS)
def test_a_region_without_gradients_is_one_compiled_too(backend):
    def network(norm):
        def f(x, w):
            with torch.no_grad():
                factor = norm(x, w, 1e-3)
            return norm(x * factor, w, 1e-3) + factor

        return f

    x, _, w = arguments()
    want = gradients(network(norm.native), [x.double(), w.double()])
    with prefer("t_writing"):
        near(gradients(compiled(network(norm), backend), [x, w]), want)


class Block(torch.nn.Module):
    """Norms around a linear layer, with parameters that ask for gradients."""

    def __init__(self, hidden: int = 6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(0.5, 1.5, hidden))
        self.linear = torch.nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        y, residual = add.maybe_inplace(self.linear(x), residual, self.weight, 1e-3)
        return norm(y, self.weight, 1e-3), residual


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@backends(None, "aot_eager", lowered)
def test_a_model_with_parameters_runs_in_every_mode(backend, mode):
    torch.manual_seed(0)
    block = Block()
    x, r, _ = arguments()
    with prefer("native"), torch.no_grad():
        want = block(x, r)
    with prefer("t_overwriting", "t_writing"), mode():
        got = compiled(block, backend)(x, r.clone())
    near([g.clone().detach() for g in got], want)
    assert all(g.requires_grad == (mode is torch.enable_grad) for g in got)


@backends(*GRAPHS)
def test_training_after_inference_with_one_compiled_model_loses_no_gradient(backend):
    torch.manual_seed(0)
    block = Block()
    x, r, _ = arguments()
    run = compiled(block, backend)
    parameters = list(block.parameters())
    want = torch.autograd.grad(loss(block(x, r)), parameters)
    with prefer("t_overwriting", "t_writing"):
        for mode in (torch.inference_mode, torch.no_grad):
            with mode():
                run(x, r.clone())
        near(torch.autograd.grad(loss(run(x, r)), parameters), want)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def region(norm, add):
    def f(x, r, w):
        y, s = add(x * 2, r * 2, w, 1e-3)
        return norm(y, w, 1e-3) * s

    return f


def backward(function):
    given = [a.requires_grad_() for a in arguments()]
    loss(function(*given)).backward()  # a reentrant checkpoint does not work with torch.autograd.grad
    return [a.grad for a in given]


@pytest.mark.parametrize("reentrant", [False, True], ids=["plain", "reentrant"])
@pytest.mark.parametrize("inside", [True, False], ids=["in the graph", "around the graph"])
@backends(None, *GRAPHS)
def test_checkpointed_regions_have_the_same_gradients(backend, inside, reentrant):
    f = region(norm, add.maybe_inplace)
    with prefer("t_overwriting", "t_writing"):
        if inside:
            run = compiled(lambda *given: checkpoint(f, *given, use_reentrant=reentrant), backend)
        else:
            graph = compiled(f, backend)
            run = lambda *given: checkpoint(graph, *given, use_reentrant=reentrant)  # noqa: E731
        near(backward(run), exact(region(norm.native, add.native)))


def test_a_checkpoint_inside_a_graph_goes_through_inductor():
    f = region(norm, add.maybe_inplace)
    run = torch.compile(lambda *given: checkpoint(f, *given, use_reentrant=False), backend="irframework")
    with prefer("t_overwriting", "t_writing"):
        near(backward(run), exact(region(norm.native, add.native)))


@pytest.mark.parametrize(("saved", "calls"), [((), 2), ((norm.torch_op,), 1)], ids=["recomputed", "saved"])
@backends(None, "aot_eager")
def test_a_policy_may_save_an_op(declare, backend, saved, calls):
    count = []

    @norm.register_impl("t_counting")
    def counting(x, weight, epsilon, variance_size=None):
        count.append(1)
        return norm.native(x, weight, epsilon, variance_size)

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.MUST_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    try:
        f = region(norm, add)
        run = compiled(lambda *given: checkpoint(f, *given, use_reentrant=False, context_fn=contexts), backend)
        with prefer("t_counting"):
            near(backward(run), exact(region(norm.native, add.native)))
        assert len(count) == calls
    finally:
        norm.unregister_impl("t_counting")


# --- autocast --------------------------------------------------------------------------------------------------------


@pytest.fixture
def product(declare):
    """An op made of a torch op that autocast would run in bfloat16, with two providers."""

    def native(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    op = declare(native)

    @op.register_impl("other")
    def other(x, w):
        return torch.tanh(torch.mm(x, w))

    return op


@pytest.mark.parametrize("provider", ["native", "other"])
@pytest.mark.parametrize("around", ["in the function", "around the call", "around the backward too"])
@backends(None, *GRAPHS)
def test_an_op_is_opaque_to_autocast(product, backend, around, provider):
    x, w = tensors((4, 6), (6, 6))
    factor = torch.linspace(0.5, 1.5, 6)
    want = gradients(lambda x, w, f: torch.tanh((x * f) @ w), [x.double(), w.double(), factor.double()])
    here, outside, later = (
        (lambda: torch.autocast("cpu", torch.bfloat16)) if at else contextlib.nullcontext
        for at in (around == "in the function", around != "in the function", around == "around the backward too")
    )

    def f(x, w, factor):
        with here():
            return product(x * factor, w)

    given = [a.clone().requires_grad_() for a in (x, w, factor)]
    with ir.priority({product.name: provider}):
        with outside():
            y = compiled(f, backend)(*given)
        with later():
            near(torch.autograd.grad(loss(y), given), want)
        assert y.dtype == torch.float32
        with torch.no_grad(), outside():
            y = compiled(f, backend)(x, w, factor)
        near([y], [torch.tanh((x * factor) @ w)])


def test_an_op_is_opaque_to_autocast_through_inductor(product):
    test_an_op_is_opaque_to_autocast(product, "irframework", "around the backward too", "other")


def test_casts_around_an_op_are_autocasts(product):
    x, w = tensors((4, 6), (6, 6))
    with torch.autocast("cpu", torch.bfloat16):
        h = x @ w
        assert product(h, w.bfloat16()).dtype == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
    assert product(x, w).dtype == torch.float32


def test_a_registered_backward_is_opaque_to_autocast(declare):
    def native(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    op = declare(native)
    op.register_backward(lambda grads, x, w: (grads[0] @ w.t(), x.t() @ grads[0]))
    x, w = tensors((4, 6), (6, 6))
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(op, [x, w])
    near(got, gradients(native, [x.double(), w.double()]))


# --- a backward of its own -------------------------------------------------------------------------------------------


@pytest.fixture
def cube(declare):
    """An op whose backward is another op, each with the provider `kernel`; and the calls of both kernels."""
    calls = []

    def forward(x: Tensor) -> Tensor:
        return x**3

    def derivative(gradient: Tensor, x: Tensor) -> Tensor:
        return gradient * 3 * x**2

    op, back = declare(forward), declare(derivative)
    op.register_backward(lambda grads, x: back(grads[0], x))

    @op.register_impl("kernel")
    def kernel(x):
        calls.append("forward")
        return x * x * x

    @back.register_impl("kernel")
    def back_kernel(gradient, x):
        calls.append("backward")
        return gradient * 3 * x * x

    return op, back, calls


@backends(None, "eager", "aot_eager")
def test_a_backward_op_has_a_provider_of_its_own(cube, backend):
    op, back, calls = cube
    (x,) = tensors((4,))
    with ir.priority({op.name: "kernel", back.name: "kernel"}):
        near(gradients(compiled(lambda x: op(x), backend), [x]), gradients(lambda x: x**3, [x.double()]))
    assert set(calls) == {"forward", "backward"}


@backends(lowered, *INDUCTOR)
def test_a_backward_op_is_lowered_in_the_backward_graph(cube, backend):
    op, back, _ = cube
    x = tensors((4,))[0].requires_grad_()
    with ir.priority({op.name: "kernel", back.name: "kernel"}):
        y = torch.compile(lambda x: op(x), backend=backend)(x)
    near(torch.autograd.grad(loss(y), [x]), gradients(lambda x: x**3, [x.detach().double()]))
    chosen = {name: {*nodes.values()} for name, nodes in report().selected_impls.items()}
    assert chosen == {op.name: {"kernel"}, back.name: {"kernel"}}


@backends(None, *GRAPHS)
def test_a_registered_backward_may_leave_a_gradient_out(declare, backend):
    def native(x: Tensor, w: Tensor) -> Tensor:
        return x * w

    op = declare(native)
    op.register_backward(lambda grads, x, w: (grads[0] * w, None))
    x, w = (t.requires_grad_() for t in tensors((4,), (4,)))
    got = torch.autograd.grad(compiled(lambda x, w: op(x, w), backend)(x, w).sum(), [x, w], allow_unused=True)
    assert torch.equal(got[0], w)
    assert got[1] is None or not got[1].any()


@backends(None, "aot_eager", lowered)
def test_a_registered_backward_is_given_zeros_for_an_unused_output(declare, backend):
    def native(x: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, x[:1] * 3

    op = declare(native)
    op.register_backward(lambda grads, x: grads[0] * 2 + torch.cat((grads[1] * 3, torch.zeros_like(x[1:]))))
    x = torch.ones(4, requires_grad=True)
    for used, want in ((0, [2, 2, 2, 2]), (1, [3, 0, 0, 0])):
        torch._dynamo.reset()
        y = compiled(lambda x, used=used: op(x)[used], backend)(x)
        assert torch.autograd.grad(y.sum(), x)[0].tolist() == want


# --- compiled autograd, deep stacks ----------------------------------------------------------------------------------


@backends("eager", lowered)
def test_compiled_autograd_takes_the_backward_of_an_op(backend):
    x, _, w = (a.requires_grad_() for a in arguments())
    want = gradients(lambda x, w: norm.native(x, w, 1e-3), [x.detach().double(), w.detach().double()])

    @torch.compile(backend=backend)
    def step(x, w):
        loss(norm(x, w, 1e-3)).backward()

    with torch._dynamo.config.patch(compiled_autograd=True), prefer("t_writing"):
        step(x, w)
    near([x.grad, w.grad], want)


class Stack(torch.nn.Module):
    """Layers of a norm and a linear layer, with residuals."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = torch.nn.ParameterList(torch.rand(hidden) + 0.5 for _ in range(layers))
        self.linears = torch.nn.ModuleList(torch.nn.Linear(hidden, hidden, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        residual = torch.zeros_like(x)
        for weight, linear in zip(self.weights, self.linears, strict=True):
            x, residual = add.maybe_inplace(x, residual, weight, 1e-5)
            x = linear(x)
        return norm(x + residual, None, 1e-5)


def stack_gradients(dtype, provider, backend):
    stack = Stack(24, 64).to(dtype)
    torch.manual_seed(1)
    x = torch.randn(8, 64).to(dtype)
    with prefer(provider):
        y = compiled(stack, backend)(x)
        found = torch.autograd.grad(loss(y), list(stack.parameters()))
    return [y.detach(), *found]


def error(got, want):
    """The largest relative error over the tensors, each in the norm of the whole tensor."""
    return max(((g.double() - w).norm() / w.norm()).item() for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize(
    ("backend", "dtype"), [(None, torch.float32), (None, torch.bfloat16), (lowered, torch.bfloat16)], ids=named
)
def test_a_deep_stack_drifts_no_further_with_kernels_than_with_native(backend, dtype):
    """24 layers, outputs and gradients of all parameters beside float64."""
    need("vllm_c")
    want = stack_gradients(torch.float64, "native", None)
    native = error(stack_gradients(dtype, "native", None), want)
    assert error(stack_gradients(dtype, "vllm_c", backend), want) < 1.5 * native
    assert native < (1e-5 if dtype == torch.float32 else 0.2)
