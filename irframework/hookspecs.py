"""The hooks that a plugin may implement (`@ir.hookimpl`).

Owns their names and signatures. Does not call them: see `plugins.py`.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from irframework.platform import Platform

PROJECT = "irframework"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def irframework_platforms() -> "Iterable[Platform]":
    """Return the plugin's platforms (instances of `ir.Platform`)."""
    return ()


@hookspec
def irframework_register_ops() -> None:
    """Declare the plugin's own ops with `ir.register_op`. Runs before any plugin registers implementations."""


@hookspec
def irframework_register_impls() -> None:
    """Register implementations with `ir.ops.<op>.register_impl`."""


@hookspec
def irframework_default_priorities(platform: "Platform", mode: str) -> "Mapping[str, Iterable[str]] | None":
    """Return default priorities for a platform: from op (or `*`) to providers.

    Args:
        platform: The platform; its `name` and `device_types` tell which.
        mode: `eager` or `inductor`.
    """
    return None


@hookspec
def irframework_passes(stage: str) -> "Iterable[Any] | None":
    """Return graph passes for a stage of the compile pipeline: callables over an fx graph with a `uuid()`.

    Args:
        stage: `before_lowering` or `after_lowering`.
    """
    return None


@hookspec
def irframework_cache_key_factors() -> "Mapping[str, Any] | None":
    """Return what the plugin's kernels and choices depend on beside its own code and files, by name.

    For example environment variables that they read, a device's properties, the content of a table of tuned sizes. It
    is asked at every compile, and what it returns is part of the key under which compiled graphs are cached.
    """
    return None


@hookspec(firstresult=True)
def irframework_compiler(platform: "Platform") -> Any:
    """Return what compiles lowered graphs on a platform instead of Inductor, or None.

    It is called as `compiler(gm, example_inputs)` and returns a callable.
    """
    return None
