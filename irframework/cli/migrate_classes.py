"""What each class of a file would become.

Owns the decisions: which op, split or not, which implementations, which predicates, and what is left to a person. Does
not own reading (`migrate_source.py`), rewriting (`migrate_methods.py`) or text (`migrate_printing.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import libcst as cst

from irframework.cli import migrate_printing as printing
from irframework.cli.migrate_branches import overwritten, returned_names, specialised, values_returned
from irframework.cli.migrate_guards import ErrorsForAsserts, Guard, asserts_in, delegate, forwards_called, split_guards
from irframework.cli.migrate_methods import Rewriting, Untranslated, block, locals_of
from irframework.cli.migrate_result import Migrated, Variant
from irframework.cli.migrate_source import (
    DEVICES,
    FORWARDS,
    Layer,
    Parameter,
    SourceFile,
    code,
    is_static,
    ordered,
    parameters,
    self_name,
    statements,
)
from irframework.cli.migrate_types import TENSOR, result_of, returned


def migrate(source: SourceFile, provider: str, existing: Mapping[str, str]) -> list[Migrated]:
    """Return what each class of a file would become.

    Args:
        source: The file.
        provider: How the names of providers begin.
        existing: Schemas of the ops that there are, by name.
    """
    done: dict[str, Migrated] = {}
    for layer in source.layers:
        done[layer.name] = _Class(source, layer, provider, existing, done).migrate()
    return list(done.values())


class _Class:
    """One class on its way."""

    def __init__(
        self,
        source: SourceFile,
        layer: Layer,
        provider: str,
        existing: Mapping[str, str],
        done: Mapping[str, Migrated],
    ) -> None:
        self.source, self.layer, self.provider = source, layer, provider
        self.existing, self.done = existing, done
        self.result = Migrated(layer)

    def left(self, node: cst.CSTNode, what: str) -> Migrated:
        """Leave something to a person."""
        self.result.untranslated.append(Untranslated(self.source.line(node), what))
        return self.result

    def migrate(self) -> Migrated:
        layer = self.layer
        if "_forward_method" in code(layer.node):
            self.left(layer.node, "it sets _forward_method itself: an op's priorities decide now")
        if layer.replaces is not None:
            return self._replacement()
        own = [name for name in ("forward_native", *FORWARDS) if name in layer.methods]
        if not own and layer.parent is not None:
            self.result.notes.append(f"{layer.name} has no forward method of its own: it stays as it is")
            return self.result
        native = layer.method("forward_native")
        if native is None:
            return self.left(layer.node, "there is no forward_native: an op needs a meaning in plain torch")
        given = self._parameters(native)
        if given is None:
            return self.result
        attributes = self._read_all(native)
        if attributes is None:
            return self.result
        self._make_variants(native, given, attributes)
        for variant in self.result.variants:
            self._write_op(native, variant)
        self._write_class(native)
        return self.result

    # --- reading -----------------------------------------------------------------------------------------------

    def _parameters(self, method: cst.FunctionDef) -> list[Parameter] | None:
        found = parameters(method)
        if found is None:
            self.left(method, "forward_native takes *args or **kwargs: an op's parameters are all named")
            return None
        known = []
        for each in found:
            annotation = each.annotation
            if annotation is None and each.written is not None:
                self.left(method, f"parameter {each.name}: {each.written} has no word in an op's schema")
                return None
            if annotation is None:
                annotation = f"{TENSOR} | None" if each.default == "None" else TENSOR
                self.left(method, f"parameter {each.name} has no annotation; {annotation} is a guess")
            known.append(replace(each, annotation=annotation))
        return known

    def _read_all(self, native: cst.FunctionDef) -> dict[str, str] | None:
        """The attributes that become parameters, in order; None when native cannot be rewritten."""
        rewriting = self._rewriting(self.layer.op)
        rewriting.rewrite(native, statements(native))
        self.result.untranslated += rewriting.problems
        if rewriting.problems:
            return None
        for each in native.decorators:
            if code(each.decorator) != "staticmethod":
                self.left(native, f"the decorator {code(each.decorator)} of forward_native is not taken over")
        tensors = [p.name for p in parameters(native) or ()]
        for node, name in overwritten(statements(native), tensors):
            self.left(node, f"forward_native writes to {name}: the op's function must leave its arguments alone")
        self.failed: set[str] = set()
        for name in FORWARDS:
            method = self.layer.methods.get(name)
            if method is not None:
                self._read_forward(name, method, native, rewriting)
        return dict(rewriting.attributes)

    def _read_forward(self, name: str, method: cst.FunctionDef, native: cst.FunctionDef, rewriting: Rewriting) -> None:
        own, meaning = parameters(method), parameters(native)
        if own is None or [p.name for p in own] != [p.name for p in meaning or ()]:
            self.left(method, f"{name} has other parameters than forward_native")
            self.failed.add(name)
            return
        kept = dict(rewriting.attributes)
        rewriting.problems = []
        rewriting.rewrite(method, statements(method))
        if rewriting.problems:
            self.result.untranslated += rewriting.problems
            self.failed.add(name)
            rewriting.attributes = kept
            return
        for each in asserts_in(split_guards(statements(method), self._tensors(method), self_name(method))[1]):
            self.left(each, f"assert {code(each.test)} stays in {name}: it is no condition that a predicate may ask")
        if name == "forward_oot":
            self.left(method, "forward_oot: name the device types of your platform in device_types=")

    def _tensors(self, method: cst.FunctionDef) -> list[str]:
        """What in a method is a tensor, as it is written there."""
        given = [p.name for p in parameters(method) or () if TENSOR in (p.annotation or TENSOR)]
        me, layer, attributes = self_name(method), self.layer, []
        each: Layer | None = layer
        while each is not None:
            attributes += [name for name, kinds in each.attributes.items() if TENSOR in (kinds.annotation or TENSOR)]
            each = each.parent
        return given + [f"{me}.{name}" for name in attributes]

    def _rewriting(self, variable: str) -> Rewriting:
        def function_of(method: str) -> str:
            platform = method.removeprefix("forward_")
            return f"_{variable}_{printing.provider_called(self.provider, self.layer, platform)}"

        return Rewriting(self.source, self.layer, variable, function_of)

    # --- ops ---------------------------------------------------------------------------------------------------

    def _make_variants(self, native: cst.FunctionDef, given: list[Parameter], attributes: Mapping[str, str]) -> None:
        name = self.layer.op
        if name in self.existing:
            self.result.notes.append(
                f"ir.ops.{name} exists: {name}{self.existing[name]}. If it means the same, write ir_op = ir.ops.{name}"
            )
            name = f"{self.provider}_{name}"
        rewriting = self._rewriting(name)
        own = [Parameter(rewriting.parameter(each), kind, None) for each, kind in attributes.items()]
        self.attributes = {rewriting.parameter(each): f"self.{each}" for each in attributes}
        returns = None if native.returns is None else returned(native.returns.annotation)
        body = statements(native)
        split = self._split(body, given, returns)
        if split is None:
            text = returns[0] if returns and len(returns) == 1 else result_of(values_returned(body))
            self.result.variants.append(Variant(self._variable(name), name, ordered(given, own), text, list))
            return
        for there in (False, True):
            op = f"{name}_with_{split}" if there else name
            kept = [replace(p, annotation=TENSOR, default=None) if p.name == split else p for p in given]
            kept = [p for p in kept if there or p.name != split]
            folded = specialised(body, split, there)
            text = result_of(values_returned(folded), returns, there)

            def fold(lines: Sequence[cst.BaseStatement], there: bool = there) -> list[cst.BaseStatement]:
                return specialised(lines, split, there)

            self.result.variants.append(
                Variant(self._variable(op), op, ordered(kept, own), text, fold, None if there else split)
            )

    def _variable(self, op: str) -> str:
        """The name of the op's function: not one that the file has another meaning for."""
        used = {name for names, _ in self.source.bound for name in names} | self._rewriting(op).taken
        return f"{op}_op" if op in used else op

    def _split(
        self, body: Sequence[cst.BaseStatement], given: Sequence[Parameter], returns: Sequence[str] | None
    ) -> str | None:
        """The optional tensor that decides how many values are returned; None if none does."""
        if not (returns and len(returns) > 1) and len(values_returned(body)) < 2:
            return None
        for each in given:
            if each.annotation == f"{TENSOR} | None":
                absent, there = (values_returned(specialised(body, each.name, case)) for case in (False, True))
                if len(absent) == len(there) == 1 and (absent != there or absent == {None}):
                    return each.name
        return None

    def _write_op(self, native: cst.FunctionDef, variant: Variant) -> None:
        rewriting = self._rewriting(variant.variable)
        rewriting.dropped = variant.dropped
        body = [each.visit(ErrorsForAsserts()) for each in variant.fold(statements(native))]
        text = self._body(rewriting, native, body)  # type: ignore[arg-type]
        implementations = self._implementations(variant, self.layer.methods, rewriting)
        doc = native.get_docstring()
        definition = printing.function(
            variant.variable, variant.given, variant.returns, text, None if doc is None else printing.docstring(doc)
        )
        options = []
        if variant.activations:
            words = ", ".join(f'"{name}"' for name in variant.activations)
            options = [f"activations=({words}{',' if len(variant.activations) == 1 else ''})", "allow_inplace=True"]
        options += self._optional_outputs(native, variant, variant.fold(statements(native)))
        self.result.ops.append(variant.op)
        own = [printing.op_text(variant.variable, variant.op, options, definition)]
        self.result.texts += [*self._filled(rewriting.helpers.values()), *self._filled(own), *implementations]

    def _optional_outputs(
        self, native: cst.FunctionDef, variant: Variant, body: Sequence[cst.BaseStatement]
    ) -> list[str]:
        """Which results are None exactly when an argument is, as an option of the op."""
        members = variant.returns.partition("[")[2].rpartition("]")[0].split(", ")
        names, decides = returned_names(body), []
        optional = {p.name for p in variant.given if p.annotation == f"{TENSOR} | None"}
        for index in (number for number, member in enumerate(members) if member.endswith("None")):
            there = {each[index] for each in names if each} if None not in names else set()
            if len(there) == 1 and there <= optional:
                decides.append(f'{index}: "{there.pop()}"')
            else:
                self.left(native, f"result {index} may be None, and no argument of its name decides that")
        return [f"optional_outputs={{{', '.join(decides)}}}"] if decides else []

    def _filled(self, texts: Iterable[str]) -> list[str]:
        return [printing.fill(text, list(self.attributes)) for text in texts]

    def _implementations(
        self, variant: Variant, methods: Mapping[str, cst.FunctionDef], rewriting: Rewriting
    ) -> list[str]:
        found: list[str] = []
        rewriting.dropped = variant.dropped
        overwriting: set[str] = set()
        for name in FORWARDS:  # in this order: forward_hip may call forward_cuda
            method = methods.get(name)
            if method is None or name in self.failed or delegate(method) is not None:
                continue
            guards, rest = self._guards(method, methods)
            body = variant.fold(rest)
            provider = printing.provider_called(self.provider, self.layer, name.removeprefix("forward_"))
            function = f"_{variant.variable}_{provider}"
            options = self._options(name, methods)
            predicate = printing.predicate_body(guards, rewriting, method)
            if predicate:
                found.append(printing.function(f"{function}_takes", variant.given, "bool | ir.Rejected", predicate))
                options.insert(0, f"supports_args={function}_takes")
            written = self._overwrites(body, variant)
            allowed = (written,) if self.layer.replaces else ((), written)
            if forwards_called(body) & overwriting or (written and variant.activations not in allowed):
                self.left(method, f"{name} overwrites its arguments in a way that its op cannot say")
                found = found[: -1 if predicate else None]
                continue
            if written:
                overwriting.add(name)
                variant.activations = written
                options.append("inplace=True")
            definition = printing.function(
                function, variant.given, variant.returns, self._body(rewriting, method, body)
            )
            found.append(printing.implementation_text(variant.variable, provider, options, definition))
            self.result.implementations.append((variant.op, provider, bool(predicate)))
        return self._filled(found)

    def _body(self, rewriting: Rewriting, method: cst.FunctionDef, body: Sequence[cst.BaseStatement]) -> str:
        rewritten = specialised(rewriting.rewrite(method, body), "None", False)  # attributes that are always None
        text, name = block(rewritten), rewriting.dropped
        return f"    {name} = None\n{text}" if name and re.search(rf"\b{name}\b", text) else text

    def _guards(
        self, method: cst.FunctionDef, methods: Mapping[str, cst.FunctionDef]
    ) -> tuple[list[Guard], list[cst.BaseStatement]]:
        """The conditions of a method and of those that it calls, and its statements behind them."""
        guards, rest = split_guards(statements(method), self._tensors(method), self_name(method))
        for name in sorted(forwards_called(rest)):
            other = methods.get(name)
            if other is not None and other is not method:
                guards += split_guards(statements(other), self._tensors(other), self_name(other))[0]
        return guards, rest

    def _overwrites(self, body: Sequence[cst.BaseStatement], variant: Variant) -> tuple[str, ...]:
        """The arguments that an implementation returns as they are: it works in place."""
        names = returned_names(body)
        only = next(iter(names)) if len(names) == 1 else None
        tensors = {p.name for p in variant.given if p.annotation in (TENSOR, f"{TENSOR} | None")}
        return only if only and set(only) <= tensors and not set(only) & locals_of(body) else ()

    def _options(self, name: str, methods: Mapping[str, cst.FunctionDef]) -> list[str]:
        """Where an implementation runs: on its platform, and on those whose method only calls this one."""
        also = [each for each, method in methods.items() if each in FORWARDS and delegate(method) == name]
        devices = ", ".join(f'"{each}"' for each in dict.fromkeys(DEVICES[each] for each in [name, *also]))
        where = [f"device_types=({devices}{',' if ',' not in devices else ''})"]
        if name == "forward_hip":
            return ["supported=torch.version.hip is not None", *where]
        if name == "forward_cuda" and "forward_hip" in methods and "forward_hip" not in also:
            return ["supported=torch.version.hip is None", *where]
        return where

    # --- the class ---------------------------------------------------------------------------------------------

    def _write_class(self, native: cst.FunctionDef) -> None:
        head = f"self, {code(native.params)}" if is_static(native) else code(native.params)
        calls = [
            (v, ", ".join(self.attributes.get(p.name, p.name) for p in v.given) + ("," if len(v.given) == 1 else ""))
            for v in self.result.variants
        ]
        if len(calls) == 1:
            text = f"def ir_args({head}):\n    return ({calls[0][1]})\n"
            op = calls[0][0].variable
        else:
            (absent, without), (there, values) = calls
            text = (
                f"def ir_call({head}):\n    if {absent.dropped} is None:\n"
                f"        return {absent.variable}, ({without})\n    return {there.variable}, ({values})\n"
            )
            op = f"({absent.variable}, {there.variable})"
        self.result.texts.append(printing.class_text(self.layer, op, text))

    def _replacement(self) -> Migrated:
        """A class that is registered as the replacement of another: implementations for that one's op."""
        layer = self.layer
        original = self.done.get(layer.parent.name) if layer.parent is not None else None
        if original is None or not original.variants:
            return self.left(
                layer.node,
                f"it replaces {layer.replaces}, which is not in this file or has no op: register its forward methods "
                "as implementations of that op by hand",
            )
        if "forward_native" in layer.methods:
            self.left(layer.methods["forward_native"], "it has a forward_native of its own, which is another meaning")
        native = layer.method("forward_native")
        if native is None:
            return self.result
        rewriting = self._rewriting(layer.op)
        self.failed = set()
        for name in FORWARDS:
            if name in layer.methods:
                self._read_forward(name, layer.methods[name], native, rewriting)
        known = {p.name for p in original.variants[0].given}
        for attribute in rewriting.attributes:
            if rewriting.parameter(attribute) not in known:
                self.left(layer.node, f"self.{attribute} is no parameter of the op of {layer.replaces}")
                return self.result
        self.attributes = {rewriting.parameter(a): a for a in original.layer.attributes}
        self.attributes = {name: a for name, a in self.attributes.items() if name in known}
        for variant in original.variants:
            mine = self._rewriting(variant.variable)
            texts = self._implementations(replace(variant), layer.methods, mine)
            self.result.texts += [*self._filled(mine.helpers.values()), *texts]
        return self.result
