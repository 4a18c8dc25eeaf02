"""Finding installed plugins.

Owns how the entry points `irframework.plugins` are read from the metadata of distributions, however broken some of
those are, and what the lists of plugins get wrong. Imports no plugin and does not load them: see `plugins.py`.

Private API used here: `__spec__._initializing` of a module that is being imported (importlib of Python 3.10 to 3.14),
and `_path` of a distribution (importlib_metadata 7 to 10), for messages only.
"""

import logging
import sys
from typing import Any

from irframework.errors import suggest
from irframework.settings import settings

logger = logging.getLogger(__name__)

GROUP = "irframework.plugins"


def discover() -> list[Any]:
    """Return the entry points of all installed plugins, sorted by name. Imports no plugin."""
    import importlib_metadata

    try:
        found = list(importlib_metadata.entry_points(group=GROUP))
    except Exception:  # some distribution has metadata that cannot be read: look at each alone
        found = []
        for dist in importlib_metadata.distributions():
            try:
                found += dist.entry_points.select(group=GROUP)
            except Exception as error:
                logger.warning("The metadata at %s cannot be read: %s", location_of(dist) or "?", cause(error))
    return sorted(found, key=lambda entry: (entry.name, entry.value))


def being_imported(entry: Any) -> bool:
    """Whether a program imports the plugin's module right now, and the module uses irframework meanwhile."""
    try:
        module = entry.module
    except Exception:  # no object reference; loading it will say so
        return False
    return bool(getattr(getattr(sys.modules.get(module), "__spec__", None), "_initializing", False))


def stated(dist: Any, what: str) -> str:
    """Return the `name` or `version` of a distribution, or `?` where its metadata do not say."""
    try:
        return str(getattr(dist, what, None) or "?")
    except Exception:  # no METADATA file, or one that cannot be read
        return "?"


def location_of(dist: Any) -> str:
    """Return where the metadata of a distribution lie, or an empty string where that is not known."""
    return str(getattr(dist, "_path", ""))


def cause(error: BaseException) -> str:
    """Return what went wrong, in one line."""
    if isinstance(error, SystemExit):
        return f"SystemExit: it called exit({error.code!r})"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"ModuleNotFoundError: {error} (missing requirement: {error.name})"
    return f"{type(error).__name__}: {error}"


def listed_and_not_installed(installed: list[str]) -> list[tuple[str, str]]:
    """Return what is wrong with the two lists of plugins: the variable, and a sentence about a name in it.

    Args:
        installed: Names of all installed plugins.
    """
    lists = {
        "IRFRAMEWORK_PLUGINS": settings().plugins or (),
        "IRFRAMEWORK_DISABLE_PLUGINS": settings().disable_plugins,
    }
    return [
        (variable, f"names the plugin {name!r}, which is not installed.{suggest(name, installed)}")
        for variable, listed in lists.items()
        for name in listed
        if name not in installed
    ]
