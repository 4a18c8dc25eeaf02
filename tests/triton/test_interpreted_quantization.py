"""The quantising kernels, run by Triton's interpreter on the CPU: codes bit for bit.

A fused kernel must give what its parts give, one after the other: native's quantisation of what the kernel without one
computes, which other tests hold to float64.
"""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.interpreter

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# One of each kind: shorter than a tile, a power of two and a tail, wider than what is kept in registers.
LENGTHS = (33, 2561, 16387)
EPSILON = 1e-5
SCALE = torch.tensor([0.03])


@pytest.fixture
def kernels():
    from irframework_triton_kernels import implementations

    return implementations


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def bytes_of(q: Tensor) -> Tensor:
    """The codes as bytes; every NaN as one."""
    assert q.dtype == torch.float8_e4m3fn
    return torch.where(q.float().isnan(), 0x7F, q.view(torch.uint8))


def assert_same(got, expected) -> None:
    """Bit for bit, with NaN equal to NaN."""
    if isinstance(expected, tuple):
        assert len(got) == len(expected)
        for g, e in zip(got, expected, strict=True):
            assert_same(g, e)
    elif expected.dtype == torch.float8_e4m3fn:
        assert torch.equal(bytes_of(got), bytes_of(expected))
    else:
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def awkward_numbers() -> Tensor:
    """Every code's value, what lies between two and beside that, the smallest and the largest, and random bits."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = (codes[1:] + codes[:-1]) / 2
    up, down = (torch.nextafter(middles, torch.tensor(to)) for to in (1e9, -1e9))
    edges = torch.tensor([0.0, 464.0, 464.1, 480.0, 1e9, 1e-45, 1e-38, 2.0**-10, 2.0**-11, torch.inf, torch.nan])
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    positive = torch.cat((codes, middles, up, down, edges))
    return torch.cat((positive, -positive, bits.to(torch.int32).view(torch.float32)))


def test_every_number_gets_its_code(kernels):
    x = awkward_numbers()
    assert_same(kernels.static_quant_fp8(x, torch.ones(1)), ir.ops.static_quant_fp8.native(x, torch.ones(1)))


@pytest.mark.parametrize("scale", [torch.tensor(0.3), torch.tensor([[7.0]]), torch.tensor([1e-30]), torch.zeros(1)])
def test_numbers_are_multiplied_by_the_inverse_of_the_scale(kernels, scale):
    x = awkward_numbers()
    assert_same(kernels.static_quant_fp8(x, scale), ir.ops.static_quant_fp8.native(x, scale))


@pytest.mark.parametrize("hidden", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_get_the_codes_and_scales_of_native(kernels, dtype, hidden):
    x = random(3, hidden, dtype=dtype)
    assert_same(kernels.static_quant_fp8(x, SCALE), ir.ops.static_quant_fp8.native(x, SCALE))
    assert_same(kernels.dynamic_quant_fp8(x), ir.ops.dynamic_quant_fp8.native(x))


def test_a_row_of_zeros_gets_the_smallest_scale(kernels):
    x = torch.zeros(2, 40)
    assert_same(kernels.dynamic_quant_fp8(x), (x.to(torch.float8_e4m3fn), torch.full((2, 1), 1 / (448 * 512))))


@pytest.mark.parametrize("hidden", [40, 2561, 16387])
def test_infinities_and_nans_decide_about_their_row_only(kernels, hidden):
    x = random(4, hidden)
    x[1, 3], x[2, 0], x[2, -1], x[3, -1] = float("inf"), float("nan"), float("inf"), -float("inf")
    assert_same(kernels.dynamic_quant_fp8(x), ir.ops.dynamic_quant_fp8.native(x))
    y = kernels.rms_norm(x, None, EPSILON)
    assert_same(kernels.rms_norm_dynamic_quant_fp8(x, None, EPSILON), ir.ops.dynamic_quant_fp8.native(y))
    assert_same(kernels.rms_norm_static_quant_fp8(x, None, SCALE, EPSILON), ir.ops.static_quant_fp8.native(y, SCALE))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (3, 0)])
def test_a_quantisation_of_nothing_is_empty(kernels, shape):
    x, weight, wide = random(*shape), random(shape[-1]), random(*shape[:-1], 2 * shape[-1])
    assert_same(kernels.static_quant_fp8(x, SCALE), ir.ops.static_quant_fp8.native(x, SCALE))
    assert_same(kernels.dynamic_quant_fp8(x), ir.ops.dynamic_quant_fp8.native(x))
    expected = ir.ops.fused_add_rms_norm_dynamic_quant_fp8.native(x, x, weight, EPSILON)
    assert_same(kernels.rms_norm_dynamic_quant_fp8(x, weight, EPSILON), expected[:2])
    assert_same(kernels.fused_add_rms_norm_dynamic_quant_fp8(x, x, weight, EPSILON), expected)
    assert_same(kernels.silu_and_mul_dynamic_quant_fp8(wide), ir.ops.silu_and_mul_dynamic_quant_fp8.native(wide))


@pytest.mark.parametrize("shape", [(7,), (2, 3, 5), (5, 1)])
def test_codes_have_the_shape_of_their_rows(kernels, shape):
    x = random(*shape)
    assert_same(kernels.static_quant_fp8(x, SCALE), ir.ops.static_quant_fp8.native(x, SCALE))
    assert_same(kernels.dynamic_quant_fp8(x), ir.ops.dynamic_quant_fp8.native(x))


@pytest.mark.parametrize("x", [random(5, 100)[:, 7:71], random(4, 3, 48).transpose(0, 1), random(48).expand(4, 48)])
def test_rows_with_any_stride_between_them_are_quantised(kernels, x):
    assert_same(kernels.static_quant_fp8(x, SCALE), ir.ops.static_quant_fp8.native(x, SCALE))
    assert_same(kernels.dynamic_quant_fp8(x), ir.ops.dynamic_quant_fp8.native(x))


@pytest.mark.parametrize("hidden", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_norm_in_front_changes_nothing(kernels, dtype, hidden):
    x, weight = random(3, hidden, dtype=dtype), random(hidden, dtype=dtype)
    y = kernels.rms_norm(x, weight, EPSILON)
    static = kernels.rms_norm_static_quant_fp8(x, weight, SCALE, EPSILON)
    assert_same(static, ir.ops.static_quant_fp8.native(y, SCALE))
    assert_same(kernels.rms_norm_dynamic_quant_fp8(x, weight, EPSILON), ir.ops.dynamic_quant_fp8.native(y))


@pytest.mark.parametrize("hidden", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_residual_and_a_norm_in_front_change_nothing(kernels, dtype, hidden):
    x, x_residual = random(3, hidden, dtype=dtype), random(3, hidden, dtype=dtype, seed=2)
    before, weight = (x.clone(), x_residual.clone()), random(hidden, dtype=dtype)
    y, residual = kernels.fused_add_rms_norm(x, x_residual, weight, EPSILON)
    static = kernels.fused_add_rms_norm_static_quant_fp8(x, x_residual, weight, SCALE, EPSILON)
    assert_same(static, (ir.ops.static_quant_fp8.native(y, SCALE), residual))
    dynamic = kernels.fused_add_rms_norm_dynamic_quant_fp8(x, x_residual, weight, EPSILON)
    assert_same(dynamic, (*ir.ops.dynamic_quant_fp8.native(y), residual))
    assert_same((x, x_residual), before)


@pytest.mark.parametrize("hidden", [33, 2561, 16387])
def test_in_place_the_residual_holds_the_sum(kernels, hidden):
    x, x_residual, weight = random(3, hidden), random(3, hidden, seed=2), random(hidden)
    launch = kernels._launch()
    q, residual = kernels.fused_add_rms_norm_static_quant_fp8(x, x_residual, weight, SCALE, EPSILON)
    first = x_residual.clone()
    assert_same(launch.fused_add_rms_norm_static_quant_fp8_inplace(x, first, weight, SCALE, EPSILON), q)
    assert_same(first, residual)
    q, scales, residual = kernels.fused_add_rms_norm_dynamic_quant_fp8(x, x_residual, weight, EPSILON)
    second = x_residual.clone()
    assert_same(launch.fused_add_rms_norm_dynamic_quant_fp8_inplace(x, second, weight, EPSILON), (q, scales))
    assert_same(second, residual)


@pytest.mark.parametrize("name", ["static", "dynamic"])
def test_in_place_refuses_a_residual_that_it_would_have_to_copy(kernels, name):
    function = getattr(kernels._launch(), f"fused_add_rms_norm_{name}_quant_fp8_inplace")
    scale = (SCALE,) if name == "static" else ()
    with pytest.raises(ValueError, match=r"x_residual has strides \(16, 1\)"):
        function(random(3, 8), random(3, 16)[:, :8], None, *scale, EPSILON)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_gate_in_front_changes_nothing(kernels, dtype, length):
    x = random(2, 2 * length, dtype=dtype)
    y = kernels.silu_and_mul(x)
    assert_same(kernels.silu_and_mul_static_quant_fp8(x, SCALE), ir.ops.static_quant_fp8.native(y, SCALE))
    assert_same(kernels.silu_and_mul_dynamic_quant_fp8(x), ir.ops.dynamic_quant_fp8.native(y))


def test_codes_are_made_of_values_that_are_rounded_as_the_unfused_op_rounds(kernels):
    """In float16, where a value that is rounded once more often gets another code."""
    x, weight = random(64, 96, dtype=torch.float16), random(96, dtype=torch.float16)
    once = ir.ops.rms_norm.native(x.double(), weight.double(), EPSILON).float()
    native = ir.ops.rms_norm_static_quant_fp8.native(x, weight, SCALE, EPSILON)
    got = kernels.rms_norm_static_quant_fp8(x, weight, SCALE, EPSILON)
    differing = (bytes_of(got) != bytes_of(native)).float().mean()
    assert differing < 1e-3 < (bytes_of(ir.ops.static_quant_fp8.native(once, SCALE)) != bytes_of(native)).float().mean()


def test_programs_that_work_on_many_tiles_give_the_same(kernels):
    from irframework_triton_kernels.tiles import Tile

    launch = kernels._launch()
    x, x_residual, weight = random(13, 80), random(13, 80, seed=2), random(80)

    def results(tile):
        yield launch.rms_norm(x, weight, EPSILON, None, tile)
        yield launch.fused_add_rms_norm_dynamic_quant_fp8(x, x_residual, weight, EPSILON, tile)
        yield launch.dynamic_quant_fp8(x, tile)

    one_each, many = Tile(2, 64, True, 4, tail=16), Tile(2, 64, True, 4, tail=16, resident=2)
    assert_same(tuple(results(many)), tuple(results(one_each)))


OPCHECKS = {
    "rms_norm_static_quant_fp8": (random(3, 8), random(8), SCALE, EPSILON),
    "rms_norm_dynamic_quant_fp8": (random(3, 8), None, EPSILON),
    "fused_add_rms_norm_static_quant_fp8": (random(3, 8), random(3, 8, seed=2), random(8), SCALE, EPSILON),
    "fused_add_rms_norm_static_quant_fp8_": (random(3, 8), random(3, 8, seed=2), random(8), SCALE, EPSILON),
    "fused_add_rms_norm_dynamic_quant_fp8": (random(3, 8), random(3, 8, seed=2), random(8), EPSILON),
    "fused_add_rms_norm_dynamic_quant_fp8_": (random(3, 8), random(3, 8, seed=2), random(8), EPSILON),
    "silu_and_mul_static_quant_fp8": (random(3, 8), SCALE),
    "silu_and_mul_dynamic_quant_fp8": (random(3, 8),),
    "static_quant_fp8": (random(3, 8), SCALE),
    "dynamic_quant_fp8": (random(3, 8),),
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_the_torch_ops_do_what_their_schemas_say(kernels, name):
    kernels._launch()
    op = getattr(torch.ops.irframework_triton_kernels, name).default
    torch.library.opcheck(op, OPCHECKS[name], test_utils="test_schema")
