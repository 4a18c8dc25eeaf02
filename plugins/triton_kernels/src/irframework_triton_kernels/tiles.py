"""Owns how much of a tensor one program of a kernel works on. Knows shapes only: no tensors, no Triton.

A tile depends on the length of a row and never on how many rows there are. So a row is always summed in the same order,
and its result does not depend on what else is in the batch.
"""

from dataclasses import dataclass
from functools import cache

# Elements of a row that are kept in registers at most: 32 for each thread of 16 warps.
_LONGEST_TILE = 16384
_LONG_ROW_BLOCK = 8192
_SMALLEST_TILE = 2048
_ELEMENTWISE_TILE = 1024
_HEADS_TILE = 1024
_PER_THREAD = 16
_WIDEST_WARP = 64  # threads, on AMD devices


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a tensor that one program works on, and how programs are launched.

    Attributes:
        rows: Rows, or heads, side by side; a power of two.
        block: Elements of a row at a time; a power of two.
        whole: Whether `block` and `tail` cover a whole row.
        warps: Warps per program.
        tail: Elements of a row behind `block` that are worked on with it, a power of two, or 0. A row of 5120 is 4096
            and 1024, where the next power of two would leave three of eight threads idle.
        resident: Programs per multiprocessor, each of which works on many tiles; 0: one program per tile.
        early: Whether the kernel is loaded before its predecessor has ended, where the device can do that.
    """

    rows: int
    block: int
    whole: bool
    warps: int
    tail: int = 0
    resident: int = 0
    early: bool = False


def power_of_two(length: int) -> int:
    """The smallest power of two that is not below `length`."""
    return 1 << max(length - 1, 0).bit_length()


def _warps(elements: int) -> int:
    return min(16, max(4, power_of_two(elements // (32 * _PER_THREAD))))


@cache
def row_tile(length: int | None) -> Tile:
    """Tile for a kernel that reduces rows of `length` elements (None: unknown while a kernel is traced)."""
    if length is None or length > _LONGEST_TILE:
        return Tile(1, _LONG_ROW_BLOCK, False, _warps(_LONG_ROW_BLOCK))
    block = power_of_two(length)
    if block <= _SMALLEST_TILE:
        return Tile(_SMALLEST_TILE // block, block, True, _warps(_SMALLEST_TILE))
    tail = power_of_two(length - block // 2)
    if tail <= block // 4:
        warps = _warps(block // 2)
        # Not fewer elements than threads: see `add_rms_norm_kernel`.
        return Tile(1, block // 2, True, warps, max(tail, _WIDEST_WARP * warps))
    return Tile(1, block, True, _warps(block))


@cache
def elementwise_tile(length: int | None, wide: bool = False) -> Tile:
    """Tile for an elementwise kernel over rows of `length` elements (None: unknown while a kernel is traced).

    Args:
        length: Elements of a row of the output.
        wide: Whether so little is read for each element that a program needs twice as many.
    """
    most = _ELEMENTWISE_TILE * (1 + wide)
    block = most if length is None else min(most, power_of_two(length))
    return Tile(most // block, block, length is not None and length <= block, 4)


@cache
def heads_tile(half: int, heads: int) -> Tile:
    """Tile for rotating `heads` heads of one token, with `half` angles each."""
    block = power_of_two(half)
    rows = max(1, min(power_of_two(heads), _HEADS_TILE // block))
    return Tile(rows, block, True, 4 if rows * block > 256 else 1)
