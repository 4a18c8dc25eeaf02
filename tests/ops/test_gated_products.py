"""Products with a gate, and products of codes: their parts bit for bit, and sums against float64."""

import pytest
import torch
import torch.nn.functional as F
from op_checks import DTYPES, check_compiled, check_compiled_gradients, check_derivatives, close, f64

import irframework as ir
from irframework import errors
from irframework.ops import scaled_projection

pytestmark = pytest.mark.usefixtures("natively")

FP8 = torch.float8_e4m3fn
SCALED = "scaled_linear_silu_and_mul_static_quant_fp8"
SHAPES = ((1, 1), (3, 33), (2, 3, 96), (0, 64), (4, 0, 8), (7,))


def codes(rows=5, columns=48, out=32, by_row=False):
    """x, weight and their scales."""
    x, weight = ((torch.randn(size, columns) * 8).to(FP8) for size in (rows, out))
    scales = (torch.rand(rows, 1), torch.rand(1, out)) if by_row else (torch.rand(1), torch.rand(()))
    return x, weight, *((0.5 + scale) / 32 for scale in scales)


def exact(x, weight, x_scale, weight_scale):
    return (x.double() * x_scale.double()) @ (weight.double().t() * weight_scale.double())


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_with_a_gate_is_its_parts_bit_for_bit(shape, dtype, biased):
    x, weight = torch.randn(shape).to(dtype), torch.randn(10, shape[-1]).to(dtype)
    bias = torch.randn(10).to(dtype) if biased else None
    got = ir.ops.linear_silu_and_mul(x, weight, bias)
    assert torch.equal(got, ir.ops.silu_and_mul(ir.ops.linear(x, weight, bias)))
    h = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    close(got, F.silu(h[..., :5]) * h[..., 5:], dtype, ulps=64)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"x": torch.ones(2, 4).long()}, "'x' must have a floating-point"),
        ({"x": torch.ones(())}, "scalar"),
        ({"weight": torch.ones(7, 4)}, "'weight' holds the rows of the gate .* must be even; it has shape \\(7, 4\\)"),
        ({"weight": torch.ones(6, 5)}, "'weight' must be a matrix with rows as long as those of 'x', 4"),
        ({"weight": torch.ones(6)}, "'weight' must be a matrix"),
        ({"bias": torch.ones(5)}, "'bias' must be a vector as long as 'weight' has rows, 6"),
    ],
)
def test_a_product_with_a_gate_names_the_argument_that_does_not_fit(wrong, problem):
    good = {"x": torch.ones(2, 4), "weight": torch.ones(6, 4), "bias": torch.ones(6)}
    ir.ops.linear_silu_and_mul(**good)
    with pytest.raises(errors.ArgumentError, match=f"^Op 'linear_silu_and_mul': .*{problem}"):
        ir.ops.linear_silu_and_mul(**good | wrong)


# --- codes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("sizes", [(5, 48, 32), (1, 16, 16), (3, 33, 7), (4, 0, 8)])
def test_a_product_of_codes_is_exact_to_a_rounding(sizes, by_row, dtype):
    given = codes(*sizes, by_row=by_row)
    for fast in (True, False):
        close(ir.ops.scaled_linear(*given, dtype, fast), exact(*given), dtype, ulps=32 if dtype == torch.float32 else 1)


@pytest.mark.parametrize("by_row", [False, True])
def test_a_product_of_codes_is_torchs(by_row):
    x, weight, a, b = given = codes(by_row=by_row)
    want = torch._scaled_mm(x, weight.t(), a, b, out_dtype=torch.bfloat16, use_fast_accum=True)
    assert torch.equal(ir.ops.scaled_linear(*given), want)


@pytest.mark.parametrize("by_row", [False, True])
def test_empty_rows_have_a_product_of_zeros(by_row):
    """Of which torch (2.13) returns memory as it finds it on CPUs."""
    for number in range(1, 20):
        used = torch.full((5, 32), float(number))
        del used
        assert torch.equal(ir.ops.scaled_linear(*codes(5, 0, by_row=by_row), torch.float32), torch.zeros(5, 32))


@pytest.mark.parametrize("by_row", [False, True])
def test_no_rows_have_a_product_of_no_rows(by_row):
    """Of which torch (2.13) has none on CPUs."""
    assert ir.ops.scaled_linear(*codes(0, by_row=by_row)).shape == (0, 32)
    q = getattr(ir.ops, SCALED)(*codes(0, by_row=by_row), torch.ones(1))
    assert (q.shape, q.dtype) == ((0, 16), FP8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("by_row", [False, True])
def test_a_product_of_codes_that_ends_in_codes_is_its_parts_bit_for_bit(by_row, dtype):
    given, scale = codes(by_row=by_row), torch.tensor([0.03])
    for fast in (True, False):
        h = ir.ops.scaled_linear(*given, dtype, fast)
        want = ir.ops.static_quant_fp8(ir.ops.silu_and_mul(h), scale)
        got = getattr(ir.ops, SCALED)(*given, scale, dtype, fast)
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_scales_of_a_product_of_codes_have_the_gradients_of_the_numbers_that_they_scale():
    x, weight, *scales = codes(by_row=True)
    ours, theirs = ([each.clone().requires_grad_() for each in scales] for _ in range(2))
    y = ir.ops.scaled_linear(x, weight, *ours, torch.float32)
    factor = torch.randn_like(y)
    (y * factor).sum().backward()
    (exact(x, weight, *theirs) * factor).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [0, 5])
@pytest.mark.parametrize("differentiable", [False, True])
def test_one_number_is_a_scale_in_any_number_of_dimensions(rows, differentiable):
    x, weight, *scales = codes(rows)
    want = ir.ops.scaled_linear(x, weight, *scales, torch.float32)
    scales = [each.detach().reshape(1, 1, 1).requires_grad_(differentiable) for each in scales]
    got = ir.ops.scaled_linear(x, weight, *scales, torch.float32)
    torch.testing.assert_close(got, want, check_stride=True)


def test_codes_and_scales_may_lie_anywhere():
    x, weight, *scales = given = codes(5, 33, 7)
    want = ir.ops.scaled_linear(*given)
    for far in (
        (torch.stack((x, x), -1)[..., 1], weight, *scales),
        (x, weight.t().contiguous().t(), *scales),
        (torch.cat((x[:1], x), 0)[1:], torch.cat((weight[:1], weight), 0)[1:], *scales),
        (x[:1].expand(5, 33), weight[:, :1].expand(7, 33), *scales),
        (x, weight, *(torch.stack((each.view(1),) * 2)[1] for each in scales)),
    ):
        assert torch.equal(ir.ops.scaled_linear(*far), ir.ops.scaled_linear(*(each.clone() for each in far)))
        for each in far[:2]:
            laid = scaled_projection._as_multiplied(each)
            assert torch.equal(laid.float(), each.float())
            assert laid.stride(1) == 1
            assert laid.stride(0) >= 33
            assert laid.storage_offset() % 16 == 0
        for each in far[2:]:
            assert scaled_projection._begun_with(each).storage_offset() % 4 == 0
    assert ir.ops.scaled_linear(*given).equal(want)


def test_what_lies_as_torch_wants_it_is_not_copied():
    x, weight, x_scale, weight_scale = codes(5, 32, 16, by_row=True)
    for each in (x, weight, x[1:], torch.zeros(4, 48).to(FP8)[:, 16:]):
        assert scaled_projection._as_multiplied(each) is each
    for each in (x_scale, weight_scale, x_scale[4:]):
        assert scaled_projection._begun_with(each) is each


def test_torch_multiplies_codes_on_gpus_in_multiples_of_16_only():
    for columns, out, can in ((32, 16, True), (33, 16, False), (32, 8, False), (0, 16, False)):
        given = [each.to("meta") for each in codes(0, columns, out)]
        assert scaled_projection._torch_multiplies(*given) is can


WRONG = [
    ({"x": torch.ones(2, 16)}, "'x' must be a matrix of float8_e4m3fn, it has dtype torch.float32"),
    ({"x": torch.ones(2, 3, 16).to(FP8)}, "'x' must be a matrix of float8_e4m3fn.*\\(2, 3, 16\\)"),
    ({"weight": torch.ones(6, 16).to(torch.float8_e5m2)}, "'weight' must be a matrix of float8_e4m3fn"),
    ({"weight": torch.ones(6, 15).to(FP8)}, "'weight' must have rows as long as those of 'x', 16"),
    ({"x_scale": torch.ones(1).half()}, "'x_scale' must have dtype float32"),
    ({"weight_scale": torch.ones(1).long()}, "'weight_scale' must have dtype float32"),
    ({"x_scale": torch.ones(2, 1)}, "must hold one number each, or be \\[2, 1\\] and \\[1, 6\\]"),
    ({"weight_scale": torch.ones(1, 6)}, "must hold one number each"),
    ({"x_scale": torch.ones(2), "weight_scale": torch.ones(6)}, "must hold one number each"),
    ({"dtype": torch.float64}, "dtype must be bfloat16, float16 or float32, got torch.float64"),
    ({"x_scale": torch.zeros(1)}, "'x_scale' holds 0.0"),
    ({"weight_scale": torch.full((1,), float("nan"))}, "'weight_scale' holds nan"),
]


@pytest.mark.parametrize("name", ["scaled_linear", SCALED])
@pytest.mark.parametrize(("wrong", "problem"), WRONG)
def test_products_of_codes_name_the_argument_that_does_not_fit(name, wrong, problem):
    one = torch.ones(1)
    good = {"x": torch.ones(2, 16).to(FP8), "weight": torch.ones(6, 16).to(FP8), "x_scale": one, "weight_scale": one}
    good |= {"scale": one} if name == SCALED else {}
    op = getattr(ir.ops, name)
    op(**good)
    with torch.no_grad(), pytest.raises(errors.ArgumentError, match=f"^Op '{name}': .*{problem}"):
        op(**good | wrong)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"weight": torch.ones(7, 16).to(FP8)}, "'weight' holds the rows of the gate .* must be even"),
        ({"scale": torch.ones(2)}, "'scale' must hold one float32 number"),
        ({"scale": torch.zeros(1)}, "'scale' holds 0.0"),
    ],
)
def test_what_ends_in_codes_names_its_own_arguments_too(wrong, problem):
    one = torch.ones(1)
    good = {"x": torch.ones(2, 16).to(FP8), "weight": torch.ones(6, 16).to(FP8), "x_scale": one, "weight_scale": one}
    with pytest.raises(errors.ArgumentError, match=f"^Op '{SCALED}': .*{problem}"):
        getattr(ir.ops, SCALED)(**good | {"scale": one} | wrong)


# --- all of them -----------------------------------------------------------------------------------------------------


def test_first_and_second_derivatives_are_right():
    check_derivatives(ir.ops.linear_silu_and_mul, (f64(2, 4), f64(6, 4), f64(6)))


def test_one_graph_serves_any_number_of_tokens():
    check_compiled(("linear_silu_and_mul", "scaled_linear", SCALED))


def test_gradients_through_a_graph_are_those_of_eager_mode():
    check_compiled_gradients(["linear_silu_and_mul"])
