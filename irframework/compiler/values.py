"""Value numbers: two nodes with one number compute the same, whatever they are called and however they are spelt.

Owns the table of values: what is commutative, what only copies, what is a reshape, and how an IR op is known by its
definition. A value is a *core*, what is computed, and a shape: reshapes that keep the last dimension are moved behind
everything that works row by row, so that a norm and a norm of reshaped rows share a core. Does not look for anything
(`skeletons.py`), and changes no graph.

Read in torch 2.11 and 2.13: which ops Inductor's decompositions leave, `torch.Tag.pointwise`, `Node.meta["val"]`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from irframework.compiler.aliasing import effects_of
from irframework.compiler.call_arguments import (
    Core,
    Identity,
    Number,
    Shape,
    Value,
    clamped,
    constant,
    from_the_end,
    is_held,
    mapped_nodes,
    mapped_values,
    number,
    plain_number,
    rows_apart,
    shape_of,
    values_in,
)
from irframework.compiler.replays import Recorder, in_order, is_plain, look_of
from irframework.compiler.steps import Expansion, Step, TorchOp, given, step_of
from irframework.torch_ops import op_of

_SAME = {"aten::clone", "aten::alias", "aten::detach", "aten::lift_fresh_copy", "irframework::donate"}
_RESHAPES = {
    "aten::view", "aten::reshape", "aten::_unsafe_view", "aten::unsqueeze", "aten::squeeze", "aten::flatten",
    "aten::unflatten",
}  # fmt: skip
_CONVERSIONS = {"prims::convert_element_type", "aten::_to_copy", "aten::to"}
_COMMUTATIVE = {"aten::add", "aten::mul", "aten::maximum", "aten::minimum", "aten::eq", "aten::ne"}
ROW_REDUCTIONS = {"aten::mean", "aten::sum", "aten::amax", "aten::amin"}
_FULL = {"aten::full", "aten::full_like"}
_EXACT = {"aten::abs", "aten::neg", "aten::amax", "aten::amin"}
_NARROW, _WIDE = (torch.bfloat16, torch.float16), (torch.float32, torch.float64)
_SLICE, _VIEW, _EXPAND, CONVERT = "aten::slice", "view", "aten::expand", "convert"
_LOOKED_INTO = frozenset(_FULL | _EXACT)  # of which the arguments count where they are read
ERASED = frozenset({CONVERT, _VIEW, _EXPAND})  # cores that a skeleton looks through
COMMUTATIVE = frozenset(_COMMUTATIVE)


Expand = Callable[[Any, Sequence[Any], Sequence[Any]], "Expansion | None"]


@dataclass(slots=True)
class ValueTable:
    """The values of one graph, or of one definition.

    Attributes:
        expand: Gives the definition of an IR op, or None where it is to stay one op.
        cores: All cores by number.
        nodes: The graph's own nodes that compute a core, in order.
        of: The value of each node of the graph; a tuple for several outputs.
        by_target: The numbers of the cores that each target computes, in order.
        epoch: How many writes stand in front of what is computed now. Equal cores are of one epoch.
        epochs: The epoch of each core.
        writers: The graph's own nodes that overwrite memory, in order.
    """

    expand: Expand
    cores: list[Core] = field(default_factory=list)
    nodes: dict[int, list[Node]] = field(default_factory=dict)
    of: dict[Node, Any] = field(default_factory=dict)
    epoch: int = 0
    by_target: dict[str, list[int]] = field(default_factory=dict)
    epochs: list[int] = field(default_factory=list)
    writers: list[Node] = field(default_factory=list)
    _known: dict[Any, int] = field(default_factory=dict)
    _recorder: Recorder | None = None

    # --- graphs ------------------------------------------------------------------------------------------------

    def read(self, graph: Graph) -> None:
        """Number all nodes of a graph."""
        for node in graph.nodes:
            if node.op == "output":
                continue
            if node.op != "call_function":
                value = self.leaf(node, node.meta.get("val"))
            else:
                step = step_of(node)
                value = self._call(step, self.of)
                if (step.called is None or step.called.may_write) and effects_of(node).writes:
                    self.writers.append(node)
                    self.epoch += 1  # what is computed behind it is another value
            self.set(node, value)

    def set(self, node: Node, value: Any) -> None:
        """Let a node of the graph compute a value."""
        self.of[node] = value
        if isinstance(value, Value):
            self.nodes.setdefault(value.core, []).append(node)

    def forget(self, node: Node) -> None:
        """A node leaves the graph."""
        value = self.of.pop(node, None)
        if isinstance(value, Value):
            self.nodes[value.core].remove(node)

    def run(self, expansion: Expansion, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Values of the outputs of an expansion, whose placeholders have the given values."""
        found = look_of(inputs, self.cores, _LOOKED_INTO) if self._recorder is None else None
        if found is None:
            return self._run(expansion, inputs)
        look, cores = found
        known = expansion.replays.get(look)
        if known is not None and (again := known.again(cores, self._core)) is not None:
            return again
        self._recorder = recorder = Recorder({core: place for place, core in enumerate(cores)})
        try:
            outputs = self._run(expansion, inputs)
        finally:
            self._recorder = None
        replay = recorder.replay(outputs)
        if replay is not None and (expansion.is_symbolic or is_plain(look)):
            expansion.replays[look] = replay
        return outputs

    def _run(self, expansion: Expansion, inputs: Iterable[Any]) -> tuple[Any, ...]:
        values: dict[Node, Any] = {}
        rest = iter(inputs)
        for step in expansion.steps:
            node = step.node
            if node.op == "placeholder":
                values[node] = next(rest)
            elif node.op == "output":
                outputs: Any = node.args[0]
                return tuple(values[output] for output in outputs)
            elif node.op == "get_attr":
                values[node] = self.leaf((id(expansion.graph), node.target), step.val)
            else:
                values[node] = self._call(step, values)
        raise AssertionError("a graph ends with its output")

    # --- values ------------------------------------------------------------------------------------------------

    def leaf(self, identity: object, val: Any) -> Any:
        """The value of something that nothing is known of but what it is."""
        if isinstance(val, (list, tuple)):
            return tuple(self.leaf((identity, index), item) for index, item in enumerate(val))
        if not isinstance(val, torch.Tensor):
            return number(val)
        shape = shape_of(val)
        return Value(self._core("leaf", (Number(Identity(identity)),), shape, val.dtype), shape)

    def _core(self, target: str, args: tuple[Any, ...], shape: Shape, dtype: Any) -> int:
        key = (target, args, shape, dtype, self.epoch if target != "leaf" else 0)
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.cores)
            self.by_target.setdefault(target, []).append(number)
            self.epochs.append(self.epoch)
            self.cores.append(Core(target, args, shape, dtype))
        if self._recorder is not None:
            self._recorder.asked(number, target, args, shape, dtype)
        return number

    def _call(self, step: Step, values: dict[Node, Any]) -> Any:
        """The value of a call, whose arguments have values."""
        node, val = step.node, step.val
        if node.target is operator.getitem:
            source: Any = node.args[0]
            index: Any = node.args[1]
            whole = values[source]
            return whole[index] if isinstance(whole, tuple) else self.leaf(node, val)
        if val is None or step.called is None or step.called.is_random:
            return self.leaf(node, val)
        found = op_of(node.target) if step.called.is_ours else None
        if found is not None:
            value = self._ir_op(found[0], node, values)
            if value is not None:
                return value
        if step.shape is not None:
            return self._torch_op(step.called, given(step, values), step.shape, step.dtype)
        if isinstance(val, (list, tuple)):
            return self._several(step.called.name, given(step, values), val)
        return number(val)

    def _ir_op(self, op: Any, node: Node, values: dict[Node, Any]) -> Any:
        """The value of an IR op: by its definition if that can be fused, else as one op.

        Of an op that is one, the definition still tells whether it works row by row.
        """
        arguments = op.bind(node.args, node.kwargs)
        valued = mapped_nodes(arguments, lambda argument: values[argument])
        expansion = None
        if op.fuse or any(self.cores[value.core].shape != value.shape for value in values_in(valued)):
            fakes = mapped_nodes(arguments, lambda argument: argument.meta["val"])
            expansion = self.expand(op, fakes, node.meta["val"])
        results = None if expansion is None else self.outputs(expansion, valued)
        if op.fuse and results is not None:
            return results
        args = tuple(each if isinstance(each, (Value, tuple)) else number(each) for each in valued)
        return self._one_op(f"irframework::{op.name}", args, results, node.meta["val"])

    def _one_op(self, name: str, args: tuple[Any, ...], results: Any, val: Any) -> Any:
        """The value of an op that is not looked into; `results` are those of its definition, if it is known."""
        several = isinstance(val, (list, tuple))
        vals = list(val) if several else [val]
        wanted = [None] * len(vals) if results is None else list(results) if several else [results]
        moved = mapped_values(args, lambda value: Value(value.core, self.cores[value.core].shape))
        plain = mapped_values(args, self._plain)
        outputs: list[Any] = []
        for index, (item, result) in enumerate(zip(vals, wanted, strict=True)):
            if not isinstance(item, torch.Tensor):
                outputs.append(number(item))
                continue
            word, shape = f"{name}[{index}]" if several else name, shape_of(item)
            if isinstance(result, Value) and self.cores[result.core].shape != result.shape:  # reshapes came behind it
                natural = self.cores[result.core].shape
                outputs.append(Value(self._core(word, moved, natural, item.dtype), shape))
            else:
                outputs.append(Value(self._core(word, plain, shape, item.dtype), shape))
        return tuple(outputs) if several else outputs[0]

    def turned(self, value: Value) -> tuple[Value, tuple[int, ...] | None]:
        """What a value only permutes, and the order of its dimensions; the value itself and None for any other."""
        core = self.cores[value.core]
        if core.target != "aten::permute" or core.shape != value.shape:
            return value, None
        dims = core.args[1].value
        return core.args[0], tuple(int(constant(dim)) % len(core.shape) for dim in dims)

    def outputs(self, expansion: Expansion, arguments: Sequence[Any]) -> Any:
        """The value of an IR op by its definition, for arguments that have values."""
        inputs = []
        for index, item in expansion.places:
            argument = arguments[index] if item is None else arguments[index][item]
            inputs.append(argument if isinstance(argument, (Value, Number)) else number(argument))
        results = self.run(expansion, inputs)
        return results if expansion.is_tuple else results[0]

    def _torch_op(self, called: TorchOp, args: tuple[Any, ...], shape: Shape, dtype: Any) -> Any:
        name, first = called.name, args[0] if args else None
        if isinstance(first, Value):
            if name in _SAME or (name in _RESHAPES and called.overload != "dtype"):
                return Value(first.core, shape)
            if called.overload == "dtype" and name == "aten::view" and first.shape == shape:
                return self._each(name, args, shape, dtype)  # the bits of each number
            if name in _CONVERSIONS:
                if self.cores[first.core].dtype == dtype:
                    return Value(first.core, shape)
                return self._converted(first, shape, dtype)
            if name == _SLICE:
                return self._slice(first, args[1:], shape, dtype)
            if name == "aten::select" and from_the_end(args[1], len(first.shape)) == (-1,):
                at = plain_number(args[2])
                if isinstance(at, int) and isinstance(first.shape[-1], int):
                    at = at + first.shape[-1] if at < 0 else at
                    where = (Number(-1), number(at), number(at + 1), Number(1))
                    return Value(self._slice(first, where, (*first.shape[:-1], 1), dtype).core, shape)
            if name == _EXPAND and first.shape == shape:
                return first
            if name == "aten::mul" and args[1] == number(1.0) and self.cores[first.core].dtype == dtype:
                return first  # a quotient, 1 / x, is written as a reciprocal times one
            if name == "aten::pow" and args[1] == number(2):
                return self._each("aten::mul", (first, first), shape, dtype)
            if name in ROW_REDUCTIONS:
                dims = from_the_end(args[1] if len(args) > 1 else Number(None), len(first.shape))
                keeps = len(args) > 2 and args[2] == Number(True)
                rest = (Number(dims), *args[2:])
                if dims == (-1,) and keeps:
                    return self._rows(name, (first, *rest), shape, dtype)
                return Value(self._core(name, (self._plain(first), *rest), shape, dtype), shape)
        if called.is_pointwise:
            if name == "aten::clamp" and all(isinstance(bound, Number) for bound in args[1:]):
                return self._clamp(args, shape, dtype)
            args = (*args[:1], *[self._number_for(arg, shape, dtype) for arg in args[1:]])
            if name in _COMMUTATIVE and all(isinstance(arg, Value) for arg in args[:2]):
                args = (*in_order(args[0], args[1], self._recorder), *args[2:])
            return self._each(name, args, shape, dtype)
        if name == "aten::cat":
            parts: tuple[Any, ...] = args[0]
            dim = from_the_end(args[1] if len(args) > 1 else Number(0), len(shape))
            return self._rows(name, parts, shape, dtype, along=dim)
        return Value(self._core(name, mapped_values(args, self._plain), shape, dtype), shape)

    def _converted(self, x: Value, shape: Shape, dtype: Any) -> Value:
        """The value of a conversion: in front of what rounds nothing, as most programs write it."""
        core = self.cores[x.core]
        if core.target in _EXACT and core.dtype in _NARROW and dtype in _WIDE:
            inner: Value = core.args[0]
            args = (self._converted(inner, inner.shape, dtype), *core.args[1:])
            return Value(self._core(core.target, args, core.shape, dtype), shape)
        return self._each(CONVERT, (x,), shape, dtype)

    def _clamp(self, args: tuple[Any, ...], shape: Shape, dtype: Any) -> Value:
        """Two bounds are the lower and then the upper one, as compilers take them apart."""
        value: Value = args[0]
        for name, bound in zip(("aten::clamp_min", "aten::clamp_max"), args[1:], strict=False):
            if bound != Number(None):
                value = self._each(name, (value, bound), shape, dtype)
        return value

    def _number_for(self, arg: Any, shape: Shape, dtype: Any) -> Any:
        """The number that a tensor is full of, which means the same beside another tensor of its shape and dtype."""
        if isinstance(arg, Value) and arg.shape == shape:
            core = self.cores[arg.core]
            if core.target in _FULL and core.dtype == dtype and is_held(core.args[1], dtype):
                return core.args[1]
        return arg

    def _several(self, name: str, args: tuple[Any, ...], val: Sequence[Any]) -> tuple[Any, ...]:
        first = args[0] if args else None
        if name in ("aten::split", "aten::split_with_sizes", "aten::chunk") and isinstance(first, Value):
            dim = args[2] if len(args) > 2 else Number(0)
            axis, start, parts = from_the_end(dim, len(first.shape))[0], 0, []
            for item in val:
                end = start + item.shape[axis]
                where = (Number(axis), number(start), number(end), Number(1))
                parts.append(self._slice(first, where, shape_of(item), item.dtype))
                start = end
            return tuple(parts)
        return tuple(self._one_op(name, args, None, val))

    def _slice(self, x: Value, where: Sequence[Any], shape: Shape, dtype: Any) -> Value:
        axis = from_the_end(where[0] if where else Number(0), len(shape))[0]
        size = x.shape[axis]
        start, end = (plain_number(where[place]) if len(where) > place else None for place in (1, 2))
        step = plain_number(where[3]) if len(where) > 3 else 1
        if isinstance(size, int):
            start, end = (clamped(number, size, default) for number, default in ((start, 0), (end, size)))
        if (start in (0, None) and step == 1) and shape == x.shape:
            return x
        rest = (Number(axis), number(start), number(end), Number(step))
        if axis == -1:
            return self._rows(_SLICE, (x, *rest), shape, dtype)
        return Value(self._core(_SLICE, (self._plain(x), *rest), shape, dtype), shape)

    def _plain(self, value: Value) -> Value:
        """The value, as what is computed in its very shape."""
        core = self.cores[value.core]
        if core.shape == value.shape:
            return value
        return Value(self._core(_VIEW, (Value(value.core, core.shape),), value.shape, core.dtype), value.shape)

    def _taken_apart(self, value: Value) -> tuple[Value, Shape]:
        """The value, computed as rows in parts if that is how it stands; and the shape in which it is computed."""
        own = rows_apart(self.cores[value.core].shape, value.shape)
        return Value(self._plain(Value(value.core, own)).core, value.shape), own

    def _each(self, name: str, args: tuple[Any, ...], shape: Shape, dtype: Any) -> Value:
        """The value of what works on each element alone: of one tensor, all reshapes come behind it."""
        if shape in ((), (1,)):  # one number, with or without a dimension
            args = mapped_values(args, lambda value: self._plain(Value(value.core, ())))
            return Value(self._core(name, args, (), dtype), shape)
        large = [value for value in values_in(args) if value.shape not in ((), (1,))]
        if large and large[0].shape == shape and all(value == large[0] for value in large[1:]):
            x = large[0]
            own = self.cores[x.core].shape
            seen = x if own == shape else Value(x.core, own)
            moved = mapped_values(args, lambda v: seen if v == x else self._plain(Value(v.core, ())))
            return Value(self._core(name, moved, own, dtype), shape)
        return self._rows(name, args, shape, dtype)

    def _rows(
        self, name: str, args: tuple[Any, ...], shape: Shape, dtype: Any, along: tuple[int, ...] | None = None
    ) -> Value:
        """The value of what works on each row alone: reshapes that keep the last dimension come behind it."""
        extra = () if along is None else (Number(along),)
        leads: set[Shape | None] = set()
        moved: list[Any] = []
        for arg in args:
            if not isinstance(arg, Value):
                moved.append(arg)
                continue
            arg, own = self._taken_apart(arg)
            if len(arg.shape) == len(shape) and arg.shape[:-1] == shape[:-1] and own and own[-1:] == arg.shape[-1:]:
                leads.add(own[:-1])
                moved.append(Value(arg.core, own))
            elif along is None and all(size == 1 for size in arg.shape[:-1]):
                alone = () if arg.shape == (1,) else arg.shape[-1:]
                moved.append(self._plain(Value(arg.core, alone)))  # the same for all rows
            else:
                leads.add(None)
        if len(leads) == 1 and None not in leads and shape and along in (None, (-1,)):
            natural = (*(leads.pop() or ()), shape[-1])
            return Value(self._core(name, (*moved, *extra), natural, dtype), shape)
        plain = mapped_values(args, self._plain)
        return Value(self._core(name, (*plain, *extra), shape, dtype), shape)
