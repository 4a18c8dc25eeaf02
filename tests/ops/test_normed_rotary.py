"""Norms of heads before the rotary embedding: against float64 by hand, its parts, and Qwen3."""

import math

import pytest
import torch
from op_checks import DTYPES, check_compiled, check_derivatives, close, f64
from torch.testing import assert_close

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("natively")


def table(dim, dtype=torch.float64, rows=24):
    angle = torch.outer(torch.arange(rows).double(), 100.0 ** (-torch.arange(0, dim, 2).double() / dim))
    return torch.cat((angle.cos(), angle.sin()), -1).to(dtype)


def exact(positions, x, weight, cos_sin, head_size, epsilon, neox):
    """One head after the other, in Python's floats."""
    if not x.numel():
        return x.double()
    rows, half = [], cos_sin.shape[-1] // 2
    for position, token in zip(positions.flatten().tolist(), x.double().reshape(positions.numel(), -1), strict=True):
        for head in token.reshape(-1, head_size).tolist():
            root = math.sqrt(sum(e * e for e in head) / head_size + epsilon)
            scale = [1.0] * head_size if weight is None else weight.double().tolist()
            head = [e / root * w for e, w in zip(head, scale, strict=True)]
            angle = cos_sin[position].double().tolist()
            for pair in range(half):
                i, j = (pair, half + pair) if neox else (2 * pair, 2 * pair + 1)
                c, s = angle[pair], angle[half + pair]
                head[i], head[j] = head[i] * c - head[j] * s, head[j] * c + head[i] * s
            rows.append(head)
    return torch.tensor(rows, dtype=torch.float64).reshape(x.shape)


def case(dtype=torch.float32, lead=(5,), heads=(4, 2), size=8, rotary=8, apart=False):
    tails = [(h, size) if apart else (h * size,) for h in heads]
    q, k = (torch.randn(*lead, *tail).to(dtype) for tail in tails)
    weights = [(1 + 0.2 * torch.randn(size)).to(dtype) for _ in range(2)]
    return torch.randint(0, 24, lead), q, k, *weights, table(rotary, dtype), size, 1e-5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary", [8, 4])
def test_heads_are_normed_then_turned(dtype, neox, rotary):
    positions, q, k, wq, wk, cos_sin, size, epsilon = case(dtype, rotary=rotary)
    got = ir.ops.qk_norm_rotary_embedding(positions, q, k, wq, wk, cos_sin, size, epsilon, neox)
    for out, x, weight in zip(got, (q, k), (wq, wk), strict=True):
        close(out, exact(positions, x, weight, cos_sin, size, epsilon, neox), dtype, ulps=4)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("lead", [(6,), (2, 3), (0,), (2, 0), ()])
def test_any_leading_dimensions_and_both_layouts_of_heads(lead, apart):
    positions, q, k, wq, wk, cos_sin, size, epsilon = case(torch.float64, lead, apart=apart)
    got = ir.ops.qk_norm_rotary_embedding(positions, q, k, wq, wk, cos_sin, size, epsilon)
    for out, x, weight in zip(got, (q, k), (wq, wk), strict=True):
        close(out, exact(positions, x, weight, cos_sin, size, epsilon, True), torch.float64, ulps=4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, None])
def test_it_is_its_two_parts_bit_for_bit(dtype, weight_dtype):
    positions, q, k, *weights, cos_sin, size, epsilon = case(dtype)
    weights = [None if weight_dtype is None else weight.to(weight_dtype) for weight in weights]
    got = ir.ops.qk_norm_rotary_embedding(positions, q, k, *weights, cos_sin, size, epsilon)
    normed = [
        ir.ops.rms_norm(x.unflatten(-1, (-1, size)), weight, epsilon).flatten(-2)
        for x, weight in zip((q, k), weights, strict=True)
    ]
    want = ir.ops.rotary_embedding(positions, *normed, cos_sin, size)
    assert all(map(torch.equal, got, want))


def test_without_a_key_there_is_none():
    positions, q, k, wq, wk, *rest = case()
    got, none = ir.ops.qk_norm_rotary_embedding(positions, q, None, wq, None, *rest)
    assert none is None
    assert torch.equal(got, ir.ops.qk_norm_rotary_embedding(positions, q, k, wq, wk, *rest)[0])


def test_it_is_what_qwen3_does_before_its_attention():
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    config = qwen3.Qwen3Config(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=24,
        rms_norm_eps=1e-5, attn_implementation="eager",
    )  # fmt: skip
    layer, rotary = qwen3.Qwen3Attention(config, 0), qwen3.Qwen3RotaryEmbedding(config)
    for norm in (layer.q_norm, layer.k_norm):
        torch.nn.init.normal_(norm.weight)
    x, positions = torch.randn(2, 5, 32), torch.randint(0, 24, (2, 5))
    seen = []

    def attention(module, query, key, value, *args, **kwargs):
        seen.extend((query, key))
        return query.transpose(1, 2), None

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setitem(qwen3.ALL_ATTENTION_FUNCTIONS, "seen", attention)
        config._attn_implementation = "seen"
        layer(x, rotary(x, positions), None)
        cos, sin = rotary(x, torch.arange(24)[None])
        cos_sin = torch.cat((cos[0, :, :8], sin[0, :, :8]), -1)
        got = ir.ops.qk_norm_rotary_embedding(
            positions, layer.q_proj(x), layer.k_proj(x), layer.q_norm.weight, layer.k_norm.weight, cos_sin, 16, 1e-5
        )
    assert len(seen) == 2
    assert_close(got, tuple(heads.transpose(1, 2).flatten(-2) for heads in seen))


def test_derivatives_are_those_of_finite_differences():
    def call(q, k, wq, wk):
        return ir.ops.qk_norm_rotary_embedding(torch.tensor([3, 1]), q, k, wq, wk, table(4), 4, 1e-2)

    check_derivatives(call, (f64(2, 8), f64(2, 4), f64(4), f64(4)))


def test_one_graph_serves_any_number_of_tokens():
    check_compiled(["qk_norm_rotary_embedding"])


BAD = {
    "query_weight": (lambda w: w[1:], "'query_weight' must have shape .8., one scale for each element"),
    "key_weight": (lambda w: w.int(), "'key_weight' must have a floating-point dtype"),
    "query": (lambda q: q[..., 1:], "'query' has shape .5, 31."),
    "key": (lambda k: None, "'key_weight' is given, but 'key' is None"),
    "positions": (lambda p: p.float(), "'positions' must have dtype int32 or int64"),
    "cos_sin_cache": (lambda t: t[:, 1:], "'cos_sin_cache' must have shape"),
}


@pytest.mark.parametrize("name", BAD)
def test_the_argument_that_does_not_fit_is_named(name):
    spoil, message = BAD[name]
    op = ir.ops.qk_norm_rotary_embedding
    given = op.named(op.bind(case()))
    with pytest.raises(errors.ArgumentError, match=message):
        op(**{**given, name: spoil(given[name])})


@pytest.mark.parametrize("position", [-1, 24])
def test_a_position_without_angles_is_refused(position):
    positions, *rest = case()
    positions[2] = position
    with pytest.raises(errors.ArgumentError, match=f"qk_norm_rotary_embedding.*holds {position}"):
        ir.ops.qk_norm_rotary_embedding(positions, *rest)
