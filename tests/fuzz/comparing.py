"""Runs a program compiled and in eager mode, and compares everything that can be seen.

Owns the comparison: outputs, the memory behind the arguments (except what was donated), which outputs share memory
with what, and gradients. Also tells faults of torch from ours: where the same program with plain torch functions in
place of the ops fails just so, torch is at fault.
"""

from __future__ import annotations

import itertools
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from programs import CODES, ROWS, Arguments, Program, Written, arguments, elements, storage, write
from providers import overwriting, priorities, scope
from statements import STATEMENTS
from torch import Tensor

import irframework as ir
from irframework.compiler.overlap import disjoint

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "compiler"))

from compiler_support import lowered

BACKENDS: dict[str, Any] = {"lowered": lowered, "irframework": "irframework", "stock": "inductor"}
# The same path without IR ops: where it fails as well, the fault is torch's.
PLAIN: dict[str, Any] = {"lowered": "aot_eager", "irframework": "inductor", "stock": "inductor"}
OTHER_ROWS = 6
_MODIFIED = (  # what autograd says of memory that was overwritten
    "needed for gradient computation has been modified by an inplace operation",
    "is a view and its base or another view of its base has been modified inplace",
)


# A code apart is an eighth. What is computed in half precision is rounded at other places where code is generated.
_TOLERANCES = {
    torch.float64: (1e-6, 1e-6),
    torch.bfloat16: (0.13, 0.13),
    torch.float16: (0.13, 0.02),
    torch.float8_e4m3fn: (0.13, 0.02),
}


class DifferenceError(AssertionError):
    """A compiled program differs from eager native."""


@dataclass(slots=True)
class Tally:
    """What was compared so far."""

    counts: Counter[str] = field(default_factory=Counter)
    torch_faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))


@dataclass(slots=True)
class Seen:
    """What one run showed."""

    results: tuple[Tensor, ...]
    arguments: Arguments
    gradients: list[Tensor | None]


def check(program: Program, backend: str, device: str = "cpu", tally: Tally | None = None) -> None:
    """Compare one program with eager native.

    Raises:
        DifferenceError: With the source of the program.
    """
    tally = tally if tally is not None else Tally()
    meanings = scope(device, meanings=True)
    with quiet():
        written = written_out(program, device)
        tally.counts["programs"] += 1
        if not written.calls:
            tally.counts["without an op"] += 1
            return
        want = reference(program, written, meanings, device, ROWS)
        if want is None:
            tally.counts["no meaning in eager"] += 1
            return
        if program.mode == "training" and _refused_by_autograd(program, written, device):
            tally.counts["refused by autograd"] += 1
            return
        may_be_refused = program.mode == "training" and _may_be_refused(program, written, device)
        title = f"backend {backend}, {program.mode}, {program.shapes}, {provider_names(program)}"
        text = f"{title}\n{written.source}{program!r}"
        try:
            _compare(program, written, want, backend, device, tally)
        except Exception as error:
            if may_be_refused and _refused(error):
                tally.counts["refused by autograd"] += 1
                return
            fault = _not_converted(program, error) or _fails_without_ops(program, written, want, backend, device)
            if fault is None:
                raise DifferenceError(f"{first_lines(error)}\n{text}") from error
            tally.counts["torch's own fault"] += 1
            tally.torch_faults.append(f"{fault}\n{text}")


def written_out(program: Program, device: str) -> Written:
    return write(program, scope(device, meanings=True), STATEMENTS, disjoint, device)


@contextmanager
def quiet() -> Iterator[None]:
    """Without warnings and logs: many programs do what torch, or the framework, warns about."""
    before = logging.root.manager.disable
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(before)


def provider_names(program: Program) -> str:
    return ", ".join(f"{op}={names[0]}" for op, names in priorities(program.providers).items())


def first_lines(error: Exception) -> str:
    return "\n".join(f"{type(error).__name__}: {error}".splitlines()[:25])


def function_of(source: str, names: dict[str, Any]) -> Callable[..., Any]:
    found = dict(names)
    exec(source, found)
    function: Callable[..., Any] = found["f"]
    return function


def reference(program: Program, written: Written, meanings: dict[str, Any], device: str, rows: int) -> Seen | None:
    function = function_of(written.source.replace("torch._dynamo.graph_break()", "pass"), meanings)
    try:
        return run(function, program, arguments(program, device, rows))
    except Exception:
        return None


def _refused_by_autograd(program: Program, written: Written, device: str) -> bool:
    """Whether autograd refuses the program: an op saves its inputs, and its outputs all need gradients.

    So a later write to an input of an op, or `out=` for its output, is an error where native's own torch functions
    would have allowed it.
    """
    function = function_of(written.source.replace("torch._dynamo.graph_break()", "pass"), scope(device, meanings=False))
    try:
        with ir.priority({op: ["native"] for op in priorities(program.providers)}):
            run(function, program, arguments(program, device))
    except RuntimeError:
        return True
    return False


def _may_be_refused(program: Program, written: Written, device: str) -> bool:
    """Whether autograd may refuse the program, depending on the provider and on what is compiled at once.

    It refuses where a donated tensor was saved for a gradient before, and a kernel overwrites it. And a compiler
    prepares gradients of values that this program needs none of: of what it wrote to arguments, and behind a graph
    break of everything.
    """
    if written.breaks:
        return True
    function = function_of(written.source, scope(device, meanings=False) | overwriting())
    try:
        with ir.priority({op: ["native"] for op in priorities(program.providers)}):
            run(function, program, arguments(program, device), of_arguments=True)
    except RuntimeError as error:
        return _refused(error)
    return False


def _refused(error: Exception) -> bool:
    return any(words in str(error) for words in _MODIFIED)


def run(function: Callable[..., Any], program: Program, given: Arguments, *, of_arguments: bool = False) -> Seen:
    with ExitStack() as stack:
        if program.mode == "training":
            stack.enter_context(torch.enable_grad())
        elif program.mode == "inference_mode":
            stack.enter_context(torch.inference_mode())
        else:
            stack.enter_context(torch.no_grad())
        results = function(*given.passed)
    gradients: list[Tensor | None] = []
    if program.mode == "training" and given.leaves:
        generator = torch.Generator().manual_seed(5)
        loss = torch.zeros((), dtype=torch.float64)
        for result in (*results, *(given.passed if of_arguments else ())):
            weights = torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result)
            if result.requires_grad:
                loss = loss.to(result.device) + (result * weights).sum()
        gradients = [None] * len(given.leaves)  # an op's output may need a gradient that is zero
        if loss.requires_grad:
            gradients = list(torch.autograd.grad(loss, given.leaves, allow_unused=True))
    return Seen(tuple(results), given, gradients)


def _compare(program: Program, written: Written, want: Seen, backend: str, device: str, tally: Tally) -> None:
    function = function_of(written.source, scope(device, meanings=False))
    with ir.priority(priorities(program.providers)):
        eager = function_of(
            written.source.replace("torch._dynamo.graph_break()", "pass"), scope(device, meanings=False)
        )
        unkept = replace(written, kept=set())  # eager mode sees one call, not which arguments share memory
        try:
            differ(run(eager, program, arguments(program, device)), want, unkept, "eager with these providers")
        except RuntimeError as error:  # the compiled program may still work: in training it overwrites no argument
            if program.mode != "training" or not _refused(error):
                raise
            tally.counts["refused by autograd in eager"] += 1
        torch._dynamo.reset()
        dynamic = {"dynamic": True}.get(program.shapes)
        compiled = torch.compile(function, backend=BACKENDS[backend], dynamic=dynamic)
        given = arguments(program, device)
        if program.shapes == "marked":
            for tensor in given.passed[:-1]:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        before = ir.last_report()
        seen = run(compiled, program, given)
        count_report(None if ir.last_report() is before else ir.last_report(), tally)
        differ(seen, want, written, "compiled")
        differ(run(compiled, program, arguments(program, device)), want, written, "compiled, called again")
        tally.counts["compared"] += 1
        tally.counts[f"compared: {backend}"] += 1
        tally.counts[f"compared: {program.mode}"] += 1
        tally.counts[f"compared: {program.shapes}"] += 1
        tally.counts["with donations"] += bool(written.donations)
        if program.shapes != "static":
            _compare_other_size(program, written, compiled, device, tally)
        _compare_other_sharing(program, written, compiled, device, tally)


def _compare_other_sharing(
    program: Program, written: Written, compiled: Callable[..., Any], device: str, tally: Tally
) -> None:
    """Call it with arguments that share memory as they did not at first, or no longer do.

    Only where the same source is a valid program for them: then the writer writes the very same lines. It costs a
    compile more, so it is done for some programs, and for those that donate what may then not be overwritten.
    """
    for other in _sharing_otherwise(program):
        again = written_out(other, device)
        if again.source != written.source:
            continue
        if other.inputs[-1].layout == "own" and _writes_to_shared(program, written, device):
            continue
        forbidden = any(given and index in again.kept for index, given in enumerate(again.given))
        if not forbidden and len(program.steps) % 4:
            continue
        if program.mode == "training" and _may_be_refused(other, again, device):
            continue
        want = reference(other, again, scope(device, meanings=True), device, ROWS)
        if want is not None:
            seen = _run_unless_used_after_donation(compiled, other, arguments(other, device), tally)
            if seen is None:
                return
            differ(seen, want, again, f"compiled, called with {other.inputs}")
            tally.counts["arguments that share otherwise"] += 1
            tally.counts["donated arguments that share otherwise"] += forbidden
            return


def _sharing_otherwise(program: Program) -> Iterator[Program]:
    """The program with two arguments in one memory, and with all of them apart."""
    count = len(program.inputs)
    for first, second, layout in itertools.product(range(count), range(count), ("alias", "overlap")):
        if first < second:
            inputs = list(program.inputs)
            inputs[first] = replace(inputs[first], layout="own")
            inputs[second] = replace(inputs[second], layout=layout, of=first)
            yield replace(program, inputs=tuple(inputs))
    apart = replace(program, inputs=tuple(replace(each, layout="own") for each in program.inputs))
    if apart != program:
        yield apart


def _compare_other_size(
    program: Program, written: Written, compiled: Callable[..., Any], device: str, tally: Tally
) -> None:
    want = reference(program, written, scope(device, meanings=True), device, OTHER_ROWS)
    if want is None:
        return
    other = Written(
        written.source,
        [
            set(range(base.untyped_storage().nbytes())) if given else set()
            for base, given in zip(want.arguments.bases, written.given, strict=True)
        ],
    )
    seen = _run_unless_used_after_donation(compiled, program, arguments(program, device, OTHER_ROWS), tally)
    if seen is None:
        return
    differ(seen, want, other, f"compiled, called with {OTHER_ROWS} rows")
    tally.counts["another size"] += 1


def _run_unless_used_after_donation(
    compiled: Callable[..., Any], program: Program, given: Arguments, tally: Tally
) -> Seen | None:
    """Run it, except where parts that are disjoint at the size it was written for are not at all sizes."""
    try:
        return run(compiled, program, given)
    except Exception as error:
        if program.shapes == "static" or "DonationError" not in f"{type(error).__name__}: {error}":
            raise
        tally.counts["used after donation at other sizes"] += 1
        return None


def _writes_to_shared(program: Program, written: Written, device: str) -> bool:
    """A fault of torch, also without IR ops: `test_torch_faults.py` shows it.

    What was compiled for arguments that share memory, one of which is written to, is used for others that do not.
    """
    if not any(each.layout in ("alias", "rest", "overlap") for each in program.inputs):
        return False
    fresh = arguments(program, device)
    after = reference(program, written, scope(device, meanings=True), device, ROWS)
    return after is None or not all(map(torch.equal, fresh.bases, after.arguments.bases))


def count_report(report: Any, tally: Tally) -> None:
    if report is not None:
        tally.counts["copies removed"] += report.clones_removed
        tally.counts["copies kept"] += report.clones_inserted - report.clones_removed
        tally.counts["with fusions"] += bool(report.fusions)
        tally.counts.update({f"fused: {op}": count for op, count in report.fusions.items()})
        tally.counts["inputs given away"] += sum(d.kind == "input" for d in report.donated)


def differ(got: Seen, want: Seen, written: Written, what: str, close: Callable[..., None] | None = None) -> None:
    """Raise if two runs differ in anything that can be seen."""
    close = close or _close
    for index, (a, b) in enumerate(zip(got.results, want.results, strict=True)):
        close(a, b, f"{what}: output {index}")
    for index, (a, b) in enumerate(zip(got.arguments.bases, want.arguments.bases, strict=True)):
        given = written.given[index]
        if given and index not in written.kept:
            untouched = torch.ones(a.untyped_storage().nbytes(), dtype=torch.bool)
            untouched[list(given)] = False
            a, b = (_memory(t)[untouched.reshape(-1, t.element_size()).all(1).to(t.device)] for t in (a, b))
        close(a, b, f"{what}: memory {index} of the arguments")
    for index, (a, b) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        leaf = want.arguments.leaves[index]
        a, b = (torch.zeros_like(leaf) if gradient is None else gradient for gradient in (a, b))
        close(a, b, f"{what}: gradient {index}")
    _same_sharing(got, want, written, what)


def _memory(tensor: Tensor) -> Tensor:
    """All of a tensor's storage, as its dtype."""
    whole = tensor.untyped_storage().nbytes() // tensor.element_size()
    return tensor.detach().as_strided((whole,), (1,), 0)


def _close(a: Tensor, b: Tensor, what: str) -> None:
    relative, absolute = _TOLERANCES.get(a.dtype, (1e-3, 1e-4))
    if a.dtype in CODES and a.dtype == b.dtype:
        a, b = a.float(), b.float()
    torch.testing.assert_close(
        a.detach(),
        b.detach(),
        rtol=relative,
        atol=absolute,
        equal_nan=True,
        msg=lambda message: f"{what}: {message}\ngot  {a.flatten()[:12].tolist()}\nwant {b.flatten()[:12].tolist()}",
    )


def _same_sharing(got: Seen, want: Seen, written: Written, what: str) -> None:
    """Outputs share elements with each other and with the arguments exactly as in eager mode."""
    bases = enumerate(zip(got.arguments.bases, written.given, strict=True))
    given = {storage(base) for index, (base, taken) in bases if taken and index not in written.kept}
    values = [(f"output {i}", a, b) for i, (a, b) in enumerate(zip(got.results, want.results, strict=True))]
    passed = zip(got.arguments.passed, want.arguments.passed, strict=True)
    values += [(f"argument {i}", a, b) for i, (a, b) in enumerate(passed)]
    for (name, a, b), (other, c, d) in itertools.combinations(values, 2):
        if name.startswith("argument"):
            break
        shares, should = _share(a, c), _share(b, d)
        if got.gradients and other.startswith("output") and elements(a) == elements(c) and torch.equal(b, d):
            continue  # a fault of torch, also without IR ops: `test_torch_faults.py` shows it
        if shares and not should and not (other.startswith("argument") and storage(a) in given):
            raise DifferenceError(f"{what}: {name} shares memory with {other}, which it does not in eager mode")
        if should and not shares:
            raise DifferenceError(f"{what}: {name} shares no memory with {other}, which it does in eager mode")


def _share(a: Tensor, b: Tensor) -> bool:
    return storage(a) == storage(b) and bool(elements(a) & elements(b))


def _not_converted(program: Program, error: Exception) -> str | None:
    """Triton makes no 8 bits of float64, and whether it is asked to depends on what Inductor fuses."""
    refused = program.dtype == "float64" and "PassManager::run failed" in str(error)
    return first_lines(error) if refused else None


def _fails_without_ops(program: Program, written: Written, want: Seen, backend: str, device: str) -> str | None:
    """How the same program without IR ops fails, if it does."""
    torch._dynamo.reset()
    compiled = torch.compile(
        function_of(written.source, scope(device, meanings=True)),
        backend=PLAIN[backend],
        dynamic={"dynamic": True}.get(program.shapes),
    )
    try:
        given = arguments(program, device)
        if program.shapes == "marked":
            for tensor in given.passed[:-1]:
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
        differ(run(compiled, program, given), want, written, "compiled without IR ops")
        differ(run(compiled, program, arguments(program, device)), want, written, "again without IR ops")
        if program.shapes != "static":
            _compare_other_size(program, written, compiled, device, Tally())
        _compare_other_sharing(program, written, compiled, device, Tally())
    except Exception as error:
        return first_lines(error)
    finally:
        torch._dynamo.reset()
    return None
