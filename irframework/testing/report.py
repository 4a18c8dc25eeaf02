"""What was found of one implementation, as values, and how a person reads it.

Owns `Conformance` and its parts. Does not find anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from irframework.contract import RULES

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule.

    Attributes:
        rule: Which one; see `irframework.contract.RULES`.
        what: What the implementation does, as a sentence that names it.
        advice: What to do about it.
        inputs: The first call that showed it.
        times: How many calls showed it.
    """

    rule: str
    what: str
    advice: str
    inputs: str
    times: int = 1

    def __str__(self) -> str:
        again = f", and {self.times - 1} more" if self.times > 1 else ""
        return f"{self.what}. {self.advice}\n  in {self.inputs}{again}"


@dataclass(frozen=True, slots=True)
class RuleResult:
    """What was found about one rule.

    Attributes:
        rule: Its name.
        status: `passed`, `failed` or `skipped`.
        calls: How many calls or questions it was held to.
        reason: Why it was skipped, or None.
        violations: In which ways it is broken.
    """

    rule: str
    status: str
    calls: int = 0
    reason: str | None = None
    violations: tuple[Violation, ...] = ()


@dataclass(frozen=True, slots=True)
class Accuracy:
    """The largest errors against native in float64, over ordinary numbers.

    Attributes:
        dtype: Of the call's activations.
        output: Which output.
        output_dtype: Its dtype.
        max_abs: The largest absolute error.
        max_ulp: The largest error in units of the last place of the right result; for 8-bit numbers, in codes.
        native_max_abs: The same of native, computed in the call's dtype.
        native_max_ulp: The same of native.
    """

    dtype: str
    output: int
    output_dtype: str
    max_abs: float
    max_ulp: float
    native_max_abs: float
    native_max_ulp: float

    def __str__(self) -> str:
        return (
            f"{self.dtype:9} output {self.output} ({self.output_dtype}): abs {self.max_abs:.2e}, "
            f"ulp {self.max_ulp:.3g} (native: {self.native_max_abs:.2e}, {self.native_max_ulp:.3g})"
        )


@dataclass(frozen=True, slots=True)
class Overhead:
    """Host time of one small call in microseconds: the least of several rounds.

    Attributes:
        framework_us: Through the op (`maybe_inplace` for an in-place implementation).
        direct_us: The provider's function itself.
    """

    framework_us: float
    direct_us: float

    def __str__(self) -> str:
        ratio = self.framework_us / self.direct_us
        return f"{self.framework_us:.2f} us through the framework, {self.direct_us:.2f} us itself ({ratio:.2f}x)"


@dataclass(frozen=True, slots=True)
class Conformance:
    """What was found of one implementation.

    Attributes:
        op: The op's name.
        provider: The provider's name.
        plugin: The plugin that registered it, or None.
        version: The version of the plugin's distribution, or None.
        source: `file:line` of the registration.
        device: The device it was tried on.
        calls: How many calls it was tried on.
        declined: How many calls that native takes it declined.
        skipped: Why it was not tried at all, or None.
        seconds: How long it took.
        rules: One result per rule, in the order of `irframework.contract.RULES`.
        accuracy: The largest errors by dtype and output.
        overhead: Host time of a call, or None where it was not measured.
    """

    op: str
    provider: str
    plugin: str | None
    version: str | None
    source: str
    device: str
    calls: int = 0
    declined: int = 0
    skipped: str | None = None
    seconds: float = 0.0
    rules: tuple[RuleResult, ...] = ()
    accuracy: tuple[Accuracy, ...] = ()
    overhead: Overhead | None = None

    @property
    def ok(self) -> bool:
        """Whether no rule is broken. Also true where nothing could be tried: see `skipped`."""
        return all(each.status != FAILED for each in self.rules)

    @property
    def violations(self) -> tuple[Violation, ...]:
        """All that is broken, by rule."""
        return tuple(violation for each in self.rules for violation in each.violations)

    def rule(self, name: str) -> RuleResult:
        """Return what was found about one rule.

        Raises:
            KeyError: It was not asked about.
        """
        return {each.rule: each for each in self.rules}[name]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON types."""
        return {"ok": self.ok, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Conformance:
        """Return what `to_dict` wrote."""
        values = {name: value for name, value in data.items() if name != "ok"}
        values["rules"] = tuple(
            RuleResult(**{**rule, "violations": tuple(Violation(**each) for each in rule["violations"])})
            for rule in data["rules"]
        )
        values["accuracy"] = tuple(Accuracy(**each) for each in data["accuracy"])
        values["overhead"] = None if data["overhead"] is None else Overhead(**data["overhead"])
        return cls(**values)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterable[str]:
        by = f", plugin {self.plugin} {self.version}" if self.plugin else ""
        yield f"{self.op}: {self.provider} on {self.device} ({self.source}{by})"
        if self.skipped:
            yield f"  not checked: {self.skipped}"
        else:
            yield f"  {self.calls} calls, {self.declined} declined, {self.seconds:.1f} s"
        width = max(map(len, RULES))
        for each in self.rules:
            if each.status != SKIPPED or self.skipped is None:
                told = each.reason or RULES[each.rule]
                yield f"  {each.status:7}  {each.rule:{width}}  {told}"
        for line in self.accuracy:
            yield f"  error    {line}"
        if self.overhead is not None:
            yield f"  time     {self.overhead}"
        for violation in self.violations:
            yield f"\n  {violation.rule}: {violation}"


def all_skipped(rules: Sequence[str], reason: str) -> tuple[RuleResult, ...]:
    """Results for an implementation that could not be tried."""
    return tuple(RuleResult(rule, SKIPPED, reason=reason) for rule in rules)
