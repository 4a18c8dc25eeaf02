"""Replaces IR ops in a graph by the implementations that dispatch chooses for them.

Owns the lowering pass: decide on fake tensors, trace once per distinct call, inline the trace, check what it returns.
Does not decide (`dispatch.py`), trace (`tracing.py`) or remove the copies it inserts (`clones.py`).

Private torch API, read in 2.11 and 2.13: `torch._higher_order_ops.auto_functionalize.auto_functionalized`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from irframework import bisecting, contract, symbolic
from irframework.compiler.aliasing import Aliasing, effects_of
from irframework.compiler.clones import KeptCopy, donate_op
from irframework.compiler.definitions import argument_key, fresh
from irframework.compiler.guards import new_guards_count
from irframework.compiler.inlining import Template, inline
from irframework.compiler.materialize import COPY, mark_copy
from irframework.compiler.report import RAISED, MissedFusion, Report, graph_number, location, source_line
from irframework.compiler.tracing import ClosedOverWriteError, fake_like, has_strides, is_contiguous, trace
from irframework.contract import Breach, described_call, titled
from irframework.dispatch import resolve
from irframework.errors import ImplementationContractError, IrError, LoweringError
from irframework.notices import say_once
from irframework.op import NATIVE, IrOp
from irframework.torch_ops import op_of

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl

_MAX_DEPTH = 32
_CHAIN = "irframework_chain"


@dataclass(slots=True)
class Lowering:
    """A pass that lowers the IR ops of a graph.

    Attributes:
        inplace: True lowers everything that is left, False leaves ops whose implementation works in place for later:
            until Inductor's simplifications have run, its copies are not safe from them.
        selected_impls: {op: {node: provider}} of what this pass lowered last.
    """

    inplace: bool
    selected_impls: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The pass's name in reports and in `IRFRAMEWORK_DISABLE_PASSES`."""
        return "lower_inplace" if self.inplace else "lower_functional"

    def __call__(self, graph: Graph, report: Report) -> None:
        """Lower `graph` in place.

        Raises:
            LoweringError: An implementation cannot be traced, or calls itself for ever.
            ImplementationContractError: It returns or overwrites what its op does not allow.
        """
        self.selected_impls = {}
        run = _Run(self, graph, report)
        for node in list(graph.nodes):
            if node.op == "call_function" and op_of(node.target) is not None:
                report.visiting = node
                run.lower(node)
        report.add_selected(self.selected_impls)


@dataclass(slots=True)
class _Run:
    """One run over one graph; templates are shared by the calls of this graph only."""

    settings: Lowering
    graph: Graph
    report: Report
    templates: dict[tuple[object, ...], Template] = field(default_factory=dict)

    def lower(self, node: Node) -> None:
        todo = [node]
        while todo:
            current = todo.pop()
            todo += reversed(self._lower_one(current))

    def _lower_one(self, node: Node) -> list[Node]:
        """Lower one node; return the IR ops that its implementation brought in."""
        found = op_of(node.target)
        assert found is not None
        op = found[0]
        arguments = op.bind(node.args, node.kwargs)
        values = _values(arguments)
        decision = resolve(op, values, mode="inductor")
        impl = _without_copies(decision.impl, op, arguments)
        if impl.inplace and not self.settings.inplace:
            return []
        if bisecting.active() and not bisecting.takes_number(decision.impl, self._place(node)):
            decision = resolve(op, values, mode="inductor")
            impl = _without_copies(decision.impl, op, arguments)
        if impl.inplace:
            arguments = self._contiguous_activations(node, op, arguments)
            values = _values(arguments)
        chain = self._extend_chain(node, op, decision.impl)
        try:
            template = self._template(op, impl, values, node)
            if impl.inplace and template.shows_kernels:
                impl = _without_copies(impl, op, arguments, seen=True)
                template = self._template(op, impl, values, node)
        except IrError as error:
            if not node.meta.get(RAISED):
                raise
            impl = self._as_it_was(op, impl, node, error)  # whoever wrote the model never asked for that op
            template = self._template(op, impl, values, node)
        name = self.report.add_decision(node.name, decision)
        self.settings.selected_impls.setdefault(op.name, {})[name] = impl.provider
        inserted = inline(self.graph, node, template, arguments)
        self.report.clones_inserted += sum(COPY in new.meta and new.target is _CLONE for new in inserted)
        nested = [new for new in inserted if new.op == "call_function" and op_of(new.target) is not None]
        for new in nested:
            new.meta[_CHAIN] = chain
        return nested

    def _template(self, op: IrOp, impl: IrOpImpl, values: tuple[Any, ...], node: Node) -> Template:
        key = (op.name, impl.provider, impl.inplace, *(argument_key(value, offsets=True) for value in values))
        template = self.templates.get(key)
        if template is None:
            template = self.templates[key] = _make_template(op, impl, values, node)
        return template

    def _as_it_was(self, op: IrOp, impl: IrOpImpl, node: Node, error: IrError) -> IrOpImpl:
        """What a fused op was made of: its definition, which computes the same."""
        say_once(
            logging.WARNING,
            (impl.name, str(error)),
            "%s cannot be lowered, so what was fused into op %s is not: %s",
            titled(impl),
            op.name,
            error,
        )
        reason = f"{impl.provider} cannot be lowered: {error}"
        self.report.take_back(MissedFusion(op.name, node.name, reason, source_line(node)))
        return op.registered[NATIVE]

    def _place(self, node: Node) -> bisecting.Lowered:
        return bisecting.Lowered(source_line(node), node.name, graph_number(), self.settings.name)

    def _contiguous_activations(self, node: Node, op: IrOp, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """An in-place implementation is given contiguous activations, as in eager mode.

        This copy stays: it becomes the output, and an output is contiguous whatever was given away.
        """
        changed = list(arguments)
        for index, name in enumerate(op.signature.parameters):
            argument = changed[index]
            if name not in op.activations or not isinstance(argument, Node):
                continue
            value = argument.meta["val"]
            if not is_contiguous(value):
                with self.graph.inserting_before(node):
                    copy = self.graph.call_function(_CLONE, (argument,), {"memory_format": torch.contiguous_format})
                with value.fake_mode, torch.no_grad():
                    copy.meta["val"] = torch.empty_like(value, memory_format=torch.contiguous_format)
                copy.stack_trace = node.stack_trace
                changed[index] = copy
                self.report.clones_inserted += 1
                reason = f"{argument.name} is not contiguous, and the output that takes its memory over must be"
                self.report.kept_copies.append(KeptCopy(copy.name, op.name, reason))
        return tuple(changed)

    def _extend_chain(self, node: Node, op: IrOp, impl: IrOpImpl) -> tuple[str, ...]:
        chain: tuple[str, ...] = (*node.meta.get(_CHAIN, ()), f"{op.name}:{impl.provider}")
        if len(chain) > _MAX_DEPTH:
            raise LoweringError(
                f"Implementations call each other without end: {' -> '.join(chain[-4:])} -> ... "
                f"Give one of these ops another provider, or let {impl.provider!r} ({impl.source}) call torch ops."
            )
        return chain


_CLONE = torch.ops.aten.clone.default


def _without_copies(impl: IrOpImpl, op: IrOp, arguments: tuple[Any, ...], seen: bool = False) -> IrOpImpl:
    """The functional form of an implementation, where its in-place form would work on copies only.

    Args:
        impl: The implementation.
        op: Its op.
        arguments: Those of the call.
        seen: Whether Inductor sees the kernels. What such a kernel overwrites of a graph's inputs it copies, given away
            or not, so half of the bytes are enough; it plans the memory of what the functional form returns.
    """
    if impl.functional is None:
        return impl
    given = zip(op.signature.parameters, arguments, strict=True)
    activations = [node for name, node in given if name in op.activations and isinstance(node, Node)]
    copied = [node for node in activations if _is_sure_to_be_copied(node, seen)]
    if not seen:
        return impl.functional if len(copied) == len(activations) else impl
    whole, part = (sum(_bytes(node.meta["val"]) for node in nodes) for nodes in (activations, copied))
    return impl.functional if statically_known_true(2 * part >= whole) else impl


def _bytes(value: torch.Tensor) -> Any:
    return value.numel() * value.dtype.itemsize


def _is_sure_to_be_copied(argument: Node, seen: bool) -> bool:
    """Whether a copy is certain: of memory of the caller's that was not given away, or of what is not contiguous.

    For kernels that Inductor sees, also of memory that was given away.
    """
    root = argument
    while sources := root.all_input_nodes if seen and root.target is donate_op() else effects_of(root).views:
        root = sources[0]
    value = argument.meta["val"]
    return root.op != "call_function" or not is_contiguous(value)


def _values(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    values: tuple[Any, ...] = map_arg(arguments, lambda argument: argument.meta["val"])
    return values


def _make_template(op: IrOp, impl: IrOpImpl, values: Sequence[Any], node: Node) -> Template:
    """Trace the implementation for these arguments and check what it does."""
    mode = _fake_mode(values, node)
    own = [fresh(value, mode) for value in values]
    guards = symbolic.guard_count(mode.shape_env)
    try:
        traced = trace(lambda *given: impl.apply(given), own, mode)
    except IrError:
        raise
    except ClosedOverWriteError as error:
        _Contract(op, impl, node).hold(contract.closed_over_write(f"calls {error}, which writes to"))
        raise
    except Exception as error:
        raise LoweringError(
            f"{titled(impl)} failed while being traced for {described_call(op, values)}: "
            f"{type(error).__name__}: {error}{location(node)}"
        ) from error
    rules = _Contract(op, impl, node)
    rules.check_guards(mode.shape_env, guards, values)
    rules.check_writes(traced.written)
    graph = traced.module.graph
    graph.eliminate_dead_code()
    aliasing = Aliasing(graph)
    outputs: tuple[Node, ...] = graph.output_node().args[0]  # type: ignore[assignment]
    expected = node.meta["val"]
    rules.check_count(len(outputs), expected, traced.is_tuple)
    for inner in graph.nodes:
        rules.check_effects(inner, aliasing)
        if inner.target is auto_functionalized:
            mark_copy(inner, op.name, impl.provider)
    wanted = expected if isinstance(expected, (tuple, list)) else (expected,)
    finished: list[Node] = []
    for index, (output, want) in enumerate(zip(outputs, wanted, strict=True)):
        finished.append(_finish_output(graph, aliasing, output, outputs[:index], rules, index, want, mode))
    graph.output_node().args = (tuple(finished),)
    return Template(traced.module, traced.dynamic, mode)


def _is_laid_out(got: torch.Tensor, want: torch.Tensor) -> bool:
    """Whether an output lies as the op's own does, which is contiguous. Of one size the two may write two formulas."""
    return has_strides(got, want.stride()) or is_contiguous(got)


def _finish_output(
    graph: Graph,
    aliasing: Aliasing,
    output: Node,
    before: Sequence[Node],
    rules: _Contract,
    index: int,
    want: torch.Tensor,
    mode: FakeTensorMode,
) -> Node:
    """Give an output the layout and the independence that its op promises."""
    got = output.meta["val"]
    rules.check_output(index, got, want)
    same_layout = _is_laid_out(got, want)
    # an in-place implementation returns memory that it was given, which may begin anywhere
    at_start = rules.impl.inplace or statically_known_true(got.storage_offset() == want.storage_offset())
    borrowed = [root for root in aliasing.roots(output) if root.op in ("placeholder", "get_attr")]
    twice = [number for number, other in enumerate(before) if aliasing.find(output) is aliasing.find(other)]
    if same_layout and at_start and not borrowed and not twice:
        return output
    rules.name_repairs(index, got, want, borrowed, twice)
    with graph.inserting_before(graph.output_node()):
        if same_layout and at_start:
            copy = graph.call_function(_CLONE, (output,))
            mark_copy(copy, rules.op.name, rules.impl.provider)
        else:  # unmarked: the copy is needed whoever owns the memory
            copy = graph.call_function(_CLONE, (output,), {"memory_format": torch.contiguous_format})
    copy.meta["val"] = fake_like(want, mode)
    return copy


def _fake_mode(values: Sequence[Any], node: Node) -> FakeTensorMode:
    results = node.meta["val"]
    for value in (*values, *(results if isinstance(results, (tuple, list)) else (results,))):
        if isinstance(value, FakeTensor):
            return value.fake_mode
    raise LoweringError(f"Node {node.name} has no fake tensors: run fake tensor propagation before lowering.")


@dataclass(frozen=True, slots=True)
class _Contract:
    """What an implementation must keep to, with the words to say so."""

    op: IrOp
    impl: IrOpImpl
    node: Node

    def _fail(self, what: str, advice: str) -> ImplementationContractError:
        return ImplementationContractError(f"{titled(self.impl)} {what}. {advice}{location(self.node)}")

    def hold(self, breach: Breach | None) -> None:
        """Raise if the contract is broken."""
        if breach is not None:
            raise self._fail(breach.what, breach.advice)

    def name_repairs(
        self, index: int, got: torch.Tensor, want: torch.Tensor, borrowed: Sequence[Node], twice: Sequence[int]
    ) -> None:
        """Say once why an output has to be copied."""
        if self.impl.provider == NATIVE:
            return
        breaches = [contract.sharing(index, f"output {number}") for number in twice]
        if not self.impl.inplace:  # the framework gave it that memory
            breaches += [contract.sharing(index, "an argument or a tensor that it closes over") for _ in borrowed[:1]]
        if not _is_laid_out(got, want):
            breaches.append(contract.strides(index, got, want.stride()))
        elif not breaches and not self.impl.inplace:
            breaches.append(contract.offset(index, got))
        for breach in breaches:
            key = (self.impl.name, index, breach.rule)
            say_once(logging.WARNING, key, "%s %s. %s", titled(self.impl), breach.what, breach.advice)

    def check_guards(self, environment: Any | None, before: int, values: Sequence[Any]) -> None:
        """What is traced should serve all sizes. Native may look at them: what it looks at is the op's own meaning."""
        guard = None if self.impl.provider == NATIVE else symbolic.size_guard(environment, before, tuple(values))
        if guard is None:
            return
        what = f"looks at a size that is symbolic here, which adds the guard {guard}"
        advice = "Let it look inside a custom op, which is not traced, or state by supports_args what it takes."
        if not new_guards_count(environment):
            raise self._fail(f"{what}, and nothing would compile again for sizes that break it", advice)
        say_once(
            logging.WARNING,
            (self.impl.name, guard),
            "%s %s: what is compiled serves some sizes only. %s",
            titled(self.impl),
            what,
            advice,
        )

    def check_writes(self, written: Sequence[int]) -> None:
        """Only an in-place implementation may write, and only to what a caller can give away."""
        names = list(self.op.signature.parameters)
        for index in written:
            self.hold(contract.write(self.impl, names[index]))

    def check_effects(self, node: Node, aliasing: Aliasing) -> None:
        """A trace must be functional: what it writes to could be anybody's."""
        if aliasing.effects[node].writes:
            raise self._fail(
                f"calls {node.target}, whose writes cannot be made functional",
                "Wrap the kernel in a custom op whose schema names what it mutates and which returns no alias.",
            )
        if node.target is auto_functionalized:
            target: Any = node.args[0]
            for argument in target._schema.arguments:
                value = node.kwargs.get(argument.name)
                if argument.alias_info is not None and isinstance(value, Node) and value.op == "get_attr":
                    self.hold(contract.closed_over_write(f"calls {target}, which writes to"))

    def check_count(self, count: int, expected: object, is_tuple: bool) -> None:
        """As many tensors as native returns, and a tuple exactly where native returns one."""
        wants_tuple = isinstance(expected, (tuple, list))
        wanted = len(expected) if isinstance(expected, (tuple, list)) else 1
        self.hold(contract.count(count, is_tuple, wanted, wants_tuple))

    def check_output(self, index: int, got: torch.Tensor, want: torch.Tensor) -> None:
        """Same dtype, device and shape as the op's fake implementation says."""
        same = got.dtype == want.dtype and got.device == want.device
        if not same or not symbolic.same_sizes(got.shape, want.shape):
            self.hold(contract.output(index, got, want))
