"""Whether compiled graphs are fused now, without which ops, and who said so.

Owns the one value that the compiler, `doctor`, `run` and `current_config` show, and the check of names of fused ops.
Does not own the settings (`settings.py`), nor which definitions are looked for in a graph
(`compiler/fusable_ops.py`).
"""

import logging
from dataclasses import asdict, dataclass
from typing import Any

from irframework.errors import ConfigError, suggest
from irframework.notices import say_once
from irframework.registry import all_ops, registry
from irframework.settings import PREFIX, effective, origin, settings

PASS = "fuse"  # the pass's name in IRFRAMEWORK_DISABLE_PASSES
_PLACES = {
    "config": "KernelConfig({name}=...)",
    "cli": "--ir-{dashed}",
    "env": "{prefix}{upper}",
    "default": "default",
}


@dataclass(frozen=True, slots=True)
class FusionState:
    """What is in force.

    Attributes:
        on: Whether graphs are fused.
        reason: Who settled that: a setting, or `default`.
        without: Fused ops that are left out.
        without_reason: Who said so.
    """

    on: bool
    reason: str
    without: tuple[str, ...]
    without_reason: str

    def __str__(self) -> str:
        less = f", without {', '.join(self.without)} ({self.without_reason})" if self.on and self.without else ""
        return f"{'on' if self.on else 'off'} ({self.reason}){less}"

    def to_dict(self) -> dict[str, Any]:
        """The state as plain JSON types."""
        return {**asdict(self), "without": list(self.without)}


def current() -> FusionState:
    """Return what is in force: the highest place that says something wins, and the pass must not be switched off."""
    on = bool(effective("fusion"))
    reason = _place("fusion")
    if on and PASS in settings().disable_passes:
        on, reason = False, f"{PREFIX}DISABLE_PASSES names {PASS}"
    return FusionState(on, reason, tuple(effective("disable_fusions")), _place("disable_fusions"))


def _place(name: str) -> str:
    text = _PLACES[origin(name)]
    return text.format(name=name, dashed=name.replace("_", "-"), upper=name.upper(), prefix=PREFIX)


def contradiction() -> str | None:
    """Return why fusion is off although somebody asked for it, or None."""
    state = current()
    if state.on or not effective("fusion") or origin("fusion") == "default":
        return None
    return f"fusion is asked for by {_place('fusion')}, and is off: {state.reason}"


def fused_ops() -> list[str]:
    """Return the names of the ops that are declared with `fuse`, of those that are declared by now."""
    return sorted(name for name, op in registry.ops.items() if op.fuse)


def unknown_names() -> dict[str, str]:
    """Return the names among those left out that are no fused op's, each with what is right."""
    known = fused_ops()
    return {name: suggest(name, known) for name in current().without if name not in known}


def warn() -> None:
    """Say once what in the settings has no effect. Asked when a graph is compiled: by then ops are declared."""
    for name, hint in unknown_names().items():
        say_once(
            logging.WARNING,
            ("disable_fusions", name),
            "%s names %r, which is no fused op: it changes nothing.%s",
            _place("disable_fusions"),
            name,
            hint,
        )
    text = contradiction()
    if text is not None:
        say_once(logging.WARNING, ("fusion", text), "%s", text)
    if current().on and origin("fusion") != "default" and not fused_ops():
        place = _place("fusion")
        say_once(logging.WARNING, ("fusion", place), "%s asks for fusion, and no op is declared with fuse.", place)


def read_names(value: Any) -> list[str]:
    """Read names of fused ops: a comma string, or an iterable of names.

    Raises:
        ConfigError: It cannot be read, or an op does not exist or is not declared with `fuse`.
    """
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, (list, tuple, set, frozenset)) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"expected names of fused ops, got {value!r:.60}.")
    wanted = list(dict.fromkeys(name.strip() for name in names if name.strip()))
    ops = all_ops() if wanted else {}
    for name in wanted:
        if name not in ops:
            raise ConfigError(f"there is no op {name!r}.{suggest(name, fused_ops())}")
        if not ops[name].fuse:
            raise ConfigError(f"op {name!r} is not declared with fuse, so nothing is ever fused into it.")
    return wanted
