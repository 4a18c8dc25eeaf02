"""Ops: a named functional operation and everything that hangs on it.

Owns `IrOp` and the registration of implementations. The op's plain torch function is its meaning. Does not own how an
op is declared (`declaration.py`), the torch operators behind it (`torch_ops.py`), nor which implementation runs
(`dispatch.py`).
"""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from irframework import codegen, dispatcher, torch_ops
from irframework.conditions import Predicate, Supports
from irframework.decision import Decision
from irframework.errors import (
    ConditionError,
    DuplicateImplementationError,
    InvalidOpError,
)
from irframework.impl import (
    IrOpImpl,
    check_compiled_where,
    check_functional,
    check_inplace,
    check_parameters,
    check_provider,
    check_signature,
    check_switches,
    declared_again,
    device_types_of,
    place_of,
)
from irframework.maybe_inplace import MaybeInplace
from irframework.registry import find_op, load_plugins, registry
from irframework.spellings import with_spelling
from irframework.support import Answer, Support
from irframework.tolerance import TOLERANCES, Tolerance

NATIVE = "native"


class IrOp:
    """A named functional operation.

    Calling it runs the implementation that the current priorities choose. Its inputs are unchanged, and its outputs
    are contiguous and share no memory with the inputs or with each other. Each op is the only instance of a class of
    its own, whose `__call__` is generated with the op's exact signature.

    Attributes:
        name: The op's name; it is `irframework::<name>` in torch.
        signature: Signature of the declaring function.
        schema: The torch schema, e.g. `(Tensor x, Tensor? weight, float epsilon) -> Tensor`.
        activations: Parameters that `maybe_inplace` gives away.
        allow_inplace: Whether `maybe_inplace` exists.
        native: The plain torch function: meaning, default implementation and reference.
        torch_op: `torch.ops.irframework.<name>.default`.
        maybe_inplace: The form that donates the activations.
        fuse: What the op was declared with: False, True, or the conditions of the fused kernels' domain.
        optional_outputs: By number the outputs that may be None, with the parameter that decides: both are None or
            neither.
        spellings: Further functions that compute the same, for fusion.
        source: `file:line` of the declaration.
        plugin: The plugin that declared the op, or None.
    """

    def __init__(
        self,
        name: str,
        native: Callable[..., Any],
        signature: inspect.Signature,
        schema: str,
        activations: tuple[str, ...],
        allow_inplace: bool,
        fuse: bool | Supports,
        optional_outputs: dict[int, str],
    ) -> None:
        self.name = name
        self.native = native
        self.signature = signature
        self.schema = schema
        self.activations = activations
        self.allow_inplace = allow_inplace
        self.fuse = fuse
        self.optional_outputs = optional_outputs
        self.source = place_of(native)
        self.plugin = registry.transaction.plugin if registry.transaction else None
        self.tensors = torch_ops.tensor_parameters(signature)
        self.tensor_lists = torch_ops.tensor_list_parameters(signature)
        self.num_outputs = torch_ops.count_outputs(schema)
        self.parameters = codegen.parameters_of(signature)
        self.bind_args = codegen.make_bind(self)
        self.torch_op: Any = None
        self.first_call: Callable[..., Any] | None = None
        self.generated: dict[Any, Callable[..., Any]] = {}
        self.misses = 0
        self.maybe_inplace: Any = dispatcher.class_of(MaybeInplace)(self)
        self.backward: Callable[..., Any] | None = None
        self.fake: IrOpImpl | None = None
        self.input_generator: Callable[..., Any] | None = None
        self.value_check: Callable[..., None] | None = None
        self.spellings: tuple[IrOpImpl, ...] = ()
        self.tolerances = dict(TOLERANCES)
        self.registered: dict[str, IrOpImpl] = {
            NATIVE: IrOpImpl(self, NATIVE, native, plugin=self.plugin, source=self.source)
        }
        self.__name__ = name
        self.__qualname__ = name
        self.__doc__ = native.__doc__
        self.__wrapped__ = native

    def __repr__(self) -> str:
        return f"<IrOp {self.name}{self.schema}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return find_op, (self.name,)

    def __copy__(self) -> "IrOp":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "IrOp":
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the op; replaced in each op's own class."""
        raise NotImplementedError

    # --- arguments ---------------------------------------------------------------------------------------------

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        """Return the arguments in the order of the signature, defaults filled in.

        Raises:
            TypeError: As Python does for a function with this signature.
        """
        bound: tuple[Any, ...] = self.bind_args(*args, **(kwargs or {}))
        return bound

    def named(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """Return arguments that are in the order of the signature by their names."""
        return dict(zip(self.signature.parameters, args, strict=True))

    # --- implementations ---------------------------------------------------------------------------------------

    @property
    def impls(self) -> dict[str, IrOpImpl]:
        """Implementations by provider; `native` comes first. A copy: change it through `register_impl`."""
        load_plugins()
        return dict(self.registered)

    def register_impl(
        self,
        provider: str,
        *,
        supported: Answer | Mapping[str, Answer] = True,
        supports_args: Predicate | Supports | None = None,
        inplace: bool = False,
        functional: Callable[..., Any] | None = None,
        device_types: Iterable[str] | None = None,
        batch_invariant: bool = False,
        checks_values: bool = False,
        checks_tensors: bool = False,
        compiled_where: Predicate | None = None,
    ) -> Callable[[Callable[..., Any]], IrOpImpl]:
        """Register a provider's implementation of this op (a decorator).

        Args:
            provider: Name of the provider. `native` is reserved.
            supported: Whether the implementation can run on this machine: a bool, `ir.reject(reason)`, or a callable
                without arguments that is asked once, at first need. An exception in it means no, and is the reason.
                A mapping gives an answer for each device type, `{"cpu": True, "cuda": kernels_load}`.
            supports_args: Predicate with the op's signature: True, False or `ir.reject(reason)`. Or `ir.supports(...)`.
                It may look at dtypes, ranks, strides, static sizes and numbers; not at values or the batch size.
            inplace: The implementation overwrites the op's activations and returns them.
            functional: With `inplace`, the same without overwriting anything, for calls that give nothing away, and in
                compiled code for donated inputs of a graph if Inductor sees the kernels. Else they work on copies.
            device_types: Device types it runs on, e.g. `("cpu", "cuda")`; None means those that `supported` tells
                apart, else all that hold data.
            batch_invariant: A row's result does not depend on how many other rows there are.
            checks_values: It refuses what the op's value check refuses before it writes anything, so that eager calls
                need not look first.
            checks_tensors: The same of tensors that overlap one that it overwrites, or that differ where `same_shape`
                wants them alike: it raises before it writes anything, and the call goes on as if it had been asked.
            compiled_where: Which calls compiled code gives to it where nobody names the provider: a function of some of
                the op's parameters that answers as `supports_args` does. What the compiler makes of native may cost
                less than calling a kernel. It may look at all sizes that are ints; batch-invariant mode does not ask.

        Returns:
            A decorator that returns the `IrOpImpl`.

        Raises:
            ReservedNameError: `provider` is `native`.
            DuplicateImplementationError: The provider has an implementation of this op already.
            SignatureError: The function or the predicate does not have the op's signature.
            InplaceError: `inplace=True` on an op without `allow_inplace`.
            ConditionError: `supports_args` names parameters that the op does not have, or another option has a value
                of the wrong kind.
        """
        check_provider(self, provider)
        support = Support(f"Op {self.name!r}, provider {provider!r}", supported)
        check_switches(
            self.name,
            provider,
            inplace=inplace,
            batch_invariant=batch_invariant,
            checks_values=checks_values,
            checks_tensors=checks_tensors,
        )
        check_compiled_where(self, provider, compiled_where)

        def decorate(fn: Callable[..., Any]) -> IrOpImpl:
            impl = self._make_impl(provider, fn, supports_args)
            impl.inplace = inplace
            impl.device_types = device_types_of(self.name, provider, device_types, support)
            impl.batch_invariant = batch_invariant
            impl.checks_values, impl.checks_tensors = checks_values, checks_tensors
            impl.support = support
            impl.compiled_where = compiled_where
            if functional is not None:
                check_functional(impl, functional)
                impl._functional_fn = functional
            check_inplace(impl)
            self._add(impl)
            return impl

        return decorate

    def _make_impl(self, provider: str, fn: Callable[..., Any], condition: Any) -> IrOpImpl:
        if isinstance(fn, IrOpImpl):
            fn = fn.fn
        if isinstance(fn, (IrOp, MaybeInplace)):
            raise ConditionError(
                f"register_impl({provider!r}) of op {self.name!r} was given an op, which would call itself. Give it a "
                f"function; one that calls ir.ops.{self.name}.native runs the op's own."
            )
        if not callable(fn):
            raise ConditionError(f"register_impl({provider!r}) of op {self.name!r} expects a function, got {fn!r}.")
        missing = check_signature(self, fn, "The implementation", provider)
        impl = IrOpImpl(self, provider, fn, source=place_of(fn), missing=missing)
        if isinstance(condition, Supports):
            try:
                impl.checks = condition.checks(self.signature, self.tensors)
            except ConditionError as error:
                raise ConditionError(f"Op {self.name!r}, provider {provider!r} ({impl.source}): {error}") from None
            impl.predicates = condition.predicates
        elif callable(condition):
            impl.predicates = (condition,)
        elif condition is not None:
            raise ConditionError(
                f"Op {self.name!r}, provider {provider!r}: supports_args must be a function with the op's signature "
                f"or ir.supports(...), got {condition!r}."
            )
        lacking = {name for p in impl.predicates for name in check_signature(self, p, "The predicate", provider)}
        impl.missing = tuple(p for p in self.signature.parameters if p in lacking or p in missing)
        return impl

    def _add(self, impl: IrOpImpl) -> None:
        with registry.lock:
            earlier = self.registered.get(impl.provider)
            if earlier is not None and not declared_again(earlier.fn, impl.fn):
                who = f" by plugin {earlier.plugin}" if earlier.plugin else ""
                raise DuplicateImplementationError(
                    f"Provider {impl.provider!r} already implements op {self.name!r}: registered{who} at "
                    f"{earlier.source}, and again at {impl.source}. A provider has one implementation of an op; "
                    "give the other one a name of its own."
                )
            self.registered[impl.provider] = impl
            if registry.transaction is not None:  # read under the lock: another thread may be loading plugins
                impl.plugin = registry.transaction.plugin
                registry.transaction.providers.add(impl.provider)
            registry.record(lambda: self._restore(impl.provider, earlier))
            registry.changed()

    def _restore(self, provider: str, earlier: IrOpImpl | None) -> None:
        if earlier is None:
            self.registered.pop(provider, None)
        else:
            self.registered[provider] = earlier
        registry.changed()

    def unregister_impl(self, provider: str) -> None:
        """Take an implementation out again (for tests and notebooks). Unknown providers are ignored."""
        earlier = self.registered.get(provider)
        if provider != NATIVE and earlier is not None:
            registry.record(lambda: self._restore(provider, earlier))
            self._restore(provider, None)

    def register_fake(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Register a shape function, used instead of native on fake tensors. It must not depend on a provider."""
        check_signature(self, fn, "The shape function", "fake")
        self._attach(fake=IrOpImpl(self, "shape function", fn, source=place_of(fn)))
        return fn

    def register_backward(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Register a backward to use instead of the vjp of native.

        Args:
            fn: Called as `fn(grads, *args)`: `grads` is a tuple with the gradient of each output, `args` the op's
                arguments in order. Returns one gradient (or None) per tensor parameter, in order.
        """
        self._attach(backward=fn)
        return fn

    def register_input_generator(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Register the function behind `generate_inputs`: it returns a call, or yields the usual one, then others."""
        self._attach(input_generator=fn)
        return fn

    def register_spelling(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Register a function that computes the same as the op in other torch ops: graphs are searched for it, too.

        It never runs. A graph is searched for it only if the op is declared with `fuse`; it is then compared with
        native first, on the calls of the op's input generator, and `SpellingError` says how far it is from that.
        """
        self._attach(spellings=with_spelling(self, fn))
        return fn

    def register_value_check(self, fn: Callable[..., None]) -> Callable[..., None]:
        """Register a function of some of the op's parameters that raises where values, not shapes, make a call wrong.

        It takes them by the op's names and in their order. Eager calls on the CPU run it before any implementation;
        elsewhere it would wait for the device, so there only with `IRFRAMEWORK_CHECK_VALUES=1`; compiled code never.
        """
        check_parameters(self, fn, "The value check")
        self._attach(value_check=codegen.make_apply(self, fn))
        return fn

    def _attach(self, **values: Any) -> None:
        """Set attributes of the op; a plugin that fails later loses them again."""
        with registry.lock:
            earlier = {name: getattr(self, name) for name in values}
            registry.record(lambda: self._set(earlier))
            self._set(values)

    def _set(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)
        registry.changed()

    def generate_inputs(
        self, *, shape: tuple[int, ...] = (8, 64), dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> tuple[Any, ...]:
        """Return random arguments for the op.

        Args:
            shape: Shape of the first activation.
            dtype: dtype of the activations.
            device: Device of all tensors.

        Raises:
            InvalidOpError: The op has no generator (see `register_input_generator`).
        """
        if self.input_generator is None:
            raise InvalidOpError(
                f"Op {self.name!r} ({self.source}) has no input generator. Register one with "
                f"@ir.ops.{self.name}.register_input_generator."
            )
        made = self.input_generator(shape=shape, dtype=dtype, device=device)
        return self.bind(tuple(next(made) if inspect.isgeneratorfunction(self.input_generator) else made))

    def override_tolerance(self, dtype: torch.dtype, *, atol: float, rtol: float) -> None:
        """State how far implementations may be from native for a dtype."""
        self._attach(tolerances={**self.tolerances, dtype: Tolerance(atol, rtol)})

    def get_tolerance(self, dtype: torch.dtype) -> Tolerance:
        """Return how far implementations may be from native; exact for dtypes that are not floating point."""
        return self.tolerances.get(dtype, Tolerance(0.0, 0.0))

    # --- decisions ---------------------------------------------------------------------------------------------

    def dispatch(self, *args: Any, **kwargs: Any) -> IrOpImpl:
        """Return the implementation that a call with these arguments runs."""
        from irframework.dispatch import resolve

        return resolve(self, self.bind(args, kwargs)).impl

    def explain(self, *args: Any, **kwargs: Any) -> Decision:
        """Return the decision for a call with these arguments, with a reason for every candidate."""
        from irframework.dispatch import resolve

        return resolve(self, self.bind(args, kwargs), stop_at_first=False)

    def get_priority(self) -> list[str]:
        """Return the providers in the order in which they are asked now, on the current platform."""
        from irframework.priority import entries_for

        return [entry.provider for entry in entries_for(self)]

    def supported_providers(self) -> list[str]:
        """Return the providers whose implementation can run on this machine, best first."""
        return [provider for provider in self.get_priority() if self.registered[provider].supported]

    def reset_dispatch(self) -> None:
        """Forget the generated dispatchers; they are made anew at the next call."""
        dispatcher.reset(self)
