"""The settings in force: the environment variables, and what the program configured above them.

Owns their names, types and defaults, reads them in one place, and holds the configurations that stand above them
(from the command line, and from `ir.configure`). Does not own what a configuration looks like: see `config.py`, which
is imported only by those who configure something.
"""

import difflib
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from irframework.errors import ConfigError

logger = logging.getLogger(__name__)

PREFIX = "IRFRAMEWORK_"
SWITCHES_OF_COMPILED_CODE = ("batch_invariant", "fusion", "disable_fusions", "sequence_parallel")


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable: its name without the prefix, how it is read, its default and what it does."""

    name: str
    parse: Callable[[str], object]
    default: object
    meaning: str


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says."""

    op_priority: str
    plugins: tuple[str, ...] | None
    disable_plugins: tuple[str, ...]
    strict: bool
    batch_invariant: bool
    logging_level: str | None
    fusion: bool
    disable_fusions: tuple[str, ...]
    sequence_parallel: int
    disable_passes: tuple[str, ...]
    platform: str | None
    check_donation: bool
    check_values: bool
    bisect_limit: int | None
    bisect_log: str | None
    custom_ops: str


@dataclass(slots=True)
class Layers:
    """Configurations above the environment: a `KernelConfig` from the command line, and one from `ir.configure`."""

    cli: Any = None
    config: Any = None


layers = Layers()


def effective(name: str) -> Any:
    """Return the value in force of a switch (`strict`, `batch_invariant`, `fusion`, ...)."""
    layer = getattr(layers, origin(name), None)
    return getattr(settings() if layer is None else layer, name)


def origin(name: str) -> str:
    """Return who settled a switch: `config`, `cli`, `env` or `default`."""
    for place in ("config", "cli"):
        layer = getattr(layers, place)
        if layer is not None and name in layer.model_fields_set:
            return place
    return "env" if PREFIX + name.upper() in os.environ else "default"


def _flag(text: str) -> bool:
    word = text.strip().lower()
    if word in ("", "0", "false", "no", "off"):
        return False
    if word in ("1", "true", "yes", "on"):
        return True
    raise ValueError("expected 0 or 1")


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _word(text: str) -> str | None:
    return text.strip() or None


def _path(text: str) -> str | None:
    return os.path.abspath(text) if text.strip() else None  # a program may change its directory


def _count(text: str) -> int | None:
    if not text.strip():
        return None
    if not text.strip().isdecimal():
        raise ValueError("expected a number, 0 or more")
    return int(text)


def _tokens(text: str) -> int:
    return _count(text) or 0


def _level(text: str) -> str | None:
    level = text.strip().upper()
    if not level:
        return None
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"):
        raise ValueError("expected DEBUG, INFO, WARNING, ERROR or CRITICAL")
    return level


VARIABLES: tuple[Variable, ...] = (
    Variable("OP_PRIORITY", str, "", "priorities per op, as `rms_norm=a,b;silu_and_mul=c`"),
    Variable("PLUGINS", _names, None, "only these plugins are loaded (comma list; empty loads none)"),
    Variable("DISABLE_PLUGINS", _names, (), "these plugins are not loaded (comma list)"),
    Variable("STRICT", _flag, False, "1: a plugin that fails raises instead of being quarantined"),
    Variable("BATCH_INVARIANT", _flag, False, "1: only implementations declared batch invariant, or native"),
    Variable("LOGGING_LEVEL", _level, None, "level of the logger `irframework` (DEBUG, INFO, ...)"),
    Variable("FUSION", _flag, True, "0: what computes a fused op's definition is not made that op"),
    Variable("DISABLE_FUSIONS", _names, (), "fused ops that no part of a graph is made (comma list)"),
    Variable("SEQUENCE_PARALLEL", _tokens, 0, "from so many tokens on, processes divide norms; 0: off"),
    Variable("DISABLE_PASSES", _names, (), "compiler passes that are skipped (comma list)"),
    Variable("PLATFORM", _word, None, "use this platform instead of the detected one"),
    Variable("CHECK_DONATION", _flag, False, "1: eager calls find who uses a tensor after `maybe_inplace` took it"),
    Variable("CHECK_VALUES", _flag, False, "1: eager calls look at indices and scales on GPUs, too, and wait for that"),
    Variable("BISECT_LIMIT", _count, None, "only so many choices of a kernel stand, all later ones are native"),
    Variable("BISECT_LOG", _path, None, "append each numbered choice to this file, as a line of JSON"),
    Variable("CUSTOM_OPS", str, "", "which ops and layers use kernels, as `none,+rms_norm` or `all,-rms_norm`"),
)


@cache
def settings() -> Settings:
    """Read the environment (once; `settings.cache_clear()` reads it again).

    Raises:
        ConfigError: A variable has a value that cannot be read.
    """
    values = {}
    for variable in VARIABLES:
        full = PREFIX + variable.name
        text = os.environ.get(full)
        try:
            values[variable.name.lower()] = variable.default if text is None else variable.parse(text)
        except ValueError as error:
            raise ConfigError(f"Environment variable {full}={text!r}: {error}. It means: {variable.meaning}.") from None
    for name, meant in misspelt_variables():
        logger.warning("Environment variable %s is not known to irframework. Did you mean %s?", name, meant)
    if values["logging_level"] is not None:
        _set_level(str(values["logging_level"]))
    return Settings(**values)  # type: ignore[arg-type]


def _set_level(level: str) -> None:
    """Let the framework's own logger speak; what a program set up for the root logger is left alone."""
    ours = logging.getLogger("irframework")
    ours.setLevel(level)
    if not ours.hasHandlers():  # Python's last resort shows warnings only
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        ours.addHandler(handler)


def misspelt_variables() -> list[tuple[str, str]]:
    """Return variables that look like ours and are not, each with the one that was probably meant.

    A plugin's own variables look like nothing we know.
    """
    known = [PREFIX + variable.name for variable in VARIABLES]
    ours = [name for name in sorted(os.environ) if name.startswith(PREFIX) and name not in known]
    close = [(name, difflib.get_close_matches(name, known, n=1, cutoff=0.8)) for name in ours]
    return [(name, found[0]) for name, found in close if found]
