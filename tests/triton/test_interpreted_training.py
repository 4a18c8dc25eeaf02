"""Gradients through the Triton kernels, run by Triton's interpreter on the CPU."""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.interpreter


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 1))


CALLS = {
    "rms_norm": lambda: (random(3, 16), random(16), 1e-3, 12),
    "fused_add_rms_norm": lambda: (random(3, 16), random(4, 16)[1:], random(16), 1e-3),
    "silu_and_mul": lambda: (random(3, 16),),
    "gelu_and_mul": lambda: (random(3, 16), "tanh"),
    "rotary_embedding": lambda: (torch.tensor([3, 0, 1]), random(3, 16), random(3, 8), random(4, 6), 8, False),
}


@pytest.fixture
def interpreted(request):
    """An op with the kernels as a provider that, unlike `triton`, is also for the CPU."""
    from irframework_triton_kernels import implementations

    op = getattr(ir.ops, request.param)
    op.register_impl("interpreted")(getattr(implementations, op.name))
    with ir.priority({op.name: "interpreted"}):
        yield op
    op.unregister_impl("interpreted")


def gradients(call, arguments, dtype):
    given = [a.to(dtype).requires_grad_() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments]
    outputs = call(*given)
    outputs = [outputs] if isinstance(outputs, Tensor) else outputs
    total = sum((output.double().pow(2) + output.double().sin()).sum() for output in outputs)
    return torch.autograd.grad(total, [a for a in given if isinstance(a, Tensor) and a.requires_grad])


@pytest.mark.parametrize("interpreted", CALLS, indirect=True)
def test_gradients_are_those_of_native(interpreted):
    arguments = CALLS[interpreted.name]()
    assert interpreted.dispatch(*arguments).provider == "interpreted"
    got = gradients(interpreted, arguments, torch.float32)
    want = gradients(interpreted.native, arguments, torch.float64)
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, atol=1e-4, rtol=1e-4)
