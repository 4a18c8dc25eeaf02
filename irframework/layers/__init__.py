"""Layers: `CustomOp` and `PluggableLayer`, which programs of the older kind derive from.

Owns the public names. Each is imported at first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from irframework.layers.custom_op import CustomOp, disabled_custom_ops, enabled_custom_ops
    from irframework.layers.pluggable_layer import PluggableLayer

_MODULES = {
    "CustomOp": "custom_op",
    "PluggableLayer": "pluggable_layer",
    "disabled_custom_ops": "custom_op",
    "enabled_custom_ops": "custom_op",
}

__all__ = ["CustomOp", "PluggableLayer", "disabled_custom_ops", "enabled_custom_ops"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
