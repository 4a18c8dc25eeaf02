"""The quantising ops against codes worked out by hand, and the fused ops against their parts, bit for bit."""

import itertools

import pytest
import torch

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("seeded", "natively")

ELSEWHERE = ("tensor_quant_fp8", "group_quant_fp8")  # tests/ops/test_quantization.py, test_fused_block_quantization.py
# tests/distributed/test_fused_collectives.py, tests/ops/test_gated_products.py
BEGIN_ELSEWHERE = ("all_reduce", "scaled_linear")
NAMES = tuple(
    name
    for name in ir.ops.__all__
    if name.endswith("_quant_fp8") and not name.endswith(ELSEWHERE)
    if not name.startswith(BEGIN_ELSEWHERE)
)
STATIC = tuple(name for name in NAMES if "static" in name)
FUSED = tuple(name for name in NAMES if name not in ("static_quant_fp8", "dynamic_quant_fp8"))
FP8 = torch.float8_e4m3fn
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((1, 1), (3, 3), (2, 3, 96), (5, 33), (0, 64), (4, 0, 8), (3, 0), (7,))
EPSILON = 1e-5
SMALLEST = 1 / (448 * 512)


@pytest.fixture
def natively():
    with ir.priority(dict.fromkeys(ir.ops.__all__, "native")):
        yield


# --- the format, by hand ---------------------------------------------------------------------------------------------


def value_of(code):
    """What a positive code of E4M3 stands for: 4 bits of exponent with bias 7, 3 of mantissa, no infinities."""
    exponent, mantissa = code >> 3, code & 7
    return mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)


VALUES = torch.tensor([value_of(code) for code in range(0x7F)], dtype=torch.float64)  # 0x7f is NaN


def nearest_codes(x):
    """The codes of float64 numbers: nearest, of two equally near ones the even one, of too large ones the largest."""
    size = x.abs().clamp_max(448.0)
    above = torch.searchsorted(VALUES, size).clamp_max(0x7E)
    below = (above - 1).clamp_min(0)
    up, down = VALUES[above] - size, size - VALUES[below]
    code = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    code = torch.where(up == 0, above, code) + 0x80 * x.signbit()
    return torch.where(x.isnan(), 0x7F, code).to(torch.uint8)


def codes_of(q):
    """The codes as bytes; every NaN as one."""
    assert q.dtype == FP8
    return torch.where(q.float().isnan(), 0x7F, q.view(torch.uint8))


def reciprocal(scale):
    return (1.0 / scale.double()).float().double()


def quantised(x, scale):
    """One rounding after each step of float32, in float64: products and quotients of two float32 fit there."""
    h = x.double() * reciprocal(scale)
    return nearest_codes(h if x.dtype == torch.float64 else h.float().double())


def scales_of(x):
    largest = x.double().abs().amax(-1, keepdim=True) if x.shape[-1] else torch.zeros(*x.shape[:-1], 1)
    return (largest / 448).clamp_min(SMALLEST).float()


def equal(got, expected):
    """Bit for bit, with NaN equal to NaN."""
    if isinstance(got, tuple):
        return len(got) == len(expected) and all(map(equal, got, expected))
    if got.dtype == FP8:
        return expected.dtype == FP8 and torch.equal(codes_of(got), codes_of(expected))
    return got.dtype == expected.dtype and got.shape == expected.shape and got.equal(expected)


def test_every_code_stands_for_its_value():
    every = torch.arange(256, dtype=torch.uint8).view(FP8)
    assert torch.equal(every[:0x7F].double(), VALUES)
    assert torch.equal(codes_of(ir.ops.static_quant_fp8(every.float(), torch.ones(()))), codes_of(every))


# --- codes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.02, 1.0, 3e-7, 1e30])
def test_static_codes_are_the_nearest(dtype, shape, scale):
    x, scale = (torch.randn(shape) * 3).to(dtype), torch.tensor(scale)
    q = ir.ops.static_quant_fp8(x, scale)
    assert q.shape == x.shape
    assert torch.equal(codes_of(q), quantised(x, scale))


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dynamic_scales_and_codes_are_exact(dtype, shape):
    x = (torch.randn(shape) * torch.logspace(-3, 3, shape[0] if len(shape) > 1 else 1).view(-1, *[1] * (len(shape) - 1))
         if shape[0] else torch.randn(shape)).to(dtype)  # fmt: skip
    q, scale = ir.ops.dynamic_quant_fp8(x)
    assert (q.shape, scale.shape, scale.dtype) == (x.shape, (*x.shape[:-1], 1), torch.float32)
    assert torch.equal(scale, scales_of(x))
    if dtype != torch.float64:  # there the codes are made with the scale before it is rounded to float32
        assert torch.equal(codes_of(q), quantised(x, scale))


def test_a_number_between_two_codes_goes_to_the_even_one():
    between = (VALUES[1:] + VALUES[:-1]) / 2
    for sign in (1, -1):
        codes = codes_of(ir.ops.static_quant_fp8(sign * between.float(), torch.ones(1)))
        lower = torch.arange(0x7E)
        assert torch.equal(codes & 0x7F, lower + lower % 2)


def test_a_number_just_beside_the_middle_goes_to_the_nearer_code():
    between = ((VALUES[1:] + VALUES[:-1]) / 2).float()
    lower = torch.arange(0x7E, dtype=torch.uint8)
    for towards, expected in ((0.0, lower), (float("inf"), lower + 1)):
        beside = torch.nextafter(between, torch.tensor(towards))
        assert torch.equal(codes_of(ir.ops.static_quant_fp8(beside, torch.ones(1))), expected)


def test_codes_are_made_with_the_rounded_reciprocal_and_the_rounded_product():
    """Beside the middle of two codes a division, or a product in float64, would choose the other one."""
    between, told = ((VALUES[1:] + VALUES[:-1]) / 2)[7:], [0, 0]
    for scale in torch.rand(200) + 0.01:
        x = (between * scale.double()).float()
        expected = quantised(x, scale)
        assert torch.equal(codes_of(ir.ops.static_quant_fp8(x, scale)), expected)
        told[0] += int((nearest_codes((x / scale).double()) != expected).sum())
        told[1] += int((nearest_codes(x.double() / scale.double()) != expected).sum())
    assert min(told) > 1000


def test_dynamic_codes_are_made_with_the_rounded_reciprocal_of_the_scale():
    between, told = ((VALUES[1:] + VALUES[:-1]) / 2)[7:], 0
    for largest in torch.rand(200) + 0.01:
        row = (between * largest.double() / 448).float()
        row = torch.cat((row, largest.view(1)))
        q, scale = ir.ops.dynamic_quant_fp8(row)
        expected = quantised(row, scales_of(row))
        assert torch.equal(codes_of(q), expected)
        told += int((nearest_codes((row / scale).double()) != expected).sum())
    assert told > 1000


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_too_large_becomes_the_largest_code(dtype):
    largest = torch.finfo(dtype).max
    x = torch.tensor([448, 449, 464, 480, largest, float("inf")], dtype=dtype)
    assert ir.ops.static_quant_fp8(torch.cat((x, -x)), torch.ones(1)).tolist() == [448.0] * 6 + [-448.0] * 6


def test_products_that_overflow_float32_become_the_largest_code():
    assert ir.ops.static_quant_fp8(torch.tensor([1e38, -1e38]), torch.tensor(1e-6)).tolist() == [448.0, -448.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_nan_and_alone(dtype):
    x = torch.tensor([1.0, float("nan"), -2.0], dtype=dtype)
    assert codes_of(ir.ops.static_quant_fp8(x, torch.ones(1))).tolist() == [0x38, 0x7F, 0xC0]


def test_zeros_keep_their_sign():
    x = torch.tensor([0.0, -0.0, 1e-30, -1e-30])
    assert codes_of(ir.ops.static_quant_fp8(x, torch.ones(1))).tolist() == [0, 0x80, 0, 0x80]


@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_scale_may_be_a_scalar_or_a_vector_of_one(shape):
    x = torch.randn(3, 8)
    q = ir.ops.static_quant_fp8(x, torch.full(shape, 0.02))
    assert torch.equal(codes_of(q), quantised(x, torch.tensor(0.02)))


def test_a_scalar_has_a_code():
    assert ir.ops.static_quant_fp8(torch.tensor(1.0), torch.ones(1)).view(torch.uint8).item() == 0x38


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_of_zeros_gets_the_smallest_scale_and_zeros(dtype):
    q, scale = ir.ops.dynamic_quant_fp8(torch.zeros(2, 8, dtype=dtype))
    assert torch.equal(scale, torch.full((2, 1), SMALLEST))
    assert torch.equal(codes_of(q), torch.zeros(2, 8, dtype=torch.uint8))


def test_rows_below_the_smallest_scale_use_it():
    x = torch.tensor([[448 * SMALLEST], [0.5 * 448 * SMALLEST], [1e-40]])
    q, scale = ir.ops.dynamic_quant_fp8(x)
    assert scale.flatten().tolist() == [torch.tensor(SMALLEST).item()] * 3
    assert q.flatten().tolist() == [448.0, 224.0, 0.0]


@pytest.mark.parametrize("shape", [(0, 64), (4, 0, 8), (3, 0), (0, 0), (0,)])
def test_tensors_without_elements_have_scales_for_their_rows(shape):
    q, scale = ir.ops.dynamic_quant_fp8(torch.zeros(shape))
    assert (q.shape, scale.shape) == (shape, (*shape[:-1], 1))
    assert torch.equal(scale, torch.full((*shape[:-1], 1), SMALLEST))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_makes_its_whole_row_nan_and_no_other(dtype):
    x = torch.randn(3, 8).to(dtype)
    clean = ir.ops.dynamic_quant_fp8(x)
    x[1, 5] = float("nan")
    q, scale = ir.ops.dynamic_quant_fp8(x)
    assert scale[1].isnan().all()
    assert q[1].float().isnan().all()
    for row in (0, 2):
        assert equal((q[row], scale[row]), (clean[0][row], clean[1][row]))


def test_an_infinity_leaves_zeros_beside_it():
    q, scale = ir.ops.dynamic_quant_fp8(torch.tensor([[1.0, float("inf"), -2.0], [1.0, 2.0, -4.0]]))
    assert scale.flatten().tolist() == [float("inf"), torch.tensor(4 / 448).item()]
    assert codes_of(q).tolist() == [[0, 0x7F, 0x80], [0x6E, 0x76, 0xFE]]


def test_the_largest_number_of_a_row_gets_the_largest_code():
    x = torch.randn(64, 32).bfloat16()
    q, _ = ir.ops.dynamic_quant_fp8(x)
    assert torch.equal(q.float().abs().amax(-1), torch.full((64,), 448.0))


# --- fused ops -------------------------------------------------------------------------------------------------------


def weights(hidden, dtype):
    return {"same": torch.randn(hidden).to(dtype), "float32": torch.randn(hidden), "none": None}


SCALE = torch.tensor([0.013])


def gated(name):
    return "_and_mul_" in name


def gate_of(name):
    return ir.ops.silu_and_mul if name.startswith("silu") else ir.ops.gelu_and_mul


def fused_and_parts(name, dtype, shape, weight):
    """A call of a fused op, and what the ops that it is made of give one after the other."""
    x, residual = (torch.randn(shape) * 2).to(dtype), torch.randn(shape).to(dtype)
    w = weights(shape[-1], dtype)[weight]
    static = "static" in name
    total = ()
    if gated(name):
        args, h = (x,), gate_of(name)(x)
    elif name.startswith("rms"):
        args, h = (x, w), ir.ops.rms_norm(x, w, EPSILON)
    else:
        args, (h, summed) = (x, residual, w), ir.ops.fused_add_rms_norm(x, residual, w, EPSILON)
        total = (summed,)
    assert h.dtype == dtype
    parts = (ir.ops.static_quant_fp8(h, SCALE),) if static else ir.ops.dynamic_quant_fp8(h)
    args += ((SCALE,) if static else ()) + (() if gated(name) else (EPSILON,))
    expected = (*parts, *total)
    return args, expected[0] if len(expected) == 1 else expected


@pytest.mark.parametrize("weight", ["same", "float32", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUSED)
def test_fused_ops_are_their_parts_bit_for_bit(name, dtype, weight):
    for shape in ((3, 64), (2, 3, 34), (7, 2), (0, 64), (4, 0, 8), (6,)):
        args, expected = fused_and_parts(name, dtype, shape, weight)
        op = getattr(ir.ops, name)
        for form in (op, op.torch_op, *([op.maybe_inplace, op.maybe_inplace.torch_op] if op.allow_inplace else [])):
            assert equal(form(*args), expected), (form, shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in FUSED if name.startswith("gelu")])
def test_gelu_may_be_the_one_by_tanh(name, dtype):
    x = torch.randn(3, 64).to(dtype)
    h = ir.ops.gelu_and_mul(x, "tanh")
    static = "static" in name
    expected = ir.ops.static_quant_fp8(h, SCALE) if static else ir.ops.dynamic_quant_fp8(h)
    assert equal(getattr(ir.ops, name)(x, *([SCALE] if static else []), "tanh"), expected)
    assert not torch.equal(h, ir.ops.gelu_and_mul(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FUSED)
def test_leaving_out_the_rounding_between_norm_and_codes_would_show(name, dtype):
    """A kernel that quantises float32 directly flips some codes: in bfloat16 more than one in a hundred."""
    args, _ = fused_and_parts(name, dtype, (64, 128), "same")
    rounded = getattr(ir.ops, name)(*args)
    wide = tuple(a.float() if isinstance(a, torch.Tensor) and a.dtype == dtype else a for a in args)
    if name.startswith("fused_add"):  # the sum is rounded in both
        wide = ((args[0] + args[1]).float(), torch.zeros(64, 128), *wide[2:])
    direct = getattr(ir.ops, name)(*wide)
    flipped = (codes_of(first(rounded)) != codes_of(first(direct))).double().mean().item()
    assert (0.01 if dtype == torch.bfloat16 else 0.001) < flipped < 0.2


def first(outputs):
    return outputs[0] if isinstance(outputs, tuple) else outputs


def exact_rows(name, args):
    """What is quantised, in float64 without any rounding."""
    wide = [a.double() if isinstance(a, torch.Tensor) else a for a in args]
    if gated(name):
        gate, up = wide[0].chunk(2, -1)
        share = 1 / (1 + torch.exp(-gate)) if name.startswith("silu") else (1 + torch.erf(gate / 2**0.5)) / 2
        return gate * share * up
    x = wide[0] + wide[1] if name.startswith("fused_add") else wide[0]
    weight = wide[2] if name.startswith("fused_add") else wide[1]
    return x / (x.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt() * weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUSED)
def test_fused_codes_are_within_one_code_of_exact_ones(name, dtype):
    args, _ = fused_and_parts(name, dtype, (16, 64), "same")
    outputs = getattr(ir.ops, name)(*args)
    exact = exact_rows(name, args)
    scale = SCALE if "static" in name else scales_of(exact)
    if "dynamic" in name:
        torch.testing.assert_close(outputs[1], scale, rtol=3 * torch.finfo(dtype).eps, atol=0)
    rank = [
        torch.where(c >= 0x80, 0x80 - c.int(), c.int()) for c in (codes_of(first(outputs)), quantised(exact, scale))
    ]
    assert (rank[0] - rank[1]).abs().max() <= 1


@pytest.mark.parametrize("name", [name for name in FUSED if name.startswith("fused_add")])
def test_the_sum_may_take_the_residuals_memory_and_nothing_else_is_overwritten(name):
    op = getattr(ir.ops, name)

    def kernel(*args):
        outputs = op.native(*args)
        args[1].copy_(outputs[-1])
        return *outputs[:-1], args[1]

    # an implementation has the op's own parameters
    namespace = {"kernel": kernel}
    parameters = ", ".join(op.signature.parameters)
    exec(f"def overwriting({parameters}): return kernel({parameters})", namespace)
    op.register_impl("overwriting", inplace=True)(namespace["overwriting"])
    try:
        args, expected = fused_and_parts(name, torch.bfloat16, (4, 64), "same")
        kept = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        with ir.priority({name: "overwriting"}), torch.no_grad():
            for _ in range(3):
                assert equal(op(*args), expected)
                assert all(a.equal(k) for a, k in zip(args, kept, strict=True) if isinstance(a, torch.Tensor))
            outputs = op.maybe_inplace(*args)
        assert equal(outputs, expected)
        assert outputs[-1] is args[1]
        others = [pair for place, pair in enumerate(zip(args, kept, strict=True)) if place not in (0, 1)]
        assert all(a.equal(k) for a, k in others if isinstance(a, torch.Tensor))
    finally:
        op.unregister_impl("overwriting")


# --- bad arguments ---------------------------------------------------------------------------------------------------


def arguments(name, **changes):
    """Good arguments of an op, with some changed."""
    op = getattr(ir.ops, name)
    values = dict(zip(op.signature.parameters, op.generate_inputs(shape=(4, 8)), strict=True))
    return values | changes


@pytest.mark.parametrize(
    "scale", [torch.ones(4), torch.ones(0), torch.ones(1, 2), torch.ones(1, dtype=torch.float64), torch.ones(1).half(),
              torch.ones(1, dtype=torch.int64), torch.ones(1).to(FP8)], ids=lambda s: f"{s.dtype}-{tuple(s.shape)}"
)  # fmt: skip
@pytest.mark.parametrize("name", STATIC)
def test_a_scale_that_is_not_one_float32_number_is_refused(name, scale):
    with pytest.raises(errors.ArgumentError, match=r"argument 'scale' must hold one float32 number, it has dtype"):
        getattr(ir.ops, name)(**arguments(name, scale=scale))


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_are_not_floating_point_are_refused(name, dtype):
    x = torch.ones(4, 8, dtype=dtype)
    changes = {"x": x, "x_residual": x} if name.startswith("fused_add") else {"x": x}
    with pytest.raises(errors.ArgumentError, match="argument 'x' must have a floating-point dtype"):
        getattr(ir.ops, name)(**arguments(name, **changes))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "static_quant_fp8"])
def test_a_scalar_is_no_row(name):
    x = torch.ones(())
    changes = {"x": x, "x_residual": x} if name.startswith("fused_add") else {"x": x}
    with pytest.raises(errors.ArgumentError, match=r"argument 'x' must|last dimension of argument 'x'"):
        getattr(ir.ops, name)(**arguments(name, **changes))


@pytest.mark.parametrize("name", [name for name in FUSED if not gated(name)])
def test_a_weight_that_is_not_as_long_as_a_row_is_refused(name):
    with pytest.raises(errors.ArgumentError, match="argument 'weight' must be a vector as long as a row"):
        getattr(ir.ops, name)(**arguments(name, weight=torch.ones(7)))


@pytest.mark.parametrize("name", [name for name in FUSED if name.startswith("fused_add")])
@pytest.mark.parametrize("residual", [torch.ones(4, 8).half(), torch.ones(1, 8)], ids=["dtype", "shape"])
def test_a_residual_unlike_the_rows_is_refused(name, residual):
    with pytest.raises(errors.ArgumentError, match="argument 'x_residual' has"):
        getattr(ir.ops, name)(**arguments(name, x_residual=residual))


@pytest.mark.parametrize("name", [name for name in FUSED if gated(name)])
def test_odd_rows_cannot_be_halved(name):
    with pytest.raises(errors.ArgumentError, match="even"):
        getattr(ir.ops, name)(**arguments(name, x=torch.ones(4, 7)))


@pytest.mark.parametrize("name", STATIC)
def test_a_scale_on_another_device_is_refused(name):
    with pytest.raises(errors.DeviceMismatchError, match="'scale' is on meta, but 'x' is on cpu"):
        getattr(ir.ops, name)(**arguments(name, scale=torch.ones(1, device="meta")))


# --- training --------------------------------------------------------------------------------------------------------


def leaves(args):
    return [
        a.detach().clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in args
    ]


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_native(name):
    """Rounding counts as the identity; the gradient of codes is rounded to float8, here it is exact there."""
    op = getattr(ir.ops, name)
    given = []
    for call in (op, op.native):
        args = leaves(arguments(name).values()) if not given else leaves(given[0])
        given.append(args)
        outputs = call(*args)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        total = sum((out.double() * (1 + torch.arange(out.numel()).view(out.shape) % 3)).sum() for out in outputs)
        total.backward()
    for a, b in zip(*given, strict=True):
        if isinstance(a, torch.Tensor):
            assert a.grad is not None
            assert torch.equal(a.grad, b.grad)


def test_rounding_counts_as_the_identity_and_clamping_as_a_stop():
    x = torch.tensor([[0.3, -7.77, 448.0, 449.0, -1e9]], requires_grad=True)
    scale = torch.tensor([0.5])
    codes = ir.ops.static_quant_fp8(x, scale)
    (codes.float() * torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0])).sum().backward()
    assert x.grad.tolist() == [[2.0, 4.0, 0.0, 0.0, 0.0]]


def test_gradients_of_codes_are_rounded_to_float8_as_torch_rounds_them():
    x = torch.ones(2, requires_grad=True)
    (ir.ops.static_quant_fp8(x, torch.ones(1)).float() * torch.tensor([0.3, 17.0])).sum().backward()
    assert x.grad.tolist() == torch.tensor([0.3, 17.0]).to(FP8).tolist()


def test_torch_adds_no_gradients_of_codes_that_are_used_twice():
    """torch's own limit, the same without IR ops: convert the codes once, and use what that gives."""
    for quantise in (ir.ops.static_quant_fp8, ir.ops.static_quant_fp8.native):
        x = torch.ones(2, requires_grad=True)
        q = quantise(x, torch.ones(1))
        with pytest.raises(NotImplementedError, match="not implemented for 'Float8_e4m3fn'"):
            (q.float() + q.float()).sum().backward()
        once = quantise(x, torch.ones(1)).float()
        (once + once).sum().backward()
        assert x.grad.tolist() == [2.0, 2.0]


def test_every_quantising_op_is_tested_here():
    families = ("", "rms_norm_", "fused_add_rms_norm_", "silu_and_mul_", "gelu_and_mul_")
    assert sorted(NAMES) == sorted(f"{f}{k}_quant_fp8" for f, k in itertools.product(families, ("static", "dynamic")))
