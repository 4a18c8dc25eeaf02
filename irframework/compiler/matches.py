"""Whether a part of a graph that computes an op's definition may be replaced by the op.

Owns what a match is, and everything that forbids one: other readers, cycles, writes in between, other dtypes or
layouts, arguments outside of the op's domain, a choice of native. Finds nothing and changes no graph.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from irframework.compiler.aliasing import effects_of, storage_of
from irframework.compiler.call_arguments import Number, Value
from irframework.compiler.clones import donate_op
from irframework.compiler.definitions import argument_key
from irframework.compiler.skeletons import Skeleton
from irframework.compiler.tracing import strides_for
from irframework.compiler.values import CONVERT, ValueTable
from irframework.dispatch import resolve, why_not_now
from irframework.errors import PredicateGuardError
from irframework.impl import IrOpImpl
from irframework.op import NATIVE, IrOp
from irframework.torch_ops import op_of


@dataclass(frozen=True, slots=True)
class Match:
    """A part of the graph that computes an op.

    Attributes:
        op: The op.
        arguments: Its arguments: nodes of the graph, numbers, None.
        outputs: For each output the nodes that compute it.
        values: The values of the outputs.
        fakes: What the definition returns for such arguments, as fake tensors of a trace.
        inner: All nodes that compute the outputs from the arguments, outputs included.
        orders: For each output the order of dimensions in which it permutes what its nodes compute, or None.
    """

    op: IrOp
    arguments: tuple[Any, ...]
    outputs: tuple[tuple[Node, ...], ...]
    values: tuple[Value, ...]
    fakes: tuple[torch.Tensor, ...]
    inner: frozenset[Node]
    orders: tuple[tuple[int, ...] | None, ...]


class Refused(Exception):  # noqa: N818 -- an answer, not an error
    """A candidate is not replaced; the text says why."""


@dataclass(slots=True)
class Judge:
    """Knows one graph.

    Attributes:
        table: Its values.
        position: The order of its nodes.
        sizes: Its inputs that are symbolic sizes, by their expression.
        answers: Why ops do not run kernels of their own, for arguments that were asked about.
        gives_away: Whether anything is given away.

    What a node looks like, and where it is kept, is asked of each node once.
    """

    table: ValueTable
    position: dict[Node, int]
    sizes: dict[Any, Node] = field(init=False)
    answers: dict[Any, str | None] = field(default_factory=dict)
    gives_away: bool = field(init=False)
    _looks: dict[Node, tuple[Any, tuple[int | None, ...]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        inputs = [node for node in self.position if node.op == "placeholder"]
        symbols = [node for node in inputs if isinstance(node.meta.get("val"), torch.SymInt)]
        self.sizes = {node.meta["val"].node.expr: node for node in symbols}
        donate = donate_op()
        self.gives_away = any(node.target is donate for node in self.position)

    def match(
        self, skeleton: Skeleton, arguments: tuple[Any, ...], values: tuple[Value, ...], fakes: tuple[Any, ...]
    ) -> Match:
        """The part of the graph that computes these values from these arguments.

        Raises:
            Refused: There is no such part, or it computes less than the op does.
        """
        inputs = {argument for argument in arguments if isinstance(argument, Node)}
        # What the graph computes as it is needs no turning: an IR op in it has the same output.
        turned = [(v, None) if self.table.nodes.get(v.core) else self.table.turned(v) for v in values]
        root = self.table.nodes[turned[skeleton.root_index][0].core]
        last = min(root, key=lambda node: self.position[node])
        inner = self._between([last], inputs, set())
        outputs = []
        for index, (value, _) in enumerate(turned):
            nodes = self.table.nodes.get(value.core, [])
            chosen = [last] if index == skeleton.root_index else [node for node in nodes if node in inner]
            if not chosen:  # not on the way to the root: any place that computes it
                chosen = [node for node in nodes if node not in inputs][:1]
            if not chosen and not self._is_dropped(value, inner):
                raise Refused(f"its output {index} is computed nowhere here, and would cost extra")
            outputs.append(tuple(chosen))
        ends = [node for nodes in outputs for node in nodes]
        if ends != [last]:
            inner = self._between(ends, inputs, inner)
        arguments = self._given_away(skeleton.op, arguments, inner)
        orders = tuple(order for _, order in turned)
        return Match(skeleton.op, arguments, tuple(outputs), values, fakes, frozenset(inner), orders)

    def _is_dropped(self, value: Value, inner: set[Node]) -> bool:
        """Whether an IR op among these nodes has this as an output that nobody takes: it is computed anyway."""
        found = (self.table.of.get(node) for node in inner if op_of(node.target) is not None)
        return any(isinstance(each, tuple) and value in each for each in found)

    def _given_away(self, op: IrOp, arguments: tuple[Any, ...], inner: set[Node]) -> tuple[Any, ...]:
        """The arguments; what the part gives away of what the op may overwrite, the op is given, too."""
        if not self.gives_away or not op.allow_inplace:
            return arguments
        read = (node for reader in inner for node in reader.all_input_nodes if node.target is donate_op())
        donated = {self.table.of[node]: node for node in read}
        return tuple(
            donated.get(self.table.of[argument], argument)
            if name in op.activations and isinstance(argument, Node)
            else argument
            for name, argument in zip(op.signature.parameters, arguments, strict=True)
        )

    def _between(self, outputs: Iterable[Node], inputs: set[Node], inner: set[Node]) -> set[Node]:
        """What computes the outputs from the inputs, or from equal values; `inner` of it is known."""
        values = self.table.of
        equal = {values[node] for node in inputs}
        wanted = set(outputs)
        todo = list(wanted)
        while todo:
            node = todo.pop()
            if node in inner or node in inputs:
                continue
            value = values.get(node)
            if isinstance(value, Number):  # a size is no tensor
                continue
            if node.op in ("placeholder", "output"):
                raise Refused(f"it also reads {node.name}")
            if isinstance(value, Value) and value in equal and node not in wanted:
                continue
            inner.add(node)
            todo += node.all_input_nodes
        return inner

    def reads_more(self, node: Node, cores: Collection[int]) -> bool:
        """Whether a node is computed of an input of the graph, on a way on which none of these cores lies."""
        seen: set[Node] = set()
        todo = list(node.all_input_nodes)
        while todo:
            each = todo.pop()
            value = self.table.of.get(each)
            if each in seen or isinstance(value, Number) or (isinstance(value, Value) and value.core in cores):
                continue
            if each.op == "placeholder":
                return True
            seen.add(each)
            todo += each.all_input_nodes
        return False

    def check(self, match: Match) -> None:
        """Raise unless the match may be replaced by the op.

        Raises:
            Refused: It may not; without a text where that is no miss.
        """
        ops = [node for node in match.inner if op_of(node.target) is not None]
        working = [node for node in match.inner if self._works(node)] if ops else []
        if len(working) == 1 and op_of(working[0].target) is not None:
            raise Refused  # it is that op already, or one with the same definition
        if len(ops) == 1 and op_of(ops[0].target)[0] is match.op:  # type: ignore[index]
            shown = self.table.of[ops[0]]
            if set(match.values) <= set(shown if isinstance(shown, tuple) else (shown,)):
                raise Refused  # else a definition that calls the op itself
        outputs = {node for nodes in match.outputs for node in nodes}
        outside = [
            (node, user)
            for node in match.inner
            if node not in outputs
            for user in node.users
            if user not in match.inner
        ]
        outside = [(node, user) for node, user in outside if not self._is_free(node, match)]
        if outside:
            node, user = min(outside, key=lambda pair: self.position[pair[0]])
            raise Refused(f"{node.name}, which it computes on the way, is also used by {user.name}")
        if not ops:
            self._check_widened(match)
        self._check_order(match)
        for nodes in match.outputs:
            self._check_returned(nodes)
        for nodes, fake, order in zip(match.outputs, match.fakes, match.orders, strict=True):
            for node in nodes:
                self._check_layout(node, fake, order)
        reason = self._why_not_the_op(match)
        if reason is not None:
            raise Refused(reason)

    def _why_not_the_op(self, match: Match) -> str | None:
        """Why the op would not run a kernel of its own for such arguments; asked once for arguments that look alike."""
        looks = list(map(self._look_of, match.arguments))
        storages = [storage for _, own in looks for storage in own]
        shared = tuple(map(storages.index, storages))
        key = (match.op.name, shared, *[look for look, _ in looks])
        if key not in self.answers:
            values = tuple(a.meta["val"] if isinstance(a, Node) else a for a in match.arguments)
            self.answers[key] = _why_not(match.op, values)
        return self.answers[key]

    def _look_of(self, argument: Any) -> tuple[Any, tuple[int | None, ...]]:
        """What of an argument a choice depends on, and its storage if it is a tensor; asked of each node once."""
        if not isinstance(argument, Node):
            return argument_key(argument, offsets=True), ()
        known = self._looks.get(argument)
        if known is None:
            value = argument.meta["val"]
            own = (storage_of(value),) if isinstance(value, torch.Tensor) else ()
            known = self._looks[argument] = argument_key(value, offsets=True), own
        return known

    def _check_widened(self, match: Match) -> None:
        """What plain torch widens on the way to a part is written to no memory; for an op alone it would be."""
        for name, argument in zip(match.op.signature.parameters, match.arguments, strict=True):
            if name in match.op.activations and isinstance(argument, Node) and match.inner.issuperset(argument.users):
                core = self.table.cores[self.table.of[argument].core]
                if core.target == CONVERT and core.dtype.itemsize > self.table.cores[core.args[0].core].dtype.itemsize:
                    raise Refused(f"{argument.name}, which it reads, is widened for it alone")

    def _works(self, node: Node) -> bool:
        """Whether a node computes anything: not if it takes one of several outputs, or only shows its input."""
        value = self.table.of.get(node)
        inputs = [self.table.of.get(each) for each in node.all_input_nodes]
        shown = isinstance(value, Value) and any(isinstance(v, Value) and v.core == value.core for v in inputs)
        return node.target is not operator.getitem and not shown

    def _is_free(self, node: Node, match: Match) -> bool:
        """Whether others may go on reading a node without computing anything twice: it only shows an input."""
        value = self.table.of.get(node)
        inputs = {self.table.of[a].core for a in match.arguments if isinstance(a, Node)}
        return isinstance(value, Value) and value.core in inputs

    def _check_order(self, match: Match) -> None:
        """No input may depend on an output, and nothing may be overwritten between."""
        outputs = {node for nodes in match.outputs for node in nodes}
        first = min(self.position[node] for node in match.inner)
        seen: set[Node] = set()
        todo = [argument for argument in match.arguments if isinstance(argument, Node)]
        while todo:
            node = todo.pop()
            if node in seen or self.position[node] < first:
                continue
            if node in outputs or node in match.inner:
                raise Refused(f"one of its inputs depends on {node.name}, which it computes")
            seen.add(node)
            todo += node.all_input_nodes
        if not self.table.writers:
            return
        last = max(self.position[node] for node in (*match.inner, *seen))
        # What the op is given instead of what was read here, or the other way round, is equal until one is overwritten.
        read = {each for node in match.inner for each in node.all_input_nodes} - match.inner
        given = {argument for argument in match.arguments if isinstance(argument, Node)}
        first = min((first, *(self.position[node] for node in read ^ given)))
        apart = any(len(nodes) > 1 for nodes in match.outputs)  # places that become one; so they must stay equal
        for node in self.table.writers:
            if first < self.position[node] and (apart or self.position[node] < last):
                raise Refused(f"{node.name} overwrites memory in between")

    def _check_returned(self, nodes: tuple[Node, ...]) -> None:
        """What becomes one tensor is not returned as two: who overwrites the one does not see the other change."""
        several = nodes if len(nodes) > 1 else ()
        returned = {storage_of(node.meta["val"]): node for node in several if _is_returned(node)}
        if len(returned) > 1:
            names = " and ".join(node.name for node in returned.values())
            raise Refused(f"{names} are returned, as tensors of their own")

    def _check_layout(self, node: Node, fake: torch.Tensor, order: tuple[int, ...] | None) -> None:
        value = node.meta["val"]
        if value.dtype != fake.dtype:
            raise Refused(f"{node.name} has dtype {value.dtype}, the op's output {fake.dtype}")
        shape, strides = tuple(value.shape), value.stride()
        if order is not None:
            if len(shape) == len(order):
                shape, strides = (tuple(numbers[dim] for dim in order) for numbers in (shape, strides))
            if not statically_known_true(sym_eq(shape, tuple(fake.shape))):
                raise Refused(f"{node.name} has another shape, and its dimensions another order")
        if not statically_known_true(sym_eq(strides, strides_for(shape))):
            raise Refused(f"{node.name} is not contiguous{'' if order is None else ' in the order of the op'}")
        if self.sizes_for(shape) is None and not statically_known_true(sym_eq(shape, tuple(fake.shape))):
            raise Refused(f"{node.name} has another shape, with a size that is no input of the graph")

    def sizes_for(self, shape: Iterable[Any]) -> list[Any] | None:
        """What a view into this shape is told; None where it would have to be told a size that nothing in the graph is.

        One such size follows from the others, if none of these can be zero.
        """
        sizes = [size if type(size) is int else self.sizes.get(size.node.expr, -1) for size in shape]
        follows = sizes.count(-1) == 1 and all(type(size) is int and size != 0 for size in sizes)
        return sizes if follows or -1 not in sizes else None


def _is_returned(node: Node) -> bool:
    """Whether a graph returns what a node computes, or a view of it."""
    todo = [node]
    for each in todo:
        for user in each.users:
            if user.op == "output":
                return True
            if each in effects_of(user).views and user not in todo:
                todo.append(user)
    return False


def _why_not(op: IrOp, values: tuple[Any, ...]) -> str | None:
    """Why an op would not run a kernel of its own for these arguments, or None."""
    domain = _outside_of_domain(op, values)
    if domain is not None:
        return f"outside of the op's domain: {domain}"
    try:
        decision = resolve(op, values, mode="inductor")
    except PredicateGuardError as error:  # of a call it would be an error; what no one called stays as it is
        return str(error)
    if decision.provider != NATIVE:
        return None
    refused = [c for c in decision.candidates if c.reason is not None and c.provider != NATIVE]
    reasons = "; ".join(f"{c.provider}: {c.reason}" for c in refused)
    return f"only native would run it{f' ({reasons})' if reasons else ''}"


def _outside_of_domain(op: IrOp, values: tuple[Any, ...]) -> str | None:
    """Why arguments are outside of what the op's kernels may be given, or None."""
    if isinstance(op.fuse, bool):
        return None
    domain = IrOpImpl(
        op,
        "domain",
        op.native,
        checks=op.fuse.checks(op.signature, op.tensors),
        predicates=op.fuse.predicates,
    )
    return why_not_now(domain, values)
