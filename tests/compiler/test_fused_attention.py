"""Fusion of attention with the quantisation of its result: the op takes the scale, if a provider says that it can.

A provider `k` takes it.
"""

import pytest
import torch
from compiler_support import lowered

import irframework as ir
from irframework.compiler.report import last_report
from irframework.compiler.spelling_check import wrong_spelling

pytestmark = pytest.mark.usefixtures("seeded", "provider")
HEADS, KV_HEADS, SIZE, TOKENS = 4, 2, 8, 3
NATIVELY = {name: ["native"] for name in ir.ops.__all__}


@pytest.fixture
def provider():
    @ir.ops.attention.register_impl("k")
    def k(
        query, key, value, cu_seqlens_q, max_seqlen_q, seq_lens=None, max_seqlen_k=None, key_cache=None,
        value_cache=None, block_table=None, scale=None, causal=True, window=None, soft_cap=None, sinks=None,
        output_scale=None,
    ):  # fmt: skip
        return ir.ops.attention.native(
            query, key, value, cu_seqlens_q, max_seqlen_q, seq_lens, max_seqlen_k, key_cache, value_cache, block_table,
            scale, causal, window, soft_cap, sinks, output_scale,
        )  # fmt: skip

    @ir.ops.attention.register_impl("old")
    def old(
        query, key, value, cu_seqlens_q, max_seqlen_q, seq_lens=None, max_seqlen_k=None, key_cache=None,
        value_cache=None, block_table=None, scale=None, causal=True, window=None, soft_cap=None, sinks=None,
    ):  # fmt: skip
        return ir.ops.attention.native(
            query, key, value, cu_seqlens_q, max_seqlen_q, seq_lens, max_seqlen_k, key_cache, value_cache, block_table,
            scale, causal, window, soft_cap, sinks,
        )  # fmt: skip

    yield
    for name in {"k", "old"} & ir.ops.attention.impls.keys():
        ir.ops.attention.unregister_impl(name)


def fused(program, *inputs, provider="k"):
    torch._dynamo.reset()
    with torch.no_grad(), ir.priority(NATIVELY | {"attention": [provider]}):
        got = torch.compile(program, backend=lowered, fullgraph=True)(*inputs)
    with torch.no_grad(), ir.priority(NATIVELY):
        wanted = program(*inputs)
    assert torch.equal(got.view(torch.uint8), wanted.view(torch.uint8))
    report = last_report()
    assert report is not None
    return report.fusions.get("attention", 0), report


def packed(dtype=torch.float32):
    query = torch.randn(TOKENS, HEADS, SIZE).to(dtype)
    key, value = (torch.randn(TOKENS, KV_HEADS, SIZE).to(dtype) for _ in range(2))
    return query, key, value, torch.tensor([0, 1, TOKENS], dtype=torch.int32), torch.tensor([0.02])


def decoding(dtype=torch.float32):
    caches = (torch.randn(4, 4, KV_HEADS, SIZE).to(dtype) for _ in range(2))
    table = torch.tensor([[0, 3], [1, 2], [2, 0]], dtype=torch.int32)
    offsets, lengths = torch.arange(TOKENS + 1, dtype=torch.int32), torch.tensor([5, 1, 8], dtype=torch.int32)
    return torch.randn(TOKENS, HEADS, SIZE).to(dtype), *caches, offsets, lengths, table, torch.tensor(0.05)


def decode(query, key_cache, value_cache, offsets, lengths, table, **options):
    caches = {"key_cache": key_cache, "value_cache": value_cache, "block_table": table}
    return ir.ops.attention(query, None, None, offsets, 1, lengths, **caches, **options)


@pytest.mark.parametrize(
    "options",
    [{}, {"scale": 0.3, "window": 2}, {"causal": False, "soft_cap": 4.0}, {"sinks": torch.ones(HEADS)}],
    ids=str,
)  # fmt: skip
def test_a_quantisation_behind_attention_becomes_its_output_scale(options):
    def program(query, key, value, offsets, scale):
        return ir.ops.static_quant_fp8(ir.ops.attention(query, key, value, offsets, 2, **options), scale)

    found, report = fused(program, *packed())
    assert found == 1
    assert list(report.selected_impls["attention"].values()) == ["k"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bound", [None, 8])
def test_heads_may_be_laid_side_by_side_before_they_are_quantised(dtype, bound):
    def program(*args):
        out = decode(*args[:-1], max_seqlen_k=bound, sinks=None)
        return ir.ops.static_quant_fp8(out.flatten(-2), args[-1])

    assert fused(program, *decoding(dtype))[0] == 1


def test_a_quantisation_that_is_written_out_is_matched():
    def program(*args):
        out = decode(*args[:-1]).float() * (1.0 / args[-1])
        return out.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)

    assert fused(program, *decoding(torch.bfloat16))[0] == 1


def test_a_result_that_is_read_elsewhere_stays():
    def program(*args):
        out = decode(*args[:-1])
        return ir.ops.static_quant_fp8(out, args[-1]).float() + out

    torch._dynamo.reset()
    with torch.no_grad(), ir.priority(NATIVELY | {"attention": ["k"]}):
        torch.compile(program, backend=lowered, fullgraph=True)(*decoding())
    report = last_report()
    assert "attention" not in report.fusions
    assert any("also used" in miss.reason for miss in report.missed_fusions if miss.op == "attention")


def test_a_provider_that_knows_no_scale_says_so():
    def program(*args):
        return ir.ops.static_quant_fp8(decode(*args[:-1]), args[-1])

    ir.ops.attention.unregister_impl("k")
    found, report = fused(program, *decoding(), provider="old")
    assert found == 0
    assert any("old: " in miss.reason and "output_scale" in miss.reason for miss in report.missed_fusions)
    assert list(report.selected_impls["attention"].values()) == ["old"]


def test_a_scale_for_each_row_is_not_the_ops():
    def program(*args):
        out = decode(*args[:-1])
        return (out * (1.0 / out.detach().abs().amax(-1, keepdim=True))).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)

    assert fused(program, *decoding())[0] == 0


def test_the_definition_is_compared_by_its_meaning_whatever_kernel_is_chosen(provider):
    @ir.ops.attention.register_impl("far")
    def far(
        query, key, value, cu_seqlens_q, max_seqlen_q, seq_lens=None, max_seqlen_k=None, key_cache=None,
        value_cache=None, block_table=None, scale=None, causal=True, window=None, soft_cap=None, sinks=None,
    ):  # fmt: skip
        return torch.full_like(query, 7.0)

    try:
        with ir.priority(attention=["far"]):
            assert wrong_spelling(ir.ops.attention, ir.ops.attention.spellings[0]) is None
    finally:
        ir.ops.attention.unregister_impl("far")
