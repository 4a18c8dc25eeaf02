"""Device families and their default priorities.

Owns `Platform`, the four families that torch itself knows, and which one is current. Knows no kernel: defaults for
providers come from plugins. Does not merge priorities: see `priority.py`.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from irframework.errors import DeviceUnavailableError, PlatformError, suggest
from irframework.registry import registry
from irframework.settings import settings

logger = logging.getLogger(__name__)


class Platform:
    """A device family. Plugins subclass it and return instances from `irframework_platforms`.

    Attributes:
        name: The platform's name, e.g. `cuda`.
        device_types: torch device types that it owns, the main one first.
    """

    name: str = ""
    device_types: tuple[str, ...] = ()

    def is_available(self) -> bool:
        """Return whether this machine has such a device. Must not initialise the device's runtime."""
        return False

    def get_default_ir_op_priority(self, mode: str = "eager") -> Any:
        """Return the default priorities: an `IrOpPriorityConfig`, or a mapping from op (or `*`) to providers.

        Args:
            mode: `eager` or `inductor`.
        """
        return {}

    def check_and_update_config(self, config: Any) -> Any:
        """Return the configuration to use instead of the one given to `ir.configure`; called before priorities are."""
        return config

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}>"


class CpuPlatform(Platform):
    """Every machine has one."""

    name = "cpu"
    device_types = ("cpu",)

    def is_available(self) -> bool:
        """Return True."""
        return True


class CudaPlatform(Platform):
    """NVIDIA GPUs."""

    name = "cuda"
    device_types = ("cuda",)

    def is_available(self) -> bool:
        """Return whether torch is a CUDA build and sees a GPU."""
        # device_count asks NVML where it can: it initialises nothing, so that a fork afterwards is safe.
        return torch.version.hip is None and torch.cuda.device_count() > 0


class RocmPlatform(Platform):
    """AMD GPUs; torch calls the device type `cuda` there too."""

    name = "rocm"
    device_types = ("cuda",)

    def is_available(self) -> bool:
        """Return whether torch is a ROCm build and sees a GPU."""
        return torch.version.hip is not None and torch.cuda.device_count() > 0


class XpuPlatform(Platform):
    """Intel GPUs."""

    name = "xpu"
    device_types = ("xpu",)

    def is_available(self) -> bool:
        """Return whether torch sees an Intel GPU."""
        return torch.xpu.is_available()


BUILT_IN: tuple[Platform, ...] = (CudaPlatform(), RocmPlatform(), XpuPlatform(), CpuPlatform())
_from_plugins: list[tuple[str, Platform]] = []
_current: Platform | None = None
_current_generation = -1


def add_platform(plugin: str, platform: Any) -> None:
    """Add a plugin's platform.

    Raises:
        PlatformError: It is not a `Platform` with a name and device types, or its name is taken.
    """
    if not isinstance(platform, Platform) or not platform.name or not platform.device_types:
        raise PlatformError(
            f"irframework_platforms of plugin {plugin!r} must return instances of ir.Platform with a name and "
            f"device_types, got {platform!r}."
        )
    for owner, other in [("irframework", p) for p in BUILT_IN] + _from_plugins:
        if other.name == platform.name:
            raise PlatformError(
                f"Plugin {plugin!r} brings the platform {platform.name!r}, which {owner!r} has already."
            )
    entry = (plugin, platform)
    _from_plugins.append(entry)
    registry.record(lambda: _forget(entry))
    registry.changed()


def _forget(entry: tuple[str, Platform]) -> None:
    _from_plugins.remove(entry)
    registry.changed()


def platforms() -> list[Platform]:
    """Return all platforms: those of plugins, by plugin and name, then torch's own."""
    from irframework.plugins import load_plugins

    load_plugins()
    return [platform for _, platform in _sorted()] + list(BUILT_IN)


def _sorted() -> list[tuple[str, Platform]]:
    return sorted(_from_plugins, key=lambda entry: (entry[0], entry[1].name))


def current_platform() -> Platform:
    """Return the platform in use: the one named by IRFRAMEWORK_PLATFORM, else the first that is available.

    A plugin's platform stands before torch's own. If two plugins' platforms are available, the first by plugin name is
    taken, and a warning names both and the variable.

    Raises:
        PlatformError: IRFRAMEWORK_PLATFORM names no platform, or one that is not available.
    """
    global _current, _current_generation
    if _current is None or _current_generation != registry.generation:
        _current, _current_generation = _choose(), registry.generation
    return _current


def _choose() -> Platform:
    everything = platforms()
    named = settings().platform
    if named is not None:
        for platform in everything:
            if platform.name == named:
                if not _available(platform):
                    raise PlatformError(f"IRFRAMEWORK_PLATFORM={named}: this platform is not available here.")
                return platform
        known = [platform.name for platform in everything]
        raise PlatformError(f"IRFRAMEWORK_PLATFORM={named}: there is no such platform.{suggest(named, known)}")
    claiming = [(plugin, platform) for plugin, platform in _sorted() if _available(platform)]
    if len(claiming) > 1:
        _warn_once(claiming)
    if claiming:
        return claiming[0][1]
    return next(platform for platform in BUILT_IN if _available(platform))


def _warn_once(claiming: list[tuple[str, Platform]]) -> None:
    from irframework.notices import say_once

    names = ", ".join(f"{platform.name} (plugin {plugin})" for plugin, platform in claiming)
    say_once(
        logging.WARNING,
        ("platforms", names),
        "Several platforms are available: %s. Using %s; set IRFRAMEWORK_PLATFORM to choose another.",
        names,
        claiming[0][1].name,
    )


def _available(platform: Platform) -> bool:
    try:
        return bool(platform.is_available())
    except Exception as error:
        from irframework.notices import say_once

        text = f"{type(error).__name__}: {error}"
        say_once(logging.WARNING, (platform.name, text), "is_available() of platform %s raised %s", platform.name, text)
        return False


def platform_for(device_type: str) -> Platform:
    """Return the platform whose defaults count for tensors on a device type."""
    current = current_platform()
    if device_type in current.device_types:
        return current
    owners = [p for p in platforms() if device_type in p.device_types]
    return next((p for p in owners if _available(p)), owners[0] if owners else current)


def device_types_here() -> tuple[str, ...]:
    """Return the device types that tensors may be on here: those of all available platforms, and the CPU."""
    here = [current_platform(), *(platform for platform in platforms() if _available(platform))]
    return tuple(dict.fromkeys([kind for platform in here for kind in platform.device_types] + ["cpu"]))


def default_lists(platform: Platform, mode: str) -> list[Mapping[str, Iterable[str]]]:
    """Return the default priorities of a platform and mode: those of plugins by name, then the platform's own."""
    from irframework.plugins import default_priorities

    return [*default_priorities(platform, mode), as_lists(platform.get_default_ir_op_priority(mode))]


def as_lists(value: Any) -> dict[str, tuple[str, ...]]:
    """Read default priorities: None, an `IrOpPriorityConfig`, or a mapping from op (or `*`) to providers."""
    from irframework.priority import parse_providers

    if value is None:
        return {}
    items = value if isinstance(value, Mapping) else value.model_dump()
    return {
        op: tuple(name.removesuffix("?") for name in parse_providers(providers, op)) for op, providers in items.items()
    }


def usable_device(device: str | None = None) -> str:
    """A device that tensors with data can be on, by default the current platform's.

    Raises:
        DeviceUnavailableError: torch cannot use it here.
    """
    where = device or current_platform().device_types[0]
    try:
        torch.empty(1, device=where)
        if torch.device(where).type == "meta":
            raise RuntimeError("tensors on it hold no data")
    except Exception as error:
        first = str(error).splitlines()[0]
        raise DeviceUnavailableError(f"Device {where!r} cannot be used here: {first}") from error
    return where
