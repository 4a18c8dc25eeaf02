"""The rotary embedding of decoders that norm each head of queries and keys before they rotate it, as Qwen3 does.

Does not own the table of cosines and sines (`rotary.py`), nor what norms and rotations mean.
"""

from typing import Any

import torch
from torch import Tensor

from irframework.layers.norm import RMSNorm
from irframework.layers.rotary import RotaryEmbedding
from irframework.ops.normed_rotary import qk_norm_rotary_embedding, qk_norm_rotary_embedding_reshape_and_cache


class NormedRotaryEmbedding(RotaryEmbedding):
    """Norm the heads of queries and keys, and rotate them by their positions: the op `qk_norm_rotary_embedding`.

    Args:
        head_size: Elements of a head.
        max_positions: How many positions the table has.
        base: Of the frequencies, `rope_theta`.
        epsilon: Added to the mean squares.
        weight_dtype: Of the weights of both norms.
        device: Of the table and the weights.
        **options: As `RotaryEmbedding`.

    Attributes:
        q_norm: Holds `weight`, `[head_size]`, the same for all heads of queries.
        k_norm: The same for keys.
        cos_sin_cache: `[max_positions, rotary_dim]`, a buffer that is not saved.
        cached_op: What `with_cache` calls.

    Raises:
        LayerSizeError: As `RotaryEmbedding`.
        ConfigError: As `RotaryEmbedding`.
    """

    cached_op = qk_norm_rotary_embedding_reshape_and_cache

    def __init__(
        self,
        head_size: int,
        max_positions: int,
        base: float = 10000.0,
        *,
        epsilon: float = 1e-6,
        weight_dtype: torch.dtype | None = None,
        device: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(head_size, max_positions, base, device=device, **options)
        self.epsilon = epsilon
        self.q_norm = RMSNorm(head_size, epsilon, dtype=weight_dtype, device=device)
        self.k_norm = RMSNorm(head_size, epsilon, dtype=weight_dtype, device=device)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Return the normed and rotated query and key; without a key, the second is None.

        Args:
            positions: `[...]`, int32 or int64.
            query: `[..., heads * head_size]` or `[..., heads, head_size]`.
            key: Like query, or None.
        """
        rotated: tuple[Tensor, Tensor | None]
        if key is None:
            rotated = qk_norm_rotary_embedding(positions, query, None, self.q_norm.weight, None, *self.arguments()[2:])
        else:
            rotated = qk_norm_rotary_embedding(positions, query, key, *self.arguments())
        return rotated

    def arguments(self) -> tuple[Any, ...]:
        """Return what the ops take behind the tensors of a call."""
        return (
            self.q_norm.weight,
            self.k_norm.weight,
            self.cos_sin_cache,
            self.head_size,
            self.epsilon,
            self.is_neox,
        )
