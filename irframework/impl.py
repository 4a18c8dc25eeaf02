"""One provider's implementation of one op.

Owns `IrOpImpl` and the check of its signature against the op's. Does not choose between implementations: see
`dispatch.py`; nor ask whether one runs on this machine: see `support.py`.

Private API used here: `importlib._RELOADING` (Python 3.10 to 3.14), the modules that are being reloaded.
"""

import importlib
import inspect
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from irframework import autocast, codegen, symbolic
from irframework.conditions import Check, Predicate
from irframework.decision import Rejected
from irframework.digest import digest_of
from irframework.errors import (
    ArgumentError,
    ConditionError,
    InplaceError,
    ReservedNameError,
    SignatureError,
    UnknownProviderError,
    suggest,
)
from irframework.predicates import RAISED, answer_of
from irframework.registry import find_op
from irframework.support import Support

if TYPE_CHECKING:
    from irframework.op import IrOp

PREDICATE_RAISED = f"supports_args {RAISED}"  # how the reason of such a rejection begins


@dataclass(slots=True, eq=False, repr=False)
class IrOpImpl:
    """An implementation; calling it calls the provider's function itself.

    Attributes:
        op: The op.
        provider: The name it was registered under.
        fn: The provider's function.
        support: Whether it can run on this machine, as a whole or for each device type.
        inplace: Whether it may overwrite the op's activations.
        device_types: Device types it runs on; None means any that holds data.
        batch_invariant: Whether a row's result does not depend on the other rows.
        checks_values, checks_tensors: What it refuses itself: see `IrOp.register_impl`.
        compiled_where: Which calls compiled code gives it unasked, or None: all.
        plugin: The plugin that registered it, or None.
        source: `file:line` of the function.
        proven: One call was made with all checks; only then a dispatcher calls it directly.
        shares: It was seen to return memory that it was given: what it returns is always checked.
    """

    op: "IrOp"
    provider: str
    fn: Callable[..., Any]
    support: Support = field(default_factory=lambda: Support("an implementation"))
    inplace: bool = False
    device_types: tuple[str, ...] | None = None
    batch_invariant: bool = False
    checks_values: bool = False
    checks_tensors: bool = False
    compiled_where: Predicate | None = None
    plugin: str | None = None
    source: str = ""
    checks: tuple[Check, ...] = ()
    predicates: tuple[Predicate, ...] = ()
    missing: tuple[str, ...] = ()
    proven: bool = False
    shares: bool = False
    _digest: str | None = field(default=None, repr=False)
    _failed_check: Callable[..., str | None] | None = field(default=None, repr=False)
    _apply: Callable[..., Any] | None = field(default=None, repr=False)
    _functional_fn: Callable[..., Any] | None = None
    _functional: "IrOpImpl | None" = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the provider's function itself."""
        return self.fn(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<IrOpImpl {self.name} ({self.source})>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _registered, (self.op.name, self.provider)

    def __copy__(self) -> "IrOpImpl":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "IrOpImpl":
        return self

    @property
    def name(self) -> str:
        """`op:provider`, as messages show it."""
        return f"{self.op.name}:{self.provider}"

    @property
    def described(self) -> str:
        """Who this is, for messages: op, provider, plugin with version, and place."""
        from irframework.plugins import version_of

        by = f", plugin {self.plugin} {version_of(self.plugin)}" if self.plugin else ""
        return f"implementation {self.provider!r} of op {self.op.name!r} ({self.source}{by})"

    @property
    def supported(self) -> bool:
        """Whether it can run on this machine at all. Evaluated once; an exception means no."""
        return self.support.reason() is None

    @property
    def unsupported_reason(self) -> str | None:
        """Why `supported` is false, or None."""
        return self.support.reason()

    @property
    def functional(self) -> "IrOpImpl | None":
        """What an in-place implementation runs where nothing may be overwritten, so that nothing need be copied first.

        None if it was registered without: then it works on copies.
        """
        if self._functional is None and self._functional_fn is not None:
            self._functional = replace(
                self,
                fn=self._functional_fn,
                inplace=False,
                proven=False,  # what was seen of the in-place form says nothing of this one
                shares=False,
                _functional_fn=None,
                _digest=None,
                _apply=None,
            )
        return self._functional

    def supports_args(self, *args: Any, **kwargs: Any) -> bool | Rejected:
        """Ask whether this implementation takes a call, given with the op's signature.

        Returns:
            True, or a `Rejected` with the reason. An exception of the provider's predicate is a rejection. Devices
            are not looked at here: the framework checks them before it asks.
        """
        return self.accepts(self.op.bind(args, kwargs))

    def accepts(self, args: tuple[Any, ...]) -> bool | Rejected:
        """Like `supports_args`, for arguments in the order of the signature with defaults filled in."""
        if self._failed_check is None:
            self._failed_check = codegen.make_failed_check(self)
        named = self.op.named(args)
        try:
            reason = self._failed_check(**named)
        except Exception as error:
            if not symbolic.only_a_run_can_tell(error):
                raise
            return Rejected("its conditions depend on a size that only a run can tell")
        if reason is not None:
            return Rejected(reason)
        for predicate in self.predicates:
            rejected = answer_of(predicate, named, "supports_args")
            if rejected is not None:
                return rejected
        return True

    def apply(self, args: tuple[Any, ...]) -> Any:
        """Call the provider's function with arguments in the order of the op's signature, all defaults filled in."""
        if self._apply is None:
            self._apply = codegen.make_apply(self.op, self.fn)
        if autocast.is_active():
            with autocast.off():
                return self._apply(**self.op.named(args))
        return self._apply(**self.op.named(args))

    def digest(self) -> str:
        """Digest of all that decides what this implementation computes and when; part of every cache key."""
        if self._digest is None:
            self._digest = digest_of(self)
        return self._digest


def _registered(op: str, provider: str) -> "IrOpImpl":
    """Return an implementation by name, where a pickled one is read."""
    impls = find_op(op).impls
    if provider not in impls:
        raise UnknownProviderError(f"Op {op!r}: provider {provider!r} is not here.{suggest(provider, impls)}")
    return impls[provider]


def check_provider(op: "IrOp", provider: object) -> None:
    """Check the name under which an implementation is registered.

    Raises:
        ReservedNameError: It is `native`, or has characters that priority strings use.
        ArgumentError: It is no name.
    """
    if provider == "native":
        raise ReservedNameError(
            f"Op {op.name!r}: the provider name 'native' is reserved for the op's own function ({op.source}). "
            "Choose another name."
        )
    if not isinstance(provider, str):
        raise ArgumentError(
            f"Op {op.name!r}: register_impl expects a provider's name, got {provider!r:.60}. Write "
            f'@ir.ops.{op.name}.register_impl("name") above the function.'
        )
    if not provider or any(c in ",;=?" or c.isspace() for c in provider):
        raise ReservedNameError(
            f"Op {op.name!r}: {provider!r} cannot be a provider's name; it must not be empty or contain spaces, "
            "commas, semicolons, equal or question marks, which priority strings use."
        )


def device_types_of(op: str, provider: str, names: Iterable[str] | None, support: Support) -> tuple[str, ...] | None:
    """Read the device types that an implementation is registered for; None means all that hold data.

    Raises:
        ConditionError: They are not names of device types, or not those that `supported` tells apart.
    """
    told = support.device_types
    if names is None and told is None:
        return None
    given = told if names is None else names
    types = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else ()
    if not types or not all(isinstance(name, str) and name.isidentifier() and name == name.lower() for name in types):
        raise ConditionError(
            f"Op {op!r}, provider {provider!r}: device_types must name device types without an index, e.g. "
            f'("cpu", "cuda"); got {given!r}.'
        )
    if told is not None and set(told) != set(types):
        raise ConditionError(
            f"Op {op!r}, provider {provider!r}: supported speaks of {', '.join(told)}, device_types of "
            f"{', '.join(types)}. Leave device_types out."
        )
    return types


def check_switches(op: str, provider: str, **switches: object) -> None:
    """Check the options of a registration that are yes or no.

    Raises:
        ConditionError: One is neither True nor False.
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ConditionError(f"Op {op!r}, provider {provider!r}: {name} must be True or False, got {value!r:.60}.")


def check_inplace(impl: IrOpImpl) -> None:
    """Check that an implementation may work in place.

    Raises:
        InplaceError: Its op was declared without `allow_inplace`.
    """
    if impl.inplace and not impl.op.allow_inplace:
        raise InplaceError(
            f"Implementation {impl.provider!r} ({impl.source}) is registered with inplace=True, but op "
            f"{impl.op.name!r} was not declared with allow_inplace=True ({impl.op.source})."
        )


def check_functional(impl: IrOpImpl, fn: object) -> None:
    """Check the function that an in-place implementation has for calls that give nothing away.

    Raises:
        ConditionError: It is no function, or the implementation does not work in place.
        SignatureError: It lacks parameters, or has others than the implementation.
    """
    if not callable(fn) or not impl.inplace:
        what = (
            "expects a function" if impl.inplace else "needs inplace=True: without it, the implementation is functional"
        )
        raise ConditionError(f"Op {impl.op.name!r}, provider {impl.provider!r} ({impl.source}): functional= {what}.")
    missing = check_signature(impl.op, fn, "The functional form", impl.provider)
    if missing:
        raise SignatureError(
            f"The functional form of provider {impl.provider!r} for op {impl.op.name!r} ({place_of(fn)}) lacks "
            f"{', '.join(missing)}."
        )


def place_of(fn: Callable[..., Any]) -> str:
    """Return `file:line` of a function, with the file relative to the current directory when it is below it."""
    code = getattr(inspect.unwrap(fn), "__code__", None)
    if code is None:
        return f"{getattr(fn, '__module__', '?')}.{getattr(fn, '__qualname__', repr(fn))}"
    file = code.co_filename
    relative = os.path.relpath(file) if os.path.isabs(file) and os.path.exists(file) else file
    return f"{file if relative.startswith('..') else relative}:{code.co_firstlineno}"


def check_parameters(op: "IrOp", fn: Callable[..., Any], what: str) -> None:
    """Raise unless a function takes some of the op's parameters, by their names and in their order.

    Raises:
        SignatureError: It takes others, or does not say which.
    """
    try:
        taken = list(inspect.signature(fn).parameters)
    except (TypeError, ValueError) as error:
        raise SignatureError(f"{what} of op {op.name!r} has no signature that can be read ({error}).") from error
    if taken != [name for name in op.signature.parameters if name in taken]:
        raise SignatureError(
            f"{what} of op {op.name!r} ({place_of(fn)}) takes {', '.join(taken)}; it must take some of "
            f"{', '.join(op.signature.parameters)}, in this order."
        )


def check_compiled_where(op: "IrOp", provider: str, predicate: object) -> None:
    """Check the option `compiled_where` of a registration, which may be None.

    Raises:
        ConditionError: It is no function.
        SignatureError: As `check_parameters`.
    """
    if predicate is not None and not callable(predicate):
        what = f"must be a function of some of the op's parameters, got {predicate!r:.60}."
        raise ConditionError(f"Op {op.name!r}, provider {provider!r}: compiled_where {what}")
    if predicate is not None:
        check_parameters(op, predicate, f"compiled_where of provider {provider!r}")


def check_signature(op: "IrOp", fn: Callable[..., Any], what: str, provider: str) -> tuple[str, ...]:
    """Check a provider's function against the op's signature: names, order, kinds and defaults.

    Returns:
        The newest parameters of the op that the function lacks. It may lack trailing ones that have a default (it was
        written for an older version of the op); calls that set them are then rejected for it.

    Raises:
        SignatureError: The signatures do not fit; the message shows both.
    """
    try:
        theirs = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError) as error:
        raise SignatureError(
            f"{what} of provider {provider!r} for op {op.name!r} has no signature that can be read ({error}). "
            f"Wrap it in a function with the signature {op.name}{op.signature}."
        ) from None
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn) or inspect.isasyncgenfunction(fn):
        raise SignatureError(
            f"{what} of provider {provider!r} for op {op.name!r} ({place_of(fn)}) returns a coroutine or a generator, "
            "not its result. Make it a plain function."
        )
    ours = list(op.signature.parameters.values())
    problem = _difference(ours, theirs)
    if problem is None:
        return tuple(parameter.name for parameter in ours[len(theirs) :])
    raise SignatureError(
        f"{what} of provider {provider!r} for op {op.name!r} does not have the op's signature: {problem}.\n"
        f"  op:       {op.name}{_plain(op.signature)}  ({op.source})\n"
        f"  provider: {getattr(fn, '__name__', 'fn')}{_plain(inspect.signature(fn))}  ({place_of(fn)})\n"
        "Use the op's names, order and defaults."
    )


def _plain(signature: inspect.Signature) -> str:
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))


def _difference(ours: list[inspect.Parameter], theirs: list[inspect.Parameter]) -> str | None:
    for position, (own, other) in enumerate(zip(ours, theirs, strict=False)):
        if other.name != own.name:
            return f"parameter {position + 1} is called {other.name!r} instead of {own.name!r}"
        if other.kind != own.kind:
            return f"parameter {own.name!r} is {other.kind.description} instead of {own.kind.description}"
        if not _same_default(own.default, other.default):
            return f"parameter {own.name!r} has {_show(other.default)} instead of {_show(own.default)}"
    if len(theirs) > len(ours):
        return f"parameter {theirs[len(ours)].name!r} is unknown to the op"
    for own in ours[len(theirs) :]:
        if own.default is inspect.Parameter.empty:
            return f"parameter {own.name!r} is missing"
    return None


def _same_default(own: object, other: object) -> bool:
    return own is other or (type(own) is type(other) and own == other)


def _show(default: object) -> str:
    return "no default" if default is inspect.Parameter.empty else f"the default {default!r}"


def declared_again(old: Callable[..., Any], new: Callable[..., Any]) -> bool:
    """Whether `new` is the same declaration executed again: a reloaded module or a notebook cell."""
    if old is new:
        return True
    if (old.__module__, old.__qualname__) != (new.__module__, new.__qualname__) or "<" in new.__qualname__:
        return False
    old_code, new_code = getattr(old, "__code__", None), getattr(new, "__code__", None)
    if old_code is None or new_code is None:
        return False
    reloading = new.__module__ in getattr(importlib, "_RELOADING", {})
    in_cell = old_code.co_filename != new_code.co_filename and new.__module__ == "__main__"
    same_place = old_code.co_filename == new_code.co_filename and old_code.co_firstlineno == new_code.co_firstlineno
    return reloading or in_cell or same_place
