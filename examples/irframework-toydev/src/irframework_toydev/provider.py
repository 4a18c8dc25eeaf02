"""The provider `toy_kernels`: which calls the kernels take, and how an op's call becomes a kernel's."""

import torch
from torch import Tensor

import irframework as ir
from irframework_toydev import kernels  # noqa: F401  (declares torch.ops.toydev)
from irframework_toydev.device import NAME

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    return torch.ops.toydev.rms_norm(x, weight, epsilon)


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    torch.ops.toydev.fused_add_rms_norm_(x, x_residual, weight, epsilon)
    return x, x_residual


def silu_and_mul(x: Tensor) -> Tensor:
    return torch.ops.toydev.silu_and_mul(x)


def register(provider: str) -> None:
    norm = ir.supports(dtype=FLOATS, none=("variance_size",), last_dim_of={"weight": "x"})
    same = ("x", "x_residual")
    ir.ops.rms_norm.register_impl(provider, supports_args=norm, device_types=(NAME,))(rms_norm)
    ir.ops.fused_add_rms_norm.register_impl(
        provider,
        supports_args=norm & ir.supports(same_dtype=same, same_shape=same),
        device_types=(NAME,),
        inplace=True,
    )(fused_add_rms_norm)
    ir.ops.silu_and_mul.register_impl(
        provider, supports_args=ir.supports(dtype=FLOATS, multiple_of={"x": 2}), device_types=(NAME,)
    )(silu_and_mul)
