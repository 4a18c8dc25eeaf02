"""`CustomOp`: a layer with one forward method per platform, or with an op that it dispatches through.

Owns which method of a layer runs, and the counters of layers that were built. Does not own names and replacements
(`replacement.py`), the rules of `custom_ops` (`custom_op_rules.py`), nor how an op is decided (`dispatch.py`).
"""

import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from irframework import custom_op_rules
from irframework.custom_op_rules import NONE, names_of, ops_of, rules_in_force
from irframework.decision import Decision
from irframework.errors import InvalidLayerError, MissingForwardError
from irframework.layers.compiler_in_use import traced_for_inductor
from irframework.layers.replacement import ReplaceableLayer, add_base, described
from irframework.op import IrOp
from irframework.platform import current_platform

C = TypeVar("C", bound=type)

enabled_custom_ops: Counter[str] = Counter()
"""How many layers were built that run a platform's method or an op, by name."""
disabled_custom_ops: Counter[str] = Counter()
"""How many layers were built that the rules of `custom_ops` leave their native code only, by name."""

_FALLBACKS = {  # the methods that are asked in turn, by the platform's name
    "cpu": ("forward_cpu", "forward_native"),
    "cuda": ("forward_cuda", "forward_native"),
    "rocm": ("forward_hip", "forward_cuda", "forward_native"),
    "xpu": ("forward_xpu", "forward_native"),
    "tpu": ("forward_tpu", "forward_native"),
}
_OUT_OF_TREE = ("forward_oot", "forward_native")
_METHODS = frozenset(name for methods in (*_FALLBACKS.values(), _OUT_OF_TREE) for name in methods)
_warned = False


@add_base
class CustomOp(ReplaceableLayer):
    """A layer that runs the forward method of the current platform, or dispatches through an op.

    A class writes `forward_native` and any of `forward_cpu`, `_cuda`, `_hip`, `_xpu`, `_tpu` and `_oot` (platforms of
    plugins). The method is chosen when the layer is built: the platform's, unless the rules of `custom_ops` switch the
    layer off; then `forward_native`. `forward_hip` falls back to `forward_cuda`, all else to `forward_native`. Without
    rules, a layer runs the platform's method in eager mode and `forward_native` in code that Inductor compiles.

    A class that says `ir_op = ir.ops.rms_norm` calls that op instead, which is decided anew at each call: priorities,
    predicates, `explain` and the compiler's passes hold. Forward methods of a class below it still win, and so does one
    that was put on the class afterwards; those that the class itself or a base writes are not used.

    Args:
        enforce_enable: Run the platform's method whatever the rules say.
        compile_native: Compile `forward_native` where it runs because the rules switch the layer off.

    Attributes:
        name: The name that the class was registered under.
        ir_op: The op that the layer dispatches through, a tuple of ops if `ir_call` chooses between several, or None.
    """

    name: str
    ir_op: Any = None
    _written: dict[str, Any] = {}  # noqa: RUF012 - one per class, made by __init_subclass__
    _op_parameters: tuple[tuple[str, bool], ...] = ()
    _op_defaults: dict[str, Any] = {}  # noqa: RUF012 - likewise
    _dynamic_arg_dims: Any = None

    def __init__(self, enforce_enable: bool = False, *, compile_native: bool = False) -> None:
        super().__init__()
        self._enforce_enable = enforce_enable
        custom_op_rules.warn_of_unknown_names()
        wanted = inspect.signature(self.dispatch_forward).parameters  # older subclasses' take no argument
        options = {"compile_native": compile_native} if "compile_native" in wanted else {}
        self._forward_method = self.dispatch_forward(**options)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls._written = {name: value for name, value in vars(cls).items() if name in _METHODS}
        if vars(cls).get("ir_op") is not None:
            _check_ops(cls)
            if isinstance(cls.ir_op, IrOp):
                cls._op_parameters = tuple((p, not hasattr(CustomOp, p)) for p in cls.ir_op.signature.parameters)
                cls._op_defaults = {
                    p.name: p.default for p in cls.ir_op.signature.parameters.values() if p.default is not p.empty
                }

    @classmethod
    def register(cls, name: str, dynamic_arg_dims: Any = None) -> Callable[[C], C]:
        """Register a class under a name (a decorator). Rules of `custom_ops` mean it by that name.

        Args:
            name: The name, an identifier.
            dynamic_arg_dims: Sizes of arguments that change; with `compile_native`, they are compiled as such.

        Raises:
            InvalidLayerError: `name` is no identifier, or what is decorated is no layer.
            DuplicateLayerError: Another class has the name.
        """
        decorate = super().register(name)

        def decorate_with_sizes(layer: C) -> C:
            decorated = decorate(layer)
            if dynamic_arg_dims is not None:
                decorated._dynamic_arg_dims = dynamic_arg_dims  # type: ignore[attr-defined]
            return decorated

        return decorate_with_sizes

    # --- the rules ---------------------------------------------------------------------------------------------

    @staticmethod
    def default_on() -> bool:
        """Return whether a layer that no rule names runs its platform's method: unless the base is `none`."""
        return rules_in_force().base != NONE

    @classmethod
    def enabled(cls) -> bool:
        """Return whether the rules of `custom_ops` let the layer use kernels.

        For a class with `ir_op` this is whether its op may: the op's priorities are what decides.

        Raises:
            ConfigError: Rules for two names of the layer contradict each other.
        """
        ops = ops_of(cls)
        if ops and not cls._overriding():
            return not all(custom_op_rules.is_switched_off(op) for op in ops)
        said = rules_in_force().about(names_of(cls))
        return cls.default_on() if said is None else said

    # --- which method ------------------------------------------------------------------------------------------

    def dispatch_forward(self, compile_native: bool = False) -> Callable[..., Any]:
        """Return the method that calls of this layer run from now on.

        Args:
            compile_native: Compile `forward_native` if the rules switch the layer off.
        """
        cls = type(self)
        enabled = self._enforce_enable or cls.enabled()
        counter = enabled_custom_ops if enabled else disabled_custom_ops
        counter[getattr(cls, "name", cls.__name__)] += 1
        method = cls._overriding()
        if ops_of(cls) and (method is None or not enabled):
            written_below = enabled or not self._below_op("forward_native")
            return self.forward_ir if written_below else self.forward_native
        _warn_of_older_kind(cls)
        if not enabled:
            return self._compiled_native() if compile_native else self.forward_native
        self._platform_method: Callable[..., Any] = getattr(self, methods_here()[0])
        follows = not self._enforce_enable and _follows_compiler(cls)
        return self._follow_compiler if follows else self._platform_method

    def _follow_compiler(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() and traced_for_inductor():
            return self.forward_native(*args, **kwargs)
        return self._platform_method(*args, **kwargs)

    def _compiled_native(self) -> Callable[..., Any]:
        dynamic = True if self._dynamic_arg_dims is not None else None
        compiled: Callable[..., Any] = torch.compile(self.forward_native, dynamic=dynamic)
        return compiled

    @classmethod
    def _overriding(cls) -> str | None:
        """The method that wins over the class's op: below the class that names the op, or put there afterwards."""
        for name in methods_here():
            owner = _owner(cls, name)
            if owner is not None:
                return name if cls._below_op(name) else None
        return None

    @classmethod
    def _below_op(cls, name: str) -> bool:
        owner, op_owner = _owner(cls, name), _owner(cls, "ir_op")
        if owner is None or op_owner is None:
            return owner is not None
        if owner is op_owner:
            return vars(owner)[name] is not owner._written.get(name)
        return cls.__mro__.index(owner) < cls.__mro__.index(op_owner)

    # --- through an op -----------------------------------------------------------------------------------------

    def ir_args(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return the op's arguments for a call of the layer. To be written by a class whose names differ.

        By default the call's arguments are the op's first ones, in order or by name; the others are the layer's
        attributes that are called as the op's parameters, else the op's defaults.

        Raises:
            InvalidLayerError: A parameter has no value, or has one both in the call and in the layer.
        """
        values: list[Any] = []
        for index, (name, own) in enumerate(self._op_parameters):
            kept = own and hasattr(self, name)
            if index < len(args) or name in kwargs:
                if kept:
                    raise InvalidLayerError(_unclear(self, name, "the call and the layer both have one"))
                values.append(args[index] if index < len(args) else kwargs[name])
            elif kept:
                values.append(getattr(self, name))
            elif name in self._op_defaults:
                values.append(self._op_defaults[name])
            else:
                raise InvalidLayerError(_unclear(self, name, "neither the call nor the layer has one"))
        if len(args) > len(self._op_parameters) or any(k not in dict(self._op_parameters) for k in kwargs):
            raise InvalidLayerError(_unclear(self, "...", "the call has more arguments than the op"))
        return tuple(values)

    def ir_call(self, *args: Any, **kwargs: Any) -> tuple[IrOp, tuple[Any, ...]]:
        """Return the op and its arguments for a call of the layer. To be written by a class that has several ops.

        Raises:
            InvalidLayerError: The class has several ops and does not say which one, or `ir_args` cannot tell.
        """
        if not isinstance(self.ir_op, IrOp):
            raise InvalidLayerError(
                f"{type(self).__name__} dispatches through {', '.join(ops_of(type(self))) or 'no op'}: write "
                "ir_call(self, ...), which returns the op and its arguments."
            )
        return self.ir_op, self.ir_args(*args, **kwargs)

    def forward_ir(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer's op."""
        op, values = self.ir_call(*args, **kwargs)
        return op(*values)

    def explain(self, *args: Any, **kwargs: Any) -> Decision:
        """Return the op's decision for a call of the layer; `ir.explain(layer, ...)` is the same.

        Raises:
            InvalidLayerError: The layer runs a method of its own; the message says which.
        """
        method = self._forward_method
        if getattr(method, "__name__", None) != "forward_ir":
            chosen = self._platform_method if method == self._follow_compiler else method
            raise InvalidLayerError(
                f"{described(type(self))} does not dispatch through an op: it runs "
                f"{getattr(chosen, '__qualname__', repr(chosen))}, chosen when it was built on platform "
                f"{current_platform().name!r}, custom_ops {rules_in_force().written()}."
            )
        op, values = self.ir_call(*args, **kwargs)
        return op.explain(*values)

    # --- what a class writes -----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chosen method."""
        return self._forward_method(*args, **kwargs)

    def forward_native(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer in plain torch. Written by the class; one with `ir_op` runs the op's native function.

        Raises:
            MissingForwardError: The class has neither.
        """
        if self.ir_op is not None:
            op, values = self.ir_call(*args, **kwargs)
            return op.native(*values)
        raise MissingForwardError(
            f"{described(type(self))} has no {methods_here()[0]} for platform {current_platform().name!r} and no "
            "forward_native to fall back to. Write one of the two."
        )

    def forward_cpu(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on a CPU; by default as `forward_native`."""
        return self.forward_native(*args, **kwargs)

    def forward_cuda(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on an NVIDIA GPU; by default as `forward_native`."""
        return self.forward_native(*args, **kwargs)

    def forward_hip(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on an AMD GPU; by default as `forward_cuda`."""
        return self.forward_cuda(*args, **kwargs)

    def forward_xpu(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on an Intel GPU; by default as `forward_native`."""
        return self.forward_native(*args, **kwargs)

    def forward_tpu(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on a TPU; by default as `forward_native`."""
        return self.forward_native(*args, **kwargs)

    def forward_oot(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer on a platform that a plugin brings; by default as `forward_native`."""
        return self.forward_native(*args, **kwargs)


def methods_here() -> tuple[str, ...]:
    """Return the forward methods of the current platform: its own, then those that it falls back to."""
    return _FALLBACKS.get(current_platform().name, _OUT_OF_TREE)


def _owner(cls: type[CustomOp], name: str) -> Any:
    """The class, below `CustomOp`, that an attribute comes from; None if none has it."""
    below = cls.__mro__[: cls.__mro__.index(CustomOp)]
    return next((each for each in below if vars(each).get(name) is not None), None)


def _follows_compiler(cls: type[CustomOp]) -> bool:
    """Whether no rule says anything about a class, and it does not answer for itself."""
    rules = rules_in_force()
    unsaid = rules.base is None and rules.about(names_of(cls)) is None
    return unsaid and getattr(cls.enabled, "__func__", None) is CustomOp.enabled.__func__  # type: ignore[attr-defined]


def _check_ops(cls: type[CustomOp]) -> None:
    ops = cls.ir_op if isinstance(cls.ir_op, tuple) else (cls.ir_op,)
    if not ops or not all(isinstance(op, IrOp) for op in ops):
        raise InvalidLayerError(
            f"{cls.__module__}.{cls.__qualname__}: ir_op must be an op such as ir.ops.rms_norm, or a tuple of ops, "
            f"got {cls.ir_op!r:.80}."
        )


def _unclear(layer: CustomOp, parameter: str, why: str) -> str:
    op, cls = layer.ir_op.name, type(layer).__name__
    return (
        f"{cls}: which value does parameter {parameter!r} of op {op!r} get? {why}. Write ir_args(self, ...) in {cls}: "
        "it returns the op's arguments in order."
    )


def _warn_of_older_kind(cls: type) -> None:
    global _warned
    if not _warned:
        _warned = True
        warnings.warn(
            f"{described(cls)} chooses its kernel by platform, once, when it is built. An op chooses at each call, and "
            "says why: `irframework migrate FILE` shows what the class would become.",
            DeprecationWarning,
            stacklevel=4,
        )
