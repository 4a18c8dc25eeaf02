"""Latent attention: against keys and values that are made, in float64 loops, and DeepSeek-V3's module."""

import math

import pytest
import torch
import torch._dynamo
from attention_by_hand import by_hand, offsets, paged
from torch._dynamo.testing import CompileCounterWithBackend

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("natively")

HEADS, NOPE, ROPE, RANK, VALUE = 3, 5, 2, 6, 4
SCALE = 0.4


@pytest.fixture
def natively():
    torch.manual_seed(0)
    with ir.priority(mla_attention="native"):
        yield


def latent_call(rows, lengths=None, *, cached=False, up=True, dtype=torch.float64):
    """A call by the names of its arguments, and the sequences of keys and values that it stands for."""
    options = {"dtype": torch.float64}
    key_up, value_up = torch.randn(HEADS, NOPE, RANK, **options), torch.randn(HEADS, RANK, VALUE, **options)
    key_up, value_up = key_up.to(dtype), value_up.to(dtype)
    latents, sequences, queries = [], [], []
    for count, keys in zip(rows, lengths or rows, strict=True):
        query, latent = torch.randn(count, HEADS, NOPE + ROPE).to(dtype), torch.randn(keys, RANK + ROPE).to(dtype)
        if not up:
            query = torch.randn(count, HEADS, RANK + ROPE).to(dtype)
        key = latent.unsqueeze(1).expand(-1, HEADS, -1)
        value = key[..., :RANK]
        if up:  # the keys and values of DeepSeek-V2's equations, which the absorbed form never makes
            turned = latent[:, None, RANK:].expand(-1, HEADS, -1).double()
            key = torch.cat((torch.einsum("kr,hnr->khn", latent[:, :RANK].double(), key_up.double()), turned), -1)
            value = torch.einsum("kr,hrv->khv", latent[:, :RANK].double(), value_up.double())
        queries.append(query)
        latents.append(latent)
        sequences.append((query, key, value))
    nope = NOPE if up else RANK
    query = torch.cat(queries)
    call = {
        "query_nope": query[..., :nope],
        "query_rope": query[..., nope:],
        "latent": torch.cat(latents),
        "cu_seqlens_q": offsets(rows),
        "max_seqlen_q": max(rows),
        "scale": SCALE,
        "key_up": key_up if up else None,
        "value_up": value_up if up else None,
    }
    if lengths is not None:
        call |= {"seq_lens": torch.tensor(lengths, dtype=torch.int32), "max_seqlen_k": max(lengths)}
    if cached:
        cache, _, table = paged([(None, latent, latent) for latent in latents], 4)
        call |= {"latent": None, "latent_cache": cache, "block_table": table}
    return call, sequences


@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_each_sequence_attends_to_itself(up, causal):
    call, sequences = latent_call((4, 1, 0, 6), up=up)
    got = ir.ops.mla_attention(**call, causal=causal)
    assert got.shape == (11, HEADS, VALUE if up else RANK)
    torch.testing.assert_close(got, by_hand(sequences, scale=SCALE, causal=causal))


@pytest.mark.parametrize("rows", [(1, 1, 1), (3, 1, 0)])
@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_queries_stand_at_the_end_of_their_latent_rows(rows, cached, causal):
    call, sequences = latent_call(rows, (3, 9, 8), cached=cached)
    expected = by_hand(sequences, scale=SCALE, causal=causal)
    for bound in (9, 100, None):
        got = ir.ops.mla_attention(**call | {"max_seqlen_k": bound}, causal=causal)
        torch.testing.assert_close(got, expected)


def test_one_product_may_be_left_to_the_caller():
    call, sequences = latent_call((3, 4))
    expected = by_hand(sequences, scale=SCALE)
    absorbed = torch.einsum("thn,hnr->thr", call["query_nope"], call["key_up"])
    torch.testing.assert_close(ir.ops.mla_attention(**call | {"query_nope": absorbed, "key_up": None}), expected)
    got = ir.ops.mla_attention(**call | {"value_up": None})
    torch.testing.assert_close(torch.einsum("thr,hrv->thv", got, call["value_up"]), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_is_near_the_exact_result(dtype):
    call, sequences = latent_call((1, 2), (30, 9), cached=True, dtype=dtype)
    got = ir.ops.mla_attention(**call)
    assert got.dtype == dtype
    exact = by_hand(sequences, scale=SCALE)
    assert ((got.double() - exact).abs().max() / exact.abs().max()) < 8 * torch.finfo(dtype).eps


def test_no_tokens_give_no_tokens():
    for cached in (True, False):
        call, _ = latent_call((0, 0), (3, 2), cached=cached)
        assert ir.ops.mla_attention(**call).shape == (0, HEADS, VALUE)
        assert ir.ops.mla_attention(**call | {"max_seqlen_q": 2}).shape == (0, HEADS, VALUE)


@pytest.mark.parametrize("cached", [True, False])
def test_gradients_are_those_of_finite_differences(cached):
    call, _ = latent_call((1, 2), (3, 4), cached=cached)
    names = [name for name, value in call.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    leaves = [call[name].nan_to_num().clone().requires_grad_() for name in names]
    torch.autograd.gradcheck(
        lambda *t: ir.ops.mla_attention(**call | dict(zip(names, t, strict=True))), leaves, fast_mode=True
    )


def test_one_compiled_graph_serves_all_batches():
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda **call: ir.ops.mla_attention(**call), backend=counter, fullgraph=True)
    for rows, lengths in (((1, 2, 1), (5, 9, 8)), ((3, 1, 4, 1), (3, 2, 14, 1)), ((2, 3), (17, 4))):
        call, sequences = latent_call(rows, lengths, cached=True, dtype=torch.float32)
        names = ("query_nope", "query_rope", "cu_seqlens_q", "seq_lens", "block_table", "latent_cache")
        call |= {name: call[name].clone() for name in names}
        for name in names:
            torch._dynamo.mark_dynamic(call[name], [0, 1] if name == "block_table" else 0)
        with torch.no_grad():
            torch.testing.assert_close(function(**call), by_hand(sequences, scale=SCALE).float(), atol=1e-5, rtol=1e-5)
    assert counter.frame_count <= 2  # the second time, numbers become symbols


@pytest.mark.parametrize("interleaved", [True, False])
def test_attention_of_deepseek_v3_gives_the_same_with_the_op(interleaved):
    modeling = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = modeling.DeepseekV3Config(
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=6,
        v_head_dim=10,
        rope_interleave=interleaved,
    )
    config._attn_implementation = "eager"
    module = modeling.DeepseekV3Attention(config, layer_idx=0).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    hidden, angles = torch.randn(1, 7, 32), torch.randn(1, 7, 4).repeat(1, 1, 2)
    position = (angles.cos(), angles.sin())
    mask = torch.full((7, 7), -math.inf).triu(1)[None, None]
    turn = modeling.apply_rotary_pos_emb_interleave if interleaved else modeling.apply_rotary_pos_emb
    with torch.no_grad():
        expected = module(hidden, position_embeddings=position, attention_mask=mask)[0]
        query = module.q_b_proj(module.q_a_layernorm(module.q_a_proj(hidden))).view(1, 7, 4, 14).transpose(1, 2)
        latent, key_rope = module.kv_a_proj_with_mqa(hidden).split([16, 8], -1)
        query_rope, key_rope = turn(query[..., 6:], key_rope.unsqueeze(1), *position)
        rows = torch.cat((module.kv_a_layernorm(latent)[0], key_rope[0, 0]), -1)
        key_up, value_up = module.kv_b_proj.weight.view(4, 16, 16).split([6, 10], 1)
        out = ir.ops.mla_attention(
            query[0, ..., :6].transpose(0, 1),
            query_rope[0].transpose(0, 1),
            rows,
            offsets((7,)),
            7,
            module.scaling,
            key_up,
            value_up.transpose(1, 2),
        )
        torch.testing.assert_close(module.o_proj(out.flatten(1)), expected[0], atol=1e-5, rtol=1e-4)


def i32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


Z = torch.zeros
SHAPES = {
    "either latent or latent_cache": {"latent": Z(4, 8)},
    "give either latent": {"latent_cache": None},
    "'query_nope' must have shape": {"query_nope": Z(4, 15)},
    "'query_nope' and 'query_rope' have shapes": {"query_rope": Z(4, 2, 2)},
    "'latent_cache' must have shape": {"latent_cache": Z(9, 4, 1, 8)},
    "'latent_cache' has rows of 8; without key_up": {"key_up": None},
    "'key_up' has shape .* it must be .3, 5, 6.": {"key_up": Z(3, 6, 5)},
    "'value_up' has shape .* it must be .3, 6, value_size.": {"value_up": Z(2, 6, 4)},
    "dtype torch.float16": {"query_rope": Z(4, 3, 2).half()},
    "floating-point": {"latent_cache": Z(9, 4, 8).int()},
    "needs seq_lens": {"seq_lens": None, "max_seqlen_k": None},
    "no block_table": {"block_table": None},
    "max_seqlen_q=-2": {"max_seqlen_q": -2},
}
VALUES = {
    "must ascend": {"cu_seqlens_q": i32(0, 2, 1, 4)},
    "ends with 6, but there are 4": {"cu_seqlens_q": i32(0, 1, 3, 6)},
    "runs past its row": {"seq_lens": i32(5, 90, 8), "max_seqlen_k": None},
    "sequence 1 block 50": {"block_table": torch.tensor([[0, 1, 1], [50, 1, 1], [0, 1, 1]]).int()},
}


@pytest.mark.parametrize(("words", "wrong"), SHAPES.items(), ids=SHAPES)
def test_arguments_that_do_not_fit_are_errors(words, wrong):
    call = latent_call((1, 2, 1), (5, 9, 8), cached=True, dtype=torch.float32)[0] | wrong
    for device in ("cpu", "meta"):
        there = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in call.items()}
        with pytest.raises(errors.ArgumentError, match=f"'mla_attention'.*{words}"):
            ir.ops.mla_attention(**there)


@pytest.mark.parametrize(("words", "wrong"), VALUES.items(), ids=VALUES)
def test_lengths_and_blocks_that_do_not_exist_are_errors(words, wrong):
    call = latent_call((1, 2, 1), (5, 9, 8), cached=True)[0] | wrong
    with pytest.raises(errors.ArgumentError, match=f"'mla_attention'.*{words}"):
        ir.ops.mla_attention(**call)
    assert ir.ops.mla_attention.native(**call).shape == (4, HEADS, VALUE)  # where nobody looks, nothing breaks


def test_without_lengths_there_are_as_many_latent_rows_as_queries():
    call, _ = latent_call((4,))
    with pytest.raises(errors.ArgumentError, match="4 queries and 3 latent rows"):
        ir.ops.mla_attention(**call | {"latent": call["latent"][:3]})


# --- codes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_with_an_output_scale_it_is_the_quantised_result_bit_for_bit(dtype):
    call, _ = latent_call((1, 1), (4, 7), cached=True, dtype=dtype)
    scale = torch.tensor(0.02)
    got = ir.ops.mla_attention(**call, output_scale=scale)
    wanted = ir.ops.static_quant_fp8.native(ir.ops.mla_attention(**call), scale)
    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("options", [{}, {"column_major_scales": True}, {"power_of_two_scales": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_with_groups_it_is_its_two_parts_bit_for_bit(dtype, options):
    call, _ = latent_call((2, 3), dtype=dtype)
    codes, scale = ir.ops.mla_attention_group_quant_fp8(**call, group_size=6, **options)
    merged = ir.ops.mla_attention(**call).flatten(-2)
    wanted, wanted_scale = ir.ops.group_quant_fp8.native(merged, 6, **options)
    assert torch.equal(codes.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(scale, wanted_scale)


def test_groups_that_do_not_divide_a_token_are_refused():
    call, _ = latent_call((2, 3))
    with pytest.raises(errors.ArgumentError, match="group_size=5 must be positive and divide"):
        ir.ops.mla_attention_group_quant_fp8(**call, group_size=5)


@pytest.mark.parametrize("scale", [torch.tensor([1.0, 2.0]), torch.zeros(1)])
def test_an_output_scale_is_one_float32_number_and_not_zero(scale):
    call, _ = latent_call((2, 3))
    with pytest.raises(errors.ArgumentError, match=r"'output_scale' (must hold one float32|holds 0)"):
        ir.ops.mla_attention(**call, output_scale=scale)
