"""Memory that the GPUs of a group share, and how kernels that are not torch's take turns in it.

Owns its layout. Who may have it, and how it is got from torch, is in `symmetric_memory.py`; what is done in it is a
provider's kernel.

The memory of a process is signals and behind them two halves of data. A kernel that adds up is always `PROGRAMS`
programs. The n-th call of program p, counted from one in `counts[p]` of its own device,

1. writes the process's data into half `n % 2` of its own memory,
2. writes n into the signals `[p, own rank]` of all others (release), and waits until all of its own signals `[p, :]`
   are at least n (acquire),
3. reads the same half of the others' memory.

All processes call in the same order, so that n is the same in all of them, and the same for all programs of a call.

* What is read in step 3 is what was written in step 1 of the same call, if program p of the others reads nothing but
  what program p wrote: its signal is behind its writes.
* It is not overwritten too early. A process writes to the same half again in call n + 2. That starts when its call
  n + 1 has ended, where each program has waited for the signals of call n + 1 of all others. Those are sent when the
  others have begun call n + 1, on a stream where call n has ended, with all that it reads.
* A signal is not missed: it may be n + 1 already when n is waited for, which is enough. It is never n + 2, for that
  takes this process's n + 1.

What is counted is kept on the device, so that a call that was recorded in a CUDA graph goes on counting when it is
replayed. Calls of one process must be on one stream, or in its order, as it is for all collectives of a group.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PROGRAMS = 128  # of a kernel; they wait for each other, so all must fit on a device at once
_LINE = 256  # bytes


@dataclass(frozen=True, slots=True, eq=False)
class SharedMemory:
    """What a kernel needs to know of the memory that the processes of a group share.

    Attributes:
        rank: Which process this is.
        size: How many there are.
        capacity: Bytes of data that a process may write in one call: those of one half.
        places: Addresses in this process, `[2, size]` int64 on its device: of the signals of each process, `[PROGRAMS,
            size]` int32, and of the first half of its data; the second one lies `capacity` bytes behind.
        counts: How often each program was called, `[PROGRAMS]` int32 on the device.
    """

    rank: int
    size: int
    capacity: int
    places: Tensor
    counts: Tensor


def bytes_of(size: int, capacity: int) -> int:
    """How much memory each of `size` processes needs to add up `capacity` bytes (of which `laid_out` makes lines)."""
    return _signals(size) + 2 * _lines(capacity)


def laid_out(addresses: Sequence[int], rank: int, capacity: int, device: torch.device) -> SharedMemory:
    """Describe memory whose first bytes are the signals, all zero.

    Args:
        addresses: Where the memory of each process begins in this one; multiples of 16.
        rank: Which process this is.
        capacity: Bytes that are added up in one call at most.
        device: The device of this process.
    """
    size = len(addresses)
    places = [list(addresses), [address + _signals(size) for address in addresses]]
    return SharedMemory(
        rank,
        size,
        _lines(capacity),
        torch.tensor(places, dtype=torch.int64, device=device),
        torch.zeros(PROGRAMS, dtype=torch.int32, device=device),
    )


def _signals(size: int) -> int:
    return _lines(PROGRAMS * size * 4)


def _lines(count: int) -> int:
    return -(-count // _LINE) * _LINE
