"""Fusion by definition: parts of a graph that compute what an op's native body computes become that op.

Owns the pass: which definitions are looked for, whether a candidate is the same function, whether it may be replaced,
and the replacement. Does not find candidates (`candidates.py`), number values (`values.py`), nor choose kernels: a
definition is matched only where dispatch chooses a provider other than native for it.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from irframework.compiler.argument_choices import arguments_of
from irframework.compiler.call_arguments import Value, number
from irframework.compiler.candidates import Binding, Search, TooManyWaysError
from irframework.compiler.collecting import uncollected
from irframework.compiler.definitions import Definitions, fake_mode_of, fresh, known_by_spelling
from irframework.compiler.fusable_ops import looked_for, skeletons_of, take_number
from irframework.compiler.ingredients import ingredients_of
from irframework.compiler.matches import Judge, Match, Refused
from irframework.compiler.places import Places
from irframework.compiler.report import RAISED, MissedFusion, Report, source_line
from irframework.compiler.skeletons import Skeleton
from irframework.compiler.tracing import fake_permuted, fake_reshaped, is_plainly_contiguous
from irframework.compiler.values import ValueTable
from irframework.torch_ops import op_of

_WAYS = 48  # that a candidate's tensors are tried in
_DIVIDING = frozenset({"irframework::all_gather", "irframework::reduce_scatter"})


def worth_a_look(graph: Graph) -> bool:
    """Whether any op can be fused, and the graph computes anything that a definition could contain."""
    return bool(looked_for()) and any(_is_pointwise(node.target) for node in graph.nodes)


def _is_pointwise(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def fuse(graph: Graph, report: Report) -> None:
    """Replace what computes a fused op's definition by that op, in place."""
    missed = len(report.missed_fusions)
    with uncollected():
        while _Fusion(graph, report).run():
            del report.missed_fusions[missed:]


@dataclass(frozen=True, slots=True)
class _Miss:
    size: int
    op: str
    node: Node
    reason: str


@dataclass(frozen=True, slots=True)
class _Computed:
    """What a definition returns for some arguments: as values of the graph, and as fake tensors of a trace."""

    values: tuple[Value, ...]
    fakes: tuple[torch.Tensor, ...]


@dataclass(slots=True)
class _Fusion:
    graph: Graph
    report: Report
    definitions: Definitions = field(default_factory=Definitions)
    misses: dict[Node, _Miss] = field(default_factory=dict)
    table: ValueTable = field(init=False)
    position: dict[Node, int] = field(init=False)
    judge: Judge = field(init=False)
    known: Places = field(init=False)
    places: dict[int, list[Node]] = field(default_factory=dict)
    shown: dict[int, set[int]] = field(default_factory=dict)
    computed: dict[Any, _Computed] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    no_calls: set[tuple[str, int]] = field(default_factory=set)
    moved: bool = False
    again: bool = False

    def __post_init__(self) -> None:
        self.table = ValueTable(self.definitions.expand)
        self.position = {node: index for index, node in enumerate(self.graph.nodes)}
        self.judge = Judge(self.table, self.position)
        self.known = Places(self.table)

    def run(self) -> bool:
        """Fuse; whether what reads an output whose dimensions were put back in order may now be found behind that."""
        self.table.read(self.graph)
        skeletons = _in_order(ingredients_of(self.table.cores))
        self.known.look_for(part for skeleton in skeletons for part in skeleton.parts.values())
        for node, value in self.table.of.items():
            if isinstance(value, Value):
                self.places.setdefault(self._shows(value), []).append(node)
        for skeleton in skeletons:
            self.sizes[skeleton.op.name] = max(skeleton.size, self.sizes.get(skeleton.op.name, 0))
        for skeleton in skeletons:
            self._look_for(skeleton)
        for node, miss in sorted(self.misses.items(), key=lambda item: self.position.get(item[0], 0)):
            if node in self.table.of:
                missed = MissedFusion(miss.op, node.name, miss.reason, source_line(node))
                self.report.missed_fusions.append(missed)
        if self.moved:
            _sort(self.graph)
        return self.again

    def _look_for(self, skeleton: Skeleton) -> None:
        part = skeleton.parts.get(skeleton.root)
        for core in self.known.of(part) if part is not None else ():
            if core not in self.places or not any(map(self.table.nodes.get, self.shown[core])):
                continue  # no node computes it, or none does any more
            if (skeleton.op.name, core) in self.no_calls:
                self._miss(
                    skeleton, core, "it is part of what would be this op, for arguments that the op does not take"
                )
                continue
            self.table.epoch = self.table.epochs[core]  # the definition is computed where the candidate stands
            search = Search(skeleton, self.table, self.known)
            tried: dict[tuple[Any, ...], bool] = {}
            try:
                for binding in search.at(core, functools.partial(self._is_it_already, skeleton, core)):
                    if self._try(skeleton, core, binding, tried):
                        break
            except TooManyWaysError:
                self._miss(skeleton, core, "it fits in too many ways; the search was given up")

    # --- is it the same function? ------------------------------------------------------------------------------

    def _shows(self, value: Value) -> int:
        """What a node that has this value computes, behind conversions, reshapes and broadcasts."""
        core = self.known.behind(value.core)
        self.shown.setdefault(core, set()).add(value.core)
        return core

    def _try(self, skeleton: Skeleton, core: int, binding: Binding, tried: dict[tuple[Any, ...], bool]) -> bool:
        """Replace a candidate by the op, if it is one; `tried` are arguments that were not, and whether they fit it."""
        if self._is_of_a_larger_op(skeleton, core, binding):
            return False
        reason, is_call = None, False
        ways = _WAYS if len(skeleton.op.registered) > 1 else 1  # what only native can run is no more than a miss
        for arguments in itertools.islice(arguments_of(skeleton, self.table, binding), ways):
            known = tried.get(arguments)
            if known is not None:
                is_call = is_call or known
                continue
            outputs = self._compute(skeleton, arguments)
            tried[arguments] = outputs is not None
            if outputs is None:
                continue
            is_call = True
            root, _ = self.table.turned(outputs.values[skeleton.root_index])
            if self.known.behind(root.core) != core or not self.table.nodes.get(root.core):
                continue
            try:
                match = self.judge.match(skeleton, arguments, outputs.values, outputs.fakes)
                self.judge.check(match)
                take_number(match)
            except Refused as refused:
                reason = str(refused) or reason
                if not str(refused):
                    return False
                continue
            self._replace(match)
            return True
        if not is_call:  # a norm times what is no weight is not raised as a norm without one either
            self.no_calls.update((skeleton.op.name, each) for each in binding.cores.values() if each != core)
        if reason is not None:
            self._miss(skeleton, core, reason)
        return False

    def _is_it_already(self, skeleton: Skeleton, core: int, binding: Binding) -> bool:
        """Whether a call of the op computes the root, of what was found, and takes all that the definition takes.

        In which roles does not matter: queries are turned as keys are, and the call turns both.
        """
        for shown in self.shown[core]:
            nodes = self.table.nodes.get(shown)
            if not nodes:
                continue
            node: Any = min(nodes, key=self.position.__getitem__)
            node = node.args[0] if node.target is operator.getitem else node
            found = op_of(node.target)
            if found is None or found[0] is not skeleton.op:
                return False
            given = skeleton.op.named(skeleton.op.bind(node.args, node.kwargs))
            values = {name: self.table.of.get(each) for name, each in given.items() if isinstance(each, Node)}
            if not values.keys() >= set(skeleton.tensors.values()):
                return False
            taken = {value.core for value in values.values() if isinstance(value, Value)}
            if any(taken.isdisjoint(each.core for each in possible) for possible in binding.tensors.values()):
                return False
            if any(number(given[name]) != each for name, each in binding.numbers.items()):
                return False
        return True

    def _compute(self, skeleton: Skeleton, arguments: Sequence[Any]) -> _Computed | None:
        """The definition's outputs for these very arguments; None where it takes no such arguments."""
        fakes = [argument.meta["val"] if isinstance(argument, Node) else argument for argument in arguments]
        expansion = self.definitions.expand(skeleton.op, fakes, None, skeleton.body)
        meant = expansion  # the op's own definition, also where a further spelling of it is looked for
        if expansion is not None and skeleton.body is not None and not known_by_spelling(skeleton.op):
            meant = self.definitions.expand(skeleton.op, fakes, None)
        if expansion is None or meant is None:
            return None
        given = [self.table.of[argument] if isinstance(argument, Node) else argument for argument in arguments]
        key = (id(expansion), self.table.epoch, *given)  # the numbers of one expansion are of the same arguments
        known = self.computed.get(key)
        if known is None:
            values = self.table.outputs(expansion, given)
            outputs: Any = meant.graph.output_node().args[0]  # a spelling may lay its outputs out otherwise
            returned = tuple(node.meta["val"] for node in outputs)
            known = self.computed[key] = _Computed(values if isinstance(values, tuple) else (values,), returned)
        return known

    def _miss(self, skeleton: Skeleton, core: int, reason: str) -> None:
        """Keep the largest miss at a place."""
        node = next((node for node in self.places[core] if node in self.table.of), None)
        if node is None or self._is_larger_op(node, skeleton.size):
            return
        known = self.misses.get(node)
        if known is None or known.size < skeleton.size:
            self.misses[node] = _Miss(skeleton.size, skeleton.op.name, node, reason)

    def _is_larger_op(self, node: Node, size: int) -> bool:
        """Whether a node shows what an IR op computes whose definition is no smaller."""
        shown = self.table.of[node]
        while node.op == "call_function" and op_of(node.target) is None and len(node.all_input_nodes) == 1:
            node = node.all_input_nodes[0]
            value = self.table.of[node]
            if isinstance(value, Value) and value.core != shown.core:  # several are what one of them is an item of
                return False
        found = op_of(node.target)
        return found is not None and size <= self.sizes.get(found[0].name, 0)

    def _is_of_a_larger_op(self, skeleton: Skeleton, core: int, binding: Binding) -> bool:
        """Whether a larger op computes this, of more than the candidate has: then it is neither a match nor a miss."""
        if binding.call is not None:
            return False
        nodes = [node for shown in self.shown[core] for node in self.table.nodes.get(shown, ())]
        if not all(self._is_larger_op(node, skeleton.size) for node in nodes):
            return False
        given = {*binding.cores.values()}.union(value.core for each in binding.tensors.values() for value in each)
        return all(self.judge.reads_more(node, given - {core}) for node in nodes)

    # --- the replacement ---------------------------------------------------------------------------------------

    def _replace(self, match: Match) -> None:
        outputs = [node for nodes in match.outputs for node in nodes]
        inputs = [argument for argument in match.arguments if isinstance(argument, Node)]
        behind = max((*inputs, *outputs), key=lambda node: self.position[node])
        place = self.position[behind]
        fresh: list[Node] = []
        with self.graph.inserting_after(behind):
            call = self.graph.call_function(match.op.torch_op, match.arguments)
        fakes = _fakes(match)
        call.meta["val"] = fakes[0] if match.op.num_outputs == 1 else fakes
        call.stack_trace = outputs[0].stack_trace
        call.meta[RAISED] = True
        fresh.append(call)
        results: list[Node] = [call]
        if match.op.num_outputs > 1:
            results = []
            for index in range(match.op.num_outputs):
                with self.graph.inserting_after(fresh[-1]):
                    item = self.graph.call_function(operator.getitem, (call, index))
                item.meta["val"] = fakes[index]
                fresh.append(item)
                results.append(item)
        for node in fresh:
            self.position[node] = place
        for result, value in zip(results, match.values, strict=True):
            self.table.set(result, value)
            self._shows(value)
        self.table.of[call] = match.values[0] if match.op.num_outputs == 1 else match.values
        for nodes, result, order in zip(match.outputs, results, match.orders, strict=True):
            if nodes and order is not None:
                readers = [user.target for node in nodes for user in node.users]
                self.again |= any(_is_pointwise(target) for target in readers)
                result = self._turned_back(result, nodes[0], order, fresh)
            for node in nodes:
                self._stand_in(result, node, fresh)
        self.moved = True
        self._erase(match.inner)
        self.report.fusions[match.op.name] = self.report.fusions.get(match.op.name, 0) + 1

    def _turned_back(self, result: Node, node: Node, order: tuple[int, ...], fresh: list[Node]) -> Node:
        """The output with its dimensions in the order of the node that computed it."""
        back = sorted(range(len(order)), key=order.__getitem__)
        with self.graph.inserting_after(fresh[-1]):
            view = self.graph.call_function(torch.ops.aten.permute.default, (result, back))
        mode = fake_mode_of((result.meta["val"],))
        assert mode is not None
        view.meta["val"] = fake_permuted(result.meta["val"], back, mode)
        self.position[view] = self.position[result]
        self.table.set(view, self.table.of[node])
        fresh.append(view)
        return view

    def _stand_in(self, result: Node, node: Node, fresh: list[Node]) -> None:
        """Let all readers of a node read the fused op's output, in the node's shape."""
        shape = node.meta["val"].shape
        if not statically_known_true(sym_eq(tuple(shape), tuple(result.meta["val"].shape))):
            with self.graph.inserting_after(fresh[-1]):
                sizes = self.judge.sizes_for(shape)
                view = self.graph.call_function(torch.ops.aten.view.default, (result, sizes))
            mode = fake_mode_of((node.meta["val"],))
            assert mode is not None
            view.meta["val"] = fake_reshaped(result.meta["val"], shape, mode)
            self.position[view] = self.position[result]
            self.table.set(view, self.table.of[node])
            fresh.append(view)
            result = view
        node.replace_all_uses_with(result)

    def _erase(self, inner: Iterable[Node]) -> None:
        for node in sorted(inner, key=lambda node: self.position[node], reverse=True):
            if not node.users:
                self.table.forget(node)
                self.graph.erase_node(node)


def _fakes(match: Match) -> tuple[torch.Tensor, ...]:
    """The outputs of a call of the op: contiguous, whatever the definition's are."""
    mode = fake_mode_of([a.meta["val"] for a in match.arguments if isinstance(a, Node)])  # the match's are of a trace
    assert mode is not None
    fakes = [fresh(value, mode) for value in match.fakes]
    if not all(map(is_plainly_contiguous, fakes)):
        with mode, torch.no_grad():
            fakes = [fake.contiguous() for fake in fakes]
    return tuple(fakes)


def _in_order(present: set[str]) -> list[Skeleton]:
    """All definitions that a graph with these ingredients can contain, the largest first, then by name.

    Those that divide tokens over processes come before all others: what is sent behind a product, or in front of one,
    takes longer than what any other op saves there.
    """
    found = [skeleton for op in looked_for() for skeleton in skeletons_of(op, present)]
    found = [skeleton for skeleton in found if skeleton.targets <= present]
    return sorted(found, key=lambda each: (each.targets.isdisjoint(_DIVIDING), -each.size, each.op.name))


def _sort(graph: Graph) -> None:
    """Order nodes so that each comes behind what it reads, and else as they are."""
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)
