"""Owns how much of a tensor one program of a kernel works on. Knows shapes only: no tensors, no Triton.

Where a row is summed, its tile depends on its length alone, and is the same whatever the kernel stores. So a row is
always summed in the same order: its result does not depend on what else is in the batch, and codes are those of the
values. Largest values have no order, so kernels that only look for these have other tiles for many rows than for few.
Tiles of products are in `product_tiles.py`.

The numbers are the best of what `benchmarks/triton_tiles.py` measured on an H200 in bfloat16, with rows of 2048, 4096,
5120 and 8192, one to 32768 of them; between near equals, those that need the fewest rules.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

# Elements of a row that are kept in registers at most: 32 for each thread of 16 warps.
_LONGEST_TILE = 16384
_LONG_ROW_BLOCK = 8192
_LONG_ROW_WARPS = 16
_SMALLEST_TILE = 2048
_ELEMENTWISE_TILE = 1024
_HEADS_TILE = 1024
_WIDEST_WARP = 64  # threads, on AMD devices
MANY_ROWS = 1024
FEW_ROWS = 64
LONGEST_GROUP = 16384
NVFP4_BLOCK = 16  # elements under one scale
LONGEST_PART = _LONG_ROW_BLOCK  # of a row that is also summed: a group that is not in two tiles
MOST_EXPERTS = 4096
_EXPERTS_TILE = 512
LONGEST_HEAD = 256
LONGEST_LATENT = 512
MOST_SHARES = 32
_LATENT_HEADS = 64


@dataclass(frozen=True, slots=True, eq=False)  # by identity: a launch looks for the tile of a kind
class Kind:
    """How a kernel that reduces rows holds one.

    Attributes:
        in_one: Elements for each thread, where a row is worked on in one part.
        in_two: The same where it is worked on in two; 0: it never is.
        few_in_one: Whether a row is worked on in one part where there are few (less than `MANY_ROWS`).
        fewest_warps: Warps per program at least.
    """

    in_one: int
    in_two: int
    few_in_one: bool = False
    fewest_warps: int = 4


NORM = Kind(32, 16)
ADD_NORM = Kind(32, 0, fewest_warps=8)
CODES = Kind(32, 32, few_in_one=True)
GATED_CODES = Kind(16, 16, few_in_one=True)


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
        early: Whether the kernel is loaded before its predecessor has ended, where the device can (`kernels.order`).
            That gains 0.6 us behind kernels that say when the next may be loaded, and costs 0.2 us and more behind
            those that do not, which matrix products are.
        stages: Stages that loads in a loop are spread over; 0: as many as Triton takes by itself.
    """

    rows: int
    block: int
    whole: bool
    warps: int
    tail: int = 0
    resident: int = 0
    early: bool = False
    stages: int = 0


# The largest element of a tensor: so many programs read a share each, whatever the size is.
LARGEST_PARTS = 512
LARGEST_TILE = Tile(1, 4096, False, 8)


def power_of_two(length: int) -> int:
    """The smallest power of two that is not below `length`."""
    return 1 << max(length - 1, 0).bit_length()


def _warps(elements: int, per_thread: int, fewest: int) -> int:
    return min(16, max(fewest, elements // (32 * per_thread)))


@cache
def row_tile(length: int | None, kind: Kind, many: bool = False) -> Tile:
    """Tile for a kernel that reduces rows of `length` elements (None: unknown while a kernel is traced).

    Args:
        length: Elements of a row.
        kind: The kind of kernel.
        many: Whether there are many rows. Only tiles of kernels that sum nothing depend on it.
    """
    if length is None or length > _LONGEST_TILE:
        return Tile(1, _LONG_ROW_BLOCK, False, _LONG_ROW_WARPS)
    block = power_of_two(length)
    if block <= _SMALLEST_TILE:
        return Tile(_SMALLEST_TILE // block, block, True, _warps(_SMALLEST_TILE, kind.in_one, kind.fewest_warps))
    tail = power_of_two(length - block // 2)
    if tail <= block // 4 and kind.in_two and (many or not kind.few_in_one):
        warps = _warps(block // 2, kind.in_two, kind.fewest_warps)
        # Not fewer elements than threads: see `add_rms_norm_kernel`.
        return Tile(1, block // 2, True, warps, max(tail, _WIDEST_WARP * warps))
    return Tile(1, block, True, _warps(block, kind.in_one, kind.fewest_warps))


@cache
def elementwise_tile(length: int | None, gate: bool, codes: bool, few: bool = False) -> Tile:
    """Tile for an elementwise kernel over rows of `length` elements (None: unknown while a kernel is traced).

    Args:
        length: Elements of a row of the output.
        gate: Whether there is a gate, and so twice as much to read for each element.
        codes: Whether codes are stored.
        few: Whether there are few rows, at most `FEW_ROWS`.
    """
    most, warps = _ELEMENTWISE_TILE, 4
    if gate and few:
        most //= 2
    elif not gate:
        most *= 2
    elif codes and length and length % (2 * most) == 0:
        most, warps = 2 * most, 8
    block = most if length is None else min(most, power_of_two(length))
    return Tile(most // block, block, length is not None and length <= block, warps)


@cache
def pairs_tile(length: int | None) -> Tile:
    """Tile for an elementwise kernel whose input holds gate and up in turn, for `length` of both.

    A thread reads 16 bytes once. What it makes of them are neighbours, so nothing is exchanged with other threads.
    """
    most = _ELEMENTWISE_TILE // 2
    block = most if length is None else min(most, power_of_two(length))
    return Tile(most // block, block, length is not None and length <= block, 4)


@cache
def group_tile(group_size: int) -> Tile:
    """Tile for groups of a row, each of which is reduced alone."""
    block = power_of_two(group_size)
    return Tile(max(1, _SMALLEST_TILE // block), block, True, _warps(max(block, _SMALLEST_TILE), 16, 4))


@cache
def experts_tile(block: int) -> Tile:
    """Tile for the choice of experts, `block` of them to a token with all padding."""
    rows = max(1, _EXPERTS_TILE // block)
    return Tile(rows, block, True, min(8, max(1, rows * block // 256)))


@cache
def keys_tile(group: int, size: int, element: int) -> Tile:
    """Tile for attention of `group` heads of queries that read one head of keys.

    Not measured yet. `rows` are heads, 16 of which are what a matrix instruction takes; `block` are keys at a time.

    Args:
        group: Heads of queries.
        size: Elements of a head of keys or values, padded to a power of two.
        element: Bytes of one.
    """
    keys = min(128, max(16, 16384 // (max(size, 16) * element)))
    return Tile(16 if group <= 16 else 32, keys, False, 4)


@lru_cache(4096)  # of numbers of tokens there is no end
def latent_tile(
    heads: int, rank: int, rope: int, element: int, multiprocessors: int, shared_memory: int, most_shares: int | None
) -> Tile:
    """Tile for latent attention: `rows` are heads, all of which read the same `block` of keys at a time.

    The more heads a program has, the less often keys are read, and the larger its products are; the fewer, the more
    programs there are. So it has as many heads as leave no multiprocessor idle. The best, or within 3 % of it, of 60
    tiles that were measured on an H200 in bfloat16 with rows of 512 + 64, 16 and 128 heads, 1 to 256 sequences of 1024
    to 8192 keys; `benchmarks/latent_attention_gpu.py` has the nearest. Other sizes of rows, float32 and other devices
    were not measured.

    Args:
        heads: Heads of queries.
        rank: Elements of a row that are both keys and values, padded to a power of two.
        rope: Elements of a row that are keys only, padded to a power of two.
        element: Bytes of one.
        multiprocessors: How many there are.
        shared_memory: Bytes that a program can have of it at most.
        most_shares: Shares of keys, of all tokens together, if sequences are shared out as far as their length allows;
            None: unknown while the kernel is traced, and taken to be many.
    """
    warps = 8 if rank > 256 else 4
    if element > 2:  # no matrix instruction takes float32 without rounding it
        rows, keys, stages = 16, min(64, max(16, 32768 // (rank * element))), 0
    else:
        rows, keys, stages = min(_LATENT_HEADS, max(16, power_of_two(heads))), 64, 1
        while rows > 16 and _latent_memory(rows, keys, rank, rope, element) > shared_memory:
            rows, keys = rows // 2, 32
        programs = 0 if most_shares is None else most_shares * -(-heads // rows)
        while rows > 16 and 0 < 2 * programs <= multiprocessors:
            rows, programs = rows // 2, 2 * programs
        if rows < _LATENT_HEADS:
            alone = 0 < programs <= multiprocessors
            keys, warps, stages = (64, warps, 2) if alone else (32, 4, 2)
    while keys > 16 and _latent_memory(rows, keys, rank, rope, element) > shared_memory:
        keys //= 2
    return Tile(rows, keys, False, warps, stages=stages)


def _latent_memory(rows: int, keys: int, rank: int, rope: int, element: int) -> int:
    """Bytes of shared memory that Triton 3.6 takes for a tile on any NVIDIA device, or a few more.

    Of queries and keys, and of what threads exchange: weights, and more where tensors do not begin at a multiple of 16
    bytes. With 64 rows, devices without instructions for so many at once exchange sums instead of reading queries.
    """
    row = (rank + rope) * element
    if rows >= _LATENT_HEADS:
        return keys * row + rows * max(row, 4 * rank) + 512
    return (rows + keys) * row + rows * keys * element + 6 * keys * keys


def latent_programs(tile: Tile, multiprocessors: int) -> int:
    """Programs of latent attention that keep a device busy: more shares than that give only more sums to add up."""
    return multiprocessors if tile.rows >= _LATENT_HEADS else 2 * multiprocessors


@cache
def shares_tile(size: int) -> Tile:
    """Tile for adding up what shares of the keys give for one head of `size` elements, padded to a power of two."""
    return Tile(1, size, True, 8 if size > 256 else 4)


def heads_tile(half: int, heads: int) -> Tile:
    """Tile for rotating `heads` heads of one token, with `half` angles each. The numbers may be symbolic."""
    block = power_of_two(half)
    rows = max(1, min(power_of_two(heads), _HEADS_TILE // block))
    return Tile(rows, block, True, 4 if rows * block > 256 else 1)


def copied_tile(size: int, heads: int) -> Tile:
    """Tile for copying `heads` heads of `size` elements of one token. The numbers may be symbolic."""
    block = power_of_two(size)
    rows = max(1, min(power_of_two(heads), 2 * _HEADS_TILE // block))
    return Tile(rows, block, True, 4 if rows * block > 512 else 1)
