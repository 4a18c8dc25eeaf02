"""Gradients of ops.

Owns the backward of every op: the vjp of native, recomputed from the saved inputs, or the registered one. A call that
needs gradients never overwrites its inputs. Does not run forwards.

Private torch API used here (read in 2.11 and 2.13): `torch._C._after_autograd_keyset`, for redispatch below autograd;
`torch._library.autograd.make_autograd_impl` and `Info`, from which `torch.library.register_autograd` makes its kernel.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch.library import Library

from irframework import autocast
from irframework.errors import ImplementationContractError
from irframework.registry import registry
from irframework.untraced import run_untraced

if TYPE_CHECKING:
    from irframework.op import IrOp


def register(op: "IrOp", library: Library) -> None:
    """Make the op's default overload differentiable."""

    def setup_context(
        ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: dict[str, Any] | None = None
    ) -> None:
        flat: list[Tensor] = []
        layout: list[Any] = []
        values = _with_own_defaults(op, inputs)
        for value in values:
            if isinstance(value, Tensor):
                layout.append(len(flat))
                flat.append(value)
            elif isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
                layout.append(range(len(flat), len(flat) + len(value)))
                flat.extend(value)
            else:
                layout.append(None)
        ctx.save_for_backward(*flat)
        ctx.set_materialize_grads(False)  # an output that nobody used adds nothing, not zero times its derivative
        ctx.outputs = [_description(item) for item in (output if isinstance(output, tuple) else (output,))]
        ctx.layout = layout
        ctx.constants = [value if place is None else None for place, value in zip(layout, values, strict=True)]
        ctx.keyword_only = tuple((keyword_only_inputs or {}).values())  # never tensors: torch allows none there

    @run_untraced
    def backward(ctx: Any, *grads: Any) -> Any:
        with autocast.disabled():
            return differentiate(ctx, grads)

    def differentiate(ctx: Any, grads: tuple[Any, ...]) -> Any:
        saved = list(ctx.saved_tensors)
        wanted = _wanted(ctx)
        current = registry.current(op)
        if current.backward is not None:
            return _spread(ctx, _registered(current, _filled(ctx, grads), _rebuild(ctx, saved)), registered=True)
        gradients = vjp_of_native(current, ctx, saved, grads, wanted)
        return _spread(ctx, gradients, registered=False)

    recorded = make_autograd_impl(op.torch_op, Info(backward, setup_context))

    def autograd_kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        from irframework.execution import natively, transformed

        if transformed():
            return natively(registry.current(op), op.bind(args, kwargs))
        return recorded(keyset, *args, **kwargs)

    library.impl(op.name, run_untraced(autograd_kernel), "Autograd", with_keyset=True)


def register_maybe_inplace(op: "IrOp", library: Library) -> None:
    """Send a `maybe_inplace` call that needs gradients to the default overload: it overwrites nothing."""
    overload = op.maybe_inplace.torch_op
    default = op.torch_op
    keyword_only = [p.name for p in op.signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    positional = len(op.signature.parameters) - len(keyword_only)

    def autograd_kernel(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        from irframework.execution import transformed

        values = op.bind(args, kwargs)
        if transformed() or (torch.is_grad_enabled() and any(_needs_grad(value) for value in values)):
            return default(*values[:positional], **dict(zip(keyword_only, values[positional:], strict=True)))
        return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args, **kwargs)

    library.impl(f"{op.name}.maybe_inplace", run_untraced(autograd_kernel), "Autograd", with_keyset=True)


def _with_own_defaults(op: "IrOp", inputs: tuple[Any, ...]) -> list[Any]:
    """Torch fills a default in from the schema, where a dtype is a number: take the op's own."""
    parameters = op.signature.parameters.values()
    return [
        parameter.default if type(value) is int and isinstance(parameter.default, torch.dtype) else value
        for parameter, value in zip(parameters, inputs, strict=False)
    ]


def _needs_grad(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.requires_grad
    return isinstance(value, (list, tuple)) and any(_needs_grad(item) for item in value)


def _description(output: Tensor | list[Tensor]) -> Any:
    """What zeros like an output are made of."""
    if isinstance(output, list):
        return [_description(item) for item in output]
    return {"size": output.shape, "dtype": output.dtype, "device": output.device}


def _filled(ctx: Any, grads: tuple[Any, ...]) -> tuple[Any, ...]:
    """Gradients for a registered backward: zeros where an output was not used."""

    def fill(gradient: Any, output: Any) -> Any:
        if isinstance(output, list):
            return [fill(*pair) for pair in zip(gradient or [None] * len(output), output, strict=True)]
        return torch.zeros(**output) if gradient is None else gradient

    return tuple(fill(*pair) for pair in zip(grads, ctx.outputs, strict=True))


def _wanted(ctx: Any) -> list[bool]:
    """Which of the saved tensors need a gradient, in their order."""
    wanted: list[bool] = []
    # The dispatcher strips trailing arguments that equal their defaults, so there may be fewer `needs` than parameters.
    for place, needs in zip(ctx.layout, ctx.needs_input_grad, strict=False):
        if isinstance(place, range):
            wanted.extend([needs] * len(place) if isinstance(needs, bool) else list(needs))
        elif place is not None:
            wanted.append(bool(needs))
    return wanted


def _rebuild(ctx: Any, tensors: list[Any]) -> list[Any]:
    args: list[Any] = []
    for place, constant in zip(ctx.layout, ctx.constants, strict=True):
        if isinstance(place, range):
            args.append([tensors[i] for i in place])
        else:
            args.append(constant if place is None else tensors[place])
    return [*args, *ctx.keyword_only]


def _registered(op: "IrOp", grads: tuple[Any, ...], args: list[Any]) -> list[Any]:
    """Call the registered backward and check that it gives one gradient, or None, per tensor parameter."""
    found = op.backward(grads, *args) if op.backward is not None else ()
    gradients = [found] if isinstance(found, Tensor) else list(found) if isinstance(found, (tuple, list)) else None
    wanted = [p for p in op.signature.parameters.values() if "Tensor" in str(p.annotation)]
    if gradients is None or len(gradients) != len(wanted):
        returned = f"{len(gradients)} gradients" if gradients is not None else f"a {type(found).__name__}"
        raise ImplementationContractError(
            f"The registered backward of op {op.name!r} returned {returned}; it must return a tuple with one (or None) "
            f"for each of {', '.join(p.name for p in wanted)}."
        )
    for parameter, gradient in zip(wanted, gradients, strict=True):
        if not isinstance(gradient, (Tensor, list, tuple, type(None))):
            raise ImplementationContractError(
                f"The registered backward of op {op.name!r} returned a {type(gradient).__name__} for {parameter.name}; "
                "it must return a tensor or None."
            )
    return gradients


def _spread(ctx: Any, gradients: list[Any], registered: bool) -> Any:
    """Put gradients of the tensors at the places of the op's parameters; the others get None."""
    result: list[Any] = []
    rest = iter(gradients)
    for place in ctx.layout:
        if place is None:
            result.append(None)
        elif isinstance(place, range):
            result.append(next(rest) if registered else [next(rest) for _ in place])
        else:
            result.append(next(rest))
    return result[0] if len(result) == 1 else tuple(result)


def vjp_of_native(op: "IrOp", ctx: Any, saved: list[Tensor], grads: tuple[Any, ...], wanted: list[bool]) -> list[Any]:
    """Run native again on the saved inputs and pull the gradients back through it.

    Each input becomes a tensor of its own first, so that one input computed from another is not counted twice. When
    the gradients are themselves differentiated, the inputs stay connected to their history.
    """
    second_order = torch.is_grad_enabled()
    with torch.enable_grad():
        own = [
            tensor.view_as(tensor) if second_order and tensor.requires_grad else tensor.detach().requires_grad_(need)
            for tensor, need in zip(saved, wanted, strict=True)
        ]
        outputs = op.registered["native"].apply(tuple(_rebuild(ctx, own)))
    flat = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    flat_grads = [item for grad in grads for item in (grad if isinstance(grad, (list, tuple)) else (grad,))]
    pairs = [(o, g) for o, g in zip(flat, flat_grads, strict=True) if g is not None and o.requires_grad]
    targets = [tensor for tensor, need in zip(own, wanted, strict=True) if need]
    if not pairs or not targets:
        return [None] * len(saved)
    found = torch.autograd.grad(
        [o for o, _ in pairs], targets, [g for _, g in pairs], create_graph=second_order, allow_unused=True
    )
    rest = iter(found)
    return [next(rest) if need else None for need in wanted]
