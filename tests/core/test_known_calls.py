"""Classes of calls that dispatchers learn: recognising one must never change what a call does."""

import random

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

import irframework as ir
from irframework import known_calls

pytestmark = pytest.mark.skipif(known_calls._TensorGuards is None, reason="this torch has no such guards")

ENOUGH = 40  # calls until a dispatcher knows the class of each of two


def native(x: Tensor, other: Tensor | None = None, number: int = 1) -> Tensor:
    return torch.zeros_like(x, memory_format=torch.contiguous_format)


def joined(x: Tensor, x_residual: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r = x + x_residual
    return (r * 2 if weight is None else r * weight), r


def overwriting(x: Tensor, x_residual: Tensor, weight: Tensor | None = None) -> tuple[Tensor, Tensor]:
    x_residual.add_(x)
    torch.mul(x_residual, 2 if weight is None else weight, out=x)
    return x, x_residual


@pytest.fixture
def asked(monkeypatch):
    """Answers of all guards that are made during a test."""
    answers = []

    class Counted:
        def __init__(self, *args, **options):
            self.inner = guards(*args, **options)

        def check(self, *tensors):
            answers.append(self.inner.check(*tensors))
            return answers[-1]

    guards = known_calls._TensorGuards
    monkeypatch.setattr(known_calls, "_TensorGuards", Counted)
    return answers


@pytest.fixture
def constant(declare):
    """An op whose provider answers with ones under a condition, and native with zeros."""

    def make(**conditions):
        op = declare(native)

        @op.register_impl("one", supports_args=ir.supports(**conditions))
        def one(x, other=None, number=1):
            return torch.ones_like(x, memory_format=torch.contiguous_format)

        return op

    return make


@pytest.fixture
def given(declare):
    """An op with an in-place implementation whose calls with plain tensors are known."""
    op = declare(joined, allow_inplace=True)
    op.register_impl("inp", inplace=True)(overwriting)
    for _ in range(ENOUGH):
        op.maybe_inplace(torch.ones(2), torch.ones(2))
        op.maybe_inplace(torch.ones(2), torch.ones(2), torch.full((2,), 2.0))
    return op


# --- recognising -----------------------------------------------------------------------------------------------------


def test_calls_that_differ_in_the_number_of_rows_only_are_of_one_class(constant, asked):
    op = constant(dtype=torch.float32, row_contiguous=["x"], last_dim_of={"other": "x"})
    for rows in range(1, ENOUGH):
        op(torch.ones(rows, 4), torch.ones(4))
    assert asked.count(False) == 0
    assert asked.count(True) > ENOUGH // 2


def test_two_classes_are_known_at_once(constant, asked):
    op = constant(dtype=(torch.float32, torch.float64))
    for _ in range(ENOUGH):
        for dtype in (torch.float32, torch.float64):
            op(torch.ones(2, dtype=dtype))
    asked.clear()
    for dtype in (torch.float32, torch.float64):
        op(torch.ones(2, dtype=dtype))
    assert asked.count(True) == 2


def test_a_class_that_is_met_no_longer_makes_room(constant, asked):
    op = constant(dtype=(torch.float32, torch.float64, torch.float16))
    for dtype in (torch.float32, torch.float64, torch.float16):
        for _ in range(3 * ENOUGH):
            op(torch.ones(2, dtype=dtype))
    asked.clear()
    op(torch.ones(2, dtype=torch.float16))
    assert asked == [True]


def test_a_new_registration_forgets_what_is_known(constant):
    op = constant()
    for _ in range(ENOUGH):
        assert op(torch.ones(2)).tolist() == [1, 1]
    op.register_impl("better")(lambda x, other=None, number=1: torch.full_like(x, 2))
    with ir.priority({op.name: "better"}):
        assert op(torch.ones(2)).tolist() == [2, 2]


def test_without_torchs_guards_all_is_asked_one_by_one(constant, monkeypatch):
    monkeypatch.setattr(known_calls, "_TensorGuards", None)
    op = constant(dtype=torch.float32)
    for _ in range(ENOUGH):
        assert op(torch.ones(2)).tolist() == [1, 1]
        assert op(torch.ones(2, dtype=torch.float64)).tolist() == [0, 0]


# --- deciding as without ---------------------------------------------------------------------------------------------

TENSORS = {
    "rows": lambda: torch.ones(random.randint(1, 3), 4),
    "one row": lambda: torch.ones(1, 4),
    "no rows": lambda: torch.ones(0, 4),
    "wider": lambda: torch.ones(2, 6),
    "empty": lambda: torch.ones(2, 0),
    "columns": lambda: torch.ones(4, 2).t(),
    "every second row": lambda: torch.ones(4, 4)[::2],
    "one row of many strides": lambda: torch.ones(2, 8)[:1, ::2],
    "repeated": lambda: torch.ones(1, 4).expand(3, 4),
    "three dimensions": lambda: torch.ones(2, random.randint(1, 2), 4),
    "vector": lambda: torch.ones(random.choice([1, 4])),
    "every second": lambda: torch.ones(random.choice([1, 2, 8]))[::2],
    "number": lambda: torch.ones(()),
    "double": lambda: torch.ones(2, 4, dtype=torch.float64),
    "codes": lambda: torch.ones(2, 4, dtype=torch.uint8),
    "parameter": lambda: Parameter(torch.ones(2, 4), requires_grad=False),
    "trained": lambda: Parameter(torch.ones(2, 4)),
}
CONDITIONS = {
    "dtype": {"dtype": {"x": torch.float32, "other": (torch.float32, torch.uint8)}},
    "same_dtype": {"same_dtype": ["x", "other"]},
    "none": {"none": ["other"]},
    "contiguous": {"contiguous": ["x", "other"]},
    "row_contiguous": {"row_contiguous": ["x"]},
    "ndim": {"ndim": {"x": (1, 3), "other": 2}},
    "same_shape": {"same_shape": ["x", "other"]},
    "last_dim_of": {"last_dim_of": {"other": "x"}},
    "multiple_of": {"multiple_of": {"x": 4}},
    "max_last_dim": {"max_last_dim": {"x": 4}},
    "one_element": {"one_element": ["other"]},
    "one_of": {"one_of": {"number": (1, 2)}},
    "several": {
        "dtype": torch.float32,
        "contiguous": ["x"],
        "same_shape": ["x", "other"],
        "one_of": {"number": (1, 2)},
    },
}


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("grad", [True, False])
def test_every_call_is_decided_as_explain_decides_it(constant, condition, grad):
    op = constant(**CONDITIONS[condition])
    choose = random.Random(condition)
    with torch.set_grad_enabled(grad):
        for _ in range(40):
            first, second = (choose.choice(list(TENSORS)) for _ in range(2))
            x = TENSORS[first]()
            other = TENSORS[second]() if choose.random() < 0.8 else None
            number = choose.choice([1, 1, 1, 2, 3])
            for _ in range(choose.choice([1, 2, 12])):
                expected = 1.0 if ir.explain(op.name, x, other, number).provider == "one" else 0.0
                y = op(x, other, number)
                assert (y == expected).all(), (first, second, number)
                assert y.is_contiguous()
                assert y.shape == x.shape


def test_a_known_class_does_not_settle_what_rows_decide(constant):
    op = constant(same_shape=["x", "other"])
    for _ in range(ENOUGH):
        op(torch.ones(2, 4), torch.ones(2, 4))
    assert op(torch.ones(2, 4), torch.ones(3, 4)).sum() == 0


@pytest.mark.parametrize("refused", ["meta", "another class", "a list", "a number"])
def test_what_is_no_plain_tensor_is_of_no_class(constant, refused):
    op = constant()
    for _ in range(ENOUGH):
        op(torch.ones(2), torch.ones(2))
    wrong = {
        "meta": lambda: torch.ones(2, device="meta"),
        "another class": lambda: torch.ones(2).as_subclass(type("Subclass", (Tensor,), {})),
        "a list": lambda: [1.0, 1.0],
        "a number": lambda: 1.0,
    }[refused]()
    if refused == "another class":
        assert type(op(torch.ones(2), wrong)) is type(wrong)
    else:
        with pytest.raises(ir.errors.IrError):
            op(torch.ones(2), wrong)


# --- what must be seen is seen ---------------------------------------------------------------------------------------


@pytest.fixture
def warm(declare):
    """An op with a provider that reads memory, whose calls with a plain matrix are known."""

    def square(x: Tensor) -> Tensor:
        return x * x

    op = declare(square)
    op.register_impl("numpy")(lambda x: torch.from_numpy(x.detach().numpy() ** 2))
    for _ in range(ENOUGH):
        op(torch.ones(2, 3))
    return op


def test_gradient_of_a_known_call_is_not_lost(warm):
    x = torch.full((2, 3), 3.0, requires_grad=True)
    warm(x).sum().backward()
    assert (x.grad == 6).all()


def test_gradient_after_calls_without_gradients_is_not_lost(warm):
    x = torch.full((2, 3), 3.0, requires_grad=True)
    with torch.no_grad():
        for _ in range(ENOUGH):
            assert not warm(x).requires_grad
    warm(x).sum().backward()
    assert (x.grad == 6).all()


def test_dispatch_mode_sees_a_known_call(warm):
    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []
    with Seen():
        warm(torch.ones(2, 3))
    assert any(warm.name in name for name in seen)


def test_tracing_sees_a_known_call(warm):
    graph = make_fx(lambda x: warm(x))(torch.ones(2, 3)).graph
    assert any(warm.name in str(node.target) for node in graph.nodes)


def test_fake_tensors_of_a_known_call_stay_fake(warm):
    with torch._subclasses.FakeTensorMode():
        assert type(warm(torch.ones(2, 3))) is not Tensor


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own rules use it
def test_transforms_see_a_known_call(warm):
    x = torch.full((2, 3), 3.0)
    assert (torch.func.grad(lambda x: warm(x).sum())(x) == 6).all()
    assert (torch.func.vmap(warm)(x.expand(4, 2, 3)) == 9).all()
    assert (torch.func.jvp(warm, (x,), (torch.ones(2, 3),))[1] == 6).all()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_forward_derivative_of_a_known_call_is_not_lost(warm):
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.full((2, 3), 3.0), torch.ones(2, 3))
        assert (torch.autograd.forward_ad.unpack_dual(warm(dual)).tangent == 6).all()


def test_autocast_does_not_reach_into_a_known_call(declare):
    op = declare(product)
    op.register_impl("p")(lambda x: x @ x)
    for _ in range(ENOUGH):
        op(torch.ones(2, 2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(ENOUGH):
            assert op(torch.ones(2, 2)).dtype is torch.float32


def product(x: Tensor) -> Tensor:
    return x @ x


def test_inference_mode_and_back(warm):
    for _ in range(3):
        with torch.inference_mode():
            inside = torch.full((2, 3), 3.0)
            for _ in range(ENOUGH):
                assert (warm(inside) == 9).all()
        assert (warm(inside) == 9).all()
        assert (warm(torch.full((2, 3), 3.0)) == 9).all()


def test_result_of_a_known_call_shares_no_memory(declare):
    op = declare(native)
    returned = {"view": False}
    op.register_impl("p")(lambda x, other=None, number=1: x if returned["view"] else x.clone())
    for _ in range(ENOUGH):
        op(torch.ones(2))
    returned["view"] = True
    x = torch.ones(2)
    assert op(x) is not x


# --- donated memory --------------------------------------------------------------------------------------------------


def test_known_call_overwrites_what_it_was_given(given):
    x, residual, weight = torch.ones(2), torch.ones(2), torch.full((2,), 2.0)
    y, r = given.maybe_inplace(x, residual, weight)
    assert y is x
    assert r is residual
    assert (y.tolist(), r.tolist()) == ([4, 4], [2, 2])


@pytest.mark.parametrize("weight", [None, torch.full((2,), 2.0)], ids=["alone", "weight"])
@pytest.mark.parametrize(
    "change",
    [
        lambda t: Parameter(t, requires_grad=False),
        lambda t: Parameter(torch.ones(2, 2), requires_grad=False)[1],
        lambda t: Parameter(torch.ones(2, 2))[1],
        lambda t: torch.ones(1).expand(2),
        lambda t: torch.ones(4)[::2],
    ],
    ids=["parameter", "row of a parameter", "row of a trained parameter", "expanded", "strided"],
)
def test_known_calls_do_not_overwrite_what_they_must_not(given, change, weight):
    for place in (0, 1):
        pair = [torch.ones(2), torch.ones(2)]
        with torch.no_grad():
            pair[place] = change(pair[place])
            y, r = given.maybe_inplace(*pair, weight)
        assert (pair[place] == 1).all()
        assert (y.tolist(), r.tolist()) == ([4, 4], [2, 2])


@pytest.mark.parametrize("weight", [None, torch.full((2,), 2.0)], ids=["alone", "weight"])
def test_views_of_one_tensor_given_to_a_known_call_are_right(given, weight):
    both = torch.ones(4)
    x, residual = both[:2], both[1:3]
    y, r = given.maybe_inplace(x, residual, weight)
    assert (y.tolist(), r.tolist()) == ([4, 4], [2, 2])
    same = torch.ones(2)
    assert given.maybe_inplace(same, same, weight)[0].tolist() == [4, 4]


@pytest.mark.parametrize("place", [0, 1])
def test_weight_that_shares_memory_with_what_a_known_call_is_given_is_right(given, place):
    pair = [torch.ones(2), torch.ones(2)]
    weight = pair[place].detach()
    y, r = given.maybe_inplace(*pair, weight)
    assert weight.tolist() == [1, 1]
    assert (y.tolist(), r.tolist()) == ([2, 2], [2, 2])


def test_known_calls_count_their_writes(given):
    x, residual = torch.ones(2), torch.ones(2)
    before = x._version, residual._version
    given.maybe_inplace(x, residual)
    assert x._version > before[0]
    assert residual._version > before[1]


def test_inference_tensors_are_overwritten_in_inference_mode_only(given):
    with torch.inference_mode():
        for _ in range(ENOUGH):
            x, residual = torch.ones(2), torch.ones(2)
            assert given.maybe_inplace(x, residual)[0] is x
        x, residual = torch.ones(2), torch.ones(2)
    assert given.maybe_inplace(x, residual)[0].tolist() == [4, 4]
    assert x.tolist() == [1, 1]


def test_ordinary_tensors_given_away_in_inference_mode_count_their_writes(given):
    tensors = [(torch.ones(2), torch.ones(2)) for _ in range(ENOUGH)]
    with torch.inference_mode():
        for x, residual in tensors:
            given.maybe_inplace(x, residual)
    assert all(x._version for x, _ in tensors)


@pytest.fixture(params=["nothing", "an ordinary weight", "an inference weight"])
def beside(request, given):
    """What is beside inference tensors that are given away; such calls are known."""
    weight = torch.full((2,), 2.0) if request.param == "an ordinary weight" else None
    with torch.inference_mode():
        if request.param == "an inference weight":
            weight = torch.full((2,), 2.0)
        for _ in range(2 * ENOUGH):
            given.maybe_inplace(torch.ones(2), torch.ones(2), weight)
    return weight


@pytest.mark.parametrize("inference", [True, False])
def test_ordinary_tensors_below_torchs_key_of_writes_are_not_taken_for_inference_tensors(given, beside, inference):
    x, residual = torch.ones(2), torch.ones(2)
    parameter = Parameter(torch.ones(2, 2), requires_grad=False)
    row = parameter[1]
    with torch.inference_mode(inference), torch._C._AutoDispatchBelowADInplaceOrView():
        assert given.maybe_inplace(x, residual, beside)[0].tolist() == [4, 4]
        assert given.maybe_inplace(row, torch.ones(2), beside)[0].tolist() == [4, 4]
    assert x._version > 0
    assert (parameter == 1).all()


def test_nothing_is_learned_of_inference_tensors_below_torchs_key_of_writes(given):
    with torch._C._AutoDispatchBelowADInplaceOrView():
        with torch.inference_mode():
            for _ in range(2 * ENOUGH):
                given.maybe_inplace(torch.ones(2), torch.ones(2))
        x, residual = torch.ones(2), torch.ones(2)
        given.maybe_inplace(x, residual)
    assert x._version > 0


def test_known_calls_overwrite_inference_tensors(given, beside):
    with torch.inference_mode():
        x, residual = torch.ones(2), torch.ones(2)
        y, r = given.maybe_inplace(x, residual, beside)
    assert (y is x, r is residual) == (True, True)
    assert (y.tolist(), r.tolist()) == ([4, 4], [2, 2])


def test_known_inference_tensors_of_one_storage_are_right(given, beside):
    with torch.inference_mode():
        both = torch.ones(4)
        y, r = given.maybe_inplace(both[:2], both[1:3], beside)
    assert (y.tolist(), r.tolist()) == ([4, 4], [2, 2])


def test_a_transform_keeps_known_calls_from_overwriting_what_it_wraps(given):
    x, residual = torch.ones(3, 2), torch.ones(3, 2)
    y, r = torch.func.vmap(given.maybe_inplace)(x, residual)
    assert x.tolist() == [[1, 1]] * 3
    assert (y == 4).all()
    assert (r == 2).all()
    inner = torch.ones(2), torch.ones(2)
    torch.func.vmap(lambda x: given.maybe_inplace(*inner)[0] + x)(x)
    assert inner[0].tolist() == [1, 1]


def test_rows_that_are_not_dense_are_not_overwritten_by_known_calls(given):
    for _ in range(ENOUGH):  # one row says nothing of the stride between rows
        given.maybe_inplace(torch.ones(2, 4)[:1, :2], torch.ones(1, 2))
    base = torch.ones(4, 4)
    given.maybe_inplace(base[:2, :2], torch.ones(2, 2))
    assert (base == 1).all()


# --- kernels that look at tensors themselves -------------------------------------------------------------------------


@pytest.fixture
def looking(declare):
    """An op whose kernel refuses other shapes and one storage, and how often that was called; its calls are known."""

    def refusing(x, x_residual, weight=None):
        calls.append(x.shape)
        if x.shape != x_residual.shape:
            raise RuntimeError("shapes differ")
        if len({t.untyped_storage()._cdata for t in (x, x_residual, weight) if t is not None}) < 2 + (
            weight is not None
        ):
            raise RuntimeError("memory overlaps")
        if (x == 7).any():
            raise RuntimeError("seven")
        return overwriting(x, x_residual, weight)

    calls: list[torch.Size] = []
    op = declare(joined, allow_inplace=True)
    op.register_impl(
        "inp", inplace=True, checks_tensors=True, supports_args=ir.supports(same_shape=("x", "x_residual"))
    )(refusing)
    for rows in range(1, ENOUGH):
        op.maybe_inplace(torch.ones(rows, 2), torch.ones(rows, 2))
        op.maybe_inplace(torch.ones(rows, 2), torch.ones(rows, 2), torch.full((2,), 2.0))
    calls.clear()
    return op, calls


@pytest.mark.parametrize("weight", [None, torch.full((2,), 2.0)], ids=["alone", "weight"])
def test_kernel_that_looks_at_tensors_is_asked_instead_of_them(looking, weight):
    op, calls = looking
    both = torch.ones(3, 2)
    y, r = op.maybe_inplace(both[:2], both[1:], weight)
    assert (y.tolist(), r.tolist()) == ([[4, 4]] * 2, [[2, 2]] * 2)
    assert len(calls) == 2  # refused, then with copies


def test_weight_in_donated_memory_is_left_to_the_kernel(looking):
    op, calls = looking
    x, residual = torch.full((2, 2), 2.0), torch.ones(2, 2)
    weight = x[0]
    y, _ = op.maybe_inplace(x, residual, weight)
    assert y.tolist() == [[6, 6]] * 2
    assert weight.tolist() == [2, 2]
    assert len(calls) == 2


def test_shapes_that_a_kernel_refuses_are_the_next_ones(looking):
    op, calls = looking
    y, _ = op.maybe_inplace(torch.ones(4, 2), torch.ones(1, 2))
    assert y.tolist() == [[4, 4]] * 4
    assert calls == [(4, 2)]


def test_what_a_kernel_raises_for_another_reason_is_the_callers(looking):
    op, calls = looking
    with pytest.raises(RuntimeError, match="seven"):
        op.maybe_inplace(torch.full((2, 2), 7.0), torch.ones(2, 2))
    assert len(calls) == 1


def test_views_of_parameters_are_not_left_to_the_kernel(looking):
    op, _ = looking
    parameter = Parameter(torch.ones(2, 2, 2), requires_grad=False)
    op.maybe_inplace(parameter[0], torch.ones(2, 2))
    assert (parameter == 1).all()
