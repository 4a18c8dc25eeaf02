"""Arguments for one call of an op, from a shape and a dtype: what `explain` and `doctor` decide.

An op's own input generator comes first. Owns the arguments of the standard ops that have none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from irframework.op import IrOp

HEAD_SIZE = 64
Shape = tuple[int, ...]
Make = Callable[[Shape], Tensor]


def _norm(make: Make, shape: Shape) -> tuple[Any, ...]:
    return (make(shape), make(shape[-1:]), 1e-6)


def _add_norm(make: Make, shape: Shape) -> tuple[Any, ...]:
    return (make(shape), make(shape), make(shape[-1:]), 1e-6)


def _gated(make: Make, shape: Shape) -> tuple[Any, ...]:
    return (make(shape),)


def _rotary(make: Make, shape: Shape) -> tuple[Any, ...]:
    """`shape` is [..., heads * head_size] of the query; as many key heads, and a head of 64 where that divides."""
    head = HEAD_SIZE if shape[-1] % HEAD_SIZE == 0 else shape[-1]
    query = make(shape)
    positions = torch.zeros(shape[:-1], dtype=torch.int64, device=query.device)
    return (positions, query, make(shape), make((128, head)), head)


_SMALL = 1 << 20  # elements; below, real memory costs less than the import of fake tensors


def _holding_no_data(shape: Shape, device: str) -> AbstractContextManager[Any]:
    if device == "cpu" and math.prod(shape) <= _SMALL:
        return nullcontext()
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


_STANDARD: dict[str, Callable[[Make, Shape], tuple[Any, ...]]] = {
    "rms_norm": _norm,
    "fused_add_rms_norm": _add_norm,
    "silu_and_mul": _gated,
    "gelu_and_mul": _gated,
    "rotary_embedding": _rotary,
}


def sample_arguments(op: IrOp, shape: Shape, dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """All arguments of one call, in the order of the signature.

    Only shape, dtype, strides and device decide a call, so a large tensor or one on another device is a fake: it costs
    nothing, and the device need not be here.

    Args:
        op: the op.
        shape: of the first activation.
        dtype: of the activations and weights.
        device: of all tensors.

    Raises:
        InvalidOpError: the op is no standard op and has no input generator.
    """
    with _holding_no_data(shape, device):
        build = _STANDARD.get(op.name)
        if op.input_generator is not None or build is None:
            return op.generate_inputs(shape=shape, dtype=dtype, device=device)
        return op.bind(build(lambda size: torch.empty(size, dtype=dtype, device=device), shape))
