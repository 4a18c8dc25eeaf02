"""The rules of `custom_ops`: which layers of the older kind, and which ops, use kernels at all.

Owns how the rules are written, what they say about a name, and which are in force: those of `ir.configure`, else of the
command line, else of IRFRAMEWORK_CUSTOM_OPS. Does not own the layers (`layers/custom_op.py`), nor the order of an op's
providers (`priority.py`), which puts native first where the rules switch an op off.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from irframework.errors import ConfigError, suggest
from irframework.registry import registry
from irframework.settings import layers, settings

logger = logging.getLogger(__name__)

ALL, NONE = "all", "none"


@dataclass(frozen=True, slots=True)
class Rules:
    """What was written, read.

    Attributes:
        base: `all` or `none`; None when neither was written.
        on: Names with a `+`.
        off: Names with a `-`.
    """

    base: str | None = None
    on: frozenset[str] = frozenset()
    off: frozenset[str] = frozenset()

    def written(self) -> list[str]:
        """Return the rules as they are written, the base first."""
        base = [] if self.base is None else [self.base]
        return base + [f"+{name}" for name in sorted(self.on)] + [f"-{name}" for name in sorted(self.off)]

    def about(self, names: Iterable[str]) -> bool | None:
        """Return what is said about something that has these names, not counting the base; None when nothing is.

        Raises:
            ConfigError: One of its names is switched on and another one off.
        """
        known = list(names)
        on, off = sorted(self.on.intersection(known)), sorted(self.off.intersection(known))
        if on and off:
            raise ConfigError(
                f"custom_ops: '+{on[0]}' and '-{off[0]}' contradict each other: both are names of one layer. Keep one."
            )
        return True if on else False if off else None


_NO_RULES = Rules()


def parse_rules(value: str | Iterable[str], where: str = "custom_ops") -> Rules:
    """Read rules: `all`, `none`, `+name` and `-name`, in a list or as one comma string.

    Args:
        value: What the user wrote.
        where: Where it was written, for messages.

    Raises:
        ConfigError: A rule cannot be read, or two of them contradict each other.
    """
    words = value.split(",") if isinstance(value, str) else value
    if isinstance(words, Mapping) or not isinstance(words, Iterable):
        raise ConfigError(f"{where}: expected a list of rules or a comma string, got {value!r:.60}.")
    rules = list(words)
    if not all(isinstance(rule, str) for rule in rules):
        raise ConfigError(f"{where}: expected rules such as 'none' and '+rms_norm', got {value!r:.60}.")
    rules = [rule for rule in (rule.strip() for rule in rules) if rule or not isinstance(value, str)]
    bases = [rule for rule in rules if rule in (ALL, NONE)]
    signed: dict[str, set[str]] = {"+": set(), "-": set()}
    for rule in rules:
        if rule not in (ALL, NONE):
            signed[_sign(rule, where)].add(rule[1:])
    if len(bases) > 1:
        raise ConfigError(
            f"{where}: {' and '.join(repr(base) for base in bases)} are both there; exactly one of 'all' and 'none' "
            "is the base that '+name' and '-name' change."
        )
    both = sorted(signed["+"] & signed["-"])
    if both:
        raise ConfigError(f"{where}: '+{both[0]}' and '-{both[0]}' contradict each other. Keep one.")
    return Rules(bases[0] if bases else None, frozenset(signed["+"]), frozenset(signed["-"]))


def _sign(rule: str, where: str) -> str:
    if rule[1:] in (ALL, NONE) and rule[:1] in ("+", "-"):
        raise ConfigError(f"{where}: {rule!r} is no rule. Write {rule[1:]!r} for all ops at once.")
    if rule[:1] in ("+", "-") and rule[1:].isidentifier():
        return rule[:1]
    advice = f" Write '+{rule}' or '-{rule}'." if rule.isidentifier() else suggest(rule, (ALL, NONE, "+name", "-name"))
    raise ConfigError(f"{where}: {rule!r} is no rule.{advice}")


_environment: tuple[str, Rules] = ("", _NO_RULES)


def rules_in_force() -> Rules:
    """Return the rules of the highest place that has any.

    Raises:
        ConfigError: IRFRAMEWORK_CUSTOM_OPS cannot be read.
    """
    global _environment
    for layer in (layers.config, layers.cli):
        if layer is not None and layer.custom_ops:
            return parse_rules(layer.custom_ops)
    text = settings().custom_ops
    if text != _environment[0]:
        _environment = (text, parse_rules(text, "IRFRAMEWORK_CUSTOM_OPS"))
    return _environment[1]


def is_switched_off(op: str) -> bool:
    """Return whether the rules leave an op its native implementation only.

    A rule that names the op counts first; then one that names a layer which dispatches through the op, where one that
    is on is enough; then the base. Nothing is switched off where no rule was written.
    """
    rules = rules_in_force()
    if rules == _NO_RULES:
        return False
    said = rules.about((op,))
    if said is None:
        answers = {rules.about(names_of(layer)) for layer in registry.layers.values() if op in ops_of(layer)}
        said = True if True in answers else False if False in answers else rules.base != NONE
    return not said


def native_only(op: str) -> dict[str, tuple[str, ...]]:
    """Return the priorities that the rules stand for in the eyes of one op: native, or nothing."""
    return {op: ("native",)} if is_switched_off(op) else {}


def names_of(layer: type) -> tuple[str, ...]:
    """Return the names by which rules mean a layer: its own, and that of the layer that it replaces."""
    replaced = getattr(layer, "_replaced", None)
    found = [getattr(each, "name", None) for each in (layer, replaced) if each is not None]
    return tuple(name for name in found if isinstance(name, str))


def ops_of(layer: type) -> tuple[str, ...]:
    """Return the names of the ops that a layer says it dispatches through."""
    declared: Any = getattr(layer, "ir_op", None) or ()
    return tuple(op.name for op in (declared if isinstance(declared, tuple) else (declared,)) if hasattr(op, "name"))


def warn_of_unknown_names() -> None:
    """Say once of each name in the rules that no op and no layer has it. Asked when a layer is built: by then the
    layers of a model are registered."""
    from irframework.notices import say_once

    rules = rules_in_force()
    if rules == _NO_RULES:
        return
    known = {*registry.ops, *(name for layer in _layers() for name in names_of(layer))}
    for name in sorted((rules.on | rules.off) - known):
        sign = "+" if name in rules.on else "-"
        say_once(
            logging.WARNING,
            ("custom_ops", name),
            "custom_ops names %s, but no op and no layer is registered as %r: the rule changes nothing.%s",
            sign + name,
            name,
            suggest(name, known),
        )


def _layers() -> list[type]:
    return [*registry.layers.values(), *registry.replacements.values()]
