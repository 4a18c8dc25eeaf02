"""Turns `maybe_inplace` into its functional form before autograd, and finds uses after donation.

Owns the decision what may be overwritten: it is taken here, on the graph as the user wrote it, because a later
simplification can turn a donated copy into the caller's own tensor. A donated graph input becomes
`default(donate(x), ..)`; a donated intermediate becomes a plain `default(x, ..)`, since the graph's own memory may be
reused anyway wherever that is proved. Does not reuse memory: `clones.py` does.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from irframework.compiler import guards
from irframework.compiler.aliasing import storage_of
from irframework.compiler.clones import donate_op
from irframework.compiler.frames import Frame, real_input
from irframework.compiler.overlap import disjoint_in_example
from irframework.compiler.report import Donation, Report, source_line
from irframework.errors import DonationError, use_after_donation
from irframework.execution import of_a_parameter
from irframework.op import IrOp
from irframework.torch_ops import op_of

# Torch functions and methods that may return a view and read nothing of what they are given.
_VIEWS_TEXT = (
    "alias as_strided bfloat16 chunk contiguous cpu cuda detach diagonal double dsplit expand expand_as "
    "flatten float getattr getitem __getitem__ half hsplit imag mH mT moveaxis movedim narrow permute ravel "
    "real reshape reshape_as select slice split split_with_sizes squeeze swapaxes swapdims t T tensor_split to "
    "transpose type type_as unbind unflatten unfold unsafe_chunk unsafe_split unsqueeze view view_as vsplit"
)
_VIEWS = frozenset(_VIEWS_TEXT.split())
# They look at sizes only.
_METADATA_TEXT = (
    "data_ptr device dim dtype element_size is_complex is_contiguous is_floating_point layout len __len__ ndim "
    "nelement numel requires_grad shape size storage_offset stride sym_numel sym_size sym_storage_offset "
    "sym_stride"
)
_METADATA = frozenset(_METADATA_TEXT.split())


def functionalize(graph: Graph, report: Report, *, donate_inputs: bool = True) -> None:
    """Rewrite every `maybe_inplace` node of a pre-grad graph; subgraphs too.

    Args:
        graph: A graph of torch functions, as Dynamo makes it, with `example_value` (or `val`) on its nodes.
        report: Gets what was donated.
        donate_inputs: False: graph inputs are never overwritten.

    Raises:
        DonationError: A tensor, or something that shares its memory, is used after it was donated.
    """
    _functionalize(graph, report, donate_inputs, Frame.current())


def donates(graph: Graph) -> bool:
    """Whether a graph, or one of its subgraphs, has a `maybe_inplace` node: else there is nothing to rewrite."""
    if any((found := op_of(node.target)) and found[1] for node in graph.nodes if node.op == "call_function"):
        return True
    return any(donates(module.graph) for module in _submodules(graph))


def _functionalize(graph: Graph, report: Report, donate_inputs: bool, frame: Frame | None) -> None:
    donated_inputs: list[Node] = []
    uses: _Uses | None = None
    for node in list(graph.nodes):
        found = op_of(node.target) if node.op == "call_function" else None
        if found is not None and found[1]:
            uses = uses or _Uses(graph, frame)
            donated_inputs += _rewrite(graph, node, found[0], uses, report, donate_inputs)
    if donated_inputs:
        guards.inputs_stay_apart(graph, donated_inputs)
    for module in _submodules(graph):
        # the body of a branch or checkpoint: what it is given belongs to the graph around it
        _functionalize(module.graph, report, False, None)
        module.recompile()


def _submodules(graph: Graph) -> Iterator[GraphModule]:
    owner = graph.owning_module
    for name in dict.fromkeys(node.target for node in graph.find_nodes(op="get_attr")):
        module = getattr(owner, str(name), None)
        if isinstance(module, GraphModule):
            yield module


def _rewrite(graph: Graph, node: Node, op: IrOp, uses: _Uses, report: Report, donate_inputs: bool) -> list[Node]:
    names = list(op.signature.parameters)
    arguments = list(op.bind(node.args, node.kwargs))
    inputs: list[Node] = []
    for index, name in enumerate(names):
        argument = arguments[index]
        if name not in op.activations or not isinstance(argument, Node):
            continue
        uses.check_not_used_later(node, op, name, argument)
        placeholder, reason = uses.donatable_input(node, argument) if donate_inputs else (None, "not donatable here")
        if placeholder is not None:
            with graph.inserting_before(node):
                arguments[index] = donation = graph.call_function(donate_op(), (argument,))
            donation.meta.update(argument.meta)
            donation.stack_trace = node.stack_trace
            _forget_identity(donation)
            inputs.append(placeholder)
        kind = "input" if placeholder is not None else ("kept" if reason else "intermediate")
        report.donated.append(Donation(op.name, name, argument.name, kind, reason))
    with graph.inserting_before(node):
        new = graph.call_function(op.torch_op, tuple(arguments))
    new.meta.update(node.meta)
    node.replace_all_uses_with(new)
    graph.erase_node(node)
    return inputs


def _forget_identity(donation: Node) -> None:
    """The donation is a new value: its fake tensor must not say that it is the argument."""
    for key in ("example_value", "val"):
        value = donation.meta.get(key)
        if isinstance(value, torch.Tensor):
            mode = getattr(value, "fake_mode", None)
            if mode is None:
                del donation.meta[key]
                continue
            with mode, torch.no_grad():
                donation.meta[key] = torch.empty_like(value)
    for key in ("grapharg", "unbacked_bindings"):  # what an input brings into the graph, a copy of it does not
        donation.meta.pop(key, None)


def _value(node: Node) -> object:
    return node.meta.get("example_value", node.meta.get("val"))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _name(node: Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.split("::")[1]
    return target if isinstance(target, str) else getattr(target, "__name__", "")


def _label(node: Node) -> str:
    """What the user calls a value: an input by its source, e.g. `x` or `self.scale`; other values by their node."""
    return guards.describe_input(node) if node.op == "placeholder" else node.name


def _may_write(node: Node) -> bool:
    """Could the node overwrite what it is given? (Only a hint, to be on the safe side.)"""
    if node.op == "call_module":
        return True
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.is_mutable
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    name = _name(node)
    in_place = name.endswith("_") and not name.startswith("__")
    augmented = name.startswith("i") and hasattr(operator, f"__{name}__")  # iadd, imul, ...
    return in_place or augmented or "out" in node.kwargs or name in ("setitem", "__setitem__")


@dataclass(frozen=True, slots=True)
class _Use:
    position: int
    node: Node
    through: Node


class _Uses:
    """Who touches which storage in a pre-grad graph, by position."""

    def __init__(self, graph: Graph, frame: Frame | None) -> None:
        self.position = {node: position for position, node in enumerate(graph.nodes)}
        self.inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.frame = frame
        self._returns = frame is None or frame.returns
        self._touches: dict[int, list[_Use]] = {}
        for node, position in self.position.items():
            for source in node.all_input_nodes:
                for tensor in _tensors(_value(source)):
                    storage = storage_of(tensor)
                    if storage is not None:
                        self._touches.setdefault(storage, []).append(_Use(position, node, source))

    def check_not_used_later(self, call: Node, op: IrOp, argument: str, donated: Node) -> None:
        value = _value(donated)
        storage = storage_of(value)
        if storage is None:
            return
        for use in self._touches.get(storage, ()):
            if use.position <= self.position[call] or self._only_looks(use, storage):
                continue
            if _apart(use, value) or (use.node.op == "output" and not self._returns):
                continue
            verb = "returned" if use.node.op == "output" else f"used by {_name(use.node)!r} (node {use.node.name})"
            through = "" if use.through is donated else f" through {_label(use.through)!r}, which shares its memory,"
            raise _used_later(call, op, argument, donated, f"{verb}{through}", source_line(use.node))
        frame = self.frame
        if frame is not None and self._returns and any(frame.holds(value, owner) for owner in self._owners(storage)):
            raise _used_later(call, op, argument, donated, "returned", frame.place)

    def _only_looks(self, use: _Use, storage: int) -> bool:
        name = _name(use.node)
        if use.node.op == "output":
            return False
        if name in _METADATA and not any(True for _ in _tensors(_value(use.node))):
            return True
        target = use.node.target
        if isinstance(target, torch._ops.OpOverload):
            viewing = any(item.alias_info is not None for item in target._schema.returns)
            return viewing and not target._schema.is_mutable
        results = list(_tensors(_value(use.node)))
        return name in _VIEWS and bool(results) and all(storage_of(result) == storage for result in results)

    def _owners(self, storage: int) -> list[Node]:
        return [p for p in self.inputs if any(storage_of(tensor) == storage for tensor in _tensors(_value(p)))]

    def donatable_input(self, call: Node, donated: Node) -> tuple[Node | None, str | None]:
        """The graph input that the donated value is (a view of), if it may be overwritten; else why it may not."""
        storage = storage_of(_value(donated))
        if storage is None:
            return None, "its storage is not known"
        owners = self._owners(storage)
        if not owners:
            return None, self._kept_for_a_break(donated, storage)
        owner = owners[0]
        value = _value(owner)
        if len(owners) > 1:
            return None, f"inputs {owners[0].name} and {owners[1].name} share memory"
        if not guards.has_source(owner):
            return None, "nothing would notice if another input came to share its memory"
        sharing = self.frame.argument_sharing(owner) if self.frame is not None else None
        if sharing is not None:
            return None, f"argument {sharing!r} shares the memory of {_label(owner)}"
        real = real_input(owner)  # a fake view does not know whose view it is
        if isinstance(value, torch.nn.Parameter) or (real is not None and of_a_parameter(real)):
            return None, f"{owner.name} is a parameter"
        if isinstance(value, torch.Tensor) and value.requires_grad:
            return None, f"{owner.name} requires a gradient"
        before = self.position[call]
        if any(use.position < before and _may_write(use.node) for use in self._touches.get(storage, ())):
            return None, f"{owner.name} is written before"
        if self.frame is not None and not self._returns and self.frame.holds(_value(donated), owner):
            return None, f"{_label(owner)} may be used after the graph break at {self.frame.place}"
        return owner, None

    def _kept_for_a_break(self, donated: Node, storage: int) -> str | None:
        """At a graph break, what a graph returns may be read by the code behind it, or only be asked for its size."""
        value = _value(donated)
        for use in self._touches.get(storage, ()):
            if self.frame is not None and not self._returns and use.node.op == "output" and not _apart(use, value):
                return f"{_label(use.through)} may be used after the graph break at {self.frame.place}"
        return None


def _apart(use: _Use, value: object) -> bool:
    """Whether a use of the value's storage touches none of its bytes."""
    touched = [tensor for tensor in _tensors(_value(use.through)) if storage_of(tensor) == storage_of(value)]
    return all(disjoint_in_example(tensor, value) for tensor in touched)


def _used_later(call: Node, op: IrOp, argument: str, donated: Node, how: str, place: str) -> DonationError:
    what, donated_at = repr(_label(donated)), source_line(call) or "unknown"
    return use_after_donation(what, op.name, argument, how, donated_at, place or "unknown")
