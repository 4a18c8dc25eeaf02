"""Digests of code, for cache keys.

Owns how a function, and the package it came from, become a short string that changes whenever what it computes may
change. Does not know what is cached.

Private torch API used here (read in 2.11 and 2.13): `torch.utils._python_dispatch._disable_current_modes`.
"""

import hashlib
import sys
import types
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

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
        digest_function(impl.fn, packaged=bool(impl.plugin)),
        *(digest_function(predicate, packaged=bool(impl.plugin)) for predicate in impl.predicates),
    ):
        hasher.update(part.encode() + b"\0")
    if impl.plugin:
        module = getattr(impl.fn, "__module__", None) or ""
        hasher.update(digest_package(module.partition(".")[0]).encode())
    return hasher.hexdigest()[:16]


def digest_function(fn: Callable[..., Any], packaged: bool = False) -> str:
    """Digest of a function's code, defaults, closure and the globals it reads; works for any callable.

    Functions, classes and objects that it uses are followed too, so that a change in one of them is seen; but not into
    torch, numpy and the standard library, whose versions are part of every key.

    Args:
        fn: The function.
        packaged: The files of its package are digested beside it. Then global containers and objects are left out:
            what the files say of them is known, and what a running program puts into them (a memo) must not count.
    """
    walk = _Walk(packaged)
    with _disable_current_modes():  # the first digest may be wanted while torch traces with fake tensors
        walk.feed(fn)
    return walk.hasher.hexdigest()[:16]


_KNOWN_BY_VERSION = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "triton"}
_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_FIXED = (*_PLAIN, tuple, frozenset, types.FunctionType, type)
_MAX_TENSOR = 1 << 16


def _followed(thing: Any, module: str | None = None) -> bool:
    top = (module or getattr(thing, "__module__", None) or "").partition(".")[0]
    return top not in _KNOWN_BY_VERSION


class _Walk:
    """Feeds everything that can be reached from a function to a hash, each thing once and in a fixed order."""

    def __init__(self, packaged: bool) -> None:
        self.packaged = packaged
        self.hasher = hashlib.sha256()
        self.seen: dict[int, Any] = {}  # keeps what it saw alive, so that no number is used again

    def say(self, *parts: object) -> None:
        for part in parts:
            self.hasher.update(repr(part).encode() + b"\0")

    def feed(self, value: Any) -> None:
        if isinstance(value, _PLAIN):
            return self.say(value)
        if id(value) in self.seen:
            return self.say("again")
        self.seen[id(value)] = value
        if isinstance(value, (tuple, list)):
            self.say("sequence", len(value))
            for item in value:
                self.feed(item)
        elif isinstance(value, (set, frozenset)):  # their order differs between processes
            self.say("set", *sorted(map(repr, value)))
        elif isinstance(value, dict):
            self.say("mapping", len(value))
            for key in sorted(value, key=repr):
                self.say(key)
                self.feed(value[key])
        elif isinstance(value, types.CodeType):
            self.say(value.co_code, value.co_names, value.co_varnames, value.co_freevars)
            self.feed(value.co_consts)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.feed((value.__func__, value.__self__))
        elif isinstance(value, partial):
            self.feed((value.func, value.args, value.keywords))
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, type):
            self._class(value)
        else:
            self._object(value)

    def _function(self, fn: types.FunctionType) -> None:
        self.say("function", fn.__qualname__.rpartition(".")[2])
        self.feed((fn.__code__, fn.__defaults__, fn.__kwdefaults__))
        for cell in fn.__closure__ or ():
            try:
                self.feed(cell.cell_contents)
            except ValueError:
                self.say("empty cell")
        names = _names(fn.__code__)
        for name in names:
            used = fn.__globals__.get(name)
            if isinstance(used, types.ModuleType):
                if _followed(used, used.__name__):
                    self.feed([getattr(used, attribute, None) for attribute in names])
            elif used is not None and not (self.packaged and not isinstance(used, _FIXED)):
                own_module = getattr(used, "__module__", None) == fn.__module__
                if own_module or _followed(used) or isinstance(used, (*_PLAIN, tuple, list, dict, set, frozenset)):
                    self.say(name)
                    self.feed(used)

    def _tensor(self, tensor: torch.Tensor) -> None:
        self.say("tensor", tensor.dtype, tuple(tensor.shape))
        real = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
        if real and tensor.numel() <= _MAX_TENSOR:
            self.say(tensor.tolist())

    def _class(self, cls: type) -> None:
        self.say("class", cls.__module__, cls.__qualname__)
        if _followed(cls):
            for name, member in sorted(vars(cls).items()):
                if isinstance(member, (types.FunctionType, *_PLAIN, tuple)) and not name.startswith("__module"):
                    self.say(name)
                    self.feed(member)

    def _object(self, value: Any) -> None:
        cls = type(value)
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or getattr(value, "name", None)
        self.say("object", cls.__module__, cls.__qualname__, name if isinstance(name, str) else None)
        if cls.__module__.partition(".")[0] == "irframework":
            return  # an op or an implementation: digested on its own
        if _followed(cls):
            self.feed(cls)
            self.feed(getattr(value, "__dict__", None))


def _names(code: types.CodeType) -> list[str]:
    """The names that a function and the functions inside it read from outside."""
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names(constant)
    return list(dict.fromkeys(names))


@cache
def digest_package(name: str) -> str:
    """Digest of every Python file and binary of an importable package, once per process."""
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if not file:
        return ""
    # An editable install keeps its sources and its binaries in different directories, all of them in __path__.
    places = [Path(place) for place in getattr(module, "__path__", ())]
    paths = sorted(p for place in places for p in place.rglob("*") if p.suffix in _CODE_SUFFIXES) or [Path(file)]
    hasher = hashlib.sha256()
    for path in paths:
        hasher.update(path.name.encode())
        hasher.update(hashlib.sha256(path.read_bytes()).digest())
    return hasher.hexdigest()[:16]
