"""The kernel of the gated activations, run by Triton's interpreter on the CPU."""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.interpreter

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = ("silu", "none", "tanh")


@pytest.fixture
def kernels():
    from irframework_triton_kernels import implementations

    return implementations


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 1)).to(dtype)


def gated(module, x: Tensor, activation: str) -> Tensor:
    return module.silu_and_mul(x) if activation == "silu" else module.gelu_and_mul(x, activation)


def native(x: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return ir.ops.silu_and_mul.native(x)
    return ir.ops.gelu_and_mul.native(x, activation)


def assert_near(got: Tensor, x: Tensor, activation: str) -> None:
    """Within three units of the dtype's precision, and float32's absolute error of 1 + erf times the factor."""
    exact = native(x.double(), activation)
    assert got.shape == exact.shape
    info = torch.finfo(got.dtype)
    up = x[..., x.shape[-1] // 2 :].double().abs()
    allowed = 3 * info.eps * exact.abs() + (1 + up) * max(2 * info.smallest_normal, 3e-7)
    assert ((got.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("length", [1, 3, 96, 1500])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_rows_of_any_length_are_gated(kernels, activation, dtype, length):
    x = random(3, 2 * length, dtype=dtype)
    assert_near(gated(kernels, x, activation), x, activation)


@pytest.mark.parametrize("shape", [(8,), (2, 3, 10), (0, 8), (3, 0)])
def test_gating_halves_the_last_dimension_only(kernels, shape):
    x = random(*shape)
    assert_near(kernels.silu_and_mul(x), x, "silu")


def test_rows_with_a_gap_between_them_are_gated(kernels):
    x = random(5, 100)[:, 7:71]
    assert_near(kernels.silu_and_mul(x), x, "silu")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_gates_saturate(kernels, activation):
    gate = torch.tensor([[100.0, -100.0, 1e4, -1e4, 0.0, -0.0]])
    x = torch.cat((gate, torch.ones_like(gate)), -1)
    assert_near(gated(kernels, x, activation), x, activation)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_nan_stays_where_it_is(kernels, activation):
    x = random(2, 8)
    x[0, 1] = x[1, 6] = float("nan")
    assert torch.equal(gated(kernels, x, activation).isnan(), native(x, activation).isnan())


def test_the_activation_is_rounded_before_the_product(kernels):
    x = random(64, 64, dtype=torch.float16)
    once = native(x.double(), "silu").half()
    expected = native(x, "silu")
    got = kernels.silu_and_mul(x)
    assert (got != expected).float().mean() < 0.02 < (once != expected).float().mean()


def test_the_torch_op_does_what_its_schema_says(kernels):
    kernels._launch()
    op = torch.ops.irframework_triton_kernels.gated.default
    torch.library.opcheck(op, (random(3, 8), "tanh"), test_utils="test_schema")
