"""The code to paste: ops, implementations, predicates, and what is left of a class.

Owns the text. Does not decide what is translated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import libcst as cst

from irframework.cli.migrate_guards import Guard
from irframework.cli.migrate_methods import Rewriting, block, fill_attributes
from irframework.cli.migrate_source import FORWARDS, Layer, Parameter, SourceFile, code, snake_case

WIDTH = 120


def signature(name: str, given: Sequence[Parameter], returns: str) -> str:
    """`def name(parameters) -> returns:`, over several lines where it is long."""
    parts = [f"{p.name}: {p.annotation}" + (f" = {p.default}" if p.default is not None else "") for p in given]
    line = f"def {name}({', '.join(parts)}) -> {returns}:\n"
    return line if len(line) <= WIDTH else f"def {name}(\n    " + ",\n    ".join(parts) + f",\n) -> {returns}:\n"


def function(name: str, given: Sequence[Parameter], returns: str, body: str, doc: str | None = None) -> str:
    """A function as code."""
    text = "" if doc is None else f"    {doc}\n"
    return signature(name, given, returns) + text + body


def docstring(text: str) -> str:
    """A docstring as code, indented by four but for its first line."""
    lines = text.replace("\\", "\\\\").replace('"""', "'''").splitlines()
    end = "\n    " if len(lines) > 1 else ""
    return '"""' + "\n".join([lines[0], *(f"    {line}".rstrip() for line in lines[1:])]) + end + '"""'


def op_text(variable: str, name: str, options: Sequence[str], definition: str) -> str:
    """The declaration of an op."""
    given = [*([f'name="{name}"'] if name != variable else []), *options]
    called = f"({', '.join(given)})" if given else ""
    return f"@ir.register_op{called}\n{definition}"


def implementation_text(variable: str, provider: str, options: Sequence[str], definition: str) -> str:
    """The registration of an implementation."""
    given = [f'"{provider}"', *options]
    line = f"@{variable}.register_impl({', '.join(given)})\n"
    if len(line) > WIDTH:
        line = f"@{variable}.register_impl(\n    " + ",\n    ".join(given) + ",\n)\n"
    return line + definition


def predicate_body(guards: Sequence[Guard], rewriting: Rewriting, method: cst.FunctionDef) -> str:
    """The statements of a predicate; empty when the framework checks all guards itself."""
    written: list[cst.BaseStatement] = []
    for guard in guards:
        if guard.rejected_if is not None:
            test = cst.parse_statement("if True:\n    return ir.reject('')\n").with_changes(test=guard.rejected_if)
            kept = rewriting.rewrite(method, [test])
            written += [
                cst.parse_statement(
                    f"if {code(each.test)}:\n    return ir.reject({guard.reason})\n"
                    if isinstance(each, cst.If)
                    else code(each)
                )
                for each in kept
            ]
    return block([*written, cst.parse_statement("return True\n")]) if written else ""


def class_text(layer: Layer, op: str, method: str) -> str:
    """The class without its forward methods, with the op that it dispatches through.

    Args:
        layer: The class.
        op: What `ir_op` is.
        method: The code of `ir_args` or `ir_call`.
    """
    kept = [
        each
        for each in layer.node.body.body
        if not (isinstance(each, cst.FunctionDef) and each.name.value in ("forward_native", *FORWARDS))
    ]
    has_doc = layer.node.get_docstring() is not None
    said = cst.parse_statement(f"ir_op = {op}\n")
    if has_doc:
        said = said.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    added = cst.parse_statement(method).with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    first = [each.with_changes(leading_lines=[cst.EmptyLine(indent=False)]) for each in kept[has_doc : has_doc + 1]]
    body = [*kept[:has_doc], said, *first, *kept[has_doc + 1 :], added]
    return code(layer.node.with_changes(body=cst.IndentedBlock(body), leading_lines=())).strip("\n") + "\n"  # type: ignore[arg-type]


def fill(text: str, given: Sequence[str]) -> str:
    """Code in which calls of the op's own functions pass the attributes on."""
    return fill_attributes(text, given)


def header(source: SourceFile, texts: Iterable[str]) -> str:
    """The imports and the top-level statements of the file that the printed code needs."""
    used = set(re.findall(r"[A-Za-z_]\w*", "\n".join(texts)))
    chosen: list[int] = []
    grows = True
    while grows:
        grows = False
        for index, (names, statement) in enumerate(source.bound):
            if index not in chosen and names & used and "__future__" not in statement:
                chosen.append(index)
                used |= set(re.findall(r"[A-Za-z_]\w*", statement))
                grows = True
    own = ["import torch", "import irframework as ir"]
    if "ArgumentError" in used:
        own.append("from irframework.errors import ArgumentError")
    theirs = [_from_here(source.bound[index][1]) for index in sorted(chosen)]
    if not any("CustomOp" in source.bound[index][0] for index in chosen):
        own.append("from irframework.compat import CustomOp")
    imports = [each for each in theirs if each.startswith(("import ", "from ")) and each not in own]
    others = [each for each in theirs if not each.startswith(("import ", "from "))]
    return "\n".join([*own, *imports]) + "\n" + "".join(f"\n\n{each}\n" for each in others)


def _from_here(statement: str) -> str:
    """An import of the old module as one of `irframework.compat`."""
    return re.sub(r"^from (?!irframework)[\w.]*custom_op import\b", "from irframework.compat import", statement)


def provider_called(provider: str, layer: Layer, platform: str) -> str:
    """The name of a provider: a replacement's is called after its class, which is not the only one for its op."""
    return f"{snake_case(layer.name) if layer.replaces else provider}_{platform}"
