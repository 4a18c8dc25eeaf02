"""Makes in-place kernels overwrite copies.

Owns the step from the functional form of a kernel call, which lowering left, to the kernel on copies of what it writes,
and the marks of both. Does not prove that a copy is needless: `clones.py` does.

Private torch API, read in 2.11 and 2.13: `torch._higher_order_ops.auto_functionalize.auto_functionalized`.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch.fx import Graph, Node

from irframework.compiler.aliasing import stand_in
from irframework.compiler.tracing import fake_like, is_contiguous

if TYPE_CHECKING:
    from irframework.compiler.report import Report

COPY = "irframework_copy"
KERNEL = "irframework_kernel"

_CLONE = torch.ops.aten.clone.default


def mark_copy(node: Node, op: str, provider: str) -> None:
    """Mark a node as made by lowering, for this implementation: only marked copies are ever removed."""
    node.meta[COPY] = (op, provider)


def materialize(graph: Graph, report: Report) -> None:
    """Turn the functional form of each kernel call that lowering made into the kernel on copies of what it writes."""
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is auto_functionalized and COPY in node.meta:
            report.visiting = node
            _materialize_one(graph, node, report)


def _materialize_one(graph: Graph, node: Node, report: Report) -> None:
    kernel = node.args[0]
    assert isinstance(kernel, torch._ops.OpOverload)
    schema = kernel._schema
    arguments = dict(node.kwargs)
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if not all(_is_dense(value) for name in written for value in _as_list(arguments.get(name))):
        return  # a copy of a value with gaps has other strides: torch's own handling of the functional form is right
    mutated: list[Any] = []
    with graph.inserting_before(node):
        for name in written:
            copies = [_copy(graph, value, node, report) for value in _as_list(arguments[name])]
            if isinstance(arguments[name], (list, tuple)):
                arguments[name] = copies
            elif copies:
                arguments[name] = copies[0]
            mutated.append(arguments[name])
        call = graph.call_function(kernel, *_positional(schema, arguments))
    returned = len(schema.returns)
    value = node.meta["val"]
    call.meta.update({key: item for key, item in node.meta.items() if key != COPY})
    call.meta["val"] = None if returned == 0 else (value[0] if returned == 1 else tuple(value[:returned]))
    call.meta[KERNEL] = node.meta[COPY]
    first = max(returned, 1)
    for user in list(node.users):
        assert user.target is operator.getitem, "auto_functionalized is only read by its items"
        index = user.args[1]
        assert isinstance(index, int)
        if index >= first:
            _replace_item(graph, user, mutated[index - first])
        elif returned == 1:
            stand_in(call, user.meta.get("val"), user)
            graph.erase_node(user)
        elif returned > 1:
            user.args = (call, index)
        else:
            graph.erase_node(user)
    graph.erase_node(node)


def _replace_item(graph: Graph, item: Node, value: Any) -> None:
    if isinstance(value, Node):
        stand_in(value, item.meta.get("val"), item)
    else:
        for user in list(item.users):  # an item of an item: a list argument
            index = user.args[1]
            assert user.target is operator.getitem
            assert isinstance(index, int)
            stand_in(value[index], user.meta.get("val"), user)
            graph.erase_node(user)
    graph.erase_node(item)


def _as_list(value: Any) -> list[Node]:
    if isinstance(value, Node):
        return [value]
    return [item for item in value if isinstance(item, Node)] if isinstance(value, (list, tuple)) else []


def _is_dense(node: Node) -> bool:
    """Whether `clone` keeps the strides, because the value has neither gaps nor overlaps."""
    value = node.meta["val"]
    if any(isinstance(number, torch.SymInt) for number in (*value.shape, *value.stride())):
        return is_contiguous(value)
    step = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size == 1:
            continue
        if stride != step:
            return False
        step *= size
    return True


def _copy(graph: Graph, source: Node, node: Node, report: Report) -> Node:
    copy = graph.call_function(_CLONE, (source,))
    copy.meta.update({key: item for key, item in node.meta.items() if key != "val"})
    copy.meta["val"] = fake_like(source.meta["val"], source.meta["val"].fake_mode)
    report.clones_inserted += 1
    return copy


def _positional(schema: torch._C.FunctionSchema, arguments: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in schema.arguments:
        if argument.kwarg_only:
            kwargs[argument.name] = arguments[argument.name]
        else:
            args.append(arguments[argument.name])
    return tuple(args), kwargs
