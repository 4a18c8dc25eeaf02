"""What layers are compared with: torch's and transformers' modules of their kind, with their weights.

Owns the references: of each layer of `layer_cases.py` the full weights, the arguments and the result. Only the first
process imports it.
"""

from functools import cache

import torch
from layer_cases import HEAD, HEADS, HIDDEN, INTER, KV_HEADS, VOCAB
from torch import nn


def _called(module, *args, then=lambda out: out):
    """Weights, arguments and result of a reference."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point() and tensor.dim() == 1:
                tensor.add_(torch.rand_like(tensor) - 0.5)  # norms of ones and biases of zeros would hide mistakes
        return module.state_dict(), args, then(module(*args))


@torch.no_grad()
def _filled(module):
    """Random numbers in parameters that a module leaves as memory was."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.dim() != 1 or "bias" in name:
            tensor.copy_(torch.randn_like(tensor) * (0.3 if tensor.dim() == 1 else tensor.shape[-1] ** -0.5))
    return module


def _x(*shape):
    return torch.randn(*shape, HIDDEN)


def _norm():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    return _called(LlamaRMSNorm(HIDDEN, 1e-5), _x(2, 3))


def _norm_of_a_sum():
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    weights, (x,), _ = _called(LlamaRMSNorm(HIDDEN, 1e-5), _x(5))
    module, residual = LlamaRMSNorm(HIDDEN, 1e-5), _x(5)
    module.load_state_dict(weights)
    return weights, (x, residual), (module(x + residual).detach(), x + residual)


def _gemma():
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

    return _called(GemmaRMSNorm(HIDDEN, 1e-6), _x(2, 3))


def _perceptron():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    return _called(LlamaMLP(LlamaConfig(hidden_size=HIDDEN, num_attention_heads=2, intermediate_size=INTER)), _x(5))


def _gelu_perceptron():
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP

    config = LlamaConfig(
        hidden_size=HIDDEN,
        num_attention_heads=2,
        intermediate_size=INTER,
        hidden_act="gelu_pytorch_tanh",
        mlp_bias=True,
    )
    return _called(LlamaMLP(config), _x(5))


def _rope_config(**rope):
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=HEADS * HEAD,
        num_attention_heads=HEADS,
        head_dim=HEAD,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0} | rope,
    )


def _rotated(config, positions, query, key):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    cos, sin = LlamaRotaryEmbedding(config)(query, positions.unsqueeze(0))
    apart = [x.unflatten(-1, (-1, HEAD)).transpose(0, 1).unsqueeze(0) for x in (query, key)]
    return tuple(x.squeeze(0).transpose(0, 1).flatten(1) for x in apply_rotary_pos_emb(*apart, cos, sin))


def _rotary():
    args = torch.tensor([0, 3, 63]), torch.randn(3, HEADS * HEAD), torch.randn(3, KV_HEADS * HEAD)
    return {}, args, _rotated(_rope_config(), *args)


class _Merged(nn.Module):
    def __init__(self, kv_heads, bias):
        super().__init__()
        self.q_proj = nn.Linear(HIDDEN, HEADS * HEAD, bias)
        self.k_proj = nn.Linear(HIDDEN, kv_heads * HEAD, bias)
        self.v_proj = nn.Linear(HIDDEN, kv_heads * HEAD, bias)

    def forward(self, x):
        return torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), -1)


class _WithOutput(_Merged):
    def __init__(self):
        super().__init__(1, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)

    def forward(self, x):
        heads = self.q_proj(x).unflatten(-1, (HEADS, HEAD)) * self.k_proj(x).unsqueeze(-2)
        return self.o_proj((heads + self.v_proj(x).unsqueeze(-2)).flatten(-2))


def _routed():
    """Mixtral's block with a router and experts of random weights."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=HIDDEN, intermediate_size=INTER, num_local_experts=8, num_experts_per_tok=2, num_attention_heads=2
    )
    return _called(_filled(MixtralSparseMoeBlock(config)), _x(2, 3))


def _routed_in_groups():
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    class WithoutShared(DeepseekV3MoE):
        def forward(self, x):
            _, weights, ids = self.gate(x)
            return self.experts(x.flatten(0, -2), ids, weights).view(x.shape)

    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTER,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=2.5,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    weights, *rest = _called(_filled(WithoutShared(config)), _x(7))
    return {name: weight for name, weight in weights.items() if "shared" not in name}, *rest


def _with_biases():
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = GptOssConfig(
        hidden_size=HIDDEN,
        intermediate_size=INTER,
        num_local_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    weights, args, result = _called(_filled(GptOssMLP(config)), _x(1, 5), then=lambda out: out[0])
    named = {name.removeprefix("experts."): weight for name, weight in weights.items()}
    for name in ("gate_up_proj", "down_proj"):
        named[name] = named[name].transpose(1, 2)  # kept the other way round there
    return named, args, result


def _mamba():
    from transformers import MambaConfig
    from transformers.models.mamba.modeling_mamba import MambaMixer

    config = MambaConfig(
        hidden_size=HIDDEN, state_size=4, conv_kernel=4, time_step_rank=3, use_bias=True, num_hidden_layers=1
    )
    return _called(_filled(MambaMixer(config, 0)), _x(2, 21))


def _mamba2(groups, **changes):
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=HIDDEN,
        num_heads=4,
        head_dim=8,
        state_size=6,
        conv_kernel=4,
        n_groups=groups,
        chunk_size=8,
        num_hidden_layers=1,
        **changes,
    )
    return _called(_filled(Mamba2Mixer(config, 0)), _x(2, 21))


def _short_convolution():
    from transformers import Lfm2Config
    from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv

    config = Lfm2Config(
        hidden_size=HIDDEN,
        conv_L_cache=3,
        conv_bias=True,
        num_hidden_layers=1,
        num_attention_heads=2,
        layer_types=["conv"],
    )
    return _called(Lfm2ShortConv(config, 0), _x(2, 7))


def _latent(rank):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        q_lora_rank=rank,
        kv_lora_rank=12,
        qk_nope_head_dim=6,
        qk_rope_head_dim=8,
        v_head_dim=10,
        max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        attn_implementation="eager",
    )
    attention, rotary = DeepseekV3Attention(config, 0), DeepseekV3RotaryEmbedding(config)
    x, lengths = _x(9), (4, 5)
    positions = torch.cat([torch.arange(length) for length in lengths])
    offsets = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)

    def by_sequence(_):
        outs = []
        for rows, place in zip(x.split(lengths), positions.split(lengths), strict=True):
            mask = torch.full((len(rows), len(rows)), -torch.inf).triu(1)[None, None]
            angles = rotary(rows, place.unsqueeze(0))
            outs.append(attention(rows.unsqueeze(0), angles, mask)[0].squeeze(0))
        return torch.cat(outs)

    with torch.no_grad():
        for parameter in attention.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.rand_like(parameter) - 0.5)
        return attention.state_dict(), (x, positions, offsets, max(lengths)), by_sequence(x)


def _encoder():
    from transformers import CLIPVisionConfig
    from transformers.models.clip.modeling_clip import CLIPAttention

    config = CLIPVisionConfig(hidden_size=HIDDEN, num_attention_heads=HEADS, attn_implementation="eager")
    return _called(CLIPAttention(config), _x(2, 7), then=lambda out: out[0])


REFERENCES = {
    "RMSNorm": _norm,
    "RMSNorm with a residual": _norm_of_a_sum,
    "GemmaRMSNorm": _gemma,
    "SiluAndMul": _perceptron,
    "GeluAndMul": _gelu_perceptron,
    "RotaryEmbedding": _rotary,
    "ReplicatedLinear": lambda: _called(nn.Linear(HIDDEN, INTER), _x(2, 3)),
    "ColumnParallelLinear": lambda: _called(nn.Linear(HIDDEN, INTER), _x(2, 3)),
    "ColumnParallelLinear merged": lambda: _called(_Merged(KV_HEADS, bias=True), _x(5)),
    "ColumnParallelLinear with copies": lambda: _called(_WithOutput(), _x(5)),
    "RowParallelLinear": lambda: _called(nn.Linear(INTER, HIDDEN), torch.randn(5, INTER)),
    "VocabParallelEmbedding": lambda: _called(nn.Embedding(VOCAB, HIDDEN), torch.tensor([[0, 36, 17], [19, 20, 3]])),
    "ParallelLMHead": lambda: _called(nn.Linear(HIDDEN, VOCAB), _x(5)),
    "ParallelLMHead capped": lambda: _called(
        nn.Linear(HIDDEN, VOCAB, bias=False), 4 * _x(5), then=lambda y: torch.tanh(y / 2) * 2 * 0.5
    ),
    "FusedMoE": _routed,
    "FusedMoE by experts": _routed,
    "FusedMoE in groups": _routed_in_groups,
    "FusedMoE with biases": _with_biases,
    "FusedMoE with biases by experts": _with_biases,
    "MambaMixer": _mamba,
    "MambaMixer2": lambda: _mamba2(2, use_bias=True),
    "MambaMixer2 of one group": lambda: _mamba2(1, time_step_limit=(0.01, 0.6)),
    "ShortConv": _short_convolution,
    "MLA": lambda: _latent(12),
    "MLA without a rank of queries": lambda: _latent(None),
    "Conv2d": lambda: _called(nn.Conv2d(4, 6, (2, 3), 2, 1, groups=2), torch.randn(2, 4, 7, 8)),
    "Conv3d": lambda: _called(nn.Conv3d(3, 6, (2, 4, 4), (2, 4, 4), bias=False), torch.randn(2, 3, 4, 8, 8)),
    "EncoderAttention": _encoder,
}


@cache
def reference(name):
    """Full weights, arguments and result of a layer's reference."""
    torch.manual_seed(0)
    return REFERENCES[name]()
