"""What a function over fake tensors calls, written down while it runs once: a trace for bodies that write to nothing.

Owns the recorder of definitions, of which a compile needs dozens and of which nothing is run: it is ten times as quick
as `tracing.py`, and follows less. Where a body writes, closes over tensors or depends on data it says so, and the full
trace has the word. Does not keep what it finds (`definitions.py`).

Private torch APIs, read in 2.11 and 2.13: `TorchDispatchMode`, `enable_python_dispatcher`,
`autograd_would_have_decomposed`, `_inductor.decomposition.select_decomp_table`, `OpOverload.decompose`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed

from irframework.compiler.tracing import Place, argument_at, places_of

_SIZES = {
    torch.ops.aten.size.default, torch.ops.aten.stride.default, torch.ops.aten.storage_offset.default,
    torch.ops.aten.sym_size.default, torch.ops.aten.sym_stride.default, torch.ops.aten.sym_storage_offset.default,
    torch.ops.aten.sym_numel.default, torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int,
    torch.ops.aten.is_contiguous.default, torch.ops.aten.is_contiguous.memory_format, torch.ops.prim.device.default,
    torch.ops.prim.layout.default,
}  # fmt: skip


class BeyondError(Exception):
    """A function does what only a full trace can follow."""


def recorded(
    function: Callable[..., Any], arguments: Sequence[Any], mode: FakeTensorMode
) -> tuple[Graph, tuple[Place, ...], bool]:
    """Run `function` over fake tensors once, and write down what it calls, with Inductor's decompositions.

    Args:
        function: Takes `arguments` by position; returns a tensor or a flat tuple of tensors.
        arguments: Fake tensors of `mode`, symbolic numbers, constants, and lists of these.
        mode: Their fake mode.

    Returns:
        The graph, which returns a tuple, and in which symbolic numbers are nodes of their own; which arguments its
        placeholders stand for; whether the function returned a tuple or list.

    Raises:
        BeyondError: It needs a full trace.
    """
    from torch._inductor.decomposition import select_decomp_table

    recorder = _Recorder(select_decomp_table())
    places = places_of(arguments)
    for place in places:
        recorder.take(argument_at(arguments, place))
    with torch.no_grad(), torch._C._DisableAutocast(), enable_python_dispatcher(), mode, recorder:
        result = function(*arguments)
    is_tuple = isinstance(result, (tuple, list))
    outputs = tuple(result) if is_tuple else (result,)
    recorder.graph.output(tuple(recorder.node_of(output) for output in outputs))
    return recorder.graph, places, is_tuple


class _Recorder(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, decompositions: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.decompositions = decompositions
        self.graph = Graph()
        self.nodes: dict[int, tuple[torch.Tensor, Node]] = {}  # tensors are kept, so that their ids stay theirs

    def take(self, argument: Any) -> None:
        """Add a placeholder."""
        node = self.graph.placeholder(f"argument_{len(self.graph.nodes)}")
        node.meta["val"] = argument
        if isinstance(argument, torch.Tensor):
            self.nodes[id(argument)] = (argument, node)

    def node_of(self, value: Any) -> Node:
        """The node that computed a tensor."""
        known = self.nodes.get(id(value))
        if known is None:
            raise BeyondError(f"it uses a {type(value).__name__} that it did not compute")
        return known[1]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Write down a torch op, or what it is decomposed into."""
        kwargs = kwargs or {}
        if not isinstance(func, torch._ops.OpOverload):
            raise BeyondError(str(func))
        if func in _SIZES:
            return func(*args, **kwargs)
        if func in self.decompositions:
            with self:
                result = self.decompositions[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if self._is_composite(func, args, kwargs):
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func._schema.is_mutable or torch.Tag.data_dependent_output in func.tags:
            raise BeyondError(str(func))
        if func is torch.ops.aten.alias.default:  # of what nobody writes to
            result = func(*args)
            self._computed(result, self.node_of(args[0]))
            return result
        node = self.graph.call_function(func, self._noted(args), {name: self._noted(kwargs[name]) for name in kwargs})
        result = func(*args, **kwargs)
        node.meta["val"] = result
        self._computed(result, node)
        return result

    def _is_composite(self, func: Any, args: Any, kwargs: Any) -> bool:
        if not func._can_decompose():
            return False
        if any(argument.alias_info for argument in func._schema.arguments):
            return True
        return autograd_would_have_decomposed(func, [*args, *kwargs.values()])

    def _computed(self, result: Any, node: Node) -> None:
        if isinstance(result, torch.Tensor):
            if type(result) is not FakeTensor:
                raise BeyondError(f"{node.target} returns a {type(result).__name__}")
            self.nodes[id(result)] = (result, node)
        elif isinstance(result, (list, tuple)):
            for index, item in enumerate(result):
                if isinstance(item, torch.Tensor):
                    part = self.graph.call_function(operator.getitem, (node, index))
                    part.meta["val"] = item
                    self._computed(item, part)

    def _noted(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return self.node_of(argument)
        if isinstance(argument, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            node = self.graph.call_function(symbol)  # a graph's arguments are nodes and plain numbers
            node.meta["val"] = argument
            return node
        if isinstance(argument, (list, tuple)):
            items = [self._noted(item) for item in argument]
            return items if isinstance(argument, list) else tuple(items)
        return argument


def symbol() -> None:
    """What stands in a recorded graph for a symbolic number; that is the node's value."""
