"""What is found while an implementation is tried.

Owns counting: how often each rule was asked about, and in how many calls it was broken. Does not own the words
(`irframework/contract.py`) nor the result (`report.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from irframework.contract import Breach, titled
from irframework.testing.report import FAILED, PASSED, SKIPPED, RuleResult, Violation

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl


class DeviceLostError(Exception):
    """The device cannot be used any more: after a fault of a kernel, CUDA refuses everything."""


@dataclass(slots=True)
class Findings:
    """Of one implementation.

    Attributes:
        impl: The implementation.
        wanted: The rules that are asked about; breaches of others are not kept.
        told: Called with each call before it is made.
    """

    impl: IrOpImpl
    wanted: Sequence[str]
    told: Callable[[str], None] = lambda call: None
    found: dict[tuple[str, object], Violation] = field(default_factory=dict)
    asked: Counter[str] = field(default_factory=Counter)
    skipped: dict[str, str] = field(default_factory=dict)

    def note(self, breach: Breach | None, subject: object, call: str) -> None:
        """Keep a breach; one about the same subject is counted."""
        if breach is None or breach.rule not in self.wanted:
            return
        known = self.found.get((breach.rule, subject))
        if known is not None:
            self.found[breach.rule, subject] = replace(known, times=known.times + 1)
            return
        what = f"{titled(self.impl)} {breach.what}"
        self.found[breach.rule, subject] = Violation(breach.rule, what, breach.advice, call)

    def asks(self, *rules: str) -> bool:
        """Whether one of these rules is asked about."""
        return not set(rules).isdisjoint(self.wanted)

    def tried(self, *rules: str) -> None:
        """Count a call that rules were held to."""
        self.asked.update(rules)

    def skip(self, rule: str, reason: str) -> None:
        """Say why a rule could not be asked about."""
        self.skipped[rule] = reason

    def broken(self, *rules: str) -> bool:
        """Whether one of these rules (default: any) is broken so far."""
        return any(not rules or rule in rules for rule, _ in self.found)

    def results(self, otherwise: str) -> tuple[RuleResult, ...]:
        """One result per rule.

        Args:
            otherwise: Why a rule was not asked about where nobody said.
        """
        return tuple(self._result(rule, otherwise) for rule in self.wanted)

    def _result(self, rule: str, otherwise: str) -> RuleResult:
        violations = tuple(violation for (broken, _), violation in self.found.items() if broken == rule)
        if violations:
            return RuleResult(rule, FAILED, max(self.asked[rule], 1), None, violations)
        if self.asked[rule]:
            return RuleResult(rule, PASSED, self.asked[rule])
        return RuleResult(rule, SKIPPED, reason=self.skipped.get(rule, otherwise))


def wait_for(device: torch.device) -> None:
    """Wait until a device has done what it was given, so that its errors belong to the call that caused them."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "xpu":
        torch.xpu.synchronize(device)


def check_alive(device: torch.device, error: BaseException) -> None:
    """Find out whether a device still works after an error.

    Raises:
        DeviceLostError: It does not.
    """
    if device.type == "cpu":
        return
    try:
        torch.zeros(1, device=device).add_(1).cpu()
    except Exception:
        first = next(iter(str(error).splitlines()), "")
        raise DeviceLostError(
            f"{device} cannot be used any more in this process after {type(error).__name__}: {first}"
        ) from error


def bits_of(value: Any) -> list[torch.Tensor]:
    """The bytes of the outputs of a call, so that NaN equals itself and -0 differs from 0."""
    flat = value if isinstance(value, (list, tuple)) else [value]
    return [each.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for each in flat]


def same_bits(first: Sequence[torch.Tensor], second: Sequence[torch.Tensor]) -> bool:
    """Whether two results of `bits_of` are equal."""
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
