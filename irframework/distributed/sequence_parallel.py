"""Sequence parallelism: between two collectives, every process works on its part of the tokens only.

Owns the pass. A sum over processes becomes a reduce-scatter, what works row by row behind it (norms, the residual sum,
quantisation) works on the rows of this process, and an all-gather stands before what needs all rows. The residual
stays divided from one layer to the next. Does not know which ops work row by row (`sharding.py`).

Every value is either whole or divided, and whoever needs the other form gets it, so that a rewritten graph is right
whatever part of it is rewritten. A *chain* is what hangs together by divided values; it is rewritten as a whole or not
at all: if that needs no more all-gathers than there are sums, or one more at its end.

All processes decide alike, since decisions rest on nothing but the graph, the sizes that are known in it, the size of
the group, and the setting. None of it is a rank, a time, or an example's value; the digest of a plan is logged.

Private torch API, read in 2.11 and 2.13: `torch._subclasses.fake_tensor.FakeTensor.fake_mode`.
"""

from __future__ import annotations

import hashlib
import logging
import operator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.library import Library

from irframework.compiler.report import MissedFusion, Report, source_line
from irframework.distributed.sharding import RowWise, Sum, as_row_wise, as_sum, lead
from irframework.ops.collectives import all_gather, group_named, group_sizes, reduce_scatter
from irframework.untraced import run_untraced

logger = logging.getLogger(__name__)

NAME = "sequence_parallel"
_KEPT_META = ("stack_trace", "nn_module_stack", "seq_nr", "fwd_nn_module_stack", "source_fn_stack", "custom")
_libraries: list[Library] = []


@dataclass(slots=True)
class Chain:
    """What hangs together by divided values.

    Attributes:
        group: The group's name.
        size: How many processes it has.
        sums: The sums over processes.
        steps: What works row by row, in order.
        read_whole: Values that somebody outside reads.
        cut: Whole values that it reads its rows of.
    """

    group: str
    size: int
    sums: dict[Node, Sum] = field(default_factory=dict)
    steps: dict[Node, RowWise] = field(default_factory=dict)
    read_whole: list[Node] = field(default_factory=list)
    cut: list[Node] = field(default_factory=list)

    def __contains__(self, node: Node) -> bool:
        return node in self.sums or node in self.steps

    def settle(self) -> None:
        """Leave out what is not worth it at the ends, and find what is read from outside."""
        self._measure()
        for node, step in reversed(list(self.steps.items())):
            if step.norms or any(user in self.steps for user in node.users):
                continue
            rows = [step.args[index] for index in step.rows]
            if all(each in self.read_whole for each in rows) or (len(rows) == 1 and _widens(rows[0], node)):
                del self.steps[node]  # its argument is there as a whole anyhow, or is less to gather
                self._measure()
        for node in list(self.sums):
            if not any(user in self.steps for user in node.users):
                del self.sums[node]
        self._measure()

    def _measure(self) -> None:
        self.read_whole = [
            node
            for node in (*self.sums, *self.steps)
            if isinstance(node.meta["val"], torch.Tensor) and any(user not in self.steps for user in node.users)
        ]
        cut = [step.args[index] for step in self.steps.values() for index in step.rows]
        self.cut = [node for node in dict.fromkeys(cut) if node not in self]

    def objection(self) -> str | None:
        """Why it is not worth rewriting; None if it is. The empty text: there is nothing to say about it."""
        if not self.sums or not any(step.norms for step in self.steps.values()):
            return ""
        allowed = len(self.sums) + (len(self.sums) > 1)
        if len(self.read_whole) > allowed:
            first = self.read_whole[0].name
            return (
                f"{len(self.read_whole)} values, {first} first, would have to be gathered for {len(self.sums)} sums "
                f"over processes; at most {allowed} are worth it"
            )
        return None


@dataclass(slots=True)
class Plan:
    """What is rewritten in a graph, and what is not.

    Attributes:
        chains: What is.
        missed: What is not, with reasons.
    """

    chains: list[Chain] = field(default_factory=list)
    missed: list[tuple[Node, str]] = field(default_factory=list)

    def digest(self) -> str:
        """A digest of the collectives that the plan makes, in their order: the same in all processes of a group."""
        made: list[tuple[Any, ...]] = []
        for chain in self.chains:
            made.append((chain.group, chain.size, len(chain.cut)))
            for node in (*chain.sums, *chain.read_whole):
                shape = tuple(map(str, node.meta["val"].shape))
                made.append(("sum" if node in chain.sums else "whole", shape, str(node.meta["val"].dtype)))
        return hashlib.sha256(repr(made).encode()).hexdigest()[:16]


def step_key(min_tokens: int) -> str:
    """The pass's part of the cache key. Graphs name groups, and what is made of them depends on their sizes."""
    return f"{min_tokens} {group_sizes()}"


def divide_sequences(graph: Graph, report: Report, min_tokens: int) -> None:
    """Rewrite an inference graph for sequence parallelism, in place.

    Args:
        graph: A post-grad graph of whole IR ops.
        report: Counts the sums over processes that became reduce-scatters, and says why others did not.
        min_tokens: Tensors with fewer rows are left alone.
    """
    made = plan(graph, min_tokens)
    for node, reason in made.missed:
        report.missed_fusions.append(MissedFusion(NAME, node.name, reason, source_line(node)))
    for chain in made.chains:
        _Writer(graph, chain).run()
    count = sum(len(chain.sums) for chain in made.chains)
    if count:
        report.fusions[NAME] = report.fusions.get(NAME, 0) + count
        logger.debug("sequence parallel: %d sums divided, plan %s", count, made.digest())


def plan(graph: Graph, min_tokens: int) -> Plan:
    """Decide what to rewrite, and change nothing."""
    found, sizes = Plan(), group_sizes()
    chain_of: dict[Node, Chain] = {}
    for node in graph.nodes:
        total = as_sum(node)
        if total is not None:
            reason = _objection_to(node, sizes.get(total.group), min_tokens)
            if reason is None:
                chain_of[node] = Chain(total.group, sizes[total.group], {node: total})
            elif reason and any(_norms(user) for user in node.users):
                found.missed.append((node, reason))
            continue
        step = as_row_wise(node)
        if step is not None:
            _join(node, step, chain_of)
    order = {node: number for number, node in enumerate(graph.nodes)}
    for chain in {id(chain): chain for chain in chain_of.values()}.values():
        chain.sums = dict(sorted(chain.sums.items(), key=lambda item: order[item[0]]))
        chain.steps = dict(sorted(chain.steps.items(), key=lambda item: order[item[0]]))
        first = next(iter(chain.sums))
        chain.settle()
        reason = chain.objection()
        if reason is None:
            found.chains.append(chain)
        elif reason:
            found.missed.append((first, reason))
    return found


def _objection_to(node: Node, size: int | None, min_tokens: int) -> str | None:
    """Why a sum cannot be divided; None if it can, the empty text if there is nothing to divide."""
    value = node.meta["val"]
    if size is None or size == 1 or not value.is_floating_point():
        return ""
    tokens = prod(lead(node))
    if not statically_known_true(tokens >= max(min_tokens, 1)):
        return f"{tokens} tokens are not known to be at least {max(min_tokens, 1)}"
    if not statically_known_true(tokens % size == 0):
        return f"{tokens} tokens are not known to be a multiple of the group's size, {size}"
    return None


def _widens(argument: Node, node: Node) -> bool:
    values = argument.meta["val"], node.meta["val"]
    return all(isinstance(v, torch.Tensor) for v in values) and values[0].element_size() < values[1].element_size()


def worth_a_look(graph: Graph) -> bool:
    """Whether a graph may hold a sum over processes."""
    return any(as_sum(node) is not None for node in graph.nodes)


def _norms(node: Node) -> bool:
    step = as_row_wise(node)
    return step is not None and step.norms


def _join(node: Node, step: RowWise, chain_of: dict[Node, Chain]) -> None:
    """Let a node work on divided rows if one of its arguments is divided; all arguments with rows have the same."""
    divided = [step.args[index] for index in step.rows if step.args[index] in chain_of]
    others = [arg for index, arg in enumerate(step.args) if index not in step.rows and isinstance(arg, Node)]
    if not divided or any(other in chain_of for other in others):
        return
    into = chain_of[divided[0]]
    for argument in divided[1:]:
        other = chain_of[argument]
        if other is not into and other.group == into.group:
            into.sums.update(other.sums)
            into.steps.update(other.steps)
            chain_of.update(dict.fromkeys((*other.sums, *other.steps), into))
    into.steps[node] = step
    chain_of[node] = into


@dataclass(slots=True)
class _Writer:
    """Rewrites one chain. What is read from outside is gathered as soon as it is there: later nodes may read it."""

    graph: Graph
    chain: Chain
    part: dict[Node, Node] = field(default_factory=dict)

    def run(self) -> None:
        chain = self.chain
        order = [node for node in self.graph.nodes if node in chain]
        for node in order:
            total = as_sum(node) if node in chain.sums else None  # read anew: its arguments may be others by now
            self.part[node] = self._step(node) if total is None else self._scatter(node, total)
            if node in chain.read_whole:
                self._gather(node)
        for node in reversed(order):
            begun: Any = node.args[0] if node.target is _WAIT else None
            self.graph.erase_node(node)
            if begun is not None:
                self.graph.erase_node(begun)

    def _scatter(self, node: Node, total: Sum) -> Node:
        args = (self._as_rows(total.of, node), self.chain.group, self.chain.size, 0, "sum")
        return self._call(reduce_scatter.torch_op, args, node)

    def _step(self, node: Node) -> Node:
        step = as_row_wise(node)
        assert step is not None
        args = list(step.args)
        for index in step.rows:
            args[index] = self._part_of(args[index], node)
        if step.target is None:
            first: Node = args[0]
            return first
        return self._call(step.target, tuple(args), node)

    def _part_of(self, value: Node, reader: Node) -> Node:
        if value not in self.part:
            args = (self._as_rows(value, reader), self.chain.group, self.chain.size)
            self.part[value] = self._call(own_rows(), args, reader)
        return self.part[value]

    def _gather(self, node: Node) -> None:
        """Give those outside the whole value."""
        value, part = node.meta["val"], self.part[node]
        coded = value.dtype in _CODES  # not all backends send such numbers
        if coded:
            part = self._call(_VIEW_DTYPE, (part, torch.uint8), node)
        whole = self._call(all_gather.torch_op, (part, self.chain.group, self.chain.size, 0), node)
        if coded:
            whole = self._call(_VIEW_DTYPE, (whole, value.dtype), node)
        if value.dim() != 2:
            shape = [size if type(size) is int else -1 for size in value.shape]  # at most one: see `has_rows`
            whole = self._call(_VIEW, (whole, shape), node)
        for user in list(node.users):
            if user not in self.chain.steps:
                user.replace_input_with(node, whole)

    def _as_rows(self, value: Node, before: Node) -> Node:
        val = value.meta["val"]
        if val.dim() == 2:
            return value
        if not val.is_contiguous():
            value = self._call(torch.ops.aten.clone.default, (value,), before, memory_format=torch.contiguous_format)
        return self._call(_VIEW, (value, [-1, val.shape[-1]]), before)

    def _call(self, target: Any, args: tuple[Any, ...], before: Node, **kwargs: Any) -> Node:
        with self.graph.inserting_before(before):
            new = self.graph.call_function(target, args, kwargs)
        new.meta.update({key: before.meta[key] for key in _KEPT_META if key in before.meta})
        values = map_arg(args, lambda node: node.meta["val"])
        if target is operator.getitem:
            new.meta["val"] = target(*values)
            return new
        with _mode_of(before), torch.no_grad():
            new.meta["val"] = target(*values, **kwargs)
        return new


_WAIT = torch.ops._c10d_functional.wait_tensor.default
_VIEW, _VIEW_DTYPE = torch.ops.aten.view.default, torch.ops.aten.view.dtype
_CODES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)


def _mode_of(node: Node) -> Any:
    value = node.meta["val"]
    return (value[0] if isinstance(value, (tuple, list)) else value).fake_mode


def own_rows() -> Any:
    """Define `irframework_distributed::own_rows(Tensor x, str group, int group_size) -> Tensor` once and return it.

    A copy of the rows of this process. Which these are is asked when it runs, so that all processes have one graph, and
    one compiled graph in a cache.
    """
    if not _libraries:
        library = Library("irframework_distributed", "FRAGMENT")
        library.define("own_rows(Tensor x, str group, int group_size) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

        def run(x: torch.Tensor, group: str, group_size: int) -> torch.Tensor:
            rows = x.shape[0] // group_size
            return x.narrow(0, rows * group_named("own_rows", group).rank(), rows).clone(
                memory_format=torch.contiguous_format
            )

        def fake(x: torch.Tensor, group: str, group_size: int) -> torch.Tensor:
            return x.new_empty((x.shape[0] // group_size, *x.shape[1:]))

        library.impl("own_rows", run_untraced(run), "CompositeExplicitAutograd")
        torch.library.register_fake("irframework_distributed::own_rows", fake, lib=library)
        _libraries.append(library)
    return torch.ops.irframework_distributed.own_rows.default
