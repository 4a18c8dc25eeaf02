"""What the Python frame around a graph still holds when the graph ends.

Owns the look into Dynamo's frame, and which of its arguments share memory. A value that was a graph input is handed on
by Dynamo itself, past the graph: to the caller (`return op.maybe_inplace(x, ..), x`), or to the code behind a graph
break. So the graph does not show it. Does not decide what may be overwritten: `functionalize.py` does.

Not seen: what is reachable through an object's attributes, or the caller's own variables.

Private torch API, read in 2.11 and 2.13: `_dynamo.symbolic_convert.InstructionTranslator` (`current_tx`, `stack`,
`symbolic_locals`, `f_code`, `f_locals`, `lineno`), `OutputGraph.compile_subgraph_reason` and `.root_tx`, `base` and
`local_name` of a source, `VariableTracker.visit`, `LazyVariableTracker.is_realized` and `.peek_value`,
`TensorVariable.proxy`, `grapharg` on placeholders, and `torch._guards.TracingContext`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import Node

from irframework.call_site import line_text
from irframework.compiler.overlap import disjoint_in_example, on_one_storage
from irframework.execution import shares_storage


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame whose graph is being compiled.

    Attributes:
        returns: Whether the graph ends with the frame; else there is a graph break.
        place: `FILE:LINE, in NAME: CODE` of the return or of the break.
        tensors: What the frame holds behind its graph: fake tensors, and real ones that the graph has not met.
        arguments: What the frame was entered with, by name; the graph has those only that it uses.
    """

    returns: bool
    place: str
    tensors: tuple[torch.Tensor, ...]
    arguments: Mapping[str, object]

    @classmethod
    def current(cls) -> Frame | None:
        """The frame that Dynamo compiles now; None outside Dynamo."""
        from torch._dynamo.symbolic_convert import InstructionTranslator

        if TracingContext.try_get() is None:
            return None
        try:
            frame: Any = InstructionTranslator.current_tx()
            returns = not frame.output.compile_subgraph_reason.graph_break
            # What lies below a returned value on the stack (an iterator, a context manager) goes with the frame.
            held = frame.stack[-1:] if returns else [*frame.stack, *frame.symbolic_locals.values()]
            arguments = frame.output.root_tx.f_locals
        except AttributeError:
            return None
        return cls(returns, line_text(frame.f_code, frame.lineno), tuple(_tensors(held)), arguments)

    def holds(self, donated: object, placeholder: Node) -> bool:
        """Whether a tensor that shares memory with the donated one is still held.

        Args:
            donated: The fake value that is given away.
            placeholder: The graph input that it is, or is a view of.
        """
        real = real_input(placeholder)
        return any(
            (on_one_storage(tensor, donated) and not disjoint_in_example(tensor, donated))
            or on_one_storage(tensor, real)
            for tensor in self.tensors
        )

    def argument_sharing(self, placeholder: Node) -> str | None:
        """The name of another argument that shares memory with a graph input; None if there is none."""
        real, source = real_input(placeholder), getattr(placeholder, "_dynamo_source", None)
        if real is None or source is None:
            return None
        return sharing_argument(real, root_of(source), self.arguments)


def real_input(placeholder: Node) -> torch.Tensor | None:
    """The tensor that a graph input stands for in the call that is compiled; None if Dynamo does not say."""
    argument = placeholder.meta.get("grapharg")
    example = None if argument is None else argument.example
    return example if isinstance(example, torch.Tensor) else None


def root_of(source: Any) -> str | None:
    """The argument that a Dynamo source starts from; None if it starts elsewhere, e.g. at a global."""
    while hasattr(source, "base"):
        source = source.base
    name = getattr(source, "local_name", None)
    return name if isinstance(name, str) else None


def sharing_argument(given: torch.Tensor, own: str | None, arguments: Mapping[str, object]) -> str | None:
    """The name of the first argument of a frame that shares memory with a tensor; None if there is none.

    Args:
        given: The tensor.
        own: The argument that it is, or that it lies in, so that meeting it there says nothing.
        arguments: The frame's arguments by name. In lists, tuples and dictionaries, two levels are looked at.
    """
    for name, value in arguments.items():
        for tensor in _tensors_in(value, 2):
            if shares_storage(tensor, given) and not (name == own and tensor is given):
                return name
    return None


def _tensors_in(value: object, levels: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif levels > 0 and isinstance(value, (list, tuple, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_in(item, levels - 1)


def _tensors(held: list[Any]) -> Iterator[torch.Tensor]:
    from torch._dynamo.variables import LazyVariableTracker, TensorVariable
    from torch._dynamo.variables.base import VariableTracker

    found: list[Any] = []
    VariableTracker.visit(found.append, list(held))
    for each in found:
        value = None
        if isinstance(each, LazyVariableTracker):
            value = None if each.is_realized() else each.peek_value()
        elif isinstance(each, TensorVariable):
            value = each.proxy.node.meta.get("example_value")
        if isinstance(value, torch.Tensor):
            yield value
