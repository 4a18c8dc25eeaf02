"""Small functions that are generated for an op or an implementation, and the pieces of text they are made of.

Owns how a signature becomes source text, and how text becomes a function. Does not own an op's `__call__`: see
`dispatcher.py`.
"""

import inspect
import linecache
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from irframework import optional_outputs
from irframework.untraced import run_untraced

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp


@dataclass(frozen=True, slots=True)
class Parameters:
    """An op's parameters as source text.

    Attributes:
        declared: As a function declares them: `x, weight, *, epsilon=_d2`.
        passed: As a call passes them: `x, weight, epsilon=epsilon`.
        together: As one tuple holds them: `(x, weight, epsilon,)`.
        defaults: The objects behind `_d2`.
    """

    declared: str
    passed: str
    together: str
    defaults: dict[str, Any]


def parameters_of(signature: inspect.Signature) -> Parameters:
    """Return an op's parameters as source text; defaults are given by name, since they may be any object."""
    declared: list[str] = []
    passed: list[str] = []
    defaults: dict[str, Any] = {}
    keyword_only = False
    for index, parameter in enumerate(signature.parameters.values()):
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            declared.append("*")
        text = parameter.name
        if parameter.default is not inspect.Parameter.empty:
            defaults[f"_d{index}"] = parameter.default
            text += f"=_d{index}"
        declared.append(text)
        passed.append(f"{parameter.name}={parameter.name}" if keyword_only else parameter.name)
    together = "(" + "".join(f"{name}," for name in signature.parameters) + ")"
    return Parameters(", ".join(declared), ", ".join(passed), together, defaults)


def compile_function(name: str, source: str, names: dict[str, Any]) -> Callable[..., Any]:
    """Execute the text of one function and return it. The text is kept for tracebacks and debuggers."""
    filename = f"<irframework {name} {abs(hash(source)):x}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
    scope = dict(names)
    exec(compile(source, filename, "exec"), scope)
    function: Callable[..., Any] = scope[name]
    return run_untraced(function)


def make_bind(op: "IrOp") -> Callable[..., tuple[Any, ...]]:
    """Return a function with the op's signature that returns its arguments as a tuple."""
    return compile_function(
        "bind", f"def bind({op.parameters.declared}):\n    return {op.parameters.together}\n", op.parameters.defaults
    )


NUMBER_TYPES = (float, int, bool, str)


def number_type(annotation: Any) -> type | None:
    """`float` for float and `float | None`; None for what a dispatcher does not check by class."""
    kind = plain_class(annotation)
    return kind if kind in NUMBER_TYPES else None


def plain_class(annotation: Any) -> type | None:
    """What a dispatcher checks an argument by that is no tensor: as `number_type`, and torch.dtype for dtypes."""
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    kinds = [kind for kind in (typing.get_args(annotation) if union else (annotation,)) if kind is not type(None)]
    return kinds[0] if len(kinds) == 1 and kinds[0] in (*NUMBER_TYPES, torch.dtype) else None


def missing_test(op: "IrOp", name: str) -> str:
    """Expression that is true when a call leaves a parameter at its default."""
    default = f"_d{list(op.signature.parameters).index(name)}"
    return f"{name} is {default}" if name in op.tensors else f"({name} is {default} or {name} == {default})"


def passed_to(op: "IrOp", fn: Callable[..., Any], rename: dict[str, str] | None = None) -> str:
    """Arguments, as text, for a function that may lack the op's newest parameters."""
    parts = []
    known = inspect.signature(fn).parameters
    for name, parameter in op.signature.parameters.items():
        if name in known:
            value = (rename or {}).get(name, name)
            parts.append(f"{name}={value}" if parameter.kind is inspect.Parameter.KEYWORD_ONLY else value)
    return ", ".join(parts)


def make_failed_check(impl: "IrOpImpl") -> Callable[..., str | None]:
    """Return a function with the op's signature that gives the reasons of all declared conditions that fail."""
    op = impl.op
    lines = [f"def failed_check({op.parameters.declared}):", "    _reasons = []"]
    for name in impl.missing:
        reason = f"f'it was written before the parameter {name}, which the call sets to {{{name}!r}}'"
        lines += [f"    if not ({missing_test(op, name)}):", f"        _reasons.append({reason})"]
    for check in impl.checks:
        lines += [f"    if not ({check.test}):", f"        _reasons.append({check.reason})"]
    lines.append("    return '; '.join(_reasons) or None")
    return compile_function("failed_check", "\n".join(lines) + "\n", {**op.parameters.defaults, "torch": torch})


def make_apply(op: "IrOp", fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the op's signature that calls `fn` with the parameters it has."""
    result = f"_fn({passed_to(op, fn)})"
    if op.optional_outputs:
        result = f"_filled(_op, {result}, {op.parameters.together})"
    source = f"def apply({op.parameters.declared}):\n    return {result}\n"
    scope = {**op.parameters.defaults, "_fn": fn, "_op": op, "_filled": optional_outputs.filled}
    return compile_function("apply", source, scope)
