"""The outcome of deciding one call, as values.

Owns `Decision`, `Candidate` and `Rejected`, and how a decision is shown. Does not decide: see `dispatch.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from irframework.errors import ConditionError

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl

PLATFORM_DEFAULT, REGISTERED = "platform default", "registered"
DEFAULTS = (PLATFORM_DEFAULT, REGISTERED)  # origins of providers that no user named


@dataclass(frozen=True, slots=True)
class Rejected:
    """A predicate's "no", with the reason. Falsy."""

    reason: str

    def __bool__(self) -> bool:
        return False


def reject(reason: str) -> Rejected:
    """Say no in a `supports_args` predicate, and why.

    Args:
        reason: What the implementation needs, e.g. `"needs bf16"`.

    Returns:
        A falsy value that carries the reason.

    Raises:
        ConditionError: The reason is not a text.
    """
    if not isinstance(reason, str) or not reason:
        raise ConditionError(f"ir.reject expects the reason as a text, got {reason!r:.60}.")
    return Rejected(reason)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One provider in the priority list of a call.

    Attributes:
        provider: The provider's name.
        accepted: Whether its implementation could run this call.
        reason: Why not; or why it was not chosen although it could run; None for the chosen one.
        origin: Where its place in the list comes from: context, option, config, cli, env, platform default,
            registered.
    """

    provider: str
    accepted: bool
    reason: str | None
    origin: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Which implementation runs one call, and for each other candidate why not.

    Attributes:
        op: Name of the op.
        impl: The chosen implementation.
        provider: Its provider.
        candidates: All providers in the order of priority, as far as they were looked at.
    """

    op: str
    impl: "IrOpImpl"
    provider: str
    candidates: tuple[Candidate, ...]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return one row per candidate: `->` at the chosen one, provider, origin, and why it is not chosen."""
        return [
            ("->" if c.provider == self.provider else "", c.provider, c.origin, c.reason or "chosen")
            for c in self.candidates
        ]

    def __str__(self) -> str:
        rows = [("", "provider", "origin", ""), *self.rows()]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return f"{self.op}: {self.provider} ({self.impl.source})\n" + "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as plain data (for `--json`)."""
        return {
            "op": self.op,
            "provider": self.provider,
            "source": self.impl.source,
            "plugin": self.impl.plugin,
            "candidates": [
                {"provider": c.provider, "accepted": c.accepted, "reason": c.reason, "origin": c.origin}
                for c in self.candidates
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Decision":
        """Return the decision that `to_dict` wrote, with the implementation that is registered now.

        Raises:
            KeyError: Something is missing, or the provider is not here.
            UnknownOpError: There is no such op.
        """
        from irframework.registry import find_op

        candidates = tuple(
            Candidate(each["provider"], each["accepted"], each["reason"], each["origin"]) for each in data["candidates"]
        )
        return cls(data["op"], find_op(data["op"]).impls[data["provider"]], data["provider"], candidates)
