"""The resolver: which implementation runs a call, and running it.

Owns the one place where a call is decided (`resolve`) and the promises about outputs (`own_outputs`). Everything else
is a view of `resolve`: the generated dispatchers inline it, lowering asks it on fake tensors, `explain` and the
command line show it. Does not own the order of providers: see `priority.py`.
"""

import logging
import numbers
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from irframework import codegen, symbolic
from irframework.decision import Candidate, Decision
from irframework.errors import (
    ArgumentError,
    DeviceMismatchError,
    ImplementationContractError,
    NoImplementationError,
    PredicateGuardError,
)
from irframework.priority import current_context, entries_for
from irframework.registry import registry
from irframework.settings import effective

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp

logger = logging.getLogger(__name__)

_SWAP_AFTER = 16
_MAX_CONTEXTS = 64
_said: set[tuple[object, ...]] = set()


def say_once(level: int, key: tuple[object, ...], message: str, *args: object) -> None:
    """Log a message the first time its key is seen."""
    if key not in _said:
        _said.add(key)
        logger.log(level, message, *args)


# --- deciding -----------------------------------------------------------------------------------------------------


def resolve(op: "IrOp", args: tuple[Any, ...], mode: str = "eager", stop_at_first: bool = True) -> Decision:
    """Decide one call.

    Args:
        op: The op.
        args: All arguments in the order of the signature; tensors may be fake.
        mode: `eager` or `inductor`: whose default priorities count.
        stop_at_first: Look at no candidate after the chosen one.

    Returns:
        The decision. Native accepts every call, so there is always one.

    Raises:
        DeviceMismatchError: The tensors live on different devices.
        PredicateGuardError: A predicate looked at a symbolic size.
        UnknownProviderError: The priorities name a provider that has no implementation of the op.
        NoImplementationError: Batch-invariant and strict mode, and no implementation is batch invariant.
    """
    check_arguments(op, args)
    device = device_type_of(op, args)
    candidates: list[Candidate] = []
    chosen: IrOpImpl | None = None
    for entry in entries_for(op, device, mode):
        impl = op.registered[entry.provider]
        reason = why_never(impl, device) or _why_not_now(impl, args)
        if reason is None and chosen is not None:
            candidates.append(Candidate(entry.provider, True, f"{chosen.provider} comes first", entry.origin))
            continue
        candidates.append(Candidate(entry.provider, reason is None, reason, entry.origin))
        if reason is None:
            chosen = impl
            if stop_at_first:
                break
        elif stop_at_first and logger.isEnabledFor(logging.DEBUG):
            say_once(
                logging.DEBUG, (op.name, entry.provider, reason), "%s: not %s: %s", op.name, entry.provider, reason
            )
    if chosen is None:  # only when native itself may not run
        reasons = "; ".join(f"{c.provider}: {c.reason}" for c in candidates)
        raise NoImplementationError(f"Op {op.name!r}: no implementation may run this call ({reasons}).")
    return Decision(op.name, chosen, chosen.provider, tuple(candidates))


def explain(op: "IrOp | str", *args: Any, **kwargs: Any) -> Decision:
    """Return the decision for a call, with a reason for every candidate.

    Args:
        op: The op or its name.
        *args: The call's arguments.
        **kwargs: The call's keyword arguments.

    Raises:
        UnknownOpError: There is no op of that name.
        TypeError: The arguments do not fit the op's signature.
    """
    from irframework.op import find_op

    return (find_op(op) if isinstance(op, str) else op).explain(*args, **kwargs)


def why_never(impl: "IrOpImpl", device: str) -> str | None:
    """Why an implementation cannot be chosen for any call on a device type now, or None."""
    if not impl.supported:
        return impl.unsupported_reason
    if impl.provider == "native":
        return None
    if device == "meta":
        return "meta tensors hold no data; native gives their shapes"
    if impl.device_types is not None and device not in impl.device_types:
        return f"runs on {', '.join(impl.device_types)}, the tensors are on {device}"
    if effective("batch_invariant") and not impl.batch_invariant:
        return "not declared batch invariant, and batch-invariant mode is on"
    return None


def _why_not_now(impl: "IrOpImpl", args: tuple[Any, ...]) -> str | None:
    environment = symbolic.shape_env_of(args)
    guards = symbolic.guard_count(environment)
    try:
        answer = impl.accepts(args)
    except Exception as error:
        if symbolic.is_guard_error(error):
            raise PredicateGuardError(_guard_message(impl, str(error))) from error
        raise
    if symbolic.guard_count(environment) > guards:
        raise PredicateGuardError(_guard_message(impl, symbolic.newest_guard(environment)))
    return None if answer is True else answer.reason if answer is not False else "no"


def _guard_message(impl: "IrOpImpl", guard: str) -> str:
    return (
        f"The predicate of {impl.described} looked at a size that is symbolic here and added the guard {guard}; the "
        "choice would hold for some batch sizes only. A predicate may look at dtypes, ranks, strides, static sizes "
        "and numbers, not at the batch size."
    )


def predicate_raised(impl: "IrOpImpl", error: Exception) -> bool:
    """A predicate's exception is a rejection; say so once."""
    text = f"{type(error).__name__}: {error}"
    say_once(logging.WARNING, (impl.name, text), "supports_args of %s raised %s: taken as no", impl.described, text)
    return False


def check_arguments(op: "IrOp", args: tuple[Any, ...]) -> None:
    """Check that tensors, numbers and words are where they belong.

    Raises:
        ArgumentError: An argument has the wrong type.
    """
    for (name, parameter), value in zip(op.signature.parameters.items(), args, strict=True):
        wrong = name in op.tensors and not isinstance(value, Tensor)
        if wrong and not (value is None and parameter.annotation is not Tensor):
            optional = "" if parameter.annotation is Tensor else " or None"
            raise ArgumentError(_wrong_type(op, name, f"a tensor{optional}", value))
        number = codegen.number_type(parameter.annotation)
        may_be_none = value is None and parameter.annotation not in _TAKEN_AS
        if number is not None and not may_be_none and not isinstance(value, _TAKEN_AS[number]):
            raise ArgumentError(_wrong_type(op, name, _CALLED[number], value))


_TAKEN_AS: dict[Any, tuple[type, ...]] = {  # as torch does for its own ops
    float: (numbers.Number, torch.SymInt, torch.SymFloat, torch.SymBool, Tensor),
    int: (numbers.Integral, torch.SymInt, torch.SymBool, Tensor),
    bool: (numbers.Number, torch.SymBool, torch.SymInt, Tensor),
    str: (str,),
}
_CALLED: dict[Any, str] = {float: "a number", int: "an int", bool: "a bool", str: "a str"}


def _wrong_type(op: "IrOp", name: str, wanted: str, value: object) -> str:
    return (
        f"Op {op.name!r}: argument {name!r} must be {wanted}, got {type(value).__name__} ({value!r:.60}). "
        f"The op is {op.name}{op.schema}."
    )


def device_type_of(op: "IrOp", args: tuple[Any, ...]) -> str:
    """Return the device type of a call; without tensors, the current platform's.

    Raises:
        DeviceMismatchError: Two tensors are on different devices; tensors without dimensions on the CPU do not count.
    """
    first: tuple[str, torch.device] | None = None
    scalar: str | None = None
    for name, value in zip(op.signature.parameters, args, strict=True):
        if not isinstance(value, Tensor):
            continue
        device = value.device
        if value.dim() == 0 and device.type == "cpu":
            scalar = device.type
        elif first is None:
            first = (name, device)
        elif device != first[1]:
            raise DeviceMismatchError(
                f"Op {op.name!r}: argument {name!r} is on {device}, but {first[0]!r} is on {first[1]}. "
                f"Move them to one device, e.g. {name} = {name}.to({first[0]}.device)."
            )
    if first is not None:
        return first[1].type
    if scalar is not None:
        return scalar
    from irframework.platform import current_platform

    return current_platform().device_types[0]


# --- running ------------------------------------------------------------------------------------------------------


def other_context(op: "IrOp", donated: bool, args: tuple[Any, ...]) -> Any:
    """Serve a call for whose context priorities the dispatcher in place was not made.

    The first call under a set of priorities generates their dispatcher and runs the call with all checks; later ones
    use it, and after a while put it in place.
    """
    form = op.maybe_inplace if donated else op
    context = current_context()
    function = form.generated.get(context)
    if function is None:
        result = unusual(op, donated, args)
        _generate(op, donated, context)
        return result
    form.misses += 1
    if form.misses % _SWAP_AFTER == 0:
        type(form).__call__ = function
    named = dict(zip(op.signature.parameters, args, strict=True))
    return function(form, **named)


def _generate(op: "IrOp", donated: bool, context: Any) -> None:
    from irframework.platform import current_platform

    generation = registry.generation
    devices = list(dict.fromkeys((*current_platform().device_types, "cpu")))
    branches = [(device, _possible(op, device)) for device in devices]
    with registry.lock:
        if registry.generation != generation:  # something was registered meanwhile; the next call tries again
            return
        form = op.maybe_inplace if donated else op
        if len(form.generated) >= _MAX_CONTEXTS:
            form.generated.clear()
        codegen.generate(op, donated, context, branches)


def _possible(op: "IrOp", device: str) -> list["IrOpImpl"]:
    """The implementations that some call on a device could choose, up to the first that takes every call."""
    impls: list[IrOpImpl] = []
    for entry in entries_for(op, device, "eager"):
        impl = op.registered[entry.provider]
        if why_never(impl, device) is None:
            impls.append(impl)
            if not (impl.checks or impl.predicates or impl.missing):
                break
    return impls


def unusual(op: "IrOp", donated: bool, args: tuple[Any, ...]) -> Any:
    """Serve a call that the plain path does not: through the torch op when something must see it, else directly."""
    form = op.maybe_inplace if donated else op
    if torch.overrides.has_torch_function(args):  # a subclass, or a proxy of torch.fx, which is no tensor
        return form.torch_op(**dict(zip(op.signature.parameters, args, strict=True)))
    check_arguments(op, args)
    if torch.autograd.forward_ad._current_level >= 0:  # a torch op without a forward derivative drops it silently
        return own_outputs(op, op.registered["native"].apply(args), args)
    if _must_be_seen(args):
        return form.torch_op(**dict(zip(op.signature.parameters, args, strict=True)))
    return run(op, args, donated)


def _must_be_seen(args: tuple[Any, ...]) -> bool:
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return True
    if torch.overrides._get_current_function_mode_stack():
        return True
    grad = torch.is_grad_enabled()
    for value in args:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Tensor) and (type(item) not in (Tensor, Parameter) or (grad and item.requires_grad)):
                return True
    return False


def run(op: "IrOp", args: tuple[Any, ...], donated: bool = False) -> Any:
    """Decide a call and run it, below all torch modes and without gradients of its own.

    Args:
        op: The op.
        args: All arguments in the order of the signature.
        donated: Whether the activations may be overwritten.

    Returns:
        The outputs, contiguous and of their own (with `donated`, they may be the donated tensors).
    """
    impl = resolve(op, args).impl
    return run_impl(impl, args, donated)


def run_impl(impl: "IrOpImpl", args: tuple[Any, ...], donated: bool = False) -> Any:
    """Run one implementation and hold it to what the op promises."""
    op = impl.op
    given: tuple[str, ...] = ()
    if impl.inplace:
        values = dict(zip(op.signature.parameters, args, strict=True))
        for name in op.activations:
            value = values[name]
            if not isinstance(value, Tensor):
                continue
            if donated and _may_be_overwritten(op, name, values):
                given += (name,)
            else:
                values[name] = value.detach().clone(memory_format=torch.contiguous_format)
        args = tuple(values.values())
    outputs = own_outputs(
        op, impl.apply(args), args, impl, given if donated else op.activations if impl.inplace else ()
    )
    if not impl.proven:
        impl.proven = True
        op.reset_dispatch()
    return outputs


def _may_be_overwritten(op: "IrOp", name: str, values: dict[str, Any]) -> bool:
    value = values[name]
    if isinstance(value, Parameter) or not value.is_contiguous() or value.requires_grad:
        return False
    return not any(
        isinstance(other, Tensor) and torch._C._is_alias_of(value, other)
        for other_name, other in values.items()
        if other_name != name
    )


def own_outputs(
    op: "IrOp",
    outputs: Any,
    args: tuple[Any, ...],
    impl: "IrOpImpl | None" = None,
    given: tuple[str, ...] = (),
) -> Any:
    """Hold outputs to the op's promises: right count, contiguous, sharing memory with no input and with each other.

    Args:
        op: The op.
        outputs: What the implementation returned.
        args: What it was called with.
        impl: The implementation, for messages; None for the shape function.
        given: Arguments whose memory the outputs may take over.

    Returns:
        The outputs, repaired by copies where only layout or aliasing was wrong.

    Raises:
        ImplementationContractError: The number or type of the outputs is wrong.
    """
    if op.num_outputs == 1 and isinstance(outputs, Tensor):
        flat = [outputs]
    elif isinstance(outputs, (tuple, list)) and all(isinstance(o, Tensor) for o in outputs):
        flat = list(outputs)
        if op.num_outputs not in (1, len(flat)):
            raise ImplementationContractError(_contract(op, impl, f"returned {len(flat)} outputs"))
        if op.num_outputs == 1 and not op.schema.endswith("[]"):
            raise ImplementationContractError(_contract(op, impl, f"returned a {type(outputs).__name__}"))
    else:
        raise ImplementationContractError(_contract(op, impl, f"returned {type(outputs).__name__}"))
    taken = [
        value
        for name, value in zip(op.signature.parameters, args, strict=True)
        if name not in given and isinstance(value, Tensor)
    ]
    owned: list[Tensor] = []
    for index, output in enumerate(flat):
        if any(output is other or torch._C._is_alias_of(output, other) for other in (*taken, *owned)):
            if impl is not None:
                impl.shares = True
            _repaired(op, impl, index, "shares memory with an input or another output")
            output = output.clone(memory_format=torch.contiguous_format)
        elif not output.is_contiguous():
            _repaired(op, impl, index, f"has strides {tuple(output.stride())} for shape {tuple(output.shape)}")
            output = output.contiguous()
        owned.append(output)
    if isinstance(outputs, Tensor):
        return owned[0]
    return tuple(owned) if op.num_outputs > 1 else owned


def _repaired(op: "IrOp", impl: "IrOpImpl | None", index: int, what: str) -> None:
    if impl is not None and impl.provider != "native":
        say_once(
            logging.WARNING,
            (impl.name, index, what),
            "Output %d of the %s %s; it is copied at every call. Return a contiguous tensor of its own.",
            index,
            impl.described,
            what,
        )


def _contract(op: "IrOp", impl: "IrOpImpl | None", what: str) -> str:
    who = f"The shape function of op {op.name!r}" if impl is None else f"The {impl.described}"
    return f"{who} {what}; the op's schema is {op.schema}."


__all__ = [
    "check_arguments",
    "current_context",
    "device_type_of",
    "explain",
    "other_context",
    "own_outputs",
    "predicate_raised",
    "resolve",
    "run",
    "run_impl",
    "say_once",
    "unusual",
    "why_never",
]
