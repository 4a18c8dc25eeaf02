"""Digests of functions and of what is built of them, for cache keys.

Owns how a function, with everything that it uses, becomes a short string that changes whenever what it computes may
change. Does not own the files of code behind it (`code_files.py`), and does not know what is cached.

Private torch APIs used here (read in 2.11 and 2.13): `torch.utils._python_dispatch._disable_current_modes`;
`torch._ops.OpOverload` and `OpOverloadPacket`, whose text is their whole name.
"""

import ctypes
import dis
import functools
import hashlib
import importlib.util
import threading
import types
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from irframework.code_files import PROCESS, digest_import, digest_package, digest_plugin, is_installed, known_by_version
from irframework.conditions import Supports

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp


def digest_of(impl: "IrOpImpl") -> str:
    """Digest of an implementation: its function, its predicates and conditions, and its whole plugin."""
    from irframework.plugins import entry_of

    packaged = impl.plugin is not None
    parts = [
        impl.provider,
        str(impl.inplace),
        str(impl.device_types),
        str(impl.batch_invariant),
        str(impl.missing),
        repr([check.test for check in impl.checks]),
        digest_function(impl.fn, packaged=packaged),
        digest_function(impl.functional.fn, packaged=packaged) if impl.functional is not None else "",
        *(digest_function(predicate, packaged=packaged) for predicate in impl.predicates),
        digest_function(impl.compiled_where, packaged=packaged) if impl.compiled_where is not None else "",
    ]
    entry = entry_of(impl.plugin) if impl.plugin is not None else None
    if entry is not None:
        top = _top_module(impl.fn)
        parts += [entry.name, str(getattr(entry.dist, "version", "?")), digest_plugin(entry.module, entry.dist)]
        parts.append("" if known_by_version(top) else digest_package(top))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def digest_of_op(op: "IrOp") -> str:
    """Digest of what an op itself adds to its implementations: schema, shape function, backward, fusion."""
    fuse = (op.fuse.options, op.fuse.predicates) if isinstance(op.fuse, Supports) else op.fuse
    spellings = tuple(spelling.fn for spelling in op.spellings)
    own = (op.schema, op.activations, op.allow_inplace, fuse, op.backward, op.fake.fn if op.fake else None, spellings)
    return digest_function(own, packaged=op.plugin is not None)


def digest_function(fn: object, packaged: bool = False) -> str:
    """Digest of a function's code, defaults, closure and the globals it reads; works for any callable.

    Functions, classes and objects that it uses are followed too, so that a change in one of them is seen; but not into
    torch and the standard library, whose versions are part of every key, nor into other installed packages, whose files
    are looked at instead. What these were given is looked at all the same: the function behind `torch.no_grad()`. What
    cannot be looked into (a tensor subclass, an object made in C) gives a digest that no other process has: caching
    nothing is better than caching the wrong thing.

    Args:
        fn: The function.
        packaged: The files of its package are digested beside it. Then global containers and objects are left out:
            what the files say of them is known, and what a running program puts into them (a memo) must not count.
    """
    walk = _Walk(packaged, fn)
    with _disable_current_modes():  # the first digest may be wanted while torch traces with fake tensors
        walk.feed(fn)
        walk.feed_modules()
    return walk.hasher.hexdigest()[:16]


_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    type(None),
    type(...),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_OPERATORS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch.finfo, torch.iinfo)  # all is in their text
_WITHOUT_STATE = (types.GetSetDescriptorType, type(threading.Lock()), type(threading.RLock()))
_HEAP_TYPE = 1 << 9  # a flag of classes that were made by a `class` statement
_DESCRIPTORS = (staticmethod, classmethod, property)
_FIXED = (*_PLAIN, bytes, tuple, frozenset, types.FunctionType, types.MethodType, type, *_DESCRIPTORS)
_GIVEN = (*_FIXED, list, dict, functools.partial, torch.nn.Module)  # what torch's objects keep of the user's
_OF_THE_CLASS = frozenset(
    ("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__annotate__",
     "__annotate_func__", "__annotations_cache__", "__firstlineno__", "__static_attributes__", "__slots__",
     "__abstractmethods__", "_abc_impl")
)  # fmt: skip


def _top_module(thing: Any) -> str:
    """The top-level module that a function or class was written in; wrappers may claim another's name."""
    scope = getattr(thing, "__globals__", None)
    name = scope.get("__name__") if isinstance(scope, dict) else getattr(thing, "__module__", None)
    return name.partition(".")[0] if isinstance(name, str) else ""


class _Walk:
    """Feeds everything that can be reached from a function to a hash, each thing once and in a fixed order."""

    def __init__(self, packaged: bool, root: object) -> None:
        self.packaged = packaged
        self.root = root
        self.home = _top_module(root)
        self.hasher = hashlib.sha256()
        self.seen: dict[int, tuple[int, Any]] = {}  # keeps what it saw alive, so that no number is used again
        self.modules: dict[int, types.ModuleType] = {}
        self.names: dict[str, None] = {}  # all that the functions say

    def say(self, *parts: object) -> None:
        for part in parts:
            self.hasher.update(repr(part).encode() + b"\0")

    def feed(self, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self.say(value)
            self._class_of_builtin(value)
        elif isinstance(value, (bytes, bytearray)):
            self.say("bytes", len(value))
            self.hasher.update(value)
            self._class_of_builtin(value)
        elif isinstance(value, tuple):  # equal ones may or may not be one object: that differs between processes
            self.say("tuple", type(value).__qualname__, len(value))
            self.feed_all(value)
            self._class_of_builtin(value)
        elif isinstance(value, types.CodeType):
            self._code(value)
        elif id(value) in self.seen:
            self.say("again", self.seen[id(value)][0])
        else:
            self.seen[id(value)] = (len(self.seen), value)
            self._first(value)

    def feed_all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.feed(value)

    def _class_of_builtin(self, value: Any) -> None:
        """What a subclass of a number, a text or a container adds to it."""
        cls = type(value)
        if cls.__flags__ & _HEAP_TYPE and not known_by_version(_top_module(cls)):
            self.feed(cls)
            self.feed(getattr(value, "__dict__", None))

    def _first(self, value: Any) -> None:
        if isinstance(value, list):
            self.say("list", len(value))
            self.feed_all(value)
            self._class_of_builtin(value)
        elif isinstance(value, (set, frozenset)):  # their order differs between processes
            self.say("set", len(value))
            self.feed_all(sorted(value, key=_label))
            self._class_of_builtin(value)
        elif isinstance(value, dict):  # the order may be one in which things are done
            self.say("mapping", type(value).__qualname__, len(value))
            for key, item in list(value.items()):
                self.feed(key)
                self.feed(item)
            self.feed(getattr(value, "default_factory", None))
            self._class_of_builtin(value)
        elif isinstance(value, types.MappingProxyType):
            self.feed(dict(value))
        elif isinstance(value, weakref.ref):
            self.feed(value())
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif isinstance(value, types.MethodType):
            self.feed((value.__func__, value.__self__))
        elif isinstance(value, functools.partial):
            self.feed((value.func, value.args, value.keywords))
        elif isinstance(value, (staticmethod, classmethod)):
            self.feed((type(value).__name__, value.__func__))
        elif isinstance(value, property):
            self.feed((value.fget, value.fset))
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, types.ModuleType):
            self.say("module", value.__name__)
            self._module(value)
        elif isinstance(value, type):
            self._class(value)
        else:
            self._object(value)

    def _follows(self, thing: Any) -> bool:
        """Whether to look into a function or class; if not, say what stands for it: a version, or installed files."""
        top = _top_module(thing)
        if thing is self.root:
            return True
        if known_by_version(top):
            return False
        if top and top != self.home and is_installed(top):
            self.say("installed", top, digest_import(top))
            return False
        return True

    def _code(self, code: types.CodeType) -> None:
        self.say(code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags)
        self.say(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
        self.say(getattr(code, "co_exceptiontable", None))  # Python 3.11
        self.feed(code.co_consts)

    def _function(self, fn: types.FunctionType) -> None:
        self.say("function", fn.__qualname__.rpartition(".")[2])
        followed = self._follows(fn)
        for cell in fn.__closure__ or ():  # also a library's: it holds what was wrapped
            try:
                self.feed(cell.cell_contents)
            except ValueError:
                self.say("empty cell")
        if not followed:
            self.say(fn.__module__, fn.__qualname__)
            return
        self.feed((fn.__code__, fn.__defaults__, fn.__kwdefaults__))
        if not self.packaged:
            self.feed({name: value for name, value in vars(fn).items() if not name.startswith(("_torchdynamo", "__"))})
        names, imports = _names(fn.__code__)
        self.names.update(dict.fromkeys(names))
        for name in names:
            if name in fn.__globals__:
                self._global(name, fn.__globals__[name])
        for level, module in imports:
            package = fn.__globals__.get("__package__") or ""
            try:
                absolute = importlib.util.resolve_name("." * level + module, package)
            except ImportError:
                continue
            top = absolute.partition(".")[0]
            if not known_by_version(top):
                self.say("import", absolute, digest_import(top))

    def _global(self, name: str, used: Any) -> None:
        if isinstance(used, types.ModuleType):
            self._module(used)
        elif not self.packaged or isinstance(used, _FIXED):
            self.say(name)
            self.feed(used)
        else:
            self.feed_all(_functions_within(used))

    def _module(self, module: types.ModuleType) -> None:
        top = module.__name__.partition(".")[0]
        if known_by_version(top) or id(module) in self.modules:
            return
        if top != self.home and is_installed(top):
            self.say("installed", top, digest_import(top))
        else:
            self.modules[id(module)] = module

    def feed_modules(self) -> None:
        """Feed all of the modules that has a name which any of the functions says: one may hand a module to another."""
        done: set[tuple[int, str]] = set()
        while todo := [(m, n) for m in self.modules for n in self.names if (m, n) not in done]:
            done.update(todo)
            for number, name in todo:
                try:
                    member = getattr(self.modules[number], name)
                except Exception:  # it has none, or cannot load it here
                    continue
                self._global(name, member)

    def _tensor(self, tensor: torch.Tensor) -> None:
        self.say("tensor", tensor.dtype, tuple(tensor.shape), tensor.device, tensor.requires_grad)
        self.feed({name: value for name, value in vars(tensor).items() if not name.startswith("_")})
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            self.say(PROCESS)
            return
        self.say(tensor.stride())
        if tensor.device.type != "meta":
            data = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            self.hasher.update(ctypes.string_at(data.data_ptr(), data.nbytes))

    def _class(self, cls: type) -> None:
        self.say("class", cls.__module__, cls.__qualname__)
        if self._follows(cls):
            self.feed_all((type(cls), *cls.__mro__[1:]))
            for name, member in sorted(vars(cls).items()):
                if name not in _OF_THE_CLASS and (not self.packaged or isinstance(member, _FIXED)):
                    self.say(name)
                    self.feed(member)

    def _object(self, value: Any) -> None:
        cls = type(value)
        name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None) or getattr(value, "name", None)
        self.say("object", cls.__module__, cls.__qualname__, name if isinstance(name, str) else None)
        top = cls.__module__.partition(".")[0]
        if top == "irframework":
            return  # an op or an implementation: digested on its own
        if isinstance(value, _OPERATORS):
            self.say(str(value))
        elif not known_by_version(top) or isinstance(value, torch.nn.Module):
            self.feed(cls)
            state = [getattr(value, "__dict__", None), *(getattr(value, slot, None) for slot in _slots(cls))]
            made_in_c = any(not base.__flags__ & _HEAP_TYPE for base in cls.__mro__ if base is not object)
            if state != [None]:
                self.feed(state)
            if (state == [None] or made_in_c) and not self._reduced(value):
                self.say(PROCESS)
        elif top == "torch" and hasattr(value, "__dict__"):
            self.feed([item for _, item in sorted(vars(value).items()) if isinstance(item, _GIVEN)])
        else:
            self.feed_all(_functions_within(value))
            if isinstance(value, threading.local) or not (isinstance(value, _WITHOUT_STATE) or self._reduced(value)):
                self.say(PROCESS)

    def _reduced(self, value: Any) -> bool:
        """Feed what pickle would take to make an object anew; False if pickle cannot."""
        try:
            parts = value.__reduce_ex__(4)
            parts = (
                parts if isinstance(parts, str) else [p if i < 3 else list(p or ()) for i, p in enumerate(parts[:5])]
            )
        except Exception:
            return False
        self.feed(parts)
        return True


def _label(item: object) -> str:
    """Something to sort by that is the same in every process."""
    if isinstance(item, (*_PLAIN, bytes)):
        return repr(item)
    return f"{type(item).__qualname__} {getattr(item, '__qualname__', '')} {item if isinstance(item, tuple) else ''}"


def _functions_within(value: Any) -> list[types.FunctionType]:
    """The Python functions that an object wraps: functools' caches, triton's kernels, torch's custom ops."""
    members = getattr(value, "__dict__", None)
    items = sorted(members.items()) if isinstance(members, dict) else []
    return [member for _, member in items if isinstance(member, types.FunctionType)]


def _slots(cls: type) -> list[str]:
    names: list[str] = []
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _names(code: types.CodeType) -> tuple[tuple[str, ...], list[tuple[int, str]]]:
    """The names that a function and the functions inside it read from outside, and what they import."""
    names, imports = list(code.co_names), []
    if dis.opmap["IMPORT_NAME"] in code.co_code[::2]:
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        for index, step in enumerate(steps):
            if step.opname == "IMPORT_NAME":  # after its level and the names it wants
                level = steps[index - 2].argval
                imports.append((level if isinstance(level, int) else 0, step.argval))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, more = _names(constant)
            names += inner
            imports += more
        elif isinstance(constant, str) and constant.isidentifier():  # getattr(module, "name")
            names.append(constant)
    return tuple(dict.fromkeys(names)), imports
