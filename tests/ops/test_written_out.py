"""The ops whose meaning is a model's own lines: against float64 by hand, and bit for bit against the models."""

import math
from types import SimpleNamespace

import pytest
import torch
from op_checks import DTYPES, check_compiled, check_compiled_gradients, check_derivatives, close, f64

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("natively")

NAMES = ("silu_mul", "gelu_mul", "apply_rotary_pos_emb")
SHAPES = ((1, 1), (2, 3, 48), (5, 33), (0, 64), (8,), ())


def model_of(name):
    """The module of a family of models in transformers."""
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


def angles(batch, tokens, size, dtype=torch.float32):
    at = torch.randn(batch, tokens, size // 2).repeat(1, 1, 2)
    return at.cos().to(dtype), at.sin().to(dtype)


# --- gates -----------------------------------------------------------------------------------------------------------


def exact_gate(name, gate, up, approximate="none"):
    gate, up = gate.double(), up.double()
    if name == "silu_mul":
        return gate / (1 + torch.exp(-gate)) * up
    if approximate == "none":
        return gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
    return gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up


GATES = (("silu_mul", ()), ("gelu_mul", ()), ("gelu_mul", ("none",)), ("gelu_mul", ("tanh",)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "words"), GATES)
def test_gates_are_exact_to_roundings(name, words, shape, dtype):
    gate, up = (torch.randn(shape).to(dtype) for _ in range(2))
    got = getattr(ir.ops, name)(gate, up, *words)
    exact = exact_gate(name, gate, up, *words)
    if not shape:
        got, exact = got[None], exact[None]
    close(got, exact, dtype, ulps=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "words", "family", "mlp", "activation"),
    [
        ("silu_mul", (), "llama", "LlamaMLP", {"hidden_act": "silu"}),
        ("gelu_mul", ("tanh",), "gemma2", "Gemma2MLP", {"hidden_activation": "gelu_pytorch_tanh"}),
        ("gelu_mul", ("none",), "gemma3", "Gemma3MLP", {"hidden_activation": "gelu"}),
    ],
)
def test_gates_are_a_models_lines_bit_for_bit(name, words, family, mlp, activation, dtype):
    module = getattr(model_of(family), mlp)
    module = module(SimpleNamespace(hidden_size=24, intermediate_size=48, mlp_bias=False, **activation)).to(dtype)
    x = torch.randn(2, 5, 24).to(dtype)
    with torch.no_grad():
        got = module.down_proj(getattr(ir.ops, name)(module.gate_proj(x), module.up_proj(x), *words))
        assert torch.equal(got, module(x))


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
@pytest.mark.parametrize("up", [torch.ones(2, 4).half(), torch.ones(1, 4), torch.ones(4), torch.ones(2, 4, 1)])
def test_gate_and_up_must_be_alike(name, up):
    with pytest.raises(errors.ArgumentError, match=f"{name}.*'gate' and 'up' must have the same shape and dtype"):
        getattr(ir.ops, name)(torch.ones(2, 4), up)


def test_gelu_mul_knows_two_approximations():
    with pytest.raises(errors.ArgumentError, match="'none' or 'tanh', got 'quick'"):
        ir.ops.gelu_mul(torch.ones(2), torch.ones(2), "quick")


# --- rotary ----------------------------------------------------------------------------------------------------------


def turned(x, cos, sin):
    """In float64, one element at a time."""
    out, half = torch.empty(x.shape, dtype=torch.float64), x.shape[-1] // 2
    for batch in range(x.shape[0]):
        c, s = (part.double()[batch if part.shape[0] > 1 else 0] for part in (cos, sin))
        for d in range(x.shape[-1]):
            other = x[batch, :, :, d + half] if d < half else x[batch, :, :, d - half]
            sign = -1 if d < half else 1
            out[batch, :, :, d] = x[batch, :, :, d].double() * c[:, None, d] + sign * other.double() * s[:, None, d]
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "batch"),
    [((1, 1, 1, 2), 1), ((2, 5, 3, 16), 1), ((2, 5, 3, 16), 2), ((0, 3, 2, 8), 1), ((1, 0, 2, 8), 1)],
)
def test_heads_are_turned_exactly_to_roundings(shape, batch, dtype):
    x = torch.randn(shape).to(dtype)
    cos, sin = angles(batch, shape[1], shape[3], dtype)
    close(ir.ops.apply_rotary_pos_emb(x, cos, sin), turned(x, cos, sin), dtype, ulps=4)


@pytest.mark.parametrize(
    ("family", "angles_dtype"),
    [("llama", None), ("qwen3", None), ("gemma2", None), ("olmo2", None), ("olmo2", torch.float32)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("batch", [1, 2])
def test_heads_are_turned_as_models_do_bit_for_bit(family, angles_dtype, dtype, batch):
    q, k = (torch.randn(2, 5, heads, 16).to(dtype) for heads in (4, 2))
    cos, sin = angles(batch, 5, 16, angles_dtype or dtype)
    wanted = model_of(family).apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    for x, model in zip((q, k), wanted, strict=True):
        assert torch.equal(ir.ops.apply_rotary_pos_emb(x, cos, sin), model.transpose(1, 2))


def test_angles_of_another_dtype_are_not_rounded_to_that_of_the_heads():
    x = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16)
    cos, sin = torch.tensor([1.00390625 + 2**-10, 1.0]), torch.tensor([0.0, 0.0])
    got = ir.ops.apply_rotary_pos_emb(x, cos[None, None], sin[None, None])
    assert got.flatten().tolist() == [1.0078125, 1.0]


def test_products_are_rounded_before_they_are_added():
    x = torch.tensor([1.0078125, -1.0], dtype=torch.bfloat16).reshape(1, 1, 1, 2)
    cos = torch.tensor([1.0078125, 1.0], dtype=torch.bfloat16).reshape(1, 1, 2)
    got = ir.ops.apply_rotary_pos_emb(x, cos, torch.full_like(cos, -1.015625))
    # 1.0078125 * 1.0078125 rounds to 1.015625, from which the other product takes all; unrounded, 6.1e-05 is left.
    assert got[..., 0].item() == 0.0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"x": torch.ones(2, 3, 4, 8).long()}, "'x' must have a floating-point dtype"),
        ({"cos": torch.ones(2, 3, 8).long()}, "'cos' must have a floating-point dtype"),
        ({"x": torch.ones(2, 3, 8)}, r"'x' must be \[batch, tokens, heads, head_size\]"),
        ({"x": torch.ones(2, 3, 4, 4)}, "must be"),
        ({"x": torch.ones(2, 4, 3, 8)}, "must be"),
        ({"x": torch.ones(3, 3, 4, 8)}, "must be"),
        ({"cos": torch.ones(2, 3, 8).half()}, "of one dtype"),
        ({"cos": torch.ones(1, 3, 8)}, "must be"),
        ({"cos": torch.ones(2, 1, 3, 8), "sin": torch.ones(2, 1, 3, 8)}, "must be"),
        ({"x": torch.ones(2, 3, 4, 7), "cos": torch.ones(2, 3, 7), "sin": torch.ones(2, 3, 7)}, "even head_size"),
    ],
)
def test_heads_and_angles_that_do_not_fit_are_refused(change, problem):
    good = {"x": torch.ones(2, 3, 4, 8), "cos": torch.ones(2, 3, 8), "sin": torch.ones(2, 3, 8)}
    ir.ops.apply_rotary_pos_emb(**good)
    with pytest.raises(errors.ArgumentError, match=f"apply_rotary_pos_emb.*{problem}"):
        ir.ops.apply_rotary_pos_emb(**good | change)


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_gates_that_are_not_floating_point_are_refused(name, dtype):
    gate = torch.ones(2, 4, dtype=dtype)
    with pytest.raises(errors.ArgumentError, match=f"{name}.*'gate' must have a floating-point dtype"):
        getattr(ir.ops, name)(gate, gate)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("silu_mul", (f64(2, 6), f64(2, 6))),
        ("gelu_mul", (f64(2, 6), f64(2, 6))),
        ("gelu_mul", (f64(2, 6), f64(2, 6), "tanh")),
        ("apply_rotary_pos_emb", (f64(2, 2, 2, 4), f64(1, 2, 4), f64(1, 2, 4))),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own rules use it
def test_first_and_second_derivatives_are_right(name, arguments):
    check_derivatives(getattr(ir.ops, name), arguments)


def test_one_graph_serves_any_number_of_rows():
    check_compiled(NAMES)


def test_gradients_through_a_graph_are_those_of_eager_mode():
    check_compiled_gradients(NAMES)
