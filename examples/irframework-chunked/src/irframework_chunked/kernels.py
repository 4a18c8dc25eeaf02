"""The kernels, and what they take."""

import os

import torch
from torch import Tensor

import irframework as ir

FLOATS = (torch.float32, torch.bfloat16, torch.float16)

# A loop over rows is no graph: torch is given the kernel as an operator, in a namespace of the plugin's own.
library = torch.library.Library("irframework_chunked", "DEF")
library.define("rms_norm(Tensor x, Tensor? weight, float epsilon) -> Tensor")


def block_kib() -> int:
    """How many KiB of float32 a block has: the size of a core's own cache."""
    return int(os.environ.get("CHUNKED_KIB", "256"))


def rms_norm_in_blocks(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    hidden = x.shape[-1]
    y = torch.empty_like(x)
    rows = max(1, block_kib() * 256 // max(1, hidden))
    blocks = zip(x.view(-1, hidden).split(rows), y.view(-1, hidden).split(rows), strict=True)
    for block, out in blocks:
        h = block.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + epsilon)
        out.copy_(h if weight is None else h.to(weight.dtype) * weight)
    return y


library.impl("rms_norm", rms_norm_in_blocks, "CPU")
torch.library.register_fake(
    "irframework_chunked::rms_norm", lambda x, weight, epsilon: torch.empty_like(x), lib=library
)


def can_run() -> bool:
    return block_kib() > 0


def weight_fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None):
    if weight is not None and weight.dtype not in (x.dtype, torch.float32):
        return ir.reject(f"weight is {weight.dtype}, needs {x.dtype} or torch.float32")
    return True


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    return torch.ops.irframework_chunked.rms_norm.default(x, weight, epsilon)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    return x.div_(cap).tanh_().mul_(cap)


def register(provider: str) -> None:
    ir.ops.rms_norm.register_impl(
        provider,
        supported=can_run,
        supports_args=ir.supports(
            dtype=FLOATS, none=("variance_size",), contiguous=("x",), ndim=(2, 3), last_dim_of={"weight": "x"}
        )
        & weight_fits,
        device_types=("cpu",),
        batch_invariant=True,
    )(rms_norm)
    ir.ops.soft_cap.register_impl(provider, supports_args=ir.supports(dtype=FLOATS), inplace=True)(soft_cap)
