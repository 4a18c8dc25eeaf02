"""The resolver: which implementation runs a call.

Owns the one place where a call is decided, `resolve`. Everything else is a view of it: the generated dispatchers inline
it, lowering asks it on fake tensors, `explain` and the command line show it. Does not own the order of providers
(`priority.py`), nor running what was chosen (`execution.py`).
"""

import logging
import numbers
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from irframework import bisecting, codegen, symbolic
from irframework.decision import DEFAULTS, Candidate, Decision, Rejected
from irframework.errors import ArgumentError, DeviceMismatchError, PredicateGuardError
from irframework.notices import say_once
from irframework.predicates import answer_of
from irframework.priority import entries_for
from irframework.settings import effective

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.layers import CustomOp
    from irframework.op import IrOp

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_NOT_INVARIANT = "not declared batch invariant, and batch-invariant mode is on"


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
    """
    check_arguments(op, args)
    device = device_type_of(op, args)
    candidates: list[Candidate] = []
    chosen: IrOpImpl | None = None
    used_up: str | None = None  # from there on only native is left
    for entry in entries_for(op, device, mode):
        impl = op.registered[entry.provider]
        reason = why_never(impl, device) or why_not_now(impl, args)
        if reason is None and mode == "inductor" and entry.origin in DEFAULTS:
            reason = why_left_to_the_compiler(impl, args)
        accepted = reason is None
        if accepted and chosen is not None:
            candidates.append(Candidate(entry.provider, True, f"{chosen.provider} comes first", entry.origin))
            continue
        if accepted and impl.provider != "native":
            reason = used_up = used_up or bisecting.why_refused(op.name, impl.provider, mode)
        candidates.append(Candidate(entry.provider, accepted, reason, entry.origin))
        if reason is None:
            chosen = impl
            if stop_at_first:
                break
        elif stop_at_first and logger.isEnabledFor(logging.DEBUG):
            say_once(
                logging.DEBUG, (op.name, entry.provider, reason), "%s: not %s: %s", op.name, entry.provider, reason
            )
    impl = chosen or op.registered["native"]  # native ends every list
    if impl.provider == "native":
        _tell_what_invariance_costs(op, candidates)
    return Decision(op.name, impl, impl.provider, tuple(candidates))


def _tell_what_invariance_costs(op: "IrOp", candidates: list[Candidate]) -> None:
    passed_over = [candidate.provider for candidate in candidates if candidate.reason == _NOT_INVARIANT]
    if passed_over:
        say_once(
            logging.WARNING,
            (op.name, _NOT_INVARIANT),
            "Batch-invariant mode is on: op %s runs native, because %s does not declare to be batch invariant",
            op.name,
            ", ".join(passed_over),
        )


def explain(op: "IrOp | CustomOp | str", *args: Any, **kwargs: Any) -> Decision:
    """Return the decision for a call, with a reason for every candidate.

    Args:
        op: The op or its name, or a layer that dispatches through one.
        *args: The call's arguments.
        **kwargs: The call's keyword arguments.

    Raises:
        UnknownOpError: There is no op of that name.
        ArgumentError: `op` is neither an op nor a name.
        TypeError: The arguments do not fit the op's signature.
    """
    from irframework.registry import find_op

    found = find_op(op) if isinstance(op, str) else op
    if not callable(getattr(found, "explain", None)):
        raise ArgumentError(f"ir.explain expects an op, its name or a layer first, got {op!r:.60}.")
    return found.explain(*args, **kwargs)


def why_never(impl: "IrOpImpl", device: str) -> str | None:
    """Why an implementation cannot be chosen for any call on a device type now, or None."""
    reason = impl.support.reason(device)
    if reason is not None:
        return reason
    if impl.provider == "native":
        return None
    if device == "meta":
        return "meta tensors hold no data; native gives their shapes"
    if impl.device_types is not None and device not in impl.device_types:
        return f"runs on {', '.join(impl.device_types)}, the tensors are on {device}"
    if effective("batch_invariant") and not impl.batch_invariant:
        return _NOT_INVARIANT
    return None


def why_not_now(impl: "IrOpImpl", args: tuple[Any, ...]) -> str | None:
    """Why an implementation does not take a call, or None.

    Raises:
        PredicateGuardError: Its predicate looked at a symbolic size.
    """
    answer = _without_guards(impl, args, impl.accepts, "supports_args")
    return None if answer is True else answer.reason if isinstance(answer, Rejected) else "no"


def why_left_to_the_compiler(impl: "IrOpImpl", args: tuple[Any, ...]) -> str | None:
    """Why compiled code makes its own of a call that an implementation would take, or None: it is given to it.

    Raises:
        PredicateGuardError: `compiled_where` of the implementation looked at a symbolic size.
    """
    where = impl.compiled_where
    if where is None or effective("batch_invariant"):  # then one choice counts for every batch size
        return None
    option = "compiled_where"
    answer = _without_guards(impl, args, lambda args: answer_of(where, impl.op.named(args), option), option)
    return None if answer is None else answer.reason


def _without_guards(
    impl: "IrOpImpl", args: tuple[Any, ...], ask: Callable[[tuple[Any, ...]], _Answer], option: str
) -> _Answer:
    """Ask a predicate of an implementation, which must not look at symbolic sizes."""
    environment = symbolic.shape_env_of(args)
    guards = symbolic.guard_count(environment)
    try:
        answer = ask(args)
    except Exception as error:
        if symbolic.is_guard_error(error):
            raise PredicateGuardError(_guard_message(impl, option, str(error))) from error
        raise
    guard = symbolic.size_guard(environment, guards, args)
    if guard is not None:
        raise PredicateGuardError(_guard_message(impl, option, guard))
    return answer


def _guard_message(impl: "IrOpImpl", option: str, guard: str) -> str:
    return (
        f"The predicate {option} of {impl.described} looked at a size that is symbolic here and added the guard "
        f"{guard}; the choice would hold for some batch sizes only. A predicate may look at dtypes, ranks, strides, "
        "static sizes and numbers, not at the batch size. If the size never changes, say so with "
        "torch._dynamo.mark_static(tensor, dim), or compile without dynamic=True."
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
        if name in op.tensor_lists and not _is_list_of_tensors(value):
            raise ArgumentError(_wrong_type(op, name, "a list of tensors", value))
        number = codegen.number_type(parameter.annotation)
        may_be_none = value is None and parameter.annotation not in _TAKEN_AS
        if number is not None and not may_be_none and not isinstance(value, _TAKEN_AS[number]):
            raise ArgumentError(_wrong_type(op, name, _CALLED[number], value))


def _is_list_of_tensors(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(item is None or isinstance(item, Tensor) for item in value)


def tensors_of(op: "IrOp", args: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a call with its parameter's name; those in lists as `name[0]`, `name[1]`, ..."""
    for name, value in zip(op.signature.parameters, args, strict=True):
        if isinstance(value, Tensor):
            yield name, value
        elif name in op.tensor_lists:
            yield from ((f"{name}[{index}]", item) for index, item in enumerate(value) if item is not None)


_TAKEN_AS: dict[Any, tuple[type, ...]] = {  # as torch does for its own ops
    float: (numbers.Real, torch.SymInt, torch.SymFloat, torch.SymBool, Tensor),
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
    for name, value in tensors_of(op, args):
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
