"""Which bytes of which storage a tensor stands on.

Owns telling storages apart, of real and of fake tensors, and whether two tensors on one storage share a byte. Sizes
are plain numbers in the latter: see `compiler/overlap.py` for proofs about symbolic ones.

Private torch API used here (read in 2.11 and 2.13): `torch.UntypedStorage._cdata` and
`torch.multiprocessing.reductions.StorageWeakRef`, which keeps the identity of a storage, but not its memory.
"""

from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["Region", "StorageWeakRef", "place_of", "share_a_byte", "storage_key"]

_MAX_STEPS = 10_000


def storage_key(tensor: Tensor) -> int | None:
    """Return a number that no other living storage has; None for a tensor that has none of its own."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # subclasses that wrap several tensors
        return None


def place_of(tensor: Tensor) -> tuple[object, ...]:
    """Where and how a strided tensor lies: `resize_`, `t_`, `set_` and the like change it, whatever the bytes are."""
    return storage_key(tensor), tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()


@dataclass(frozen=True, slots=True)
class Region:
    """The bytes of a storage that a tensor's elements take.

    Attributes:
        start: The first byte.
        sizes: Elements per dimension; the last entry counts the bytes of one element.
        strides: From one to the next, in bytes.
    """

    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Region":
        """The bytes that a strided tensor takes in its storage."""
        item = tensor.element_size()
        strides = (*(stride * item for stride in tensor.stride()), 1)
        return cls(int(tensor.storage_offset()) * item, (*tensor.shape, item), strides)


def share_a_byte(a: Region, b: Region) -> bool:
    """Whether two regions of one storage have a byte in common. Taken for true where finding out takes too long.

    A common byte is a solution of `sum(stride * (i - j)) = b.start - a.start` within the sizes. Strides are looked at
    from the largest on; what the smaller ones can still add leaves few choices for each.
    """
    if 0 in a.sizes or 0 in b.sizes:
        return False
    low: dict[int, int] = defaultdict(int)
    high: dict[int, int] = defaultdict(int)
    for size, stride in zip(a.sizes, a.strides, strict=True):
        high[stride] += size - 1
    for size, stride in zip(b.sizes, b.strides, strict=True):
        low[stride] -= size - 1
    terms = [(stride, low[stride], high[stride]) for stride in sorted(low.keys() | high.keys(), reverse=True) if stride]
    rest = [(0, 0)]  # what the terms from here on can add, at least and at most
    for stride, least, most in reversed(terms):
        rest.append((rest[-1][0] + stride * least, rest[-1][1] + stride * most))
    rest.reverse()
    todo = [(0, b.start - a.start)]
    for _ in range(_MAX_STEPS):
        if not todo:
            return False
        index, wanted = todo.pop()
        if index == len(terms):
            return True  # `wanted` is 0: nothing else is within (0, 0)
        stride, least, most = terms[index]
        smallest, largest = rest[index + 1]
        first = max(least, -((largest - wanted) // stride))
        last = min(most, (wanted - smallest) // stride)
        todo += [(index + 1, wanted - stride * number) for number in range(first, min(last, first + _MAX_STEPS) + 1)]
    return True
