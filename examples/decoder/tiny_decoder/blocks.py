"""The layers of the model: attention with a dense part or with experts behind it, and Mamba's mixers.

Owns how ops and layers are put together, and the state that each keeps. Names of parameters are those of transformers.
Every layer takes `(x, residual, step, state)` and returns the next `(x, residual, state)`: x is still to be added to
the residual stream, which the next norm does. States are given away: kernels may overwrite them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import irframework as ir
from irframework.layers import (
    ColumnParallelLinear,
    FusedMoE,
    Group,
    MambaMixer,
    MambaMixer2,
    ReplicatedLinear,
    RMSNorm,
    RotaryEmbedding,
    RowParallelLinear,
)
from tiny_decoder.sequences import Sequences, Step

State = tuple[Tensor, Tensor]
Carried = tuple[Tensor, Tensor, State]


def normed(norm: RMSNorm, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and norm the sum: one op, where both have one dtype."""
    if residual is None:
        return norm(x), x
    if residual.dtype != x.dtype:
        residual = residual + x
        return norm(residual.to(x.dtype)), residual
    y, residual = norm(x, residual)
    return y, residual


class Attention(nn.Module):
    """Attention over a cache of blocks. Heads are divided over the processes; few heads of keys are held more often."""

    def __init__(self, config: Any, rotary: RotaryEmbedding, group: Group) -> None:
        super().__init__()
        heads, kv_heads, hidden = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
        copies = max(1, group.size // kv_heads)
        bias = getattr(config, "attention_bias", False)
        self.rotary = rotary
        self.head_size = rotary.head_size
        self.window = getattr(config, "sliding_window", None)
        self.qkv_proj = ColumnParallelLinear(
            hidden,
            [heads * self.head_size, kv_heads * self.head_size, kv_heads * self.head_size],
            bias,
            group=group,
            copies=(1, copies, copies),
            merged_from=("q_proj", "k_proj", "v_proj"),
        )
        self.o_proj = RowParallelLinear(heads * self.head_size, hidden, bias, group=group)

    def new_state(self, sequences: Sequences, like: Tensor) -> State:
        """An empty cache of keys, and one of values."""
        heads = self.qkv_proj.output_sizes[1] // self.head_size
        shape = sequences.num_blocks, sequences.block_size, heads, self.head_size
        return like.new_zeros(shape), like.new_zeros(shape)

    def forward(self, x: Tensor, step: Step, state: State) -> tuple[Tensor, State]:
        query, key, value = self.qkv_proj.split(self.qkv_proj(x))
        query, key = self.rotary(step.positions, query, key)
        keys, values = ir.ops.reshape_and_cache.maybe_inplace(key, value, *state, step.slots)
        query, key, value = (rows.unflatten(-1, (-1, self.head_size)) for rows in (query, key, value))
        options = {"window": self.window}
        if step.first:  # all that is seen is at hand
            y = ir.ops.attention(query, key, value, step.starts, step.longest, **options)
        else:
            options |= {"seq_lens": step.lengths, "block_table": step.block_table}
            options |= {"key_cache": keys, "value_cache": values}
            y = ir.ops.attention(query, None, None, step.starts, step.longest, **options)
        return self.o_proj(y.flatten(-2)), (keys, values)


class DenseMLP(nn.Module):
    """The gated part of a dense layer.

    Two products: on CPUs one that gives twice the columns costs more per column over the rows of a prompt. On a GPU,
    where a launch less is worth more, one weight is better: `merged_from` as above, and `SiluAndMul` behind it.
    """

    def __init__(self, config: Any, group: Group) -> None:
        super().__init__()
        hidden, width, bias = config.hidden_size, config.intermediate_size, getattr(config, "mlp_bias", False)
        self.gate_proj = ColumnParallelLinear(hidden, width, bias, group=group)
        self.up_proj = ColumnParallelLinear(hidden, width, bias, group=group)
        self.down_proj = RowParallelLinear(width, hidden, bias, group=group)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(ir.ops.silu_mul(self.gate_proj(x), self.up_proj(x)))


class Experts(nn.Module):
    """A router and its experts, of each of which every process holds a part."""

    def __init__(self, config: Any, group: Group) -> None:
        super().__init__()
        count, top_k = config.num_local_experts, config.num_experts_per_tok
        self.gate = ReplicatedLinear(config.hidden_size, count)
        self.experts = FusedMoE(count, config.hidden_size, config.intermediate_size, top_k, group=group)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, self.gate(x))


class AttentionLayer(nn.Module):
    """Norm, attention, norm, and the dense part or the experts."""

    def __init__(self, config: Any, rotary: RotaryEmbedding, mlp: Callable[..., nn.Module], group: Group) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, donate=True)
        self.self_attn = Attention(config, rotary, group)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps, donate=True)
        self.mlp = mlp(config, group)

    def new_state(self, sequences: Sequences, like: Tensor) -> State:
        return self.self_attn.new_state(sequences, like)

    def forward(self, x: Tensor, residual: Tensor | None, step: Step, state: State) -> Carried:
        x, residual = normed(self.input_layernorm, x, residual)
        x, state = self.self_attn(x, step, state)
        x, residual = normed(self.post_attention_layernorm, x, residual)
        return self.mlp(x), residual, state


class MambaLayer(nn.Module):
    """Norm, and a mixer of Mamba or Mamba-2 with the states of its convolution and of its scan."""

    def __init__(self, config: Any, mixer: Callable[..., nn.Module], group: Group) -> None:
        super().__init__()
        self.residual_in_fp32 = config.residual_in_fp32
        self.norm = RMSNorm(config.hidden_size, config.layer_norm_epsilon, donate=True)
        self.mixer = mixer(config, group)

    def new_state(self, sequences: Sequences, like: Tensor) -> State:
        convolution, scan = self.mixer.state_shapes(sequences.count)
        return like.new_zeros(convolution), like.new_zeros(scan, dtype=torch.float32)

    def forward(self, x: Tensor, residual: Tensor | None, step: Step, state: State) -> Carried:
        x, residual = normed(self.norm, x, residual)
        if self.residual_in_fp32:
            residual = residual.float()
        if step.first:
            x, *state = self.mixer(x, step.starts)
        elif step.longest == 1:
            x, *state = self.mixer.step(x, *state)
        else:
            x, *state = self.mixer(x, step.starts, *state)
        return x, residual, tuple(state)


def mamba(config: Any, group: Group) -> MambaMixer:
    """The mixer that a `MambaConfig` describes."""
    return MambaMixer(
        config.hidden_size,
        config.intermediate_size,
        config.state_size,
        config.conv_kernel,
        config.time_step_rank,
        conv_bias=config.use_conv_bias,
        bias=config.use_bias,
        group=group,
    )


def mamba2(config: Any, group: Group) -> MambaMixer2:
    """The mixer that a `Mamba2Config` describes."""
    return MambaMixer2(
        config.hidden_size,
        config.num_heads,
        config.head_dim,
        config.state_size,
        config.conv_kernel,
        config.n_groups,
        chunk_size=config.chunk_size,
        epsilon=config.layer_norm_epsilon,
        time_step_limit=tuple(config.time_step_limit),
        conv_bias=config.use_conv_bias,
        bias=config.use_bias,
        group=group,
    )
