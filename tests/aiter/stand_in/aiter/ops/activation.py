"""AITER's gated activations, in torch: float32, rounded once."""

import torch.nn.functional as F
from torch import Tensor

from aiter.record import called, rows


def _gated(name: str, out: Tensor, x: Tensor, activation) -> None:
    called(name, out, x)
    gate, up = x.float().chunk(2, -1)
    rows(name, out, gate)
    out.copy_(activation(gate) * up)


def silu_and_mul(out: Tensor, input: Tensor) -> None:
    _gated("silu_and_mul", out, input, F.silu)


def gelu_and_mul(out: Tensor, input: Tensor) -> None:
    _gated("gelu_and_mul", out, input, F.gelu)


def gelu_tanh_and_mul(out: Tensor, input: Tensor) -> None:
    _gated("gelu_tanh_and_mul", out, input, lambda gate: F.gelu(gate, approximate="tanh"))
