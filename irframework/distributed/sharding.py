"""What can be computed on a part of the rows: which nodes work on each row alone, and what is added up over processes.

Owns the tables of such ops, how a node is read as one, and how it is written again for a part of the rows, which always
has two dimensions: `[rows of this process, last dimension]`. Does not decide what is divided (`sequence_parallel.py`).

A tensor without rows (a weight, a scale, a vector as long as a row) is taken to be the same in all processes of the
group, as everything is that is applied to a sum over all of them.

Private torch API, read in 2.11 and 2.13: `torch.ops._c10d_functional` (`all_reduce` and `wait_tensor` in graphs).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from irframework.compiler.values import ROW_REDUCTIONS
from irframework.torch_ops import op_of

_RESIDUAL = ("x", "x_residual")
_ROWS_OF = {
    "rms_norm": ("x",),
    "gemma_rms_norm": ("x",),
    "layer_norm": ("x",),
    "fused_add_rms_norm": _RESIDUAL,
    "fused_add_gemma_rms_norm": _RESIDUAL,
    "fused_add_layer_norm": _RESIDUAL,
    "rms_norm_static_quant_fp8": ("x",),
    "rms_norm_dynamic_quant_fp8": ("x",),
    "fused_add_rms_norm_static_quant_fp8": _RESIDUAL,
    "fused_add_rms_norm_dynamic_quant_fp8": _RESIDUAL,
    "static_quant_fp8": ("x",),
    "dynamic_quant_fp8": ("x",),
    "dynamic_quant_int8": ("x",),
}
_CONVERSIONS = {"prims::convert_element_type", "aten::_to_copy", "aten::clone", "irframework::donate"}
_RESHAPES = {"aten::view", "aten::reshape", "aten::_unsafe_view", "aten::unsqueeze", "aten::squeeze"}


@dataclass(frozen=True, slots=True)
class Sum:
    """A tensor that is added up over the processes of a group.

    Attributes:
        of: What each process brings.
        group: The group's name.
    """

    of: Node
    group: str


@dataclass(frozen=True, slots=True)
class RowWise:
    """A node that works on each row alone.

    Attributes:
        target: What to call on a part of the rows; None where the part goes through as it is.
        args: Its arguments.
        rows: Positions of those that have rows.
        norms: Whether it reduces rows: the work that is worth dividing.
    """

    target: Any
    args: tuple[Any, ...]
    rows: tuple[int, ...]
    norms: bool


def as_sum(node: Node) -> Sum | None:
    """A node as a sum over processes, or None: `all_reduce` as an IR op, or as torch's functional collective."""
    found = op_of(node.target)
    if found is not None and found[0].name == "all_reduce":
        x, group, reduction = found[0].bind(node.args, node.kwargs)
        return Sum(x, group) if reduction == "sum" and group and has_rows(node) else None
    functional = torch.ops._c10d_functional
    if node.target is not functional.wait_tensor.default or not has_rows(node):
        return None
    begun: Any = node.args[0]
    if not isinstance(begun, Node) or begun.target is not functional.all_reduce.default or len(begun.users) != 1:
        return None
    x, reduction, group = begun.args
    return Sum(x, group) if reduction == "sum" and isinstance(x, Node) else None  # type: ignore[arg-type]


def as_row_wise(node: Node) -> RowWise | None:
    """A node as one that works row by row, or None."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source: Any = node.args[0]
        whole = as_row_wise(source)
        return None if whole is None or not has_rows(node) else RowWise(operator.getitem, node.args, (0,), False)
    found = op_of(node.target)
    if found is not None:
        return None if found[1] else _ir_op(found[0], node)
    if not isinstance(node.target, torch._ops.OpOverload) or not has_rows(node) or node.kwargs.get("out") is not None:
        return None
    return _torch_op(node.target, node)


def lead(node: Node) -> tuple[Any, ...]:
    """The shape without the last dimension."""
    value = node.meta["val"]
    first = value[0] if isinstance(value, (tuple, list)) else value
    return tuple(first.shape[:-1])


def _same_lead(node: Node, other: Node) -> bool:
    """Whether two nodes have the same rows, dimension by dimension."""
    one, two = lead(node), lead(other)
    return len(one) == len(two) and statically_known_true(sym_eq(one, two))


def _ir_op(op: Any, node: Node) -> RowWise | None:
    names = _ROWS_OF.get(op.name)
    if names is None:
        return None
    args = op.bind(node.args, node.kwargs)
    rows = tuple(index for index, name in enumerate(op.signature.parameters) if name in names)
    if not all(isinstance(args[index], Node) and has_rows(args[index]) for index in rows):
        return None
    several = isinstance(node.meta["val"], (tuple, list))
    if several and not all(user.target is operator.getitem and has_rows(user) for user in node.users):
        return None
    return RowWise(op.torch_op, args, rows, "norm" in op.name)


def _torch_op(target: Any, node: Node) -> RowWise | None:
    name = target._schema.name
    args = node.args
    first: Any = args[0] if args else None
    if not isinstance(first, Node) or not isinstance(first.meta.get("val"), Tensor):
        return None
    if name in _RESHAPES and target._overloadname != "dtype":
        kept = has_rows(first) and first.meta["val"].shape[-1] == node.meta["val"].shape[-1]
        return RowWise(None, (first,), (0,), False) if kept else None
    if name in _CONVERSIONS:
        return _conversion(target, node, first)
    if name in ROW_REDUCTIONS:
        return _reduction(target, node, first)
    if torch.Tag.pointwise not in target.tags or node.kwargs:
        return None
    rows = []
    for index, argument in enumerate(args):
        if isinstance(argument, Node) and isinstance(argument.meta.get("val"), Tensor):
            if has_rows(argument) and _same_lead(argument, node):
                rows.append(index)
            elif argument.meta["val"].dim() > 1:
                return None
        elif isinstance(argument, Node) or (isinstance(argument, (list, tuple)) and argument):
            return None
    return RowWise(target, args, tuple(rows), False) if rows else None


def _conversion(target: Any, node: Node, first: Node) -> RowWise | None:
    if not has_rows(first) or node.meta["val"].device != first.meta["val"].device:
        return None
    dtype = node.meta["val"].dtype
    if dtype == first.meta["val"].dtype:
        again = target if target._schema.name == "irframework::donate" else torch.ops.aten.clone.default
        return RowWise(again, (first,), (0,), False)
    return RowWise(torch.ops.prims.convert_element_type.default, (first, dtype), (0,), False)


def _reduction(target: Any, node: Node, first: Node) -> RowWise | None:
    """A reduction of the last dimension that keeps it."""
    args, kwargs = node.args, node.kwargs
    dims: Any = args[1] if len(args) > 1 else None
    keeps = args[2] if len(args) > 2 else False
    last = first.meta["val"].dim() - 1
    if not has_rows(first) or kwargs or keeps is not True or not isinstance(dims, (list, tuple)):
        return None
    if len(dims) != 1 or dims[0] not in (-1, last):
        return None
    return RowWise(target, (first, [-1], True, *args[3:]), (0,), True)


def has_rows(node: Node) -> bool:
    """Whether a node is a tensor of rows whose shape can be written down with one unknown size, -1, at most.

    The last dimension is a plain number.
    """
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() < 2 or type(value.shape[-1]) is not int:
        return False
    return sum(type(size) is not int for size in value.shape) <= 1
