"""Outputs that may be nothing: an op says `optional_outputs={1: "key"}`, and output 1 is None whenever `key` is.

Owns that rule: what a declaration may say, and the empty tensor `[0]` that stands for None wherever torch must see a
tensor, in the torch operators and in compiled graphs. Whoever calls an op sees None; an implementation may return
either.
"""

import inspect
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from irframework.errors import InvalidOpError, suggest

if TYPE_CHECKING:
    from irframework.op import IrOp


def check(where: str, given: object, signature: inspect.Signature) -> dict[int, str]:
    """Return what a declaration says, if its signature agrees.

    Args:
        where: The op and its place, for messages.
        given: What was passed as `optional_outputs`: a mapping of output numbers to parameters, or None.
        signature: The declaring function's.

    Raises:
        InvalidOpError: It is no such mapping; the parameter is no optional tensor; the result's annotation says
            otherwise.
    """
    said = {} if given is None else given
    if not isinstance(said, Mapping) or not all(type(i) is int and isinstance(n, str) for i, n in said.items()):
        raise InvalidOpError(
            f'{where}: optional_outputs must map outputs to parameters, as {{1: "key"}}; got {said!r}.'
        )
    outputs = typing.get_args(signature.return_annotation) if _is_tuple(signature.return_annotation) else ()
    annotated = {index for index, kind in enumerate(outputs) if kind == Tensor | None}
    for index, parameter in said.items():
        optional = [name for name, p in signature.parameters.items() if p.annotation == Tensor | None]
        if parameter not in optional:
            raise InvalidOpError(
                f"{where}: optional_outputs names {parameter!r}, which is no parameter annotated `Tensor | None`."
                + suggest(parameter, optional)
            )
        if index not in annotated:
            raise InvalidOpError(
                f"{where}: optional_outputs says that output {index} may be None, but the result is annotated "
                f"{signature.return_annotation!r}. Annotate it `tuple[Tensor, Tensor | None]`, or the like."
            )
    if annotated - set(said):
        raise InvalidOpError(
            f"{where}: output {min(annotated - set(said))} is annotated `Tensor | None`. Say when it is None: with "
            f'optional_outputs={{{min(annotated - set(said))}: "parameter"}}, whenever that parameter is. An output '
            "that depends on anything else makes two ops."
        )
    if outputs and len(said) == len(outputs):
        raise InvalidOpError(f"{where}: at least one output must always be a tensor.")
    return dict(said)


def as_torch_sees(signature: inspect.Signature) -> inspect.Signature:
    """Return the signature with tensors as outputs: torch schemas know no optional ones."""
    if not _is_tuple(signature.return_annotation):
        return signature
    kinds = [Tensor if kind == Tensor | None else kind for kind in typing.get_args(signature.return_annotation)]
    return signature.replace(return_annotation=tuple[tuple(kinds)])  # type: ignore[misc]


def _is_tuple(annotation: object) -> bool:
    return typing.get_origin(annotation) is tuple


def filled(op: "IrOp", outputs: Any, args: tuple[Any, ...]) -> Any:
    """Put an empty tensor for each output that is nothing in this call, whatever the implementation put there."""
    absent = _absent(op, args)
    if not absent or not isinstance(outputs, (tuple, list)):
        return outputs
    values = op.named(args)
    like = next(values[name] for name in (*op.activations, *op.tensors) if values[name] is not None)
    return tuple(like.new_empty(0) if index in absent else output for index, output in enumerate(outputs))


def presented(op: "IrOp", outputs: Any, args: tuple[Any, ...]) -> Any:
    """Put None for each output that is nothing in this call: what a caller of the op sees."""
    absent = _absent(op, args)
    if not absent:
        return outputs
    return tuple(None if index in absent else outputs[index] for index in range(op.num_outputs))


def _absent(op: "IrOp", args: tuple[Any, ...]) -> set[int]:
    if not op.optional_outputs:
        return set()
    values = op.named(args)
    return {index for index, parameter in op.optional_outputs.items() if values[parameter] is None}
