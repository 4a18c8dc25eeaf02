"""The activations: against float64 written out by hand, and the modules that models use."""

import math
from statistics import NormalDist
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from op_checks import DTYPES, check_compiled, check_compiled_gradients, check_derivatives, close, f64

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("natively")

GATED = ("mul_and_silu", "gelu_and_mul_sparse", "swigluoai_and_mul", "fatrelu_and_mul")
POINTWISE = ("gelu_new", "gelu_fast", "quick_gelu", "relu2", "xielu")
NUMBERS = {"gelu_and_mul_sparse": (0.75,)}
SHAPES = ((1, 2), (2, 3, 96), (5, 66), (0, 64), (8,))


def rest(name):
    return (torch.tensor([0.3]), torch.tensor([-0.7])) if name == "xielu" else NUMBERS.get(name, ())


def sigmoid(v):
    return 1 / (1 + torch.exp(-v))


def gelu(v, approximate="tanh"):
    if approximate == "none":
        return 0.5 * v * (1 + torch.erf(v / math.sqrt(2)))
    return 0.5 * v * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))


def softplus(v):
    return math.log1p(math.exp(float(v)))


def exact_mul_and_silu(x):
    up, gate = x.chunk(2, -1)
    return up * gate * sigmoid(gate)


def exact_gelu_and_mul_sparse(x, sparsity, approximate="tanh"):
    gate, up = x.chunk(2, -1)
    if sparsity and gate.numel():
        mean = gate.sum(-1, keepdim=True) / gate.shape[-1]
        deviation = (((gate - mean) ** 2).sum(-1, keepdim=True) / gate.shape[-1]).sqrt()
        gate = (gate - mean - deviation * NormalDist().inv_cdf(sparsity)).clamp(min=0)
    return gelu(gate, approximate) * up


def exact_swigluoai_and_mul(x, alpha=1.702, limit=7.0):
    gate, up = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
    return gate * sigmoid(alpha * gate) * (up + 1)


def exact_fatrelu_and_mul(x, threshold=0.0):
    gate, up = x.chunk(2, -1)
    return gate * (gate > threshold) * up


def exact_xielu(x, alpha_p, alpha_n, beta=0.5, epsilon=-1e-6):
    positive, negative = softplus(alpha_p), beta + softplus(alpha_n)
    below = (torch.expm1(x.clamp(max=epsilon)) - x) * negative
    return torch.where(x > 0, positive * x * x, below) + beta * x


EXACT = {
    "mul_and_silu": exact_mul_and_silu,
    "gelu_and_mul_sparse": exact_gelu_and_mul_sparse,
    "swigluoai_and_mul": exact_swigluoai_and_mul,
    "fatrelu_and_mul": exact_fatrelu_and_mul,
    "gelu_new": gelu,
    "gelu_fast": lambda x: 0.5 * x * (1 + torch.tanh(0.7978845608 * x * (1 + 0.044715 * x * x))),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "relu2": lambda x: x.clamp(min=0) ** 2,
    "xielu": exact_xielu,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", EXACT)
def test_activations_are_exact_to_roundings(name, shape, dtype):
    x = torch.randn(shape).to(dtype)
    exact = EXACT[name](x.double(), *rest(name))
    close(getattr(ir.ops, name)(x, *rest(name)), exact, dtype, ulps=16 if dtype == torch.float64 else 8)


@pytest.mark.parametrize(
    ("name", "numbers", "factor"),
    [
        ("gelu_and_mul_sparse", (0.3, "none"), 1),
        ("gelu_and_mul_sparse", (0.95, "none"), 1),
        ("swigluoai_and_mul", (1.0, 2.5), 8),
        ("fatrelu_and_mul", (0.5,), 1),
        ("fatrelu_and_mul", (-0.5,), 1),
        ("xielu", (*rest("xielu"), 0.25, -1e-3), 8),
    ],
)
def test_numbers_of_an_activation_count(name, numbers, factor):
    x = torch.randn(7, 64) * factor
    close(getattr(ir.ops, name)(x, *numbers), EXACT[name](x.double(), *numbers), torch.float32, ulps=8)


@pytest.mark.parametrize("name", POINTWISE)
def test_half_precision_is_rounded_once(name):
    x = torch.randn(64, 64).bfloat16()
    exact = EXACT[name](x.double(), *rest(name))
    assert (getattr(ir.ops, name)(x, *rest(name)) == exact.bfloat16()).float().mean() > 0.995


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("gelu_new", "NewGELUActivation"),
        ("gelu_fast", "FastGELUActivation"),
        ("quick_gelu", "QuickGELUActivation"),
        ("relu2", "ReLUSquaredActivation"),
        ("xielu", "XIELUActivation"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_activations_are_those_of_transformers(name, reference, dtype):
    made = getattr(pytest.importorskip("transformers.activations"), reference)
    module = made(dtype=dtype) if name == "xielu" else made()
    learnt = (module.alpha_p, module.alpha_n) if name == "xielu" else ()
    x = torch.randn(5, 64, dtype=dtype) * 3
    with torch.no_grad():
        torch.testing.assert_close(getattr(ir.ops, name)(x, *learnt), module(x))


# --- gated -----------------------------------------------------------------------------------------------------------


def test_mul_and_silu_is_silu_and_mul_with_the_halves_exchanged():
    x = torch.randn(5, 64).bfloat16()
    assert torch.equal(ir.ops.mul_and_silu(x), ir.ops.silu_and_mul(torch.cat((x[:, 32:], x[:, :32]), -1)))


@pytest.mark.parametrize("sparsity", [0.95, 0.5])
def test_gelu_and_mul_sparse_is_gemma3ns(sparsity):
    gemma = pytest.importorskip("transformers.models.gemma3n.modeling_gemma3n")
    x = torch.randn(5, 256)
    sparse = gemma.Gemma3nTextMLP._gaussian_topk(SimpleNamespace(activation_sparsity=sparsity), x[:, :128])
    expected = F.gelu(sparse, approximate="tanh") * x[:, 128:]
    torch.testing.assert_close(ir.ops.gelu_and_mul_sparse(x, sparsity), expected)


@pytest.mark.parametrize("sparsity", [0.95, 0.5, 0.1])
def test_gelu_and_mul_sparse_drops_that_share_of_normal_gates(sparsity):
    got = ir.ops.gelu_and_mul_sparse(torch.cat((torch.randn(1, 100_000), torch.ones(1, 100_000)), -1), sparsity)
    assert abs((got == 0).double().mean() - sparsity) < 0.005


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_a_sparsity_of_zero_is_gelu_and_mul_bit_for_bit(dtype, approximate):
    x = torch.randn(5, 66).to(dtype)
    assert torch.equal(ir.ops.gelu_and_mul_sparse(x, 0.0, approximate), ir.ops.gelu_and_mul(x, approximate))


def test_gates_that_are_all_equal_have_a_gradient():
    x = torch.ones(2, 8, requires_grad=True)
    ir.ops.gelu_and_mul_sparse(x, 0.9).sum().backward()
    assert torch.isfinite(x.grad).all()


@pytest.mark.parametrize("sparsity", [-0.1, 1.0, 1.5, math.nan])
def test_a_sparsity_out_of_range_is_an_error(sparsity):
    with pytest.raises(errors.ArgumentError, match="activation_sparsity must be at least 0 and less than 1"):
        ir.ops.gelu_and_mul_sparse(torch.ones(2, 4), sparsity)


def test_gelu_and_mul_sparse_knows_two_approximations():
    with pytest.raises(errors.ArgumentError, match="'none' or 'tanh', got 'quick'"):
        ir.ops.gelu_and_mul_sparse(torch.ones(2, 4), 0.5, "quick")


def test_swigluoai_and_mul_is_gpt_oss():
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    x = torch.randn(5, 64) * 8
    expected = gpt_oss.GptOssExperts._apply_gate(SimpleNamespace(alpha=1.702, limit=7.0), x)
    torch.testing.assert_close(ir.ops.swigluoai_and_mul(x), expected)


def test_swigluoai_and_mul_clamps_the_gate_above_only():
    got = ir.ops.swigluoai_and_mul(torch.tensor([100.0, 0.0, -3.0, 100.0, 1.0, -100.0]), 1.0, 2.0)
    gates = torch.tensor([2.0, -3.0, 1.0])
    torch.testing.assert_close(got, gates * sigmoid(gates) * torch.tensor([1.0, 3.0, -1.0]))


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan])
def test_swigluoai_and_mul_needs_a_limit_of_more_than_zero(limit):
    with pytest.raises(errors.ArgumentError, match="limit must be more than 0"):
        ir.ops.swigluoai_and_mul(torch.ones(2, 4), limit=limit)


def test_fatrelu_and_mul_keeps_what_is_above_the_threshold_only():
    gate = torch.tensor([0.5, 0.51, 0.49, -1.0, math.nan])
    got = ir.ops.fatrelu_and_mul(torch.cat((gate, torch.full((5,), 2.0))), 0.5)
    torch.testing.assert_close(got, torch.tensor([0.0, 1.02, 0.0, 0.0, math.nan]), equal_nan=True)


def test_the_threshold_of_fatrelu_is_not_rounded_to_half_precision():
    gate = torch.tensor([0.01], dtype=torch.bfloat16)  # 0.010009765625
    assert ir.ops.fatrelu_and_mul(torch.cat((gate, torch.ones_like(gate))), 0.01) == gate


@pytest.mark.parametrize("name", GATED)
@pytest.mark.parametrize("shape", [(3, 5), (1,), ()])
def test_odd_rows_cannot_be_halved(name, shape):
    with pytest.raises(errors.ArgumentError, match=f"{name}.*even"):
        getattr(ir.ops, name)(torch.randn(shape), *rest(name))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_elements_that_are_not_floating_point_are_refused(name, dtype):
    with pytest.raises(errors.ArgumentError, match=f"{name}.*'x' must have a floating-point dtype"):
        getattr(ir.ops, name)(torch.ones(2, 4, dtype=dtype), *rest(name))


@pytest.mark.parametrize("name", EXACT)
def test_rows_without_elements_give_none(name):
    assert getattr(ir.ops, name)(torch.ones(3, 0), *rest(name)).shape == (3, 0)


# --- of one element --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", POINTWISE)
def test_a_scalar_is_one_element(name):
    assert getattr(ir.ops, name)(torch.tensor(1.0), *rest(name)).shape == ()


def test_the_factor_of_gelu_fast_has_ten_digits():
    x = torch.linspace(-3, 3, 64, dtype=torch.float64)
    apart = (ir.ops.gelu_fast(x) - ir.ops.gelu_new(x)).abs().max()
    assert 1e-13 < apart < 1e-10


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_numbers_of_xielu_may_be_scalars_of_another_dtype(shape):
    alpha = torch.full(shape, 0.3, dtype=torch.bfloat16)
    x = torch.randn(3, 8)
    close(ir.ops.xielu(x, alpha, alpha), exact_xielu(x.double(), alpha, alpha), torch.float32, ulps=4)


@pytest.mark.parametrize("name", ["alpha_p", "alpha_n"])
@pytest.mark.parametrize(
    ("wrong", "problem"), [(torch.ones(2), "must hold one number"), (torch.ones(1).long(), "floating-point")]
)
def test_xielu_names_the_number_that_does_not_fit(name, wrong, problem):
    good = {"alpha_p": torch.ones(1), "alpha_n": torch.ones(1)}
    with pytest.raises(errors.ArgumentError, match=f"'{name}'.*{problem}"):
        ir.ops.xielu(torch.ones(3), **good | {name: wrong})


def test_xielu_of_huge_numbers_has_finite_gradients():
    arguments = [torch.tensor([-1e30, 3e18, -2.0, 2.0]), torch.ones(1), torch.ones(1)]
    arguments = [a.requires_grad_() for a in arguments]
    gradients = torch.autograd.grad(ir.ops.xielu(*arguments).clamp(-1e3, 1e3).sum(), arguments)
    assert all(torch.isfinite(g).all() for g in gradients)


def test_xielu_of_nan_is_nan():
    assert ir.ops.xielu(torch.tensor(math.nan), torch.ones(1), torch.ones(1)).isnan()


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own rules use it
@pytest.mark.parametrize("name", EXACT)
def test_first_and_second_derivatives_are_right(name):
    learnt = [f64(1), f64(1)] if name == "xielu" else rest(name)
    check_derivatives(getattr(ir.ops, name), (f64(2, 6), *learnt))


def test_one_graph_serves_any_number_of_rows():
    check_compiled((*GATED, *POINTWISE))


def test_gradients_through_a_graph_are_those_of_eager_mode():
    check_compiled_gradients((*GATED, *POINTWISE))
