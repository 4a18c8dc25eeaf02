"""Which values of a graph may share memory, and which nodes read or write it.

Owns the alias analysis that clone removal and verification stand on. It works on storages of the fake tensors *and*
on schemas, because after lowering the fake tensors of views still point at the storage of the node that was replaced.
Whatever is not known reads and writes everything. Does not tell storages apart (`irframework/memory.py`), nor compare
parts of one (`overlap.py`); of a graph it changes only who stands for whom (`stand_in`).

Private torch API, read in 2.11 and 2.13: `_schema.alias_info`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from irframework.memory import storage_key

# By name: some are only there once torch has needed them.
HIDDEN_CALLS = ("auto_functionalized", "auto_functionalized_v2")
VISIBLE_LAUNCH = "triton_kernel_wrapper_functional"
_FUNCTIONAL_HIGHER_ORDER = (*HIDDEN_CALLS, VISIBLE_LAUNCH)

# What is asked here is the same of a copy and of what was copied: clone removal compares sizes and strides.
_SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int, torch.ops.aten.sym_numel.default)

_STANDS_FOR = "stands_for"


def stand_in(new: Node, value: object, old: Node) -> None:
    """Let a node take the place of another, or of one of its items.

    Views of the old value keep their fake values, which lie on its storage; so they count as views of the new one.

    Args:
        new: The node that takes the place.
        value: The old value.
        old: The node that had it.
    """
    new.meta[_STANDS_FOR] = [*new.meta.get(_STANDS_FOR, ()), *old.meta.get(_STANDS_FOR, ()), value]
    old.replace_all_uses_with(new)


@dataclass(slots=True)
class Access:
    """One node touching one class of memory: `through` is the argument by which it does."""

    position: int
    node: Node
    through: Node


@dataclass(slots=True)
class Effects:
    """What one node does to memory: arguments read, arguments written, arguments its result may be a view of."""

    reads: list[Node] = field(default_factory=list)
    writes: list[Node] = field(default_factory=list)
    views: list[Node] = field(default_factory=list)


def storage_of(value: object) -> int | None:
    """An identity for the storage behind a (fake) tensor; None for anything else and for tensors without one."""
    return storage_key(value) if isinstance(value, torch.Tensor) else None


def holds_tensor(value: object) -> bool:
    """True if a node's value is, or contains, a tensor."""
    if isinstance(value, (list, tuple)):
        return any(map(holds_tensor, value))
    return isinstance(value, torch.Tensor)


def _nodes(argument: object) -> Iterator[Node]:
    if isinstance(argument, Node):
        yield argument
    elif isinstance(argument, (list, tuple)):
        for item in argument:
            yield from _nodes(item)
    elif isinstance(argument, dict):
        for item in argument.values():
            yield from _nodes(item)


def _tensor_nodes(argument: object) -> list[Node]:
    # a node without a value is taken for a tensor: unknown means everything
    return [node for node in _nodes(argument) if "val" not in node.meta or holds_tensor(node.meta["val"])]


def may_write(node: Node) -> bool:
    """Whether a call may write to something: false is certain, and costs less than `effects_of`."""
    target = node.target
    return not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable


def effects_of(node: Node) -> Effects:
    """What `node` reads, writes and may return a view of, by its schema; unknown targets do everything to all."""
    if node.op in ("placeholder", "get_attr"):
        return Effects()
    arguments = _tensor_nodes((node.args, node.kwargs))
    if node.op == "output":
        return Effects(reads=arguments)
    target = node.target
    if target in _SIZES:
        return Effects()
    if target is operator.getitem:
        return Effects(views=arguments[:1])
    if isinstance(target, torch._ops.HigherOrderOperator) and target.name() in _FUNCTIONAL_HIGHER_ORDER:
        return Effects(reads=arguments)
    if isinstance(target, torch._ops.OpOverload):
        return _schema_effects(node, target)
    if not arguments and not holds_tensor(node.meta.get("val")):
        return Effects()  # arithmetic on symbolic sizes
    return Effects(reads=arguments, writes=arguments, views=arguments)


def _schema_effects(node: Node, target: torch._ops.OpOverload) -> Effects:
    schema = target._schema
    returns_view = any(item.alias_info is not None for item in schema.returns)
    effects = Effects()
    for index, argument in enumerate(schema.arguments):
        if argument.name in node.kwargs:
            nodes = _tensor_nodes(node.kwargs[argument.name])
        elif index < len(node.args):
            nodes = _tensor_nodes(node.args[index])
        else:
            continue
        if argument.alias_info is None:
            effects.reads += nodes
            continue
        if argument.alias_info.is_write:
            effects.writes += nodes
        elif not returns_view:
            effects.reads += nodes
        if returns_view:
            effects.views += nodes
    return effects


class Aliasing:
    """Classes of values that may share memory, with every access to each class, in graph order.

    Classes only ever grow (`merge`), so an answer that was "cannot alias" once is about the graph as it stood.
    """

    def __init__(self, graph: Graph) -> None:
        self.position: dict[Node, int] = {}
        self.effects: dict[Node, Effects] = {}
        self._parent: dict[Node, Node] = {}
        self._reads: dict[Node, list[Access]] = {}
        self._writes: dict[Node, list[Access]] = {}
        self._members: dict[Node, list[Node]] = {}
        self._scan(graph.nodes)

    def _scan(self, nodes: Iterable[Node]) -> None:
        by_storage: dict[int, Node] = {}
        by_item: dict[tuple[Node, Any], Node] = {}
        for position, node in enumerate(nodes):
            self.position[node] = position
            self._parent[node] = node
            self._members[node] = [node]
            effects = self.effects[node] = effects_of(node)
            if node.target is operator.getitem and effects.views:
                source = effects.views[0]
                if not self.effects[source].views:
                    # one output of an op with several fresh ones: a class of its own, shared by equal getitems
                    first = by_item.setdefault((source, node.args[1]), node)
                    effects.views = [] if first is node else [first]
            for source in effects.views:
                self.merge(source, node)
            for value in (node.meta.get("val"), *node.meta.get(_STANDS_FOR, ())):
                storage = storage_of(value)
                if storage is not None:
                    first = by_storage.setdefault(storage, node)
                    if first is not node and node.op == "call_function" and not effects.views:
                        effects.views = [first]  # a view by its storage, whatever its schema says
                    self.merge(first, node)
        for node, effects in self.effects.items():
            position = self.position[node]
            for source in effects.reads:
                self._reads.setdefault(self.find(source), []).append(Access(position, node, source))
            for source in effects.writes:
                self._writes.setdefault(self.find(source), []).append(Access(position, node, source))

    def find(self, node: Node) -> Node:
        """The representative of the node's class."""
        root = node
        while self._parent[root] is not root:
            root = self._parent[root]
        while self._parent[node] is not root:
            self._parent[node], node = root, self._parent[node]
        return root

    def merge(self, a: Node, b: Node) -> None:
        """State that a and b may share memory from now on."""
        a, b = self.find(a), self.find(b)
        if a is b:
            return
        if len(self._members[a]) < len(self._members[b]):
            a, b = b, a
        self._parent[b] = a
        self._members[a] += self._members.pop(b)
        for accesses in (self._reads, self._writes):
            if b in accesses:
                accesses.setdefault(a, []).extend(accesses.pop(b))

    def members(self, node: Node) -> list[Node]:
        """Every node of the graph, as it was scanned, whose value may share memory with the node's."""
        return self._members[self.find(node)]

    def reads(self, node: Node) -> list[Access]:
        """Reads of the node's class, in no order; making a view is not a read."""
        return self._reads.get(self.find(node), [])

    def writes(self, node: Node) -> list[Access]:
        """Writes to the node's class, in no order."""
        return self._writes.get(self.find(node), [])

    def roots(self, node: Node) -> set[Node]:
        """The nodes whose memory the value is made of: fresh results, placeholders, attributes, unknown calls."""
        found: set[Node] = set()
        seen: set[Node] = set()
        todo = [node]
        while todo:
            current = todo.pop()
            if current in seen:
                continue
            seen.add(current)
            sources = effects_of(current).views if current not in self.effects else self.effects[current].views
            todo += sources
            if not sources:
                found.add(current)
        return found
