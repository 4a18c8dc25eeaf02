"""The names that programs with `CustomOp` classes import today.

Owns nothing but the names: they are those of `irframework.layers`, and the tables are those of the one registry.
`answer_old_imports` lets files that are not edited find them under the module's old name.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

from irframework.errors import MigrationError
from irframework.layers.custom_op import CustomOp
from irframework.layers.pluggable_layer import PluggableLayer
from irframework.registry import registry

__all__ = [
    "CustomOp",
    "PluggableLayer",
    "answer_old_imports",
    "get_oot_class_by_name",
    "maybe_get_oot_by_class",
    "op_registry",
    "op_registry_oot",
]

op_registry = registry.layers
op_registry_oot = registry.replacements


def get_oot_class_by_name(class_name: str) -> type | None:
    """Return the replacement of the layer with a class name, or None."""
    return registry.replacements.get(class_name)


def maybe_get_oot_by_class(class_type: type) -> type:
    """Return the replacement of a layer's class, or the class itself."""
    return registry.replacements.get(class_type.__name__, class_type)


def answer_old_imports(module: str = "vllm.model_executor.custom_op") -> None:
    """Let `from vllm.model_executor.custom_op import CustomOp` give the classes of this module, in this process.

    Call it before files are imported that say so, where the package of that name is not installed. Calling it again
    changes nothing. Packages that look whether the old one is installed will find it.

    Args:
        module: The module's old name.

    Raises:
        MigrationError: The package is installed: its own classes answer.
    """
    names = module.split(".")
    if not all(name.isidentifier() for name in names):
        raise MigrationError(f"answer_old_imports: {module!r} is not the name of a module.")
    present = sys.modules.get(names[0])
    if present is None and importlib.util.find_spec(names[0]) is not None:
        raise MigrationError(
            f"answer_old_imports: {names[0]!r} is installed here, so its own {module} answers. Write `from "
            "irframework.compat import CustomOp` in the files that are to use irframework."
        )
    if present is not None and not getattr(present, "__irframework_stand_in__", False):
        raise MigrationError(
            f"answer_old_imports: {names[0]!r} is imported already. Call it before anything imports that package."
        )
    for depth in range(1, len(names)):
        _stand_in(".".join(names[:depth]))
    sys.modules[module] = sys.modules[__name__]
    if len(names) > 1:
        setattr(sys.modules[".".join(names[:-1])], names[-1], sys.modules[__name__])


def _stand_in(name: str) -> None:
    if name in sys.modules:
        return
    package = ModuleType(name, f"Stands in for {name}: see irframework.compat.answer_old_imports.")
    package.__path__ = []
    package.__spec__ = ModuleSpec(name, None, is_package=True)
    package.__irframework_stand_in__ = True  # type: ignore[attr-defined]
    sys.modules[name] = package
    above, _, last = name.rpartition(".")
    if above:
        setattr(sys.modules[above], last, package)
