"""Gemma's norms of the C++ kernels, straight through their torch ops. What norms share: test_norm_kernels.py."""

import pytest
import torch
from reference import assert_near_exact, exact_rms_norm
from torch import Tensor

import irframework as ir

KERNELS = torch.ops.irframework_vllm_c
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPSILON = 1e-5


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("length", [1, 33, 576, 8193])
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_is_rounded_once(isa: str, dtype: torch.dtype, weight_dtype: torch.dtype, length: int) -> None:
    x, weight = normal(3, length, dtype=dtype), normal(length, dtype=weight_dtype)
    exact = exact_rms_norm(x, weight.double() + 1, EPSILON)
    assert_near_exact(KERNELS.gemma_rms_norm.default(x, weight, EPSILON), exact, 8 if dtype == torch.float32 else 0.51)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_forms_of_the_fused_op_give_the_sum_and_its_norm(isa: str, dtype: torch.dtype) -> None:
    x, residual, weight = normal(4, 66, dtype=dtype), normal(5, 66, dtype=dtype)[1:], normal(66, dtype=dtype)
    want = ir.ops.fused_add_gemma_rms_norm.native(x, residual, weight, EPSILON)
    got = KERNELS.fused_add_gemma_rms_norm_functional.default(x, residual, weight, EPSILON)
    target, total = x.clone(), residual.clone()
    KERNELS.fused_add_gemma_rms_norm.default(target, total, weight, EPSILON)
    for y, r in (got, (target, total)):
        torch.testing.assert_close(y, want[0])
        assert torch.equal(r, want[1])


def test_a_donated_residual_holds_the_sum() -> None:
    x, residual, weight = normal(4, 66), normal(5, 66)[1:].clone(), normal(66)
    want = x + residual
    y, total = ir.ops.fused_add_gemma_rms_norm.maybe_inplace(x, residual, weight, EPSILON)
    assert (y.data_ptr(), total.data_ptr()) == (x.data_ptr(), residual.data_ptr())
    assert torch.equal(total, want)


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7F800001])
def test_a_weight_that_is_any_nan_gives_nan(isa: str, bits: int) -> None:
    weight = torch.full((40,), bits, dtype=torch.int32).view(torch.float32)
    assert KERNELS.gemma_rms_norm.default(normal(2, 40, dtype=torch.bfloat16), weight, EPSILON).isnan().all()


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 8), (3, 0)])
def test_nothing_gives_nothing(shape: tuple[int, ...]) -> None:
    x = torch.empty(shape)
    assert KERNELS.gemma_rms_norm.default(x, x.new_empty(shape[-1]), EPSILON).shape == shape


def test_a_weight_of_another_length_is_refused() -> None:
    with pytest.raises(RuntimeError, match="gemma_rms_norm: weight must have shape"):
        KERNELS.gemma_rms_norm.default(torch.ones(2, 8), torch.ones(7), EPSILON)
