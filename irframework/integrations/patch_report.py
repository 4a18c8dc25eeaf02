"""What `apply` did to a model, as values: `Replaced`, `Skipped`, `PatchReport`.

Owns the record and its two views (text table, plain dict). It does not decide what is replaced: that is
`irframework.integrations.transformers`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Replaced:
    """One module that now calls an IR op.

    Attributes:
        name: the module's path in the model, as in `named_modules()`.
        kind: `rms_norm`, `gated_mlp`, `rotary` or `add_norm`.
        op: name of the IR op that it calls.
        max_error: largest absolute difference to the original on random input, in the model's dtype.
    """

    name: str
    kind: str
    op: str
    max_error: float


@dataclass(frozen=True, slots=True)
class Skipped:
    """One module that looks replaceable and was left as it was, with the reason."""

    name: str
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class PatchReport:
    """Result of `apply(model)`.

    Attributes:
        model: class name of the model.
        replaced: modules that call IR ops now, those of an earlier `apply` included.
        skipped: modules that were left alone.
    """

    model: str
    replaced: tuple[Replaced, ...] = ()
    skipped: tuple[Skipped, ...] = ()

    def counts(self) -> dict[str, int]:
        """Number of replaced modules per kind."""
        found: dict[str, int] = defaultdict(int)
        for entry in self.replaced:
            found[entry.kind] += 1
        return dict(found)

    def to_dict(self) -> dict[str, Any]:
        """The whole report as plain JSON types."""
        return {
            "model": self.model,
            "replaced": [asdict(entry) for entry in self.replaced],
            "skipped": [asdict(entry) for entry in self.skipped],
        }

    def __str__(self) -> str:
        """Layers that differ only in their number share a line: a model of 30 layers is no table of 150 rows."""
        lines = [f"{self.model}: {len(self.replaced)} modules call IR ops, {len(self.skipped)} left as they were"]
        done: dict[tuple[str, str], list[Replaced]] = defaultdict(list)
        for entry in self.replaced:
            done[entry.kind, entry.op].append(entry)
        for (kind, op), entries in done.items():
            worst = max(entry.max_error for entry in entries)
            lines.append(f"  {kind:<10} {op:<20} x{len(entries):<4} max error {worst:.3g}")
        left: dict[tuple[str, str], list[Skipped]] = defaultdict(list)
        for missed in self.skipped:
            left[missed.kind, missed.reason].append(missed)
        for (kind, reason), misses in left.items():
            more = f" and {len(misses) - 1} more" if len(misses) > 1 else ""
            lines.append(f"  {kind:<10} left: {misses[0].name}{more}: {reason}")
        return "\n".join(lines)
