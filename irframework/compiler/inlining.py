"""Puts a traced graph in the place of one node.

Owns the copying of nodes, their metadata and their constants. Does not trace or decide what is inlined.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from irframework.compiler.aliasing import HIDDEN_CALLS, VISIBLE_LAUNCH, stand_in, storage_of
from irframework.compiler.tracing import Place, argument_at, fake_like, fake_view

LOWERED = "irframework_lowered"  # marks what an implementation brought in
_KEPT_META = ("stack_trace", "nn_module_stack", "seq_nr", "fwd_nn_module_stack", "source_fn_stack", "custom")


@dataclass(slots=True)
class Template:
    """A traced graph to be inlined many times.

    Attributes:
        module: The graph; returns a tuple.
        dynamic: Which arguments of the call its placeholders stand for.
        mode: The fake mode of its values.
        used: Whether its own fake tensors were given to a copy already; each later copy gets storages of its own,
            or an analysis on storages would take the copies for aliases of each other.
    """

    module: GraphModule
    dynamic: tuple[Place, ...]
    mode: FakeTensorMode
    used: bool = False
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def shows_kernels(self) -> bool:
        """Whether Inductor sees the kernels that overwrite its arguments, each of them."""
        names = {getattr(node.target, "__name__", "") for node in self.module.graph.nodes}
        return VISIBLE_LAUNCH in names and names.isdisjoint(HIDDEN_CALLS)


def inline(graph: Graph, node: Node, template: Template, arguments: Sequence[Any]) -> list[Node]:
    """Replace `node` by a copy of the template for these arguments.

    Returns:
        The new nodes, in order.
    """
    places = iter(template.dynamic)
    copies: dict[Node, Any] = {}
    fakes = _Fakes(template)
    inserted: list[Node] = []
    results: Sequence[Any] = ()
    kept = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
    with graph.inserting_before(node):
        for inner in template.module.graph.nodes:
            if inner.op == "placeholder":
                copies[inner] = argument_at(arguments, next(places))
                if isinstance(copies[inner], Node):
                    fakes.bind(inner, copies[inner])
                continue
            if inner.op == "output":
                results = [copies[output] for output in inner.args[0]]
                continue
            if inner.op == "get_attr":
                copies[inner] = new = graph.create_node(
                    "get_attr", _share_attribute(graph, template, str(inner.target))
                )
            else:
                args = map_arg(inner.args, lambda n: copies[n])
                kwargs = map_arg(inner.kwargs, lambda n: copies[n])
                copies[inner] = new = graph.create_node(inner.op, inner.target, args, kwargs)
            new.meta.update(kept)
            new.meta[LOWERED] = True
            new.meta.update({key: value for key, value in inner.meta.items() if key.startswith("irframework")})
            if "val" in inner.meta:
                new.meta["val"] = fakes.copy(inner, new)
            inserted.append(new)
    template.used = True
    _replace(graph, node, results)
    return inserted


def _replace(graph: Graph, node: Node, results: Sequence[Node]) -> None:
    """Let every user of `node` read the results, also users that take the whole tuple."""
    if not isinstance(node.meta["val"], (tuple, list)):
        stand_in(results[0], node.meta["val"], node)
        graph.erase_node(node)
        return
    for user in list(node.users):
        if user.target is operator.getitem:
            index: Any = user.args[1]
            stand_in(results[index], node.meta["val"][index], user)
            graph.erase_node(user)
        else:
            user.args = _with_tuple(user.args, node, tuple(results))
            user.kwargs = _with_tuple(user.kwargs, node, tuple(results))
    graph.erase_node(node)


def _with_tuple(argument: Any, node: Node, results: tuple[Node, ...]) -> Any:
    if argument is node:
        return results
    if isinstance(argument, (tuple, list)):
        return type(argument)(_with_tuple(item, node, results) for item in argument)
    if isinstance(argument, dict):
        return {key: _with_tuple(item, node, results) for key, item in argument.items()}
    return argument


def _share_attribute(graph: Graph, template: Template, target: str) -> str:
    """Give the graph's module the constant or subgraph that the trace holds; one name for all copies."""
    if target not in template.attributes:
        owner = graph.owning_module
        assert owner is not None
        name = f"_lowered_{target.replace('.', '_')}"
        number = 0
        while hasattr(owner, f"{name}_{number}"):
            number += 1
        value = template.module
        for part in target.split("."):
            value = getattr(value, part)
        setattr(owner, f"{name}_{number}", value)
        template.attributes[target] = f"{name}_{number}"
    return template.attributes[target]


class _Fakes:
    """Makes the fake values of one copy: what shares storage in the trace shares storage in the copy, and no more."""

    def __init__(self, template: Template) -> None:
        self._template = template
        self._base: dict[int | None, torch.Tensor] = {}

    def bind(self, placeholder: Node, argument: Node) -> None:
        if isinstance(argument.meta["val"], torch.Tensor):
            self._base[storage_of(placeholder.meta["val"])] = argument.meta["val"]

    def copy(self, inner: Node, new: Node) -> Any:
        value = inner.meta["val"]
        if inner.target is operator.getitem:
            return new.args[0].meta["val"][new.args[1]]  # type: ignore[union-attr]
        if isinstance(value, (tuple, list)):
            items = [self._one(item) for item in value]
            return self._run(new) if any(item is _UNKNOWN for item in items) else type(value)(items)
        item = self._one(value)
        return self._run(new) if item is _UNKNOWN else item

    def _one(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        storage = storage_of(value)
        base = self._base.get(storage)
        if base is not None:
            view = fake_view(base, value)
            return _UNKNOWN if view is None else view
        fresh = fake_like(value, self._template.mode) if self._template.used else value
        self._base[storage] = fresh
        return fresh

    def _run(self, new: Node) -> Any:
        """A view that only the op itself can describe, e.g. one of another dtype."""
        args = map_arg(new.args, lambda n: n.meta["val"])
        kwargs = map_arg(new.kwargs, lambda n: n.meta["val"])
        with self._template.mode, torch.no_grad():
            return new.target(*args, **kwargs)  # type: ignore[operator]


_UNKNOWN = object()
