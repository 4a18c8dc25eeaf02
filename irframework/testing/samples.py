"""Calls that an implementation is tried on.

Owns which shapes, dtypes and layouts are tried, and tensors that lie in larger storages, so that a write beside them is
seen. The arguments themselves are those of the op's input generator.
"""

from __future__ import annotations

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

SHAPES: tuple[tuple[int, ...], ...] = ((0, 64), (1, 64), (5, 34), (3, 33), (37, 256), (2, 3, 128))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MARGIN = 64  # elements: kernels may rely on the alignment that torch's allocator gives
_SEED = 20


@dataclass(frozen=True, slots=True)
class Sample:
    """One call.

    Attributes:
        shape: What the op's input generator was asked for.
        dtype: The same.
        layout: How the tensors lie: `in a larger storage`, `rows apart` or `transposed`.
        args: The arguments in the order of the signature.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: str
    args: tuple[Any, ...]


def samples(
    op: IrOp, device: str, shapes: Sequence[tuple[int, ...]] = SHAPES, dtypes: Sequence[torch.dtype] = DTYPES
) -> Iterator[Sample]:
    """Calls of an op that its own function takes; the same ones each time.

    Args:
        op: The op; it has an input generator.
        device: Of all tensors.
        shapes: Of the first activation.
        dtypes: Of the activations.

    Raises:
        InvalidOpError: The op has no input generator.
    """
    if op.input_generator is None:
        op.generate_inputs()  # raises, with the advice
    for dtype in dtypes:
        for shape in shapes:
            with _seeded(device):
                try:
                    args = op.generate_inputs(shape=shape, dtype=dtype, device=device)
                    op.registered[NATIVE].apply(args)
                except Exception:  # the op does not take this shape or dtype
                    continue
            for layout in _LAYOUTS:
                yield Sample(shape, dtype, layout, args)


@contextmanager
def _seeded(device: str) -> Iterator[None]:
    """The same numbers each time, and the program's own go on as if none had been drawn."""
    where = torch.device(device)
    if where.type == "cpu":
        forked = torch.random.fork_rng(devices=())
    else:
        forked = torch.random.fork_rng(devices=(where.index or 0,), device_type=where.type)
    with forked:
        torch.manual_seed(_SEED)
        yield


def laid_out(impl: IrOpImpl, sample: Sample) -> tuple[Any, ...]:
    """The arguments in storages of their own. An in-place implementation is always given contiguous activations."""
    lay = _LAYOUTS[sample.layout]
    kept = impl.op.activations if impl.inplace else ()
    named = impl.op.named(sample.args)
    return tuple(map_tensors(_in_a_larger_storage if name in kept else lay, value) for name, value in named.items())


def map_tensors(change: Callable[[Tensor], Any], value: Any) -> Any:
    """An argument, or a tuple or list of some, with something in the place of each tensor."""
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(change, item) for item in value)
    return change(value) if isinstance(value, Tensor) else value


def _in_a_larger_storage(value: Tensor) -> Tensor:
    count = value.numel()
    around = torch.ones(count + 2 * _MARGIN, device=value.device).to(value.dtype)
    inside = around[_MARGIN : _MARGIN + count].view(value.shape)
    inside.copy_(value)
    return inside


def _rows_apart(value: Tensor) -> Tensor:
    if value.dim() < 2:
        return _in_a_larger_storage(value)
    around = torch.ones((*value.shape[:-1], value.shape[-1] + _MARGIN), device=value.device).to(value.dtype)
    inside = around[..., : value.shape[-1]]
    inside.copy_(value)
    return inside


def _transposed(value: Tensor) -> Tensor:
    if value.dim() < 2:
        return _in_a_larger_storage(value)
    return value.transpose(-1, -2).contiguous().transpose(-1, -2)


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "in a larger storage": _in_a_larger_storage,
    "rows apart": _rows_apart,
    "transposed": _transposed,
}
