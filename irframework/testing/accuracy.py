"""How far results are from what the op means.

Owns the float64 reference, when an element is right, and the largest errors. An element is right if it is within the
op's tolerance of native in float64, or of native in the call's own dtype: a fused op rounds between its parts as these
do, so native itself may be further from float64 than a result in a wide dtype may be. Where terms cancel, each order
of rounding has errors of its own: an element may be twice as far from float64 as the worst of native's in its row.
Does not own the words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from irframework.op import NATIVE, IrOp
from irframework.testing.report import Accuracy
from irframework.testing.samples import map_tensors
from irframework.tolerance import Tolerance

_INF = float("inf")


@dataclass(frozen=True, slots=True)
class Distance:
    """How wrong the elements of an output are that are not right.

    Attributes:
        worst: The largest distance from the nearer reference.
        wrong: How many elements are wrong, of how many: `3 of 64`.
    """

    worst: float
    wrong: str


@dataclass(slots=True)
class Reference:
    """Native in float64, for the calls of one op.

    Attributes:
        op: The op.
        kept: Tensor arguments that native does not take as float64, by the dtypes of the call.
    """

    op: IrOp
    kept: dict[Any, frozenset[str] | None] = field(default_factory=dict)

    def __call__(self, args: tuple[Any, ...], expected: Sequence[Tensor]) -> list[Tensor] | None:
        """Native's outputs in float64, or None where native does not compute so.

        Args:
            args: The arguments in the order of the signature.
            expected: Native's outputs in the call's own dtype.
        """
        key = tuple(getattr(value, "dtype", value is None) for value in args)
        if key not in self.kept:
            self.kept[key] = self._find_kept(args)
        kept = self.kept[key]
        outputs = None if kept is None else self._apply(args, kept)
        if outputs is None or [each.shape for each in outputs] != [each.shape for each in expected]:
            return None
        return outputs

    def _find_kept(self, args: tuple[Any, ...]) -> frozenset[str] | None:
        """Some arguments must stay as they are: a scale that has to be float32, say. Find as few as possible."""
        named = self.op.named(args)
        floats = [name for name, value in named.items() if isinstance(value, Tensor) and value.is_floating_point()]
        kept = {name for name in floats if name not in self.op.activations}
        if self._apply(args, frozenset()) is not None:
            return frozenset()
        if self._apply(args, frozenset(kept)) is None:
            return None
        for name in sorted(kept):
            if self._apply(args, frozenset(kept - {name})) is not None:
                kept.remove(name)
        return frozenset(kept)

    def _apply(self, args: tuple[Any, ...], kept: frozenset[str]) -> list[Tensor] | None:
        def widened(value: Tensor) -> Tensor:
            return value.to(torch.float64) if value.is_floating_point() else value

        named = self.op.named(args)
        wide = tuple(value if name in kept else map_tensors(widened, value) for name, value in named.items())
        try:
            with torch.no_grad():
                outputs = self.op.registered[NATIVE].apply(wide)
        except Exception:  # it insists on a dtype, or the device knows no float64
            return None
        return list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]


def distance(got: Tensor, native: Tensor, exact: Tensor | None, tolerance: Tolerance) -> Distance | None:
    """How wrong an output is, or None if it is right.

    Args:
        got: The output.
        native: Native's, of the same shape and dtype.
        exact: Native's in float64, if there is one.
        tolerance: The op's for the output's dtype. Codes of 8 bits are also no more than one apart, where the tolerance
            is not larger than the step between them: `rtol` that of normal numbers, `atol` that of the smallest.
    """
    right, away = _near(got, native, got.dtype, tolerance)
    if exact is not None:
        right_too, away_too = _near(got, exact, got.dtype, tolerance)
        right, away = right | right_too | _no_worse_in_its_row(got, native, exact), torch.minimum(away, away_too)
    if bool(right.all()):
        return None
    return Distance(float(away[~right].max()), f"{int((~right).sum())} of {right.numel()}")


def _near(got: Tensor, want: Tensor, dtype: torch.dtype, tolerance: Tolerance) -> tuple[Tensor, Tensor]:
    rounded = _wide(want.to(dtype))
    a, b = _wide(got), _wide(want)
    away = (a - b).abs()
    # Equal infinities, and numbers that are infinite in this dtype only; NaN where the reference has NaN.
    same = (a == b) | (a == rounded) | (a.isnan() & b.isnan())
    right = same | ((away <= tolerance.atol + tolerance.rtol * b.abs()) & ~a.isnan() & b.isfinite())
    if dtype.itemsize == 1 and dtype.is_floating_point and tolerance.rtol <= torch.finfo(dtype).eps:
        smallest_step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
        near_zero = (away <= tolerance.atol) & (tolerance.atol > smallest_step)
        right &= same | near_zero | (_codes_apart(got, want.to(dtype)) <= 1)
    return right, torch.where(same, 0.0, away.nan_to_num(_INF, _INF, _INF))


def _no_worse_in_its_row(got: Tensor, native: Tensor, exact: Tensor) -> Tensor:
    """Which elements are at most twice as far from float64 as the worst of native's in their row; wide dtypes only."""
    if got.dtype.itemsize < 4 or not got.is_floating_point() or not got.numel() or not got.dim():
        return torch.zeros(got.shape, dtype=torch.bool)
    a, b, c = _wide(got), _wide(native), _wide(exact)
    off = (b - c).abs()
    worst = torch.where(off.isfinite(), off, 0.0).amax(-1, keepdim=True)
    return (a - c).abs() <= 2 * worst


def _wide(value: Tensor) -> Tensor:
    return value.detach().cpu().to(torch.complex128 if value.is_complex() else torch.float64)


def _codes_apart(first: Tensor, second: Tensor) -> Tensor:
    def ordinal(value: Tensor) -> Tensor:
        bits = value.detach().cpu().contiguous().view(torch.uint8).to(torch.int16)
        magnitude = bits & 0x7F
        return torch.where(bits >= 0x80, -magnitude, magnitude)

    return (ordinal(first) - ordinal(second)).abs()


@dataclass(slots=True)
class Errors:
    """The largest errors so far, by the call's dtype and the output."""

    worst: dict[tuple[str, int, str], list[float]] = field(default_factory=dict)

    def add(self, dtype: torch.dtype, index: int, got: Tensor, native: Tensor, exact: Tensor) -> None:
        """Count the errors of one output."""
        if not got.is_floating_point():
            return
        key = (_short(dtype), index, _short(got.dtype))
        known = self.worst.setdefault(key, [0.0] * 4)
        found = (*_errors(got, exact), *_errors(native, exact))
        self.worst[key] = [max(pair) for pair in zip(known, found, strict=True)]

    def accuracy(self) -> tuple[Accuracy, ...]:
        """The result."""
        return tuple(Accuracy(*key, *worst) for key, worst in self.worst.items())


def _errors(got: Tensor, exact: Tensor) -> tuple[float, float]:
    a, b = _wide(got), _wide(exact)
    finite = a.isfinite() & b.isfinite()
    if not bool(finite.any()):
        return 0.0, 0.0
    away = (a - b).abs()[finite]
    if got.dtype.itemsize == 1:
        return float(away.max()), float(_codes_apart(got, exact.to(got.dtype))[finite].max())
    info = torch.finfo(got.dtype)
    exponents = torch.frexp(b[finite]).exponent - 1
    step = torch.ldexp(torch.full_like(away, info.eps), exponents)
    return float(away.max()), float((away / step.clamp_min(info.smallest_normal * info.eps)).max())


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
