"""The order in which an op's providers are asked.

Owns the layers (context, compile option, configuration, command line, environment, `custom_ops`, platform default,
registered, native), how they merge into one list per op, and the snapshot of all lists that guards and cache keys
compare. Does not ask the providers: see `dispatch.py`.
"""

import contextlib
import hashlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from irframework.custom_op_rules import native_only
from irframework.decision import DEFAULTS, PLATFORM_DEFAULT, REGISTERED
from irframework.errors import PrioritySyntaxError, UnknownProviderError, suggest
from irframework.registry import registry
from irframework.settings import SWITCHES_OF_COMPILED_CODE, effective, layers, settings
from irframework.untraced import breaks_graph, run_untraced

if TYPE_CHECKING:
    from irframework.op import IrOp

logger = logging.getLogger(__name__)

MODES = ("eager", "inductor")  # what a platform's defaults are asked for
Providers = str | Iterable[str]


@dataclass(frozen=True, slots=True)
class Entry:
    """A provider's place in an op's list, and the layer that it comes from."""

    provider: str
    origin: str


@dataclass(frozen=True, slots=True, eq=False)
class Overrides:
    """The priorities of one `with ir.priority(...)` and those around it. Equal ones are one object."""

    lists: Mapping[str, tuple[str, ...]]


_context: ContextVar[Overrides | None] = ContextVar("irframework_priority", default=None)
_outer: ContextVar[tuple[Overrides | None, ...]] = ContextVar("irframework_outer_priorities", default=())
_option: ContextVar[Overrides | None] = ContextVar("irframework_compile_option", default=None)
_interned: dict[frozenset[tuple[str, tuple[str, ...]]], Overrides] = {}

current_context = _context.get


# --- reading what users write -------------------------------------------------------------------------------------


def parse_providers(value: Providers, op: str) -> tuple[str, ...]:
    """Read one op's list: a comma string or an iterable of names.

    A name with a trailing `?` is optional: it is skipped with a warning where the provider is not installed, so that
    one configuration can be shared between machines.

    Raises:
        PrioritySyntaxError: It is empty, names a provider twice, or is not made of names.
    """
    names = value.split(",") if isinstance(value, str) else value
    if isinstance(names, Mapping) or not isinstance(names, Iterable):
        raise PrioritySyntaxError(f"Priority of op {op!r}: expected provider names, got {value!r:.60}.")
    names = list(names)
    if not all(isinstance(name, str) for name in names):
        raise PrioritySyntaxError(f"Priority of op {op!r}: expected provider names, got {value!r}.")
    providers = tuple(name.strip() for name in names)
    fit = all(name.removesuffix("?") and not any(c in name for c in "=;") for name in providers)
    if not providers or not fit:
        raise PrioritySyntaxError(
            f"Priority of op {op!r}: {value!r} cannot be read. Write provider names separated by commas, e.g. "
            f"{op}=vllm_c,native."
        )
    bare = [name.removesuffix("?") for name in providers]
    twice = sorted({name for name in bare if bare.count(name) > 1})
    if twice:
        raise PrioritySyntaxError(f"Priority of op {op!r}: {', '.join(twice)} is named twice in {value!r}.")
    return providers


def parse_priorities(value: str | Mapping[str, Providers], where: str) -> dict[str, tuple[str, ...]]:
    """Read the priorities of several ops: `rms_norm=a,b;silu_and_mul=c`, or a mapping of lists or comma strings.

    Args:
        value: What the user wrote.
        where: Where it was written, for messages.

    Raises:
        PrioritySyntaxError: It cannot be read.
    """
    if isinstance(value, Mapping):
        for op in value:
            if not isinstance(op, str):
                raise PrioritySyntaxError(f"{where}: expected the name of an op, got {op!r:.60}.")
        return {op: parse_providers(providers, op) for op, providers in value.items()}
    if not isinstance(value, str):
        raise PrioritySyntaxError(f"{where}: expected a mapping or a string op=provider,provider, got {value!r:.60}.")
    result: dict[str, tuple[str, ...]] = {}
    for part in filter(None, (piece.strip() for piece in value.split(";"))):
        op, equals, providers = part.partition("=")
        op = op.strip()
        if not equals or not op.isidentifier():
            raise PrioritySyntaxError(
                f"{where}: {part!r} is not a priority. Write op=provider,provider and separate ops by semicolons, "
                "e.g. rms_norm=vllm_c,native;silu_and_mul=native."
            )
        if op in result:
            raise PrioritySyntaxError(f"{where}: op {op!r} appears twice in {value!r}.")
        result[op] = parse_providers(providers, op)
    return result


# --- context and compile option -----------------------------------------------------------------------------------


_BELONGS_AROUND = "`with ir.priority` belongs around a compiled function, not inside it"


class priority(contextlib.ContextDecorator):  # noqa: N801 - used as `with ir.priority(...)`
    """Put providers in front, for the calls inside a `with` block, in this thread or task only.

    `ir.priority(rms_norm=["a", "b"])`, `ir.priority({"rms_norm": "a,b"})` and `ir.priority("rms_norm=a,b")` are the
    same. Blocks nest: the inner one's providers stand before the outer one's.

    Raises:
        PrioritySyntaxError: The priorities cannot be read.
        UnknownOpError: There is no such op.
        UnknownProviderError: A provider has no implementation of the op.
    """

    def __init__(self, lists: str | Mapping[str, Providers] | None = None, /, **by_op: Providers) -> None:
        parsed = parse_priorities(lists, "ir.priority") if lists is not None else {}
        twice = sorted(set(parsed) & set(by_op))
        if twice:
            raise PrioritySyntaxError(
                f"ir.priority: {', '.join(twice)} is given twice, in the first argument and by name."
            )
        self.lists = {**parsed, **parse_priorities(by_op, "ir.priority")}

    def __call__(self, func: Any) -> Any:
        """Decorate a function; refuse one whose body runs after the call."""
        if inspect.iscoroutinefunction(func) or inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise PrioritySyntaxError(
                f"ir.priority cannot decorate {func.__qualname__}: its body runs after the call, when the "
                "priorities are no longer in force. Use `with ir.priority(...)` inside it."
            )
        return breaks_graph(super().__call__(func), _BELONGS_AROUND)

    def __enter__(self) -> None:
        check_named(self.lists, "context")
        outer = _context.get()
        _outer.set((*_outer.get(), outer))
        _context.set(_merged(self.lists, outer))

    def __exit__(self, *_: object) -> None:
        *outer, last = _outer.get()
        _outer.set(tuple(outer))
        _context.set(last)


for _method in (priority.__call__, priority.__enter__, priority.__exit__):
    run_untraced(breaks_graph(_method, _BELONGS_AROUND))


def _merged(inner: Mapping[str, tuple[str, ...]], outer: Overrides | None) -> Overrides:
    lists = dict(outer.lists) if outer is not None else {}
    for op, providers in inner.items():
        behind = tuple(p for p in lists.get(op, ()) if p not in providers)
        lists[op] = providers + behind
    key = frozenset(lists.items())
    if key not in _interned:
        _interned[key] = Overrides(lists)
    return _interned[key]


@contextlib.contextmanager
def option_scope(lists: str | Mapping[str, Providers] | None) -> Iterator[None]:
    """Put providers in front while one graph is compiled (the compile option `ir_op_priority`)."""
    if not lists:
        yield
        return
    parsed = parse_priorities(lists, 'options={"ir_op_priority": ...}')
    check_named(parsed, "option")
    token = _option.set(_merged(parsed, _option.get()))
    try:
        yield
    finally:
        _option.reset(token)


def check_named(lists: Mapping[str, tuple[str, ...]], origin: str) -> None:
    """Check that the ops exist and that the providers implement them.

    Raises:
        UnknownOpError: There is no such op.
        UnknownProviderError: A provider has no implementation of the op.
    """
    from irframework.plugins import load_plugins
    from irframework.registry import find_op

    load_plugins()
    for name, providers in lists.items():
        _known_providers(find_op(name), providers, origin)


def _known_providers(op: "IrOp", providers: tuple[str, ...], origin: str) -> list[str]:
    """Return the providers without `?`, leaving out optional ones that are not here."""
    from irframework.plugins import why_provider_missing

    known: list[str] = []
    for name in providers:
        provider = name.removesuffix("?")
        if provider in op.registered:
            known.append(provider)
        elif provider != name:
            from irframework.notices import say_once

            say_once(
                logging.WARNING,
                ("optional", op.name, provider),
                "Priority of op %s (%s): the optional provider %s is not here; it is skipped",
                op.name,
                origin,
                provider,
            )
        else:
            cause = why_provider_missing(provider)
            raise UnknownProviderError(
                f"Priority of op {op.name!r} ({origin}): provider {provider!r} has no implementation of it."
                + suggest(provider, op.registered)
                + (f" {cause}" if cause else "")
                + f" If it may be missing on this machine, write {provider + '?'!r}."
            )
    return known


# --- the merged list ----------------------------------------------------------------------------------------------

_Key = tuple[str, str | None, str, Overrides | None, Overrides | None]
_memo: dict[_Key, tuple[Entry, ...]] = {}
_snapshots: dict[tuple[str, Overrides | None, Overrides | None], Mapping[str, str]] = {}
_generation = -1


def _fresh() -> None:
    """Forget what was merged before the last registration or configuration."""
    global _generation
    if _generation != registry.generation:
        with registry.lock:
            _memo.clear()
            _snapshots.clear()
            _generation = registry.generation


def entries_for(op: "IrOp", device: str | None = None, mode: str = "eager") -> tuple[Entry, ...]:
    """Return an op's providers in the order in which they are asked.

    Args:
        op: The op.
        device: Device type of the call; default: that of the current platform.
        mode: `eager` or `inductor`.

    Raises:
        UnknownProviderError: The user's priorities name a provider that has no implementation of the op.
    """
    from irframework.plugins import load_plugins

    load_plugins()
    _fresh()
    option = _option.get() if mode == "inductor" else None
    key = (op.name, device, mode, _context.get(), option)
    found = _memo.get(key)
    while found is None:
        generation = registry.generation
        found = tuple(_merge(op, device, mode))
        if generation == registry.generation:
            _memo[key] = found
        elif any(entry.provider not in op.registered for entry in found):
            found = None  # a plugin was quarantined meanwhile; each can be so only once
    return found


def _merge(op: "IrOp", device: str | None, mode: str) -> Iterator[Entry]:
    seen: set[str] = set()
    for origin, providers in _layers(op, device, mode):
        for provider in providers:
            if provider not in seen:
                seen.add(provider)
                yield Entry(provider, origin)
                if provider == "native":
                    return


def _layers(op: "IrOp", device: str | None, mode: str) -> Iterator[tuple[str, Iterable[str]]]:
    named: list[tuple[str, Mapping[str, tuple[str, ...]]]] = []
    context, option = _context.get(), _option.get()
    if context is not None:
        named.append(("context", context.lists))
    if option is not None and mode == "inductor":
        named.append(("option", option.lists))
    for origin, layer in (("config", layers.config), ("cli", layers.cli)):
        if layer is not None:
            named.append((origin, {name: tuple(providers) for name, providers in layer.ir_op_priority.items()}))
    named += [("env", env_priorities()), ("custom_ops", native_only(op.name))]
    for origin, lists in named:
        if op.name in lists:
            yield origin, _known_providers(op, lists[op.name], origin)
    from irframework.platform import current_platform, default_lists, platform_for

    platform = current_platform() if device is None else platform_for(device)
    for defaults in default_lists(platform, mode):
        wanted = defaults.get(op.name, defaults.get("*", ()))
        yield PLATFORM_DEFAULT, [provider for provider in wanted if provider in op.registered]
    yield REGISTERED, sorted(provider for provider in op.registered if provider != "native")
    yield REGISTERED, ("native",)


_env_text: str | None = None
_env_lists: Mapping[str, tuple[str, ...]] = {}


def env_priorities() -> Mapping[str, tuple[str, ...]]:
    """Return the priorities of IRFRAMEWORK_OP_PRIORITY; warn about ops that look misspelt.

    Raises:
        PrioritySyntaxError: The variable cannot be read.
    """
    global _env_text, _env_lists
    text = settings().op_priority
    if text != _env_text:
        _env_lists = parse_priorities(text, "IRFRAMEWORK_OP_PRIORITY")
        _env_text = text
        for name in _env_lists:
            if name not in registry.ops:
                hint = suggest(name, registry.ops)
                if "Did you mean" in hint:  # an op may be declared later; a likely typo is worth a word now
                    logger.warning("IRFRAMEWORK_OP_PRIORITY names the op %r, which does not exist.%s", name, hint)
    return _env_lists


# --- for guards and cache keys ------------------------------------------------------------------------------------


def snapshot(mode: str) -> Mapping[str, str]:
    """Return for every op a digest of all that decides its calls now: order, implementations and switches.

    The same object comes back as long as nothing changed, so that a guard can compare it by identity first.
    """
    from irframework.plugins import load_plugins

    load_plugins()
    _fresh()
    key = (mode, _context.get(), _option.get())
    found = _snapshots.get(key)
    if found is None:
        switches = str([effective(name) for name in SWITCHES_OF_COMPILED_CODE])
        found = _snapshots[key] = {name: _digest(op, mode, switches) for name, op in sorted(registry.ops.items())}
    return found


def _digest(op: "IrOp", mode: str, switches: str) -> str:
    from irframework.digest import digest_of_op
    from irframework.platform import device_types_here

    hasher = hashlib.sha256((switches + digest_of_op(op)).encode())
    for device in device_types_here():
        for entry in entries_for(op, device, mode):
            impl = op.registered[entry.provider]
            unasked = impl.compiled_where is not None and entry.origin in DEFAULTS
            state = (impl.support.reason(device) is None, unasked, impl.digest())
            hasher.update(f"{device} {entry.provider} {state}\0".encode())
    return hasher.hexdigest()[:16]


def fingerprint(mode: str) -> str:
    """Return one digest of `snapshot(mode)`, for cache keys."""
    return hashlib.sha256(repr(sorted(snapshot(mode).items())).encode()).hexdigest()[:16]


def current_state() -> tuple[Any, ...]:
    """Return a hashable token of this thread's or task's priorities, for fast comparison."""
    return (registry.generation, _context.get(), _option.get())


@contextlib.contextmanager
def restored(state: tuple[Any, ...]) -> Iterator[None]:
    """Choose as in the context that `state` was taken from with `current_state`; what was registered since counts."""
    context, option = _context.set(state[1]), _option.set(state[2])
    try:
        yield
    finally:
        _option.reset(option)
        _context.reset(context)
