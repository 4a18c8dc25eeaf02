"""IR ops beside other mutations: users' mutating ops, mutated inputs, caches of another dtype, gradients, bodies."""

import itertools
import re

import pytest
import torch
from compiler_support import lowered, report, run, tensors
from test_functionalize import donation_error
from torch import Tensor

import irframework as ir

ARGUMENTS = ((4, 8), (4, 8), (8,))
BACKENDS = {"lowered": lowered, "irframework": "irframework"}
_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _no_cache():
    """A hit runs no pass and has no report."""
    with torch._inductor.config.patch(fx_graph_cache=False):
        yield


@pytest.fixture(params=[True, False], ids=["functionalized v2", "functionalized v1"])
def functionalized(request):
    """Both forms in which torch hands a mutating custom op through autograd."""
    with torch._inductor.config.patch(enable_auto_functionalized_v2=request.param):
        yield request.param


def equal_to_native(add, function, arguments, backend=lowered):
    """Results and inputs must be those of eager native."""
    ours, theirs = [t.clone() for t in arguments], [t.clone() for t in arguments]
    with torch.no_grad(), add.priority("native"):
        want = function(*theirs)
    with add.priority("inp"):
        got = run(function, *ours, backend=backend)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(ours, theirs)


# Users' own mutating ops

ALIASES = {
    "views of inputs": lambda op, x, r, w: (*op(x.view(4, 8), r.view(4, 8), w), x + 0),
    "view of a live value": lambda op, x, r, w: (lambda h: (*op(h.view(-1, 8), r, w), h + 1))(x * 2),
    "slice of a returned value": lambda op, x, r, w: (lambda h: (*op(h[:2], r[:2], w), h))(x * 2),
    "returned value": lambda op, x, r, w: (lambda h: (*op(h, h + 0, w), h))(x * 2),
    "equal expressions": lambda op, x, r, w: op(x * 2, x * 2, w),
    "one tensor twice": lambda op, x, r, w: (lambda h: op(h, h, w))(x * 2),
    "another layout": lambda op, x, r, w: (lambda h: (*op(h.t().contiguous().t(), r, w), h))(x * 2),
    "snapshot": lambda op, x, r, w: (lambda c: (c, *op(x, r, w)))(x.clone()),
    "disjoint parts": lambda op, x, r, w: (lambda a, b: (*op.maybe_inplace(a, a + 0, w), b + 1))(*(x * 2).split(2)),
    "donated": lambda op, x, r, w: op.maybe_inplace(x * 1, r * 1, w),
}


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_aliases_are_sound_beside_a_users_mutating_op(add, functionalized, backend):
    """All cases in one graph, each on tensors of its own that the user's kernel overwrites before and after."""
    user = mutating_op()

    def f(*arguments):
        *pairs, w = arguments
        results = []
        for case, x, r in zip(ALIASES.values(), pairs[::2], pairs[1::2], strict=True):
            user(x, w)
            results += case(add.op, x, r, w)
            user(r, None)
        return results

    equal_to_native(add, f, tensors(*[(4, 8)] * 2 * len(ALIASES), (8,)), backend)


def mutating_op():
    """`x += w`, or `x += 1` where w is None; as a custom op that says nothing else."""
    name = f"tm{next(_numbers)}"

    @torch.library.custom_op(f"{name}::bump", mutates_args=("x",))
    def bump(x: Tensor, w: Tensor | None) -> None:
        x.add_(1 if w is None else w)

    bump.register_fake(lambda x, w: None)
    return bump


@pytest.fixture
def optional():
    """An op whose second activation may be None, with an in-place kernel that takes an optional mutable argument."""
    name = f"tm{next(_numbers)}"

    def native(x: Tensor, x_residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        r = x + 0 if x_residual is None else x + x_residual
        return r * weight, r

    op = ir.register_op(name=f"tm_{name}", allow_inplace=True)(native)
    library = torch.library.Library(name, "DEF")
    library.define("k_(Tensor(a!) x, Tensor(b!)? r, Tensor w) -> ()")

    def kernel(x: Tensor, r: Tensor | None, w: Tensor) -> None:
        if r is not None:
            r.add_(x)
        torch.mul(x if r is None else r, w, out=x)

    library.impl("k_", kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{name}::k_", lambda x, r, w: None, lib=library)

    @op.register_impl("inp", inplace=True)
    def inp(x: Tensor, x_residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
        r = x.clone() if x_residual is None else x_residual
        getattr(torch.ops, name).k_(x, x_residual, weight)
        return x, r

    op._library = library
    return op


@pytest.mark.parametrize("present", [True, False], ids=["given", "None"])
def test_an_optional_argument_may_be_overwritten_or_be_absent(optional, functionalized, present):
    x, r, w = tensors(*ARGUMENTS)
    want = optional.native(x, r if present else None, w)
    function = optional.maybe_inplace
    f = (lambda x, r, w: function(x, r, w)) if present else (lambda x, r, w: function(x, None, w))
    with ir.priority({optional.name: ["inp"]}):
        with torch.no_grad():
            torch.testing.assert_close(f(x.clone(), r.clone(), w), want)
        for backend in BACKENDS.values():
            torch._dynamo.reset()
            given = x.clone()
            torch.testing.assert_close(run(f, given, r.clone(), w, backend=backend), want)
            if present:
                torch.testing.assert_close(given, want[0])  # overwritten, without a copy


@pytest.mark.parametrize("provider", ["native", "vllm_c"])
def test_an_absent_key_is_right_eager_and_compiled(provider):
    positions, query = torch.tensor([1, 2, 3]), torch.randn(3, 16)
    cache = torch.randn(8, 8)
    want, _ = ir.ops.rotary_embedding.native(positions, query, None, cache, 8)
    with ir.priority(rotary_embedding=[provider]):
        eager, nothing = ir.ops.rotary_embedding(positions, query, None, cache, 8)
        compiled, empty = run(lambda p, q, c: ir.ops.rotary_embedding(p, q, None, c, 8), positions, query, cache)
    torch.testing.assert_close(eager, want)
    torch.testing.assert_close(compiled, want)
    assert nothing is None
    assert empty is None


# Mutated inputs


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_a_mutated_input_is_seen_by_the_caller_and_copied_onto_itself_nowhere(add, backend):
    def f(x, r, w):
        x.add_(1)
        y, r2 = add.op(x, r, w)
        r.copy_(r2)
        x.mul_(2)
        return y

    equal_to_native(add, f, tensors(*ARGUMENTS), backend)
    copies = re.findall(r"copy_\.default\((\w+), (\w+)\)", list(report().graphs.values())[-1])
    assert len(copies) == 2
    assert all(target != source for target, source in copies)


def test_a_donated_tensor_may_not_be_written_later(add):
    def f(x, r, w):
        y, r2 = add.op.maybe_inplace(x, r, w)
        x.copy_(y)
        return r2

    assert "used by 'copy_'" in donation_error(f, *tensors(*ARGUMENTS))


# A cache of bytes


@pytest.fixture
def store():
    """Writes rows into a cache: `x_cache` is given away, and comes back with the rows' values in its dtype."""
    name = f"tm{next(_numbers)}"

    def native(x_cache: Tensor, rows: Tensor) -> Tensor:
        return rows.to(x_cache.dtype)

    op = ir.register_op(name=f"tm_{name}", allow_inplace=True)(native)
    library = torch.library.Library(name, "DEF")
    library.define("store_(Tensor(a!) cache, Tensor rows) -> ()")

    def kernel(cache: Tensor, rows: Tensor) -> None:
        cache.copy_(rows)

    library.impl("store_", kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{name}::store_", lambda cache, rows: None, lib=library)

    @op.register_impl("inp", inplace=True)
    def inp(x_cache: Tensor, rows: Tensor) -> Tensor:
        getattr(torch.ops, name).store_(x_cache, rows)
        return x_cache

    op._library = library
    return op


@pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
def test_rows_of_a_byte_cache_that_is_viewed_as_float8_are_overwritten_without_a_copy(store, backend):
    def f(cache, rows):
        written = store.maybe_inplace(cache.view(torch.float8_e4m3fn)[4:8], rows)
        return written.float() + 1, cache[:4].view(torch.float8_e4m3fn).float()

    cache, rows = torch.zeros(16, 8, dtype=torch.uint8), torch.randint(0, 8, (4, 8)).float()
    with ir.priority({store.name: ["inp"]}):
        plus, other = run(f, cache, rows, backend=backend)
    torch.testing.assert_close(plus, rows + 1)
    assert not other.any()
    torch.testing.assert_close(cache[4:8].view(torch.float8_e4m3fn).float(), rows)
    assert not cache[:4].any()
    assert not cache[8:].any()
    assert (report().clones_inserted, report().clones_removed) == (1, 1)
    assert "clone" not in list(report().graphs.values())[-1]


def test_a_byte_cache_may_not_be_used_after_its_float8_view_was_donated(store):
    def f(cache, rows):
        written = store.maybe_inplace(cache.view(torch.float8_e4m3fn)[4:8], rows)
        return written.float(), cache[7:9].sum()

    message = donation_error(f, torch.zeros(16, 8, dtype=torch.uint8), torch.ones(4, 8))
    assert "used by 'sum'" in message
    assert "which shares its memory" in message


def test_a_cache_that_is_only_read_is_not_copied(add, store):
    """An in-place kernel is given copies of what it overwrites, not of what it reads."""

    def f(cache, x, r, w):
        y, r2 = add.op(x, r, cache.view(torch.float8_e4m3fn)[0].float() + w)
        return y, r2, store(cache.view(torch.float8_e4m3fn)[4:8], y).float()

    x, r, w = tensors(*ARGUMENTS)
    cache = torch.zeros(1024, 8, dtype=torch.uint8)
    with add.priority("inp"), ir.priority({store.name: ["inp"], add.op.name: ["inp"]}):
        run(f, cache, x, r, w)
    assert not cache.any()
    rows_copied = re.findall(r"\[(\d+), 8\]\[8, 1\] = aten\.clone", list(report().graphs.values())[-1])
    assert set(rows_copied) == {"4"}


# Gradients


def test_a_gradient_that_is_needed_again_is_not_overwritten(add):
    """The backward is an op with an in-place kernel; the residual needs the same gradient after it."""

    def native(x: Tensor, weight: Tensor) -> Tensor:
        return x * weight

    norm = ir.register_op(name=f"{add.op.name}_norm")(native)

    @norm.register_backward
    def backward(grads, x, weight):
        g = grads[0]
        scaled, _ = add.op(g, g * 0, weight)
        return scaled, (g * x).sum(0)

    def f(x, w):
        h = norm(x, w)
        return (norm(h, w) + h).sin() + x

    def gradients(function, provider):
        with add.priority(provider):
            x, w = (t.clone().requires_grad_() for t in (start, weight))
            return torch.autograd.grad(function(x, w).sum(), (x, w))

    start, weight = torch.randn(4, 8), torch.randn(8)
    want = gradients(f, "native")
    for backend in BACKENDS.values():
        torch._dynamo.reset()
        torch.testing.assert_close(gradients(torch.compile(f, backend=backend), "inp"), want)


def test_what_is_saved_for_the_backward_is_not_overwritten(add):
    def f(x, r, w):
        h = x.exp()  # its backward needs h itself
        y, r2 = add.op.maybe_inplace(h * 1, r, w)
        z, _ = add.op(h, r2 * 2, w)
        return (y * z).sum()

    arguments = [t.requires_grad_() for t in tensors(*ARGUMENTS)]
    want = torch.autograd.grad(f(*arguments), arguments)
    with add.priority("inp"):
        got = torch.autograd.grad(torch.compile(f, backend=lowered)(*arguments), arguments)
    torch.testing.assert_close(got, want)
    assert any(re.fullmatch(r"\w+ is returned", kept.reason) for kept in report().kept_copies)


# Bodies of higher-order ops


def test_a_branch_that_reads_a_tensor_later_keeps_the_copy(add):
    def f(x, r, w):
        h = x * 2
        y, r2 = add.op(h, r * 2, w)
        return y, r2, torch.cond(r.sum() > 0, lambda t: t + 1, lambda t: t - 1, (h,))

    equal_to_native(add, f, tensors(*ARGUMENTS))
    assert [kept.reason for kept in report().kept_copies] == ["mul is written later by cond"]  # for all that is known


def test_a_branch_may_not_be_given_a_donated_tensor(add):
    def f(x, r, w):
        h = x * 2
        y, r2 = add.op.maybe_inplace(h, r, w)
        return y, r2, torch.cond(r2.sum() > 0, lambda t: t + 1, lambda t: t - 1, (h,))

    assert "used by" in donation_error(f, *tensors(*ARGUMENTS))


@pytest.mark.parametrize("sign", [1, -1])
def test_donation_inside_a_branch_overwrites_nothing_outside(add, sign):
    def f(x, r, w):
        h = x * 2
        y = torch.cond(r.sum() > 0, lambda a, b: add.op.maybe_inplace(a, b, w)[0], lambda a, b: a - b, (h, r))
        return y, h + 1, r + 1

    x, r, w = tensors(*ARGUMENTS)
    equal_to_native(add, f, (x, sign * r.abs(), w))


def test_donation_inside_a_loop_overwrites_nothing_outside(add):
    def f(x, r, w):
        def body(i, a, b):
            y, r2 = add.op.maybe_inplace(a, b, w)
            return i + 1, y.tanh(), r2.tanh()

        loop = torch._higher_order_ops.while_loop(
            lambda i, a, b: i < 3, body, (torch.zeros((), dtype=torch.int64), x, r)
        )
        return (*loop[1:], x + 1, r + 1)

    equal_to_native(add, f, tensors(*ARGUMENTS))
