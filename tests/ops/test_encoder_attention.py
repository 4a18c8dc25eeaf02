"""Attention of encoders: against float64 loops, and transformers' vision modules."""

import math

import pytest
import torch
import torch._dynamo
from attention_by_hand import by_hand, made, offsets, packed
from torch._dynamo.testing import CompileCounterWithBackend

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("natively")


@pytest.fixture
def natively():
    torch.manual_seed(0)
    with ir.priority(mm_encoder_attention="native", rel_pos_attention="native"):
        yield


# --- packed and padded -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [5, 9, None])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_packed_tokens_see_their_own_sequence(longest, heads, scale):
    sequences = made((5, 1, 0, 3), heads=heads[0], kv_heads=heads[1], value_size=6)
    got = ir.ops.mm_encoder_attention(*packed(sequences), offsets((5, 1, 0, 3)), longest, scale=scale)
    torch.testing.assert_close(got, by_hand(sequences, causal=False, scale=scale))


def test_packed_tokens_without_offsets_are_one_sequence():
    sequences = made((5,))
    torch.testing.assert_close(ir.ops.mm_encoder_attention(*sequences[0]), by_hand(sequences, causal=False))


@pytest.mark.parametrize("longest", [3, None])
def test_packed_tokens_of_no_sequence_are_zeros(longest):
    sequences = made((2, 3))
    tensors = (torch.cat((part, torch.ones_like(part[:2]))) for part in packed(sequences))
    got = ir.ops.mm_encoder_attention(*tensors, offsets((2, 3)), longest)
    torch.testing.assert_close(got[:5], by_hand(sequences, causal=False))
    assert not got[5:].any()


@pytest.mark.parametrize("lengths", [(4, 4, 4), (4, 1, 0), None])
def test_padded_tokens_see_no_padding_and_padding_gives_zeros(lengths):
    sequences = made(lengths or (4, 4, 4))
    rows = [torch.nn.utils.rnn.pad_sequence(part, True, 7.0) for part in zip(*sequences, strict=True)]
    given = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    got = ir.ops.mm_encoder_attention(*rows, seq_lens=given)
    for index, sequence in enumerate(sequences):
        count = sequence[0].shape[0]
        torch.testing.assert_close(got[index, :count], by_hand([sequence], causal=False))
        assert not got[index, count:].any()


@pytest.mark.parametrize("shape", [(0, 2, 4), (0, 3, 2, 4), (3, 0, 2, 4)])
def test_no_tokens_give_no_tokens(shape):
    query = torch.zeros(shape)
    assert ir.ops.mm_encoder_attention(query, query, query).shape == shape
    if len(shape) == 3:
        for longest in (0, None):
            assert ir.ops.mm_encoder_attention(query, query, query, offsets((0, 0)), longest).shape == shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_low_precision_is_near_the_exact_result(dtype):
    sequences = made((20, 7), dtype=dtype)
    got = ir.ops.mm_encoder_attention(*packed(sequences), offsets((20, 7)), 20)
    assert got.dtype == dtype
    exact = by_hand(sequences, causal=False)
    torch.testing.assert_close(got.double(), exact, atol=2 * torch.finfo(dtype).eps, rtol=0.02)


@pytest.mark.parametrize("longest", [3, None])
def test_gradients_are_those_of_finite_differences(longest):
    tensors = [part.requires_grad_() for part in packed(made((2, 3), heads=2, kv_heads=1, size=3))]
    torch.autograd.gradcheck(
        lambda *t: ir.ops.mm_encoder_attention(*t, offsets((2, 3)), longest), tensors, fast_mode=True
    )


def test_one_compiled_graph_serves_all_batches():
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(ir.ops.mm_encoder_attention, backend=counter, fullgraph=True)
    for lengths in ((2, 3), (4, 1, 5), (6, 2, 2, 2)):
        sequences = made(lengths, dtype=torch.float32)
        tensors = (*packed(sequences), offsets(lengths))
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch.no_grad():
            torch.testing.assert_close(function(*tensors, max(lengths)), by_hand(sequences, causal=False).float())
    assert counter.frame_count <= 2  # the second time, the number becomes a symbol


T, B = torch.zeros(4, 2, 8), torch.zeros(2, 4, 2, 8)
I32 = torch.tensor([0, 4], dtype=torch.int32)
SHAPES = {
    "must have shape": (T, T, B),
    "every token has a query": (T, T[:3], T[:3]),
    "no multiple of 2 heads": (T[:, :1], T, T),
    "of size 6, 'query' of size 8": (T, T[..., :6], T),
    "last dimension only": (T, T, T[:, :1]),
    "dtype torch.float16": (T, T.half(), T),
    "'cu_seqlens' must be an int32": (T, T, T, I32.long()),
    "'cu_seqlens' is empty": (T, T, T, I32[:0]),
    "cu_seqlens does not go with a query of 4": (B, B, B, I32),
    "seq_lens does not go with a query of 3": (T, T, T, None, None, I32),
    "max_seqlen=4 must be": (T, T, T, None, 4),
    "max_seqlen=-1 must be": (T, T, T, I32, -1),
    "'seq_lens' has 1 numbers for 2 sequences": (B, B, B, None, None, I32[1:]),
    "'seq_lens' must be an int32": (B, B, B, None, None, I32.long()),
}
VALUES = {
    "must start with 0": (T, T, T, I32 + 1),
    "must ascend": (T, T, T, torch.tensor([0, 3, 2], dtype=torch.int32)),
    "ends with 5, but there are 4 tokens": (T, T, T, torch.tensor([0, 5], dtype=torch.int32)),
    "longer than max_seqlen=3": (T, T, T, I32, 3),
    "sequence 1 a length of 5; sequences are padded to 4": (B, B, B, None, None, I32 // 4 * 5),
    "sequence 1 a length of -4": (B, B, B, None, None, -I32),
}


@pytest.mark.parametrize(("words", "args"), SHAPES.items(), ids=SHAPES)
def test_arguments_that_do_not_fit_are_errors(words, args):
    for device in ("cpu", "meta"):
        there = [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]
        with pytest.raises(errors.ArgumentError, match=f"'mm_encoder_attention'.*{words}"):
            ir.ops.mm_encoder_attention(*there)


@pytest.mark.parametrize(("words", "args"), VALUES.items(), ids=VALUES)
def test_lengths_that_do_not_exist_are_errors(words, args):
    with pytest.raises(errors.ArgumentError, match=f"'mm_encoder_attention'.*{words}"):
        ir.ops.mm_encoder_attention(*args)
    assert ir.ops.mm_encoder_attention.native(*args).shape == args[0].shape  # where nobody looks, nothing breaks


def test_vision_attention_of_qwen2_vl_gives_the_same_with_the_op():
    modeling = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    config = modeling.Qwen2VLVisionConfig(embed_dim=32, num_heads=4)
    config._attn_implementation = "eager"
    module = modeling.VisionAttention(config).eval()
    hidden, angles, starts = torch.randn(11, 32), torch.randn(11, 8), offsets((6, 1, 4))
    with torch.no_grad():
        expected = module(hidden, starts, position_embeddings=(angles.cos(), angles.sin()))
        query, key, value = module.qkv(hidden).view(11, 3, 4, 8).unbind(1)
        query, key = modeling.apply_rotary_pos_emb_vision(query, key, angles.cos(), angles.sin())
        for longest in (6, None):
            out = ir.ops.mm_encoder_attention(query, key, value, starts, longest, scale=module.scaling)
            torch.testing.assert_close(module.proj(out.flatten(1)), expected)


# --- relative places -------------------------------------------------------------------------------------------------


def grids_by_hand(query, key, value, rel_pos_h, rel_pos_w, scale):
    """One pair of places at a time. The tables are as long as the grids need."""
    out = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=torch.float64)

    def place(at, count, other, n):
        return math.floor(at * max(n / count, 1.0) - other * max(count / n, 1.0) + (n - 1) * max(count / n, 1.0) + 1e-9)

    for batch, a, b, head in torch.cartesian_prod(*(torch.arange(n) for n in query.shape[:4])).tolist():
        q = query[batch, a, b, head].double()
        total = 0.0
        for c in range(key.shape[1]):
            for d in range(key.shape[2]):
                score = scale * float(q @ key[batch, c, d, head].double())
                score += float(q @ rel_pos_h[place(a, query.shape[1], c, key.shape[1])].double())
                score += float(q @ rel_pos_w[place(b, query.shape[2], d, key.shape[2])].double())
                total += math.exp(score)
                out[batch, a, b, head] += math.exp(score) * value[batch, c, d, head].double()
        out[batch, a, b, head] /= total
    return out


def grids(size=(3, 2), keys=None, dtype=torch.float64, value_size=8):
    keys = keys or size
    query = torch.randn(2, *size, 3, 8).to(dtype)
    key, value = torch.randn(2, *keys, 3, 8).to(dtype), torch.randn(2, *keys, 3, value_size).to(dtype)
    tables = [torch.randn(2 * max(n, m) - 1, 8).to(dtype) for n, m in zip(size, keys, strict=True)]
    return query, key, value, *tables


@pytest.mark.parametrize("keys", [None, (6, 2), (1, 4), (2, 1)])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_places_are_as_far_apart_as_their_rows_and_columns(keys, scale):
    args = grids(keys=keys, value_size=5)
    got = ir.ops.rel_pos_attention(*args, scale=scale)
    torch.testing.assert_close(got, grids_by_hand(*args, scale or 8**-0.5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_relative_places_in_low_precision_are_rounded_once(dtype):
    args = grids(dtype=dtype)
    got = ir.ops.rel_pos_attention(*args)
    assert got.dtype == dtype
    exact = grids_by_hand(*args, 8**-0.5)
    torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=torch.finfo(dtype).eps)


def test_gradients_with_relative_places_are_those_of_finite_differences():
    args = [tensor.requires_grad_() for tensor in grids((2, 2))]
    torch.autograd.gradcheck(ir.ops.rel_pos_attention, args, fast_mode=True)


@pytest.mark.parametrize("size", [(0, 2), (2, 0)])
def test_an_empty_grid_gives_an_empty_grid(size):
    query = torch.zeros(2, *size, 3, 8)
    table = torch.zeros(3, 8)
    assert ir.ops.rel_pos_attention(query, query, query, table, table).shape == query.shape


def test_one_compiled_graph_with_relative_places_serves_all_batches():
    counter = CompileCounterWithBackend("aot_eager")
    function = torch.compile(ir.ops.rel_pos_attention, backend=counter, fullgraph=True)
    for batch in (2, 5, 3):
        query, *rest = grids(dtype=torch.float32)
        tensors = [tensor[:1].expand(batch, -1, -1, -1, -1).clone() for tensor in (query, *rest[:2])]
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 0)
        with torch.no_grad():
            got = function(*tensors, *rest[2:])
        torch.testing.assert_close(got, ir.ops.rel_pos_attention(*tensors, *rest[2:]))
    assert counter.frame_count == 1


@pytest.mark.parametrize("length", [5, 9, 4])  # as long as the grid needs, and to be interpolated
def test_vision_attention_of_sam_gives_the_same_with_the_op(length):
    modeling = pytest.importorskip("transformers.models.sam.modeling_sam")
    config = modeling.SamVisionConfig(hidden_size=32, num_attention_heads=4, image_size=48, patch_size=16)
    module = modeling.SamVisionAttention(config, window_size=3).eval()
    module.rel_pos_h = torch.nn.Parameter(torch.randn(length, 8))
    module.rel_pos_w = torch.nn.Parameter(torch.randn(length, 8))
    hidden = torch.randn(2, 3, 3, 32)
    with torch.no_grad():
        query, key, value = module.qkv(hidden).view(2, 3, 3, 3, 4, 8).unbind(3)
        out = ir.ops.rel_pos_attention(query, key, value, module.rel_pos_h, module.rel_pos_w)
        torch.testing.assert_close(module.proj(out.flatten(-2)), module(hidden)[0])


@pytest.mark.parametrize(
    ("words", "position", "wrong"),
    [
        ("'query' must have shape", 0, torch.zeros(2, 6, 3, 8)),
        ("no multiple of 2 heads", 1, torch.zeros(2, 3, 2, 2, 8)),
        ("batch and heads must be equal", 0, torch.zeros(1, 3, 2, 3, 8)),
        ("batch and heads must be equal", 0, torch.zeros(2, 3, 2, 6, 8)),
        ("last dimension only", 2, torch.zeros(2, 1, 2, 3, 8)),
        ("'rel_pos_h' must have shape", 3, torch.zeros(5, 7)),
        ("'rel_pos_w' must have shape", 4, torch.zeros(0, 8)),
        ("'rel_pos_w' must have a floating-point", 4, torch.zeros(3, 8).int()),
    ],
)
def test_grids_that_do_not_fit_are_errors(words, position, wrong):
    args = list(grids(dtype=torch.float32))
    args[position] = wrong
    if position == 1:
        args[2] = wrong
    with pytest.raises(errors.ArgumentError, match=f"'rel_pos_attention'.*{words}"):
        ir.ops.rel_pos_attention(*args)
