"""The device's kernels, as torch ops `torch.ops.toydev.*` that exist for this device only.

Owns the ops' schemas, shape functions and kernels. A kernel reads and writes the device's memory row by row; a real one
launches code on the device here.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from irframework_toydev.device import memory_of, on_device

LAUNCHES: Counter[str] = Counter()
_library = torch.library.Library("toydev", "DEF")


def _kernel(schema: str, shapes: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"toydev::{name}", shapes, lib=_library)

    def register(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*arguments: Any) -> Any:
            LAUNCHES[name] += 1
            return kernel(*(memory_of(a) if isinstance(a, Tensor) else a for a in arguments))

        _library.impl(name, launch, "PrivateUse1")
        return kernel

    return register


def _normed(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + epsilon)
    return (h if weight is None else h.to(weight.dtype) * weight).to(x.dtype)


@_kernel("rms_norm(Tensor x, Tensor? weight, float epsilon) -> Tensor", lambda x, weight, epsilon: x.new_empty(x.shape))
def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return on_device(_normed(x, weight, epsilon).contiguous())


@_kernel(
    "fused_add_rms_norm_(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float epsilon) -> ()",
    lambda x, residual, weight, epsilon: None,
)
def fused_add_rms_norm_(x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    residual.add_(x)
    x.copy_(_normed(residual, weight, epsilon))


@_kernel("silu_and_mul(Tensor x) -> Tensor", lambda x: x.new_empty((*x.shape[:-1], x.shape[-1] // 2)))
def silu_and_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return on_device((F.silu(gate) * up).contiguous())
