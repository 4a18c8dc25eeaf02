"""Fusion of latent attention with the quantisation of its result, under one scale or under one for each group.

A provider `k` takes both.
"""

import functools

import pytest
import torch
from compiler_support import lowered

import irframework as ir
from irframework.compiler.report import last_report

pytestmark = pytest.mark.usefixtures("seeded", "provider")
HEADS, RANK, ROPE, TOKENS = 4, 16, 4, 3
NATIVELY = {name: ["native"] for name in ir.ops.__all__}
OPS = (ir.ops.mla_attention, ir.ops.mla_attention_group_quant_fp8)


@pytest.fixture
def provider():
    for op in OPS:
        op.register_impl("k")(functools.wraps(op.native)(lambda *args, op=op, **words: op.native(*args, **words)))
    yield
    for op in OPS:
        op.unregister_impl("k")


def fused(program, *inputs):
    """How often each op was found, where the result is that of native, bit for bit."""
    torch._dynamo.reset()
    with torch.no_grad(), ir.priority(NATIVELY | {op.name: ["k"] for op in OPS}):
        got = torch.compile(program, backend=lowered, fullgraph=True)(*inputs)
    with torch.no_grad(), ir.priority(NATIVELY):
        wanted = program(*inputs)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    return last_report().fusions


def decoding(dtype=torch.float32, up=True):
    """Queries, products, a cache, and where its rows are."""
    nope = 6 if up else RANK
    return {
        "query_nope": torch.randn(TOKENS, HEADS, nope).to(dtype),
        "query_rope": torch.randn(TOKENS, HEADS, ROPE).to(dtype),
        "latent": None,
        "cu_seqlens_q": torch.arange(TOKENS + 1, dtype=torch.int32),
        "max_seqlen_q": 1,
        "scale": 0.3,
        "key_up": torch.randn(HEADS, nope, RANK).to(dtype) if up else None,
        "value_up": torch.randn(HEADS, RANK, 8).to(dtype) if up else None,
        "seq_lens": torch.tensor([5, 1, 8], dtype=torch.int32),
        "max_seqlen_k": 8,
        "latent_cache": torch.randn(4, 4, RANK + ROPE).to(dtype),
        "block_table": torch.tensor([[0, 3], [1, 2], [2, 0]], dtype=torch.int32),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("up", [False, True])
def test_a_quantisation_behind_latent_attention_becomes_its_output_scale(dtype, up):
    def program(given, scale):
        return (ir.ops.static_quant_fp8(ir.ops.mla_attention(**given).flatten(-2), scale),)

    assert fused(program, decoding(dtype, up), torch.tensor([0.02])) == {"mla_attention": 1}


@pytest.mark.parametrize("layout", [(16, False, False), (8, True, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("up", [False, True])
def test_groups_behind_latent_attention_are_quantised_by_the_op_for_both(dtype, up, layout):
    def program(given):
        return ir.ops.group_quant_fp8(ir.ops.mla_attention(**given).flatten(-2), *layout)

    assert fused(program, decoding(dtype, up)) == {"mla_attention_group_quant_fp8": 1}


def test_groups_of_the_rows_of_packed_sequences_are_found():
    def program(nope, rope, latent, offsets):
        y = ir.ops.mla_attention(nope, rope, latent, offsets, 2, 0.3)
        return ir.ops.group_quant_fp8(y.flatten(-2), 16)

    nope, rope, latent = (torch.randn(TOKENS, *rest) for rest in ((HEADS, RANK), (HEADS, ROPE), (RANK + ROPE,)))
    offsets = torch.tensor([0, 1, TOKENS], dtype=torch.int32)
    assert fused(program, nope, rope, latent, offsets) == {"mla_attention_group_quant_fp8": 1}
