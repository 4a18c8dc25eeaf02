"""What a class would become, as values.

Owns the two records. Does not fill them: `migrate_classes.py` does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import libcst as cst

from irframework.cli.migrate_methods import Untranslated
from irframework.cli.migrate_source import Layer, Parameter


@dataclass(slots=True)
class Migrated:
    """What a class would become.

    Attributes:
        layer: The class.
        ops: Names of its ops.
        implementations: Op, provider and whether there is a predicate.
        texts: Code to paste, in order.
        notes: What to know about it.
        untranslated: What is left to a person.
    """

    layer: Layer
    ops: list[str] = field(default_factory=list)
    implementations: list[tuple[str, str, bool]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    untranslated: list[Untranslated] = field(default_factory=list)
    variants: list[Variant] = field(default_factory=list)


@dataclass(slots=True)
class Variant:
    """One op of a class: all of it, or the case that an optional tensor is there or not."""

    variable: str
    op: str
    given: list[Parameter]
    returns: str
    fold: Callable[[Sequence[cst.BaseStatement]], list[cst.BaseStatement]]
    dropped: str | None = None
    activations: tuple[str, ...] = ()
