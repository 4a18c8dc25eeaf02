"""Norms, activations, convolutions and projections on a CUDA device: native against native on the CPU, and compiled."""

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
    "norms": ("gemma_rms_norm", "fused_add_gemma_rms_norm", "layer_norm", "fused_add_layer_norm"),
    "gated norms": ("rms_norm_gated", "mixer2_gated_rms_norm"),
    "gates": ("mul_and_silu", "gelu_and_mul_sparse", "swigluoai_and_mul", "fatrelu_and_mul"),
    "activations": ("gelu_new", "gelu_fast", "quick_gelu", "relu2", "xielu"),
    "convolutions": ("conv2d", "conv3d"),
    "projections": ("linear", "vocab_parallel_embedding", "logits"),
}
NAMES = [name for family in FAMILIES.values() for name in family]
TOLERANCES = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}  # sums in another order, then a rounding


@pytest.fixture(autouse=True)
def _float32_is_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_inductor_compiles_all_calls(family, dtype):
    made = [(getattr(ir.ops, name), call) for name in FAMILIES[family] for call in calls(name, dtype)]

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
