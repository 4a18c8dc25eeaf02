"""The two ends of a language model, divided over a process group by words: the embedding and the head.

Does not own their meanings (`ops/projection.py`).
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from irframework.errors import LayerSizeError
from irframework.layers.parallel_layer import Group, ParallelLayer
from irframework.ops.projection import logits, vocab_parallel_embedding


class _Vocabulary(ParallelLayer):
    """The rows of a vocabulary that this process holds; the last ones of all may be padding, which is zeros."""

    def __init__(
        self, vocab_size: int, hidden_size: int, multiple_of: int, dtype: torch.dtype | None, device: Any, group: Any
    ) -> None:
        super().__init__(group)
        if vocab_size < 1 or multiple_of < 1:
            raise LayerSizeError(f"vocab_size={vocab_size} and multiple_of={multiple_of} must be at least 1.")
        self.vocab_size = vocab_size
        unit = math.lcm(multiple_of, self.group.size)
        self.rows = -(-vocab_size // unit) * unit // self.group.size
        self.start = min(self.group.rank * self.rows, vocab_size)
        self.end = min(self.start + self.rows, vocab_size)
        self.weight = nn.Parameter(torch.zeros((self.rows, hidden_size), dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the rows of words with random numbers."""
        with torch.no_grad():
            self.weight[: self.end - self.start].normal_(std=0.02)
            self.weight[self.end - self.start :].zero_()

    def local_part(self, name: str, full: Tensor) -> Tensor:
        """Return this process's rows of a full weight or bias, which may have rows of padding or not."""
        if full.shape[0] < self.vocab_size:
            return full  # refused for its shape
        words = full[: self.vocab_size]
        padded = F.pad(words, (0, 0) * (full.dim() - 1) + (0, self.rows * self.group.size - words.shape[0]))
        return self.group.part_of(padded, 0)


class VocabParallelEmbedding(_Vocabulary):
    """Look up the rows of ids; each process holds some words: the op `vocab_parallel_embedding`.

    Args:
        vocab_size: How many words there are.
        hidden_size: Length of a row.
        group: The processes; None for an embedding that is not divided.
        multiple_of: Pad the vocabulary to a multiple of this number (and of the group's size).
        reduce: Add up over the processes, so that each has all rows.
        dtype: Of the weight.
        device: Of the weight.

    Attributes:
        weight: `[rows of this process, hidden_size]`.
        start: First id that this process holds.
        end: First id behind those.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        group: Any = None,
        multiple_of: int = 1,
        reduce: bool = True,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(vocab_size, hidden_size, multiple_of, dtype, device, Group.of(group))
        self.reduce = reduce

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ids, `[..., hidden_size]`."""
        rows: Tensor = vocab_parallel_embedding(ids, self.weight, self.start, self.end, self.vocab_size)
        return self.group.all_reduce(rows) if self.reduce else rows


class ParallelLMHead(_Vocabulary):
    """Score the words of a vocabulary; each process holds some of them: the op `logits`.

    Args:
        vocab_size: How many words there are.
        hidden_size: Length of the hidden states.
        bias: Whether a bias is added.
        scale: Factor of the scores, after the cap.
        soft_cap: Bound of the scores before scaling, or None.
        group: The processes; None for a head that is not divided.
        gather: Give every process the scores of all words; else each has those of its own, padding included.
        multiple_of: Pad the vocabulary to a multiple of this number (and of the group's size).
        dtype: Of the parameters.
        device: Of the parameters.

    Attributes:
        weight: `[rows of this process, hidden_size]`.
        bias: `[rows of this process]`, or None.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        bias: bool = False,
        *,
        scale: float = 1.0,
        soft_cap: float | None = None,
        group: Any = None,
        gather: bool = True,
        multiple_of: int = 1,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(vocab_size, hidden_size, multiple_of, dtype, device, Group.of(group))
        self.bias = nn.Parameter(torch.zeros(self.rows, dtype=dtype, device=device)) if bias else None
        self.scale = scale
        self.soft_cap = soft_cap
        self.gather = gather

    def tie_to(self, embedding: VocabParallelEmbedding) -> None:
        """Use the weight of an embedding.

        Raises:
            LayerSizeError: Its weight is divided in another way, or has another shape.
        """
        ours, theirs = ((v.vocab_size, v.group, tuple(v.weight.shape)) for v in (self, embedding))
        if ours != theirs:
            raise LayerSizeError(f"The head (words, group, weight: {ours}) cannot be tied to the embedding ({theirs}).")
        self.weight = embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        """Return scores, `[..., vocab_size]`; without `gather` those of this process's rows."""
        whole = self.gather and self.group.size == 1
        scores: Tensor = logits(
            x, self.weight, self.bias, self.scale, self.soft_cap, self.vocab_size if whole else None
        )
        if whole or not self.gather:
            return scores
        return self.group.all_gather(scores, -1)[..., : self.vocab_size]
