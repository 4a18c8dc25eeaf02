"""The fused ops that end in a scale for a block of a row: their parts bit for bit, and float64 step by step."""

import itertools

import pytest
import torch
from op_checks import DTYPES

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("natively", "seeded")

FP8 = torch.float8_e4m3fn
EPSILON = 1e-5
WHOLE = torch.tensor([0.02])
FAMILIES = ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "gelu_and_mul")
GROUPED = tuple(f"{family}_group_quant_fp8" for family in FAMILIES)
NVFP4 = tuple(f"{family}_quant_nvfp4" for family in FAMILIES[:3])
LAYOUTS = tuple(itertools.product((128, 64), (False, True), (False, True)))  # size, column-major, powers of two
EVERY = pytest.mark.parametrize("name", GROUPED + NVFP4)


def test_every_family_ends_in_both():
    ends = "_group_quant_fp8", "_quant_nvfp4"
    found = {name for name in ir.ops.__all__ if name.endswith(ends) and name.startswith(FAMILIES)}
    assert found == {*GROUPED, *NVFP4}


def inputs(name, dtype, shape, weight="same"):
    """The arguments of the first part."""
    x, residual = (torch.randn(shape) * 2).to(dtype), torch.randn(shape).to(dtype)
    if "_and_mul_" in name:
        return (x,)
    w = {"same": torch.randn(shape[-1]).to(dtype), "float32": torch.randn(shape[-1]), "none": None}[weight]
    return (x, residual, w) if name.startswith("fused_add") else (x, w)


def first_part(name, args):
    """What is quantised, and the sum where there is one."""
    if name.startswith("fused_add"):
        y, total = ir.ops.fused_add_rms_norm(*args, EPSILON)
        return y, (total,)
    if name.startswith("rms_norm"):
        return ir.ops.rms_norm(*args, EPSILON), ()
    return (ir.ops.silu_and_mul if name.startswith("silu") else ir.ops.gelu_and_mul)(*args), ()


def fused(name, args, layout=(128, False, False), form=lambda op: op):
    op = form(getattr(ir.ops, name))
    if name in GROUPED:
        middle = () if name.startswith("silu") else ("none",) if name.startswith("gelu") else (EPSILON,)
        return op(*args, *middle, *layout)
    return op(*args, WHOLE, *(() if name.startswith("silu") else (EPSILON,)))


def second_part(name, y, layout=(128, False, False)):
    return ir.ops.group_quant_fp8(y, *layout) if name in GROUPED else ir.ops.quant_nvfp4(y, WHOLE)


def same(got, wanted):
    """Bit for bit, with one NaN for all."""
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one.double().nan_to_num(1e4), other.double().nan_to_num(1e4))


@pytest.mark.parametrize("weight", ["same", "float32", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@EVERY
def test_it_is_its_parts_bit_for_bit(name, dtype, weight):
    for shape in ((3, 256), (2, 3, 256), (0, 256), (4, 0, 256)):
        args = inputs(name, dtype, shape, weight)
        y, total = first_part(name, args)
        assert y.dtype == dtype
        for layout in LAYOUTS if name in GROUPED else LAYOUTS[:1]:
            wanted = (*second_part(name, y, layout), *total)
            forms = [lambda op: op, lambda op: op.torch_op]
            forms += [lambda op: op.maybe_inplace] if getattr(ir.ops, name).allow_inplace else []
            for form in forms:
                same(fused(name, args, layout, form), wanted)


@pytest.mark.parametrize("name", [name for name in GROUPED if name.startswith("gelu")])
def test_gelu_may_be_the_one_by_tanh(name):
    x = torch.randn(3, 256)
    y = ir.ops.gelu_and_mul(x, "tanh")
    same(getattr(ir.ops, name)(x, "tanh"), ir.ops.group_quant_fp8(y))
    assert not torch.equal(y, ir.ops.gelu_and_mul(x))


@pytest.mark.parametrize("name", GROUPED)
def test_defaults_are_groups_of_128_with_scales_by_rows(name):
    args = inputs(name, torch.float32, (3, 256))
    middle = () if "_and_mul_" in name else (EPSILON,)
    same(getattr(ir.ops, name)(*args, *middle), fused(name, args, (128, False, False)))


# --- against float64 ------------------------------------------------------------------------------------------------


def exact_rows(name, args):
    """What is quantised, in float64 without any rounding."""
    wide = [a.double() for a in args]
    if "_and_mul_" in name:
        gate, up = wide[0].chunk(2, -1)
        share = 1 / (1 + torch.exp(-gate)) if name.startswith("silu") else (1 + torch.erf(gate / 2**0.5)) / 2
        return gate * share * up
    x = wide[0] + wide[1] if name.startswith("fused_add") else wide[0]
    return x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * wide[-1]


def values(q):
    """Of packed codes, one after the other."""
    codes = torch.stack((q & 15, q >> 4), -1).flatten(-2).long()
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)[codes & 7]
    return torch.where(codes >= 8, -sizes, sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", GROUPED)
def test_scales_are_those_of_exact_groups_and_codes_are_near(name, layout, dtype):
    size, column_major, powers = layout
    args = inputs(name, dtype, (5, 256))
    q, scale, *_ = fused(name, args, layout)
    scale = scale.transpose(-1, -2) if column_major else scale
    groups = exact_rows(name, args).unflatten(-1, (-1, size))
    wanted = groups.abs().amax(-1) / 448
    roundings = 4 * torch.finfo(dtype).eps  # of the sum, the norm or the activation, the product, and the row
    if powers:
        assert torch.equal(scale.log2(), scale.log2().round())
        assert (scale >= wanted * (1 - roundings)).all()
        assert (scale < 2 * wanted * (1 + roundings)).all()
    else:
        torch.testing.assert_close(scale.double(), wanted, rtol=roundings, atol=0)
    wide = scale.double().unsqueeze(-1)
    got = q.double().unflatten(-1, (-1, size)) * wide
    step = torch.maximum(groups.abs() / 16, wide * 2.0**-10)  # half of that between two codes
    rest = roundings * groups.abs().amax(-1, keepdim=True)
    assert ((got - groups).abs() <= step * 1.001 + rest).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", NVFP4)
def test_nvfp4_codes_times_scales_are_near_the_exact_rows(name, dtype):
    args = inputs(name, dtype, (5, 256))
    q, scale, *_ = fused(name, args)
    blocks = exact_rows(name, args).unflatten(-1, (-1, 16))
    unit = scale.double() * WHOLE.double()
    wanted = blocks.abs().amax(-1) / 6
    inside = (wanted / WHOLE.double() < 440) & (wanted / WHOLE.double() > 2.0**-5)
    roundings = 4 * torch.finfo(dtype).eps
    assert inside.double().mean() > 0.9
    assert ((unit / wanted)[inside] - 1).abs().max() <= 1 / 16 + 2 * roundings
    got = values(q).unflatten(-1, (-1, 16)) * unit.unsqueeze(-1)
    step = unit.unsqueeze(-1) * 1.001 + roundings * blocks.abs().amax(-1, keepdim=True)  # half of that from 4 to 6
    assert ((got - blocks).abs() <= step)[inside].all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@EVERY
def test_leaving_out_the_rounding_between_the_parts_would_show(name, dtype):
    """A kernel that quantises float32 directly makes other codes: the op's meaning has the rounding."""
    args = inputs(name, dtype, (64, 256))
    rounded = fused(name, args)[0]
    wide = tuple(a.float() for a in args)
    if name.startswith("fused_add"):  # the sum is rounded in both
        wide = ((args[0] + args[1]).float(), torch.zeros(64, 256), wide[2])
    direct = fused(name, wide)[0]
    flipped = (rounded.view(torch.uint8) != direct.view(torch.uint8)).double().mean().item()
    assert (0.003 if dtype == torch.bfloat16 else 0.0002) < flipped < 0.25


# --- special rows, bad arguments, training ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in GROUPED if "_and_mul_" in name])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_group(name, value):
    x = torch.randn(2, 512)
    clean = fused(name, (x,), (64, False, False))
    x[0, 5] = value
    q, scale = fused(name, (x,), (64, False, False))
    assert not scale[0, 0].isfinite()
    assert torch.equal(scale.flatten()[1:], clean[1].flatten()[1:])
    assert torch.equal(q.float()[0, 64:], clean[0].float()[0, 64:])


@pytest.mark.parametrize("name", [name for name in GROUPED if "rms_norm" in name])
def test_a_nan_stays_in_its_row(name):
    args = inputs(name, torch.float32, (3, 256))
    clean = fused(name, args)
    args[0][1, 3] = float("nan")
    q, scale, *_ = fused(name, args)
    assert scale[1].isnan().all()
    assert q[1].float().isnan().all()
    for row in (0, 2):
        assert torch.equal(q[row].float(), clean[0][row].float())


@pytest.mark.parametrize("size", [0, -2, 5, 512])
@pytest.mark.parametrize("name", GROUPED)
def test_groups_that_do_not_divide_a_row_are_refused(name, size):
    with pytest.raises(errors.ArgumentError, match=f"group_size={size} must be positive and divide"):
        fused(name, inputs(name, torch.float32, (3, 256)), (size, False, False))


@pytest.mark.parametrize("name", NVFP4)
def test_nvfp4_needs_whole_blocks(name):
    with pytest.raises(errors.ArgumentError, match="multiple of 16"):
        fused(name, inputs(name, torch.float32, (3, 40)))


@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf")])
@pytest.mark.parametrize("name", NVFP4)
def test_a_global_scale_without_meaning_is_refused(name, scale):
    args = inputs(name, torch.float32, (3, 64))
    rest = () if name.startswith("silu") else (EPSILON,)
    with pytest.raises(errors.ArgumentError, match=rf"{name}.*'global_scale' holds"):
        getattr(ir.ops, name)(*args, torch.tensor([scale]), *rest)


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool])
@EVERY
def test_rows_that_are_not_floating_point_are_refused(name, dtype):
    x = torch.ones(4, 256, dtype=dtype)
    args = (x,) if "_and_mul_" in name else (x, x, None) if name.startswith("fused_add") else (x, None)
    with pytest.raises(errors.ArgumentError, match="argument 'x' must have a floating-point dtype"):
        fused(name, args)


@pytest.mark.parametrize("name", GROUPED)
def test_gradients_of_scales_are_those_of_the_parts(name):
    given = []
    for call in (fused, lambda name, args: second_part(name, first_part(name, args)[0])):
        args = inputs(name, torch.float64, (3, 256)) if not given else given[0]
        args = tuple(a.detach().clone().requires_grad_() for a in args)
        given.append(args)
        call(name, args)[1].sum().backward()
    for one, other in zip(*given, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("name", [name for name in GROUPED + NVFP4 if name.startswith("fused_add")])
def test_only_rows_may_be_overwritten(name):
    op = getattr(ir.ops, name)
    assert (op.allow_inplace, op.activations) == (True, ("x", "x_residual"))
