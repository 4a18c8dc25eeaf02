"""What a random program is: a value that shrinks well, and the Python source that it stands for.

Owns the drawing (`Program`, a handful of numbers) and the writing (`write`, numbers to source). A step means whatever
it can mean where it stands: its numbers choose among the names that are alive, and a step that is impossible there is
left out. So every list of steps is a valid program, and taking steps away gives a smaller one. Statements are in
`statements.py`; running and comparing is in `comparing.py`.

The writer runs each line as it writes it, with the ops' meanings, so it knows sizes, strides and which names share
memory from real tensors. A donated tensor, and every name that may share an element with it, is not used again.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ROWS, COLUMNS, WEIGHTS = 4, 8, 16
MAX_ELEMENTS = 512
MODES = ("no_grad", "no_grad", "inference_mode", "training")
SHAPES = (*("static",) * 8, "dynamic", "marked")
DTYPES = (*("float32",) * 4, "float64")
HALF = ("bfloat16", "float16")
CODES = (torch.float8_e4m3fn,)  # what they stand for is read and returned, and nothing else is done with them
LAYOUTS = (
    "own",
    "own",
    "own",
    "same",  # the very tensor of an earlier input
    "alias",  # another tensor over the same elements
    "rest",  # the rows behind those of an earlier input, in the same memory
    "overlap",  # one row further in the same memory
    "columns",  # half of the columns of its memory
    "transposed",
    "offset",  # not at the start of its memory
    "parameter",
)


@dataclass(frozen=True, slots=True)
class Input:
    """One argument of the function: how it lies in memory, and which earlier input it shares that with."""

    layout: str = "own"
    of: int = 0
    grad: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """One statement: its kind, and numbers that choose operands and form."""

    kind: str
    a: int = 0
    b: int = 0
    c: int = 0


@dataclass(frozen=True, slots=True)
class Program:
    """All that a program is made from.

    Attributes:
        inputs: The tensors x0, x1, ...; a vector w of weights comes last.
        steps: The statements.
        returns: Choose the names that are returned.
        providers: Choose the provider of each op.
        mode: `no_grad`, `inference_mode` or `training`.
        shapes: `static`, `dynamic` (`dynamic=True`) or `marked` (`maybe_mark_dynamic` on the rows).
        dtype: Of the tensors.
    """

    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    returns: tuple[int, ...]
    providers: tuple[int, ...]
    mode: str = "no_grad"
    shapes: str = "static"
    dtype: str = "float32"


def drawn(
    draw: random.Random,
    kinds: Sequence[str],
    max_steps: int = 12,
    *,
    dtypes: Sequence[str] = DTYPES,
    modes: Sequence[str] = MODES,
    shapes: Sequence[str] = SHAPES,
    must: str = "",
) -> Program:
    """A program drawn with plain `random`: where many are wanted and none is shrunk.

    Args:
        draw: Where numbers come from.
        kinds: Kinds of steps, each as often as it is to be drawn.
        max_steps: How many there are at most.
        dtypes: Of the tensors, each as often as it is to be drawn.
        modes: As of the program.
        shapes: As of the program.
        must: A kind of which there is at least one step.
    """

    def number() -> int:
        return draw.randrange(60)

    def step(kind: str) -> Step:
        return Step(kind, number(), number(), number())

    inputs = tuple(Input(draw.choice(LAYOUTS), number(), number() % 2) for _ in range(draw.randint(1, 3)))
    steps = [step(draw.choice(kinds)) for _ in range(draw.randint(2, max_steps))]
    if must and not any(each.kind == must for each in steps):
        steps[draw.randrange(len(steps))] = step(must)
    return Program(
        inputs,
        tuple(steps),
        tuple(number() for _ in range(draw.randint(1, 4))),
        tuple(number() for _ in range(8)),
        draw.choice(modes),
        draw.choice(shapes),
        draw.choice(dtypes),
    )


_values = [11]


@contextmanager
def other_values(seed: int) -> Iterator[None]:
    """Let the arguments of all programs have other values for a while."""
    before, _values[0] = _values[0], seed
    try:
        yield
    finally:
        _values[0] = before


@dataclass(slots=True)
class Arguments:
    """The tensors of one run: what is passed, the memory behind it, and the leaves that collect gradients."""

    passed: list[Tensor]
    bases: list[Tensor]
    leaves: list[Tensor]


def arguments(program: Program, device: str, rows: int = ROWS) -> Arguments:
    """Make the arguments; equal every time, for one seed of their values."""
    generator = torch.Generator().manual_seed(_values[0])
    dtype: torch.dtype = getattr(torch, program.dtype)
    made = Arguments([], [], [])

    def memory(*shape: int) -> Tensor:
        base = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
        made.bases.append(base)
        return base

    owners: list[Tensor] = []  # the memory that each input lies in
    for index, each in enumerate(program.inputs):
        of = each.of % index if index else 0
        layout = each.layout if index or each.layout not in ("same", "alias", "rest", "overlap") else "own"
        shared = None if layout not in ("same", "alias", "rest", "overlap") else owners[of]
        if shared is not None and shared.shape != (2 * rows + 1, COLUMNS):
            layout = "own"  # that input has another layout, which this one cannot share
        if layout == "same":
            made.passed.append(made.passed[of])
            owners.append(owners[of])
            continue
        if layout in ("alias", "rest", "overlap") and made.passed[of].requires_grad:
            layout = "own"
        if layout in ("alias", "rest", "overlap"):
            assert shared is not None
            first = {"alias": 0, "rest": rows, "overlap": 1}[layout]
            owners.append(shared)
            made.passed.append(shared[first : first + rows])
            continue
        if layout == "columns":
            base = memory(rows, 2 * COLUMNS)
            tensor = base[:, COLUMNS:]
        elif layout == "transposed":
            base = memory(COLUMNS, rows)
            tensor = base.t()
        elif layout == "offset":
            base = memory(rows + 1, COLUMNS)
            tensor = base[1:]
        elif layout == "parameter":
            base = memory(rows, COLUMNS)
            tensor = torch.nn.Parameter(base, requires_grad=program.mode == "training")
            if tensor.requires_grad:
                made.leaves.append(tensor)
        else:
            base = memory(2 * rows + 1, COLUMNS)
            tensor = base[:rows]
        if layout != "parameter" and program.mode == "training" and each.grad:
            tensor = tensor.detach().requires_grad_()
            made.leaves.append(tensor)
            if each.of % 3 == 0:  # no leaf: it may be written to
                tensor = tensor * 1
                made.bases[-1] = tensor.detach()
                base = tensor
        owners.append(base)
        made.passed.append(tensor)
    weight = memory(WEIGHTS)
    if program.mode == "training" and len(program.inputs) % 2:
        weight.requires_grad_()
        made.leaves.append(weight)
    made.passed.append(weight)
    return made


def elements(tensor: Tensor) -> frozenset[int]:
    """The bytes of its storage that a tensor lies on."""
    places = torch.tensor([tensor.storage_offset()])
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    width = tensor.element_size()
    return frozenset((places[:, None] * width + torch.arange(width)).flatten().tolist())


def storage(tensor: Tensor) -> int:
    """An identity for the memory behind a tensor."""
    return tensor.untyped_storage()._cdata


def overlapping(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors share an element."""
    return storage(a) == storage(b) and bool(elements(a) & elements(b))


class DisjointError(AssertionError):
    """The compiler's proof that two tensors share no element is wrong."""


@dataclass(slots=True)
class Written:
    """A program as source.

    Attributes:
        source: The function `f`.
        given: For each base of `arguments`, the bytes that were donated.
        kept: Which bases compiled code may not overwrite, donated or not: those of parameters, of what requires a
            gradient, of several arguments that the program uses, and all of them in a training graph.
        calls: How many IR ops it calls.
        donations: How many of these donate.
        breaks: How many graph breaks there are.
        chains: How many chains it holds that fusion would find if nothing broke them.
    """

    source: str
    given: list[set[int]]
    kept: set[int] = field(default_factory=set)
    calls: int = 0
    donations: int = 0
    breaks: int = 0
    chains: int = 0


@dataclass(slots=True)
class Writer:
    """Writes and runs one line after the other.

    Attributes:
        alive: Names that statements may use.
        names: All names that were defined, codes too.
        results: Names that are returned whatever the program chooses, while they are alive.
    """

    program: Program
    scope: dict[str, Any]
    inputs: Arguments
    proves_disjoint: Callable[[Tensor, Tensor], bool]
    alive: list[str] = field(default_factory=list)
    taken: list[Tensor] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    given: list[set[int]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)
    count: int = 0
    calls: int = 0
    donations: int = 0
    breaks: int = 0
    chains: int = 0

    def value(self, text: str) -> Tensor:
        """The value of an expression; it may raise."""
        found = eval(text, self.scope)
        if not isinstance(found, Tensor):
            raise TypeError(text)
        return found

    def pick(self, number: int) -> str:
        """A name that is alive."""
        return self.alive[number % len(self.alive)]

    def partner(self, name: str, number: int) -> str:
        """A name that is alive and has the shape and dtype of another; it may be the same."""
        return self.partner_of(self.scope[name], number) or name

    def partner_of(self, like: Tensor, number: int) -> str | None:
        """A name that is alive and has the shape and dtype of a tensor; None if there is none."""
        found = [n for n in self.alive if (t := self.scope[n]).shape == like.shape and t.dtype == like.dtype]
        return found[number % len(found)] if found else None

    def run(self, line: str) -> bool:
        """Run a line and keep it, or leave it out if it is impossible here."""
        try:
            exec(line, self.scope)
        except Exception:
            return False
        self.lines.append(line)
        return True

    def define(self, expression: str, count: int = 1) -> bool:
        """Add `name = expression`, or `name, name = expression`."""
        names = [f"v{self.count + index}" for index in range(count)]
        try:
            values = eval(expression, self.scope)
        except Exception:
            return False
        flat = [values] if count == 1 else values
        if not isinstance(flat, (list, tuple)) or len(flat) != count or not all(map(_is_usable, flat)):
            return False
        if any(overlapping(value, taken) for value in flat for taken in self.taken):
            return False  # `as_strided` reaches beyond its tensor, here into a part that was given away
        self.count += count
        self.scope.update(zip(names, flat, strict=True))
        self.lines.append(f"{', '.join(names)} = {expression}")
        self.names += names
        self.alive += [name for name, value in zip(names, flat, strict=True) if value.dtype not in CODES]
        return True

    def is_part_of_offset_argument(self, name: str) -> bool:
        """A fault of torch, also without IR ops: `test_torch_faults.py` shows it.

        A custom op that mutates a view of an argument which does not lie at the start of its memory mutates another
        part. Behind a graph break every value is an argument, and may lie in the memory of one that was given away.
        """
        offset = {storage(tensor) for tensor in self.inputs.passed if tensor.storage_offset()}
        return storage(self.scope[name]) in offset or bool(offset and self.breaks)

    def may_write(self, name: str) -> bool:
        """Whether writing to a tensor has a meaning: no element lies in it twice."""
        tensor = self.scope[name]
        return len(elements(tensor)) == tensor.numel() * tensor.element_size()

    def donate(self, tensors: Sequence[Tensor]) -> None:
        """Note what was given away: names that may share an element with it are dead."""
        self.donations += 1
        self.taken += tensors
        for tensor in tensors:
            taken = elements(tensor)
            for base, given in zip(self.inputs.bases, self.given, strict=True):
                if storage(base) == storage(tensor):
                    given |= taken
            for name in list(self.alive):
                other = self.scope[name]
                if storage(other) != storage(tensor):
                    continue
                if self.proves_disjoint(other, tensor):
                    if elements(other) & taken:
                        raise DisjointError(f"{name} after:\n" + "\n".join(self.lines))
                    continue
                self.alive.remove(name)
                self.dead.append(name)


def _is_usable(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.is_floating_point()
        and 0 < value.numel() <= MAX_ELEMENTS
        and value.dim() <= 4
        and bool(torch.isfinite(value.detach().float() if value.dtype in CODES else value.detach()).all())
    )


def write(
    program: Program,
    scope: dict[str, Any],
    statements: dict[str, Callable[[Writer, Step], None]],
    proves_disjoint: Callable[[Tensor, Tensor], bool],
    device: str = "cpu",
) -> Written:
    """Write the source of a program.

    Args:
        program: What to write.
        scope: What the source refers to, with the ops' meanings in place of the ops.
        statements: What each kind of step means.
        proves_disjoint: What the compiler takes for a proof that two tensors share no element.
        device: Where the tensors are.
    """
    inputs = arguments(program, device)
    writer = Writer(program, dict(scope), inputs, proves_disjoint)
    writer.given = [set() for _ in inputs.bases]
    names = [f"x{index}" for index in range(len(program.inputs))] + ["w"]
    writer.scope.update(zip(names, inputs.passed, strict=True))
    writer.alive = names[:-1]
    with torch.set_grad_enabled(program.mode == "training"):
        for step in program.steps:
            if not writer.alive:
                writer.define("w.reshape(4, 4) * 2")
            statements[step.kind](writer, step)
    results = [writer.pick(number) for number in program.returns] if writer.alive else ["w * 2"]
    codes = {name for name in writer.results if writer.scope[name].dtype in CODES}
    results += [name for name in dict.fromkeys(writer.results) if name in codes or name in writer.alive]
    body = "\n".join(f"    {line}" for line in writer.lines)
    source = f"def f({', '.join(names)}):\n{body}\n    return ({', '.join(results)},)\n"
    if writer.breaks:  # each part may be a graph of another kind, and sees its own arguments only
        kept: set[int] = set()
    elif _makes_training_graph([writer.scope[name] for name in results if name in writer.scope], inputs):
        kept = set(range(len(inputs.bases)))
    else:
        kept = _kept(inputs, names, source.partition("\n")[2])
    return Written(source, writer.given, kept, writer.calls, writer.donations, writer.breaks, writer.chains)


def _makes_training_graph(results: Sequence[Tensor], inputs: Arguments) -> bool:
    """Whether a compiler is sure to prepare gradients: not for an argument that is returned, nor for a view of it."""
    passed = {storage(tensor) for tensor in inputs.passed}
    return any(tensor.requires_grad and storage(tensor) not in passed for tensor in results)


def _kept(inputs: Arguments, names: Sequence[str], body: str) -> set[int]:
    """The bases whose memory compiled code may not overwrite."""
    kept: set[int] = set()
    for index, base in enumerate(inputs.bases):
        own = {
            id(t): t
            for n, t in zip(names, inputs.passed, strict=True)
            if storage(t) == storage(base) and _used(n, body)
        }
        special = any(isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad for tensor in own.values())
        if len(own) > 1 or special:
            kept.add(index)
    return kept


def _used(name: str, body: str) -> bool:
    """Whether more of a tensor than its size is used; then it is an input of the graph."""
    return re.search(rf"\b{name}\b(?!\.shape)", body) is not None
