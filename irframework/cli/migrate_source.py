"""What stands in a file with `CustomOp` classes: the classes, their methods, and what `__init__` says of attributes.

Owns the reading; nothing is imported or run. Does not own what becomes of it: `migrate_classes.py` does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from irframework.cli.migrate_types import Kinds, kinds_of, normalised
from irframework.errors import MigrationError

DEVICES = {
    "forward_cpu": "cpu",
    "forward_cuda": "cuda",
    "forward_hip": "cuda",
    "forward_xpu": "xpu",
    "forward_tpu": "xla",
    "forward_oot": "privateuseone",
}
FORWARDS = tuple(DEVICES)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter of a method: its name, its annotation in the words of a schema, its default as code.

    Attributes:
        annotation: None if there is none, or none that a schema has a word for.
        written: The annotation as it is written.
    """

    name: str
    annotation: str | None
    default: str | None
    written: str | None = None


@dataclass(slots=True)
class Layer:
    """A class that is to be migrated.

    Attributes:
        name: Its name.
        line: Where it stands.
        node: The class.
        registered: The name that it is registered under, or None.
        replaces: The class name that it is registered as a replacement of, or None.
        parent: The class of the same file that it derives from, or None.
        methods: Its own methods by name.
        attributes: What its `__init__` says of each attribute: what it can be, or code to put in its place.
    """

    name: str
    line: int
    node: cst.ClassDef
    registered: str | None
    replaces: str | None
    parent: Layer | None
    methods: dict[str, cst.FunctionDef]
    attributes: dict[str, Kinds] = field(default_factory=dict)

    def method(self, name: str) -> cst.FunctionDef | None:
        """Its method, own or inherited within the file."""
        if name in self.methods:
            return self.methods[name]
        return None if self.parent is None else self.parent.method(name)

    def attribute(self, name: str) -> Kinds | None:
        """What an attribute can be, own or inherited within the file."""
        if name in self.attributes:
            return self.attributes[name]
        return None if self.parent is None else self.parent.attribute(name)

    @property
    def op(self) -> str:
        """The name of the op that it would become."""
        return self.registered or snake_case(self.name)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file that was read: its layers, its other top-level statements by the names they bind, and lines."""

    layers: tuple[Layer, ...]
    bound: tuple[tuple[frozenset[str], str], ...]
    lines: Mapping[cst.CSTNode, int]

    def line(self, node: cst.CSTNode) -> int:
        """The line of a node of the file as it was read."""
        return self.lines.get(node, 0)


def read_source(text: str, name: str) -> SourceFile:
    """Read a file.

    Raises:
        MigrationError: It is no Python, or holds no such class.
    """
    try:
        wrapper = MetadataWrapper(cst.parse_module(text))
    except cst.ParserSyntaxError as error:
        raise MigrationError(f"{name}, line {error.raw_line}: this is no Python that can be read.") from error
    ranges = wrapper.resolve(PositionProvider)
    lines = {node: place.start.line for node, place in ranges.items()}
    layers: dict[str, Layer] = {}
    bound: list[tuple[frozenset[str], str]] = []
    for statement in wrapper.module.body:
        layer = _layer(statement, layers, lines) if isinstance(statement, cst.ClassDef) else None
        if layer is not None:
            layers[layer.name] = layer
        else:
            bound.append((frozenset(_names_bound(statement)), code(statement).strip("\n")))
    if not layers:
        raise MigrationError(
            f"{name}: there is no class here that derives from CustomOp, or is registered with register_oot. A "
            "PluggableLayer stays as it is."
        )
    return SourceFile(tuple(layers.values()), tuple(bound), lines)


def code(node: cst.CSTNode) -> str:
    """A node as Python code."""
    return cst.Module([]).code_for_node(node)


def snake_case(name: str) -> str:
    """`RMSNorm` as `rms_norm`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


def statements(function: cst.FunctionDef) -> list[cst.BaseStatement]:
    """The statements of a function, without its docstring."""
    body = function.body
    if isinstance(body, cst.IndentedBlock):
        found = list(body.body)
    else:
        found = [cst.SimpleStatementLine([part]) for part in body.body if isinstance(part, cst.BaseSmallStatement)]
    return found[1:] if function.get_docstring() is not None else found


def parameters(function: cst.FunctionDef) -> list[Parameter] | None:
    """The parameters behind self; None if there are `*args` or `**kwargs`."""
    given = function.params
    if isinstance(given.star_arg, cst.Param) or given.star_kwarg is not None:
        return None
    every = [*given.posonly_params, *given.params, *given.kwonly_params]
    return [
        Parameter(
            each.name.value,
            None if each.annotation is None else normalised(each.annotation.annotation),
            None if each.default is None else code(each.default),
            None if each.annotation is None else code(each.annotation.annotation),
        )
        for each in (every if is_static(function) else every[1:])
    ]


def ordered(given: Sequence[Parameter], own: Sequence[Parameter]) -> list[Parameter]:
    """Parameters without a default, attributes, then those with a default."""
    return [p for p in given if p.default is None] + list(own) + [p for p in given if p.default is not None]


def is_static(function: cst.FunctionDef) -> bool:
    """Whether a method is a staticmethod."""
    return any(code(each.decorator) == "staticmethod" for each in function.decorators)


def self_name(function: cst.FunctionDef) -> str:
    """What a method calls its instance."""
    first = [*function.params.posonly_params, *function.params.params][:1]
    return first[0].name.value if first and not is_static(function) else ""


# --- classes ------------------------------------------------------------------------------------------------------


def _layer(node: cst.ClassDef, known: Mapping[str, Layer], lines: Mapping[cst.CSTNode, int]) -> Layer | None:
    bases = [code(base.value) for base in node.bases]
    parent = next((known[base] for base in bases if base in known), None)
    registered, replaces = None, None
    for each in node.decorators:
        called = each.decorator.func if isinstance(each.decorator, cst.Call) else each.decorator
        arguments = each.decorator.args if isinstance(each.decorator, cst.Call) else ()
        if not isinstance(called, cst.Attribute) or code(called.value).endswith("PluggableLayer"):
            continue
        if called.attr.value == "register":
            registered = _word(arguments, "name")
        elif called.attr.value == "register_oot":
            replaces = _word(arguments, "name") or code(called.value).rpartition(".")[2]
    derives = any(base.rpartition(".")[2] == "CustomOp" for base in bases)
    if not derives and parent is None and replaces is None:
        return None
    methods = {each.name.value: each for each in node.body.body if isinstance(each, cst.FunctionDef)}
    layer = Layer(node.name.value, lines.get(node, 0), node, registered, replaces, parent, methods)
    if "__init__" in methods:
        layer.attributes = dict(_attributes(methods["__init__"]))
    return layer


def _word(arguments: Sequence[cst.Arg], keyword: str) -> str | None:
    for argument in arguments:
        if (argument.keyword is None or argument.keyword.value == keyword) and isinstance(
            argument.value, cst.SimpleString
        ):
            return str(argument.value.evaluated_value)
    return None


def _attributes(init: cst.FunctionDef) -> Iterator[tuple[str, Kinds]]:
    """What `__init__` assigns to attributes, branches joined."""
    found: dict[str, Kinds] = {}
    given = {each.name: each.annotation for each in parameters(init) or ()}
    reader = _Assignments(self_name(init))
    init.body.visit(reader)
    local: dict[str, Kinds] = {}
    for name, own, value, annotation in reader.found:
        kinds = Kinds.of_annotation(annotation) if annotation else kinds_of(value, given, {**local, **_own(found)})
        where = found if own else local
        where[name] = kinds if name not in where else where[name].joined(kinds)
    yield from found.items()


def _own(found: Mapping[str, Kinds]) -> dict[str, Kinds]:
    return {f"self.{name}": kinds for name, kinds in found.items()}


class _Assignments(cst.CSTVisitor):
    """Collects what is assigned: name, whether to an attribute, value and annotation."""

    def __init__(self, me: str) -> None:
        self.me = me
        self.found: list[tuple[str, bool, cst.BaseExpression, str | None]] = []

    def _target(self, target: cst.BaseExpression, value: cst.BaseExpression, annotation: str | None = None) -> None:
        if isinstance(target, cst.Name):
            self.found.append((target.value, False, value, annotation))
        elif isinstance(target, cst.Attribute) and code(target.value) == self.me:
            self.found.append((target.attr.value, True, value, annotation))

    def visit_Assign(self, node: cst.Assign) -> None:  # noqa: N802 - libcst's name
        for each in node.targets:
            self._target(each.target, node.value)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:  # noqa: N802 - libcst's name
        if node.value is not None:
            self._target(node.target, node.value, normalised(node.annotation.annotation))

    def visit_Call(self, node: cst.Call) -> None:  # noqa: N802 - libcst's name
        called = code(node.func)
        if called in (f"{self.me}.register_buffer", f"{self.me}.register_parameter") and len(node.args) > 1:
            first = node.args[0].value
            if isinstance(first, cst.SimpleString):
                tensor = code(node.args[1].value) != "None"
                kind = "torch.Tensor" if tensor else "None"
                self.found.append((str(first.evaluated_value), True, node.args[1].value, kind))

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:  # noqa: N802 - libcst's name
        return False


class _Bound(cst.CSTVisitor):
    """Collects the names that a top-level statement binds."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool:  # noqa: N802 - libcst's name
        self.names.add(node.name.value)
        return False

    def visit_ClassDef(self, node: cst.ClassDef) -> bool:  # noqa: N802 - libcst's name
        self.names.add(node.name.value)
        return False

    def visit_AssignTarget(self, node: cst.AssignTarget) -> None:  # noqa: N802 - libcst's name
        self.names.update(re.findall(r"\b[A-Za-z_]\w*\b", code(node.target)))

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:  # noqa: N802 - libcst's name
        self.names.add(code(node.target))

    def visit_ImportAlias(self, node: cst.ImportAlias) -> None:  # noqa: N802 - libcst's name
        name = node.asname.name if node.asname is not None else node.name
        self.names.add(code(name).partition(".")[0])


def _names_bound(statement: cst.CSTNode) -> set[str]:
    visitor = _Bound()
    statement.visit(visitor)
    return visitor.names
