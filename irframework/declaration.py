"""Declaring ops: `ir.register_op`.

Owns how a plain torch function becomes an op, and what happens when the same name is declared again. Does not own the
op itself: see `op.py`.
"""

import inspect
import keyword
from collections.abc import Callable, Iterable, Mapping
from typing import Any, overload

from irframework import dispatcher, torch_ops
from irframework import optional_outputs as optional
from irframework.conditions import Supports
from irframework.errors import ConditionError, DuplicateOpError, InvalidOpError, ReservedNameError, suggest
from irframework.impl import IrOpImpl, declared_again, place_of
from irframework.op import NATIVE, IrOp
from irframework.registry import registry

# torch.ops has the first two; the others are modules of irframework.ops.
_RESERVED_OPS = (
    "donate",
    "name",
    "layernorm",
    "activation",
    "rotary",
    "quantization",
    "fused_quantization",
    "fused_block_quantization",
    "kv_cache",
    "packed_sequences",
    "softmax_attention",
    "encoder_attention",
    "latent_attention",
    "fused_latent_attention",
    "block_quantization",
    "multimodal_rotary",
    "normed_rotary",
    "rotate_half",
    "gated_norm",
    "pointwise_activation",
    "convolution",
    "projection",
    "scaled_projection",
    "fused_projection",
    "collectives",
    "fused_collectives",
    "blocked_segments",
    "causal_convolution",
    "recurrence",
    "whole_operators",
    "mixture_of_experts",
    "state_slots",
    "state_space",
    "state_space_dual",
)


@overload
def register_op(fn: Callable[..., Any], /) -> IrOp: ...
@overload
def register_op(
    *,
    name: str | None = None,
    activations: Iterable[str] | None = None,
    allow_inplace: bool = False,
    fuse: bool | Supports = False,
    optional_outputs: Mapping[int, str] | None = None,
) -> Callable[[Callable[..., Any]], IrOp]: ...
def register_op(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    activations: Iterable[str] | None = None,
    allow_inplace: bool = False,
    fuse: bool | Supports = False,
    optional_outputs: Mapping[int, str] | None = None,
) -> IrOp | Callable[[Callable[..., Any]], IrOp]:
    """Declare an op by its plain torch function (a decorator, with or without arguments).

    The function is the op's meaning. It must be functional: its inputs are unchanged. Every parameter and the result
    carry type annotations that torch schemas know (`Tensor`, `Tensor | None`, `float`, `int | None`, `bool`, `str`,
    lists and tuples of tensors, ...).

    Args:
        fn: The function, when used without arguments.
        name: The op's name; default: the function's.
        activations: Parameters that `maybe_inplace` gives away; default: tensors whose name starts with `x`.
        allow_inplace: Give the op a `maybe_inplace` form, and let implementations overwrite the activations.
        fuse: True if compiled graphs that compute this function's body may be replaced by the op; `ir.supports(...)`
            also states which arguments the op's kernels may then be given.
        optional_outputs: Outputs that may be None, each with the parameter that decides: `{1: "key"}` says that output
            1 is None exactly when the argument `key` is. Such an output is annotated `Tensor | None`.

    Returns:
        The op.

    Raises:
        InvalidOpError: The name, the annotations or the activations do not make an op.
        DuplicateOpError: Another function was declared under this name.
        ReservedNameError: The name belongs to the framework.
    """

    def decorate(native: Callable[..., Any]) -> IrOp:
        if not callable(native):
            raise InvalidOpError(f"register_op expects a function, got {native!r:.60}. A name is given as name=...")
        called = getattr(native, "__name__", None) if name is None else name
        if not isinstance(called, str):
            raise InvalidOpError(
                f"register_op needs a name for {native!r:.60}: give one as name=..., got {called!r:.60}."
            )
        given = (activations,) if isinstance(activations, str) else activations
        _check_options(called, given, allow_inplace, fuse)
        return _declare(native, called, given, allow_inplace, fuse, optional_outputs)

    return decorate if fn is None else decorate(fn)


def _check_options(name: str, activations: object, allow_inplace: object, fuse: object) -> None:
    wrong = "activations must be parameter names" if not isinstance(activations, (Iterable, type(None))) else None
    wrong = "allow_inplace must be True or False" if not isinstance(allow_inplace, bool) else wrong
    wrong = "fuse must be True, False or ir.supports(...)" if not isinstance(fuse, (bool, Supports)) else wrong
    if wrong is not None:
        raise InvalidOpError(f"Op {name!r}: {wrong}.")


def _declare(
    native: Callable[..., Any],
    name: str,
    activations: Iterable[str] | None,
    allow_inplace: bool,
    fuse: bool | Supports,
    absent: object,
) -> IrOp:
    place = place_of(native)
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith("_"):
        raise InvalidOpError(f"{name!r} ({place}) cannot be an op's name: it must be a public Python identifier.")
    if name in _RESERVED_OPS:
        raise ReservedNameError(f"The op name {name!r} ({place}) belongs to the framework. Choose another one.")
    with registry.lock:
        earlier = registry.ops.get(name)
        if earlier is not None and not declared_again(earlier.native, native):
            who = f" by plugin {earlier.plugin}" if earlier.plugin else ""
            raise DuplicateOpError(
                f"Op {name!r} is already declared{who} at {earlier.source}, and again at {place}. "
                "Choose another name, or register an implementation of the existing op."
            )
        if inspect.iscoroutinefunction(native) or inspect.isgeneratorfunction(native):
            raise InvalidOpError(f"Op {name!r} ({place}): its function must return its result, not a coroutine.")
        signature, schema = torch_ops.schema_of(native, name, place)
        nothing = optional.check(f"Op {name!r} ({place})", absent, signature)
        tensors = torch_ops.tensor_parameters(signature)
        given = (
            tuple(n for n in tensors if n.startswith("x")) if activations is None else tuple(dict.fromkeys(activations))
        )
        for parameter in given:
            if parameter not in tensors:
                raise InvalidOpError(
                    f"Op {name!r} ({place}): the activation {parameter!r} is not a tensor parameter."
                    + suggest(parameter, tensors)
                )
        if allow_inplace and not given:
            raise InvalidOpError(
                f"Op {name!r} ({place}) has allow_inplace=True but no activation. Name one with activations=(...), or "
                "let a tensor parameter's name start with 'x'."
            )
        if isinstance(fuse, Supports):
            try:
                fuse.checks(signature, tensors)
            except ConditionError as error:
                raise ConditionError(f"Op {name!r} ({place}), fuse=...: {error}") from None
        if earlier is not None:
            return _redeclare(earlier, native, schema, given, allow_inplace, fuse, nothing, place)
        op: IrOp = dispatcher.class_of(IrOp)(name, native, signature, schema, given, allow_inplace, fuse, nothing)
        handle = torch_ops.define(op)
        registry.ops[name] = op
        if registry.transaction is not None:
            registry.transaction.ops.add(name)
        registry.record(lambda: _remove(name, handle))
        registry.changed()
        return op


def _redeclare(
    op: IrOp,
    native: Callable[..., Any],
    schema: str,
    activations: tuple[str, ...],
    allow_inplace: bool,
    fuse: bool | Supports,
    nothing: dict[int, str],
    place: str,
) -> IrOp:
    """A module was reloaded: keep the object that models hold, and give it the new body."""
    before = _as_declared(op.name, op.schema, op.activations, op.allow_inplace, op.optional_outputs)
    now = _as_declared(op.name, schema, activations, allow_inplace, nothing)
    if now != before:
        raise DuplicateOpError(
            f"Op {op.name!r} was declared again at {place} in another way.\n  before: {before} ({op.source})\n"
            f"  now:    {now}\nRestart Python to change an op's signature."
        )
    op.native = op.__wrapped__ = native
    op.__doc__ = native.__doc__
    op.fuse = fuse
    op.source = place
    op.registered[NATIVE] = IrOpImpl(op, NATIVE, native, plugin=op.plugin, source=place)
    registry.changed()
    return op


def _as_declared(name: str, schema: str, activations: object, allow_inplace: bool, nothing: dict[int, str]) -> str:
    absent = f", optional_outputs={nothing}" if nothing else ""
    return f"{name}{schema}, activations={activations}, allow_inplace={allow_inplace}{absent}"


def _remove(name: str, handle: torch_ops.Handle) -> None:
    registry.ops.pop(name, None)
    handle.destroy()
    registry.changed()
