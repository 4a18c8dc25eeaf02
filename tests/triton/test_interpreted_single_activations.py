"""The kernel of the activations that nothing is fused to, run by Triton's interpreter on the CPU."""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.interpreter

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
OF_ONE = ("gelu_new", "gelu_fast", "quick_gelu", "relu2", "xielu")
GATES = ("mul_and_silu", "swigluoai_and_mul", "fatrelu_and_mul")
# Numbers besides the defaults, and the alphas of xielu.
MORE = {
    "xielu": [(torch.tensor([0.2]), torch.tensor(-1.05)), (torch.tensor(-30.0), torch.tensor([25.0]), 0.25, -1e-3)],
    "swigluoai_and_mul": [(), (1.0, 2)],
    "fatrelu_and_mul": [(), (0.01,), (-0.5,)],
}
CALLS = [(name, more) for name in (*OF_ONE, *GATES) for more in MORE.get(name, [()])]


@pytest.fixture
def kernels():
    from irframework_triton_kernels import activations

    return activations


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (2 * torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 1))).to(dtype)


def native(name: str, x: Tensor, more: tuple) -> Tensor:
    return getattr(ir.ops, name).native(x, *more)


def assert_near(got: Tensor, name: str, x: Tensor, more: tuple = ()) -> None:
    """Within three units of the dtype's precision (one is the interpreter's, which truncates), or of float32's."""
    exact = native(name, x.double(), more)
    assert got.shape == exact.shape
    assert got.dtype == x.dtype
    info = torch.finfo(got.dtype)
    allowed = 3 * info.eps * exact.abs() + 10 * max(2 * info.smallest_normal, 4e-7)
    assert ((got.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("name", "more"), CALLS)
def test_elements_of_rows_are_activated(kernels, name, more, dtype):
    x = random(5, 130, dtype=dtype)
    assert_near(getattr(kernels, name)(x, *more), name, x, more)


@pytest.mark.parametrize("name", ["gelu_new", "mul_and_silu", "swigluoai_and_mul"])
@pytest.mark.parametrize("shape", [(8,), (2, 3, 10), (0, 8), (3, 0), (1, 2 * 2100)])
def test_any_shape_is_taken(kernels, name, shape):
    x = random(*shape)
    assert_near(getattr(kernels, name)(x), name, x)


@pytest.mark.parametrize("name", ["relu2", *GATES])
def test_rows_with_a_gap_between_them_are_taken(kernels, name):
    x = random(5, 100)[:, 7:71]
    assert_near(getattr(kernels, name)(x), name, x)


@pytest.mark.parametrize(("name", "more"), CALLS)
def test_what_is_not_finite_or_large_is_as_natives(kernels, name, more):
    numbers = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e4, -1e4, 1e30, -1e30, 0.0, -0.0, 1e-30])
    x = torch.cat((numbers, numbers.flip(0), numbers[torch.tensor([2, 0, 1, 5, 3, 4, 6, 9, 8, 7])], numbers))
    got, want = getattr(kernels, name)(x, *more), native(name, x, more)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-37, equal_nan=True)


def test_xielu_keeps_its_digits_near_zero(kernels):
    alphas = torch.tensor([0.8]), torch.tensor([0.3])
    x = torch.cat([sign * 10.0 ** -torch.arange(0.0, 12.0, 0.25) for sign in (1, -1)])
    exact = native("xielu", x.double(), alphas)
    assert ((kernels.xielu(x, *alphas).double() - exact).abs() <= 1e-6 * (x.abs() + 1e-6)).all()


def test_a_threshold_is_not_rounded_to_half_precision(kernels):
    x = torch.tensor([[0.01, 1.0]], dtype=torch.bfloat16)
    below = float(x[0, 0]) - 1e-6
    assert kernels.fatrelu_and_mul(x, below) == x[0, 0]
    assert kernels.fatrelu_and_mul(x, below + 2e-6) == 0


def test_the_torch_ops_do_what_their_schemas_say(kernels):
    kernels.launches()
    ops, x = torch.ops.irframework_triton_kernels, random(3, 8)
    alphas = torch.ones(1), torch.ones(())
    for op, args in (
        (ops.activated, ("relu2",)), (ops.gated_by, ("fatrelu_and_mul", 0.5, 0.0)), (ops.xielu, (*alphas, 0.5, -1e-6)),
    ):  # fmt: skip
        torch.library.opcheck(op.default, (x, *args), test_utils="test_schema")
