"""Whether a further spelling of an op computes what the op's native computes.

Owns the comparison, on the calls that the op's input generator yields: what comes out on fake tensors, and the numbers
on small real ones on the CPU. Does not own how spellings are registered (`spellings.py`), nor what becomes of a wrong
one (`fusable_ops.py`).

Private torch API, read in 2.11 and 2.13: `TorchDispatchMode`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from irframework.compiler.shown_calls import generated_calls
from irframework.compiler.skeletons import samples_of
from irframework.errors import SpellingError
from irframework.torch_ops import op_of

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp

_CALLS = 8  # of each dtype
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def wrong_spelling(op: IrOp, spelling: IrOpImpl) -> SpellingError | None:
    """The error for a spelling that computes something else than native; None for one that does not."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for dtype in _DTYPES:
            for arguments in itertools.islice(_calls(op, dtype), _CALLS):
                problem = _difference(op, spelling, arguments, dtype)
                if problem is not None:
                    return SpellingError(
                        f"The spelling at {spelling.source} of op {op.name!r} ({op.source}) is not that op: {problem}. "
                        "Correct it, or take its register_spelling away."
                    )
    return None


def _calls(op: IrOp, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Small calls on the CPU, of which native may take some only."""
    if op.input_generator is None:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            guessed = list(samples_of(op, mode, []))
        for call in guessed:
            yield tuple(_real(value, dtype) if isinstance(value, Tensor) else value for value in call)
        return
    try:
        yield from generated_calls(op, dtype)
    except Exception:  # a generator need not know all dtypes
        return


def _real(value: Tensor, dtype: torch.dtype) -> Tensor:
    if value.dtype.is_floating_point:
        return torch.randn(value.shape).to(dtype)
    return torch.zeros(value.shape, dtype=value.dtype)


class _NativeOnly(TorchDispatchMode):
    """Lets ops inside a body run native: what a provider's kernel rounds otherwise is no fault of a spelling."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op_of(func)
        if found is None:
            return func(*args, **(kwargs or {}))
        with self:
            return found[0].native(*found[0].bind(args, kwargs or {}))


def _difference(op: IrOp, spelling: IrOpImpl, arguments: tuple[Any, ...], dtype: torch.dtype) -> str | None:
    try:
        with _NativeOnly():
            wanted = op.registered["native"].apply(_copies(arguments))
    except Exception:
        return None  # no call of this op
    called = f"for {str(dtype).removeprefix('torch.')} arguments"
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            faked = _tuple(spelling.apply(tuple(_faked(value, mode) for value in arguments)))
        with _NativeOnly():
            got = _tuple(spelling.apply(_copies(arguments)))
    except Exception as error:
        return f"{called} it raises {type(error).__name__}: {error}"
    wanted = _tuple(wanted)
    for values, kind in ((faked, " on fake tensors"), (got, "")):
        if [_kind(value) for value in values] != [_kind(value) for value in wanted]:
            shown = (", ".join(map(_kind, outputs)) for outputs in (values, wanted))
            return f"{called} it returns {next(shown)}{kind}, and the op {next(shown)}"
    for index, (value, right) in enumerate(zip(got, wanted, strict=True)):
        if isinstance(value, Tensor) and isinstance(right, Tensor):
            problem = _numbers(op, value, right)
            if problem is not None:
                return f"{called} output {index} {problem}"
    return None


def _numbers(op: IrOp, value: Tensor, right: Tensor) -> str | None:
    tolerance = op.get_tolerance(right.dtype)
    one, other = value.double(), right.double()
    difference = (one - other).abs()
    near = difference <= tolerance.atol + tolerance.rtol * other.abs()
    same = near | (one == other) | (one.isnan() & other.isnan())
    if bool(same.all()):
        return None
    largest = difference.nan_to_num(nan=float("inf")).masked_fill(same, 0).max().item()
    return f"differs by up to {largest:.3g} (allowed: {tolerance.atol:g} + {tolerance.rtol:g} of the value)"


def _copies(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(value.clone() if isinstance(value, Tensor) else value for value in arguments)


def _faked(value: Any, mode: FakeTensorMode) -> Any:
    return mode.from_tensor(value) if isinstance(value, Tensor) else value


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _kind(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__
