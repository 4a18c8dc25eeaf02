"""What the Python frame around a graph still holds when the graph ends.

Owns the look into Dynamo's frame. A value that was a graph input is handed on by Dynamo itself, past the graph: to the
caller (`return op.maybe_inplace(x, ..), x`), or to the code behind a graph break. So the graph does not show it. Does
not decide what may be overwritten: `functionalize.py` does.

Not seen: what is reachable through an object's attributes, a closure's cells, or the caller's own variables.

Private torch API, read in 2.11 and 2.13: `_dynamo.symbolic_convert.InstructionTranslator` (`current_tx`, `stack`,
`symbolic_locals`, `f_code`, `lineno`), `OutputGraph.compile_subgraph_reason`, `VariableTracker.visit`,
`LazyVariableTracker.is_realized` and `.peek_value`, `TensorVariable.proxy`, `grapharg` on placeholders, and
`torch._guards.TracingContext`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import TracingContext
from torch.fx import Node

from irframework.call_site import line_text
from irframework.compiler.overlap import disjoint_in_example, on_one_storage


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame whose graph is being compiled.

    Attributes:
        returns: Whether the graph ends with the frame; else there is a graph break.
        place: `FILE:LINE, in NAME: CODE` of the return or of the break.
        tensors: What the frame holds behind its graph: fake tensors, and real ones that the graph has not met.
    """

    returns: bool
    place: str
    tensors: tuple[torch.Tensor, ...]

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
        except AttributeError:
            return None
        return cls(returns, line_text(frame.f_code, frame.lineno), tuple(_tensors(held)))

    def holds(self, donated: object, placeholder: Node) -> bool:
        """Whether a tensor that shares memory with the donated one is still held.

        Args:
            donated: The fake value that is given away.
            placeholder: The graph input that it is, or is a view of.
        """
        argument = placeholder.meta.get("grapharg")
        real = None if argument is None else argument.example
        return any(
            (on_one_storage(tensor, donated) and not disjoint_in_example(tensor, donated))
            or on_one_storage(tensor, real)
            for tensor in self.tensors
        )


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
