"""Owns the record of calls, and the checks that AITER's kernels make or silently rely on."""

import torch
from torch import Tensor

CALLS: list[str] = []


def called(name: str, *tensors: Tensor) -> None:
    """Record a call, and reject tensors that the kernels would misread."""
    CALLS.append(name)
    first = tensors[0]
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: expected a tensor, got {tensor!r}")
        if tensor.dtype not in (torch.bfloat16, torch.float16) or tensor.dtype != first.dtype:
            raise RuntimeError(f"{name}: dtypes {[t.dtype for t in tensors]}")
        if not tensor.is_contiguous() or tensor.numel() == 0:
            raise RuntimeError(f"{name}: strides {tensor.stride()}, shape {tuple(tensor.shape)}")


def rows(name: str, *tensors: Tensor) -> None:
    """Reject what is not [rows, hidden], all alike."""
    if any(tensor.dim() != 2 or tensor.shape != tensors[0].shape for tensor in tensors):
        raise RuntimeError(f"{name}: shapes {[tuple(tensor.shape) for tensor in tensors]}")
