"""Attention over packed sequences, contiguous and paged: against float64 loops, and in transformers' models."""

import math

import pytest
import torch
import torch._dynamo
from attention_by_hand import by_hand, made, offsets, packed, paged
from torch._dynamo.testing import CompileCounterWithBackend

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("natively")


@pytest.fixture
def natively():
    torch.manual_seed(0)
    with ir.priority(attention="native"):
        yield


OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.2},
    "bidirectional": {"causal": False},
    "window": {"window": 3},
    "bidirectional window": {"causal": False, "window": 2},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all": {"scale": 0.4, "window": 4, "soft_cap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_each_sequence_attends_to_itself(options, heads):
    sequences = made((5, 1, 0, 7), heads=heads[0], kv_heads=heads[1])
    got = ir.ops.attention(*packed(sequences), offsets((5, 1, 0, 7)), 7, **options)
    torch.testing.assert_close(got, by_hand(sequences, **options))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rows", [(1, 1, 1), (3, 1, 6), (2, 0, 4)])
def test_queries_stand_at_the_end_of_their_keys(options, rows):
    lengths = (3, 11, 6)
    sequences = made(rows, lengths)
    seen = torch.tensor(lengths, dtype=torch.int32)
    expected = by_hand(sequences, **options)
    query, key, value = packed(sequences)
    got = ir.ops.attention(query, key, value, offsets(rows), max(rows), seen, 11, **options)
    torch.testing.assert_close(got, expected)
    key_cache, value_cache, table = paged(sequences, 4)
    cached = (key_cache, value_cache, table)
    for bound in (11, 12, 200, None):
        got = ir.ops.attention(query, None, None, offsets(rows), max(rows), seen, bound, *cached, **options)
        torch.testing.assert_close(got, expected)


def decoding(rows=(1, 2, 1), lengths=(5, 9, 8), block_size=4, **options):
    """A call on a paged cache by the names of its arguments, and its sequences."""
    sequences = made(rows, lengths, **options)
    key_cache, value_cache, table = paged(sequences, block_size)
    call = {
        "query": packed(sequences)[0],
        "key": None,
        "value": None,
        "cu_seqlens_q": offsets(rows),
        "max_seqlen_q": max(rows),
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "max_seqlen_k": max(lengths),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_table": table,
    }
    return call, sequences


def test_values_may_have_another_size():
    sequences = made((3, 4), value_size=5)
    got = ir.ops.attention(*packed(sequences), offsets((3, 4)), 4)
    assert got.shape == (7, 4, 5)
    torch.testing.assert_close(got, by_hand(sequences))


def test_a_window_as_long_as_the_sequence_is_none():
    call, _ = decoding()
    assert torch.equal(ir.ops.attention(**call, window=9), ir.ops.attention(**call))


@pytest.mark.parametrize("options", [{}, {"soft_cap": 1.0}], ids=["plain", "soft cap"])
@pytest.mark.parametrize("own", [True, False])
def test_tokens_of_no_sequence_are_zeros(options, own):
    sequences = made((2, 3))
    query, key, value = (torch.cat((part, torch.full_like(part[:2], math.nan))) for part in packed(sequences))
    rest = () if own else (torch.tensor([2, 3], dtype=torch.int32), 3)
    got = ir.ops.attention(query, key, value, offsets((2, 3)), 3, *rest, **options)
    torch.testing.assert_close(got[:5], by_hand(sequences, **options))
    assert torch.equal(got[5:], torch.zeros_like(got[5:]))


@pytest.mark.parametrize("options", [{}, {"soft_cap": 1.0}, {"sinks": torch.zeros(4)}], ids=str)
@pytest.mark.parametrize("rows", [(1, 1), (3, 3)])
def test_queries_that_see_no_key_are_zeros(options, rows):
    """The first of three queries stands before the only two keys; the other sequence has none."""
    sequences = made(rows, (2, 0))
    query, key, value = packed(sequences)
    lengths = torch.tensor([2, 0], dtype=torch.int32)
    got = ir.ops.attention(query, key, value, offsets(rows), max(rows), lengths, 2, **options)
    torch.testing.assert_close(got, by_hand(sequences, **options))
    assert not got[rows[0] :].any()


def test_a_bad_sequence_does_not_reach_the_others():
    call, sequences = decoding()
    bad = call["block_table"][0, 0]
    call["key_cache"][bad] = call["value_cache"][bad] = math.nan
    got = ir.ops.attention(**call)
    torch.testing.assert_close(got[1:], by_hand(sequences[1:]))


def test_a_cache_may_lie_beside_another():
    call, sequences = decoding()
    both = torch.stack((call["key_cache"], call["value_cache"]), 1)
    call["key_cache"], call["value_cache"] = both.unbind(1)
    torch.testing.assert_close(ir.ops.attention(**call), by_hand(sequences))


def test_sequences_may_share_blocks():
    call, sequences = decoding(rows=(1, 1), lengths=(8, 8))
    call["block_table"][1] = call["block_table"][0]
    shared = [(query, *sequences[0][1:]) for query, _, _ in sequences]
    torch.testing.assert_close(ir.ops.attention(**call), by_hand(shared))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0, "sinks": torch.zeros(4)}], ids=["plain", "step by step"])
def test_low_precision_is_near_the_exact_result(dtype, options):
    call, sequences = decoding(rows=(1, 6, 1), lengths=(40, 30, 17), dtype=dtype)
    got = ir.ops.attention(**call, **options)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), by_hand(sequences, **options), atol=2 * torch.finfo(dtype).eps, rtol=0.02)


def test_large_scores_do_not_overflow():
    query = torch.full((2, 4, 8), 200.0, dtype=torch.float16)
    for options in ({}, {"sinks": torch.zeros(4)}):
        got = ir.ops.attention(query, query, query, offsets((2,)), 2, **options)
        torch.testing.assert_close(got, query)


@pytest.mark.parametrize("shape", [(0, 4, 8), (0, 4, 0)])
@pytest.mark.parametrize("sequences", [0, 2])
@pytest.mark.parametrize("longest", [0, 1])
def test_no_tokens_give_no_tokens(shape, sequences, longest):
    query = torch.zeros(shape)
    starts = torch.zeros(sequences + 1, dtype=torch.int32)
    for options in ({}, {"soft_cap": 1.0}, {"window": 2}):
        assert ir.ops.attention(query, query, query, starts, longest, scale=1.0, **options).shape == shape
        none = (torch.zeros(sequences, dtype=torch.int32), 0, torch.zeros(3, 2, *shape[1:]), torch.zeros(3, 2, 4, 5))
        table = torch.zeros(sequences, 0, dtype=torch.int32)
        got = ir.ops.attention(query, None, None, starts, longest, *none, table, 1.0, **options)
        assert got.shape == (0, 4, 5)


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"soft_cap": 2.0, "sinks": True}], ids=str)
@pytest.mark.parametrize("cached", [True, False])
def test_gradients_are_those_of_finite_differences(options, cached):
    call, sequences = decoding(rows=(1, 2), lengths=(3, 4), block_size=2, heads=2, kv_heads=1, size=3)
    if not cached:
        query, key, value = packed(sequences)
        call |= {"query": query, "key": key, "value": value, "key_cache": None, "value_cache": None}
        call["block_table"] = None
    options = dict(options)
    if "sinks" in options:
        options["sinks"] = torch.randn(2, dtype=torch.float64, requires_grad=True)
    names = [name for name, value in call.items() if isinstance(value, torch.Tensor) and value.is_floating_point()]
    leaves = [call[name].nan_to_num().requires_grad_() for name in names]

    def run(*tensors):
        return ir.ops.attention(**call | dict(zip(names, tensors, strict=True)), **options)

    torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("options", [{}, {"sinks": torch.zeros(4), "window": 3}], ids=["plain", "sinks"])
def test_one_compiled_graph_serves_all_batches(options):
    """Also of sizes that are symbols from the start: tokens, sequences, lengths, blocks, and the bounds."""
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(lambda **call: ir.ops.attention(**call, **options), backend=counter, fullgraph=True)
    for rows, lengths in (((1, 2, 1), (5, 9, 8)), ((3, 1, 4, 1), (3, 2, 14, 1)), ((2, 3), (17, 4))):
        call, sequences = decoding(rows, lengths, dtype=torch.float32)
        for name, dims in {"query": [0], "cu_seqlens_q": [0], "seq_lens": [0], "block_table": [0, 1]}.items():
            torch._dynamo.mark_dynamic(call[name], dims)
        for name in ("key_cache", "value_cache"):
            torch._dynamo.mark_dynamic(call[name], 0)
        with torch.no_grad():
            torch.testing.assert_close(function(**call), by_hand(sequences, **options).float())
    assert counter.frame_count <= 2  # the second time, numbers become symbols


# --- bad input -------------------------------------------------------------------------------------------------------


def i32(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


SHAPES = {
    "'query' must have shape": {"query": torch.zeros(4, 32)},
    "key_cache' must have shape": {"key_cache": torch.zeros(7, 4, 16)},
    "no multiple of 2 heads": {"query": torch.zeros(4, 3, 8)},
    "no multiple of 0 heads": {"key_cache": torch.zeros(8, 4, 0, 8), "value_cache": torch.zeros(8, 4, 0, 8)},
    "heads of size 6, 'query' of size 8": {
        "key_cache": torch.zeros(8, 4, 2, 6),
        "value_cache": torch.zeros(8, 4, 2, 8),
    },
    "last dimension only": {"value_cache": torch.zeros(8, 4, 1, 8)},
    "dtype torch.float16, 'query' has torch.float32": {"value_cache": torch.zeros(8, 4, 2, 8).half()},
    "floating-point": {"query": torch.zeros(4, 4, 8).int()},
    "either key and value, or": {"key": torch.zeros(4, 2, 8)},
    "one of them is None": {"value_cache": None},
    "cache is given and no block_table": {"block_table": None},
    "needs seq_lens": {"seq_lens": None, "max_seqlen_k": None},
    "'cu_seqlens_q' must be an int32": {"cu_seqlens_q": torch.tensor([0, 1, 3, 4])},
    "'cu_seqlens_q' is empty": {"cu_seqlens_q": i32()},
    "'seq_lens' must be an int32 tensor of 1 dimension, it has shape \\(3, 1\\)": {"seq_lens": i32(5, 9, 8)[:, None]},
    "'seq_lens' has 2 numbers; cu_seqlens_q describes 3": {"seq_lens": i32(5, 9)},
    "'block_table' has 1 rows": {"block_table": i32(0, 1, 2)[None]},
    "'block_table' must be an int32": {"block_table": torch.zeros(3, 4)},
    "max_seqlen_q=-1": {"max_seqlen_q": -1},
    "max_seqlen_k=-1": {"max_seqlen_k": -1},
    "window=0": {"window": 0},
    "soft_cap=0.0": {"soft_cap": 0.0},
    "soft_cap=-1.0": {"soft_cap": -1.0},
    "'sinks' has shape": {"sinks": torch.zeros(2)},
    "'sinks' must have a floating-point": {"sinks": i32(0, 0, 0, 0)},
}


@pytest.mark.parametrize(("words", "wrong"), SHAPES.items(), ids=SHAPES)
def test_arguments_that_do_not_fit_are_errors(words, wrong):
    call, _ = decoding(dtype=torch.float32)
    with pytest.raises(errors.ArgumentError, match=f"'attention'.*{words}"):
        ir.ops.attention(**call | wrong)
    there = {n: v.to("meta") if isinstance(v, torch.Tensor) else v for n, v in (call | wrong).items()}
    with pytest.raises(errors.ArgumentError, match=words):
        ir.ops.attention(**there)


@pytest.mark.parametrize("key_tokens", [3, 5])
def test_without_lengths_there_are_as_many_keys_as_queries(key_tokens):
    query, key = torch.zeros(4, 2, 8), torch.zeros(key_tokens, 2, 8)
    with pytest.raises(errors.ArgumentError, match=f"4 queries and {key_tokens} keys"):
        ir.ops.attention(query, key, key, offsets((4,)), 4)
    with pytest.raises(errors.ArgumentError, match="max_seqlen_k=4 is given without seq_lens"):
        ir.ops.attention(query, query, query, offsets((4,)), 4, None, 4)


NO_BLOCK = torch.full((3, 4), 99, dtype=torch.int32)
VALUES = {
    "must start with 0, it starts with 1": {"cu_seqlens_q": i32(1, 1, 3, 4)},
    "must ascend; 3 is followed by 2": {"cu_seqlens_q": i32(0, 3, 2, 4)},
    "ends with 5, but there are 4 tokens": {"cu_seqlens_q": i32(0, 1, 3, 5)},
    "sequence 1 a length of 2, longer than max_seqlen_q=1": {"max_seqlen_q": 1},
    "sequence 1 a length of 9, longer than max_seqlen_k=8": {"max_seqlen_k": 8},
    "sequence 2 a length of -1": {"seq_lens": i32(5, 9, -1)},
    "runs past its row of the block table: 4 blocks of 4 hold 16": {"seq_lens": i32(5, 17, 8), "max_seqlen_k": None},
    "sequence 0 block 99; the cache has blocks 0 to 8": {"block_table": NO_BLOCK},
    "sequence 0 block -1": {"block_table": -NO_BLOCK // 99},
}


@pytest.mark.parametrize(("words", "wrong"), VALUES.items(), ids=VALUES)
def test_lengths_and_blocks_that_do_not_exist_are_errors(words, wrong):
    call, _ = decoding()
    with pytest.raises(errors.ArgumentError, match=f"'attention'.*{words}"):
        ir.ops.attention(**call | wrong)
    assert ir.ops.attention.native(**call | wrong).shape == call["query"].shape  # where nobody looks, nothing breaks


def test_lengths_that_run_past_the_keys_are_errors():
    query, key, value = packed(made((2, 2)))
    with pytest.raises(errors.ArgumentError, match="adds up to 5 keys, but there are 4"):
        ir.ops.attention(query, key, value, offsets((2, 2)), 2, i32(2, 3))


# --- transformers ----------------------------------------------------------------------------------------------------


def in_transformers(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **options):
    """`attention` as an attention function of transformers; it needs no mask."""
    batch, _, rows, _ = query.shape
    keys = key.shape[2]
    query, key, value = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    out = ir.ops.attention(
        query,
        key,
        value,
        offsets([rows] * batch),
        rows,
        torch.full((batch,), keys, dtype=torch.int32),
        keys,
        scale=scaling,
        window=sliding_window,
        soft_cap=options.get("softcap"),
        sinks=options.get("s_aux"),
    )
    return out.unflatten(0, (batch, rows)), None


SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 4,
    "attn_logit_softcapping": 0.05,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "query_pre_attn_scalar": 3,
    "pad_token_id": 0,
}


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_models_of_transformers_give_the_same_with_the_op(name):
    """Llama: grouped queries; Gemma 2: soft cap, window and scale; GPT-OSS: sinks and window."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    config = transformers.AutoConfig.for_model(name, **SMALL)
    config._attn_implementation = "eager"
    model = transformers.AutoModel.from_config(config).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    prompt, more = torch.randint(1, 50, (2, 9)), torch.randint(1, 50, (2, 2))
    calls = []

    def counted(*args, **options):
        calls.append(options)
        return in_transformers(*args, **options)

    def run():
        first = model(prompt, use_cache=True)
        return first[0], model(more, past_key_values=first.past_key_values)[0]

    with torch.no_grad():
        expected = run()
        ALL_ATTENTION_FUNCTIONS.register("irframework_test", counted)
        model.config._attn_implementation = "irframework_test"
        got = run()
    assert len(calls) == 4
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=1e-4)


# --- codes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_with_an_output_scale_it_is_the_quantised_result_bit_for_bit(dtype):
    call, _ = decoding()
    call = {name: value.to(dtype) if torch.is_tensor(value) and value.is_floating_point() else value
            for name, value in call.items()}  # fmt: skip
    scale = torch.tensor([0.01])
    got = ir.ops.attention(**call, output_scale=scale)
    assert got.dtype == torch.float8_e4m3fn
    wanted = ir.ops.static_quant_fp8.native(ir.ops.attention(**call), scale)
    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.parametrize("scale", [torch.tensor([1.0, 2.0]), torch.tensor(1.0, dtype=torch.bfloat16), torch.zeros(1)])
def test_an_output_scale_is_one_float32_number_and_not_zero(scale):
    call, _ = decoding()
    with pytest.raises(errors.ArgumentError, match=r"'output_scale' (must hold one float32|holds 0)"):
        ir.ops.attention(**call, output_scale=scale)
