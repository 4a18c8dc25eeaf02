"""Mixtures of experts, causal convolutions and state spaces on a CUDA device: native against native on the CPU."""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("natively"),
]

FAMILIES = {
    "routing": ("fused_topk", "grouped_topk", "moe_align_block_size"),
    "experts": ("fused_moe",),
    "causal convolutions": ("causal_conv1d", "causal_conv1d_update", "short_conv"),
    "steps": ("selective_state_update",),
    "scan": ("selective_scan",),
    "chunked scan": ("mamba2_chunk_scan",),
}
NAMES = [name for family in FAMILIES.values() for name in family]
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # sums in another order, then a rounding


def calls(name, dtype, rows=5):
    torch.manual_seed(rows)
    op = getattr(ir.ops, name)
    made = op.input_generator(shape=(rows, 64), dtype=dtype, device="cpu")
    return [op.bind(arguments) for arguments in ([made] if isinstance(made, tuple) else made)]


def there(arguments):
    return [a.cuda() if isinstance(a, Tensor) else a for a in arguments]


def near(got, wanted, dtype):
    for one, other in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, wanted)), strict=True):
        assert one.is_cuda
        torch.testing.assert_close(one.cpu(), other, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("name", NAMES)
def test_a_cuda_device_gives_what_the_cpu_gives(name, dtype):
    op = getattr(ir.ops, name)
    for arguments in calls(name, dtype):
        near(op(*there(arguments)), op(*arguments), dtype)


@pytest.mark.parametrize("name", NAMES)
def test_no_rows_give_none(name):
    op = getattr(ir.ops, name)
    for arguments in calls(name, torch.bfloat16, 0):
        near(op(*there(arguments)), op(*arguments), torch.bfloat16)


def test_many_tokens_go_through_many_blocks():
    for name, shape in (
        ("selective_scan", (2, 777, 64)),
        ("mamba2_chunk_scan", (2, 777, 4, 16)),
        ("fused_moe", (999, 64)),
    ):
        op = getattr(ir.ops, name)
        torch.manual_seed(0)
        arguments = op.generate_inputs(shape=shape, dtype=torch.float32)
        near(op(*there(arguments)), op(*arguments), torch.float32)


@pytest.mark.parametrize(
    ("name", "argument", "values"),
    [
        ("selective_scan", "query_start_loc", [5, -9, 99, 3]),
        ("mamba2_chunk_scan", "query_start_loc", [5, -9, 99, 3]),
        ("causal_conv1d", "query_start_loc", [5, -9, 99, 3]),
        ("selective_state_update", "state_indices", [99, -7, 3, 0, 1, 8, 2, 4]),
        ("causal_conv1d_update", "conv_state_indices", [99, -7, 3, 0, 1, 8, 2, 4]),
        ("fused_moe", "topk_ids", [[-9, 99]] * 8),
    ],
)
def test_wrong_values_are_memory_safe(name, argument, values):
    """Native computes something, and the device goes on working."""
    op = getattr(ir.ops, name)
    call = op.named(op.generate_inputs(shape=(8, 64))) | {argument: torch.tensor(values)}
    op.native(**dict(zip(call, there(call.values()), strict=True)))
    torch.cuda.synchronize()
    assert float(torch.ones(3, device="cuda").sum()) == 3.0


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_inductor_compiles_the_usual_calls(family):
    dtype = torch.float32
    made = [(getattr(ir.ops, name), calls(name, dtype)[0]) for name in FAMILIES[family]]

    def everything(*tensors):
        rest = list(reversed(tensors))
        return [op(*(rest.pop() if a is Tensor else a for a in held)) for op, held in kept]

    kept = [(op, [Tensor if isinstance(a, Tensor) else a for a in call]) for op, call in made]
    tensors = [a.cuda() for _, call in made for a in call if isinstance(a, Tensor)]
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(everything, fullgraph=True)(*tensors)
    for one, (op, call) in zip(got, made, strict=True):
        near(one, op(*call), dtype)
