"""The norm kernels, run by Triton's interpreter on the CPU."""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.interpreter

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# One of each kind: shorter than a tile, odd, wider than what one program keeps in registers.
LENGTHS = (1, 3, 640, 16387)


@pytest.fixture
def kernels():
    from irframework_triton_kernels import implementations

    return implementations


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 1)).to(dtype)


def assert_near(got: Tensor, exact: Tensor, roundings: float = 3.0) -> None:
    """Within `roundings` units of the dtype's precision; the interpreter truncates where a device rounds."""
    assert got.shape == exact.shape
    info = torch.finfo(got.dtype)
    error = (got.double() - exact).abs()
    allowed = roundings * info.eps * exact.abs() + 4 * max(info.smallest_normal, 1e-7 * info.eps)
    assert (error <= allowed).all(), f"{((error / allowed).max() * roundings).item():.2f} units off"


def exact_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    return ir.ops.rms_norm.native(x.double(), None if weight is None else weight.double(), epsilon, variance_size)


@pytest.mark.parametrize("hidden", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_any_length_are_normed(kernels, dtype, hidden):
    x, weight = random(3, hidden, dtype=dtype), random(hidden, dtype=dtype)
    assert_near(kernels.rms_norm(x, weight, 1e-5), exact_norm(x, weight, 1e-5))


@pytest.mark.parametrize("shape", [(7,), (2, 3, 5), (1, 2, 2, 33)])
def test_a_norm_keeps_the_shape_of_its_rows(kernels, shape):
    x, weight = random(*shape), random(shape[-1])
    assert_near(kernels.rms_norm(x, weight, 1e-5), exact_norm(x, weight, 1e-5))


def test_rows_with_a_gap_between_them_are_not_copied(kernels):
    x = random(5, 100)[:, 7:71]
    assert_near(kernels.rms_norm(x, None, 1e-5), exact_norm(x, None, 1e-5))
    assert kernels._launch().call.rows_of(x).data_ptr() == x.data_ptr()


def test_rows_without_a_common_stride_are_normed(kernels):
    x = random(4, 3, 48).transpose(0, 1)
    assert_near(kernels.rms_norm(x, None, 1e-5), exact_norm(x, None, 1e-5))


def test_rows_that_are_one_row_are_normed(kernels):
    x = random(48).expand(4, 48)
    assert_near(kernels.rms_norm(x, None, 1e-5), exact_norm(x, None, 1e-5))


def test_rows_farther_apart_than_32_bits_are_normed(kernels):
    x = torch.empty_strided((2, 64), (2**31 + 64, 1), dtype=torch.float16)  # of its 4 GiB, two pages are touched
    x.copy_(random(2, 64))
    assert_near(kernels.rms_norm(x, None, 1e-5), exact_norm(x, None, 1e-5))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (3, 0)])
def test_a_norm_of_nothing_is_empty(kernels, shape):
    x = random(*shape)
    assert kernels.rms_norm(x, random(shape[-1]), 1e-5).shape == shape
    y, residual = kernels.fused_add_rms_norm(x, x, None, 1e-5)
    assert y.shape == residual.shape == shape


@pytest.mark.parametrize("hidden", [64, 16387])
@pytest.mark.parametrize("variance_size", [1, 17])
def test_the_mean_is_taken_over_the_leading_elements_only(kernels, hidden, variance_size):
    x, weight = random(2, hidden), random(hidden)
    assert_near(kernels.rms_norm(x, weight, 1e-5, variance_size), exact_norm(x, weight, 1e-5, variance_size))
    y, residual = kernels.fused_add_rms_norm(x, x, weight, 1e-5, variance_size)
    assert_near(y, exact_norm(residual, weight, 1e-5, variance_size))


def test_a_wider_weight_is_applied_in_its_own_dtype(kernels):
    x, weight = random(4, 96, dtype=torch.float16), random(96)
    assert torch.equal(kernels.rms_norm(x, weight, 1e-5), ir.ops.rms_norm.native(x, weight, 1e-5))


def test_the_norm_is_rounded_before_the_weight_is_applied(kernels):
    x, weight = random(64, 96, dtype=torch.float16), random(96, dtype=torch.float16)
    native = ir.ops.rms_norm.native(x, weight, 1e-5)
    once = exact_norm(x, weight, 1e-5).half()
    got = kernels.rms_norm(x, weight, 1e-5)
    assert (got != native).float().mean() < 0.01 < (once != native).float().mean()


def test_infinities_and_nans_stay_in_their_row(kernels):
    x = random(4, 40)
    x[1, 3], x[2, 5] = float("inf"), float("nan")
    assert torch.allclose(kernels.rms_norm(x, None, 1e-5), ir.ops.rms_norm.native(x, None, 1e-5), equal_nan=True)


@pytest.mark.parametrize("hidden", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_residual_is_added_before_the_norm(kernels, dtype, hidden):
    x, x_residual, weight = random(3, hidden, dtype=dtype), random(2, hidden + 1)[0, 1:].to(dtype), random(hidden)
    x_residual = x_residual.expand(3, hidden).contiguous()
    before = x.clone(), x_residual.clone()
    y, residual = kernels.fused_add_rms_norm(x, x_residual, weight.to(dtype), 1e-5)
    assert_near(residual, x.double() + x_residual.double(), roundings=1)
    assert_near(y, exact_norm(residual, weight.to(dtype), 1e-5))
    assert torch.equal(x, before[0])
    assert torch.equal(x_residual, before[1])


@pytest.mark.parametrize("hidden", LENGTHS)
def test_in_place_the_inputs_hold_what_the_functional_form_returns(kernels, hidden):
    x, x_residual, weight = random(3, hidden), random(3, hidden).flip(0).contiguous(), random(hidden)
    y, residual = kernels.fused_add_rms_norm(x, x_residual, weight, 1e-5)
    kernels._launch().fused_add_rms_norm_inplace(x, x_residual, weight, 1e-5, None)
    assert torch.equal(x, y)
    assert torch.equal(x_residual, residual)


def test_in_place_refuses_what_it_would_have_to_copy(kernels):
    with pytest.raises(ValueError, match=r"x_residual has strides \(16, 1\)"):
        kernels._launch().fused_add_rms_norm_inplace(random(3, 8), random(3, 16)[:, :8], None, 1e-5, None)


@pytest.mark.parametrize("hidden", [48, 640])
def test_a_row_does_not_depend_on_the_rows_beside_it(kernels, hidden):
    x, weight = random(9, hidden), random(hidden)
    together = kernels.rms_norm(x, weight, 1e-5)
    assert all(torch.equal(together[i : i + 1], kernels.rms_norm(x[i : i + 1], weight, 1e-5)) for i in range(9))


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm", "fused_add_rms_norm_"])
def test_the_torch_ops_do_what_their_schemas_say(kernels, name):
    kernels._launch()
    x, weight = random(3, 8), random(8)
    arguments = (x, weight, 1e-5, None) if name == "rms_norm" else (x, random(3, 8).flip(0), weight, 1e-5, None)
    op = getattr(torch.ops.irframework_triton_kernels, name).default
    torch.library.opcheck(op, arguments, test_utils="test_schema")
