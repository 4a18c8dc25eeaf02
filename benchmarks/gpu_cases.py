"""The calls that `gpu_check.py` checks: every op, in the shapes, layouts and dtypes that kernels get wrong."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Arguments = tuple[Any, ...]
COMPILED = (
    "64x5120",
    "2x3x17",
    "strided",
    "weight fp32",
    "variance",
    "77x4096",
    "neox 129",
    "gptj partial",
    "neox 3x5",
)


@dataclass(frozen=True)
class Case:
    """One call of an op: how its arguments are made, for a dtype and a device."""

    op: str
    label: str
    make: Callable[[torch.dtype, str], Arguments]

    @property
    def compiled(self) -> bool:
        """Whether it is checked under torch.compile as well; some of each kind, since each takes seconds."""
        return self.label.startswith(COMPILED)


def normal(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def norm_case(op: str, label: str, shape: tuple[int, ...], weight: str = "same", *more: Any) -> Case:
    def make(dtype: torch.dtype, device: str) -> Arguments:
        w = None if weight == "none" else torch.randn(shape[-1], device=device)
        w = w.to(dtype) if w is not None and weight == "same" else w
        tensors = [normal(*shape, dtype=dtype, device=device) for _ in range(1 + (op == "fused_add_rms_norm"))]
        if "strided" in label:
            tensors = [torch.cat((t, t), -1)[..., : shape[-1]] for t in tensors]
        if "transposed" in label:
            tensors = [t.transpose(0, 1) for t in tensors]
        return (*tensors, w, 1e-5, *more)

    return Case(op, label, make)


def gated_case(op: str, label: str, shape: tuple[int, ...], *more: Any) -> Case:
    def make(dtype: torch.dtype, device: str) -> Arguments:
        x = normal(*shape, dtype=dtype, device=device) * 3
        return (torch.cat((x, x), -1)[..., : shape[-1]] if "strided" in label else x, *more)

    return Case(op, label, make)


def rotary_case(label: str, lead: tuple[int, ...], size: int, rotated: int, is_neox: bool, with_key: bool) -> Case:
    def make(dtype: torch.dtype, device: str) -> Arguments:
        angles = torch.outer(torch.arange(4096.0), 10000.0 ** -(torch.arange(0, rotated, 2) / rotated))
        cache = torch.cat((angles.cos(), angles.sin()), -1).to(device)
        joint = normal(*lead, (32 + 8) * size, dtype=dtype, device=device)
        query, key = joint[..., : 32 * size], joint[..., 32 * size :]
        if "apart" in label:
            query, key = query.unflatten(-1, (32, size)), key.unflatten(-1, (8, size))
        cache = cache.to(dtype) if "cache" in label else cache
        return (torch.randint(0, 4096, lead, device=device), query, key if with_key else None, cache, size, is_neox)

    return Case("rotary_embedding", label, make)


def cases() -> Iterator[Case]:
    for op in ("rms_norm", "fused_add_rms_norm"):
        for shape in ((1, 4096), (7, 2048), (64, 5120), (33, 8192), (5, 16384), (3, 100003), (9, 1), (129, 127)):
            yield norm_case(op, "x".join(map(str, shape)), shape)
        yield norm_case(op, "2x3x17x128", (2, 3, 17, 128))
        yield norm_case(op, "no rows", (0, 4096))
        yield norm_case(op, "strided 64x4096", (64, 4096))
        yield norm_case(op, "transposed 8x9x256", (8, 9, 256))
        yield norm_case(op, "weight fp32", (65, 4096), "fp32")
        yield norm_case(op, "weight None", (65, 4096), "none")
        yield norm_case(op, "variance_size 1000", (65, 4096), "same", 1000)
    for op, more in (("silu_and_mul", ()), ("gelu_and_mul", ("none",)), ("gelu_and_mul", ("tanh",))):
        for shape in ((1, 22016), (77, 4096), (3, 200006), (5, 2), (2, 3, 1026)):
            yield gated_case(op, " ".join(("x".join(map(str, shape)), *more)), shape, *more)
        yield gated_case(op, " ".join(("no rows", *more)), (0, 64), *more)
        yield gated_case(op, " ".join(("strided 64x4096", *more)), (64, 4096), *more)
    for is_neox in (True, False):
        style = "neox" if is_neox else "gptj"
        yield rotary_case(f"{style} 129 tokens", (129,), 128, 128, is_neox, True)
        yield rotary_case(f"{style} 3x5 apart", (3, 5), 64, 64, is_neox, True)
        yield rotary_case(f"{style} partial, no key", (17,), 80, 32, is_neox, False)
        yield rotary_case(f"{style} cache of the dtype", (17,), 128, 128, is_neox, True)
        yield rotary_case(f"{style} no tokens", (0,), 128, 128, is_neox, True)
