"""Layers that are registered by name and replaced by class name.

Owns the two tables' rules: what may be registered, and which class is built when a layer is. Does not own how a layer
runs: `custom_op.py` and `pluggable_layer.py` do.
"""

import inspect
import logging
import os
from collections.abc import Callable
from typing import Any, TypeVar, overload

from torch import nn

from irframework.errors import DuplicateLayerError, InvalidLayerError, ReplacementError
from irframework.notices import say_once
from irframework.registry import load_plugins, registry

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=type)


class ReplaceableLayer(nn.Module):
    """A module whose class a plugin may replace by name.

    Building a class for which a replacement is registered builds the replacement, which is a subclass: the program
    that writes `RMSNorm(...)` is not changed, and `isinstance` still holds.

    Attributes:
        registry: The one table of ops and layers.
        op_registry: Classes by registered name; the table itself.
        op_registry_oot: Replacements by the class name of the original; the table itself.
    """

    registry = registry
    op_registry = registry.layers
    op_registry_oot = registry.replacements
    _replaced: type | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Make an instance of the class, or of its replacement."""
        return super().__new__(class_to_build(cls))

    @classmethod
    def register(cls, name: str) -> Callable[[C], C]:
        """Register a class under a name (a decorator). Rules of `custom_ops` mean it by that name.

        Raises:
            InvalidLayerError: `name` is no identifier, or what is decorated is no layer.
            DuplicateLayerError: Another class has the name.
        """
        if not isinstance(name, str) or not name.isidentifier():
            raise InvalidLayerError(
                f"{cls.__name__}.register needs a name that is an identifier, e.g. "
                f'@{cls.__name__}.register("rms_norm"); got {name!r:.60}.'
            )

        def decorate(layer: C) -> C:
            _check_layer(layer, f"{cls.__name__}.register({name!r})")
            _add(registry.layers, name, layer, "is registered as a layer")
            return layer

        return decorate

    @overload
    @classmethod
    def register_oot(cls, _decorated_op_cls: C, name: str | None = None) -> C: ...

    @overload
    @classmethod
    def register_oot(cls, _decorated_op_cls: None = None, name: str | None = None) -> Callable[[C], C]: ...

    @classmethod
    def register_oot(cls, _decorated_op_cls: Any = None, name: str | None = None, **older: Any) -> Any:
        """Register a replacement of a layer: with `@Layer.register_oot`, with `@Layer.register_oot()`, with
        `@CustomOp.register_oot(name="Layer")`, or as a plain call with the class as `_decorated_op_cls`.

        Args:
            _decorated_op_cls: The replacement, where it is no decorator with parentheses.
            name: Class name of the original; default: the class that `register_oot` is called on.
            **older: `_decorated_layer_cls`, which is another word for `_decorated_op_cls`.

        Raises:
            ReplacementError: The class does not subclass the original, or it is not said which one that is.
            DuplicateLayerError: The original has another replacement.
            InvalidLayerError: What is decorated is no layer.
        """
        given = older.pop("_decorated_layer_cls", _decorated_op_cls)
        if older:
            raise TypeError(f"{cls.__name__}.register_oot got an unexpected argument {next(iter(older))!r}")

        def decorate(layer: Any) -> Any:
            _replace(cls, layer, name)
            return layer

        return decorate if given is None else decorate(given)


_BASES: set[type] = {ReplaceableLayer}


def is_base(cls: type) -> bool:
    """Whether a class is one that layers derive from, and no layer itself."""
    return cls in _BASES


def add_base(cls: C) -> C:
    """Say that a class is one that layers derive from (a decorator)."""
    _BASES.add(cls)
    return cls


def class_to_build(cls: type) -> type:
    """Return the class that is built where a class is asked for: its replacement, or itself."""
    load_plugins()
    other = registry.replacements.get(cls.__name__)
    if other is None or other is cls:
        return cls
    if not issubclass(other, cls):
        if not issubclass(cls, other):  # one of another module that has this name, too
            say_once(
                logging.WARNING,
                ("replacement", cls, other),
                "%s is built, not its replacement by name, %s: that does not subclass it",
                described(cls),
                described(other),
            )
        return cls
    logger.debug("Building %s for %s", described(other), cls.__name__)
    return other


def described(cls: type) -> str:
    """Return `module.Class (file:line)`."""
    return f"{cls.__module__}.{cls.__qualname__} ({place_of_class(cls)})"


def place_of_class(cls: type) -> str:
    """Return `file:line` of a class, or its module where there is no file."""
    try:
        file, line = inspect.getsourcefile(cls), inspect.getsourcelines(cls)[1]
    except (OSError, TypeError):
        return cls.__module__
    shown = os.path.relpath(file) if file is not None else cls.__module__
    return f"{file if shown.startswith('..') else shown}:{line}"


def _check_layer(layer: object, what: str) -> None:
    if not isinstance(layer, type):
        raise InvalidLayerError(f"{what} decorates a class, got {layer!r:.60}.")
    if not issubclass(layer, ReplaceableLayer) or is_base(layer):
        raise InvalidLayerError(
            f"{what}: {described(layer)} must subclass CustomOp or PluggableLayer; building it could not be replaced "
            "otherwise."
        )


def _replace(owner: type, layer: Any, name: str | None) -> None:
    what = f"{owner.__name__}.register_oot"
    if name is None and is_base(owner):
        raise ReplacementError(
            f"{what} is not told what to replace. Call it on the class, as in @RMSNorm.register_oot, or name the "
            f'class: @{what}(name="RMSNorm").'
        )
    called = owner.__name__ if name is None else name
    _check_layer(layer, f"{what}(name={called!r})")
    original = _original(layer, owner, called)
    if original is None:
        bases = [each.__name__ for each in layer.__mro__[1:] if each is not object and not is_base(each)]
        raise ReplacementError(
            f"{what}: {described(layer)} cannot replace {called!r}: it does not subclass it (its bases: "
            f"{', '.join(bases) or 'none'}). Where the program builds {called}, Python would not run this class's "
            f"__init__. Write class {layer.__name__}({called}), or give the class name of the original as name=."
        )
    _add(registry.replacements, called, layer, "has a replacement")
    if original is not layer:
        layer._replaced = original


def _original(layer: type, owner: type, called: str) -> type | None:
    """The class that is replaced: the one `register_oot` was called on, or the nearest base of that class name."""
    if owner.__name__ == called and not is_base(owner):
        return owner if issubclass(layer, owner) else None
    return next((each for each in layer.__mro__[1:] if each.__name__ == called and not is_base(each)), None)


def _add(table: dict[str, type], name: str, layer: Any, what: str) -> None:
    with registry.lock:
        earlier = table.get(name)
        if earlier is not None and earlier is not layer and not _declared_again(earlier, layer):
            raise DuplicateLayerError(
                f"{name!r} {what} already, {described(earlier)}; {described(layer)} cannot be another one. "
                "Take one of the two out, or choose another name."
            )
        own = vars(layer).get("name")

        def undo() -> None:
            if earlier is None:
                table.pop(name, None)
            else:
                table[name] = earlier
            if own is None:
                del layer.name
            else:
                layer.name = own
            registry.changed()

        table[name] = layer
        layer.name = name
        registry.record(undo)
        registry.changed()


def _declared_again(old: type, new: type) -> bool:
    """Whether a module was reloaded or a notebook's cell run again."""
    same = (old.__module__, old.__qualname__) == (new.__module__, new.__qualname__)
    return same and "<locals>" not in new.__qualname__
