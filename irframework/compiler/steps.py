"""What of a call in a graph can be told without the values of its inputs; of a definition it is told once.

Owns the reading of calls: their arguments in the order of the schema, with constants in the form that compares. A
definition is computed for hundreds of candidates, so nothing of this is done again for each. Does not know what a torch
op computes (`values.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from irframework.compiler.call_arguments import Number, Shape, Value, number, shape_of
from irframework.compiler.replays import Replay
from irframework.torch_ops import NAMESPACE

_NO_DEFAULT = object()
_torch_ops: dict[int, tuple[TorchOp, Any]] = {}  # by the identity of an overload, which is kept


@dataclass(frozen=True, slots=True)
class TorchOp:
    """What is the same for all calls of a torch op.

    Attributes:
        name: Its name without the overload.
        overload: The overload.
        is_random: Whether two equal calls compute two values.
        is_pointwise: Whether it works on each element alone.
        is_ours: Whether it is of this framework: an IR op, or what compiled graphs call beside them.
        may_write: Whether it may write to an argument.
        parameters: Name and default of each parameter; a default that equals nothing where there is none.
    """

    name: str
    overload: str
    is_random: bool
    is_pointwise: bool
    is_ours: bool
    may_write: bool
    parameters: tuple[tuple[str, Any], ...]


def torch_op(target: Any) -> TorchOp:
    """What is the same for all calls of an overload."""
    known = _torch_ops.get(id(target))  # overloads compute their hash in Python
    if known is None:
        known = _torch_ops[id(target)] = (_read_overload(target), target)
    return known[0]


def _read_overload(target: Any) -> TorchOp:
    """What its schema and its tags say."""
    defaults = [
        (each.name, _template(each.default_value) if each.has_default_value() else _NO_DEFAULT)
        for each in target._schema.arguments
    ]
    tags = target.tags
    return TorchOp(
        name=target._schema.name,
        overload=target._overloadname,
        is_random=torch.Tag.nondeterministic_seeded in tags,
        is_pointwise=torch.Tag.pointwise in tags,
        is_ours=target.namespace == NAMESPACE,
        may_write=target._schema.is_mutable,
        parameters=tuple(defaults),
    )


@dataclass(slots=True)
class Step:
    """A node of a graph, its constants read; nobody changes it, and one is made for each node.

    Attributes:
        node: The node.
        called: The torch op that it calls; None for other nodes.
        args: The arguments of a torch op in the order of its schema: numbers, tuples, and nodes for their values.
        val: What it computes, as fake tensors and numbers.
        shape: The shape of what it computes; None where that is not one tensor.
        dtype: Its dtype.
    """

    node: Node
    called: TorchOp | None
    args: tuple[Any, ...]
    val: Any
    shape: Shape | None
    dtype: Any


def step_of(node: Node) -> Step:
    """Read a node of a graph."""
    val = node.meta.get("val")
    called, args = None, ()
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        called = torch_op(node.target)
        args = _arguments(called, node)
    if isinstance(val, torch.Tensor):
        return Step(node, called, args, val, shape_of(val), val.dtype)
    return Step(node, called, args, val, None, None)


@dataclass(slots=True)
class Expansion:
    """The definition of an IR op for arguments of certain kinds, as a graph of torch ops.

    Attributes:
        graph: Returns a tuple.
        places: Which arguments of the call its placeholders stand for.
        is_tuple: Whether the op returns a tuple.
        owner: Keeps what belongs to the graph alive.
        steps: Its nodes, their constants read.
        is_symbolic: Whether any of its sizes is symbolic, so that it belongs to one graph.
        replays: How it was numbered, by all of its inputs that numbering looks at.
    """

    graph: Graph
    places: Sequence[Any]
    is_tuple: bool
    owner: Any
    steps: Sequence[Step] = field(init=False)
    is_symbolic: bool = field(init=False)
    replays: dict[Any, Replay] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.steps = [step_of(node) for node in self.graph.nodes]
        self.is_symbolic = any(type(size) is not int for step in self.steps for size in step.shape or ())


def given(step: Step, values: dict[Node, Any]) -> tuple[Any, ...]:
    """The arguments of a torch op, for inputs that have values; defaults at the end left out."""
    args = [values[arg] if isinstance(arg, Node) else _filled(arg, values) for arg in step.args]
    parameters: Any = step.called and step.called.parameters
    while args and isinstance(args[-1], Number) and args[-1] == parameters[len(args) - 1][1]:
        args.pop()
    return tuple(args)


def _arguments(called: TorchOp, node: Node) -> tuple[Any, ...]:
    args = [_template(value) for value in node.args]
    for name, default in called.parameters[len(args) :]:
        args.append(_template(node.kwargs[name]) if name in node.kwargs else default)
    while args and args[-1] is called.parameters[len(args) - 1][1]:
        args.pop()
    return tuple(args)


def _template(value: Any) -> Any:
    """An argument of a node, with nodes for values that it does not have yet."""
    if isinstance(value, Node):
        return value
    if isinstance(value, (list, tuple)):  # also the lists of FX
        items = tuple(map(_template, value))
        return items if any(isinstance(item, (Node, tuple)) for item in items) else Number(items)
    return number(value)


def _filled(template: Any, values: dict[Node, Any]) -> Any:
    if isinstance(template, Node):
        return values[template]
    if isinstance(template, tuple):
        items = tuple(_filled(item, values) for item in template)
        return items if any(isinstance(item, (Value, tuple)) for item in items) else Number(items)
    return template
