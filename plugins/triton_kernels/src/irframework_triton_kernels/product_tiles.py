"""Owns how much of a product with a gate one program works on. Knows shapes only: no tensors, no Triton.

Unlike those of other kernels, these tiles depend on how many rows there are, and on the device: in which order a row is
summed depends on what else is in the batch, and the ops say so.
"""

from dataclasses import dataclass
from functools import lru_cache

from irframework_triton_kernels.tiles import Tile, power_of_two

MOST_PRODUCT_ROWS = 128
_LONGEST_PART = 2048  # of one row, that a program reads at a time


@dataclass(frozen=True, slots=True)
class ProductTile(Tile):
    """The part of a product with a gate that one program works on.

    Attributes:
        rows: All rows, or more.
        block: Elements of each row that are multiplied at a time.
        columns: Columns of the result: as many of the gate, and of what it multiplies.
        turn: Blocks that each program begins behind the one before.
    """

    columns: int = 1
    turn: int = 0


@lru_cache(4096)
def product_tile(
    rows: int, length: int, hidden: int, element: int, multiprocessors: int, shared_memory: int
) -> ProductTile | None:
    """Tile for a product of few rows with a gate behind it; None where it was clearly slower than torch's.

    What takes time is to read the weight once: enough bytes must be on their way at any time. The more columns a
    program has, the less often the rows are read; the fewer, the more programs there are. Where the rows would be read
    too often, torch's product, which divides their length, too, is faster.

    From what was measured on an H200 in bfloat16 and float8_e4m3fn with 1 to 128 rows and ten weights of models, of
    [2 * 1536, 576] to [2 * 28672, 8192]. Other devices were not measured.

    Args:
        rows: How many there are.
        length: Elements of a row.
        hidden: Columns of the result.
        element: Bytes of one element of a row.
        multiprocessors: How many there are.
        shared_memory: Bytes that a program can have of it at most.
    """
    if rows == 1:
        return _row_of_product(length, element)
    if rows > MOST_PRODUCT_ROWS:
        return None
    coded = element == 1
    tile_rows = max(16, power_of_two(rows))
    columns = _columns_of_product(tile_rows, hidden, coded, multiprocessors, shared_memory)
    if tile_rows == 32 and (coded or columns < 64):  # the matrix unit of Hopper takes 64
        tile_rows, columns = 64, _columns_of_product(64, hidden, coded, multiprocessors, shared_memory)
    if tile_rows > columns * (2 if coded else 1):
        return None
    together = -(-hidden // (columns * multiprocessors))  # programs on one multiprocessor
    wide = (together <= 2 and (tile_rows <= 32 or columns <= 32)) or max(tile_rows, columns) <= 32
    width = 256 if wide and _two_stages(256, tile_rows, columns) <= shared_memory else 128  # bytes
    stage = width * (tile_rows + 2 * columns)
    on_their_way = (196 if together == 1 else 130) * 1024
    fewest = 4 if tile_rows >= 64 and together <= 2 and not coded else 3
    stages = min(shared_memory // stage, max(fewest, min(6, on_their_way // (together * stage))))
    warps = 8 if tile_rows * columns >= 64 * 128 else 4
    turn = 0 if coded else 5
    return ProductTile(tile_rows, width // element, False, warps, stages=stages, columns=columns, turn=turn)


def _two_stages(width: int, rows: int, columns: int) -> int:
    """Bytes of shared memory that a program of a product takes at least, `width` bytes of each row at a time."""
    return 2 * width * (rows + 2 * columns)


def _columns_of_product(rows: int, hidden: int, coded: bool, multiprocessors: int, shared_memory: int) -> int:
    """Columns of a program: the most that leave few multiprocessors idle.

    Some that have nothing to do cost less than some that work on two programs where most have one.
    """
    columns = 128
    if coded:
        columns = 32 if rows == 64 else 64
    while columns > 16:
        if columns == 128 and rows <= 64:
            fewest = 0.8
        else:
            fewest = 1.3 if rows <= 32 else 0.65
        programs = -(-hidden // columns) / multiprocessors
        fits = _two_stages(128, rows, columns) <= shared_memory
        if fits and (programs >= 1.3 or fewest <= programs <= 1):
            break
        columns //= 2
    return columns


def _row_of_product(length: int, element: int) -> ProductTile:
    """Tile for one row: parts of it that divide it, of 16 bytes for each thread or more, where they are long enough."""
    block = min(_LONGEST_PART, power_of_two(length))
    while length % block and block * element > 1024:
        block //= 2
    return ProductTile(1, block, True, max(1, min(4, block * element // 512)))
