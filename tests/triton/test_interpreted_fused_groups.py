"""The fused kernels that end in a scale for a group, and those gated by GELU, run by Triton's interpreter.

Codes and scales are, bit for bit, native's of what the kernel without a quantisation computes, which other tests hold
to float64.
"""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.interpreter

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
EPSILON = 1e-5
SCALE = torch.tensor([0.03])
LAYOUTS = [(column_major, powers) for column_major in (False, True) for powers in (False, True)]


@pytest.fixture
def kernels():
    from irframework_triton_kernels import fused_quantizations

    return fused_quantizations


@pytest.fixture
def parts():
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
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        if other.dtype == torch.float8_e4m3fn:
            assert torch.equal(bytes_of(one), bytes_of(other))
        else:
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert one.is_contiguous()


# Several rows in a tile; a power of two and a tail; rows that are read again from memory.
LENGTHS = (256, 2048 + 512, 16384 + 128)


@pytest.mark.parametrize(
    ("hidden", "column_major", "powers"),
    [*((LENGTHS[0], *layout) for layout in LAYOUTS), (LENGTHS[1], True, False), (LENGTHS[2], False, True)],
)
def test_a_norm_in_front_changes_nothing(kernels, parts, hidden, column_major, powers):
    x, residual, weight = random(3, hidden), random(3, hidden, seed=2), random(hidden)
    y = parts.rms_norm(x, weight, EPSILON)
    added, total = parts.fused_add_rms_norm(x, residual, weight, EPSILON)
    for size in (128, 64) if hidden == LENGTHS[0] else (128,):
        layout = size, column_major, powers
        got = kernels.rms_norm_group_quant_fp8(x, weight, EPSILON, *layout)
        assert_same(got, ir.ops.group_quant_fp8.native(y, *layout))
        got = kernels.fused_add_rms_norm_group_quant_fp8(x, residual, weight, EPSILON, *layout)
        assert_same(got, (*ir.ops.group_quant_fp8.native(added, *layout), total))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weight", ["same", "float32", "none"])
def test_weights_of_any_dtype_are_applied_as_by_the_norm(kernels, parts, dtype, weight):
    x, residual = random(5, 384, dtype=dtype), random(5, 384, dtype=dtype, seed=2)
    w = {"same": random(384, dtype=dtype), "float32": random(384), "none": None}[weight]
    y, (added, total) = parts.rms_norm(x, w, EPSILON), parts.fused_add_rms_norm(x, residual, w, EPSILON)
    assert_same(kernels.rms_norm_group_quant_fp8(x, w, EPSILON), ir.ops.group_quant_fp8.native(y))
    got = kernels.fused_add_rms_norm_group_quant_fp8(x, residual, w, EPSILON)
    assert_same(got, (*ir.ops.group_quant_fp8.native(added), total))


@pytest.mark.parametrize(("column_major", "powers"), LAYOUTS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_a_gate_in_front_changes_nothing(kernels, parts, dtype, column_major, powers):
    for shape, size in (((5, 768), 128), ((2, 3, 2, 60), 5), ((3, 512), 64)):
        x, layout = random(*shape, dtype=dtype), (size, column_major, powers)
        y = ir.ops.group_quant_fp8.native(parts.silu_and_mul(x), *layout)
        assert_same(kernels.silu_and_mul_group_quant_fp8(x, *layout), y)
        for approximate in ("none", "tanh"):
            y = ir.ops.group_quant_fp8.native(parts.gelu_and_mul(x, approximate), *layout)
            assert_same(kernels.gelu_and_mul_group_quant_fp8(x, approximate, *layout), y)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize(("length", "dtype"), [*((33, dtype) for dtype in FLOATS), (2561, FLOATS[0])])
def test_gelu_in_front_of_one_scale_or_of_one_for_a_row_changes_nothing(kernels, parts, dtype, length, approximate):
    x = random(2, 2 * length, dtype=dtype)
    y = parts.gelu_and_mul(x, approximate)
    got = kernels.gelu_and_mul_static_quant_fp8(x, SCALE, approximate)
    assert_same((got,), (ir.ops.static_quant_fp8.native(y, SCALE),))
    assert_same(kernels.gelu_and_mul_dynamic_quant_fp8(x, approximate), ir.ops.dynamic_quant_fp8.native(y))


@pytest.mark.parametrize("size", [1, 2, 8, 256])
def test_groups_may_be_any_power_of_two(kernels, parts, size):
    x = random(3, 256)
    y = parts.rms_norm(x, None, EPSILON)
    got = kernels.rms_norm_group_quant_fp8(x, None, EPSILON, size, True, False)
    assert_same(got, ir.ops.group_quant_fp8.native(y, size, True, False))


def test_rows_with_any_stride_between_them_and_of_any_batch_are_quantised(kernels, parts):
    for x in (
        random(5, 400)[:, 8:264],
        random(4, 3, 256).transpose(0, 1),
        random(256).expand(4, 256),
        random(2, 3, 4, 128),
    ):
        y = parts.rms_norm(x, None, EPSILON)
        for layout in ((64, True, False), (64, False, True)):
            got = kernels.rms_norm_group_quant_fp8(x, None, EPSILON, *layout)
            assert_same(got, ir.ops.group_quant_fp8.native(y, *layout))
            got = kernels.fused_add_rms_norm_group_quant_fp8(x, torch.zeros_like(x), None, EPSILON, *layout)
            assert_same(got, (*ir.ops.group_quant_fp8.native(y, *layout), x.contiguous()))


def test_a_vector_is_a_row(kernels, parts):
    x = random(256)
    y = parts.rms_norm(x, None, EPSILON)
    assert_same(kernels.rms_norm_group_quant_fp8(x, None, EPSILON), ir.ops.group_quant_fp8.native(y))


@pytest.mark.parametrize("hidden", LENGTHS)
def test_in_place_the_residual_holds_the_sum(kernels, hidden):
    x, residual, weight = random(3, hidden), random(3, hidden, seed=2), random(hidden)
    q, scale, total = kernels.fused_add_rms_norm_group_quant_fp8(x, residual, weight, EPSILON, 64, True)
    kept = x.clone()
    got = kernels.fused_add_rms_norm_group_quant_fp8_inplace(x, residual, weight, EPSILON, 64, True)
    assert_same(got, (q, scale, total))
    assert got[2] is residual
    assert torch.equal(x, kept)


def test_in_place_refuses_a_residual_that_it_would_have_to_copy(kernels):
    with pytest.raises(ValueError, match=r"x_residual has strides \(16, 1\)"):
        kernels.fused_add_rms_norm_group_quant_fp8_inplace(random(3, 8), random(3, 16)[:, :8], None, EPSILON, 8)


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("shape", [(0, 256), (2, 0, 128), (3, 0)])
def test_no_rows_or_empty_ones_give_what_native_gives(kernels, shape, column_major):
    x, layout = random(*shape), (128, column_major, False)
    wanted = ir.ops.fused_add_rms_norm_group_quant_fp8.native(x, x, None, EPSILON, *layout)
    assert_same(kernels.rms_norm_group_quant_fp8(x, None, EPSILON, *layout), wanted[:2])
    assert_same(kernels.fused_add_rms_norm_group_quant_fp8(x, x, None, EPSILON, *layout), wanted)
    wide = torch.cat((x, x), -1)
    wanted = ir.ops.silu_and_mul_group_quant_fp8.native(wide, *layout)
    assert_same(kernels.silu_and_mul_group_quant_fp8(wide, *layout), wanted)
    assert_same(kernels.gelu_and_mul_dynamic_quant_fp8(wide), ir.ops.gelu_and_mul_dynamic_quant_fp8.native(wide))


@pytest.mark.parametrize("hidden", LENGTHS[:2])
@pytest.mark.parametrize("value", [torch.inf, torch.nan, 0.0])
def test_what_is_not_finite_stays_in_its_row(kernels, parts, hidden, value):
    x = random(3, hidden)
    x[1, 70] = value
    x[2] *= 1e-30
    y = parts.rms_norm(x, None, EPSILON)
    assert_same(kernels.rms_norm_group_quant_fp8(x, None, EPSILON), ir.ops.group_quant_fp8.native(y))


@pytest.mark.parametrize("name", ["rms_norm_group_quant_fp8", "silu_and_mul_group_quant_fp8"])
def test_codes_are_made_of_values_that_are_rounded_as_the_unfused_ops_round(kernels, name):
    """In float16, where a value that is rounded once more often gets another code."""
    x, op = random(64, 512, dtype=torch.float16), getattr(ir.ops, name)
    rest = (random(512, dtype=torch.float16), EPSILON) if name.startswith("rms") else ()
    wide = [a.float() if isinstance(a, Tensor) else a for a in (x, *rest)]
    got, native, once = getattr(kernels, name)(x, *rest)[0], op.native(x, *rest)[0], op.native(*wide)[0]
    flipped = [(bytes_of(q) != bytes_of(native)).float().mean() for q in (got, once)]
    assert flipped[0] < 1e-3 < flipped[1]


OPCHECKS = {
    "rms_norm_group_quant_fp8": (random(3, 32), random(32), EPSILON, 8, True, True),
    "fused_add_rms_norm_group_quant_fp8": (random(3, 32), random(3, 32, seed=2), None, EPSILON, 8, False, False),
    "fused_add_rms_norm_group_quant_fp8_": (random(3, 32), random(3, 32, seed=2), None, EPSILON, 8, True, False),
    "gated_group_quant_fp8": (random(3, 32), "silu", 8, True, True),
    "gelu_and_mul_static_quant_fp8": (random(3, 32), SCALE, "tanh"),
    "gelu_and_mul_dynamic_quant_fp8": (random(3, 32), "none"),
}


@pytest.mark.parametrize("name", OPCHECKS)
def test_the_torch_ops_do_what_their_schemas_say(kernels, name):
    kernels.launches()
    op = getattr(torch.ops.irframework_triton_kernels, name).default
    torch.library.opcheck(op, OPCHECKS[name], test_utils="test_schema")
