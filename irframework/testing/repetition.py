"""What several calls of one implementation show: the same bits again, alone and in a batch, and in several threads.

Owns the rules `deterministic`, `batch_invariant`, `threads`, and the part of `sharing` that two calls show.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from irframework import contract
from irframework.contract import described_call
from irframework.memory import storage_key
from irframework.op import NATIVE, IrOp
from irframework.testing.findings import Findings, bits_of, check_alive, same_bits, wait_for
from irframework.testing.samples import dtypes_of, of_their_own, usual_call

_AGAIN = ((5, 34), (37, 256), (513, 128), (2, 16386))
_BATCHES = ((300, 64), (33, 34), (7, 4096), (300, 5120))  # (rows, length)
_OTHER_BATCHES = (1, 2, 3, 64)
_THREADS = 4
_CALLS = 30
_PATIENCE = 30.0  # seconds


def try_again(findings: Findings, device: str) -> None:
    """The same call twice."""
    impl = findings.impl
    for dtype in dtypes_of(impl.op):
        for shape in _AGAIN:
            args = usual_call(impl, shape, dtype, device)
            if args is None:
                continue
            call = described_call(impl.op, args)
            findings.tried("deterministic")
            first = _called(findings, args)
            bits = bits_of(first)
            second = _called(findings, args)
            if not (same_bits(bits, bits_of(second)) and same_bits(bits, bits_of(_called(findings, args)))):
                findings.note(contract.unlike_itself("deterministic", "for the same call"), None, call)
            for index, (one, other) in enumerate(zip(_flat(first), _flat(second), strict=True)):
                if one.numel() and storage_key(one) == storage_key(other):
                    findings.note(contract.sharing_with_earlier(index), f"earlier {index}", call)


def try_rows_alone(findings: Findings, device: str) -> None:
    """Some rows of a batch, and the same rows in smaller ones."""
    impl = findings.impl
    if not impl.batch_invariant:
        findings.skip("batch_invariant", "it does not declare batch_invariant=True")
        return
    for dtype in dtypes_of(impl.op):
        for rows, length in _BATCHES:
            args = usual_call(impl, (rows, length), dtype, device)
            if args is None:
                continue
            batch = _Batch.of(impl.op, args, rows, (length,), dtype, device)
            if batch is None:
                findings.skip("batch_invariant", "which dimensions of the arguments are rows cannot be told")
                continue
            if not batch.returns_rows:
                findings.skip("batch_invariant", "no output has a row for each of the arguments'")
                continue
            whole = _called(findings, args)
            for count in _OTHER_BATCHES:
                for start in {0, rows // 2, rows - count}:
                    if count > rows or start + count > rows:
                        continue
                    findings.tried("batch_invariant")
                    part = _called(findings, batch.arguments(args, start, count))
                    if not same_bits(
                        bits_of(batch.outputs(part, 0, count)), bits_of(batch.outputs(whole, start, count))
                    ):
                        when = f"for {count} of the {rows} rows, from row {start} on, than for all"
                        breach = contract.unlike_itself("batch_invariant", when)
                        findings.note(breach, None, described_call(impl.op, args))


class _Batch:
    """Which dimensions of arguments and outputs count rows: those that change with the number of rows."""

    def __init__(self, op: IrOp, rows: int, given: list[int | None], returned: list[int | None]) -> None:
        self.op, self.rows, self.given, self.returned = op, rows, given, returned

    @classmethod
    def of(
        cls, op: IrOp, args: tuple[Any, ...], rows: int, rest: tuple[int, ...], dtype: torch.dtype, device: str
    ) -> _Batch | None:
        others = op.generate_inputs(shape=(rows + 1, *rest), dtype=dtype, device=device)
        native = op.registered[NATIVE]
        try:
            given = [_row_dim(a, b) for a, b in zip(args, others, strict=True)]
            pairs = zip(_flat(native.apply(args)), _flat(native.apply(others)), strict=True)
            returned = [_row_dim(a, b) for a, b in pairs]
            batch = cls(op, rows, given, returned)
            return batch if batch._works_row_by_row(args) else None
        except ValueError:
            return None

    def _works_row_by_row(self, args: tuple[Any, ...]) -> bool:
        """Whether native gives some rows what it gives them among all: else its rows are no batch.

        An argument may hold numbers of other rows, or the first row of each sequence.
        """
        native = self.op.registered[NATIVE]
        start, count = self.rows // 2, self.rows - self.rows // 2
        try:
            part = native.apply(self.arguments(args, start, count))
        except Exception:
            return False
        pairs = zip(self.outputs(part, 0, count), self.outputs(native.apply(args), start, count), strict=True)
        return all(
            one.shape == other.shape
            and torch.allclose(one.double(), other.double(), rtol=0.05, atol=0.05, equal_nan=True)
            for one, other in pairs
        )

    def arguments(self, args: tuple[Any, ...], start: int, count: int) -> tuple[Any, ...]:
        pairs = zip(args, self.given, strict=True)
        return tuple(value if dim is None else value.narrow(dim, start, count).clone() for value, dim in pairs)

    @property
    def returns_rows(self) -> bool:
        """Whether some output has rows."""
        return any(dim is not None for dim in self.returned)

    def outputs(self, outputs: Any, start: int, count: int) -> list[Tensor]:
        """Some rows of the outputs that have rows. Others, such as caches, hold what all rows have left there."""
        pairs = zip(_flat(outputs), self.returned, strict=True)
        return [value.narrow(dim, start, count) for value, dim in pairs if dim is not None]


def _row_dim(one: Any, other: Any) -> int | None:
    if not isinstance(one, Tensor):
        if isinstance(one, (list, tuple)):
            raise ValueError("lists are not taken apart")
        return None
    dims = [dim for dim, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if a != b]
    if len(dims) > 1:
        raise ValueError("more than one dimension counts rows")
    return dims[0] if dims else None


def try_in_threads(findings: Findings, device: str) -> None:
    """Several threads at once, each with data of its own, and on CUDA on a stream of its own."""
    impl = findings.impl
    if findings.broken("deterministic"):
        findings.skip("threads", "it is not deterministic")
        return
    for shape, dtype in (((64, 64), torch.float32), ((64, 64), torch.bfloat16)):
        given = [usual_call(impl, shape, dtype, device, seed) for seed in range(_THREADS)]
        if None in given:
            continue
        findings.tried("threads")
        _together(findings, device, given)


def _together(findings: Findings, device: str, given: list[Any]) -> None:
    impl = findings.impl
    where = torch.device(device)
    call = described_call(impl.op, given[0])
    expected = [bits_of(_called(findings, args)) for args in given]
    begin = threading.Barrier(len(given))
    troubles: list[BaseException | None] = []

    def work(args: Any, bits: list[Tensor]) -> None:
        try:
            with _own_stream(where):
                copies = [of_their_own(impl, args) for _ in range(_CALLS)]
                wait_for(where)
                begin.wait(_PATIENCE)
                with torch.no_grad():
                    results = [impl.apply(each) for each in copies]
                wait_for(where)
                if not all(same_bits(bits, bits_of(result)) for result in results):
                    troubles.append(None)
        except Exception as error:
            troubles.append(error)

    threads = [
        threading.Thread(target=work, args=(args, bits), daemon=True)
        for args, bits in zip(given, expected, strict=True)
    ]
    when = f"when {len(given)} threads call it at once"
    with _switching_often():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_PATIENCE)
    if any(thread.is_alive() for thread in threads):
        findings.note(contract.hangs("threads", when, _PATIENCE), "hangs", call)
    for trouble in troubles:
        if trouble is None:
            findings.note(contract.unlike_itself("threads", when), "bits", call)
        else:
            findings.note(contract.raises_when("threads", when, trouble), "raises", call)
            check_alive(where, trouble)


@contextmanager
def _switching_often() -> Iterator[None]:
    """Threads take turns a hundred times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _own_stream(device: torch.device) -> AbstractContextManager[Any]:
    if device.type != "cuda":
        return nullcontext()
    stream: Callable[..., AbstractContextManager[Any]] = torch.cuda.stream
    return stream(torch.cuda.Stream(device))


def _called(findings: Findings, args: tuple[Any, ...]) -> Any:
    """Call it on copies; what it raises was said before, or is said now."""
    impl = findings.impl
    findings.told(described_call(impl.op, args))
    with torch.no_grad():
        return impl.apply(of_their_own(impl, args))


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
