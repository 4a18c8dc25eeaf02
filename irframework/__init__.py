"""irframework: declare model operations once, run them on whichever kernels are installed.

    import irframework as ir

    y = ir.ops.rms_norm(x, weight, 1e-6)

Owns the public names. Everything is imported at first use, so that `import irframework` costs little.
"""

import importlib
import sys
import time
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from irframework import compat, compiler, errors, layers, ops, testing
    from irframework.compiler import install, last_report
    from irframework.conditions import supports
    from irframework.config import IrOpPriorityConfig, KernelConfig, add_cli_args, configure, current_config
    from irframework.decision import Candidate, Decision, Rejected, reject
    from irframework.declaration import register_op
    from irframework.dispatch import explain
    from irframework.hookspecs import hookimpl
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp
    from irframework.out_variants import define_out_variant
    from irframework.platform import Platform, current_platform
    from irframework.plugins import PluginInfo, load_plugins, plugins
    from irframework.priority import priority
    from irframework.tolerance import Tolerance

__version__ = "0.1.0"
IMPORTED_AT = time.time()  # plugins import this package first: older files are what this process has loaded

_MODULES = ("compat", "compiler", "errors", "integrations", "layers", "ops", "testing")
_NAMES = {
    "Candidate": "decision",
    "Decision": "decision",
    "IrOp": "op",
    "IrOpImpl": "impl",
    "IrOpPriorityConfig": "config",
    "KernelConfig": "config",
    "Platform": "platform",
    "PluginInfo": "plugins",
    "Rejected": "decision",
    "Tolerance": "tolerance",
    "add_cli_args": "config",
    "configure": "config",
    "current_config": "config",
    "current_platform": "platform",
    "define_out_variant": "out_variants",
    "explain": "dispatch",
    "hookimpl": "hookspecs",
    "install": "compiler",
    "last_report": "compiler",
    "load_plugins": "plugins",
    "register_op": "declaration",
    "reject": "decision",
    "supports": "conditions",
}

__all__ = [
    "Candidate",
    "Decision",
    "IrOp",
    "IrOpImpl",
    "IrOpPriorityConfig",
    "KernelConfig",
    "Platform",
    "PluginInfo",
    "Rejected",
    "Tolerance",
    "add_cli_args",
    "compat",
    "compiler",
    "configure",
    "current_config",
    "current_platform",
    "define_out_variant",
    "errors",
    "explain",
    "hookimpl",
    "install",
    "last_report",
    "layers",
    "load_plugins",
    "ops",
    "plugins",
    "priority",
    "register_op",
    "reject",
    "supports",
    "testing",
]


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        value = getattr(importlib.import_module(f"irframework.{_NAMES[name]}"), name)
    elif name in _MODULES:
        value = importlib.import_module(f"irframework.{name}")
    else:
        raise AttributeError(f"module 'irframework' has no attribute {name!r}")
    globals()[name] = value
    return value


class _Public:
    """A public name that is also the name of a submodule: the import system may not rebind it to the module."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, package: Any, owner: Any = None) -> Any:
        return getattr(importlib.import_module(f"irframework.{self.name}"), self.name)

    def __set__(self, package: Any, value: Any) -> None:
        return None


class _Package(ModuleType):
    """The package, with the public names that would otherwise be hidden by submodules."""

    plugins = _Public("plugins")
    priority = _Public("priority")
    registry = _Public("registry")


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
