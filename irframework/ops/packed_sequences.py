"""Sequences of different lengths that lie one behind the other, and caches that hold them in blocks.

Owns how attention ops read `cu_seqlens` and block tables: rows spread to a padded batch and collected again, the mask
of visible keys, the checks of shapes and of values, and how generated calls are cut. Does not compute attention: see
`softmax_attention.py` and `latent_attention.py`.

Nothing here depends on the numbers in a tensor: sizes come from shapes and from the bounds that the caller states.
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from irframework.errors import ArgumentError
from irframework.symbolic import is_contiguous, same_sizes


def spread(packed: Tensor, starts: Tensor, lengths: Tensor, bound: int) -> Tensor:
    """Give each sequence `bound` rows of its own: `[batch, bound, ...]`; rows behind a sequence's end are zeros.

    Args:
        packed: `[tokens, ...]`.
        starts: First row of each sequence, `[batch]`.
        lengths: Rows of each sequence, `[batch]`.
        bound: Length of the longest sequence, at least. Rows of a sequence behind it are left out.
    """
    count = packed.shape[0]
    steps = torch.arange(bound, device=packed.device)
    rows = starts.unsqueeze(1) + steps
    rows = torch.where(steps < lengths.unsqueeze(1), rows, count).clamp(0, count)  # the row behind the last is zeros
    padded = torch.cat((packed, packed.new_zeros(1, *packed.shape[1:])))  # F.pad would fix a symbolic number of rows
    return padded.index_select(0, rows.reshape(-1)).view(rows.shape[0], bound, *packed.shape[1:])


def collect(padded: Tensor, cu_seqlens: Tensor, tokens: int) -> Tensor:
    """Undo `spread`: `[batch, bound, ...]` to `[tokens, ...]`; tokens that belong to no sequence become zeros."""
    batch, bound = padded.shape[:2]
    rows = torch.arange(tokens, device=padded.device, dtype=cu_seqlens.dtype)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), rows, right=True)
    step = rows - cu_seqlens.index_select(0, sequence)
    inside = (sequence < batch) & (step >= 0) & (step < bound)
    rows = torch.where(inside, sequence * bound + step, batch * bound)
    flat = torch.cat((padded.reshape(batch * bound, *padded.shape[2:]), padded.new_zeros(1, *padded.shape[2:])))
    return flat.index_select(0, rows)


def from_blocks(cache: Tensor, block_table: Tensor, lengths: Tensor, bound: int) -> Tensor:
    """Read sequences from a cache of blocks: `[batch, bound rounded up to whole blocks, ...]`.

    Behind a sequence's end its first row is repeated: what lies in a slot that no token was written to, or in a block
    of another sequence, may be NaN, and no mask takes that out of a sum.

    Args:
        cache: `[num_blocks, block_size, ...]`.
        block_table: Blocks of each sequence in order, `[batch, max_blocks]`. Blocks that the cache does not have are
            read as others: a table may hold anything behind a sequence's end.
        lengths: Rows of each sequence, `[batch]`.
        bound: Length of the longest sequence, at least.
    """
    size = cache.shape[1]
    table = block_table[:, : (bound + size - 1) // size].long().clamp(0, cache.shape[0] - 1)
    steps = torch.arange(size, device=cache.device)
    rows = (table.unsqueeze(2) * size + steps).flatten(1)
    rows = torch.where(torch.arange(rows.shape[1], device=cache.device) < lengths.unsqueeze(1), rows, rows[:, :1])
    if is_contiguous(cache):
        return cache.flatten(0, 1).index_select(0, rows.reshape(-1)).view(*rows.shape, *cache.shape[2:])
    return cache[rows // size, rows % size]  # slower; to flatten would copy the whole cache


def visible_keys(
    query_lengths: Tensor,
    key_lengths: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool,
    window: int | None = None,
) -> Tensor:
    """Which keys each query sees, `[batch, max_seqlen_q, max_seqlen_k]`, bool.

    The last query of a sequence stands at the place of its last key. With `causal`, a query sees no key behind its own
    place; with a window, no key that is `window` places or more away.
    """
    device = query_lengths.device
    keys = torch.arange(max_seqlen_k, device=device)
    steps = torch.arange(max_seqlen_q, device=device)
    visible = (keys < key_lengths[:, None, None]) & (steps < query_lengths.unsqueeze(1)).unsqueeze(2)
    behind = (steps + (key_lengths - query_lengths).unsqueeze(1)).unsqueeze(2) - keys
    if causal:
        visible = visible & (behind >= 0)
    if window is not None:
        visible = visible & (behind < window)
        if not causal:
            visible = visible & (behind > -window)
    return visible


# --- checks ----------------------------------------------------------------------------------------------------------


def check_integers(op: str, name: str, tensor: Tensor, dims: int) -> None:
    """Raise unless a tensor is int32 and has a number of dimensions.

    Raises:
        ArgumentError: Names the op, the argument, and what it has.
    """
    if tensor.dtype != torch.int32 or tensor.dim() != dims:
        raise ArgumentError(
            f"Op {op!r}: argument {name!r} must be an int32 tensor of {dims} dimension{'s' * (dims > 1)}, it has shape "
            f"{tuple(tensor.shape)} and dtype {tensor.dtype}."
        )


def check_offsets(op: str, name: str, cu_seqlens: Tensor, tokens: int, bound: tuple[str, int] | None) -> None:
    """Check the numbers of a cu_seqlens. Waits for the device.

    Args:
        op: Name of the op.
        name: Name of the argument.
        cu_seqlens: Where sequences start, and where the last ends.
        tokens: How many tokens there are.
        bound: Name and value of the argument that says how long the longest sequence is.

    Raises:
        ArgumentError: The first is not 0, one is less than the one before, the last is more than there are tokens, or
            a sequence is longer than the bound.
    """
    numbers = cu_seqlens.tolist()
    if numbers[0] != 0:
        raise ArgumentError(f"Op {op!r}: argument {name!r} must start with 0, it starts with {numbers[0]}.")
    lengths = [end - start for start, end in pairwise(numbers)]
    for place, length in enumerate(lengths):
        if length < 0:
            raise ArgumentError(
                f"Op {op!r}: argument {name!r} must ascend; {numbers[place]} is followed by {numbers[place + 1]} at "
                f"place {place + 1}."
            )
    if numbers[-1] > tokens:
        raise ArgumentError(
            f"Op {op!r}: argument {name!r} ends with {numbers[-1]}, but there are {tokens} tokens of queries."
        )
    if bound is not None and max(lengths, default=0) > bound[1]:
        place = lengths.index(max(lengths))
        raise ArgumentError(
            f"Op {op!r}: argument {name!r} gives sequence {place} a length of {lengths[place]}, longer than "
            f"{bound[0]}={bound[1]}."
        )


@dataclass(frozen=True, slots=True)
class Sequences:
    """What a call says of its sequences: how many queries and keys each has, and where the keys lie.

    Attributes:
        op: Name of the op.
        cu_seqlens_q: Where the queries of each sequence start, and where the last end.
        max_seqlen_q: Queries of the longest sequence, or more.
        seq_lens: Keys of each sequence; None: as many as queries.
        max_seqlen_k: Keys of the longest sequence, or more.
        block_table: Blocks of each sequence, where keys lie in a cache.
    """

    op: str
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    seq_lens: Tensor | None
    max_seqlen_k: int | None
    block_table: Tensor | None

    def padded(
        self, query: Tensor, keys: tuple[Tensor, ...], causal: bool, window: int | None = None
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Give each sequence rows of its own.

        Args:
            query: `[tokens, ...]`.
            keys: Each `[key_tokens, ...]`, or `[num_blocks, block_size, ...]` with a block table.
            causal: See `visible_keys`.
            window: See `visible_keys`.

        Returns:
            The queries, `[batch, max_seqlen_q, ...]`, what keys have, `[batch, bound, ...]`, and which keys each query
            sees; None where query i sees keys 0 to i.
        """
        starts, lengths = self.cu_seqlens_q[:-1], self.cu_seqlens_q.diff()
        longest = self.max_seqlen_q
        q = spread(query, starts, lengths, longest)
        if self.seq_lens is None:
            own = [spread(tensor, starts, lengths, longest) for tensor in keys]
            if causal and window is None:  # padding lies behind every key that a query sees
                return q, own, None
            return q, own, visible_keys(lengths, lengths, longest, longest, causal, window)
        if self.block_table is not None:
            held = self.block_table.shape[1] * keys[0].shape[1]
            bound = held if self.max_seqlen_k is None else self.max_seqlen_k
            read = [from_blocks(tensor, self.block_table, self.seq_lens, bound) for tensor in keys]
        else:
            bound = keys[0].shape[0] if self.max_seqlen_k is None else self.max_seqlen_k
            key_starts = self.seq_lens.cumsum(0, dtype=torch.int32) - self.seq_lens
            read = [spread(tensor, key_starts, self.seq_lens, bound) for tensor in keys]
        return q, read, visible_keys(lengths, self.seq_lens, longest, read[0].shape[1], causal, window)

    def check(self, query: Tensor, keys: Tensor, paged: bool, what: str = "keys") -> None:
        """Check shapes and dtypes.

        Args:
            query: `[tokens, ...]`.
            keys: All keys, `[tokens, ...]`, or a cache, `[num_blocks, block_size, ...]`.
            paged: Whether keys lie in a cache.
            what: What messages call the keys.

        Raises:
            ArgumentError: A dtype or a rank is wrong, numbers of sequences or of tokens differ, or a bound is negative.
        """
        op, seq_lens, table = self.op, self.seq_lens, self.block_table
        check_integers(op, "cu_seqlens_q", self.cu_seqlens_q, 1)
        if self.cu_seqlens_q.shape[0] == 0:
            raise ArgumentError(
                f"Op {op!r}: argument 'cu_seqlens_q' is empty; it has one number more than there are sequences, the "
                "first is 0."
            )
        for name, bound in (("max_seqlen_q", self.max_seqlen_q), ("max_seqlen_k", self.max_seqlen_k)):
            if bound is not None and bound < 0:
                raise ArgumentError(f"Op {op!r}: {name}={bound} must not be negative.")
        if paged != (table is not None):
            given, lacking = ("cache", "block_table") if paged else ("block_table", "cache")
            raise ArgumentError(f"Op {op!r}: a {given} is given and no {lacking}; both belong together.")
        if seq_lens is not None:
            check_integers(op, "seq_lens", seq_lens, 1)
            self._check_count("seq_lens", seq_lens, "numbers")
        elif paged:
            raise ArgumentError(f"Op {op!r}: a cache needs seq_lens, the number of keys of each sequence.")
        elif self.max_seqlen_k is not None:
            raise ArgumentError(
                f"Op {op!r}: max_seqlen_k={self.max_seqlen_k} is given without seq_lens, which it bounds."
            )
        elif not same_sizes(keys.shape[:1], query.shape[:1]):
            raise ArgumentError(
                f"Op {op!r}: there are {query.shape[0]} queries and {keys.shape[0]} {what}; without seq_lens both are "
                "equal."
            )
        if table is not None:
            check_integers(op, "block_table", table, 2)
            self._check_count("block_table", table, "rows")

    def _check_count(self, name: str, tensor: Tensor, what: str) -> None:
        batch = self.cu_seqlens_q.shape[0] - 1
        if not same_sizes(tensor.shape[:1], (batch,)):
            raise ArgumentError(
                f"Op {self.op!r}: argument {name!r} has {tensor.shape[0]} {what}; cu_seqlens_q describes {batch} "
                "sequences."
            )

    def check_values(self, query: Tensor, keys: Tensor) -> None:
        """Check the numbers in tensors whose shapes are right. Waits for the device.

        Args:
            query: `[tokens, ...]`.
            keys: All keys, `[tokens, ...]`; with a block table the cache, `[num_blocks, block_size, ...]`.

        Raises:
            ArgumentError: See `check_offsets`; a length is negative, or more than max_seqlen_k, the keys that there
                are, or the blocks hold; or a sequence has a block that the cache does not have.
        """
        check_offsets(self.op, "cu_seqlens_q", self.cu_seqlens_q, query.shape[0], ("max_seqlen_q", self.max_seqlen_q))
        if self.seq_lens is None:
            return
        lengths = self.seq_lens.tolist()
        for sequence, length in enumerate(lengths):
            wrong = f"Op {self.op!r}: argument 'seq_lens' gives sequence {sequence} a length of {length}"
            if length < 0:
                raise ArgumentError(f"{wrong}.")
            if self.max_seqlen_k is not None and length > self.max_seqlen_k:
                raise ArgumentError(f"{wrong}, longer than max_seqlen_k={self.max_seqlen_k}.")
            if self.block_table is not None and length > self.block_table.shape[1] * keys.shape[1]:
                blocks, size = self.block_table.shape[1], keys.shape[1]
                raise ArgumentError(
                    f"{wrong}, which runs past its row of the block table: {blocks} blocks of {size} hold "
                    f"{blocks * size} keys."
                )
        if self.block_table is not None:
            self._check_blocks(lengths, self.block_table.tolist(), *keys.shape[:2])
        elif sum(lengths) > keys.shape[0]:
            raise ArgumentError(
                f"Op {self.op!r}: argument 'seq_lens' adds up to {sum(lengths)} keys, but there are {keys.shape[0]}."
            )

    def _check_blocks(self, lengths: list[int], table: list[list[int]], count: int, size: int) -> None:
        for sequence, (row, length) in enumerate(zip(table, lengths, strict=True)):
            for block in row[: -(-length // size) if length else 0]:
                if not 0 <= block < count:
                    raise ArgumentError(
                        f"Op {self.op!r}: argument 'block_table' gives sequence {sequence} block {block}; the cache "
                        f"has blocks 0 to {count - 1}."
                    )


# --- generated calls --------------------------------------------------------------------------------------------------


def heads_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Tokens, heads and head size of generated queries: those of a shape of three dimensions, else rows are cut."""
    if len(shape) == 3:
        return shape
    tokens, width = math.prod(shape[:-1]), shape[-1]
    size = next((size for size in (128, 64, 16) if width % size == 0 and width >= 4 * size), width)
    return tokens, width // size if size else 1, size


def cut(tokens: int, device: str) -> tuple[Tensor, int]:
    """Cut tokens into up to three sequences: their cu_seqlens, and the length of the longest."""
    ends = sorted({0, tokens // 6, tokens // 2, tokens})
    longest = max((end - start for start, end in pairwise(ends)), default=0)
    return torch.tensor(ends, dtype=torch.int32).to(device), longest  # a fake of a Python device takes no list


def blocks_of(lengths: Tensor, block_size: int) -> tuple[int, Tensor]:
    """How many blocks a cache needs, and a block table in which blocks lie in no order; -1 behind a sequence's end."""
    used = [-(-length // block_size) for length in lengths.tolist()]
    order = torch.randperm(sum(used) + 1)[: sum(used)].tolist()
    table = torch.full((len(used), max(used, default=0) + 1), -1, dtype=torch.int32)
    for sequence, count in enumerate(used):
        table[sequence, :count] = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int32)
    return sum(used) + 1, table.to(lengths.device)
