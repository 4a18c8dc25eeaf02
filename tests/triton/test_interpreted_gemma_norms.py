"""The norms with a weight around one, run by Triton's interpreter on the CPU."""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.interpreter

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
EPSILON = 1e-5


@pytest.fixture
def kernels():
    from irframework_triton_kernels import gemma_norms

    return gemma_norms


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def assert_near(got: Tensor, exact: Tensor) -> None:
    """Within two roundings: the interpreter truncates where devices round to nearest."""
    assert got.shape == exact.shape
    assert ((got.double() - exact).abs() <= 2 * torch.finfo(got.dtype).eps * exact.abs() + 4e-6).all()


@pytest.mark.parametrize("hidden", [7, 1500, 16387])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_are_normed_and_scaled_in_float32(kernels, dtype, hidden):
    x, residual, weight = random(3, hidden, dtype=dtype), random(3, hidden, dtype=dtype, seed=2), random(hidden)
    for w in (weight, weight.to(dtype))[: 2 if hidden < 100 else 1]:
        exact = ir.ops.gemma_rms_norm.native(x.double(), w.double(), EPSILON)
        assert_near(kernels.gemma_rms_norm(x, w, EPSILON), exact)
    y, added = kernels.fused_add_gemma_rms_norm(x, residual, weight, EPSILON)
    assert_near(added, x.double() + residual.double())
    assert_near(y, ir.ops.gemma_rms_norm.native(added.double(), weight.double(), EPSILON))


def test_nothing_is_rounded_in_between(kernels):
    """Halves, where the interpreter rounds to nearest."""
    x, weight = random(8, 256, dtype=torch.float16), random(256, dtype=torch.float16)
    expected = ir.ops.gemma_rms_norm.native(x, weight, EPSILON)
    twice = ir.ops.rms_norm.native(x, 1 + weight, EPSILON)
    got = kernels.gemma_rms_norm(x, weight, EPSILON)
    assert (got != expected).float().mean() < 0.01 < (twice != expected).float().mean()


def test_donated_activations_are_overwritten_with_the_same(kernels):
    x, residual, weight = random(3, 96), random(3, 96, seed=2), random(96)
    want = kernels.fused_add_gemma_rms_norm(x, residual, weight, EPSILON)
    got = kernels.fused_add_gemma_rms_norm_inplace(x, residual, weight, EPSILON)
    assert got[0] is x
    assert got[1] is residual
    assert all(map(torch.equal, got, want))


def test_the_torch_ops_do_what_their_schemas_say(kernels):
    kernels.launches()
    ops, x, w = torch.ops.irframework_triton_kernels, random(3, 8), random(8)
    torch.library.opcheck(ops.gemma_rms_norm.default, (x, w, EPSILON), test_utils="test_schema")
    for op in (ops.fused_add_gemma_rms_norm, ops.fused_add_gemma_rms_norm_):
        torch.library.opcheck(op.default, (x.clone(), x.clone(), w, EPSILON), test_utils="test_schema")
