"""Trying one implementation, call after call.

It is called itself, not through the framework, whose repairs would hide what it does: on real tensors in storages that
are larger than they need be, on tensors without data, and once as the compiler would trace it. Does not own the rules
and their words (`irframework/contract.py`), nor the calls (`samples.py`).

Private torch API used here (read in 2.11 and 2.13): `torch._subclasses.fake_tensor.FakeTensorMode`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from irframework import contract
from irframework.contract import Breach, described_call, described_tensor, titled
from irframework.dispatch import tensors_of
from irframework.errors import ImplementationContractError, LoweringError
from irframework.memory import place_of, storage_key
from irframework.op import NATIVE, IrOp
from irframework.testing.out_overloads import OutOverloads
from irframework.testing.samples import Sample, laid_out, map_tensors

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken rule.

    Attributes:
        rule: Which one; see `irframework.contract.Breach`.
        what: What the implementation does, as a sentence that names it.
        advice: What to do about it.
        inputs: The first call that showed it.
        times: How many calls showed it.
    """

    rule: str
    what: str
    advice: str
    inputs: str
    times: int = 1

    def __str__(self) -> str:
        again = f", and {self.times - 1} more" if self.times > 1 else ""
        return f"{self.what}. {self.advice}\n  in {self.inputs}{again}"


class Trial:
    """One implementation, call after call."""

    def __init__(self, impl: IrOpImpl) -> None:
        self.impl = impl
        self.calls = 0
        self.declined = "native takes none of them"
        self.found: dict[tuple[str, object], Violation] = {}
        self._could_work_in_place = False
        self._works_in_place = False
        self._first: tuple[tuple[Any, ...], str] | None = None

    def try_on(self, sample: Sample) -> None:
        """Call it, if it takes the call, and compare everything with what the op promises."""
        args = laid_out(self.impl, sample)
        answer = self.impl.accepts(args)
        if answer is not True:
            self.declined = getattr(answer, "reason", "supports_args said no")
            return
        self.calls += 1
        call = f"{described_call(self.impl.op, args)}, tensors {sample.layout}"
        self._first = self._first or (args, call)
        memory = [_Memory(name, tensor) for name, tensor in tensors_of(self.impl.op, args)]
        closed_over = [_Memory(name, tensor) for name, tensor in _closed_over(self.impl)]
        expected = self.impl.op.registered[NATIVE].apply(laid_out(self.impl, sample))
        fake = self._on_fakes(args, call)
        try:
            with torch.no_grad(), self._trying_overloads(call):
                returned = self.impl.apply(args)
        except Exception as error:
            self._note(contract.raises(error), None, call)
            return
        self._check_writes(memory, closed_over, call)
        outputs = self._outputs(returned, expected, call)
        if outputs is not None:
            self._check_outputs(outputs, _flat(expected), memory, call)
            if fake is not None:
                self._compare_with_fakes(outputs, memory, fake, call)

    def finish(self) -> None:
        """What can be said after all calls only."""
        if self._first is None:
            return
        args, call = self._first
        if self._could_work_in_place and not self._works_in_place:
            self._note(contract.not_in_place(self.impl), None, call)
        if not self.found:  # else the compiler would only say the same again
            self._lower(args, call)

    def _trying_overloads(self, call: str) -> OutOverloads:
        return OutOverloads(lambda op, problem: self._note(contract.out_overload(op, problem), (op, problem), call))

    def _note(self, breach: Breach | None, subject: object, call: str) -> None:
        if breach is None:
            return
        known = self.found.get((breach.rule, subject))
        if known is not None:
            self.found[breach.rule, subject] = replace(known, times=known.times + 1)
            return
        what = f"{titled(self.impl)} {breach.what}"
        self.found[breach.rule, subject] = Violation(breach.rule, what, breach.advice, call)

    def _check_writes(self, memory: list[_Memory], closed_over: list[_Memory], call: str) -> None:
        for each in memory:
            inside, beside = each.changes()
            if inside:
                self._note(contract.write(self.impl, each.name), each.name, call)
            if beside:
                self._note(contract.write_beside(each.name), f"beside {each.name}", call)
            if self.impl.inplace and each.tensor.numel() and each.name in self.impl.op.activations:
                self._could_work_in_place = True
                self._works_in_place = self._works_in_place or inside
        for each in closed_over:
            if any(each.changes()):
                self._note(contract.closed_over_write("overwrites"), f"closed over {each.name}", call)

    def _outputs(self, returned: Any, expected: Any, call: str) -> list[Tensor] | None:
        outputs = _flat(returned)
        wanted = len(_flat(expected)), isinstance(expected, (tuple, list))
        if not all(isinstance(output, Tensor) for output in outputs):
            kinds = [type(output).__name__ for output in outputs]
            self._note(contract.no_tensors(kinds, *wanted), None, call)
            return None
        breach = contract.count(len(outputs), isinstance(returned, (tuple, list)), *wanted)
        self._note(breach, None, call)
        return outputs if breach is None else None

    def _check_outputs(self, outputs: list[Tensor], expected: list[Tensor], memory: list[_Memory], call: str) -> None:
        for index, (got, want) in enumerate(zip(outputs, expected, strict=True)):
            if (got.shape, got.dtype, got.device) != (want.shape, want.dtype, want.device):
                self._note(contract.output(index, got, want.contiguous()), index, call)
                continue
            if not got.is_contiguous() and got.stride() != want.stride():  # where native's is repaired, so may be this
                self._note(contract.strides(index, got, want.contiguous().stride()), index, call)
            self._note(_difference(index, got, want, self.impl.op), index, call)
            if got.numel():
                self._check_place(index, outputs, memory, call)

    def _check_place(self, index: int, outputs: list[Tensor], memory: list[_Memory], call: str) -> None:
        got = outputs[index]
        given = self.impl.op.activations if self.impl.inplace else ()
        owners = [each.name for each in memory if storage_key(each.tensor) == storage_key(got)]
        self._works_in_place = self._works_in_place or not set(given).isdisjoint(owners)
        for owner in owners:
            if owner not in given:
                self._note(contract.sharing(index, f"its argument {owner!r}"), (index, owner), call)
        for other, earlier in enumerate(outputs[:index]):
            if earlier.numel() and storage_key(earlier) == storage_key(got):
                self._note(contract.sharing(index, f"output {other}"), (index, other), call)
        if not owners and got.storage_offset():
            self._note(contract.offset(index, got), index, call)

    # --- tensors without data, compiled code -------------------------------------------------------------------

    def _on_fakes(self, args: tuple[Any, ...], call: str) -> tuple[list[Any], list[Any]] | None:
        """Call it on tensors without data: (arguments, outputs), or None if it cannot be."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = map_tensors(mode.from_tensor, args)
        given = [tensor for _, tensor in tensors_of(self.impl.op, fakes)]
        try:
            with mode, torch.no_grad():
                return given, _flat(self.impl.apply(fakes))
        except Exception as error:
            self._note(contract.raises_without_data(error), None, call)
            return None

    def _compare_with_fakes(
        self, outputs: list[Tensor], memory: list[_Memory], fake: tuple[list[Any], list[Any]], call: str
    ) -> None:
        given, fakes = fake
        if len(fakes) != len(outputs):
            self._note(contract.differs_without_data(f"{len(fakes)} outputs", str(len(outputs))), None, call)
            return
        tensors = [each.tensor for each in memory]
        for index, (planned, got) in enumerate(zip(fakes, outputs, strict=True)):
            homes = "", ""
            if got.numel():
                homes = _home(planned, given, fakes[:index], memory), _home(got, tensors, outputs[:index], memory)
            if (_layout(planned), homes[0]) != (_layout(got), homes[1]):
                first, second = described_tensor(planned) + homes[0], described_tensor(got) + homes[1]
                self._note(contract.differs_without_data(f"{first} as output {index}", second), index, call)

    def _lower(self, args: tuple[Any, ...], call: str) -> None:
        """Let the compiler hold it to what only a trace shows."""
        try:
            _lowered(self.impl, args)
        except (ImplementationContractError, LoweringError) as error:
            self._note(contract.not_lowered(self.impl, error), None, call)


def _lowered(impl: IrOpImpl, args: tuple[Any, ...]) -> None:
    from irframework import compiler
    from irframework.priority import priority

    graph = torch.fx.Graph()
    inputs: list[Tensor] = []

    def placeholder(tensor: Tensor) -> Any:
        inputs.append(tensor)
        return graph.placeholder(f"input_{len(inputs)}")

    values = impl.op.named(map_tensors(placeholder, args))
    kinds = {name: p.kind for name, p in impl.op.signature.parameters.items()}
    keywords = {name: values.pop(name) for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY}
    graph.output(graph.call_function(impl.op.torch_op, tuple(values.values()), keywords))
    with priority({impl.op.name: [impl.provider]}):
        compiler.lower(torch.fx.GraphModule(torch.nn.Module(), graph), inputs, inference=True)


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
        part.copy_(self.values)
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


def _difference(index: int, got: Tensor, want: Tensor, op: IrOp) -> Breach | None:
    if not want.numel():
        return None
    tolerance = op.get_tolerance(want.dtype)
    a, b = (value.to(torch.complex128 if value.is_complex() else torch.float64) for value in (got, want))
    if torch.allclose(a, b, rtol=tolerance.rtol, atol=tolerance.atol, equal_nan=True):
        return None
    worst = float((a - b).abs().nan_to_num(float("inf")).max())
    return contract.values(index, worst, want.dtype, tolerance)


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
