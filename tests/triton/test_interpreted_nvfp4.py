"""The kernels that end in NVFP4, run by Triton's interpreter on the CPU: codes and scales bit for bit.

Those of the fused kernels are native's of what the kernel without a quantisation computes, which other tests hold to
float64.
"""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.interpreter

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
EPSILON = 1e-5
WHOLE = torch.tensor([0.02])


@pytest.fixture
def kernels():
    from irframework_triton_kernels import nvfp4

    return nvfp4


@pytest.fixture
def parts():
    from irframework_triton_kernels import implementations

    return implementations


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def assert_same(got, expected) -> None:
    """Bit for bit, with NaN equal to NaN."""
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.is_contiguous()
        if other.dtype == torch.float8_e4m3fn:
            one, other = (torch.where(t.float().isnan(), 0x7F, t.view(torch.uint8)) for t in (one, other))
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def native(x: Tensor, whole: Tensor = WHOLE) -> tuple[Tensor, Tensor]:
    return ir.ops.quant_nvfp4.native(x, whole)


# --- numbers ------------------------------------------------------------------------------------------------------


def sorted_codes() -> Tensor:
    """What lies on, between and beside all values of E2M1, of both signs, in blocks whose scale is 1."""
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    middles = (values[1:] + values[:-1]) / 2
    both = torch.cat((values, middles))
    near = [torch.nextafter(both, torch.tensor(to)) for to in (-10.0, 10.0)]
    numbers = torch.cat((both, *near, torch.tensor([1e-45, 1e-30, 0.1, 5.999, 6.0])))
    numbers = torch.cat((numbers, -numbers)).clamp(-6, 6)
    rows = torch.zeros(-(-len(numbers) // 15) * 15)
    rows[: len(numbers)] = numbers
    return torch.cat((torch.full((len(rows) // 15, 1), 6.0), rows.view(-1, 15)), 1)


def test_every_number_gets_its_code(kernels):
    x, one = sorted_codes(), torch.ones(1)
    q, scale = kernels.quant_nvfp4(x, one)
    assert (scale.float() == 1).all()
    assert_same((q, scale), native(x, one))


def test_two_neighbours_are_one_byte_the_first_in_the_lower_bits(kernels):
    row = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    q, scale = kernels.quant_nvfp4(row, torch.ones(1))
    assert scale.tolist() == [1.0]
    assert q.tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]


@pytest.mark.parametrize("whole", [1.0, -1.0, 2.0**-5, 1e-3, 0.3])
def test_every_scale_of_a_block_is_rounded_as_by_native(kernels, whole):
    """Every value of E4M3, the middles, and the numbers beside these, which a product with 1/6 would miss; edges."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = 6 * (codes[1:] + codes[:-1]) / 2 * abs(whole)
    beside = [(middles.view(torch.int32) + steps).view(torch.float32) for steps in range(-4, 5)]
    edges = torch.tensor([464.0, 464.1, 480.0, 1e9, 1e-45, 1e-38, torch.inf, torch.nan])
    largest = torch.cat((6 * codes * abs(whole), *beside, edges))
    x = torch.zeros(len(largest), 16)
    x[:, 3], x[:, 4] = -largest, 0.05 * largest
    assert_same(kernels.quant_nvfp4(x, torch.tensor(whole)), native(x, torch.tensor(whole)))


@pytest.mark.parametrize("whole", [1.0, 1e-3, -0.3, 3e38, 1e-38, 1e-42])
def test_any_bits_under_any_scale_get_what_native_gives(kernels, whole):
    """Where scales become infinite, zero or small numbers that lose digits, too."""
    bits = torch.randint(-(2**31), 2**31, (8192,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    x = torch.cat((bits.to(torch.int32).view(torch.float32).view(-1, 64), random(64, 64) * 10, random(64, 64) * 1e-39))
    assert_same(kernels.quant_nvfp4(x, torch.tensor(whole)), native(x, torch.tensor(whole)))


def test_blocks_of_constants_zeros_and_numbers_that_are_not_finite_are_alone(kernels):
    x = random(12, 48)
    for row, value in enumerate((0.0, -0.0, 1.0, -7.0, 1e-45, 1e38, torch.inf, -torch.inf, torch.nan)):
        x[row, 16:32] = value
    for row, value in enumerate((torch.inf, torch.nan, -torch.nan), 9):
        x[row, 20] = value
    got = kernels.quant_nvfp4(x, WHOLE)
    assert_same(got, native(x))
    clean = x.clone()
    clean[:, 16:32] = 1
    clean = native(clean)
    for part in (slice(8), slice(16, 24)):
        assert torch.equal(got[0][:, part], clean[0][:, part])


# --- rows ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 16), (3, 48), (2, 3, 2, 80), (3, 2048 + 16), (2, 5120), (32,)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_of_any_number_of_blocks_get_the_codes_and_scales_of_native(kernels, dtype, shape):
    x = random(*shape, dtype=dtype)
    assert_same(kernels.quant_nvfp4(x, WHOLE), native(x))


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_with_any_stride_between_them_are_quantised(kernels, parts, dtype):
    for x in (
        random(5, 100, dtype=dtype)[:, 7:71],
        random(4, 3, 64, dtype=dtype).transpose(0, 1),
        random(64, dtype=dtype).expand(4, 64),
    ):
        assert_same(kernels.quant_nvfp4(x, WHOLE), native(x))
        assert_same(kernels.silu_and_mul_quant_nvfp4(x, WHOLE), native(parts.silu_and_mul(x)))
        y = parts.rms_norm(x, None, EPSILON)
        assert_same(kernels.rms_norm_quant_nvfp4(x, None, WHOLE, EPSILON), native(y))
        got = kernels.fused_add_rms_norm_quant_nvfp4(x, torch.zeros_like(x), None, WHOLE, EPSILON)
        assert_same(got, (*native(y), x.contiguous()))


# Several rows in a tile; a power of two and a tail; rows that are read again from memory.
LENGTHS = (48, 2048 + 512, 16384 + 128)


@pytest.mark.parametrize(
    ("hidden", "dtype"), [*((hidden, dtype) for hidden in LENGTHS[:2] for dtype in FLOATS), (LENGTHS[2], FLOATS[0])]
)
def test_a_norm_in_front_changes_nothing(kernels, parts, hidden, dtype):
    x, residual = random(3, hidden, dtype=dtype), random(3, hidden, dtype=dtype, seed=2)
    before = x.clone(), residual.clone()
    for w in (random(hidden, dtype=dtype), random(hidden), None) if hidden == LENGTHS[0] else (random(hidden),):
        y, (added, total) = parts.rms_norm(x, w, EPSILON), parts.fused_add_rms_norm(x, residual, w, EPSILON)
        assert_same(kernels.rms_norm_quant_nvfp4(x, w, WHOLE, EPSILON), native(y))
        got = kernels.fused_add_rms_norm_quant_nvfp4(x, residual, w, WHOLE, EPSILON)
        assert_same(got, (*native(added), total))
    assert_same((x, residual), before)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(5, 96), (2, 3, 2, 32), (2, 2 * (1024 + 48)), (64,)])
def test_a_gate_in_front_changes_nothing(kernels, parts, dtype, shape):
    x = random(*shape, dtype=dtype)
    assert_same(kernels.silu_and_mul_quant_nvfp4(x, WHOLE), native(parts.silu_and_mul(x)))


@pytest.mark.parametrize("hidden", LENGTHS)
def test_in_place_the_residual_holds_the_sum(kernels, hidden):
    x, residual, weight = random(3, hidden), random(3, hidden, seed=2), random(hidden)
    wanted = kernels.fused_add_rms_norm_quant_nvfp4(x, residual, weight, WHOLE, EPSILON)
    kept = x.clone()
    got = kernels.fused_add_rms_norm_quant_nvfp4_inplace(x, residual, weight, WHOLE, EPSILON)
    assert_same(got, wanted)
    assert got[2] is residual
    assert torch.equal(x, kept)


def test_in_place_refuses_a_residual_that_it_would_have_to_copy(kernels):
    with pytest.raises(ValueError, match=r"x_residual has strides \(32, 1\)"):
        kernels.fused_add_rms_norm_quant_nvfp4_inplace(random(3, 16), random(3, 32)[:, :16], None, WHOLE, EPSILON)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (3, 0)])
def test_no_rows_or_empty_ones_give_what_native_gives(kernels, shape):
    x = random(*shape)
    wanted = ir.ops.fused_add_rms_norm_quant_nvfp4.native(x, x, None, WHOLE, EPSILON)
    assert_same(kernels.quant_nvfp4(x, WHOLE), native(x))
    assert_same(kernels.rms_norm_quant_nvfp4(x, None, WHOLE, EPSILON), wanted[:2])
    assert_same(kernels.fused_add_rms_norm_quant_nvfp4(x, x, None, WHOLE, EPSILON), wanted)
    assert_same(kernels.silu_and_mul_quant_nvfp4(torch.cat((x, x), -1), WHOLE), native(x))


@pytest.mark.parametrize("value", [torch.inf, torch.nan, 0.0])
def test_what_is_not_finite_stays_in_its_row(kernels, parts, value):
    x = random(3, 2048 + 512)
    x[1, 70] = value
    x[2] *= 1e-30
    assert_same(kernels.rms_norm_quant_nvfp4(x, None, WHOLE, EPSILON), native(parts.rms_norm(x, None, EPSILON)))


@pytest.mark.parametrize("name", ["rms_norm_quant_nvfp4", "silu_and_mul_quant_nvfp4"])
def test_codes_are_made_of_values_that_are_rounded_as_the_unfused_ops_round(kernels, name):
    """In float16, where a value that is rounded once more often gets another code."""
    x, op = random(64, 512, dtype=torch.float16), getattr(ir.ops, name)
    args = (x, random(512, dtype=torch.float16), WHOLE, EPSILON) if name.startswith("rms") else (x, WHOLE)
    wide = [a.float() if isinstance(a, Tensor) else a for a in args]
    got, wanted, once = getattr(kernels, name)(*args)[0], op.native(*args)[0], op.native(*wide)[0]
    flipped = [(q != wanted).float().mean() for q in (got, once)]
    assert flipped[0] < 2e-4 < flipped[1]


OPCHECKS = {
    "quant_nvfp4": (random(3, 32), WHOLE),
    "gated_quant_nvfp4": (random(3, 32), WHOLE, "silu"),
    "rms_norm_quant_nvfp4": (random(3, 32), random(32), WHOLE, EPSILON),
    "fused_add_rms_norm_quant_nvfp4": (random(3, 32), random(3, 32, seed=2), None, WHOLE, EPSILON),
    "fused_add_rms_norm_quant_nvfp4_": (random(3, 32), random(3, 32, seed=2), None, WHOLE, EPSILON),
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_the_torch_ops_do_what_their_schemas_say(kernels, name):
    kernels.launches()
    op = getattr(torch.ops.irframework_triton_kernels, name).default
    torch.library.opcheck(op, OPCHECKS[name], test_utils="test_schema")
