"""What dtypes are called on the command line.

Owns the names and their short forms. Importing it does not import torch, since `--help` must answer at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_SHORT = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
DTYPE_NAMES = (*_SHORT.values(), *_SHORT)


def dtype_called(name: str) -> torch.dtype:
    """The dtype of one of `DTYPE_NAMES`."""
    import torch

    dtype: torch.dtype = getattr(torch, _SHORT.get(name, name))
    return dtype
