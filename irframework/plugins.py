"""Finding, loading and quarantining plugins.

Owns the loop over the entry points `irframework.plugins`, the transaction around each, and what is known about each
afterwards. The hooks are pluggy's; the loop is ours, because pluggy's own stops at the first bad plugin. Does not own
what plugins register.

Private torch API used here (read in 2.11 and 2.13): `torch.utils._python_dispatch._disable_current_modes` and
`torch._C.DisableTorchFunction`, so that a plugin which is first loaded while torch traces sees real tensors.
"""

import contextlib
import logging
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from irframework.discovery import being_imported, cause, discover, listed_and_not_installed, location_of, stated
from irframework.errors import PluginError
from irframework.registry import Transaction, registry
from irframework.settings import effective, settings

if TYPE_CHECKING:
    import pluggy

    from irframework.platform import Platform

logger = logging.getLogger(__name__)

API_VERSION = 1
_SLOW_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class PluginInfo:
    """What became of one plugin.

    Attributes:
        name: Name of the entry point.
        dist: Name of the distribution that it comes from.
        version: Version of that distribution.
        status: `loaded`, `disabled` or `quarantined`.
        reason: Why it is not loaded, or None.
        providers: Providers that it registered.
        ops: Ops that it declared.
        location: Where the distribution's metadata lie.
    """

    name: str
    dist: str
    version: str
    status: str
    reason: str | None = None
    providers: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()
    location: str = ""


@dataclass(slots=True)
class _Plugin:
    """One entry point while it is loaded."""

    entry: Any
    dist: str
    version: str
    location: str
    status: str = "found"
    reason: str | None = None
    module: Any = None
    transaction: Transaction = field(default_factory=lambda: Transaction(""))

    @property
    def name(self) -> str:
        return str(self.entry.name)

    @property
    def described(self) -> str:
        return f"plugin {self.name!r} ({self.dist} {self.version}, {self.entry.value})"


_lock = threading.RLock()
_plugins: list[_Plugin] = []
_loaded = False
_loading = False
_manager: "pluggy.PluginManager | None" = None


def _reset_in_child() -> None:
    """After a fork: another thread may have held the lock, half-way through loading; this process starts anew."""
    global _lock, _loading
    _lock = threading.RLock()
    if _loading:
        _take_back_all()
        _loading = False


os.register_at_fork(after_in_child=_reset_in_child)


def manager() -> "pluggy.PluginManager":
    """Return the pluggy manager, with the hooks of `irframework.hookspecs`."""
    global _manager
    if _manager is None:
        import pluggy

        from irframework import hookspecs

        _manager = pluggy.PluginManager(hookspecs.PROJECT)
        _manager.add_hookspecs(hookspecs)
    return _manager


def load_plugins() -> bool:
    """Load the installed plugins, once per process. Happens by itself at first need.

    A plugin that fails is quarantined: what it registered is taken back, one warning says why, and the others load.

    Returns:
        Whether they are loaded; False while they are being loaded, or while a program is importing one of them.

    Raises:
        PluginError: A plugin failed, and strict mode is on (IRFRAMEWORK_STRICT=1).
    """
    global _loaded, _loading
    if _loaded:
        return True
    with _lock:
        if _loaded or _loading:  # the second: a plugin uses irframework while it is being loaded
            return _loaded
        entries = discover()
        if any(being_imported(entry) for entry in entries):  # it has no hooks yet: wait for the next need
            return False
        _loading = True
        try:
            import irframework.ops  # noqa: F401 - the standard ops are nobody's plugin

            with _outside_torch_modes():
                _load_all(entries)
            _loaded = True
        except BaseException:  # strict mode, or a keyboard interrupt: the next need starts from nothing
            _take_back_all()
            raise
        finally:
            _loading = False
            registry.changed()
    return True


def _take_back_all() -> None:
    for plugin in _plugins:
        _take_back(plugin)
    _plugins.clear()


def _take_back(plugin: _Plugin) -> None:
    plugin.transaction.roll_back()
    if plugin.module is not None and manager().get_plugin(plugin.name) is plugin.module:
        manager().unregister(name=plugin.name)


@contextlib.contextmanager
def _outside_torch_modes() -> Iterator[None]:
    import torch
    from torch.utils._python_dispatch import _disable_current_modes

    with (
        _disable_current_modes(),
        torch._C.DisableTorchFunction(),
        torch.inference_mode(False),
        torch.enable_grad(),
    ):
        yield


def _load_all(entries: list[Any]) -> None:
    found = [_found(entry) for entry in entries]
    _plugins[:] = found
    _apply_lists(found)
    seen: dict[str, _Plugin] = {}
    for plugin in found:
        if plugin.status == "found" and seen.setdefault(plugin.name, plugin) is not plugin:
            _quarantine(plugin, f"duplicate: {seen[plugin.name].described} has the same name", None)
    for step in (_import, _register_platforms, _register_ops, _register_impls, _check_defaults):
        for plugin in found:
            if plugin.status == "found":
                _attempt(plugin, step)
    for plugin in found:
        if plugin.status == "found":
            plugin.status = "loaded"


def _found(entry: Any) -> _Plugin:
    dist = entry.dist
    plugin = _Plugin(entry, stated(dist, "name"), stated(dist, "version"), location_of(dist))
    plugin.transaction = Transaction(plugin.name)
    return plugin


def _apply_lists(found: list[_Plugin]) -> None:
    allowed, disabled = settings().plugins, settings().disable_plugins
    for variable, text in listed_and_not_installed([plugin.name for plugin in found]):
        logger.warning("%s %s", variable, text)
    for plugin in found:
        if plugin.status == "found" and allowed is not None and plugin.name not in allowed:
            plugin.status, plugin.reason = "disabled", "not in IRFRAMEWORK_PLUGINS"
        elif plugin.status == "found" and plugin.name in disabled:
            plugin.status, plugin.reason = "disabled", "in IRFRAMEWORK_DISABLE_PLUGINS"


def _attempt(plugin: _Plugin, step: Callable[[_Plugin], None]) -> None:
    """Run one step of loading; any failure but a keyboard interrupt quarantines the plugin."""
    alarm = threading.Timer(
        _SLOW_SECONDS, logger.warning, ("%s is still loading after %.0f s", plugin.described, _SLOW_SECONDS)
    )
    alarm.daemon = True
    alarm.start()
    started = time.perf_counter()
    try:
        with registry.registering(plugin.transaction):
            step(plugin)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, and what test frameworks raise to skip
        _quarantine(plugin, cause(error), error)
    finally:
        alarm.cancel()
        logger.debug("%s: %s took %.3f s", plugin.name, step.__name__, time.perf_counter() - started)


def _quarantine(plugin: _Plugin, reason: str, error: BaseException | None) -> None:
    plugin.status, plugin.reason = "quarantined", reason
    _take_back(plugin)
    trace = "".join(traceback.format_exception(error)) if error is not None else ""
    if effective("strict"):
        raise PluginError(f"{plugin.described} failed: {reason}. IRFRAMEWORK_STRICT is on.") from error
    logger.warning(
        "%s failed and is quarantined: %s. Nothing of it is registered. `irframework doctor` shows all plugins; "
        "IRFRAMEWORK_DISABLE_PLUGINS=%s silences this.\n%s",
        plugin.described,
        reason,
        plugin.name,
        trace,
    )


# --- the steps ----------------------------------------------------------------------------------------------------


def _import(plugin: _Plugin) -> None:
    module = plugin.entry.load()
    version = getattr(module, "IRFRAMEWORK_API", None)
    if version is None:
        raise PluginError(f"{plugin.entry.value} does not say IRFRAMEWORK_API = {API_VERSION}")
    if version != API_VERSION:
        raise PluginError(
            f"it is written for version {version!r} of the plugin API, this irframework speaks version {API_VERSION}; "
            f"install a version of {plugin.dist} that fits"
        )
    plugin.module = module  # first: a registration that fails half-way is taken back too
    manager().register(module, name=plugin.name)
    manager().check_pending()  # a hook that does not exist would never be called


def _call(plugin: _Plugin, hook: str, **arguments: Any) -> Any:
    """Call one plugin's implementation of a hook; None if it has none."""
    others = [module for module in manager().get_plugins() if module is not plugin.module]
    results = manager().subset_hook_caller(hook, remove_plugins=others)(**arguments)
    return (results[0] if results else None) if isinstance(results, list) else results


def _register_platforms(plugin: _Plugin) -> None:
    from irframework.platform import add_platform

    for platform in _call(plugin, "irframework_platforms") or ():
        add_platform(plugin.name, platform)


def _register_ops(plugin: _Plugin) -> None:
    _call(plugin, "irframework_register_ops")


def _register_impls(plugin: _Plugin) -> None:
    _call(plugin, "irframework_register_impls")


def _check_defaults(plugin: _Plugin) -> None:
    """Ask for the current platform's defaults now, so that a fault in them is found while loading."""
    from irframework.platform import as_lists, current_platform
    from irframework.priority import MODES

    for mode in MODES:
        as_lists(_call(plugin, "irframework_default_priorities", platform=current_platform(), mode=mode))


# --- what is known afterwards -------------------------------------------------------------------------------------


def plugins() -> list[PluginInfo]:
    """Return what became of every installed plugin, by name."""
    load_plugins()
    return [
        PluginInfo(
            plugin.name,
            plugin.dist,
            plugin.version,
            plugin.status,
            plugin.reason,
            tuple(sorted(plugin.transaction.providers)),
            tuple(sorted(plugin.transaction.ops)),
            plugin.location,
        )
        for plugin in _plugins
    ]


def version_of(name: str) -> str:
    """Return the version of the distribution that a plugin comes from."""
    return next((plugin.version for plugin in _plugins if plugin.name == name), "?")


def describe(name: str) -> str:
    """Return what a plugin is called in messages: its name, distribution and version."""
    return next((plugin.described for plugin in _plugins if plugin.name == name), f"plugin {name!r}")


def entry_of(name: str) -> Any:
    """Return the entry point of a plugin, with its distribution; None if there is no such plugin."""
    return next((plugin.entry for plugin in _plugins if plugin.name == name), None)


def why_provider_missing(provider: str) -> str | None:
    """Return what is known about a provider that registered nothing: a plugin of its name that is not loaded."""
    wanted = provider.replace("-", "_")
    for plugin in _plugins:
        if plugin.status != "loaded" and wanted in (plugin.name.replace("-", "_"), plugin.dist.replace("-", "_")):
            return f"Plugin {plugin.name!r} ({plugin.dist} {plugin.version}) is {plugin.status}: {plugin.reason}."
    failed = [plugin for plugin in _plugins if plugin.status == "quarantined"]
    if failed:
        return "It may come from a plugin that failed to load: " + "; ".join(
            f"{plugin.name} ({plugin.reason})" for plugin in failed
        )
    return None


def default_priorities(platform: "Platform", mode: str) -> list[Mapping[str, Iterable[str]]]:
    """Return the default priorities that plugins give for a platform, by plugin name."""
    from irframework.platform import as_lists

    lists = []
    for plugin in _active():
        try:
            lists.append(as_lists(_call(plugin, "irframework_default_priorities", platform=platform, mode=mode)))
        except Exception as error:
            _quarantine(plugin, cause(error), error)
            registry.changed()
    return [given for given in lists if given]


def compiler_passes(stage: str) -> list[tuple[str, Any]]:
    """Return the graph passes that plugins give for a stage, as (plugin, pass), by plugin name."""
    load_plugins()
    found: list[tuple[str, Any]] = []
    for plugin in _active():
        passes = _call_or_name(plugin, "irframework_passes", stage=stage)
        if passes is not None and not isinstance(passes, Iterable):
            raise PluginError(f"irframework_passes of {plugin.described} returned {passes!r:.60}: no list of passes.")
        found += [(plugin.name, graph_pass) for graph_pass in passes or ()]
    return found


def cache_key_factors() -> list[tuple[str, Any]]:
    """Return what plugins add to the key of every compiled graph, as (plugin, factors), by plugin name."""
    return [(plugin.name, _call_or_name(plugin, "irframework_cache_key_factors")) for plugin in _active()]


def platform_compiler(platform: "Platform") -> Any:
    """Return the compiler that a plugin gives for a platform instead of Inductor, or None; the first by plugin name."""
    load_plugins()
    found = (_call_or_name(plugin, "irframework_compiler", platform=platform) for plugin in _active())
    return next((compiler for compiler in found if compiler is not None), None)


def _call_or_name(plugin: _Plugin, hook: str, **arguments: Any) -> Any:
    """Call a plugin's hook while something is compiled; a failure names the plugin."""
    try:
        return _call(plugin, hook, **arguments)
    except Exception as error:
        raise PluginError(f"{hook} of {plugin.described} failed: {cause(error)}.") from error


def _active() -> list[_Plugin]:
    return [plugin for plugin in _plugins if plugin.module is not None and plugin.status in ("found", "loaded")]
