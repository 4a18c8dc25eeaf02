"""States kept in slots, of which a decode step reads and replaces some.

Owns how rows of a batch find their slots, what -1 means, and the checks of both. Does not hold ops.
"""

from typing import Any

import torch
from torch import Tensor

from irframework.errors import ArgumentError
from irframework.symbolic import same_sizes


def check_slots(op: str, x: Tensor, state_name: str, state: Tensor, name: str, indices: Tensor | None) -> None:
    """Raise unless the rows of x have a slot each.

    Raises:
        ArgumentError: There is no index and not one slot per row, or the indices are no vector of integers.
    """
    if indices is None:
        if not same_sizes(state.shape[:1], x.shape[:1]):
            raise ArgumentError(
                f"Op {op!r}: without {name!r}, argument {state_name!r} must have one slot per row of 'x', "
                f"{x.shape[0]}; it has shape {tuple(state.shape)}."
            )
    elif indices.dtype not in (torch.int32, torch.int64) or not same_sizes(indices.shape, x.shape[:1]):
        raise ArgumentError(
            f"Op {op!r}: argument {name!r} must be int32 or int64 of shape {tuple(x.shape[:1])}, it has dtype "
            f"{indices.dtype} and shape {tuple(indices.shape)}."
        )


def taken_slots(state: Tensor, indices: Tensor | None) -> Tensor:
    """Return the state of each row; that of a row without a slot means nothing, and is finite."""
    if indices is None:
        return state
    rows = torch.cat((state, state.new_zeros((1, *state.shape[1:]))))
    return rows[_slots(state, indices)]


def with_slots(state: Tensor, indices: Tensor | None, rows: Tensor) -> Tensor:
    """Return all states, with those of the rows replaced."""
    rows = rows.to(state.dtype)
    if indices is None:
        return rows.contiguous()
    count = state.shape[0]
    slots = _slots(state, indices)
    owner = torch.full((count + 1,), -1, dtype=torch.int64, device=state.device)
    owner = owner.scatter(0, slots, torch.arange(indices.shape[0], device=state.device))[:-1]
    replacing = torch.cat((rows, rows.new_zeros((1, *rows.shape[1:]))))[owner]  # -1 is the row of zeros
    return torch.where((owner >= 0).reshape(-1, *(1,) * (state.dim() - 1)), replacing, state)


def _slots(state: Tensor, indices: Tensor) -> Tensor:
    """The slots as int64; one behind the last for rows that have none."""
    count = state.shape[0]
    return torch.where((indices >= 0) & (indices < count), indices, count).to(torch.int64)


def check_slot_numbers(op: str, name: str, indices: Tensor | None, state: Tensor) -> None:
    """Check the numbers of slots. Waits for the device.

    Raises:
        ArgumentError: A slot does not exist, or two rows name the same one.
    """
    seen: set[int] = set()
    slots = state.shape[0] if state.dim() else 0
    if indices is None or indices.dim() != 1 or indices.is_floating_point():  # `check_slots` has the word for those
        return
    for row, slot in enumerate(indices.tolist()):
        if not -1 <= slot < slots:
            raise ArgumentError(
                f"Op {op!r}: argument {name!r} names slot {slot} in row {row}; there are {slots} slots, from 0, and -1 "
                "is for rows without one."
            )
        if slot in seen:
            raise ArgumentError(
                f"Op {op!r}: argument {name!r} names slot {slot} again in row {row}; a slot holds one sequence."
            )
        if slot >= 0:
            seen.add(slot)


def some_slots(batch: int, device: Any) -> Tensor:
    """Return slots for generated calls: `batch` of `batch + 3`, in no order."""
    return torch.randperm(batch + 3)[:batch].to(device=device, dtype=torch.int32)
