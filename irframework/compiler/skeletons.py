"""Where in a graph an op's definition may stand.

Owns the skeletons: a definition with its conversions, reshapes and constants erased, its numbers as wildcards. The
search for them is in `candidates.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from irframework.codegen import number_type
from irframework.compiler.call_arguments import Number, Value, constant, values_in
from irframework.compiler.definitions import Definitions, refusals_unlogged
from irframework.compiler.routes import Stop, routes_to
from irframework.compiler.shown_calls import SAMPLE, shown_calls
from irframework.compiler.values import ERASED, ValueTable

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp

_FIRST_MARK = 0.7310585
_kinds: dict[Any, int] = {}  # a number for each part that any definition has

TENSOR, NUMBER = -1, -2  # the kinds of a parameter, which is any tensor, and of a number


@dataclass(frozen=True, slots=True)
class Part:
    """What must stand at one place: a core of a skeleton with all below it, the parameters left open.

    Attributes:
        kind: A number; parts that look alike have the same, also those of two definitions.
        target: What it computes.
        structure: Dimensions and steps, which are of the definition itself, by the place among its arguments.
        items: The kinds of its arguments, one after the other; those of parameters and numbers are below zero.
        is_call: Whether it is a call of the very op, of which the arguments are not looked at.
    """

    kind: int
    target: str
    structure: tuple[tuple[int, Any], ...]
    items: tuple[int, ...]
    is_call: bool


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A definition to look for, for one choice of the arguments that steer it.

    Attributes:
        op: The op.
        fixed: Arguments that are neither tensors nor wildcards, by name: None, words, bools, ints.
        table: The definition's values.
        outputs: Its outputs.
        tensors: The leaf cores of its tensor parameters.
        marks: Parameter names by the number that stands for them.
        size: How many cores it has.
        root_index: The output from which most of the parameters can be reached.
        root: Its core, erased cores looked through.
        others: The cores of outputs that reach what the root does not; each is looked for near to the root.
        body: The further spelling that it was derived of; None for native.
        arguments: Those that it was derived for, with the numbers that stand for parameters.
        targets: What it computes with.
        parts: What must stand for each of its cores that is neither erased nor a parameter.
        routes: For the root and each of the others, in which order they and what they are computed of are looked at.
    """

    op: IrOp
    fixed: Mapping[str, Any]
    table: ValueTable
    outputs: tuple[Value, ...]
    tensors: Mapping[int, str]
    marks: Mapping[Any, str]
    size: int
    root_index: int
    root: int
    others: tuple[int, ...]
    body: IrOpImpl | None
    arguments: tuple[Any, ...]
    targets: frozenset[str]
    parts: Mapping[int, Part]
    routes: Mapping[int, tuple[Stop, ...]]


@dataclass(frozen=True, slots=True)
class Unfit:
    """A call for which a body gave no skeleton; `error` is what it raised for arguments that were guessed."""

    arguments: tuple[Any, ...]
    error: Exception | None = None


def stripped(table: ValueTable, core: int) -> int:
    """The core behind conversions, reshapes and broadcasts."""
    while table.cores[core].target in ERASED:
        core = next(iter(values_in(table.cores[core].args))).core
    return core


def items_of(args: Any) -> list[Any]:
    """Arguments one after the other, those in lists, too; missing numbers at the end do not count."""
    items: list[Any] = []
    for arg in args:
        items += items_of(arg) if isinstance(arg, tuple) else [arg]
    while items and not isinstance(items[-1], Value) and isinstance(items[-1], Number) and constant(items[-1]) is None:
        items.pop()
    return items


def _below(table: ValueTable, core: int) -> set[int]:
    seen: set[int] = set()
    todo = [core]
    while todo:
        current = todo.pop()
        if current not in seen:
            seen.add(current)
            todo += [value.core for value in values_in(table.cores[current].args)]
    return seen


# --- deriving ----------------------------------------------------------------------------------------------


def derive(op: IrOp, body: IrOpImpl | None = None, unfit: list[Unfit] | None = None) -> list[Skeleton]:
    """The skeletons of an op's definition: one for each way in which its arguments steer it.

    The calls that its input generator yields show these ways; without a generator they are guessed from its signature.

    Args:
        op: The op.
        body: A further spelling of its definition; None for native.
        unfit: Is given the calls for which there is no skeleton.
    """
    found: dict[Any, Skeleton] = {}
    unfit = [] if unfit is None else unfit
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        samples = list(samples_of(op, mode, unfit))
    unfit[:] = [] if samples else unfit
    for arguments in {_way(arguments): arguments for arguments in reversed(samples)}.values():
        skeleton = _skeleton(op, arguments, body)
        if skeleton is not None and skeleton.table.cores[skeleton.root].target == f"irframework::{op.name}":
            continue  # a definition that calls the op itself, and adds nothing here
        if skeleton is not None:
            found.setdefault(_shape_of_definition(skeleton), skeleton)
        else:
            unfit.append(Unfit(arguments))
    return list(found.values())


def _way(arguments: tuple[Any, ...]) -> Any:
    """What of a call can steer a definition: all but the numbers in tensors, and what is not whole."""

    def steers(argument: Any) -> Any:
        if isinstance(argument, Tensor):
            return argument.dtype, argument.shape
        return None if type(argument) is float else repr(argument)

    return tuple(map(steers, arguments))


def samples_of(op: IrOp, mode: FakeTensorMode, unfit: list[Unfit]) -> Iterator[tuple[Any, ...]]:
    """Calls that show the ways of an op, on fake tensors; `unfit` is given the guesses that native did not take."""
    if op.input_generator is not None:
        for call in shown_calls(op):
            yield tuple(mode.from_tensor(a) if isinstance(a, Tensor) else a for a in call)
        return
    yield from _guesses(op, unfit)


def _guesses(op: IrOp, unfit: list[Unfit]) -> Iterator[tuple[Any, ...]]:
    """Arguments that fit the signature, for each choice of what may be None, true or false.

    Of all shapes that are likely, the first that native takes counts.
    """
    rows, width = SAMPLE
    steering: list[list[Any]] = []
    for name, parameter in op.signature.parameters.items():
        kind = number_type(parameter.annotation)
        if name in op.tensors:
            steering.append(["tensor"] if parameter.annotation is Tensor else ["tensor", None])
        elif kind is float:
            steering.append([0.5])
        elif kind is bool:
            steering.append([False, True])
        elif parameter.default is not parameter.empty:
            steering.append([parameter.default])
        elif kind is int:
            steering.append([2])
        else:
            return
    for chosen in itertools.islice(itertools.product(*steering), 16):
        shapes: list[list[Any]] = []
        for name, value in zip(op.signature.parameters, chosen, strict=True):
            if value != "tensor" or name not in op.tensors:
                shapes.append([value])
            elif name in op.activations or not any(choice[0] is not value for choice in shapes):
                shapes.append([(rows, width), (width,), ()])
            else:
                shapes.append([(width,), (), (rows, width), (1,)])
        for shape in itertools.islice(itertools.product(*shapes), 96):
            arguments = tuple(torch.empty(each) if isinstance(each, tuple) else each for each in shape)
            try:
                with torch.no_grad(), refusals_unlogged():
                    op.registered["native"].apply(arguments)
            except Exception as error:
                unfit.append(Unfit(arguments, error))
                continue
            yield arguments
            break


def _skeleton(op: IrOp, arguments: tuple[Any, ...], body: IrOpImpl | None) -> Skeleton | None:
    marked: list[Any] = []
    marks: dict[Any, str] = {}
    fixed: dict[str, Any] = {}
    for (name, parameter), value in zip(op.signature.parameters.items(), arguments, strict=True):
        if isinstance(value, float) and number_type(parameter.annotation) is float:
            mark = _FIRST_MARK + 0.0123 * len(marks)
            marks[mark] = name
            marked.append(mark)
        else:
            marked.append(value)
            if not isinstance(value, Tensor):
                fixed[name] = value
    found = values_of_definition(op, marked, body)
    if found is None or not all(isinstance(value, Value) for value in found[1]):
        return None
    table, flat, tensors = found
    below = [_below(table, value.core) for value in flat]
    reach = [len(cores & tensors.keys()) for cores in below]
    index = reach.index(max(reach))
    root = stripped(table, table.turned(flat[index])[0].core)
    reached, others = below[index] & tensors.keys(), []
    for value, cores in sorted(zip(flat, below, strict=True), key=lambda pair: -len(pair[1] & tensors.keys())):
        if cores & tensors.keys() - reached:
            reached |= cores & tensors.keys()
            others.append(stripped(table, value.core))
    cores = set().union(*below)
    targets = frozenset(table.cores[core].target.partition("[")[0] for core in cores) - ERASED - {"leaf"}
    where = (len(cores), index, root, tuple(others))
    working = [core for core in sorted(cores) if core not in tensors and table.cores[core].target not in ERASED]
    items = {core: _stripped_items(table, core) for core in working}
    parts = _parts(op, table, items, list(fixed.values()))
    telling = {core: _telling(items[core], marks) for core in items}
    routes = routes_to((root, *others), telling, tensors, [core for core, part in parts.items() if part.is_call])
    return Skeleton(op, fixed, table, flat, tensors, marks, *where, body, tuple(marked), targets, parts, routes)


def _stripped_items(table: ValueTable, core: int) -> tuple[Any, ...]:
    items = items_of(table.cores[core].args)
    return tuple(stripped(table, item.core) if isinstance(item, Value) else item for item in items)


def _telling(items: tuple[Any, ...], marks: Mapping[Any, str]) -> tuple[tuple[int, Any], ...]:
    """Which arguments tell something of the parameters, by their places: the core behind what is erased, or the name of
    a number. The definition's own constants are compared when it is computed."""
    named = [marks.get(constant(item)) if isinstance(item, Number) else item for item in items]
    return tuple((place, item) for place, item in enumerate(named) if item is not None)


def _parts(
    op: IrOp, table: ValueTable, items: Mapping[int, tuple[Any, ...]], given: Collection[Any]
) -> dict[int, Part]:
    """What must stand for each core that has items; numbers among `given`, the arguments, may be others in a graph."""
    parts: dict[int, Part] = {}
    for number in items:  # a core comes behind what it is computed of
        core = table.cores[number]
        kinds = tuple(
            NUMBER if isinstance(item, Number) else parts[item].kind if item in parts else TENSOR
            for item in items[number]
        )
        structure = tuple((place, arg) for place, arg in enumerate(core.args) if _is_structure(arg, given))
        is_call = core.target == f"irframework::{op.name}"
        kind = _kinds.setdefault((core.target, structure, kinds, is_call), len(_kinds))
        parts[number] = Part(kind, core.target, structure, kinds, is_call)
    return parts


def _is_structure(argument: Any, given: Collection[Any]) -> bool:
    """Whether a constant is a dimension or a step, of the definition itself and of no argument."""
    value = argument.value if isinstance(argument, Number) else None
    numbers = value if isinstance(value, tuple) else (value,)
    return all(type(each) is int and each not in given for each in numbers)


def values_of_definition(
    op: IrOp, arguments: Sequence[Any], body: IrOpImpl | None
) -> tuple[ValueTable, tuple[Any, ...], dict[int, str]] | None:
    """A definition's values for some arguments: their table, the outputs, and the parameters' names by leaf core.

    None where the definition cannot be traced for them.
    """
    definitions = Definitions()
    expansion = definitions.expand(op, arguments, None, body)
    if expansion is None:
        return None
    table = ValueTable(definitions.expand)
    given = [
        table.leaf(("parameter", name), value) if isinstance(value, Tensor) else value
        for name, value in zip(op.signature.parameters, arguments, strict=True)
    ]
    outputs = table.outputs(expansion, given)
    named = zip(op.signature.parameters, given, strict=True)
    tensors = {leaf.core: name for name, leaf in named if isinstance(leaf, Value)}
    return table, outputs if isinstance(outputs, tuple) else (outputs,), tensors


def _shape_of_definition(skeleton: Skeleton) -> Any:
    """What tells one skeleton from another: structure and the arguments that are fixed."""
    table = skeleton.table
    known: dict[int, Any] = {}

    def text(core: int) -> Any:
        core = stripped(table, core)
        if core in skeleton.tensors:
            return skeleton.tensors[core]
        if core not in known:
            below = (text(value.core) for value in values_in(table.cores[core].args))
            known[core] = hash((table.cores[core].target, *below))
        return known[core]

    return (repr(sorted(skeleton.fixed.items())), tuple(text(value.core) for value in skeleton.outputs))
