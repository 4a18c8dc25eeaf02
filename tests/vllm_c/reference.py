"""Owns what the tests compare the kernels with: each op's definition in plain torch, in the roundings the standard ops
prescribe (`native_*`), and in float64 without any (`exact_*`)."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def native_rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    hidden = x.float()
    hidden = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)
    if weight is not None:
        hidden = hidden.to(weight.dtype) * weight
    return hidden.to(x.dtype)


def exact_rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    hidden = x.double()
    hidden = hidden / (hidden.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
    return hidden if weight is None else hidden * weight.double()


def activation(gate: Tensor, name: str) -> Tensor:
    return F.silu(gate) if name == "silu" else F.gelu(gate, approximate=name)


def native_gated(x: Tensor, name: str) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return activation(gate, name) * up


def exact_activation(gate: Tensor, name: str) -> Tensor:
    """In forms that do not cancel: torch's own gelu has no correct digit left at -9, in float64 too."""
    x = gate.double()
    if name == "none":
        return x * 0.5 * torch.special.erfc(-x / math.sqrt(2))
    return x * torch.sigmoid(x if name == "silu" else 2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def exact_gated(x: Tensor, name: str) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return exact_activation(gate, name) * up.double()


def exact_rotary(
    positions: Tensor, x: Tensor, cache: Tensor, head_size: int, is_neox: bool, dtype: torch.dtype
) -> Tensor:
    """In `dtype` arithmetic, not rounded back; x has its heads apart ([..., heads, head_size]) or merged."""
    rows = cache[positions].to(dtype)
    cos, sin = (part.unsqueeze(-2) for part in rows.chunk(2, dim=-1))
    apart = x.dim() == positions.dim() + 2
    heads = x.to(dtype) if apart else x.to(dtype).unflatten(-1, (-1, head_size))
    rotated, rest = heads[..., : cache.shape[1]], heads[..., cache.shape[1] :]
    if is_neox:
        first, second = rotated.chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    else:
        first, second = rotated[..., ::2], rotated[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    return torch.cat((turned, rest), dim=-1).reshape(x.shape)


def assert_near_exact(got: Tensor, exact: Tensor, roundings: float, factor: Tensor | float = 1.0) -> None:
    """`got` must lie within `roundings` units of its dtype's precision of the float64 result, element by element.

    Where the dtype has no full precision left (float16 subnormals; whatever is below float32's normal numbers) one step
    there may be lost, times 1 + `factor` where an intermediate result of that size is multiplied by `factor`.
    """
    info = torch.finfo(got.dtype)
    step = info.smallest_normal * (info.eps if got.dtype == torch.float16 else 16.0)
    error = (got.double() - exact).abs()
    allowed = roundings * info.eps * exact.abs() + step * (1.0 + torch.as_tensor(factor).double().abs())
    excess = error - allowed
    assert (excess <= 0).all(), f"{(error / exact.abs() / info.eps)[excess > 0].max()} units off"
