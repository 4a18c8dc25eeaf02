"""Ops and `torch.autocast`.

Owns one rule: an op is opaque to autocast, forwards and backwards. It computes in the dtypes that it is given, whatever
its implementation is made of, so eager and compiled agree and no provider returns another dtype than native. Casts go
around an op, not into it.

Private torch API used here (read in 2.11 and 2.13): `torch._C._is_any_autocast_enabled`, `torch._C._DisableAutocast`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

is_active: Callable[[], bool] = torch._C._is_any_autocast_enabled
off: Callable[[], AbstractContextManager[Any]] = torch._C._DisableAutocast


def disabled() -> AbstractContextManager[Any]:
    """A context without autocast. Where there is none it is empty, and Dynamo can trace it."""
    return off() if is_active() else nullcontext()


def is_in_keys_of(device: str) -> bool:
    """Whether the dispatch keys of a device's tensors, as a thread sees them, tell all that autocast does to an op.

    They tell of autocast on that device. CPU tensors beside an accelerator do not: an implementation may compute on it.
    (One for an accelerator that multiplies matrices on the CPU would do so in the dtype of autocast for the CPU.)
    """
    if device == "cpu":
        return torch.accelerator.current_accelerator() is None
    return device in ("cuda", "xpu", "mps")
