"""Takes away the copies that are proved needless.

Owns the proof, and what becomes of `donate` nodes. Does not make the copies (`materialize.py`, `lowering.py`), nor
decide what the caller gave away: `functionalize.py` did, on the graph as the user wrote it, and left `donate` nodes.

The proof, for a copy c of a value s. Let w be the first write to anything that may share memory with c. The copy is
needless if
* s has the copy's sizes and strides, also its offset where a view counts from the start of the memory, and is made
  only of memory that the graph allocated (or that was donated);
* nothing that may share memory with s is written after c;
* nothing that may share memory with s is read at w or later, being returned included; values that are proved to
  share no element with s do not count;
* what reads before w is certainly done by then, since a compiler may postpone a computation to where it is needed.
If there is no w, the last rule is replaced by: not both c and s are returned, and s is no input if c is returned.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from irframework.compiler.aliasing import Access, Aliasing, effects_of, stand_in
from irframework.compiler.materialize import COPY
from irframework.compiler.overlap import disjoint
from irframework.compiler.tracing import is_contiguous
from irframework.torch_ops import define_donate

if TYPE_CHECKING:
    from irframework.compiler.report import Report

GRANTED = "irframework_granted"

_MAX_READERS = 256
_aten = torch.ops.aten
_MATRIX_PRODUCTS = (_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default)
_CLONE = _aten.clone.default
_AS_STRIDED = _aten.as_strided.default


def donate_op() -> torch._ops.OpOverload:
    """`irframework::donate`: a copy of its argument, which is dead afterwards."""
    op: torch._ops.OpOverload = define_donate()
    return op


@dataclass(frozen=True, slots=True)
class KeptCopy:
    """A copy that stays, and why."""

    node: str
    op: str
    reason: str


def remove_copies(graph: Graph, report: Report, inference: bool) -> None:
    """Remove every marked copy and every `donate` node that is proved needless.

    Args:
        graph: A lowered graph with fake values.
        report: Gets the counts, and the reason for each copy that stays.
        inference: False keeps all graph inputs as they are: autograd may still read them.
    """
    copies = [n for n in graph.nodes if n.op == "call_function" and n.target is _CLONE and COPY in n.meta]
    donations = list(graph.find_nodes(op="call_function", target=donate_op()))
    if not copies and not donations:
        return
    remover = _Remover(graph, Aliasing(graph))
    for copy in copies:
        report.visiting = copy
        reason = remover.reason_to_keep(copy, granted=False)
        if reason is None:
            remover.remove(copy)
            report.clones_removed += 1
        else:
            report.kept_copies.append(KeptCopy(copy.name, copy.meta[COPY][0], reason))
    for donation in donations:  # after the copies: until then, a donated value counts as memory of the graph
        source = donation.args[0]
        assert isinstance(source, Node)
        report.visiting = donation
        reason = remover.reason_to_keep(donation, granted=inference)
        if reason is None:
            for root in remover.aliasing.roots(source):
                root.meta[GRANTED] = True
            remover.remove(donation)
        else:
            report.kept_copies.append(KeptCopy(donation.name, "donate", reason))


def settle_donations(graph: Graph) -> None:
    """Make every donation that nothing used the copy that it means."""
    for donation in graph.find_nodes(op="call_function", target=donate_op()):
        with graph.inserting_before(donation):
            copy = graph.call_function(_CLONE, donation.args)
        copy.meta.update(donation.meta)
        donation.replace_all_uses_with(copy)
        graph.erase_node(donation)


@dataclass(slots=True)
class _Remover:
    graph: Graph
    aliasing: Aliasing

    def remove(self, copy: Node) -> None:
        source = copy.args[0]
        assert isinstance(source, Node)
        self.aliasing.merge(copy, source)
        self.aliasing.effects[copy].views = [source]  # what was found to be a view of the copy is one of the source
        stand_in(source, copy.meta["val"], copy)
        self.graph.erase_node(copy)

    def reason_to_keep(self, copy: Node, granted: bool) -> str | None:
        """None if the copy is proved needless; else what stands against it."""
        aliasing = self.aliasing
        source = copy.args[0]
        assert isinstance(source, Node)
        if not _same_layout(copy, source):
            return f"{source.name} has another layout"
        if reason := self._reason_by_place(copy, source):
            return reason
        here = aliasing.position[copy]
        writes = [access.position for access in aliasing.writes(copy) if access.position > here]
        overwriting = [a for a in self._overlapping(aliasing.writes(source), source) if a.position > here]
        if overwriting:
            return f"{source.name} is written later by {_first(overwriting).node.name}"
        if not writes:
            return self._reason_if_only_read(copy, source)
        if reason := self._reason_not_owned(source, granted):
            return reason
        first = min(writes)
        late = [access for access in self._overlapping(aliasing.reads(source), source) if access.position >= first]
        if late:
            reader = _first(late)
            verb = "returned" if reader.node.op == "output" else f"read later by {reader.node.name}"
            through = "" if reader.through is source else f" through {reader.through.name}"
            return f"{source.name} is {verb}{through}"
        for access in self._overlapping(aliasing.reads(source), source):
            if access.node is not copy and access.position < first and not self._is_done_by(access.node, first):
                return f"{source.name} is read by {access.node.name}, which may be computed only when it is needed"
        if not self._lies_in_memory(source):
            return f"{source.name} is a view that the compiler may have to copy"
        return None

    def _lies_in_memory(self, source: Node) -> bool:
        """Whether Inductor can give a kernel the very memory of the source, not a copy of it.

        It can for a value that is no view. A view must be contiguous at every step, of a value that is in memory when
        the view is made: of what was not computed yet it makes an expression, which it may have to copy.
        """
        effects = self.aliasing.effects
        root, view = source, None
        while effects[root].views:
            if root.target not in (_CLONE, donate_op()):  # not a copy that was removed
                if not _is_contiguous(root):
                    return False
                view = root
            root = effects[root].views[0]
        if view is None or root.op == "placeholder" or _computes_now(root):
            return True
        made = self.aliasing.position[view]
        return any(access.position < made for access in self.aliasing.writes(root))

    def _is_done_by(self, reader: Node, when: int) -> bool:
        """Whether an earlier reader has certainly read by then.

        Inductor computes pointwise nodes where their values are needed, and registers an overwriting kernel before
        the readers that it postponed. A reader is done if it is a call of its own (`_computes_now`), if such a call
        takes its value in time, or if all its users are done.
        """
        position = self.aliasing.position
        todo, seen = [reader], {reader}
        while todo:
            node = todo.pop()
            if _computes_now(node) or self._is_taken_by(node, when):
                continue
            for user in node.users:
                if position.get(user, when) >= when and not (position.get(user) == when and _computes_now(user)):
                    return False
                if user not in seen:
                    seen.add(user)
                    todo.append(user)
            if len(seen) > _MAX_READERS:
                return False
        return True

    def _is_taken_by(self, node: Node, when: int) -> bool:
        """Whether a call that needs its arguments in memory takes the node, or a view of it, by then."""
        position = self.aliasing.position
        for user in node.users:
            if position.get(user, when + 1) > when:
                continue
            if _computes_now(user) or (effects_of(user).views and self._is_taken_by(user, when)):
                return True
        return False

    def _reason_by_place(self, copy: Node, source: Node) -> str | None:
        """The copy starts where its memory starts; what counts from there needs the source to do so as well."""
        if statically_known_true(source.meta["val"].storage_offset() == copy.meta["val"].storage_offset()):
            return None
        for member in self.aliasing.members(copy):
            if member.target is _AS_STRIDED and _argument(member, 3, "storage_offset") is not None:
                return f"{member.name} counts from the start of the memory, where {source.name} does not lie"
        return None

    def _reason_if_only_read(self, copy: Node, source: Node) -> str | None:
        if not self._returned(copy):
            return None
        if self._returned(source):
            return f"{source.name} and the copy are both returned"
        if any(member.op in ("placeholder", "get_attr") for member in self.aliasing.members(source)):
            return f"{source.name} is an input and the copy is returned"
        return None

    def _reason_not_owned(self, source: Node, granted: bool) -> str | None:
        """May the source be overwritten at all?"""
        outside = [m for m in self.aliasing.members(source) if m.op in ("placeholder", "get_attr")]
        for member in outside:
            if member.op == "get_attr" or not granted:
                return f"{member.name} belongs to the caller"
        if len(outside) > 1:
            return f"{outside[0].name} and {outside[1].name} share memory"
        return None

    def _returned(self, node: Node) -> bool:
        return any(access.node.op == "output" for access in self.aliasing.reads(node))

    def _overlapping(self, accesses: Iterable[Access], source: Node) -> list[Access]:
        value = source.meta.get("val")
        return [access for access in accesses if not disjoint(access.through.meta.get("val"), value)]


def _first(accesses: list[Access]) -> Access:
    return min(accesses, key=lambda access: access.position)


def _argument(node: Node, index: int, name: str) -> object:
    return node.args[index] if index < len(node.args) else node.kwargs.get(name)


def _is_contiguous(node: Node) -> bool:
    values = node.meta["val"]
    return all(is_contiguous(value) for value in (values if isinstance(values, (list, tuple)) else (values,)))


def _computes_now(node: Node) -> bool:
    """Whether Inductor makes a kernel call of its own out of the node, whose arguments lie in memory."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace not in ("aten", "prims", "inductor") or target in _MATRIX_PRODUCTS


def _same_layout(copy: Node, source: Node) -> bool:
    a, b = copy.meta["val"], source.meta["val"]
    if a.dtype != b.dtype or a.device != b.device or len(a.shape) != len(b.shape):
        return False
    return bool(
        statically_known_true(sym_eq(tuple(a.shape), tuple(b.shape)))
        and statically_known_true(sym_eq(tuple(a.stride()), tuple(b.stride())))
    )
