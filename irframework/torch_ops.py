"""The torch operators behind the ops: `irframework::<name>`, its `maybe_inplace` overload, and what compiled graphs
call beside them: `irframework::donate` and `irframework_compiled::overwritten`.

Owns everything that is said to `torch.library`: schemas, kernels, shape functions, autograd. Both overloads have
functional schemas, so every pipeline that does not know them is still right. Does not decide which implementation
runs: the kernels ask `dispatch.py`.

Private torch API used here: `torch.library.Library._destroy`, `torch._guards.TracingContext` and `Tensor._is_view`
(read in 2.11 and 2.13); `torch._C.parse_schema`, and `_opname` and `_overloadname` of an `OpOverload` (read in 2.13).
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.library import Library, infer_schema

from irframework import autograd, optional_outputs
from irframework.errors import DuplicateOpError, InvalidOpError
from irframework.registry import registry
from irframework.untraced import run_untraced

if TYPE_CHECKING:
    from irframework.op import IrOp

NAMESPACE = "irframework"
MAYBE_INPLACE = "maybe_inplace"
_TAKEN = ("self", "torch", "tuple", "len", "str", "float", "int", "bool", "Exception")  # what generated code refers to


@dataclass(slots=True)
class Handle:
    """Keeps an op's torch registrations alive, and takes them back.

    Two overloads of one name stay: torch forgets only one of two equal signatures (its key leaves the overload's name
    out), and crashes at the next look-up of the name. They serve the op that is declared under the name next.
    """

    libraries: list[Library] = field(default_factory=list)
    schema: str = ""
    allow_inplace: bool = False

    def destroy(self) -> None:
        """Remove the operators from torch again, where torch can."""
        while self.libraries and not self.allow_inplace:
            self.libraries.pop()._destroy()


_handles: dict[str, Handle] = {}
_PARAMETER_ADVICE = (
    " Every parameter is annotated as a tensor, an optional tensor, a list of tensors, a number, a word, a dtype, a "
    "device, or a list of numbers."
)
_RESULT_ADVICE = (
    " An op returns a tensor, a tuple of tensors or a list of tensors, and always the same number; where one is None "
    "whenever an argument is, say so with optional_outputs=...; where anything else decides, declare two ops."
)


def schema_of(fn: Callable[..., Any], name: str, place: str) -> tuple[inspect.Signature, str]:
    """Return a declaring function's signature and torch schema.

    Raises:
        InvalidOpError: A parameter or the result has no annotation, or one that torch schemas do not know.
    """
    try:
        signature = inspect.signature(fn, eval_str=True)
    except Exception as error:
        raise InvalidOpError(f"Op {name!r} ({place}): its annotations cannot be read: {error}.") from error
    for parameter in signature.parameters.values():
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            raise InvalidOpError(f"Op {name!r} ({place}): *args and **kwargs have no place in a schema.")
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
            raise InvalidOpError(f"Op {name!r} ({place}): parameter {parameter.name!r} must not be positional-only.")
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "Tensor" in str(parameter.annotation):
            raise InvalidOpError(f"Op {name!r} ({place}): the tensor {parameter.name!r} must not be keyword-only.")
        if parameter.name in _TAKEN or parameter.name.startswith("_"):
            raise InvalidOpError(
                f"Op {name!r} ({place}): a parameter cannot be called {parameter.name!r}; generated code uses names "
                f"with a leading underscore and {', '.join(_TAKEN)}. Rename it."
            )

    def prototype() -> None:
        """Carries the resolved signature to `infer_schema`."""

    prototype.__signature__ = optional_outputs.as_torch_sees(signature)  # type: ignore[attr-defined]
    try:
        schema = infer_schema(prototype, mutates_args=())
    except ValueError as error:
        problem = str(error).partition(" The valid types are")[0].removeprefix("infer_schema(func): ")
        advice = _RESULT_ADVICE if "return" in problem.lower() else _PARAMETER_ADVICE
        raise InvalidOpError(f"Op {name!r} ({place}) has no torch schema: {problem}{advice}") from None
    try:
        results = [str(value.type) for value in torch._C.parse_schema(f"irframework::f{schema}").returns]
    except RuntimeError as error:  # a default that torch writes and cannot read, e.g. a word with quotes
        raise InvalidOpError(f"Op {name!r} ({place}): torch cannot read its schema {schema}: {error}") from None
    if not results or not all(kind in ("Tensor", "List[Tensor]") for kind in results):
        raise InvalidOpError(f"Op {name!r} ({place}) returns {', '.join(results) or 'nothing'}.{_RESULT_ADVICE}")
    return signature, schema


def tensor_parameters(signature: inspect.Signature) -> tuple[str, ...]:
    """Return the names of the parameters that are a tensor or an optional tensor."""
    return tuple(p.name for p in signature.parameters.values() if p.annotation in (Tensor, Tensor | None))


def tensor_list_parameters(signature: inspect.Signature) -> tuple[str, ...]:
    """Return the names of the parameters that are a list of tensors (torch knows no optional list)."""
    single = tensor_parameters(signature)
    return tuple(
        p.name for p in signature.parameters.values() if p.name not in single and "Tensor" in str(p.annotation)
    )


def count_outputs(schema: str) -> int:
    """Return how many values an op with this schema returns."""
    return len(torch._C.parse_schema(f"irframework::f{schema}").returns)


def define(op: "IrOp") -> Handle:
    """Create an op's torch operators; `op.torch_op` and `op.maybe_inplace.torch_op` are set.

    Returns:
        The handle that takes the operators back when a plugin is rolled back.
    """
    kept = _handles.get(op.name)
    if kept is not None and kept.libraries:
        return _serve_again(op, kept)
    library = Library(NAMESPACE, "FRAGMENT")
    handle = Handle([library], op.schema)
    try:
        define_donate()
        define_overwritten()
        tags = (torch.Tag.pt2_compliant_tag,)
        library.define(f"{op.name}{op.schema}", tags=tags)
        _define_overload(library, op, op.name)
        if op.allow_inplace:
            library.define(f"{op.name}.{MAYBE_INPLACE}{op.schema}", tags=tags)
            _define_overload(library, op, f"{op.name}.{MAYBE_INPLACE}")
        packet = getattr(getattr(torch.ops, NAMESPACE), op.name)
        op.torch_op = packet.default
        autograd.register(op, library)
        if op.allow_inplace:
            op.maybe_inplace.torch_op = getattr(packet, MAYBE_INPLACE)
            autograd.register_maybe_inplace(op, library)
    except BaseException:
        handle.destroy()
        raise
    handle.allow_inplace = op.allow_inplace
    _handles[op.name] = handle
    return handle


def _serve_again(op: "IrOp", kept: Handle) -> Handle:
    """Give an op the operators of an earlier one, which was taken back and which torch could not forget."""
    if (kept.schema, kept.allow_inplace) != (op.schema, op.allow_inplace):
        raise DuplicateOpError(
            f"Op {op.name!r} ({op.source}): a plugin that failed had declared it with another signature, which torch "
            f"cannot forget.\n  before: {op.name}{kept.schema}, allow_inplace={kept.allow_inplace}\n"
            f"  now:    {op.name}{op.schema}, allow_inplace={op.allow_inplace}\nRepair or disable that plugin."
        )
    packet = getattr(getattr(torch.ops, NAMESPACE), op.name)
    op.torch_op, op.maybe_inplace.torch_op = packet.default, getattr(packet, MAYBE_INPLACE)
    return kept


def _define_overload(library: Library, op: "IrOp", qualified: str) -> None:
    """Give an overload its kernel and its shape function; `maybe_inplace` overwrites nothing either.

    Its schema is functional, so a pipeline without our passes may merge two donated copies, or keep a donated value for
    the backward. Only an eager call, which does not come here, and our passes reuse memory.
    """
    from irframework.execution import run

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return _no_views(run(registry.current(op), op.bind(args, kwargs)))

    def fake(*args: Any, **kwargs: Any) -> Any:
        _notify_compiler(registry.current(op))
        return shape(registry.current(op), op.bind(args, kwargs))

    library.impl(qualified, run_untraced(kernel), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{qualified}", run_untraced(fake), lib=library)


def _no_views(outputs: Any) -> Any:
    """Return outputs that autograd does not take for views of something else: those may not be written to."""
    if isinstance(outputs, Tensor):
        return outputs.data if outputs._is_view() else outputs
    return type(outputs)(map(_no_views, outputs))


def shape(op: "IrOp", args: tuple[Any, ...]) -> Any:
    """Return fake outputs of an op: those of native, contiguous and of their own. Never depends on a provider."""
    from irframework.execution import own_outputs

    outputs = own_outputs(op, (op.fake or op.registered["native"]).apply(args), args)
    if isinstance(outputs, Tensor):
        return _from_the_start(outputs)
    return type(outputs)(map(_from_the_start, outputs))


def _from_the_start(output: Tensor) -> Tensor:
    """What follows in a graph may count from an output's offset: it must not be an accident of native's."""
    offset = output.storage_offset()
    return output if isinstance(offset, int) and offset == 0 else output.clone()


def _notify_compiler(op: "IrOp") -> None:
    """Tell the compiler that an op is being traced, so that its guards and passes are in place.

    It is imported from below, here only: a program that never compiles must not import Inductor.
    """
    if torch._guards.TracingContext.try_get() is None:
        return
    from irframework.compiler.guards import on_traced

    on_traced(op)


def define_donate() -> Any:
    """Define `irframework::donate(Tensor x) -> Tensor` once and return it: a copy of x, which is dead afterwards."""
    if "donate" not in _handles:
        library = Library(NAMESPACE, "FRAGMENT")
        library.define("donate(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

        def donate(x: Tensor) -> Tensor:
            return x.clone()

        library.impl("donate", donate, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::donate", donate, lib=library)

        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient

        torch.library.register_autograd(f"{NAMESPACE}::donate", backward, lib=library)
        _handles["donate"] = Handle([library])
    return torch.ops.irframework.donate.default


def define_overwritten() -> Any:
    """Define `irframework_compiled::overwritten(Tensor(a!)[] xs) -> ()` once and return it.

    A compiled graph calls it on inputs that its kernels overwrite, and autograd learns of it. It is no IR op: nothing
    lowers it.
    """
    if "overwritten" not in _handles:
        from irframework.execution import note_written

        library = Library("irframework_compiled", "DEF")
        library.define("overwritten(Tensor(a!)[] xs) -> ()", tags=(torch.Tag.pt2_compliant_tag,))
        library.impl("overwritten", lambda xs: note_written(*xs), "CompositeExplicitAutograd")
        torch.library.register_fake("irframework_compiled::overwritten", lambda xs: None, lib=library)
        _handles["overwritten"] = Handle([library])
    return torch.ops.irframework_compiled.overwritten.default


def op_of(target: Any) -> "tuple[IrOp, bool] | None":
    """Return the op behind a torch overload, and whether it is the `maybe_inplace` one; None for other targets."""
    if getattr(target, "namespace", None) != NAMESPACE:
        return None
    op = registry.ops.get(target._opname)
    return None if op is None else (op, target._overloadname == MAYBE_INPLACE)
