"""Owns what the conditions of several families share, and when the kernels, and with them Triton, are imported."""

import functools
from types import ModuleType
from typing import Any

import torch

FLOATS: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32)

# An odd last dimension is left to native, whose error message is the op's own.
GATED: dict[str, Any] = {"row_contiguous": ("x",), "multiple_of": {"x": 2}}

NORM: dict[str, Any] = {"row_contiguous": ("x", "weight"), "last_dim_of": {"weight": "x"}}
ADD_NORM: dict[str, Any] = {
    "same_dtype": ("x", "x_residual"),
    "same_shape": ("x", "x_residual"),
    "row_contiguous": ("x", "x_residual", "weight"),
    "last_dim_of": {"weight": "x"},
}


@functools.cache
def launches() -> ModuleType:
    """The functions that launch kernels; the first call imports Triton."""
    from irframework_triton_kernels import launch

    return launch
