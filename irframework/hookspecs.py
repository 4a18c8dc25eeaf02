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
    """Return graph passes for a stage of the compile pipeline: callables that rewrite an fx graph in place.

    They run on every graph that is compiled, forward, backward and for inference, also where no IR op is in it; in
    stock Inductor from the first IR op on, or from `ir.install()`. After each the graph is checked: it is well formed,
    its inputs and the number, dtype, shape and strides of its outputs are what they were, it writes to the same inputs,
    and in inference graphs its outputs share no memory that they did not share. New nodes get their `meta["val"]`. A
    pass that fails, or breaks the graph, is an error that names it and its plugin, and the graph is as it was before.

    A pass may have these attributes:

    * `name`: without it, the function's or the class's name. With the plugin's name before it (`PLUGIN.NAME`) it is
      what reports show with its time, and what `IRFRAMEWORK_DISABLE_PASSES` takes. Of equal names the second is
      `NAME#2`.
    * `uuid()`: what the pass depends on, for the cache key of compiled graphs. A pass without one, or whose `uuid()`
      returns None, switches the cache off.
    * `after`, `before`: names of passes of the same stage that it runs behind, or ahead of: of the plugin's own passes
      by `NAME`, of others by `PLUGIN.NAME`. One that does not exist is warned about, unless it is written `NAME?`.
      Passes that nothing orders run by the plugin's name, then as listed; those of the program (`user.NAME`) last.
      Passes that wait for each other are an error.

    Args:
        stage: `before_fusion`: IR ops are as the user called them, and what computes a fused op is still spread out.
            `after_fusion`: parts of the graph have become fused ops, and IR ops are whole. (It is asked for as
            `before_lowering`, too, its name while there was no fusion; what is given under both names runs once.)
            `after_lowering`: only torch ops and kernels are left, which overwrite what the graph made. A pass there
            must not put one tensor in the place of another, nor bring in IR ops.
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
