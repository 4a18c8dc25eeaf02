"""Lets Inductor plan the outputs of kernels that have an `.out` overload.

Owns the pass that writes out such a call: an empty tensor, which Inductor plans with its own buffers, and the overload
that fills it. Overloads of torch's own convention are left to torch where it handles them right. Torch 2.13 fails for
symbolic sizes and in C++ wrapper code, and for one output it passes tensors first and numbers after them, whatever the
schema says; those calls are written out as well. What differs between versions is in `irframework/out_variants.py`.

Private torch API, read in 2.11 and 2.13: `torch._inductor.config.cpp_wrapper`,
`torch.utils._sympy.interp.sympy_interp` with `PythonReferenceAnalysis`.
"""

from __future__ import annotations

import operator
from typing import Any, TypeGuard

import torch
from torch.fx import Graph, Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

from irframework.compiler.inlining import LOWERED
from irframework.compiler.report import Report
from irframework.errors import LoweringError
from irframework.out_variants import out_variant_of, outputs_of, rewritten_by_torch

_aten = torch.ops.aten


def plan_outputs(graph: Graph, report: Report) -> None:
    """Write out the calls of kernels with an `.out` overload.

    Args:
        graph: A lowered graph with fake values, on its way into Inductor.
        report: Knows the node that the pass is at.

    Raises:
        LoweringError: A size of an output cannot be computed from the sizes of inputs.
    """
    sizes: _Sizes | None = None
    for node in list(graph.nodes):
        if node.op != "call_function" or LOWERED not in node.meta:
            continue
        out = out_variant_of(node.target)
        if out is None:
            out = rewritten_by_torch(node.target)
            if out is None or _torch_does_it_right(node, out):
                continue
        report.visiting = node
        sizes = sizes or _Sizes(graph)
        _write_out(graph, node, out, sizes)


def _torch_does_it_right(node: Node, out: Any) -> bool:
    """Whether torch's own rewriting of this call works."""
    values = node.meta["val"]
    several = isinstance(values, (tuple, list))
    for value in values if several else (values,):
        if any(isinstance(number, torch.SymInt) for number in (*value.shape, *value.stride())):
            return False
    from torch._inductor import config

    from irframework.compiler import hooks

    if config.cpp_wrapper or hooks.compiles_ahead_of_time():
        return False
    if several:  # a buffer of an output that nothing reads is never allocated
        return {user.args[1] for user in node.users if _is_needed(user)} == set(range(len(values)))
    if outputs_of(out) != ["out"]:
        return False
    if node.kwargs or len(node.args) != len(node.target._schema.arguments):  # type: ignore[union-attr]
        return False
    if any(isinstance(argument, (list, tuple)) for argument in node.args):
        return False
    tensors = [isinstance(argument, Node) and isinstance(argument.meta["val"], torch.Tensor) for argument in node.args]
    return tensors == sorted(tensors, reverse=True)


def _is_needed(node: Node) -> bool:
    return node.op == "output" or node.is_impure() or any(map(_is_needed, node.users))


def _write_out(graph: Graph, node: Node, out: Any, sizes: _Sizes) -> None:
    values = node.meta["val"]
    several = isinstance(values, (tuple, list))
    names = outputs_of(out)
    buffers: list[Node] = []
    with graph.inserting_before(node):
        for value in values if several else (values,):
            shape, strides = ([sizes.node(number) for number in numbers] for numbers in (value.shape, value.stride()))
            buffer = graph.call_function(
                _aten.empty_strided.default, (shape, strides), {"dtype": value.dtype, "device": value.device}
            )
            buffer.meta.update(node.meta)
            buffer.meta["val"] = value
            buffers.append(buffer)
        call = graph.call_function(out, node.args, {**node.kwargs, **dict(zip(names, buffers, strict=True))})
    call.meta.update(node.meta)
    if not out._schema.returns:
        call.meta["val"] = None
    if several:
        for user in list(node.users):
            index = user.args[1]
            assert user.target is operator.getitem
            assert isinstance(index, int)
            user.replace_all_uses_with(buffers[index])
            graph.erase_node(user)
    else:
        node.replace_all_uses_with(buffers[0], delete_user_cb=lambda user: user is not call)
    graph.erase_node(node)


class _Sizes:
    """Nodes that compute symbolic sizes, made of what the graph's inputs say."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.tracer = GraphAppendingTracer(graph)
        self._known: dict[Any, Node] = {}  # a symbol, and the node that has its value
        self._sources: dict[Any, tuple[Any, Node, int]] = {}  # a symbol, and how an input gives it
        inputs = graph.find_nodes(op="placeholder")
        for node in inputs:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                for target, numbers in ((_aten.sym_size.int, value.shape), (_aten.sym_stride.int, value.stride())):
                    for dim, number in enumerate(numbers):
                        if _is_symbol(number):
                            self._sources.setdefault(number.node.expr, (target, node, dim))
        for node in (*inputs, *graph.nodes):
            value = node.meta.get("val")
            if _is_symbol(value) and (node.op == "placeholder" or value.node.expr not in self._sources):
                self._known.setdefault(value.node.expr, node)
        # Attributes may stand before the inputs, so the first node that is no input is not always behind them.
        self._after_inputs = inputs[-1].next if inputs else next(iter(graph.nodes))

    def node(self, number: Any) -> Any:
        """The number itself, or a node that computes it, placed where the graph inserts nodes now."""
        if not isinstance(number, torch.SymInt):
            return number
        from torch.utils._sympy.interp import sympy_interp
        from torch.utils._sympy.reference import PythonReferenceAnalysis

        symbols = sorted(number.node.expr.free_symbols, key=str)
        environment = {symbol: Proxy(self._symbol(symbol, number), self.tracer) for symbol in symbols}
        result: Node = sympy_interp(PythonReferenceAnalysis, environment, number.node.expr).node
        self._give_values(result)
        return result

    def _symbol(self, symbol: Any, number: torch.SymInt) -> Node:
        if symbol not in self._known:
            if symbol not in self._sources:
                raise LoweringError(
                    f"Size {number} of an output cannot be computed: no input of the graph has {symbol}."
                )
            target, source, dim = self._sources[symbol]
            with self.graph.inserting_before(self._after_inputs):
                self._known[symbol] = found = self.graph.call_function(target, (source, dim))
            self._give_values(found)
        return self._known[symbol]

    def _give_values(self, node: Node) -> None:
        """Give fake values to a new node and to the new ones it is made of."""
        if "val" not in node.meta:
            for argument in node.all_input_nodes:
                self._give_values(argument)
            args: Any = map_arg(node.args, lambda argument: argument.meta["val"])
            node.meta["val"] = node.target(*args)  # type: ignore[operator]


def _is_symbol(number: Any) -> TypeGuard[torch.SymInt]:
    return isinstance(number, torch.SymInt) and bool(number.node.expr.is_Symbol)
