"""Switches off rules of the matcher, one at a time: some words of one function are changed, and afterwards put back.

Owns how a mutant is made and unmade, and how a test is called by its name. The rules are in `matcher_rules.txt`.
"""

import ast
import importlib
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

_PACKAGE = "irframework.compiler"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A rule that is switched off.

    Attributes:
        rule: What holds no longer.
        where: The function or the constant of the module, as `matches.Judge.check`.
        old: Words of the function as `ast.unparse` writes it, which stand there once. Empty for a constant.
        new: What stands there instead; of a constant the expression that it becomes.
        test: The directed test that fails then, as `test_fusion.test_it_can_be_switched_off`; one case in brackets.
    """

    rule: str
    where: str
    old: str
    new: str
    test: str


def mutants() -> list[Mutant]:
    """All that `matcher_rules.txt` lists."""
    found: list[Mutant] = []
    short: dict[str, str] = {}
    where = ""
    for line in (Path(__file__).parent / "matcher_rules.txt").read_text().splitlines():
        if line.startswith("@"):
            name, test = line[1:].split(" = ")
            short[name] = test
        elif line.startswith("## "):
            where = line[3:]
        elif line and line[0] not in "#~":
            rule, old, new, test = (each.strip() for each in line.split("||"))
            name = re.split(r"[.\[]", test)[0]
            found.append(Mutant(rule, where, old, new, short.get(name, name) + test[len(name) :]))
    return found


def excused() -> list[tuple[str, str]]:
    """Conditions that need no mutant, by the function and how they begin."""
    lines = (Path(__file__).parent / "matcher_rules.txt").read_text().splitlines()
    parts = [line[1:].split("||") for line in lines if line.startswith("~")]
    return [(where.strip(), condition.strip()) for where, condition, _ in parts]


class StaleError(Exception):
    """A mutant does not fit the code any more."""


@contextmanager
def applied(mutant: Mutant) -> Iterator[None]:
    """Run with a mutant; afterwards all is as it was, also what modules keep for the process."""
    module, path = _place(mutant)
    owner: Any = module
    for name in path[:-1]:
        owner = getattr(owner, name, None)
    function = getattr(owner, path[-1], None)
    function = getattr(function, "__wrapped__", function)
    code: CodeType | None = None
    if isinstance(function, FunctionType):
        code = mutated(mutant)
    elif function is None or mutant.old:
        raise StaleError(f"{mutant.where} is no function of the module")
    kept = _kept()
    caches = [each for each in vars(module).values() if hasattr(each, "cache_clear")]
    before = function.__code__ if code is not None else function
    try:
        if code is not None:
            function.__code__ = code
        else:
            setattr(owner, path[-1], eval(mutant.new, vars(module)))
        for each in caches:
            each.cache_clear()
        yield
    finally:
        if code is not None:
            function.__code__ = before
        else:
            setattr(owner, path[-1], before)
        for each in caches:
            each.cache_clear()
        for values, content in kept:
            values.clear()
            values.extend(content) if isinstance(values, list) else values.update(content)


def mutated(mutant: Mutant) -> CodeType:
    """The code of the changed function.

    Raises:
        StaleError: The words do not stand there, or more than once.
    """
    module, path = _place(mutant)
    tree = ast.parse(inspect.getsource(module))
    body = tree.body
    for name in path:
        found = [n for n in body if isinstance(n, (ast.ClassDef, ast.FunctionDef)) and n.name == name]
        if len(found) != 1:
            raise StaleError(f"{mutant.where}: there is no {name} any more")
        parent, node = body, found[0]
        body = node.body
    text = ast.unparse(node)
    if text.count(mutant.old) != 1:
        raise StaleError(f"{mutant.where}: {mutant.old!r} stands there {text.count(mutant.old)} times, not once")
    changed = text.replace(mutant.old, mutant.new)
    parent[parent.index(node)] = ast.parse(changed).body[0]
    code = compile(ast.fix_missing_locations(tree), module.__file__ or "", "exec", dont_inherit=True)
    for name in path:
        code = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name)
    return code


def _place(mutant: Mutant) -> tuple[ModuleType, list[str]]:
    name, *path = mutant.where.split(".")
    return importlib.import_module(f"{_PACKAGE}.{name}"), path


def _kept() -> list[tuple[Any, Any]]:
    """What the compiler's modules keep for the process, and what it holds now."""
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{_PACKAGE}.")]
    named = [pair for module in modules for pair in vars(module).items() if not pair[0].startswith("__")]
    kept = {id(value): value for _, value in named if type(value) in (dict, list, set)}
    return [(value, value.copy()) for value in kept.values()]


def called(test: str, fixture: Callable[[str], Any]) -> None:
    """Call a test by its name, and of one with several cases that in brackets, with its fixtures."""
    module, _, name = test.partition(".")
    name, _, case = name.partition("[")
    function = getattr(importlib.import_module(module), name)
    cases = [given for label, given in _cases(function) if label == case.removesuffix("]")]
    if len(cases) != 1:
        raise StaleError(f"{test}: there is no such case")
    rest = [name for name in inspect.signature(function).parameters if name not in cases[0]]
    function(**cases[0], **{name: fixture(name) for name in rest})


def _cases(function: Any) -> list[tuple[str, dict[str, Any]]]:
    """The cases of a test, each with its label, as pytest writes them."""
    choices = []
    for mark in (mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"):
        names, values = mark.args
        names = [names] if isinstance(names, str) else list(names)
        rows = [list(value) if len(names) > 1 else [value] for value in values]
        ids = mark.kwargs.get("ids")
        labels = ids if isinstance(ids, list) else ["-".join(map(_label, row)) for row in rows]
        choices.append([(label, dict(zip(names, row, strict=True))) for label, row in zip(labels, rows, strict=True)])
    several = itertools.product(*choices)
    return [
        ("-".join(label for label, _ in each), {k: v for _, given in each for k, v in given.items()})
        for each in several
    ]


def _label(value: Any) -> str:
    return str(getattr(value, "__name__", value))


def conditions(module: str) -> list[tuple[str, str]]:
    """All that forbid, skip or end something in a module: the function, and an `if` with no more than that in it."""
    tree = ast.parse(inspect.getsource(importlib.import_module(f"{_PACKAGE}.{module}")))
    found: list[tuple[str, str]] = []

    def look(node: ast.AST, where: str) -> None:
        for child in ast.iter_child_nodes(node):
            inside = isinstance(child, (ast.ClassDef, ast.FunctionDef))
            if isinstance(child, ast.If) and isinstance(child.body[-1], (ast.Raise, ast.Return, ast.Continue)):
                found.append((where, ast.unparse(child)))
            look(child, f"{where}.{child.name}" if inside else where)

    look(tree, module)
    return found
