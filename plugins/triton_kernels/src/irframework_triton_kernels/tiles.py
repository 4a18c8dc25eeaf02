"""Owns how much of a tensor one program of a kernel works on. Knows shapes only: no tensors, no Triton.

A tile depends on the length of a row and never on how many rows there are. So a row is always summed in the same order,
and its result does not depend on what else is in the batch.
"""

from dataclasses import dataclass

# Elements of a row that are kept in registers at most: 32 for each thread of 16 warps.
_LONGEST_TILE = 16384
_LONG_ROW_BLOCK = 8192
_SMALLEST_TILE = 2048
_ELEMENTWISE_TILE = 1024
_HEADS_TILE = 1024
_PER_THREAD = 16


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of a tensor that one program works on.

    Attributes:
        rows: Rows, or heads, side by side; a power of two.
        block: Elements of a row at a time; a power of two.
        whole: Whether `block` covers a whole row.
        warps: Warps per program.
    """

    rows: int
    block: int
    whole: bool
    warps: int


def _power_of_two(length: int) -> int:
    return 1 << max(length - 1, 0).bit_length()


def _warps(elements: int) -> int:
    return min(16, max(4, elements // (32 * _PER_THREAD)))


def norm_tile(hidden: int | None) -> Tile:
    """Tile for a norm over rows of `hidden` elements (None: unknown while a kernel is traced)."""
    if hidden is None or hidden > _LONGEST_TILE:
        return Tile(1, _LONG_ROW_BLOCK, False, _warps(_LONG_ROW_BLOCK))
    block = _power_of_two(hidden)
    rows = max(1, _SMALLEST_TILE // block)
    return Tile(rows, block, True, _warps(rows * block))


def elementwise_tile(length: int | None) -> Tile:
    """Tile for an elementwise kernel over rows of `length` elements (None: unknown while a kernel is traced)."""
    block = _ELEMENTWISE_TILE if length is None else min(_ELEMENTWISE_TILE, _power_of_two(length))
    rows = _ELEMENTWISE_TILE // block
    return Tile(rows, block, length is not None and length <= block, 4)


def heads_tile(half: int, heads: int) -> Tile:
    """Tile for rotating `heads` heads of one token, with `half` angles each."""
    block = _power_of_two(half)
    rows = max(1, min(_power_of_two(heads), _HEADS_TILE // block))
    return Tile(rows, block, True, 4 if rows * block > 256 else 1)
