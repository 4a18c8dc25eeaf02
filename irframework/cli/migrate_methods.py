"""A method as a function: what it reads from its instance becomes parameters.

Owns the rewriting of one method, with those that it calls. Does not own which of them become what
(`migrate_classes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import libcst as cst

from irframework.cli.migrate_source import (
    FORWARDS,
    Layer,
    SourceFile,
    code,
    is_static,
    parameters,
    self_name,
    statements,
)

_TAKEN = ("self", "torch", "tuple", "len", "str", "float", "int", "bool", "Exception")
_MODULE_ATTRIBUTES = {"training": "bool"}


@dataclass(frozen=True, slots=True)
class Untranslated:
    """Something that is left to a person."""

    line: int
    what: str


@dataclass(slots=True)
class Rewriting:
    """What is found while the methods of one class are rewritten.

    Attributes:
        source: The file.
        layer: The class.
        op: The name of its op.
        implementation: The name of the function that a `forward_<platform>` becomes.
        attributes: Attributes that became parameters, with their annotations, in order.
        helpers: Other methods that became functions: their code, in the order of definition.
        problems: What could not be rewritten.
        dropped: The parameter that is always None here, and that the op does not have.
        taken: Names that have a meaning inside the methods.
    """

    source: SourceFile
    layer: Layer
    op: str
    implementation: Callable[[str], str]
    attributes: dict[str, str] = field(default_factory=dict)
    helpers: dict[str, str] = field(default_factory=dict)
    problems: list[Untranslated] = field(default_factory=list)
    dropped: str | None = None
    _needs: dict[str, tuple[str, ...]] = field(default_factory=dict)
    taken: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        names: set[str] = set()
        each: Layer | None = self.layer
        while each is not None:
            for method in each.methods.values():
                if method.name.value != "__init__":
                    names |= {parameter.name for parameter in parameters(method) or ()} | locals_of([method])
            each = each.parent
        self.taken = frozenset(names)

    def parameter(self, attribute: str) -> str:
        """The parameter that an attribute becomes."""
        name = attribute.strip("_") or attribute
        return f"own_{name}" if name in self.taken or name in _TAKEN else name

    def rewrite(self, function: cst.FunctionDef, body: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement]:
        """Statements of a method, without the instance. Problems and attributes are noted."""
        rewriter = _WithoutInstance(self, self_name(function))
        found: list[cst.BaseStatement] = []
        for statement in body:
            changed = statement.visit(rewriter)
            if isinstance(changed, cst.BaseStatement):
                found.append(changed)
        return found

    def problem(self, node: cst.CSTNode, what: str) -> None:
        """Note what could not be rewritten."""
        self.problems.append(Untranslated(self.source.line(node), what))

    def needs(self, name: str) -> tuple[str, ...]:
        """The attributes that a method of the class needs; its function is written at the first question."""
        if name not in self._needs:
            self._needs[name] = ()  # one that calls itself
            method = self.layer.method(name)
            if method is not None:
                self._needs[name] = self._write_helper(name, method)
        return self._needs[name]

    def _write_helper(self, name: str, method: cst.FunctionDef) -> tuple[str, ...]:
        outer, self.attributes = self.attributes, {}
        given = parameters(method)
        if given is None:
            self.problem(method, f"{name} takes *args or **kwargs")
        body = self.rewrite(method, statements(method))
        own, self.attributes = self.attributes, {**outer, **self.attributes}
        required = [p.name for p in given or () if p.default is None]
        optional = [f"{p.name}={p.default}" for p in given or () if p.default is not None]
        inner = [self.parameter(attribute) for attribute in own]
        header = f"def {self.helper(name)}({', '.join([*required, *inner, *optional])}):\n"
        self.helpers[name] = header + block(body)
        if _ALL in self.helpers[name]:
            self.problem(method, f"{name} calls a forward method, and is called by one")
        return tuple(own)

    def helper(self, name: str) -> str:
        """The name of the function that a method becomes."""
        return f"_{self.op}_{name.strip('_')}"


def block(body: Sequence[cst.BaseStatement]) -> str:
    """Statements, indented by four."""
    return cst.Module([]).code_for_node(cst.IndentedBlock(list(body))).lstrip("\n") if body else "    pass\n"


class _WithoutInstance(cst.CSTTransformer):
    """Puts parameters in the place of attributes, and functions in that of methods."""

    def __init__(self, rewriting: Rewriting, me: str) -> None:
        super().__init__()
        self.rewriting = rewriting
        self.me = me
        self.handled: set[cst.CSTNode] = set()

    def visit_Attribute(self, node: cst.Attribute) -> None:  # noqa: N802 - libcst's name
        if isinstance(node.value, cst.Name) and node.value.value == self.me:
            self.handled.add(node.value)

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802 - libcst's name
        if self._of_instance(node.func) is not None:
            self.handled.add(node.func)
        if code(node.func) == "super":
            self.rewriting.problem(node, "super() stands for a base class")

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802 - libcst's name
        for each in node.targets:
            self._written(each.target)

    def visit_AugAssign(self, node: cst.AugAssign) -> None:  # noqa: N802 - libcst's name
        self._written(node.target)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:  # noqa: N802 - libcst's name
        self._written(node.target)

    def _written(self, target: cst.BaseExpression) -> None:
        name = self._of_instance(target)
        if name is not None:
            self.rewriting.problem(target, f"self.{name} is written: an op keeps nothing between calls")

    def _of_instance(self, node: cst.CSTNode) -> str | None:
        if isinstance(node, cst.Attribute) and isinstance(node.value, cst.Name) and node.value.value == self.me:
            return node.attr.value if self.me else None
        return None

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:  # noqa: N802
        if self.me and original_node.value == self.me and original_node not in self.handled:
            self.rewriting.problem(original_node, "self is handed on whole")
        return updated_node

    def leave_Attribute(  # noqa: N802 - libcst's name
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        name = self._of_instance(original_node)
        if name is None or original_node in self.handled:
            return updated_node
        method = self.rewriting.layer.method(name)
        if method is not None:
            if any(code(each.decorator).endswith("property") for each in method.decorators):
                return self._call(name, ())
            self.rewriting.problem(original_node, f"the method self.{name} is used as a value")
            return updated_node
        return self._value(name, original_node) or updated_node

    def _value(self, name: str, node: cst.CSTNode) -> cst.BaseExpression | None:
        kinds = self.rewriting.layer.attribute(name)
        if kinds is not None and kinds.inline is not None:
            return cst.parse_expression(kinds.inline)
        if kinds is not None and kinds.words == {"None"}:
            return cst.Name("None")
        annotation = _MODULE_ATTRIBUTES.get(name) if kinds is None else kinds.annotation
        if annotation is None:
            self.rewriting.problem(node, f"what self.{name} is cannot be read from __init__")
            return None
        self.rewriting.attributes.setdefault(name, annotation)
        return cst.Name(self.rewriting.parameter(name))

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:  # noqa: N802
        name = self._of_instance(original_node.func)
        if name is None:
            return updated_node
        if self.rewriting.layer.method(name) is not None:
            return self._call(name, updated_node.args)
        called = self._value(name, original_node)
        kinds = self.rewriting.layer.attribute(name)
        if called is None or kinds is None or kinds.inline is None:
            if called is not None:
                self.rewriting.problem(original_node, f"self.{name}(...) is no method of the class")
            return updated_node
        return updated_node.with_changes(func=called)

    def _call(self, name: str, arguments: Sequence[cst.Arg]) -> cst.BaseExpression:
        rewriting = self.rewriting
        method = rewriting.layer.method(name)
        if method is None:
            return cst.Name(name)
        if name == "forward_native":
            function, own = f"{rewriting.op}.native", None
        elif name in FORWARDS:
            function, own = rewriting.implementation(name), None
        else:
            function, own = rewriting.helper(name), rewriting.needs(name)
        known = parameters(method) or []
        passed = [
            code(argument.with_changes(comma=cst.MaybeSentinel.DEFAULT))
            if argument.keyword is not None or argument.star or index >= len(known) or is_static(method)
            else f"{known[index].name}={code(argument.value)}"
            for index, argument in enumerate(arguments)
        ]
        if own is None:
            passed = [each for each in passed if each.partition("=")[0] != rewriting.dropped]
            passed.append(_ALL)
        else:
            for attribute in own:
                kinds = rewriting.layer.attribute(attribute)
                annotation = _MODULE_ATTRIBUTES.get(attribute) if kinds is None else kinds.annotation
                rewriting.attributes.setdefault(attribute, annotation or "torch.Tensor")
            passed += [f"{rewriting.parameter(each)}={rewriting.parameter(each)}" for each in own]
        return cst.parse_expression(f"{function}({', '.join(passed)})")


_ALL = "**__the_attributes__"


def fill_attributes(text: str, attributes: Sequence[str]) -> str:
    """Code in which calls of the op's own functions pass all attributes on; they are known only at the end."""
    passed = ", ".join(f"{name}={name}" for name in attributes)
    return text.replace(f", {_ALL}", f", {passed}" if passed else "").replace(_ALL, passed)


class _Locals(cst.CSTVisitor):
    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:  # noqa: N802 - libcst's name
        parts = node.target.elements if isinstance(node.target, cst.Tuple) else ()
        targets = [part.value for part in parts] if parts else [node.target]
        self.names.update(target.value for target in targets if isinstance(target, cst.Name))


def locals_of(nodes: Sequence[cst.CSTNode]) -> set[str]:
    """The names that statements assign."""
    visitor = _Locals()
    for node in nodes:
        node.visit(visitor)
    return visitor.names
