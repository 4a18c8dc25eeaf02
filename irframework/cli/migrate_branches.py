"""A function for one of two cases: an optional tensor is there, or is not.

Owns the folding of `is None` tests, how many values a function returns, and what it overwrites. An op returns the same
number of tensors at every call; a method that returns another number with a residual becomes two ops.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import libcst as cst

_TRUE, _FALSE = cst.Name("True"), cst.Name("False")


def specialised(body: Sequence[cst.BaseStatement], parameter: str, given: bool) -> list[cst.BaseStatement]:
    """The statements that are left where a parameter is a tensor, or None."""
    folded = cst.IndentedBlock(list(body)).visit(_Fold(parameter, given))
    return list(folded.body) if isinstance(folded, cst.IndentedBlock) else []


def values_returned(body: Sequence[cst.BaseStatement]) -> set[int | None]:
    """How many values each `return` gives: 1 for a single one, None where a call decides."""
    visitor = _Returns()
    for statement in body:
        statement.visit(visitor)
    return {_count(each) for each in visitor.found}


def returned_names(body: Sequence[cst.BaseStatement]) -> set[tuple[str, ...] | None]:
    """The names that each `return` gives; None for one that gives more than names."""
    visitor = _Returns()
    for statement in body:
        statement.visit(visitor)
    return {_names(each) for each in visitor.found}


def overwritten(body: Sequence[cst.BaseStatement], tensors: Sequence[str]) -> list[tuple[cst.CSTNode, str]]:
    """Where statements write to tensors that were given, and to which; one that is bound anew is no longer that."""
    visitor = _Writes(tensors)
    for statement in body:
        statement.visit(visitor)
    return [(node, name) for node, name in visitor.found if name not in visitor.bound]


class _Writes(cst.CSTVisitor):
    def __init__(self, tensors: Sequence[str]) -> None:
        self.tensors = tensors
        self.found: list[tuple[cst.CSTNode, str]] = []
        self.bound: set[str] = set()

    def _note(self, node: cst.CSTNode, target: cst.BaseExpression) -> None:
        if isinstance(target, cst.Name) and target.value in self.tensors:
            self.found.append((node, target.value))

    def visit_AugAssign(self, node: cst.AugAssign) -> None:  # noqa: N802 - libcst's name
        target = node.target
        self._note(node, target.value if isinstance(target, cst.Subscript) else target)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:  # noqa: N802 - libcst's name
        if isinstance(node.target, cst.Subscript):
            self._note(node, node.target.value)
        parts = node.target.elements if isinstance(node.target, cst.Tuple) else ()
        targets = [part.value for part in parts] if parts else [node.target]
        self.bound.update(each.value for each in targets if isinstance(each, cst.Name))

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802 - libcst's name
        called = node.func
        if isinstance(called, cst.Attribute) and re.fullmatch(r"[a-z]\w*[a-z0-9]_", called.attr.value):
            self._note(node, called.value)


def _names(value: cst.BaseExpression | None) -> tuple[str, ...] | None:
    parts = [part.value for part in value.elements] if isinstance(value, cst.Tuple) else [value]
    names = tuple(part.value for part in parts if isinstance(part, cst.Name) and part.value != "None")
    return names if len(names) == len(parts) else None


def _count(value: cst.BaseExpression | None) -> int | None:
    if isinstance(value, cst.Tuple):
        return len(value.elements)
    if isinstance(value, cst.IfExp):
        one, other = _count(value.body), _count(value.orelse)
        return one if one == other else -1
    return None if isinstance(value, cst.Call) else 1


class _Returns(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: list[cst.BaseExpression | None] = []

    def visit_Return(self, node: cst.Return) -> None:  # noqa: N802 - libcst's name
        self.found.append(node.value)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:  # noqa: N802 - libcst's name
        return False

    def visit_Lambda(self, node: cst.Lambda) -> bool:  # noqa: N802 - libcst's name
        return False


class _Fold(cst.CSTTransformer):
    """Folds tests of one parameter against None."""

    def __init__(self, parameter: str, given: bool) -> None:
        super().__init__()
        self.parameter = parameter
        self.given = given

    def leave_Comparison(  # noqa: N802 - libcst's name
        self, original_node: cst.Comparison, updated_node: cst.Comparison
    ) -> cst.BaseExpression:
        left, tests = original_node.left, original_node.comparisons
        if not (isinstance(left, cst.Name) and left.value == self.parameter and len(tests) == 1):
            return updated_node
        right = tests[0].comparator
        if not (isinstance(right, cst.Name) and right.value == "None"):
            return updated_node
        if isinstance(tests[0].operator, cst.Is):
            return _FALSE if self.given else _TRUE
        return (_TRUE if self.given else _FALSE) if isinstance(tests[0].operator, cst.IsNot) else updated_node

    def leave_UnaryOperation(  # noqa: N802 - libcst's name
        self, original_node: cst.UnaryOperation, updated_node: cst.UnaryOperation
    ) -> cst.BaseExpression:
        known = _constant(updated_node.expression)
        if isinstance(updated_node.operator, cst.Not) and known is not None:
            return _FALSE if known else _TRUE
        return updated_node

    def leave_BooleanOperation(  # noqa: N802 - libcst's name
        self, original_node: cst.BooleanOperation, updated_node: cst.BooleanOperation
    ) -> cst.BaseExpression:
        known = _constant(updated_node.left)
        if known is None:
            return updated_node
        decides = known is not isinstance(updated_node.operator, cst.And)
        return (_TRUE if known else _FALSE) if decides else updated_node.right

    def leave_IfExp(self, original_node: cst.IfExp, updated_node: cst.IfExp) -> cst.BaseExpression:  # noqa: N802
        known = _constant(updated_node.test)
        return updated_node if known is None else updated_node.body if known else updated_node.orelse

    def leave_If(  # noqa: N802 - libcst's name
        self, original_node: cst.If, updated_node: cst.If
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement] | cst.RemovalSentinel:
        known = _constant(updated_node.test)
        if known is None:
            return updated_node
        chosen = updated_node if known else updated_node.orelse
        if isinstance(chosen, cst.If) and not known:
            return chosen  # elif
        body = chosen.body if isinstance(chosen, (cst.If, cst.Else)) else None
        if not isinstance(body, cst.IndentedBlock) or not body.body:
            return cst.RemoveFromParent()
        return cst.FlattenSentinel(body.body)

    def leave_IndentedBlock(  # noqa: N802 - libcst's name
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.BaseSuite:
        kept: list[cst.BaseStatement] = []
        for statement in updated_node.body:
            kept.append(statement)
            if isinstance(statement, cst.SimpleStatementLine) and isinstance(
                statement.body[-1], (cst.Return, cst.Raise)
            ):
                break  # what stands behind is never reached
        return updated_node.with_changes(body=kept or [cst.parse_statement("pass\n")])


def _constant(node: cst.BaseExpression) -> bool | None:
    if isinstance(node, cst.Name) and node.value in ("True", "False"):
        return node.value == "True"
    return None
