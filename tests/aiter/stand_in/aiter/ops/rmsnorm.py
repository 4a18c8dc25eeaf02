"""AITER's norms, in torch: float32, rounded once."""

import torch
from torch import Tensor

from aiter.record import called, rows


def _norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    if type(epsilon) is not float or weight.shape != x.shape[-1:]:
        raise TypeError(f"epsilon {epsilon!r}, weight {tuple(weight.shape)} for rows {tuple(x.shape)}")
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + epsilon)
    return (h * weight.float()).to(x.dtype)


def rmsnorm2d_fwd(
    input: torch.Tensor, weight: torch.Tensor, epsilon: float, use_model_sensitive_rmsnorm: int = 0
) -> Tensor:
    called("rmsnorm2d_fwd", input, weight)
    rows("rmsnorm2d_fwd", input)
    return _norm(input, weight, epsilon)


def rmsnorm2d_fwd_with_add(
    out: Tensor,
    input: Tensor,
    residual_in: Tensor,
    residual_out: Tensor,
    weight: Tensor,
    epsilon: float,
    use_model_sensitive_rmsnorm: int = 0,
) -> None:
    called("rmsnorm2d_fwd_with_add", out, input, residual_in, residual_out, weight)
    rows("rmsnorm2d_fwd_with_add", out, input, residual_in, residual_out)
    residual_out.copy_(input + residual_in)
    out.copy_(_norm(residual_out, weight, epsilon))
