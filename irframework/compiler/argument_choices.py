"""Which arguments a candidate may mean.

Owns what is read off a candidate: in which shape and dtype a tensor is given, which whole numbers and words are. It may
offer what is not the op; that is found out when the definition is computed (`fusion.py`). Does not find candidates
(`candidates.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from irframework.compiler.call_arguments import Number, Value, constant, number, plain_number
from irframework.compiler.candidates import Binding
from irframework.compiler.skeletons import Skeleton, items_of
from irframework.compiler.values import ValueTable
from irframework.torch_ops import op_of


def arguments_of(skeleton: Skeleton, table: ValueTable, binding: Binding) -> Iterator[tuple[Any, ...]]:
    """All arguments that a candidate may mean: which conversion or reshape of a tensor, which int."""
    if binding.call is not None:
        yield from _more_than_a_call(skeleton.op, table, binding)
        return
    choices: list[Sequence[Any]] = []
    for name, parameter in skeleton.op.signature.parameters.items():
        if name in binding.tensors:
            choices.append([node for value in binding.tensors[name] for node in _nodes_of(table, value)])
        elif name in binding.numbers:
            choices.append([constant(binding.numbers[name])])
        elif name in skeleton.fixed:
            value = skeleton.fixed[name]
            given = _given_to_an_op(skeleton, table, binding, value)
            if given is not None or type(value) is not int:
                choices.append([value if given is None else given])
            else:
                choices.append(_whole_numbers(skeleton, table, binding, value))
        elif parameter.default is not parameter.empty:
            choices.append([parameter.default])
        else:
            return
    yield from itertools.product(*choices)


def _more_than_a_call(op: Any, table: ValueTable, binding: Binding) -> Iterator[tuple[Any, ...]]:
    """The arguments of a call of the very op, and those that come with what stands around it."""
    for node in table.nodes.get(binding.call, ()) if binding.call is not None else ():
        found = op_of(node.target)
        if found is None or found[0] is not op:
            continue
        given = op.named(op.bind(node.args, node.kwargs))
        more = {
            name: [each for value in values for each in _nodes_of(table, value)]
            for name, values in binding.tensors.items()
            if given[name] is None
        }
        for chosen in itertools.product(*more.values()):
            yield tuple((given | dict(zip(more, chosen, strict=True))).values())


def _nodes_of(table: ValueTable, value: Value) -> list[Node]:
    """Nodes that hold a core, one of each shape, those that stand as the candidate reads them first."""
    nodes = [node for node in table.nodes.get(value.core, ()) if isinstance(node.meta.get("val"), torch.Tensor)]
    by_shape: dict[Any, Node] = {}
    for node in nodes:
        by_shape.setdefault(table.of[node].shape, node)
    own = table.cores[value.core].shape
    return sorted(by_shape.values(), key=lambda n: (table.of[n].shape != value.shape, table.of[n].shape != own))


def _given_to_an_op(skeleton: Skeleton, table: ValueTable, binding: Binding, value: Any) -> Any:
    """What the candidate gives to an IR op where the definition gives it this word or number; None if nowhere."""
    if type(value) not in (int, str):
        return None
    for ours, theirs in binding.cores.items():
        own = skeleton.table.cores[ours]
        if not own.target.startswith("irframework::"):
            continue
        for argument, other in zip(own.args, table.cores[theirs].args, strict=False):
            if argument == number(value) and isinstance(other, Number):
                found = plain_number(other)
                return found.value if isinstance(found, Number) else found
    return None


def _whole_numbers(skeleton: Skeleton, graph: ValueTable, binding: Binding, sample: int) -> list[int]:
    """Whole numbers that a candidate shows in its constants and sizes, the likeliest for a parameter first.

    Those are the ones that stand where the definition shows the sample that it was derived with; the more often, the
    likelier. Where there is none, all that it shows.
    """
    votes: dict[int, int] = {sample: 0}
    for ours, theirs in binding.cores.items():
        own, other = skeleton.table.cores[ours], graph.cores[theirs]
        shapes = zip(reversed(own.shape), reversed(other.shape), strict=False)  # there may be more dimensions in front
        for mine, found in (*shapes, *zip(items_of(own.args), items_of(other.args), strict=False)):
            whole = _whole(found)
            if whole is not None:
                votes[whole] = votes.get(whole, 0) + (_whole(mine) == sample)
    likely = [whole for whole in votes if votes[whole]] or list(votes)
    return sorted(likely, key=lambda whole: -votes[whole])


def _whole(value: Any) -> int | None:
    if type(value) is int:  # most are
        return value
    plain = constant(value) if isinstance(value, Number) else value
    return int(plain) if isinstance(plain, (int, float)) and float(plain).is_integer() else None
