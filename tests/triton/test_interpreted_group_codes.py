"""The kernels that quantise groups, whole tensors and to int8, run by Triton's interpreter: codes bit for bit."""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.interpreter

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
NAMES = ("tensor_quant_fp8", "group_quant_fp8", "dynamic_quant_int8")


@pytest.fixture
def kernels(monkeypatch):
    from irframework_triton_kernels import quantizations
    from irframework_triton_kernels.launch import group_codes

    monkeypatch.setattr(group_codes, "LARGEST_PARTS", 4)  # the interpreter runs one after the other
    return quantizations


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 1)).to(dtype)


def bytes_of(q: Tensor) -> Tensor:
    """The codes as bytes; every NaN as one."""
    if q.dtype == torch.int8:
        return q
    assert q.dtype == torch.float8_e4m3fn
    return torch.where(q.float().isnan(), 0x7F, q.view(torch.uint8))


def assert_as_native(kernels, name: str, x: Tensor, *more: object) -> None:
    """Bit for bit, with NaN equal to NaN."""
    (q, scale), (want, want_scale) = (f(x, *more) for f in (getattr(kernels, name), getattr(ir.ops, name).native))
    assert torch.equal(bytes_of(q), bytes_of(want))
    assert q.dtype == want.dtype
    assert q.is_contiguous()
    assert scale.is_contiguous()
    torch.testing.assert_close(scale, want_scale, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_groups_get_the_codes_and_scales_of_native(kernels, dtype, column_major, power_of_two):
    more = column_major, power_of_two
    assert_as_native(kernels, "group_quant_fp8", random(5, 384, dtype=dtype), 128, *more)
    assert_as_native(kernels, "group_quant_fp8", random(2, 3, 2, 15, dtype=dtype), 5, *more)
    assert_as_native(kernels, "group_quant_fp8", random(5, 100, dtype=dtype)[:, 7:71], 16, *more)


def test_groups_of_one_element_and_of_a_vector_are_quantised(kernels):
    assert_as_native(kernels, "group_quant_fp8", random(3, 7), 1)
    assert_as_native(kernels, "group_quant_fp8", random(24), 8)


@pytest.mark.parametrize("exponent", [-20, -9, 0, 3])
def test_a_scale_that_is_a_power_of_two_is_not_raised(kernels, exponent):
    x = torch.tensor([[448.0, 1.0, 448.0001, 1.0]]) * 2.0**exponent
    assert_as_native(kernels, "group_quant_fp8", x, 2, False, True)


@pytest.mark.parametrize("shape", [(3, 33), (2, 3, 40), (7, 2100), (17,), (2, 4100)])
@pytest.mark.parametrize("name", ["tensor_quant_fp8", "dynamic_quant_int8"])
def test_rows_of_any_shape_get_the_codes_and_scales_of_native(kernels, name, shape):
    assert_as_native(kernels, name, random(*shape))


@pytest.mark.parametrize("dtype", FLOATS[1:])
@pytest.mark.parametrize("name", ["tensor_quant_fp8", "dynamic_quant_int8"])
def test_rows_of_16_bits_with_a_gap_between_them_are_quantised(kernels, name, dtype):
    assert_as_native(kernels, name, random(5, 100, dtype=dtype)[:, 7:71])


def test_rows_longer_than_what_is_kept_in_registers_become_int8(kernels):
    assert_as_native(kernels, "dynamic_quant_int8", random(2, 16387))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 128), (3, 0)])
def test_no_rows_or_empty_ones_give_what_native_gives(kernels, name, shape):
    assert_as_native(kernels, name, random(*shape))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 0.0, 1e-44, 1e-30, 1e38])
@pytest.mark.parametrize("name", NAMES)
def test_a_row_with_something_awkward_is_as_natives(kernels, name, value):
    x = random(3, 32)
    x[1, 4] = value
    x[0] *= abs(value) if abs(value) < 1 else 1
    assert_as_native(kernels, name, x, *((16,) if name == "group_quant_fp8" else ()))


def test_halves_are_rounded_to_even(kernels):
    x = torch.cat((torch.arange(-127, 127) + 0.5, torch.tensor([127.0]))).reshape(1, -1)
    assert_as_native(kernels, "dynamic_quant_int8", x)


def test_the_torch_ops_do_what_their_schemas_say(kernels):
    kernels.launches()
    ops, x = torch.ops.irframework_triton_kernels, random(3, 32)
    for op, args in ((ops.tensor_quant_fp8, ()), (ops.group_quant_fp8, (8, True, True)), (ops.dynamic_quant_int8, ())):
        torch.library.opcheck(op.default, (x, *args), test_utils="test_schema")
