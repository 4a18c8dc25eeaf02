"""The quantising ops and the way back: against codes and scales worked out in float64, one step after the other."""

import math

import pytest
import torch
from op_checks import DTYPES, check_compiled

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("natively")

FP8 = torch.float8_e4m3fn
SMALLEST = torch.tensor(1 / (448 * 512)).item()
NAN, INF = float("nan"), float("inf")
QUANTISING = ("tensor_quant_fp8", "group_quant_fp8", "dynamic_quant_int8", "quant_nvfp4")
DEQUANTISING = ("dequant", "dequant_nvfp4")


def e4m3(code):
    """What a positive code of E4M3 stands for."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


E4M3 = torch.tensor([e4m3(code) for code in range(0x7F)], dtype=torch.float64)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)


def nearest(x, values):
    """The nearest of a format's values; of two equally near the one with an even code; too large ones are the last."""
    size = x.double().abs().clamp_max(values[-1])
    above = torch.searchsorted(values, size).clamp_max(len(values) - 1)
    below = (above - 1).clamp_min(0)
    up, down = values[above] - size, size - values[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    return values[torch.where(up == 0, above, code)].copysign(x.double())


def rounded(x, dtype):
    """Through float32, in which all but float64 is computed."""
    return x.double() if dtype == torch.float64 else x.float().double()


def exact_fp8(x, scale, dtype):
    """Values of the codes; each step of float32 rounded as there."""
    return nearest(rounded(x.double() * rounded(1 / scale.double(), dtype), dtype), E4M3)


def exact_scale(largest, dtype):
    return rounded(largest.double() / 448, dtype).clamp_min(SMALLEST if dtype != torch.float64 else 1 / (448 * 512))


def wavy(shape, dtype):
    """Rows of very different size."""
    x = torch.randn(shape)
    if x.dim() > 1 and x.numel():
        x = x * torch.logspace(-3, 3, shape[0]).view(-1, *[1] * (x.dim() - 1))
    return x.to(dtype)


# --- one scale for a tensor ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (2, 3, 96), (7,), ()])
def test_one_scale_is_that_of_the_largest_element(dtype, shape):
    x = wavy(shape, dtype)
    q, scale = ir.ops.tensor_quant_fp8(x)
    expected = exact_scale(x.double().abs().max(), dtype)
    assert (q.dtype, q.shape, scale.dtype, scale.shape) == (FP8, x.shape, torch.float32, (1,))
    assert scale.item() == expected.float().item()
    assert torch.equal(q.double(), exact_fp8(x, expected, dtype))


@pytest.mark.parametrize("shape", [(0, 8), (4, 0, 8), (3, 0), (0,)])
def test_a_tensor_without_elements_has_the_smallest_scale(shape):
    q, scale = ir.ops.tensor_quant_fp8(torch.zeros(shape))
    assert q.shape == shape
    assert scale.tolist() == [SMALLEST]


def test_zeros_have_the_smallest_scale_and_zero_codes():
    q, scale = ir.ops.tensor_quant_fp8(torch.zeros(2, 3))
    assert scale.tolist() == [SMALLEST]
    assert not q.float().any()


def test_one_nan_makes_a_tensor_nan():
    x = torch.ones(3, 4)
    x[1, 2] = NAN
    q, scale = ir.ops.tensor_quant_fp8(x)
    assert scale.isnan().all()
    assert q.float().isnan().all()


def test_one_infinity_leaves_zeros():
    q, scale = ir.ops.tensor_quant_fp8(torch.tensor([[1.0, INF], [-2.0, 3.0]]))
    assert scale.item() == INF
    assert q.float()[0, 1].isnan()
    assert q.float()[[0, 1, 1], [0, 0, 1]].tolist() == [0.0, 0.0, 0.0]


# --- a scale for a group ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "size"), [((3, 256), 128), ((2, 3, 128), 64), ((5, 33), 11), ((4, 6), 1), ((12,), 3)]
)
def test_each_group_has_its_own_scale(dtype, shape, size):
    x = wavy(shape, dtype)
    q, scale = ir.ops.group_quant_fp8(x, size)
    assert (q.dtype, q.shape) == (FP8, x.shape)
    assert (scale.dtype, scale.shape) == (torch.float32, (*x.shape[:-1], x.shape[-1] // size))
    for group in range(x.shape[-1] // size):
        part = slice(group * size, (group + 1) * size)
        expected = exact_scale(x[..., part].double().abs().amax(-1), dtype)
        assert torch.equal(scale[..., group], expected.float())
        assert torch.equal(q[..., part].double(), exact_fp8(x[..., part], expected.unsqueeze(-1), dtype))


def test_groups_are_of_128_unless_told_otherwise():
    x = torch.randn(2, 256)
    got, expected = ir.ops.group_quant_fp8(x), ir.ops.group_quant_fp8(x, 128)
    assert torch.equal(got[0].float(), expected[0].float())
    assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_as_long_as_a_row_is_a_row(dtype):
    x = wavy((5, 24), dtype)
    for got, expected in zip(ir.ops.group_quant_fp8(x, 24), ir.ops.dynamic_quant_fp8(x), strict=True):
        assert torch.equal(got.float(), expected.float())


@pytest.mark.parametrize("powers", [False, True])
@pytest.mark.parametrize("shape", [(3, 8), (1, 8), (3, 2), (2, 3, 8), (0, 8)])
def test_column_major_scales_are_the_transposed_matrix_laid_out_anew(shape, powers):
    x = torch.randn(shape)
    q, scale = ir.ops.group_quant_fp8(x, 2, True, powers)
    rows, by_row = ir.ops.group_quant_fp8(x, 2, False, powers)
    assert torch.equal(q.float(), rows.float())
    assert torch.equal(scale, by_row.transpose(-1, -2))
    assert scale.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
def test_powers_of_two_are_the_next_above_the_scale(dtype):
    x = wavy((64, 32), dtype)
    plain, (q, scale) = ir.ops.group_quant_fp8(x, 8)[1], ir.ops.group_quant_fp8(x, 8, power_of_two_scales=True)
    expected = torch.tensor([[2.0 ** math.ceil(math.log2(v)) for v in row] for row in plain.tolist()])
    assert torch.equal(scale, expected)
    codes = exact_fp8(x.view(64, 4, 8), expected.unsqueeze(-1), dtype)
    assert torch.equal(q.double().view(64, 4, 8), codes)


@pytest.mark.parametrize("exponent", [-16, -1, 0, 1, 40])
def test_a_scale_that_is_a_power_of_two_stays_and_a_larger_one_is_doubled(exponent):
    power = 2.0**exponent
    x = torch.tensor([[448 * power], [torch.nextafter(torch.tensor(power), torch.tensor(INF)).item() * 448]])
    plain = ir.ops.group_quant_fp8(x, 1)[1]
    assert plain[0].item() == power < plain[1].item()
    assert ir.ops.group_quant_fp8(x, 1, power_of_two_scales=True)[1].tolist() == [[power], [2 * power]]


def test_the_smallest_power_of_two_is_that_above_the_smallest_scale():
    _, scale = ir.ops.group_quant_fp8(torch.zeros(1, 4), 4, power_of_two_scales=True)
    assert scale.tolist() == [[2.0**-17]]
    assert 2.0**-18 < SMALLEST < 2.0**-17


@pytest.mark.parametrize("powers", [False, True])
def test_a_nan_or_an_infinity_stays_in_its_group(powers):
    x = torch.randn(3, 6)
    clean = ir.ops.group_quant_fp8(x, 2, False, powers)
    x[0, 0], x[1, 3] = NAN, INF
    q, scale = ir.ops.group_quant_fp8(x, 2, False, powers)
    assert scale[0, 0].isnan()
    assert q[0, :2].float().isnan().all()
    assert scale[1, 1] == INF
    assert q[1, 2].float() == 0
    assert q[1, 3].float().isnan()
    for row, group in ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1), (2, 2)):
        assert scale[row, group] == clean[1][row, group]
        part = slice(2 * group, 2 * group + 2)
        assert torch.equal(q[row, part].float(), clean[0][row, part].float())


def test_the_gradient_of_a_scale_goes_to_the_largest_element():
    x = torch.tensor([[1.0, -3.0, 2.0, 0.5]], requires_grad=True)
    ir.ops.group_quant_fp8(x, 2)[1].sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[0.0, -1 / 448, 1 / 448, 0.0]]))


@pytest.mark.parametrize("size", [0, -2, 5, 16])
def test_groups_that_do_not_divide_a_row_are_refused(size):
    with pytest.raises(errors.ArgumentError, match=f"group_size={size} must be positive and divide.*8"):
        ir.ops.group_quant_fp8(torch.ones(2, 8), size)


def test_a_vector_has_no_column_major_scales():
    with pytest.raises(errors.ArgumentError, match="column_major_scales=True needs 'x' of at least two dimensions"):
        ir.ops.group_quant_fp8(torch.ones(8), 4, True)


# --- int8 ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (5, 33), (2, 3, 96), (7,), (0, 8), (3, 0)])
def test_int8_codes_are_the_nearest(dtype, shape):
    x = wavy(shape, dtype)
    q, scale = ir.ops.dynamic_quant_int8(x)
    largest = x.double().abs().amax(-1, keepdim=True) if shape[-1] else torch.zeros(*shape[:-1], 1)
    expected = rounded(largest / 127, dtype).clamp_min(2.0**-126)
    assert (q.dtype, q.shape, scale.dtype, scale.shape) == (torch.int8, x.shape, torch.float32, (*x.shape[:-1], 1))
    assert torch.equal(scale, expected.float())
    h = rounded(x.double() * rounded(1 / expected.double(), dtype), dtype)
    assert torch.equal(q.double(), torch.tensor([float(round(v)) for v in h.flatten().tolist()]).view(shape).double())


def test_int8_rounds_halves_to_even_numbers_and_is_symmetric():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127.0]])
    q, scale = ir.ops.dynamic_quant_int8(x)
    assert scale.item() == 1.0
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -2, -127]]


def test_int8_of_zeros_is_zeros_with_the_smallest_scale():
    q, scale = ir.ops.dynamic_quant_int8(torch.zeros(2, 3))
    assert scale.flatten().tolist() == [2.0**-126] * 2
    assert not q.any()


def test_int8_of_tiny_rows_keeps_their_digits():
    x = torch.randn(4, 64)
    assert torch.equal(ir.ops.dynamic_quant_int8(x * 2.0**-100)[0], ir.ops.dynamic_quant_int8(x)[0])


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_int8_of_what_is_not_finite_shows_in_the_scale(value):
    x = torch.ones(2, 3)
    x[0, 1] = value
    q, scale = ir.ops.dynamic_quant_int8(x)
    assert not math.isfinite(scale[0].item())
    assert q.tolist() == [[0, 0, 0], [127, 127, 127]]


# --- NVFP4 -----------------------------------------------------------------------------------------------------------


def unpacked(q):
    """Values of packed codes, one byte after the other."""
    values = []
    for byte in q.flatten().tolist():
        for code in (byte & 15, byte >> 4):
            values.append(E2M1[code & 7].item() * (-1 if code & 8 else 1))
    return torch.tensor(values, dtype=torch.float64).view(*q.shape[:-1], 2 * q.shape[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 32), (2, 3, 48), (16,), (1, 16), (0, 32)])
@pytest.mark.parametrize("whole", [2.0**-9, 3e-3, 1.7])
def test_nvfp4_codes_and_scales_are_the_nearest(dtype, shape, whole):
    x, whole = wavy(shape, dtype), torch.tensor([whole])
    q, scale = ir.ops.quant_nvfp4(x, whole)
    assert (q.dtype, q.shape) == (torch.uint8, (*x.shape[:-1], x.shape[-1] // 2))
    assert (scale.dtype, scale.shape) == (FP8, (*x.shape[:-1], x.shape[-1] // 16))
    blocks = x.double().unflatten(-1, (-1, 16))
    block = rounded(rounded(blocks.abs().amax(-1) / 6, dtype) / whole.double(), dtype)
    assert torch.equal(scale.double(), nearest(block, E4M3))
    used = rounded(scale.double() * whole.double(), dtype)
    inverse = torch.where(used > 0, rounded(1 / used, dtype), 0.0)
    expected = nearest(rounded(blocks * inverse.unsqueeze(-1), dtype), E2M1)
    assert torch.equal(unpacked(q), expected.flatten(-2))


def test_nvfp4_packs_the_first_of_two_into_the_lower_bits():
    row = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    q, scale = ir.ops.quant_nvfp4(row, torch.ones(1))
    assert scale.tolist() == [1.0]
    assert q.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]


def test_nvfp4_rounds_the_middle_of_two_numbers_to_the_even_code():
    between = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    row = torch.tensor([6.0, *between, *(-v for v in between), 0.0])
    q, _ = ir.ops.quant_nvfp4(row, torch.ones(1))
    even = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
    assert unpacked(q).tolist() == [6.0, *even, *(-v for v in even), 0.0]


@pytest.mark.parametrize("towards", [0.0, INF])
def test_nvfp4_rounds_beside_the_middle_to_the_nearer_number(towards):
    between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    row = torch.zeros(16)
    row[0], row[1:8] = 6.0, torch.nextafter(between, torch.tensor(towards))
    expected = E2M1[:-1] if towards == 0 else E2M1[1:]
    assert torch.equal(unpacked(ir.ops.quant_nvfp4(row, torch.ones(1))[0])[1:8], expected)


def test_nvfp4_uses_the_whole_range_with_the_documented_global_scale():
    x = torch.randn(8, 64)
    whole = (x.abs().max() / (6 * 448)).reshape(1)
    q, scale = ir.ops.quant_nvfp4(x, whole)
    assert scale.float().max() == 448
    back = ir.ops.dequant_nvfp4(q, scale, whole)
    step = 2 * (scale.double() * whole.double()).repeat_interleave(16, -1)  # between 4 and 6
    assert ((back.double() - x.double()).abs() <= step / 2 * 1.07).all()  # a block's scale may be rounded down by 1/16


def test_nvfp4_of_a_block_of_zeros_is_zeros_with_scale_zero():
    x = torch.randn(2, 32)
    x[0, 16:] = 0
    q, scale = ir.ops.quant_nvfp4(x, torch.ones(1) * 0.01)
    assert scale.float()[0, 1] == 0
    assert not q[0, 8:].any()
    assert torch.equal(ir.ops.dequant_nvfp4(q, scale, torch.ones(1) * 0.01)[0, 16:], torch.zeros(16))


def test_nvfp4_of_a_block_whose_scale_is_too_small_is_zeros():
    q, scale = ir.ops.quant_nvfp4(torch.full((16,), 6 * 2.0**-11), torch.ones(1))
    assert scale.tolist() == [0.0]
    assert not q.any()


def test_nvfp4_of_too_large_numbers_is_the_largest():
    x = torch.ones(2, 16)
    x[0, 3], x[1, 4] = INF, 1e30
    q, scale = ir.ops.quant_nvfp4(x, torch.ones(1))
    assert scale.flatten().tolist() == [448.0, 448.0]
    assert (unpacked(q)[0, 3], unpacked(q)[1, 4]) == (6.0, 6.0)


def test_nvfp4_of_too_large_numbers_under_a_negative_scale_is_the_largest_too():
    x = torch.full((1, 16), 1e30)
    q, scale = ir.ops.quant_nvfp4(x, -torch.ones(1))
    assert scale.tolist() == [[-448.0]]
    assert (unpacked(q) == 6).all()


def test_nvfp4_of_a_nan_shows_in_the_scale_of_its_block():
    x = torch.ones(1, 32)
    x[0, 3] = NAN
    q, scale = ir.ops.quant_nvfp4(x, torch.ones(1))
    assert scale.float()[0, 0].isnan()
    assert not q[0, :8].any()
    clean = ir.ops.quant_nvfp4(torch.ones(1, 32), torch.ones(1))
    assert torch.equal(q[0, 8:], clean[0][0, 8:])


def test_nvfp4_needs_whole_blocks():
    with pytest.raises(errors.ArgumentError, match=r"quant_nvfp4.*multiple of 16, it is 24"):
        ir.ops.quant_nvfp4(torch.ones(2, 24), torch.ones(1))


# --- the way back ----------------------------------------------------------------------------------------------------

FORMS = {
    "tensor": lambda x: ir.ops.tensor_quant_fp8(x),
    "static": lambda x: (ir.ops.static_quant_fp8(x, torch.tensor(0.02)), torch.tensor(0.02)),
    "row": lambda x: ir.ops.dynamic_quant_fp8(x),
    "group": lambda x: ir.ops.group_quant_fp8(x, 4),
    "int8": lambda x: ir.ops.dynamic_quant_int8(x),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 8), (4,), (0, 8), (1, 4)])
def test_a_value_is_its_code_times_its_scale(form, dtype, shape):
    q, scale = FORMS[form](torch.randn(shape))
    got = ir.ops.dequant(q, scale, dtype)
    wide = scale.double().expand(*shape[:-1], -1) if scale.dim() else scale.double().expand(*shape[:-1], 1)
    per_element = wide.repeat_interleave(shape[-1] // wide.shape[-1], -1)
    expected = q.double() * per_element
    assert (got.dtype, got.shape) == (dtype, shape)
    assert torch.equal(got, (expected if dtype == torch.float64 else expected.float()).to(dtype))


@pytest.mark.parametrize("shape", [(5, 12), (2, 3, 8), (0, 8)])
def test_column_major_scales_are_read_as_they_are_written(shape):
    x = torch.randn(shape)
    back = ir.ops.dequant(*ir.ops.group_quant_fp8(x, 4, True), torch.float32, True)
    assert torch.equal(back, ir.ops.dequant(*ir.ops.group_quant_fp8(x, 4)))


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_the_other_formats_of_8_bits_have_values_too(dtype):
    q = torch.randn(3, 4).to(dtype)
    assert torch.equal(ir.ops.dequant(q, torch.full((3, 1), 0.5)), q.float() * 0.5)


def test_a_scalar_has_a_value():
    assert ir.ops.dequant(torch.tensor(3.0).to(FP8), torch.tensor(0.5)).item() == 1.5


@pytest.mark.parametrize("scale_shape", [(1,), (3, 0), (3, 1)])
def test_rows_without_elements_have_no_values(scale_shape):
    assert ir.ops.dequant(torch.zeros(3, 0).to(FP8), torch.ones(scale_shape)).shape == (3, 0)


@pytest.mark.parametrize("form", ["tensor", "row", "group", "int8"])
def test_what_comes_back_is_near_what_went_in(form):
    x = torch.randn(16, 12)
    back = ir.ops.dequant(*FORMS[form](x))
    limit = 0.005 if form == "int8" else 1 / 16
    assert ((back - x).abs() <= limit * x.abs().amax(-1, keepdim=True).clamp_min(x.abs()) + 1e-3).all()
    assert not torch.equal(back, x)


def test_gradients_of_scales_are_sums_of_codes():
    q, scale = ir.ops.group_quant_fp8(torch.randn(2, 8), 4)
    scale = scale.clone().requires_grad_()
    factors = torch.randn(2, 8)
    (ir.ops.dequant(q, scale) * factors).sum().backward()
    torch.testing.assert_close(scale.grad, (q.float() * factors).view(2, 2, 4).sum(-1))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"q": torch.ones(4, 8)}, "'q' must hold codes in float8 or int8, it has dtype torch.float32"),
        ({"q": torch.ones(4, 8, dtype=torch.uint8)}, "dequant_nvfp4"),
        ({"scale": torch.ones(4, 1).double()}, "'scale' must have dtype float32"),
        ({"scale": torch.ones(4, 3)}, r"'scale' has shape \(4, 3\), 'q' has \(4, 8\)"),
        ({"scale": torch.ones(4)}, "'scale' has shape"),
        ({"scale": torch.ones(0)}, "'scale' has shape"),
        ({"scale": torch.ones(1, 8)}, "'scale' has shape"),
        ({"scale": torch.ones(4, 16)}, "'scale' has shape"),
        ({"scale": torch.ones(4, 0)}, "'scale' has shape"),
        ({"scale": torch.ones(4, 2), "column_major_scales": True}, "last two dimensions swapped"),
        ({"scale": torch.ones(4), "column_major_scales": True}, "last two dimensions swapped"),
        ({"scale": torch.ones(()), "column_major_scales": True}, "last two dimensions swapped"),
        ({"dtype": torch.int32}, "dtype must be float64, float32, float16 or bfloat16, got torch.int32"),
        ({"dtype": FP8}, "dtype must be"),
    ],
)
def test_dequant_names_the_argument_that_does_not_fit(change, problem):
    good = {"q": torch.ones(4, 8).to(FP8), "scale": torch.ones(4, 2)}
    ir.ops.dequant(**good)
    with pytest.raises(errors.ArgumentError, match=problem):
        ir.ops.dequant(**good | change)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nvfp4_values_are_codes_times_both_scales(dtype):
    q = torch.arange(256, dtype=torch.uint8).view(4, 64)
    scale, whole = (torch.rand(4, 8) * 100).to(FP8), torch.tensor([0.013])
    got = ir.ops.dequant_nvfp4(q, scale, whole, dtype)
    factor = scale.double() * whole.double()
    factor = factor if dtype == torch.float64 else factor.float().double()
    exact = unpacked(q) * factor.repeat_interleave(16, -1)
    assert (got.dtype, got.shape) == (dtype, (4, 128))
    assert torch.equal(got, (exact if dtype == torch.float64 else exact.float()).to(dtype))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"q": torch.ones(4, 16).int()}, "dtypes uint8 and float8_e4m3fn, they have torch.int32"),
        ({"scale": torch.ones(4, 2)}, "dtypes uint8 and float8_e4m3fn"),
        ({"scale": torch.ones(4, 1).to(FP8)}, "'scale' has shape"),
        ({"q": torch.ones(4, 15, dtype=torch.uint8)}, "'scale' has shape"),
        ({"q": torch.ones((), dtype=torch.uint8)}, "'scale' has shape"),
        ({"global_scale": torch.ones(2)}, "'global_scale' must hold one float32 number"),
        ({"dtype": torch.int8}, "dtype must be"),
    ],
)
def test_dequant_nvfp4_names_the_argument_that_does_not_fit(change, problem):
    good = {
        "q": torch.ones(4, 16, dtype=torch.uint8),
        "scale": torch.ones(4, 2).to(FP8),
        "global_scale": torch.ones(1),
    }
    ir.ops.dequant_nvfp4(**good)
    with pytest.raises(errors.ArgumentError, match=problem):
        ir.ops.dequant_nvfp4(**good | change)


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", QUANTISING)
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64, torch.uint8])
def test_what_is_not_floating_point_is_not_quantised(name, dtype):
    _, *rest = getattr(ir.ops, name).generate_inputs(shape=(4, 128))
    with pytest.raises(errors.ArgumentError, match=f"{name}.*'x' must have a floating-point dtype"):
        getattr(ir.ops, name)(torch.ones(4, 128, dtype=dtype), *rest)


@pytest.mark.parametrize("name", ["group_quant_fp8", "dynamic_quant_int8", "quant_nvfp4"])
def test_a_scalar_has_no_rows(name):
    _, *rest = getattr(ir.ops, name).generate_inputs(shape=(4, 128))
    with pytest.raises(errors.ArgumentError, match="it is a scalar"):
        getattr(ir.ops, name)(torch.tensor(1.0), *rest)


SCALED = {
    "static_quant_fp8": "scale",
    "rms_norm_static_quant_fp8": "scale",
    "fused_add_rms_norm_static_quant_fp8": "scale",
    "silu_and_mul_static_quant_fp8": "scale",
    "dequant": "scale",
    "quant_nvfp4": "global_scale",
    "dequant_nvfp4": "global_scale",
}


@pytest.mark.parametrize("value", [0.0, -0.0, INF, -INF, NAN])
@pytest.mark.parametrize("name", SCALED)
def test_a_scale_of_zero_or_not_finite_is_refused_before_any_implementation_runs(name, value):
    op = getattr(ir.ops, name)
    arguments = op.named(op.generate_inputs(shape=(4, 64)))
    scale = arguments[SCALED[name]].clone()
    scale.view(-1)[-1] = value
    ran = []

    def recording(*given):
        ran.append(given)
        return op.native(*given)

    recording.__signature__ = op.signature
    op.register_impl("recording")(recording)
    try:
        with ir.priority({name: "recording"}), torch.no_grad():
            op(**arguments)
            assert len(ran) == 1
            for _ in range(3):
                with pytest.raises(errors.ArgumentError, match=f"{name}.*{SCALED[name]!r} holds"):
                    op(**arguments | {SCALED[name]: scale})
            assert len(ran) == 1
    finally:
        op.unregister_impl("recording")


def test_a_block_may_have_scale_zero_and_not_nan():
    arguments = (torch.ones(1, 16, dtype=torch.uint8), torch.tensor([[0.0, 1.0]]).to(FP8), torch.ones(1))
    assert not ir.ops.dequant_nvfp4(*arguments)[0, :16].any()
    with pytest.raises(errors.ArgumentError, match="'scale' holds a NaN"):
        ir.ops.dequant_nvfp4(arguments[0], torch.tensor([[NAN, 1.0]]).to(FP8), arguments[2])


def test_one_graph_serves_all_sizes():
    check_compiled((*QUANTISING, *DEQUANTISING))
