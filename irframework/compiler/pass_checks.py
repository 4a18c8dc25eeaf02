"""What must hold after a pass that is not ours: the graph is whole, and is still the same function to its callers.

Owns the checks and the fake values of what such a pass made or fed anew. Changes nothing else of a graph. Does not
decide what happens to a pass that fails them (`attempts.py`), nor check lowered graphs (`verify.py`).

A value in `meta["val"]` may be older than what its node computes now, so values are computed anew from what changed
onwards: only then do the kinds of the outputs say anything.

Private torch API, read in 2.11 and 2.13: `SymInt.node.hint`, and that fake tensors are computed by calling an overload
under their mode.
"""

from __future__ import annotations

import builtins
import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from irframework.compiler.aliasing import effects_of, may_write, storage_of
from irframework.compiler.clones import GRANTED
from irframework.compiler.definitions import fake_mode_of
from irframework.compiler.report import location, type_text
from irframework.op import IrOp

_UNKNOWN = object()  # the value of a node that never had one
_PLAIN_MODULES = (operator.__name__, "_operator", builtins.__name__, math.__name__)


class BrokenGraph(Exception):  # noqa: N818 - a finding about a graph; who is told gets a `VerifyError`
    """What is wrong with a graph, as a sentence without its end."""


@dataclass(frozen=True, slots=True)
class Before:
    """A graph as it was before a pass.

    Attributes:
        inputs: Its placeholders.
        outputs: What it returned.
        values: The fake value of each output.
        calls: What each node called, with which arguments.
        written: The inputs that it overwrites.
        shared: Pairs of what shares memory among inputs and outputs, as in `_sharing`.
    """

    inputs: tuple[Node, ...]
    outputs: tuple[Any, ...]
    values: tuple[Any, ...]
    calls: dict[Node, tuple[Any, ...]]
    written: frozenset[Node]
    shared: frozenset[tuple[int, int | Node]]

    @classmethod
    def of(cls, graph: Graph) -> Before:
        """Look at a graph before a pass."""
        outputs = _outputs(graph)
        calls = {node: (node.target, node.args, node.kwargs) for node in graph.nodes if node.op == "call_function"}
        inputs = tuple(graph.find_nodes(op="placeholder"))
        values = tuple(map(_value, outputs))
        return cls(inputs, outputs, values, calls, _written(graph, certain=True), _sharing(inputs, values))

    def check(self, graph: Graph, *, inference: bool) -> None:
        """Check the graph after the pass, and give nodes that the pass made their fake values.

        Args:
            graph: The graph now.
            inference: Whether outputs belong to the caller, so that they must not begin to share memory. What a
                training graph saves for its backward may.

        Raises:
            BrokenGraph: Something that the pass must not change, or cannot have meant.
        """
        try:
            graph.lint()
        except Exception as error:
            raise BrokenGraph(f"the graph is malformed: {error}") from error
        self._check_ends(graph)
        _Values(self.calls).update(graph)
        outputs = _outputs(graph)
        for number, (old, output) in enumerate(zip(self.values, outputs, strict=True)):
            new = _value(output)
            if old is not _UNKNOWN and not _alike(old, new):
                raise BrokenGraph(f"output {number} was {_text(old)}, and is {_text(new)}{_place(output)}")
        self._check_memory(graph, inference)

    def _check_ends(self, graph: Graph) -> None:
        inputs, outputs = tuple(graph.find_nodes(op="placeholder")), _outputs(graph)
        if inputs != self.inputs:
            was, now = (", ".join(node.name for node in nodes) or "nothing" for nodes in (self.inputs, inputs))
            raise BrokenGraph(f"the graph's inputs were {was}, and are {now}")
        if len(outputs) != len(self.outputs):
            raise BrokenGraph(f"the graph returned {len(self.outputs)} values, and returns {len(outputs)}")

    def _check_memory(self, graph: Graph, inference: bool) -> None:
        lost = self.written - _written(graph, certain=False)
        for node in lost:
            raise BrokenGraph(f"the graph wrote to its input {node.name}, and does not any more")
        for node in _written(graph, certain=True) - self.written:
            if GRANTED not in node.meta:
                raise BrokenGraph(f"the graph writes to its input {node.name}, which is its caller's")
        if not inference:
            return
        for output, other in _sharing(self.inputs, tuple(map(_value, _outputs(graph)))) - self.shared:
            what = f"input {other.name}" if isinstance(other, Node) else f"output {other}"
            raise BrokenGraph(f"output {output} shares memory with {what} now; return a copy of it")


def _outputs(graph: Graph) -> tuple[Any, ...]:
    nodes = list(graph.find_nodes(op="output"))
    if len(nodes) != 1:
        raise BrokenGraph(f"the graph has {len(nodes)} output nodes")
    returned = nodes[0].args[0]
    return tuple(returned) if isinstance(returned, (list, tuple)) else (returned,)


def _value(output: Any) -> Any:
    return output.meta.get("val", _UNKNOWN) if isinstance(output, Node) else output


def _place(output: Any) -> str:
    return f" ({output.name}){location(output)}" if isinstance(output, Node) else ""


def _text(value: object) -> str:
    return type_text(value) or repr(value)


def _written(graph: Graph, *, certain: bool) -> frozenset[Node]:
    """The inputs that a graph overwrites; if not certain, also those that higher-order operators may overwrite."""
    found: set[Node] = set()
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload):
            found.update(effects_of(node).writes if may_write(node) else ())
        elif isinstance(node.target, torch._ops.HigherOrderOperator) and not certain:
            found.update(node.all_input_nodes)
    return frozenset(node for node in found if node.op == "placeholder")


def _sharing(inputs: tuple[Node, ...], values: tuple[Any, ...]) -> frozenset[tuple[int, int | Node]]:
    """Pairs (output, input) and (output, earlier output) that lie on one storage."""
    owner: dict[Any, int | Node] = {}
    for node in inputs:
        storage = storage_of(node.meta.get("val"))
        if storage is not None:
            owner.setdefault(storage, node)
    found = set()
    for number, value in enumerate(values):
        storage = storage_of(value)
        if storage is not None:
            other = owner.setdefault(storage, number)
            if other != number:
                found.add((number, other))
    return frozenset(found)


@dataclass(slots=True)
class _Values:
    """Fake values of what a pass made, and of all that follows from it."""

    calls: dict[Node, tuple[Any, ...]]

    def update(self, graph: Graph) -> None:
        mode = fake_mode_of(node.meta.get("val") for node in graph.nodes)
        if mode is None:
            return  # nothing here has a value
        changed: set[Node] = set()
        for node in graph.nodes:
            if node.op == "get_attr" and "val" not in node.meta:
                _give_constant(node, mode)
            elif node.op == "call_function" and self._is_new(node, changed):
                self._compute(node, mode, changed)

    def _is_new(self, node: Node, changed: set[Node]) -> bool:
        if "val" not in node.meta:
            return True
        if "unbacked_bindings" in node.meta:  # a size that only a run can tell would get another name
            return False
        call = (node.target, node.args, node.kwargs)
        return self.calls.get(node) != call or any(each in changed for each in node.all_input_nodes)

    def _compute(self, node: Node, mode: FakeTensorMode, changed: set[Node]) -> None:
        made_now = node not in self.calls
        if made_now and not isinstance(node.target, torch._ops.OpOverload):
            overload = _overload_of(node.target)
            if overload:
                raise BrokenGraph(f"node {node.name} calls {node.target}, and must call {overload}{location(node)}")
        if not _can_be_computed(node):
            if made_now and "val" not in node.meta:
                what = f"node {node.name} ({node.target}) has no fake value"
                raise BrokenGraph(f"{what}; a pass must give it meta['val']{location(node)}")
            return
        try:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda each: each.meta["val"])
            with mode, torch.no_grad():
                value = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception as error:
            if "val" in node.meta or made_now:
                raise BrokenGraph(
                    f"node {node.name} ({node.target}) cannot be computed from its arguments: "
                    f"{type(error).__name__}: {error}{location(node)}"
                ) from error
            return
        known = node.meta.get("val", _UNKNOWN)
        if known is _UNKNOWN or not _alike(known, value, exactly=True) or _shares_anew(node, known, value):
            node.meta["val"] = value
            changed.add(node)


def _overload_of(target: Any) -> str:
    """What a pass probably meant to call; empty for what is callable in a graph."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return f"an overload of it, e.g. {target}.{target.overloads()[0]}"
    return f"{target.torch_op}, its torch_op" if isinstance(target, IrOp) else ""


def _shares_anew(node: Node, known: Any, value: Any) -> bool:
    """Whether a value is memory of an argument of its node, and what was known is not."""
    storage = storage_of(value)
    if storage is None or storage == storage_of(known):
        return False
    return any(storage_of(each.meta.get("val")) == storage for each in node.all_input_nodes)


def _can_be_computed(node: Node) -> bool:
    if any("val" not in each.meta for each in node.all_input_nodes):
        return False
    target = node.target
    return isinstance(target, torch._ops.OpOverload) or getattr(target, "__module__", None) in _PLAIN_MODULES


def _give_constant(node: Node, mode: FakeTensorMode) -> None:
    value: Any = node.graph.owning_module
    for name in str(node.target).split("."):
        value = getattr(value, name, None)
    if isinstance(value, torch.Tensor):
        node.meta["val"] = mode.from_tensor(value, static_shapes=True)


def _alike(old: Any, new: Any, *, exactly: bool = False) -> bool:
    """Whether two fake values are of one kind: dtype, device, shape, and strides where they matter.

    Args:
        old: A value.
        new: Another.
        exactly: Whether sizes must be known to be equal; else they may also be equal in the call that is compiled.
    """
    if isinstance(old, (list, tuple)) and isinstance(new, (list, tuple)):
        return len(old) == len(new) and all(_alike(*pair, exactly=exactly) for pair in zip(old, new, strict=True))
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        numbers = (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)
        return (isinstance(old, numbers) and isinstance(new, numbers)) or type(old) is type(new)
    if (old.dtype, old.device, old.layout, old.ndim) != (new.dtype, new.device, new.layout, new.ndim):
        return False
    if not all(_equal(*pair, exactly) for pair in zip(old.shape, new.shape, strict=True)):
        return False
    if old.layout is not torch.strided or any(_equal(size, 0, True) for size in old.shape):
        return True
    steps = zip(old.shape, old.stride(), new.stride(), strict=True)
    return all(_equal(size, 1, True) or _equal(a, b, exactly) for size, a, b in steps)


def _equal(a: Any, b: Any, exactly: bool) -> bool:
    if statically_known_true(a == b):
        return True
    if exactly or (isinstance(a, int) and isinstance(b, int)):
        return False
    hints = [each.node.hint if isinstance(each, torch.SymInt) else each for each in (a, b)]
    return None in hints or hints[0] == hints[1]
