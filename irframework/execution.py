"""Running a call once it is decided, and holding its outputs to what the op promises.

Owns the ways into an implementation (from a generated dispatcher, from the torch op, by hand) and the repair of
outputs. Does not decide: see `dispatch.py`.

Private torch API used here (read in 2.11 and 2.13): `torch._C._is_alias_of`, `torch._C._increment_version`,
`torch._C._len_torch_dispatch_stack`, `torch._C._functorch.peek_interpreter_stack`,
`torch.overrides._get_current_function_mode_stack`, `torch.autograd.forward_ad._current_level` and `Tensor._base`.
"""

import logging
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from irframework import autocast, bisecting, dispatcher, symbolic
from irframework.dispatch import check_arguments, device_type_of, resolve, tensors_of, why_never
from irframework.errors import ImplementationContractError, IrError
from irframework.notices import say_once
from irframework.optional_outputs import presented
from irframework.priority import current_context, entries_for
from irframework.registry import load_plugins, registry
from irframework.settings import settings
from irframework.torch_ops import shape

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp

shares_storage: Any = torch._C._is_alias_of  # type: ignore[attr-defined]
increment_version: Any = torch._C._increment_version  # does nothing to inference tensors
_SWAP_AFTER = 16
_MAX_CONTEXTS = 64


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
        dispatcher.put_in_place(form, function)
    return function(form, **op.named(args))


def _generate(op: "IrOp", donated: bool, context: Any) -> None:
    from irframework.platform import current_platform

    # what is chosen now may not last, or each call must be looked at
    if not load_plugins() or bisecting.active() or settings().check_donation:
        return
    generation = registry.generation
    devices = list(dict.fromkeys((*current_platform().device_types, "cpu")))
    branches = [(device, _possible(op, device)) for device in devices]
    with registry.lock:
        if registry.generation != generation:  # something was registered meanwhile; the next call tries again
            return
        form = op.maybe_inplace if donated else op
        if len(form.generated) >= _MAX_CONTEXTS:
            form.generated.clear()
        dispatcher.generate(op, donated, context, branches)


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
    return presented(op, _unusual(op, donated, args), args)


def _unusual(op: "IrOp", donated: bool, args: tuple[Any, ...]) -> Any:
    form = op.maybe_inplace if donated else op
    if torch.overrides.has_torch_function(args):  # a subclass, or a proxy of torch.fx, which is no tensor
        return form.torch_op(**op.named(args))
    if autocast.is_active():
        with autocast.off():  # then the plain path may be right
            return form(**op.named(args))
    check_arguments(op, args)
    if transformed():
        return natively(op, args)
    if settings().check_donation:
        from irframework import donation

        return donation.checked(op, donated, args, lambda: _seen_or_run(op, donated, args))
    return _seen_or_run(op, donated, args)


def _seen_or_run(op: "IrOp", donated: bool, args: tuple[Any, ...]) -> Any:
    if _must_be_seen(args):
        form = op.maybe_inplace if donated else op
        return form.torch_op(**op.named(args))
    return run(op, args, donated)


def natively(op: "IrOp", args: tuple[Any, ...]) -> Any:
    """Run native, so that whatever looks on sees its torch ops."""
    return own_outputs(op, op.registered["native"].apply(args), args)


def transformed() -> bool:
    """Whether a torch.func transform or forward-mode differentiation is active: only native's own torch ops know those.

    A torch op with a registered backward refuses torch.func, and drops a forward-mode derivative without a word.
    """
    forward: int = torch.autograd.forward_ad._current_level
    return forward >= 0 or torch._C._functorch.peek_interpreter_stack() is not None


def _must_be_seen(args: tuple[Any, ...]) -> bool:
    if torch._C._len_torch_dispatch_stack() or torch.overrides._get_current_function_mode_stack():
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
    if not bisecting.takes_number(impl):
        impl = resolve(op, args).impl
    if not impl.checks_values or settings().check_values:
        check_values(op, args)
    return run_impl(impl, args, donated)


def check_values(op: "IrOp", args: tuple[Any, ...]) -> None:
    """Run the op's value check, if it has one, where looking at values waits for no device or was asked for.

    Raises:
        ArgumentError: A value is wrong.
    """
    if op.value_check is not None and (settings().check_values or device_type_of(op, args) == "cpu"):
        op.value_check(**op.named(args))


def run_impl(impl: "IrOpImpl", args: tuple[Any, ...], donated: bool = False) -> Any:
    """Run one implementation and hold it to what the op promises."""
    op = impl.op
    overwritten: list[Tensor] = []
    if impl.functional is not None and not (donated and _all_may_be_overwritten(op, args)):
        impl = impl.functional
    if impl.inplace:
        values = op.named(args)
        for name in op.activations:
            value = values[name]
            if not isinstance(value, Tensor):
                continue
            if donated and _may_be_overwritten(op, name, values):
                overwritten.append(value)
            else:
                values[name] = value.detach().clone(memory_format=torch.contiguous_format)
        args = tuple(values.values())
    try:
        result = impl.apply(args)
    except RecursionError as error:
        raise ImplementationContractError(
            f"The {impl.described} calls itself without end. Where it means the op's own function, it must call "
            f"ir.ops.{op.name}.native."
        ) from error
    except Exception as error:
        refused(op, args, error)
        raise
    if overwritten:
        note_written(*overwritten)
    # What was not given away was copied: either way the outputs may take over the activations' memory.
    outputs = own_outputs(op, result, args, impl, op.activations if impl.inplace else ())
    if not impl.proven:
        _check_first(impl, outputs, args)
        impl.proven = True
        op.reset_dispatch()
    return outputs


def _all_may_be_overwritten(op: "IrOp", args: tuple[Any, ...]) -> bool:
    values = op.named(args)
    return all(_may_be_overwritten(op, name, values) for name in op.activations if isinstance(values[name], Tensor))


def _may_be_overwritten(op: "IrOp", name: str, values: dict[str, Any]) -> bool:
    value = values[name]
    if of_a_parameter(value) or not value.is_contiguous() or value.requires_grad:
        return False
    if value.is_inference() and not torch.is_inference_mode_enabled():  # torch lets nobody write to it here
        return False
    everything = tensors_of(op, tuple(values.values()))
    return not any(other_name != name and shares_storage(value, other) for other_name, other in everything)


def of_a_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a parameter or a view of one: no call overwrites it, even if it is frozen."""
    return isinstance(tensor, Parameter) or isinstance(tensor._base, Parameter)


def note_written(*tensors: Tensor | None) -> None:
    """Tell autograd that tensors were overwritten: an older graph that saved one must fail, not be wrong.

    A kernel that torch knows as an operator of C++ does not say so by itself.
    """
    increment_version([tensor for tensor in tensors if tensor is not None])


def refused(op: "IrOp", args: tuple[Any, ...], error: Exception) -> None:
    """A kernel refused a call: where native refuses the same arguments, raise what native says instead.

    Raises:
        IrError: What is wrong with the arguments.
    """
    if isinstance(error, IrError):
        return
    try:
        _shape_of_outputs(op, args)
        check_values(op, args)
    except IrError as known:
        raise known from error
    except Exception:  # native has no better word for it
        return


def _shape_of_outputs(op: "IrOp", args: tuple[Any, ...]) -> list[Tensor]:
    """Return outputs without data, as native makes them from arguments without data."""
    with torch._C.DisableTorchFunction():
        outputs = shape(op, tuple(_without_data(value) for value in args))
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def _without_data(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_without_data(item) for item in value]
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _check_first(impl: "IrOpImpl", outputs: Any, args: tuple[Any, ...]) -> None:
    """Hold the outputs of an implementation's first call to the shapes, dtypes and device that native's have.

    Torch's meta kernels load its tracer, which takes a second. A process that has not loaded it is not made to for
    this: compiled calls and the tests of a provider ask the same question.

    Raises:
        ImplementationContractError: One differs. Compiled calls are held to the same.
    """
    if impl.provider == "native" or "torch._dynamo" not in sys.modules:
        return
    try:
        expected = _shape_of_outputs(impl.op, args)
    except Exception:  # native needs values, or an implementation takes more than native does
        return
    device = next((tensor.device for _, tensor in tensors_of(impl.op, args) if tensor.dim() > 0), None)
    found = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    if len(found) != len(expected):
        raise ImplementationContractError(_contract(impl.op, impl, f"returned {len(found)} outputs"))
    for index, (output, right) in enumerate(zip(found, expected, strict=True)):
        place = device if right.device.type == "meta" else right.device
        if (output.shape, output.dtype) != (right.shape, right.dtype) or place not in (None, output.device):
            raise ImplementationContractError(
                _contract(
                    impl.op,
                    impl,
                    f"returned {output.dtype}{list(output.shape)} on {output.device} as output {index}, where the op "
                    f"promises {right.dtype}{list(right.shape)} on {place or output.device}",
                )
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
    taken = [value for name, value in tensors_of(op, args) if name not in given]
    owned: list[Tensor] = []
    for index, output in enumerate(flat):
        if any(output is other or shares_storage(output, other) for other in (*taken, *owned)):
            if impl is not None:
                impl.shares = True
            _repaired(op, impl, index, "shares memory with an input or another output")
            output = output.clone(memory_format=torch.contiguous_format)
        elif not symbolic.is_contiguous(output):
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
