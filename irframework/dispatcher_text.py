"""The text of the generated `__call__` of an op.

Owns what that function says: the tests that make a call plain, the candidates in order with their declared conditions
inlined, the call, and what is asked of its outputs. What it must do is defined by `dispatch.resolve`: both read the
same candidate lists and the same condition expressions. Does not compile it or put it in place: see `dispatcher.py`.
"""

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from irframework import autocast
from irframework.codegen import NUMBER_TYPES, missing_test, passed_to, plain_class
from irframework.known_calls import KnownCalls, dense
from irframework.settings import settings

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp


def with_self(op: "IrOp") -> str:
    """Return an op's parameters as a method declares them."""
    return f"self, {op.parameters.declared}" if op.parameters.declared else "self"


class Writer:
    """Writes the text of one dispatcher, and collects the objects that it refers to."""

    def __init__(self, op: "IrOp", donated: bool) -> None:
        self.op = op
        self.donated = donated
        self.scope: dict[str, Any] = {}
        self.read_once: list[tuple[str, str]] = []
        self.looks = False  # at values, before the implementation runs
        self.known: KnownCalls | None = None  # the class that text is being written for
        self.optional = {
            name
            for name, p in op.signature.parameters.items()
            if p.annotation not in (Tensor, torch.dtype, *NUMBER_TYPES)
        }
        self.optional -= set(op.optional_outputs.values())  # where that is None, so is an output: no plain call

    def dispatcher(self, branches: list[tuple[str, list["IrOpImpl"]]], known: tuple[KnownCalls, ...]) -> str:
        """Return the text for the implementations that may be chosen, per device type and best first.

        Calls of the classes in `known` are looked for first. What they do not take, by a property that is not the same
        for the whole class, is looked at once more by the text for all calls.
        """
        everything = self.op.parameters.together
        lines = [f"def __call__({with_self(self.op)}):", "    if _current_context() is _CONTEXT:"]
        plain = self._plain_arguments()
        if plain is not None:
            for self.known in known:
                lines.append(f"        if {self._of_known_class(self.known)}:")
                lines += self._candidates(*branches[self.known.candidates])
            self.known = None
            lines.append(f"        if {plain}:")
            for index, (device, impls) in enumerate(branches):
                lines.append(f"            {'el' if index else ''}if {self._on_device(device)}:")
                lines.append("                if _missed():")
                lines.append(f"                    _learn({index}, {everything})")
                lines += self._candidates(device, impls)
        lines.append(f"        return _unusual(_op, {self.donated}, {everything})")
        lines.append(f"    return _other_context(_op, {self.donated}, {everything})")
        return "\n".join(lines) + "\n"

    def _of_known_class(self, known: KnownCalls) -> str:
        """Expression that is true when the plain path is right and the tensors are of a class."""
        tests = ["not _modes._is_in_torch_dispatch_mode", "_forward_ad._current_level < 0"]
        tests += [f"{name} is None" for name in known.absent]
        tests += self._plain_numbers()
        if known.needs_grad:
            tests.append("not _grad_enabled()")
        if known.inference and self.donated and not known.untracked:
            tests.append("_inference_mode()")
        if not autocast.is_in_keys_of(known.device):
            tests.append("not _autocast()")
        asked = list(known.present)
        if known.ordinary is not None:
            asked.append(self._name("_ordinary", known.ordinary))
        return " and ".join([*tests, f"{self._name('_known', known.guard)}({', '.join(asked)})"])

    def _candidates(self, device: str, impls: list["IrOpImpl"]) -> list[str]:
        lines = []
        self.read_once = self._read_twice(impls)
        for name, attribute in self.read_once:
            read = self._unless_none_else(name, f"{name}.{attribute}")
            lines.append(f"                _{name}_{attribute} = {read}")
        self.looks = self.op.value_check is not None and (device == "cpu" or settings().check_values)
        for impl in impls:
            lines.extend(self._candidate(impl))
        return lines

    def _plain_arguments(self) -> str | None:
        """Expression that is true when the plain path is right for the arguments; None when it never is."""
        if not self.op.tensors or set(self.op.signature.parameters) - set(self.op.tensors) - self._numbers():
            return None
        tests = ["not _modes._is_in_torch_dispatch_mode", "_forward_ad._current_level < 0"]
        for name in self.op.tensors:
            # Weights are usually Parameters and activations are not: ask for the likelier class first. A Parameter
            # is never overwritten, so it is no plain activation of a donating call.
            if self.donated and name in self.op.activations:
                test = f"{name}.__class__ is _Tensor"
            else:
                first, second = ("_Tensor", "_Parameter") if name in self.op.activations else ("_Parameter", "_Tensor")
                test = f"({name}.__class__ is {first} or {name}.__class__ is {second})"
            tests.append(self._unless_none(name, test))
        tests += self._plain_numbers()
        needs_grad = " or ".join(
            f"({name} is not None and {name}.requires_grad)" if name in self.optional else f"{name}.requires_grad"
            for name in self.op.tensors
        )
        tests.append(f"not (_grad_enabled() and ({needs_grad}))")
        tests.append("not _autocast()")
        return " and ".join(tests)

    def _plain_numbers(self) -> list[str]:
        tests = []
        for name, parameter in self.op.signature.parameters.items():
            if name not in self.op.tensors:
                kind = plain_class(parameter.annotation)
                known = "_Dtype" if kind is torch.dtype else kind.__name__ if kind else kind
                tests.append(self._unless_none(name, f"{name}.__class__ is {known}"))
        return tests

    def _numbers(self) -> set[str]:
        return {name for name, p in self.op.signature.parameters.items() if plain_class(p.annotation) is not None}

    def _unless_none(self, name: str, test: str) -> str:
        return f"({name} is None or {test})" if self._may_be_none(name) else test

    def _unless_none_else(self, name: str, value: str) -> str:
        return f"None if {name} is None else {value}" if self._may_be_none(name) else value

    def _may_be_none(self, name: str) -> bool:
        return name in self.optional and (self.known is None or name not in self.known.present)

    def _left_of(self, test: str) -> str | None:
        """What is left of a test in the class that is written for: "" where it holds, None where it does not."""
        return test if self.known is None else self.known.settled.get(test, test)

    def _read_twice(self, impls: list["IrOpImpl"]) -> list[tuple[str, str]]:
        """Tensors' dtypes and shapes that conditions ask for more than once; reading one costs as much as a call."""
        text = " ".join(self._left_of(check.test) or "" for impl in impls for check in impl.checks)
        pairs = [(name, attribute) for name in self.op.tensors for attribute in ("dtype", "shape")]
        return [pair for pair in pairs if len(re.findall(_read(*pair), text)) > 1]

    def _tests(self, impl: "IrOpImpl") -> str | None:
        """The conditions of an implementation; None where calls of the known class never meet them."""
        tests = [missing_test(self.op, name) for name in impl.missing]
        asked_by_kernel = self._shapes_asked_by(impl)
        for check in impl.checks:
            left = self._left_of(check.test)
            if left is None:
                return None
            tests += [left] if left and left not in asked_by_kernel else []
        text = " and ".join(tests)
        for name, attribute in self.read_once:
            text = re.sub(_read(name, attribute), f"_{name}_{attribute}", text)
        for constant in set(re.findall(r"(?<=\bis )torch\.(\w+)", text)):  # not in a word of `one_of`
            self.scope[f"_torch_{constant}"] = getattr(torch, constant)
        return re.sub(r"(?<=\bis )torch\.(\w+)", r"_torch_\1", text)

    def _shapes_asked_by(self, impl: "IrOpImpl") -> list[str]:
        """What is left of conditions on shapes in a class of calls, where the implementation itself asks for them."""
        if self.known is None or not impl.checks_tensors:
            return []
        left = [self.known.settled.get(check.test) for check in impl.checks if check.rests_on == "shape"]
        return [test for test in left if test]

    def _on_device(self, device: str) -> str:
        tests = [self._unless_none(name, _device_test(name, device)) for name in self.op.tensors]
        required = [name for name in self.op.tensors if name not in self.optional]
        if device not in ("cpu", "meta") and torch.accelerator.device_count() > 1:
            first = required[0] if required else None
            for name in self.op.tensors:
                if first is not None and name != first:
                    tests.append(self._unless_none(name, f"{name}.get_device() == {first}.get_device()"))
        return " and ".join(tests)

    def _candidate(self, impl: "IrOpImpl") -> list[str]:
        if impl.functional is not None and not self.donated:
            impl = impl.functional
        fn = self._name("_f", impl.fn)
        tests = self._tests(impl)
        if tests is None:
            return []
        indent = " " * 16
        lines = []
        if tests:
            lines.append(f"{indent}if {tests}:")
            indent += "    "
        if impl.predicates:
            asked = " and ".join(f"{self._name('_p', p)}({passed_to(self.op, p)})" for p in impl.predicates)
            lines += [
                f"{indent}try:",
                f"{indent}    _ok = {asked}",
                f"{indent}    if _ok is not True and _ok is not False:",
                f"{indent}        _ok = _ok.__class__ is not _Rejected and bool(_ok)",
                f"{indent}except Exception as _error:",
                f"{indent}    _ok = _predicate_raised({self._name('_i', impl)}, _error)",
                f"{indent}if _ok:",
            ]
            indent += "    "
        everything = self.op.parameters.together
        if not impl.proven:
            return [*lines, f"{indent}return _unusual(_op, {self.donated}, {everything})"]
        if self.looks and (not impl.checks_values or settings().check_values):
            plainly = "" if self.known is not None else "_transform() is None and "  # batched tensors show no values
            lines.append(f"{indent}{plainly}_check_values({self.op.parameters.passed})")
        passed = passed_to(self.op, impl.fn)
        if impl.inplace and self.donated:
            lines.append(f"{indent}if {self._may_overwrite(impl)}:")
            given = tuple(name for name in self.op.activations if self.known is None or name in self.known.present)
            lines += self._finish(indent + "    ", f"{fn}({passed})", impl, given)
            lines.append(f"{indent}return _unusual(_op, True, {everything})")
            return lines
        if impl.inplace:
            for name in self.op.activations:
                copy = f"{name}.clone(memory_format=_contiguous_format)"
                lines.append(f"{indent}_own_{name} = {self._unless_none_else(name, copy)}")
            passed = passed_to(self.op, impl.fn, rename={name: f"_own_{name}" for name in self.op.activations})
        return lines + self._finish(indent, f"{fn}({passed})", impl, given=())

    def _may_overwrite(self, impl: "IrOpImpl") -> str:
        """Donated memory may be overwritten only if every element is there once and no other argument shows it."""
        if self.known is not None:
            return self._known_may_overwrite(impl, self.known)
        tests = ["_transform() is None"]  # a kernel would write to what torch.func wraps; native must see it whole
        tests += [self._unless_none(name, dense(name).test) for name in self.op.activations]
        tests += [self._unless_none(name, f"type({name}._base) is not _Parameter") for name in self.op.activations]
        # Without gradients now, but a checkpoint may run the call again with them.
        tests += [self._unless_none(name, f"not {name}.requires_grad") for name in self.op.activations]
        for name in self.op.activations:  # torch lets nobody write to an inference tensor outside
            tests.append(self._unless_none(name, f"(not {name}.is_inference() or _inference_mode())"))
        for one, other in self._pairs_to_keep_apart(self.op.tensors):
            nones = [f"{name} is None" for name in (one, other) if name in self.optional]
            tests.append(f"({' or '.join([*nones, f'not _shares_storage({one}, {other})'])})")
        return " and ".join(tests)

    def _known_may_overwrite(self, impl: "IrOpImpl", known: KnownCalls) -> str:
        """The same in a class of calls, which tells of transforms, gradients and inference tensors."""
        given = [name for name in self.op.activations if name in known.present]
        tests = [self._left_of(dense(name).test) or "" for name in given]
        if not known.untracked:
            tests += [f"type({name}._base) is not _Parameter" for name in given]
        if not impl.checks_tensors:
            tests += self._lie_apart(known)
        return " and ".join(filter(None, tests)) or "True"

    def _lie_apart(self, known: KnownCalls) -> list[str]:
        """Two tensors of one storage give the same Python object for it, as long as that lives: the test keeps it."""
        read: set[str] = set()
        tests = []
        for pair in self._pairs_to_keep_apart(known.present):
            storages = [f"_{name}_s" if name in read else f"(_{name}_s := {name}.untyped_storage())" for name in pair]
            tests.append(" is not ".join(storages))
            read.update(pair)
        return tests

    def _pairs_to_keep_apart(self, tensors: tuple[str, ...]) -> list[tuple[str, str]]:
        """Each tensor that is overwritten, with each other one."""
        given = [name for name in self.op.activations if name in tensors]
        ordered = [*given, *(name for name in tensors if name not in given)]
        return [(one, other) for i, other in enumerate(ordered) for one in ordered[:i] if one in given]

    def _note_written(self, given: tuple[str, ...], written: str) -> list[str]:
        """Count the write for autograd, which inference tensors are none of."""
        if self.known is not None and self.known.untracked:
            return []
        if any(self._may_be_none(name) for name in given):
            return [f"_note_written({', '.join(given)})"]
        return [f"_increment_version({written})"]

    def _written_only(self, indent: str, outputs: list[str], given: tuple[str, ...]) -> list[str]:
        """Return the outputs where they are what was overwritten, as they mostly are: those lie apart from all else."""
        if not 1 < len(outputs) == len(given) or any(self._may_be_none(name) for name in given):
            return []
        same = [f"_result[{index}] is {name}" for index, name in enumerate(given)]
        return [
            f"{indent}if _result.__class__ is tuple and len(_result) == {len(outputs)} and {' and '.join(same)}:",
            *(f"{indent}    {line}" for line in self._note_written(given, "_result")),
            f"{indent}    return _result",
        ]

    def _finish(self, indent: str, call: str, impl: "IrOpImpl", given: tuple[str, ...]) -> list[str]:
        """Call the function and return its outputs if they keep the op's promises, else repair them."""
        there = self.op.tensors if self.known is None else self.known.present
        kept = [name for name in there if name not in given]
        outputs = ["_y"] if self.op.num_outputs == 1 else [f"_y{i}" for i in range(self.op.num_outputs)]
        everything = self.op.parameters.together
        lines = [f"{indent}_result = {call}"]
        if impl.provider != "native":
            lines = [
                f"{indent}try:",
                f"{indent}    _result = {call}",
                f"{indent}except Exception as _error:",
            ]
            asked_by_kernel = self._shapes_asked_by(impl)
            if given and self.known is not None and impl.checks_tensors:
                asked_by_kernel += self._lie_apart(self.known)
            if asked_by_kernel:  # where one of these is why, nothing was written
                lines.append(f"{indent}    if not ({' and '.join(asked_by_kernel)}):")
                lines.append(f"{indent}        return _unusual(_op, {self.donated}, {everything})")
            if not given:  # a kernel cannot read what torch.func wraps, and says so
                lines.append(f"{indent}    if _transform() is not None:")
                lines.append(f"{indent}        return _unusual(_op, {self.donated}, {everything})")
            lines += [f"{indent}    _refused(_op, {everything}, _error)", f"{indent}    raise"]
        if given:
            lines += self._written_only(indent, outputs, given)
            lines += [indent + line for line in self._note_written(given, f"({', '.join(given)},)")]
        repair = f"_own_outputs(_op, _result, {everything}, {self._name('_i', impl)}, {given!r})"
        if len(outputs) == 1:
            lines.append(f"{indent}_y = _result")
            guard = ""
        else:
            lines.append(f"{indent}if _result.__class__ is tuple and len(_result) == {len(outputs)}:")
            lines.append(f"{indent}    {', '.join(outputs)} = _result")
            guard = "    "
        # What was overwritten was contiguous when it was given away.
        itself = "".join(f"{{y}} is {name} or " for name in given if not self._may_be_none(name))
        tests = [f"({itself.format(y=y)}{y}.__class__ is _Tensor and {y}.is_contiguous())" for y in outputs]
        tests += [f"{y} is not {name}" for y in outputs for name in kept]
        tests += [f"{a} is not {b}" for i, a in enumerate(outputs) for b in outputs[:i]]
        if impl.shares or impl.provider == "native":  # others were looked at in their first call; asking is not free
            tests += [self._unless_none(name, f"not _shares_storage({y}, {name})") for y in outputs for name in kept]
            tests += [f"not _shares_storage({a}, {b})" for i, a in enumerate(outputs) for b in outputs[:i]]
        lines.append(f"{indent}{guard}if {' and '.join(tests)}:")
        lines.append(f"{indent}{guard}    return _result")
        lines.append(f"{indent}return {repair}")
        return lines

    def _name(self, kind: str, value: Any) -> str:
        for name, known in self.scope.items():
            if known is value and name.startswith(kind):
                return name
        name = f"{kind}{len(self.scope)}"
        self.scope[name] = value
        return name


def _read(name: str, attribute: str) -> str:
    """Pattern of a tensor's attribute in a condition; not in a word of `one_of`, which stands in quotes."""
    return rf"(?<!['\w.]){name}\.{attribute}\b(?!')"


def _device_test(name: str, device: str) -> str:
    return f"{name}.is_{device}" if device in ("cpu", "cuda", "xpu", "mps") else f"{name}.device.type == {device!r}"
