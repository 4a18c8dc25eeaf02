"""The gated norms: against float64 written out by hand, and the modules that models use."""

import math

import pytest
import torch
from op_checks import DTYPES, check_compiled, check_compiled_gradients, check_derivatives, close, f64

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("natively")

NAMES = ("rms_norm_gated", "mixer2_gated_rms_norm")
EPSILON = 1e-5


def opened(gate, activation):
    sigmoid = 1 / (1 + torch.exp(-gate.double()))
    return sigmoid if activation == "sigmoid" else gate.double() * sigmoid


def exact_norm(x, size):
    """Norm every group of every row, one at a time."""
    out = x.double().clone()
    for row in out.view(-1, x.shape[-1]):
        for start in range(0, x.shape[-1], size):
            group = row[start : start + size]
            group /= math.sqrt(sum(v * v for v in group.tolist()) / size + EPSILON)
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize(("shape", "size"), [((2, 3, 96), 32), ((5, 33), None), ((4, 8), 1), ((0, 64), 16), ((6,), 3)])
def test_rms_norm_gated_is_exact_to_roundings(dtype, activation, norm_before_gate, shape, size):
    x, gate, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    factor = opened(gate, activation)
    if norm_before_gate:
        exact = exact_norm(x, size or shape[-1]) * weight.double() * factor
    else:
        exact = exact_norm(x.double() * factor, size or shape[-1]) * weight.double()
    got = ir.ops.rms_norm_gated(x, gate, weight, EPSILON, size, norm_before_gate, activation)
    close(got, exact, dtype, ulps=12 if dtype in (torch.float64, torch.float32) else 2)


def test_rms_norm_gated_without_gate_and_weight_is_the_norm_of_groups():
    x = torch.randn(3, 12)
    for before in (True, False):
        close(ir.ops.rms_norm_gated(x, None, None, EPSILON, 4, before), exact_norm(x, 4), torch.float32, ulps=8)


def test_rms_norm_gated_is_qwens():
    qwen = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    norm = qwen.Qwen3NextRMSNormGated(32, eps=EPSILON)
    with torch.no_grad():
        norm.weight.normal_()
        x, gate = torch.randn(4, 32), torch.randn(4, 32)
        torch.testing.assert_close(ir.ops.rms_norm_gated(x, gate, norm.weight, EPSILON), norm(x, gate))


def test_rms_norm_gated_by_a_sigmoid_is_kimis_bit_for_bit():
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    norm = kimi.KimiLinearRMSNormGated(32, eps=EPSILON).bfloat16()
    with torch.no_grad():
        norm.weight.normal_()
        x, gate = torch.randn(4, 32).bfloat16(), torch.randn(4, 32).bfloat16()
        got = ir.ops.rms_norm_gated(x, gate, norm.weight, EPSILON, activation="sigmoid")
        assert torch.equal(got, norm(x, gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 16])
@pytest.mark.parametrize("gated", [True, False])
def test_mixer2_gated_rms_norm_is_mamba2s_bit_for_bit(dtype, size, gated):
    mamba2 = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    norm = mamba2.MambaRMSNormGated(64, size, eps=EPSILON).to(dtype)
    with torch.no_grad():
        norm.weight.normal_()
        x, gate = torch.randn(2, 5, 64).to(dtype), torch.randn(2, 5, 64).to(dtype) if gated else None
        got = ir.ops.mixer2_gated_rms_norm(x, gate, norm.weight, EPSILON, size)
        assert torch.equal(got, norm(x, gate))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "size"), [((2, 3, 96), 32), ((5, 33), None), ((0, 64), 16)])
def test_mixer2_gated_rms_norm_is_exact_to_roundings(dtype, shape, size):
    x, gate, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    exact = exact_norm(x.double() * opened(gate, "silu"), size or shape[-1]) * weight.double()
    got = ir.ops.mixer2_gated_rms_norm(x, gate, weight, EPSILON, size)
    close(got, exact, dtype, ulps=12 if dtype in (torch.float64, torch.float32) else 3)


def test_mixer2_gated_rms_norm_keeps_the_dtype_of_x():
    x = torch.randn(3, 8).bfloat16()
    assert ir.ops.mixer2_gated_rms_norm(x, x.float(), torch.randn(8), EPSILON).dtype == torch.bfloat16


def test_processes_that_hold_whole_groups_norm_them_alone():
    x, gate, weight = torch.randn(3, 64), torch.randn(3, 64), torch.randn(64)
    whole = ir.ops.mixer2_gated_rms_norm(x, gate, weight, EPSILON, 16)
    parts = [
        ir.ops.mixer2_gated_rms_norm(*shard, EPSILON, 16)
        for shard in zip(x.chunk(2, -1), gate.chunk(2, -1), weight.chunk(2), strict=True)
    ]
    assert torch.equal(torch.cat(parts, -1), whole)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"x": torch.ones(2, 6).long()}, "'x' must have a floating-point"),
        ({"x": torch.ones(())}, "scalar"),
        ({"gate": torch.ones(2, 6).long()}, "'gate' must have a floating-point"),
        ({"gate": torch.ones(1, 6)}, "'gate' has shape"),
        ({"gate": torch.ones(6)}, "'gate' has shape"),
        ({"weight": torch.ones(5)}, "'weight' must be a vector"),
        ({"weight": torch.ones(6).int()}, "'weight' must have a floating-point"),
        ({"group_size": 4}, "group_size=4 .*divide.* 6"),
        ({"group_size": 0}, "group_size=0"),
        ({"group_size": -3}, "group_size=-3"),
    ],
)
def test_gated_norms_name_the_argument_that_does_not_fit(name, wrong, problem):
    good = {"x": torch.ones(2, 6), "gate": torch.ones(2, 6), "weight": torch.ones(6), "epsilon": EPSILON}
    with pytest.raises(errors.ArgumentError, match=f"{name}.*{problem}"):
        getattr(ir.ops, name)(**good | wrong)


def test_rms_norm_gated_knows_two_activations():
    with pytest.raises(errors.ArgumentError, match="'silu' or 'sigmoid', got 'swish'"):
        ir.ops.rms_norm_gated(torch.ones(2, 6), None, None, EPSILON, activation="swish")


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own rules use it
@pytest.mark.parametrize(
    ("name", "rest"),
    [
        ("rms_norm_gated", (EPSILON, 3)),
        ("rms_norm_gated", (EPSILON, None, False, "sigmoid")),
        ("mixer2_gated_rms_norm", (EPSILON, 3)),
    ],
)
def test_first_and_second_derivatives_are_right(name, rest):
    check_derivatives(getattr(ir.ops, name), (f64(2, 6), f64(2, 6), f64(6), *rest))


def test_one_graph_serves_any_number_of_rows():
    check_compiled(NAMES)


def test_gradients_through_a_graph_are_those_of_eager_mode():
    check_compiled_gradients(NAMES)
