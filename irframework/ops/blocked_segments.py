"""Segments that lie packed one behind the other: sequences of tokens, or pairs sorted by expert.

Owns which segment an element belongs to, the layout of segments in blocks of equal size, a recurrence over such blocks,
and how the ops of state spaces describe a batch. Nothing here waits for a value: sizes follow from sizes alone. Does
not hold ops.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from irframework.errors import ArgumentError
from irframework.ops.packed_sequences import check_offsets
from irframework.ops.recurrence import recurrence
from irframework.ops.whole_operators import seen_through
from irframework.symbolic import same_sizes


@dataclass(frozen=True, slots=True)
class Blocks:
    """Segments laid out so that each starts with a block of its own.

    Attributes:
        source: `[blocks, size]`: which element is at a place, or the number of elements where none is.
        segment: `[blocks]`: the segment of a block, or the number of segments for an unused block.
        first: `[segments + 1]`: the first block of each segment; the last entry is the number of used blocks.
        place: `[elements]`: where an element is in the flattened blocks; one behind the last place for elements that
            are in no segment.
        inside: `[elements]`: whether an element is in a segment.
        opens: `[blocks]`: whether a block is the first one of its segment.
        last: `[segments]`: the last block of each segment, or the number of blocks for a segment without elements.
    """

    source: Tensor
    segment: Tensor
    first: Tensor
    place: Tensor
    inside: Tensor
    opens: Tensor
    last: Tensor

    def lay(self, packed: Tensor) -> Tensor:
        """Return `[elements, ...]` as `[blocks, size, ...]`, with zeros where no element is."""
        return with_zero_row(packed)[self.source]

    def collect(self, laid: Tensor) -> Tensor:
        """Return `[blocks, size, ...]` as `[elements, ...]`, with zeros for elements in no segment."""
        return with_zero_row(laid.flatten(0, 1))[self.place]


def with_zero_row(rows: Tensor) -> Tensor:
    """Return rows with a row of zeros behind them, for indexes that mean nothing."""
    return torch.cat((rows, rows.new_zeros((1, *rows.shape[1:]))))


def count_up_to(limits: Tensor, count: int) -> Tensor:
    """Return for each of `0 .. count - 1` how many limits are at most that number.

    Counted and added up, in linear time. `torch.searchsorted` does not go through `torch.vmap` without a warning.
    """
    marks = torch.zeros(count + 1, dtype=torch.int64, device=limits.device)
    marks = marks.scatter_add(0, limits.clamp(0, count), torch.ones_like(limits))
    return marks.cumsum(0)[:-1]


def segments_of(starts: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return for each of `count` elements its segment, and whether it is in one.

    Args:
        starts: `[segments + 1]`, int64, ascending: where each segment starts, and where the last one ends.
        count: The number of elements.
    """
    index = torch.arange(count, device=starts.device)
    segment = count_up_to(starts[1:], count)
    return segment, (index >= starts[:1]) & (index < starts[-1:])


def block_count(count: int, segments: int, size: int) -> int:
    """Return how many blocks are enough for `count` elements, however they are spread over the segments."""
    return (count + segments * (size - 1)) // size


def blocks_of(starts: Tensor, count: int, size: int) -> Blocks:
    """Lay segments out in blocks of `size` elements.

    Args:
        starts: As for `segments_of`. Wrong values give a wrong layout, but no index outside the tensors.
        count: The number of elements.
        size: Elements of a block.
    """
    starts = starts.to(torch.int64).clamp(0, count)
    segments = starts.shape[0] - 1
    blocks = block_count(count, segments, size)
    needed = (starts.diff().clamp_min(0) + (size - 1)) // size
    first = F.pad(needed.cumsum(0), (1, 0))
    segment = count_up_to(first[1:], blocks)
    begin = starts[segment] + (torch.arange(blocks, device=starts.device) - first[segment]) * size
    index = begin.unsqueeze(1) + torch.arange(size, device=starts.device)
    end = starts[(segment + 1).clamp_max(segments)].unsqueeze(1)
    source = torch.where(index < end, index, count)
    of, inside = segments_of(starts, count)
    place = first[of] * size + torch.arange(count, device=starts.device) - starts[of]
    place = torch.where(inside, place, blocks * size).clamp(0, blocks * size)
    opens = torch.arange(blocks, device=starts.device) == first[segment]
    last = torch.where(needed > 0, first[1:] - 1, blocks)
    return Blocks(source, segment, first, place, inside, opens, last)


def whole_blocks_of(starts: Tensor, count: int, size: int) -> Blocks:
    """As `blocks_of`, in one piece: written out in a graph, the sizes of all that follows are found anew each time."""
    if seen_through():
        return blocks_of(starts, count, size)
    return Blocks(*_whole_blocks_of(starts, count, size))


@torch.library.custom_op("irframework_native::blocks_of", mutates_args=())
def _whole_blocks_of(
    starts: Tensor, count: int, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    blocks = blocks_of(starts, count, size)
    return blocks.source, blocks.segment, blocks.first, blocks.place, blocks.inside, blocks.opens, blocks.last


@_whole_blocks_of.register_fake
def _shapes_of_blocks(
    starts: Tensor, count: int, size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    segments = starts.shape[0] - 1
    blocks = block_count(count, segments, size)
    numbers = [starts.new_empty(n, dtype=torch.int64) for n in (blocks, segments + 1, count, segments)]
    flags = [starts.new_empty(n, dtype=torch.bool) for n in (count, blocks)]
    source = starts.new_empty((blocks, size), dtype=torch.int64)
    return source, numbers[0], numbers[1], numbers[2], flags[0], flags[1], numbers[3]


def carry_states(blocks: Blocks, decay: Tensor, added: Tensor, initial: Tensor | None) -> tuple[Tensor, Tensor]:
    """Carry states from block to block: behind a block the state is `added + decay * (the state before it)`.

    Nothing (NaN included) passes from one segment to another, see `recurrence`.

    Args:
        blocks: The layout.
        decay: `[blocks, ...]`, broadcast against `added`.
        added: `[blocks, ...]`.
        initial: `[segments, ...]`: the states before the segments; None for zeros.

    Returns:
        The state before each block, `[blocks, ...]`, and behind each segment, `[segments, ...]`.
    """
    shape = (-1, *(1,) * (added.dim() - 1))
    opens, used = blocks.opens.reshape(shape), (blocks.last < added.shape[0]).reshape(shape)
    given = added.new_zeros(()) if initial is None else with_zero_row(initial)[blocks.segment]
    after = added if initial is None else torch.where(opens, added + decay * given, added)
    after = with_zero_row(recurrence(decay, after, blocks.opens))
    before = torch.where(opens, given, after.roll(1, 0)[:-1])
    final = after[blocks.last]
    return before, final if initial is None else torch.where(used, final, initial)


def check_starts(op: str, x: Tensor, query_start_loc: Tensor | None, dims: int) -> None:
    """Raise unless x has the dimensions of a packed or of a padded batch, and `query_start_loc` is a list of offsets.

    Raises:
        ArgumentError: Names the op, and what x must look like.
    """
    if query_start_loc is None:
        if x.dim() != dims + 2:
            raise ArgumentError(
                f"Op {op!r}: without 'query_start_loc', argument 'x' must be [batch, length, ...] with {dims + 2} "
                f"dimensions, it has shape {tuple(x.shape)}."
            )
        return
    if x.dim() != dims + 1:
        raise ArgumentError(
            f"Op {op!r}: with 'query_start_loc', argument 'x' must be [tokens, ...] with {dims + 1} dimensions, it has "
            f"shape {tuple(x.shape)}."
        )
    numbers = query_start_loc.dtype in (torch.int32, torch.int64)
    if not numbers or query_start_loc.dim() != 1 or query_start_loc.shape[0] == 0:
        raise ArgumentError(
            f"Op {op!r}: argument 'query_start_loc' must be a vector [sequences + 1] of int32 or int64, it has dtype "
            f"{query_start_loc.dtype} and shape {tuple(query_start_loc.shape)}."
        )


def check_start_values(op: str, x: Tensor, query_start_loc: Tensor | None, dims: int) -> None:
    """Check the numbers in `query_start_loc`. Waits for the device.

    Raises:
        ArgumentError: As `check_starts`; or the numbers do not ascend from 0 to at most the number of tokens.
    """
    check_starts(op, x, query_start_loc, dims)
    if query_start_loc is not None:
        check_offsets(op, "query_start_loc", query_start_loc, x.shape[0], None)


def starts_of(x: Tensor, query_start_loc: Tensor | None) -> Tensor:
    """Return where each sequence of a batch starts, and where the last one ends, `[sequences + 1]` in int64."""
    if query_start_loc is not None:
        return query_start_loc.to(torch.int64)
    # Added up, not multiplied: Inductor (2.13) fails on indexes that it can follow back to the number of a row.
    lengths = torch.full((x.shape[0],), x.shape[1], dtype=torch.int64, device=x.device)
    return F.pad(lengths, (1, 0)).cumsum(0)


def check_initial(
    op: str, initial_states: Tensor | None, has_initial_state: Tensor | None, shape: tuple[int, ...]
) -> None:
    """Raise unless the optional initial states are one per sequence.

    Raises:
        ArgumentError: Names the op, the argument and the shape it must have.
    """
    if initial_states is None:
        if has_initial_state is not None:
            raise ArgumentError(f"Op {op!r}: argument 'has_initial_state' says nothing without 'initial_states'.")
        return
    if not initial_states.is_floating_point() or not same_sizes(initial_states.shape, shape):
        raise ArgumentError(
            f"Op {op!r}: argument 'initial_states' must be floating point of shape {tuple(shape)}, it has dtype "
            f"{initial_states.dtype} and shape {tuple(initial_states.shape)}."
        )
    if has_initial_state is None:
        return
    if has_initial_state.dtype != torch.bool or not same_sizes(has_initial_state.shape, shape[:1]):
        raise ArgumentError(
            f"Op {op!r}: argument 'has_initial_state' must be bool of shape {tuple(shape[:1])}, it has dtype "
            f"{has_initial_state.dtype} and shape {tuple(has_initial_state.shape)}."
        )


def chosen_initial(initial_states: Tensor | None, has_initial_state: Tensor | None) -> Tensor | None:
    """Return the initial states with zeros where a sequence has none."""
    if initial_states is None or has_initial_state is None:
        return initial_states
    mask = has_initial_state.reshape(-1, *(1,) * (initial_states.dim() - 1))
    return torch.where(mask, initial_states, 0.0)
