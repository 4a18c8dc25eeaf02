"""Symbolic sizes: asking about them without guards, and noticing guards that others add.

Owns how symbolic sizes are found in a call's arguments, how a new guard is noticed, and questions about shapes that
also have an answer where only a run can tell a size (unbacked sizes, e.g. of `x[mask]`). Does not decide what to do
about a guard.

Private torch API used here (read in 2.11 and 2.13): `ShapeEnv.guards` and `.replacements`, `SymNode._expr`,
`FakeTensor.fake_mode`, `torch._prims_common.is_contiguous_or_false`, and of `torch.fx.experimental.symbolic_shapes`
`_ShapeEnvGuardError`, `GuardOnDataDependentSymNode`, `guard_or_true` and `guard_or_false`.
"""

from collections.abc import Sequence
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


_TRIED = (2, 3, 4, 5, 7, 8, 13, 16, 17, 32, 33, 64, 96, 100, 128, 1000, 1024, 4096, 4097, 1 << 20, 1 << 31)


def size_guard(environment: Any | None, before: int, args: tuple[Any, ...]) -> str | None:
    """Return, as text, a guard on a size or stride that was added since there were `before` guards; None without one.

    A guard on a number argument does not count: under `dynamic=True` an int of the caller's is symbolic as well, and
    torch specializes it at the first operator that takes a plain int. Neither does one that holds for every size that
    the guards before it allow, as torch's own operators add them (`s // 2 != 0`), given what such numbers are by now.
    """
    if environment is None or len(environment.guards) <= before:
        return None
    symbols = set()
    for value in (item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))):
        if isinstance(value, Tensor):
            for number in (*value.shape, *value.stride(), value.storage_offset()):
                if isinstance(number, torch.SymInt):
                    symbols |= number.node._expr.free_symbols  # `expr` has lost those that are numbers now
    known = {symbol: value for symbol, value in environment.replacements.items() if symbol not in symbols}
    earlier = [guard.expr.xreplace(known) for guard in environment.guards[:before]]
    for guard in reversed(environment.guards[before:]):
        if guard.expr.free_symbols & symbols and not _holds_for_all(guard.expr, earlier):
            return str(guard.expr)
    return None


def _holds_for_all(expression: Any, earlier: list[Any]) -> bool:
    """Whether a guard holds for all tried sizes that pass the earlier guards. torch itself treats 0 and 1 apart."""
    from sympy import Integer

    symbols = sorted(expression.free_symbols, key=str)
    known = [guard for guard in earlier if guard.free_symbols <= set(symbols)]
    for first in range(len(_TRIED)):
        for step in (0, 1, 5):  # all sizes alike, and different ones
            values = {
                symbol: Integer(_TRIED[(first + step * place) % len(_TRIED)]) for place, symbol in enumerate(symbols)
            }
            if all(bool(guard.xreplace(values)) for guard in known) and not bool(expression.xreplace(values)):
                return False
    return True


def is_guard_error(error: BaseException) -> bool:
    """Whether torch raised because a guard was about to be added; such an error is no answer of a predicate."""
    return type(error).__name__ == "_ShapeEnvGuardError"


def only_a_run_can_tell(error: BaseException) -> bool:
    """Whether torch raised because a question depends on the value of an unbacked size."""
    return type(error).__name__ == "GuardOnDataDependentSymNode"


def is_contiguous(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous; False where that depends on a size that only a run can tell."""
    if shape_env_of((tensor,)) is None:
        return tensor.is_contiguous()
    return bool(torch._prims_common.is_contiguous_or_false(tensor))


def starts_at_multiple(tensor: Tensor, of_bytes: int) -> bool:
    """Whether a tensor starts at a multiple of so many bytes of its storage; False where that is not known.

    It is not where Dynamo traces a native itself, which reads no offsets, nor where only a run can tell the offset.
    """
    if torch.compiler.is_dynamo_compiling():
        return False
    start = tensor.storage_offset() * tensor.element_size()
    if isinstance(start, int):
        return start % of_bytes == 0
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(start % of_bytes == 0))


def same_sizes(sizes: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two shapes agree. Sizes that only a run can tell count as equal, and torch checks them in that run."""
    if len(sizes) != len(others):
        return False
    for size, other in zip(sizes, others, strict=True):
        if type(size) is int and type(other) is int:
            if size != other:
                return False
        elif not _equal_symbols(size, other):
            return False
    return True


def _equal_symbols(size: Any, other: Any) -> bool:
    from torch.fx.experimental.symbolic_shapes import guard_or_true  # a second to import; traced calls have it

    if not guard_or_true(size == other):
        return False
    torch._check(size == other)
    return True
