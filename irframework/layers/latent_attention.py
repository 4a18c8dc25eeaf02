"""DeepSeek's latent attention with its projections, divided over a process group by heads.

Does not own what attention means (`ops/latent_attention.py`).
"""

from typing import Any

import torch
from torch import Tensor

from irframework.layers.norm import RMSNorm
from irframework.layers.parallel_layer import ParallelLayer
from irframework.layers.parallel_linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from irframework.layers.rotary import RotaryEmbedding
from irframework.ops.kv_cache import reshape_and_cache
from irframework.ops.latent_attention import mla_attention


class MLA(ParallelLayer):
    """Attention whose keys and values are made from one latent row per token: the op `mla_attention`.

    Every process holds the projection to the latent rows as a whole, and some heads.

    Args:
        hidden_size: Length of the rows that come in and go out.
        num_heads: Heads of all processes together.
        kv_lora_rank: Latent elements of a token.
        qk_nope_head_dim: Elements of a head of queries without a position.
        qk_rope_head_dim: Elements that are rotated.
        v_head_dim: Elements of a head of values.
        rotary: The rotary embedding of `qk_rope_head_dim` elements; DeepSeek's has `is_neox=False`.
        q_lora_rank: Rank of the queries; None: they are projected at once.
        scale: Of the scores; default: `1 / sqrt(qk_nope_head_dim + qk_rope_head_dim)`.
        epsilon: Of the norms.
        bias: Whether the projections to latent rows and of the output have biases.
        group: The processes; None for a layer that is not divided.
        dtype: Of the parameters.
        device: Of the parameters.

    Raises:
        LayerSizeError: The heads cannot be divided evenly.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        rotary: RotaryEmbedding,
        q_lora_rank: int | None = None,
        scale: float | None = None,
        epsilon: float = 1e-6,
        bias: bool = False,
        group: Any = None,
        dtype: torch.dtype | None = None,
        device: Any = None,
    ) -> None:
        super().__init__(group)
        self.heads = self.group.share_of(num_heads, "heads")
        self.rank = kv_lora_rank
        self.nope, self.rope, self.value_size = qk_nope_head_dim, qk_rope_head_dim, v_head_dim
        self.scale = float((self.nope + self.rope) ** -0.5) if scale is None else scale
        made: dict[str, Any] = {"dtype": dtype, "device": device}
        queries = num_heads * (self.nope + self.rope)
        self.q_lora_rank = q_lora_rank
        if q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(hidden_size, queries, group=self.group, **made)
        else:
            self.q_a_proj = ReplicatedLinear(hidden_size, q_lora_rank, bias, **made)
            self.q_a_layernorm = RMSNorm(q_lora_rank, epsilon, **made)
            self.q_b_proj = ColumnParallelLinear(q_lora_rank, queries, group=self.group, **made)
        self.kv_a_proj_with_mqa = ReplicatedLinear(hidden_size, kv_lora_rank + self.rope, bias, **made)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, epsilon, **made)
        self.kv_b_proj = ColumnParallelLinear(
            kv_lora_rank, num_heads * (self.nope + v_head_dim), group=self.group, **made
        )
        self.o_proj = RowParallelLinear(num_heads * v_head_dim, hidden_size, bias, group=self.group, **made)
        self.rotary = rotary

    def _queries(self, x: Tensor) -> Tensor:
        projected: Tensor
        if self.q_lora_rank is None:
            projected = self.q_proj(x)
        else:
            projected = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        return projected.view(*x.shape[:-1], self.heads, self.nope + self.rope)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        latent_cache: Tensor | None = None,
        slot_mapping: Tensor | None = None,
        seq_lens: Tensor | None = None,
        max_seqlen_k: int | None = None,
        block_table: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend, after writing the latent rows of these tokens to a cache if there is one.

        Args:
            x: `[tokens, hidden_size]`, sequences one behind the other.
            positions: `[tokens]`.
            cu_seqlens_q: Where sequences start, and where the last one ends, `[batch + 1]`, int32.
            max_seqlen_q: Tokens of the longest sequence, or more.
            latent_cache: `[num_blocks, block_size, kv_lora_rank + qk_rope_head_dim]`, or None. It is given away: use
                the one that comes back.
            slot_mapping: With a cache, where each token's row goes, `[tokens]`.
            seq_lens: With a cache, how many keys each sequence then has, `[batch]`, int32.
            max_seqlen_k: With a cache, keys of the longest sequence, or more.
            block_table: With a cache, the blocks of each sequence, `[batch, max_blocks]`, int32.

        Returns:
            `(y, latent)`: `[tokens, hidden_size]`; and the cache, or without one the latent rows of these tokens.
        """
        nope, rope = self._queries(x).split([self.nope, self.rope], -1)
        c, key_rope = self.kv_a_proj_with_mqa(x).split([self.rank, self.rope], -1)
        rope, turned = self.rotary(positions, rope.contiguous(), key_rope.unsqueeze(-2).contiguous())
        latent = torch.cat((self.kv_a_layernorm(c.contiguous()), turned.squeeze(-2)), -1)
        if latent_cache is not None and slot_mapping is not None:
            latent_cache = _written(latent, latent_cache, slot_mapping)
        up = self.kv_b_proj.weight.view(self.heads, self.nope + self.value_size, self.rank)
        y: Tensor = mla_attention(
            nope,
            rope,
            latent if latent_cache is None else None,
            cu_seqlens_q,
            max_seqlen_q,
            self.scale,
            up[:, : self.nope],
            up[:, self.nope :].transpose(1, 2),
            seq_lens,
            max_seqlen_k,
            latent_cache,
            block_table,
        )
        return self.o_proj(y.flatten(-2)), latent if latent_cache is None else latent_cache


def _written(latent: Tensor, cache: Tensor, slot_mapping: Tensor) -> Tensor:
    """The cache with these rows, overwritten where the op's implementation can.

    The op writes keys and values to a cache each. A latent row is both, so rows are the keys, and the values are the
    least that every implementation takes: an element for each token, to a cache that is not filled and thrown away. It
    costs memory for one element of each slot while the op runs, a part in `rank + rope` of the latent cache.
    """
    blocks, block_size, size = cache.shape
    rows = latent.unsqueeze(1)
    written, _ = reshape_and_cache.maybe_inplace(
        rows,
        rows[..., :1],
        cache.view(blocks, block_size, 1, size),
        cache.new_empty((blocks, block_size, 1, 1)),
        slot_mapping,
    )
    return torch.squeeze(written, 2)
