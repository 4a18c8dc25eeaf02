"""Digests of code, for cache keys.

Owns how a function, and the package it came from, become a short string that changes whenever what it computes may
change. Does not know what is cached.
"""

import hashlib
import sys
import types
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl

_CODE_SUFFIXES = (".py", ".so", ".pyd", ".dylib", ".ptx", ".cubin")


def digest_of(impl: "IrOpImpl") -> str:
    """Digest of an implementation: its function, its predicates and conditions, and its whole plugin."""
    from irframework.plugins import version_of

    hasher = hashlib.sha256()
    for part in (
        impl.provider,
        str(impl.inplace),
        str(impl.device_types),
        str(impl.batch_invariant),
        str(impl.missing),
        repr([check.test for check in impl.checks]),
        impl.plugin or "",
        version_of(impl.plugin) if impl.plugin else "",
        digest_function(impl.fn),
        *(digest_function(predicate) for predicate in impl.predicates),
    ):
        hasher.update(part.encode() + b"\0")
    if impl.plugin:
        module = getattr(impl.fn, "__module__", None) or ""
        hasher.update(digest_package(module.partition(".")[0]).encode())
    return hasher.hexdigest()[:16]


def digest_function(fn: Callable[..., Any]) -> str:
    """Digest of a function's code, defaults and closure; works for lambdas, `exec`, partials and callable objects.

    Functions it calls in its own module are followed too, so that a change in one of them is seen.
    """
    hasher = hashlib.sha256()
    _feed(hasher, fn, set())
    return hasher.hexdigest()[:16]


def _feed(hasher: Any, value: Any, seen: set[int]) -> None:
    if id(value) in seen:
        return
    if isinstance(value, partial):
        seen.add(id(value))
        for part in (value.func, *value.args, *sorted(value.keywords.items())):
            _feed(hasher, part, seen)
    elif isinstance(value, types.FunctionType):
        seen.add(id(value))
        _feed(hasher, value.__code__, seen)
        for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items()):
            _feed(hasher, default, seen)
        for cell in value.__closure__ or ():
            try:
                _feed(hasher, cell.cell_contents, seen)
            except ValueError:
                hasher.update(b"empty cell")
        for name in value.__code__.co_names:
            used = value.__globals__.get(name)
            if isinstance(used, types.FunctionType) and used.__module__ == value.__module__:
                _feed(hasher, used, seen)
            elif isinstance(used, (bool, int, float, str, bytes)):
                hasher.update(f"{name}={used!r}".encode())
    elif isinstance(value, types.CodeType):
        hasher.update(value.co_code)
        hasher.update(repr((value.co_names, value.co_varnames, value.co_freevars)).encode())
        for constant in value.co_consts:
            _feed(hasher, constant, seen)
    elif isinstance(value, types.MethodType):
        _feed(hasher, value.__func__, seen)
        _feed(hasher, value.__self__, seen)
    elif isinstance(value, (tuple, list)):
        for item in value:
            _feed(hasher, item, seen)
    elif isinstance(value, (bool, int, float, complex, str, bytes, frozenset, type(None))):
        hasher.update(repr(value).encode())
    elif type(value).__module__.partition(".")[0] == "irframework":
        hasher.update(str(getattr(value, "name", type(value).__qualname__)).encode())
    elif isinstance(getattr(type(value), "__call__", None), types.FunctionType):  # noqa: B004 - its code is wanted
        seen.add(id(value))
        hasher.update(type(value).__qualname__.encode())
        _feed(hasher, type(value).__call__, seen)
        for item in sorted(getattr(value, "__dict__", {}).items()):
            _feed(hasher, item, seen)
    else:
        hasher.update(f"{type(value).__module__}.{type(value).__qualname__}".encode())
        own_name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
        hasher.update(str(own_name).encode())


@cache
def digest_package(name: str) -> str:
    """Digest of every Python file and binary of an importable package, once per process."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if not file:
        return ""
    root = Path(file)
    paths = (
        sorted(p for p in root.parent.rglob("*") if p.suffix in _CODE_SUFFIXES)
        if hasattr(module, "__path__")
        else [root]
    )
    hasher = hashlib.sha256()
    for path in paths:
        hasher.update(path.name.encode())
        hasher.update(hashlib.sha256(path.read_bytes()).digest())
    return hasher.hexdigest()[:16]
