"""Calls that an implementation is tried on.

Owns which shapes, dtypes, layouts, optional arguments and special values are tried, and tensors that lie in larger
storages full of NaN, so that a write beside them is seen and a read beside them shows in the result. The arguments
themselves are those of the op's input generator, made on the CPU: they are the same numbers on every device.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from irframework.op import NATIVE

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp

SHAPES: tuple[tuple[int, ...], ...] = (
    (5, 34),  # usual calls come first: what they show is read first
    (0, 64),
    (1, 64),
    (3, 33),
    (37, 256),
    (7,),
    (2, 3, 128),
    (2, 3, 2, 64),
    (0, 3, 64),
    (3, 1),
    (2, 2),
    (513, 62),
    (2, 8193),
    (1, 16386),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_FEW: tuple[tuple[int, ...], ...] = ((5, 34), (37, 256), (2, 3, 128))
_SPECIAL: tuple[tuple[int, ...], ...] = ((5, 34), (37, 256))
_LARGE = 10_000  # elements; such calls are tried in few layouts
_MARGIN = 64  # elements: kernels may rely on the alignment that torch's allocator gives
_SEED = 20

Layout = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Sample:
    """One call.

    Attributes:
        shape: What the op's input generator was asked for.
        dtype: The same.
        kind: What is unusual about its arguments, or nothing.
        layout: How the tensors lie: a key of `LAYOUTS`.
        special: Whether it holds numbers that are compared by the rule `special_values`.
        args: The arguments in the order of the signature.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    layout: str
    special: bool
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.kind, f"tensors {self.layout}")))


def samples(op: IrOp, device: str) -> Iterator[Sample]:
    """Calls of an op that its own function takes; the same ones each time.

    Args:
        op: The op; it has an input generator.
        device: Of all tensors.

    Raises:
        InvalidOpError: The op has no input generator.
    """
    for dtype in dtypes_of(op):
        for shape in SHAPES if dtype is not torch.float64 else _FEW[:1]:
            for kind, args in calls(op, shape, dtype, device):
                if kind and shape not in _FEW:
                    break
                seen = []
                for layout in LAYOUTS if not kind and math.prod(shape) < _LARGE else _FEW_LAYOUTS:
                    places = [place(value) for value in _laid(op, args, layout, ())]
                    if places not in seen:
                        seen.append(places)
                        yield Sample(shape, dtype, kind, layout, False, args)
            if shape in _SPECIAL:
                for kind, args in _special(op, shape, dtype, device):
                    yield Sample(shape, dtype, kind, CLOSE, True, args)


def calls(op: IrOp, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """The usual call, and the same with other optional arguments, as far as native takes them.

    Yields:
        What is unusual about the call, and its arguments in the order of the signature.
    """
    made = _generated(op, shape, dtype, device)
    variants = [("", args) for args in made[:1]]
    for args in made[:1]:
        for name, parameter in op.signature.parameters.items():
            value = op.named(args)[name]
            if isinstance(value, Tensor) and parameter.annotation is not Tensor:
                variants.append((f"{name}=None", _with(op, args, name, None)))
            elif isinstance(value, bool):
                variants.append((f"{name}={not value}", _with(op, args, name, not value)))
    variants += [(f"call {number} of the input generator", args) for number, args in enumerate(made[1:], 2)]
    for kind, args in variants:
        try:
            op.registered[NATIVE].apply(args)
        except Exception:  # the op does not take this shape, dtype or argument
            if not kind:
                return
        else:
            yield kind, args


def dtypes_of(op: IrOp) -> tuple[torch.dtype, ...]:
    """The dtypes that an op's calls are generated in; only the first where they hold no such numbers, but ids, say."""
    made = _generated(op, _FEW[0], DTYPES[0], "cpu")
    others = _generated(op, _FEW[0], DTYPES[1], "cpu")
    return DTYPES[:1] if made and _kinds(made) == _kinds(others) else DTYPES


def _kinds(made: list[tuple[Any, ...]]) -> list[list[Any]]:
    return [[map_tensors(lambda tensor: tensor.dtype, value) for value in args] for args in made]


def usual_call(impl: IrOpImpl, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = _SEED) -> Any:
    """The usual call of a shape and dtype, or None where native or the implementation does not take it."""
    made = _generated(impl.op, shape, dtype, device, seed)[:1]
    for args in made:
        try:
            impl.op.registered[NATIVE].apply(args)
        except Exception:
            return None
        return args if impl.accepts(args) is True else None
    return None


def _generated(
    op: IrOp, shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = _SEED
) -> list[tuple[Any, ...]]:
    if op.input_generator is None:
        op.generate_inputs()  # raises, with the advice
    generator: Any = op.input_generator
    with _seeded(seed):
        try:
            made = generator(shape=shape, dtype=dtype, device="cpu")
            several = list(made) if inspect.isgeneratorfunction(generator) else [made]
        except Exception:  # the generator does not know this shape
            return []
    return [map_tensors(lambda value: value.to(device), op.bind(tuple(args))) for args in several]


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """The same numbers each time, and the program's own go on as if none had been drawn."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        yield


def _with(op: IrOp, args: tuple[Any, ...], name: str, value: Any) -> tuple[Any, ...]:
    return tuple({**op.named(args), name: value}.values())


# --- special values ----------------------------------------------------------------------------------------------


def _special(
    op: IrOp, shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for _, args in list(calls(op, shape, dtype, device))[:1]:
        for kind, change in _SPECIAL_VALUES.items():
            named = op.named(args)
            changed = [name for name in op.activations if _is_floating(named[name])]
            if kind == "inf" and not all(_has_infinity(named[name].dtype) for name in changed):
                continue
            for name in changed:
                named[name] = _changed(named[name], change)
            yield f"{' and '.join(op.activations)} with {kind}", tuple(named.values())


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _has_infinity(dtype: torch.dtype) -> bool:
    return bool(torch.tensor(float("inf")).to(dtype).to(torch.float32).isinf())


def _changed(x: Tensor, change: Callable[[Tensor, torch.finfo], Tensor]) -> Tensor:
    """A tensor with special values. Codes of 8 bits, which torch has little arithmetic for, are made of float32."""
    info = torch.finfo(x.dtype)
    return change(x.clone(), info) if x.element_size() > 1 else change(x.to(torch.float32), info).to(x.dtype)


def _put(value: float) -> Callable[[Tensor, torch.finfo], Tensor]:
    def put(x: Tensor, info: torch.finfo) -> Tensor:
        rows = x.view(-1, x.shape[-1])
        rows[0, 0] = value
        rows[-1, -1] = -value
        rows[rows.shape[0] // 2, x.shape[-1] // 2] = value
        return x

    return put


_SPECIAL_VALUES: dict[str, Callable[[Tensor, torch.finfo], Tensor]] = {
    "inf": _put(float("inf")),
    "NaN": _put(float("nan")),
    "denormal numbers": lambda x, info: x.sign() * (info.smallest_normal * info.eps * 3),
    "large numbers": lambda x, info: x.sign() * min(60000, info.max),
    "zeros": lambda x, info: torch.zeros_like(x),
    "constant rows": lambda x, info: torch.ones_like(x),
}


# --- layouts -----------------------------------------------------------------------------------------------------


def laid_out(impl: IrOpImpl, sample: Sample) -> tuple[Any, ...]:
    """The arguments in storages of their own. An in-place implementation is always given contiguous activations."""
    return _laid(impl.op, sample.args, sample.layout, impl.op.activations if impl.inplace else ())


def of_their_own(impl: IrOpImpl, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies of arguments, close together in storages of their own."""
    return _laid(impl.op, args, CLOSE, ())


def _laid(op: IrOp, args: tuple[Any, ...], layout: str, kept: Sequence[str]) -> tuple[Any, ...]:
    first, others = LAYOUTS[layout]
    named = op.named(args)
    leading = next((name for name in op.activations if isinstance(named[name], Tensor)), None)
    laid = []
    for name, value in named.items():
        lay = first if name == leading else others
        if name in kept and lay not in (_in_a_larger_storage, _misaligned):
            lay = _in_a_larger_storage
        laid.append(map_tensors(_no_view, map_tensors(lay, value)))
    return tuple(laid)


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """An argument, or a tuple or list of some, with something in the place of each tensor."""
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(change, item) for item in value)
    return change(value) if isinstance(value, Tensor) else value


def place(value: Any) -> Any:
    """All that a layout decides about an argument."""
    if isinstance(value, (list, tuple)):
        return [place(item) for item in value]
    return (value.stride(), value.storage_offset() % _MARGIN) if isinstance(value, Tensor) else None


def _around(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Memory that an argument may be a part of. What is beside it is nobody's to read."""
    if value.is_floating_point() or value.is_complex():
        return torch.full(tuple(shape), float("nan"), device=value.device).to(value.dtype)
    return torch.ones(tuple(shape), device=value.device).to(value.dtype)


def _no_view(inside: Tensor) -> Tensor:
    """The same memory as a tensor of its own: one that autograd takes for a view costs more to do without data."""
    own = torch.empty(0, dtype=inside.dtype, device=inside.device)
    return own.set_(inside.untyped_storage(), inside.storage_offset(), inside.shape, inside.stride())


def _in_a_larger_storage(value: Tensor, margin: int = _MARGIN) -> Tensor:
    count = value.numel()
    inside = _around(value, (count + 2 * margin,))[margin : margin + count].view(value.shape)
    inside.copy_(value)
    return inside


def _misaligned(value: Tensor) -> Tensor:
    return _in_a_larger_storage(value, _MARGIN + 1)


def _rows_apart(value: Tensor, by: int = _MARGIN) -> Tensor:
    if value.dim() < 2:
        return _in_a_larger_storage(value)
    inside = _around(value, (*value.shape[:-1], value.shape[-1] + by))[..., : value.shape[-1]]
    inside.copy_(value)
    return inside


def _rows_apart_oddly(value: Tensor) -> Tensor:
    return _rows_apart(value, 3)


def _padded(value: Tensor) -> Tensor:
    """Each sequence in a longer one: the leading dimensions are no longer one."""
    if value.dim() < 3:
        return _in_a_larger_storage(value)
    inside = _around(value, (*value.shape[:-2], value.shape[-2] + 2, value.shape[-1]))[..., : value.shape[-2], :]
    inside.copy_(value)
    return inside


def _transposed(value: Tensor) -> Tensor:
    if value.dim() < 2:
        return _in_a_larger_storage(value)
    return value.transpose(-1, -2).contiguous().transpose(-1, -2)


def _repeated(value: Tensor) -> Tensor:
    """All rows are one: their stride is 0."""
    if value.dim() < 2 or 0 in value.shape:
        return _in_a_larger_storage(value)
    return value[:1].clone().expand(value.shape)


CLOSE = "in a larger storage"
LAYOUTS: dict[str, tuple[Layout, Layout]] = {  # of the first activation, of the others
    CLOSE: (_in_a_larger_storage, _in_a_larger_storage),
    "off by one element": (_misaligned, _misaligned),
    "off by one element, but the first": (_in_a_larger_storage, _misaligned),
    "with rows apart": (_rows_apart, _rows_apart),
    "with rows an odd number apart": (_rows_apart_oddly, _rows_apart_oddly),
    "with rows apart, but the first": (_in_a_larger_storage, _rows_apart),
    "with rows apart, the first only": (_rows_apart, _in_a_larger_storage),
    "with padded sequences": (_padded, _padded),
    "transposed": (_transposed, _transposed),
    "with one row for all": (_repeated, _repeated),
}
_FEW_LAYOUTS = (CLOSE, "off by one element", "with rows an odd number apart")
