"""What an implementation with `checks_tensors=True` refuses.

Owns the rule `checks_tensors`: calls whose tensors overlap what is overwritten, or differ where `same_shape` wants them
alike, are made of right ones; each must raise, and leave all memory as it was. Where it does, eager calls are right to
leave the question to the implementation. An activation that it does not overwrite may overlap what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from irframework import contract
from irframework.contract import described_call
from irframework.dispatch import tensors_of
from irframework.testing.findings import Findings, check_alive, wait_for
from irframework.testing.samples import DTYPES, of_their_own, usual_call

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl

_SHAPES = ((5, 64), (4, 33), (1, 64))
_ALIGNMENT = 16  # bytes: what a kernel may want of where tensors begin


def try_refusals(findings: Findings, device: str) -> None:
    """Call an implementation, and its functional form, with what they say they refuse."""
    if not findings.impl.checks_tensors:
        findings.skip("checks_tensors", "it is not registered with checks_tensors=True")
        return
    impls = [impl for impl in (findings.impl, findings.impl.functional) if impl is not None]
    for impl in impls:
        for args in _usual_calls(impl, device):
            for wrong in _wrong_calls(impl, args):
                findings.tried("checks_tensors")
                _try_one(findings, impl, wrong, torch.device(device))


def _usual_calls(impl: IrOpImpl, device: str) -> list[tuple[Any, ...]]:
    made = [usual_call(impl, shape, dtype, device) for dtype in DTYPES for shape in _SHAPES]
    return [of_their_own(impl, args) for args in made if args is not None]


@dataclass(frozen=True, slots=True)
class _Wrong:
    """A call that an implementation refuses.

    Attributes:
        args: All arguments in the order of the signature.
        what: What of it is refused.
        overlapping: Tensors that overlap: the call is wrong if they are overwritten. None do: it is wrong anyhow.
    """

    args: tuple[Any, ...]
    what: str
    overlapping: tuple[str, ...] = ()


def _wrong_calls(impl: IrOpImpl, args: tuple[Any, ...]) -> Iterator[_Wrong]:
    named = impl.op.named(args)
    tensors = dict(tensors_of(impl.op, args))
    given = [name for name in impl.op.activations if name in tensors] if impl.inplace else []
    for one in given:
        for other in tensors:
            if other == one or (other in given and given.index(other) < given.index(one)):
                continue
            for pair in _overlapping(tensors[one], tensors[other]):
                wrong = named | dict(zip((one, other), pair, strict=True))
                yield _Wrong(tuple(wrong.values()), f"{other!r} in memory of {one!r}", (one, other))
    for check in impl.checks:
        if check.rests_on == "shape" and all(name in tensors for name in check.parameters):
            last = check.parameters[-1]
            if tensors[last].dim() and tensors[last].shape[0] > 1:
                shown = " and ".join(map(repr, check.parameters))
                wrong = named | {last: tensors[last][1:].clone()}
                yield _Wrong(tuple(wrong.values()), f"{shown} of different shapes")


def _overlapping(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors with the same numbers that share a byte, or more: from the start on, and at either end."""
    ends = [(tensor.nbytes - 1) // _ALIGNMENT * _ALIGNMENT for tensor in (one, other)]
    for first, second in {(0, 0), (0, ends[0]), (ends[1], 0)}:
        memory = torch.zeros(one.nbytes + other.nbytes + _ALIGNMENT, dtype=torch.uint8, device=one.device)
        pair = [
            memory[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            for start, tensor in ((first, one), (second, other))
        ]
        for place, tensor in zip(pair, (one, other), strict=True):
            place.copy_(tensor)
        yield pair[0], pair[1]


def _try_one(findings: Findings, impl: IrOpImpl, wrong: _Wrong, device: torch.device) -> None:
    call = described_call(impl.op, wrong.args)
    findings.told(call)
    before = {name: tensor.clone() for name, tensor in tensors_of(impl.op, wrong.args)}
    refused = False
    try:
        impl.apply(wrong.args)
        wait_for(device)
    except Exception as error:
        check_alive(device, error)
        refused = True
    changed = [name for name, tensor in tensors_of(impl.op, wrong.args) if not _same(tensor, before[name])]
    if refused and changed:
        findings.note(contract.writes_what_it_refuses(changed[0], wrong.what), (changed[0], wrong.what), call)
    elif not refused and (not wrong.overlapping or not set(changed).isdisjoint(wrong.overlapping)):
        findings.note(contract.takes_what_it_should_refuse(wrong.what), wrong.what, call)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
