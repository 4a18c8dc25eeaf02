"""Trying one implementation, call after call.

It is called itself, not through the framework, whose repairs would hide what it does: on real tensors in storages that
are larger than they need be, and on tensors without data. Owns what a single call shows. Does not own the rules and
their words (`irframework/contract.py`), the calls (`samples.py`), nor what several calls or a compiler show
(`repetition.py`, `compiled.py`, `streams.py`).

Private torch API used here (read in 2.11 and 2.13): `torch._subclasses.fake_tensor.FakeTensorMode`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from irframework import contract
from irframework.contract import described_call, described_tensor
from irframework.decision import Rejected
from irframework.dispatch import tensors_of
from irframework.impl import PREDICATE_RAISED
from irframework.memory import place_of, storage_key
from irframework.op import NATIVE
from irframework.testing.accuracy import Errors, Reference, distance
from irframework.testing.findings import Findings, check_alive, wait_for
from irframework.testing.out_overloads import OutOverloads
from irframework.testing.samples import CLOSE, Sample, laid_out, map_tensors

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl

_ALWAYS = ("raises", "count", "output", "strides", "offset", "sharing", "writes", "fake")
_PREDICATE = ("predicate_fakes", "predicate_raises")
RULES = (*_ALWAYS, *_PREDICATE, "in_place", "values", "special_values", "out_overload")


class Trial:
    """One implementation, call after call.

    Attributes:
        threads: How many threads torch uses when it is called.
        calls: How many calls it was tried on.
        declined: How many it declined.
        reason: Why it declined the last of those.
        errors: The largest errors of its results.
        first: Its first call.
    """

    def __init__(self, impl: IrOpImpl, device: str, findings: Findings) -> None:
        self.impl = impl
        self.device = torch.device(device)
        self.findings = findings
        self.threads = torch.get_num_threads()
        self.calls = 0
        self.declined = 0
        self.reason = "native takes none of them"
        self.errors = Errors()
        self.first: tuple[tuple[Any, ...], str] | None = None
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._reference = Reference(impl.op)
        self._could_work_in_place = False
        self._works_in_place = False

    def try_on(self, sample: Sample) -> None:
        """Call it, if it takes the call, and compare everything with what the op promises.

        Raises:
            DeviceLostError: The device cannot be used after it.
        """
        args = laid_out(self.impl, sample)
        call = f"{described_call(self.impl.op, args)}, {sample}"
        answer = self.impl.accepts(args)
        fakes = self._without_data(args)
        self._ask_predicate(fakes, answer, call)
        if answer is not True:
            self.declined += 1
            self.reason = getattr(answer, "reason", "supports_args said no")
            return
        self.calls += 1
        self.findings.told(call)
        self.first = self.first or (args, call)
        given = laid_out(self.impl, sample)
        try:
            with torch.no_grad():
                native = self.impl.op.registered[NATIVE].apply(given)
        except Exception as error:
            self.findings.note(contract.native_raises(self.impl, error), None, call)
            check_alive(self.device, error)
            return
        expected, is_tuple = _flat(native), isinstance(native, (list, tuple))
        memory = [_Memory(name, tensor) for name, tensor in tensors_of(self.impl.op, args)]
        closed_over = [_Memory(name, tensor) for name, tensor in _closed_over(self.impl)]
        fake = self._on_fakes(fakes, call)
        try:
            with torch.no_grad(), self._trying_overloads(sample, call):
                torch.set_num_threads(self.threads)
                returned = self.impl.apply(args)
                wait_for(self.device)
        except Exception as error:
            self.findings.note(contract.raises(error), None, call)
            check_alive(self.device, error)
            return
        finally:
            torch.set_num_threads(1)
        self.findings.tried(*_ALWAYS, "special_values" if sample.special else "values")
        self._check_writes(memory, closed_over, call)
        outputs = self._outputs(returned, expected, is_tuple, call)
        if outputs is not None:
            self._check_outputs(outputs, expected, memory, call)
            self._compare(sample, given, outputs, expected, call)
            if fake is not None:
                self._compare_with_fakes(outputs, memory, fake, call)

    def finish(self) -> None:
        """What can be said after all calls only."""
        if not self.impl.inplace:
            self.findings.skip("in_place", "it is not registered with inplace=True")
        elif self.first is not None and self._could_work_in_place:
            self.findings.tried("in_place")
            if not self._works_in_place:
                self.findings.note(contract.not_in_place(self.impl), None, self.first[1])
        self.findings.skip("out_overload", "it calls no torch op that has an .out overload of define_out_variant")

    # --- the predicate -----------------------------------------------------------------------------------------

    def _ask_predicate(self, fakes: tuple[Any, ...], answer: bool | Rejected, call: str) -> None:
        if not self.findings.asks(*_PREDICATE):
            return
        self.findings.tried(*_PREDICATE)
        reason = "" if answer is True else getattr(answer, "reason", "")
        if reason.startswith(PREDICATE_RAISED):
            self.findings.note(contract.predicate_raises(reason), reason, call)
            return
        without_data = self.impl.accepts(fakes)
        if (without_data is True) != (answer is True):
            breach = contract.fickle(_said(answer), _said(without_data), "without data")
            self.findings.note(breach, None, call)

    # --- one call ----------------------------------------------------------------------------------------------

    def _trying_overloads(self, sample: Sample, call: str) -> AbstractContextManager[Any]:
        if sample.layout != CLOSE or not self.findings.asks("out_overload"):
            return nullcontext()

        def tried(op: Any, problem: str | None) -> None:
            self.findings.tried("out_overload")
            if problem is not None:
                self.findings.note(contract.out_overload(op, problem), (op, problem), call)

        return OutOverloads(tried)

    def _check_writes(self, memory: list[_Memory], closed_over: list[_Memory], call: str) -> None:
        for each in memory:
            inside, beside = each.changes()
            if inside:
                self.findings.note(contract.write(self.impl, each.name), each.name, call)
            if beside:
                self.findings.note(contract.write_beside(each.name), f"beside {each.name}", call)
            if self.impl.inplace and each.tensor.numel() and each.name in self.impl.op.activations:
                self._could_work_in_place = True
                self._works_in_place = self._works_in_place or inside
        for each in closed_over:
            if any(each.changes()):
                self.findings.note(contract.closed_over_write("overwrites"), f"closed over {each.name}", call)

    def _outputs(self, returned: Any, expected: list[Tensor], is_tuple: bool, call: str) -> list[Tensor] | None:
        outputs = _flat(returned)
        if not all(isinstance(output, Tensor) for output in outputs):
            kinds = [type(output).__name__ for output in outputs]
            self.findings.note(contract.no_tensors(kinds, len(expected), is_tuple), None, call)
            return None
        breach = contract.count(len(outputs), isinstance(returned, (tuple, list)), len(expected), is_tuple)
        self.findings.note(breach, None, call)
        return outputs if breach is None else None

    def _check_outputs(self, outputs: list[Tensor], expected: list[Tensor], memory: list[_Memory], call: str) -> None:
        for index, (got, want) in enumerate(zip(outputs, expected, strict=True)):
            if not _alike(got, want):
                self.findings.note(contract.output(index, got, want.contiguous()), index, call)
                continue
            if not got.is_contiguous() and got.stride() != want.stride():  # where native's is repaired, so may be this
                self.findings.note(contract.strides(index, got, want.contiguous().stride()), index, call)
            if got.numel():
                self._check_place(index, outputs, memory, call)

    def _check_place(self, index: int, outputs: list[Tensor], memory: list[_Memory], call: str) -> None:
        got = outputs[index]
        given = self.impl.op.activations if self.impl.inplace else ()
        owners = [each.name for each in memory if storage_key(each.tensor) == storage_key(got)]
        self._works_in_place = self._works_in_place or not set(given).isdisjoint(owners)
        for owner in owners:
            if owner not in given:
                self.findings.note(contract.sharing(index, f"its argument {owner!r}"), (index, owner), call)
        for other, earlier in enumerate(outputs[:index]):
            if earlier.numel() and storage_key(earlier) == storage_key(got):
                self.findings.note(contract.sharing(index, f"output {other}"), (index, other), call)
        if not owners and got.storage_offset():
            self.findings.note(contract.offset(index, got), index, call)

    def _compare(
        self, sample: Sample, args: tuple[Any, ...], outputs: list[Tensor], expected: list[Tensor], call: str
    ) -> None:
        if not self.findings.asks("values", "special_values"):
            return
        exact = self._reference(args, expected)
        for index, (got, native) in enumerate(zip(outputs, expected, strict=True)):
            if not native.numel() or not _alike(got, native):
                continue
            tolerance = self.impl.op.get_tolerance(native.dtype)
            right = None if exact is None else exact[index]
            found = distance(got, native, right, tolerance)
            if found is not None:
                words = contract.special_values if sample.special else contract.values
                breach = words(index, found.worst, found.wrong, native.dtype, tolerance)
                self.findings.note(breach, (index, sample.kind if sample.special else ""), call)
            if right is not None and not sample.special:
                self.errors.add(sample.dtype, index, got, native, right)

    # --- tensors without data ----------------------------------------------------------------------------------

    def _without_data(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self.findings.asks("fake", *_PREDICATE):
            return args
        convert: Callable[[Tensor], Tensor] = self._mode.from_tensor
        return tuple(map_tensors(convert, value) for value in args)

    def _on_fakes(self, fakes: tuple[Any, ...], call: str) -> tuple[list[Any], list[Any]] | None:
        """Call it on tensors without data: (arguments, outputs), or None if it cannot be."""
        if not self.findings.asks("fake"):
            return None
        given = [tensor for _, tensor in tensors_of(self.impl.op, fakes)]
        try:
            with self._mode, torch.no_grad():
                return given, _flat(self.impl.apply(fakes))
        except Exception as error:
            self.findings.note(contract.raises_without_data(error), None, call)
            return None

    def _compare_with_fakes(
        self, outputs: list[Tensor], memory: list[_Memory], fake: tuple[list[Any], list[Any]], call: str
    ) -> None:
        given, fakes = fake
        if len(fakes) != len(outputs):
            self.findings.note(contract.differs_without_data(f"{len(fakes)} outputs", str(len(outputs))), None, call)
            return
        tensors = [each.tensor for each in memory]
        for index, (planned, got) in enumerate(zip(fakes, outputs, strict=True)):
            homes = "", ""
            if got.numel():
                homes = _home(planned, given, fakes[:index], memory), _home(got, tensors, outputs[:index], memory)
            if (_layout(planned), homes[0]) != (_layout(got), homes[1]):
                first, second = described_tensor(planned) + homes[0], described_tensor(got) + homes[1]
                self.findings.note(contract.differs_without_data(f"{first} as output {index}", second), index, call)


class _Memory:
    """A tensor and what its whole storage held."""

    def __init__(self, name: str, tensor: Tensor) -> None:
        self.name = name
        self.tensor = tensor
        self.place = place_of(tensor)
        self.bytes = _storage_bytes(tensor)
        self.values = tensor.detach().clone()

    def changes(self) -> tuple[bool, bool]:
        """Whether the tensor's bytes or its layout changed, and whether other bytes of its storage did."""
        if place_of(self.tensor) != self.place:
            return True, False
        now = _storage_bytes(self.tensor)
        if torch.equal(now, self.bytes):
            return False, False
        inside = now.clone()
        part = torch.empty(0, dtype=self.tensor.dtype, device=self.tensor.device)
        part.set_(inside.untyped_storage(), self.tensor.storage_offset(), self.tensor.shape, self.tensor.stride())
        values = self.values
        for dim, stride in enumerate(self.tensor.stride()):
            if stride == 0 and part.shape[dim] > 1:  # all the same elements: torch would not write to them
                part, values = part.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
        part.copy_(values)
        return not torch.equal(inside, now), not torch.equal(inside, self.bytes)


def _storage_bytes(tensor: Tensor) -> Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return whole.set_(tensor.untyped_storage()).clone()


def _closed_over(impl: IrOpImpl) -> Iterator[tuple[str, Tensor]]:
    try:
        seen = inspect.getclosurevars(inspect.unwrap(impl.fn))
    except (TypeError, ValueError):  # no Python function
        return
    for name, value in {**seen.globals, **seen.nonlocals}.items():
        if type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided:
            yield name, value


def _said(answer: bool | Rejected) -> str:
    reason = getattr(answer, "reason", None)
    return "yes" if answer is True else f"no ({reason})" if reason else "no"


def _alike(got: Tensor, want: Tensor) -> bool:
    return (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    """All of a tensor but its values; strides where they matter."""
    if not tensor.numel():
        return tensor.shape, tensor.dtype, tensor.device
    strides = [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    return tensor.shape, tensor.dtype, tensor.device, strides, tensor.storage_offset()


def _home(tensor: Tensor, given: Sequence[Tensor], earlier: Sequence[Tensor], memory: Sequence[_Memory]) -> str:
    """Whose memory an output lies in."""
    for each, owner in zip(memory, given, strict=True):
        if storage_key(owner) == storage_key(tensor):
            return f" in the memory of {each.name!r}"
    for index, other in enumerate(earlier):
        if storage_key(other) == storage_key(tensor):
            return f" in the memory of output {index}"
    return ""


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
