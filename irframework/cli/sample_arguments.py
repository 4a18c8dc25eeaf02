"""Arguments for one call of an op, from a shape and a dtype: what `explain` and `doctor` decide.

Owns where they are made: in memory, or as fakes that cost nothing. The arguments are those of the op's input generator.

Private torch API used here (read in 2.13): `torch._subclasses.fake_tensor.FakeTensorMode`.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from irframework.op import IrOp

_SMALL = 1 << 20  # elements; below, real memory costs less than the import of fake tensors


def sample_arguments(op: IrOp, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Any, ...]:
    """All arguments of one call, in the order of the signature.

    Only shape, dtype, strides and device decide a call, so a large tensor or one on another device is a fake: it costs
    nothing, and the device need not be here.

    Args:
        op: the op.
        shape: of the first activation.
        dtype: of the activations and weights.
        device: of all tensors.

    Raises:
        InvalidOpError: the op has no input generator.
    """
    with _holding_no_data(shape, device):
        return op.generate_inputs(shape=shape, dtype=dtype, device=device)


def _holding_no_data(shape: tuple[int, ...], device: str) -> AbstractContextManager[Any]:
    if device == "cpu" and math.prod(shape) <= _SMALL:
        return nullcontext()
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()
