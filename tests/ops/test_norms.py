"""Gemma's norm and layer norm: against float64 written out by hand, and the modules that models use."""

import math

import pytest
import torch
import torch.nn.functional as F
from op_checks import DTYPES, check_compiled, check_compiled_gradients, check_derivatives, close, f64

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("natively")

NAMES = ("gemma_rms_norm", "fused_add_gemma_rms_norm", "layer_norm", "fused_add_layer_norm")
SHAPES = ((1, 1), (3, 3), (2, 3, 96), (5, 33), (0, 64), (4, 0, 8), (7,))
EPSILON = 1e-5


def exact_gemma(x, weight):
    rows = x.double().reshape(-1, x.shape[-1])
    out = [row / math.sqrt(sum(float(v) ** 2 for v in row) / len(row) + EPSILON) for row in rows]
    normed = torch.stack(out) if out else rows
    return (normed * (1 + weight.double())).reshape(x.shape)


def exact_layer_norm(x, weight, bias):
    rows = x.double().reshape(-1, x.shape[-1])
    out = []
    for row in rows:
        mean = sum(row.tolist()) / len(row)
        variance = sum((v - mean) ** 2 for v in row.tolist()) / len(row)
        out.append((row - mean) / math.sqrt(variance + EPSILON))
    normed = (torch.stack(out) if out else rows).reshape(x.shape)
    normed = normed if weight is None else normed * weight.double()
    return normed if bias is None else normed + bias.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gemma_rms_norm_is_exact_to_a_rounding(dtype, shape):
    x, weight = torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    exact = exact_gemma(x, weight)
    close(ir.ops.gemma_rms_norm(x, weight, EPSILON), exact, dtype, ulps=8 if dtype == torch.float64 else 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gemma_rms_norm_is_the_models_bit_for_bit(dtype):
    gemma = pytest.importorskip("transformers.models.gemma.modeling_gemma")
    norm = gemma.GemmaRMSNorm(96, eps=EPSILON).to(dtype)
    with torch.no_grad():
        norm.weight.normal_()
        x = torch.randn(2, 5, 96).to(dtype)
        assert torch.equal(ir.ops.gemma_rms_norm(x, norm.weight, EPSILON), norm(x))


def test_gemma_rms_norm_of_float64_rows_keeps_a_smaller_weights_digits():
    x, weight = torch.randn(3, 16, dtype=torch.float64), torch.randn(16)
    close(ir.ops.gemma_rms_norm(x, weight, EPSILON), exact_gemma(x, weight), torch.float64, ulps=8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize("given", ["weight and bias", "weight", "bias", "neither"])
def test_layer_norm_is_exact_to_roundings(dtype, shape, given):
    x = torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype) if "weight" in given else None
    bias = torch.randn(shape[-1]).to(dtype) if "bias" in given else None
    close(ir.ops.layer_norm(x, weight, bias, EPSILON), exact_layer_norm(x, weight, bias), dtype, ulps=16)


def test_layer_norm_of_rows_of_one_element_is_the_bias():
    x, weight, bias = torch.randn(3, 1), torch.randn(1), torch.randn(1)
    assert torch.equal(ir.ops.layer_norm(x, weight, bias, EPSILON), bias.expand(3, 1))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_layer_norm_is_torchs(dtype):
    x, weight, bias = torch.randn(4, 32, dtype=dtype), torch.randn(32, dtype=dtype), torch.randn(32, dtype=dtype)
    expected = F.layer_norm(x, (32,), weight, bias, EPSILON)
    torch.testing.assert_close(ir.ops.layer_norm(x, weight, bias, EPSILON), expected)


@pytest.mark.parametrize("parameters", [torch.bfloat16, torch.float32])
def test_layer_norm_in_half_precision_rounds_once(parameters):
    x, weight, bias = torch.randn(4, 32).bfloat16(), torch.randn(32).to(parameters), torch.randn(32).to(parameters)
    expected = F.layer_norm(x.float(), (32,), weight.float(), bias.float(), EPSILON).bfloat16()
    assert torch.equal(ir.ops.layer_norm(x, weight, bias, EPSILON), expected)


def test_layer_norm_far_from_zero_keeps_its_digits():
    x = torch.randn(4, 64) + 1000
    close(ir.ops.layer_norm(x, None, None, EPSILON), exact_layer_norm(x, None, None), torch.float32, ulps=1000)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("norm", ["gemma_rms_norm", "layer_norm"])
def test_fused_norms_are_the_sum_and_its_norm_bit_for_bit(dtype, shape, norm):
    x, r = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    parameters = [torch.randn(shape[-1]).to(dtype) for _ in range(2 if norm == "layer_norm" else 1)]
    fused = getattr(ir.ops, f"fused_add_{norm}")
    for form in (fused, fused.maybe_inplace):
        y, total = form(x, r, *parameters, EPSILON)
        assert torch.equal(total, x + r)
        assert torch.equal(y, getattr(ir.ops, norm)(x + r, *parameters, EPSILON))


@pytest.mark.parametrize("name", ["gemma_rms_norm", "layer_norm"])
def test_large_values_in_half_precision_do_not_overflow(name):
    x = torch.tensor([60000.0, -60000.0]).repeat(2, 32).half()
    parameters = (torch.zeros(64),) if name == "gemma_rms_norm" else (None, None)
    assert torch.equal(getattr(ir.ops, name)(x, *parameters, EPSILON), x.sign())


def arguments(name, x=None, r=None, weight=None, bias=None):
    x = torch.randn(2, 4) if x is None else x
    made = [x] if "fused" not in name else [x, torch.zeros_like(x) if r is None else r]
    made.append(torch.ones(4) if weight is None else weight)
    if "layer_norm" in name:
        made.append(torch.ones(4) if bias is None else bias)
    return *made, EPSILON


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"x": torch.ones(2, 4, dtype=torch.int64)}, "'x' must have a floating-point"),
        ({"x": torch.ones(())}, "scalar"),
        ({"weight": torch.ones(4).long()}, "'weight' must have a floating-point"),
        ({"weight": torch.ones(3)}, "'weight' must be a vector as long as a row"),
        ({"weight": torch.ones(1, 4)}, "'weight' must be a vector as long as a row"),
    ],
)
def test_norms_name_the_argument_that_does_not_fit(name, wrong, problem):
    with pytest.raises(errors.ArgumentError, match=f"{name}.*{problem}"):
        getattr(ir.ops, name)(*arguments(name, **wrong))


@pytest.mark.parametrize("name", ["layer_norm", "fused_add_layer_norm"])
@pytest.mark.parametrize("bias", [torch.ones(4).bool(), torch.ones(5)])
def test_layer_norms_name_a_bias_that_does_not_fit(name, bias):
    with pytest.raises(errors.ArgumentError, match=f"{name}.*'bias'"):
        getattr(ir.ops, name)(*arguments(name, bias=bias))


@pytest.mark.parametrize("name", ["fused_add_gemma_rms_norm", "fused_add_layer_norm"])
@pytest.mark.parametrize("residual", [torch.ones(2, 4).half(), torch.ones(1, 4)])
def test_fused_norms_need_equal_operands(name, residual):
    with pytest.raises(errors.ArgumentError, match=f"{name}.*'x_residual' has"):
        getattr(ir.ops, name)(*arguments(name, r=residual))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own rules use it
@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("gemma_rms_norm", lambda: (f64(2, 6), f64(6), EPSILON)),
        ("fused_add_gemma_rms_norm", lambda: (f64(2, 6), f64(2, 6), f64(6), EPSILON)),
        ("layer_norm", lambda: (f64(2, 6), f64(6), f64(6), EPSILON)),
        ("layer_norm", lambda: (f64(2, 6), None, f64(6), EPSILON)),
        ("layer_norm", lambda: (f64(2, 6), f64(6), None, EPSILON)),
        ("layer_norm", lambda: (f64(2, 6), None, None, EPSILON)),
        ("fused_add_layer_norm", lambda: (f64(2, 6), f64(2, 6), f64(6), f64(6), EPSILON)),
    ],
)
def test_first_and_second_derivatives_are_right(name, make):
    check_derivatives(getattr(ir.ops, name), make())


def test_one_graph_serves_any_number_of_rows():
    check_compiled(NAMES)


def test_gradients_through_a_graph_are_those_of_eager_mode():
    check_compiled_gradients(NAMES)
