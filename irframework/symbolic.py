"""Watching the shape environment while a predicate runs.

Owns how symbolic sizes are found in a call's arguments and how a new guard is noticed. Does not decide what to do
about it.

Private torch API used here (read in 2.11 and 2.13): `ShapeEnv.guards`, `FakeTensor.fake_mode`,
`torch.fx.experimental.symbolic_shapes._ShapeEnvGuardError`.
"""

from typing import Any

import torch
from torch import Tensor


def shape_env_of(args: tuple[Any, ...]) -> Any | None:
    """Return the shape environment of the first symbolic argument, or None when all sizes are plain numbers."""
    for value in (item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))):
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return value.node.shape_env
        if isinstance(value, Tensor):
            environment = getattr(getattr(value, "fake_mode", None), "shape_env", None)
            if environment is not None:
                return environment
    return None


def guard_count(environment: Any | None) -> int:
    """Return how many guards an environment holds."""
    return 0 if environment is None else len(environment.guards)


def newest_guard(environment: Any) -> str:
    """Return the guard that was added last, as text."""
    return str(environment.guards[-1].expr)


def is_guard_error(error: BaseException) -> bool:
    """Whether torch raised because a guard was about to be added; such an error is no answer of a predicate."""
    return type(error).__name__ == "_ShapeEnvGuardError"
