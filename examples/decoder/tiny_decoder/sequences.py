"""Which tokens a call of the model gets, and where their keys and values lie.

Owns lengths and block tables, on the host. Does not own the caches and states themselves: the model makes those.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Step(NamedTuple):
    """What a call of the model is told about its tokens, which lie one behind the other, sequence by sequence.

    Attributes:
        positions: Place of each token in its sequence, `[tokens]`.
        slots: Place of each token in the caches, `[tokens]`.
        starts: Where the tokens of each sequence start, and where the last ones end, `[sequences + 1]`, int32.
        lengths: Length of each sequence, these tokens included, `[sequences]`, int32.
        block_table: Blocks of each sequence, `[sequences, blocks]`, int32.
        longest: Most tokens of one sequence.
        first: Whether nothing came before: the states that there are do not count.
    """

    positions: Tensor
    slots: Tensor
    starts: Tensor
    lengths: Tensor
    block_table: Tensor
    longest: int
    first: bool


class Sequences:
    """Sequences that grow together.

    The blocks of a sequence do not lie side by side in the caches, as in a server that has run for a while.

    Args:
        count: How many sequences there are.
        capacity: How long each may grow.
        block_size: Slots of a block.
        device: Where the model is.
    """

    def __init__(self, count: int, capacity: int, block_size: int = 16, device: Any = None) -> None:
        self.count = count
        self.block_size = block_size
        self.capacity = capacity
        blocks = -(-capacity // block_size)
        self.num_blocks = count * blocks
        of_sequence = torch.arange(count, device=device).unsqueeze(1)
        self.block_table = (torch.arange(blocks, device=device) * count + of_sequence).int()
        self.lengths = [0] * count

    def take(self, counts: Sequence[int]) -> Step:
        """Let each sequence grow by some tokens, and describe them.

        Args:
            counts: New tokens of each sequence.

        Raises:
            ValueError: A sequence grows beyond its capacity, or not at all; or there are more or fewer sequences.
        """
        if len(counts) != self.count or min(counts) < 1:
            raise ValueError(f"{self.count} sequences each need at least one new token, got {list(counts)}.")
        before = self.lengths
        lengths = [old + new for old, new in zip(before, counts, strict=True)]
        if max(lengths) > self.capacity:
            raise ValueError(f"A sequence of {max(lengths)} tokens does not fit: there is space for {self.capacity}.")
        self.lengths = lengths
        device, longest = self.block_table.device, max(counts)
        if longest == 1:
            positions = torch.tensor(before, device=device)
            starts = torch.arange(self.count + 1, dtype=torch.int32, device=device)
            blocks = self.block_table.gather(1, (positions // self.block_size).unsqueeze(1)).squeeze(1)
        else:
            positions = torch.cat([torch.arange(*span, device=device) for span in zip(before, lengths, strict=True)])
            starts = torch.tensor([0, *counts], device=device).cumsum(0, dtype=torch.int32)
            sequence = torch.arange(self.count, device=device).repeat_interleave(torch.tensor(counts, device=device))
            blocks = self.block_table[sequence, positions // self.block_size]
        return Step(
            positions=positions,
            slots=blocks * self.block_size + positions % self.block_size,
            starts=starts,
            lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_table=self.block_table,
            longest=longest,
            first=not any(before),
        )
