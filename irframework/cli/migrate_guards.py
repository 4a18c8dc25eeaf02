"""Which statements at the beginning of a method are conditions on its arguments, and become a predicate.

Owns the recognition. A condition may look at dtypes, ranks, strides, static sizes and numbers; one that looks at the
batch size or at values is left where it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from irframework.cli.migrate_source import FORWARDS, code, parameters, self_name, statements

_DEVICE = re.compile(r"\b\w+\.(is_cuda|is_cpu|is_xpu|device\b)")
_ALLOWED = re.compile(
    r"\.(dtype|ndim|dim\(\)|is_contiguous\(\)|stride\(-\d+\)|size\(-\d+\)|shape\[-\d+\]|requires_grad|is_floating_point\(\)"
    r"|element_size\(\)|layout)"
)
_SIMPLE_NODES = (cst.Name, cst.Comparison, cst.BooleanOperation, cst.UnaryOperation, cst.BinaryOperation)


@dataclass(frozen=True, slots=True)
class Guard:
    """A condition under which an implementation does not take a call.

    Attributes:
        rejected_if: The condition, as an expression; None if the framework checks it itself (devices).
        reason: What the call is told, as code of a string.
    """

    rejected_if: cst.BaseExpression | None
    reason: str


def split_guards(
    body: Sequence[cst.BaseStatement], tensors: Sequence[str], me: str
) -> tuple[list[Guard], list[cst.BaseStatement]]:
    """The guards at the beginning of a method, and the statements behind them.

    Args:
        body: The method's statements.
        tensors: Its parameters that are tensors, attributes as `self.weight`.
        me: What it calls its instance.
    """
    guards: list[Guard] = []
    kept: list[cst.BaseStatement] = []
    for index, statement in enumerate(body):
        if _is_import(statement):
            kept.append(statement)
            continue
        guard = _guard(statement, tensors, me)
        if guard is None:
            return guards, [*kept, *body[index:]]
        guards.append(guard)
    return guards, kept


def delegate(method: cst.FunctionDef) -> str | None:
    """The forward method that another one only calls, with its own arguments; None if it does more."""
    body = statements(method)
    last = body[0].body[0] if len(body) == 1 and isinstance(body[0], cst.SimpleStatementLine) else None
    if not isinstance(last, cst.Return) or not isinstance(last.value, cst.Call):
        return None
    called = code(last.value.func).removeprefix(f"{self_name(method)}.")
    passed = [(each.keyword.value if each.keyword else None, code(each.value)) for each in last.value.args]
    own = [parameter.name for parameter in parameters(method) or ()]
    same = [value for _, value in passed] == own and all(keyword in (None, value) for keyword, value in passed)
    return called if same and called in ("forward_native", *FORWARDS) else None


def forwards_called(body: Sequence[cst.BaseStatement]) -> set[str]:
    """The forward methods of platforms that statements call."""
    text = cst.Module(list(body)).code  # type: ignore[arg-type]
    return {name for name in FORWARDS if re.search(rf"\.{name}\(", text)}


def asserts_in(statements: Sequence[cst.BaseStatement]) -> list[cst.Assert]:
    """All assertions in statements."""
    visitor = _Asserts()
    for statement in statements:
        statement.visit(visitor)
    return visitor.found


def _guard(statement: cst.BaseStatement, tensors: Sequence[str], me: str) -> Guard | None:
    if isinstance(statement, cst.SimpleStatementLine) and len(statement.body) == 1:
        only = statement.body[0]
        if isinstance(only, cst.Assert):
            return _made(negated(only.test), only.msg, tensors, f"needs {_plain(only.test, me)}")
    if isinstance(statement, cst.If) and statement.orelse is None and isinstance(statement.body, cst.IndentedBlock):
        lines = statement.body.body
        last = lines[0].body[0] if len(lines) == 1 and isinstance(lines[0], cst.SimpleStatementLine) else None
        if isinstance(last, cst.Raise) and last.exc is not None:
            message = last.exc.args[0].value if isinstance(last.exc, cst.Call) and last.exc.args else None
            return _made(statement.test, message, tensors, f"not for {_plain(statement.test, me)}")
        others = {f"{me}.{name}" for name in ("forward_native", *FORWARDS)}
        if isinstance(last, cst.Return) and isinstance(last.value, cst.Call) and code(last.value.func) in others:
            return _made(statement.test, None, tensors, f"not for {_plain(statement.test, me)}")
    return None


def _made(
    condition: cst.BaseExpression, message: cst.BaseExpression | None, tensors: Sequence[str], reason: str
) -> Guard | None:
    text = code(condition)
    if not _looks_at_what_predicates_may(text, tensors):
        return None
    plain = message is not None and isinstance(message, (cst.SimpleString, cst.ConcatenatedString))
    return Guard(
        None if _DEVICE.search(text) else condition,
        code(message) if message is not None and plain else json.dumps(reason),
    )


def _looks_at_what_predicates_may(text: str, tensors: Sequence[str]) -> bool:
    """Whether every tensor in a condition is only asked for what a predicate may see."""
    left = text
    for tensor in sorted(tensors, key=len, reverse=True):
        name = re.escape(tensor)
        left = re.sub(rf"(?<![\w.]){name}\.(is_cuda|is_cpu|is_xpu|device(\.type)?)\b", "0", left)
        left = re.sub(rf"(?<![\w.]){name} is (not )?None", "0", left)
        left = re.sub(rf"(?<![\w.]){name}{_ALLOWED.pattern}", "0", left)
        if re.search(rf"(?<![\w.]){name}\b", left):
            return False
    calls = re.findall(r"([\w.]+)\(", left)
    return all(call in ("isinstance", "len", "int", "and", "or", "not", "in", "is") for call in calls)


def negated(test: cst.BaseExpression) -> cst.BaseExpression:
    """An expression that is true when the other is not."""
    if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
        return test.expression
    if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
        opposite = _OPPOSITES.get(type(test.comparisons[0].operator))
        if opposite is not None:
            target = test.comparisons[0].with_changes(operator=opposite())
            return test.with_changes(comparisons=[target], lpar=(), rpar=())
    return cst.parse_expression(f"not ({code(test)})")


_OPPOSITES: dict[type, type] = {
    cst.In: cst.NotIn,
    cst.NotIn: cst.In,
    cst.Equal: cst.NotEqual,
    cst.NotEqual: cst.Equal,
    cst.Is: cst.IsNot,
    cst.IsNot: cst.Is,
    cst.LessThan: cst.GreaterThanEqual,
    cst.GreaterThan: cst.LessThanEqual,
    cst.LessThanEqual: cst.GreaterThan,
    cst.GreaterThanEqual: cst.LessThan,
}


def _plain(test: cst.BaseExpression, me: str) -> str:
    """A condition in the words of the op: attributes are its parameters."""
    return re.sub(rf"\b{me}\.", "", code(test))


def _is_import(statement: cst.BaseStatement) -> bool:
    return isinstance(statement, cst.SimpleStatementLine) and all(
        isinstance(part, (cst.Import, cst.ImportFrom)) for part in statement.body
    )


class _Asserts(cst.CSTVisitor):
    def __init__(self) -> None:
        self.found: list[cst.Assert] = []

    def visit_Assert(self, node: cst.Assert) -> None:  # noqa: N802 - libcst's name
        self.found.append(node)


class ErrorsForAsserts(cst.CSTTransformer):
    """Turns `assert test, message` into `if not test: raise ArgumentError(message)`."""

    def leave_SimpleStatementLine(  # noqa: D102, N802 - libcst's name
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement:
        only = updated_node.body[0]
        if len(updated_node.body) != 1 or not isinstance(only, cst.Assert):
            return updated_node
        message = code(only.msg) if only.msg is not None else json.dumps(f"{code(only.test)} does not hold")
        return cst.parse_statement(f"if {code(negated(only.test))}:\n    raise ArgumentError({message})\n")
