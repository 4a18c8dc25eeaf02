"""Layers as tests build them, each over a group of any size, and how they are called.

Owns the sizes. Does not own the references, which only the first process computes: `test_layers.py`.
"""

import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import irframework as ir
from irframework import layers

HIDDEN, HEADS, KV_HEADS, HEAD, INTER, VOCAB = 16, 4, 2, 8, 24, 37


class Named(nn.Module):
    """A layer under the name that it has in a model, so that full weights find it."""

    def __init__(self, **named):
        super().__init__()
        for name, layer in named.items():
            setattr(self, name, layer)

    def forward(self, *args):
        for layer in self.children():
            args = layer(*args)
            args = args if isinstance(args, tuple) else (args,)
        return args if len(args) > 1 else args[0]


class Perceptron(nn.Module):
    """Gate and up in one product, as decoders have it."""

    def __init__(self, group, activation, bias=False):
        super().__init__()
        self.gate_up_proj = layers.ColumnParallelLinear(
            HIDDEN, [INTER, INTER], bias, group=group, merged_from=("gate_proj", "up_proj")
        )
        self.act = activation
        self.down_proj = layers.RowParallelLinear(INTER, HIDDEN, bias, group=group)

    def forward(self, x):
        return self.down_proj(self.act(self.gate_up_proj(x)))


class Projections(nn.Module):
    """Queries, keys and values in one product, with a head of keys for each process at least."""

    def __init__(self, group):
        super().__init__()
        size = 1 if group is None else group.size()
        self.qkv_proj = layers.ColumnParallelLinear(
            HIDDEN,
            [HEADS * HEAD, HEAD, HEAD],
            group=group,
            copies=(1, size, size),
            merged_from=("q_proj", "k_proj", "v_proj"),
        )
        self.o_proj = layers.RowParallelLinear(HEADS * HEAD, HIDDEN, group=group)

    def forward(self, x):
        q, k, v = self.qkv_proj.split(self.qkv_proj(x))
        heads = q.unflatten(-1, (-1, HEAD)) * k.unsqueeze(-2) + v.unsqueeze(-2)
        return self.o_proj(heads.flatten(-2))


class Router(nn.Module):
    """The weight of a router as transformers keeps it, in its own module."""

    def __init__(self, corrected):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, HIDDEN))
        if corrected:
            self.register_buffer("e_score_correction_bias", torch.empty(8))

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight)


class Experts(nn.Module):
    """A block of experts as models have it, with the router outside."""

    def __init__(self, group, experts, corrected=False):
        super().__init__()
        self.gate = Router(corrected)
        self.experts = experts

    def forward(self, x):
        bias = getattr(self.gate, "e_score_correction_bias", None)
        return self.experts(x, self.gate(x), correction_bias=bias)


def biased(group, parallel):
    """Experts with all that GPT-OSS has, and a router inside."""
    return layers.FusedMoE(
        4,
        HIDDEN,
        INTER,
        2,
        activation="swigluoai",
        bias=True,
        router=layers.ReplicatedLinear(HIDDEN, 4, bias=True),
        group=group,
        parallel=parallel,
    )


def latent(group, rank):
    """DeepSeek's attention."""
    rotary = layers.RotaryEmbedding(8, 64, 1000.0, is_neox=False)
    return layers.MLA(
        HIDDEN,
        HEADS,
        kv_lora_rank=12,
        qk_nope_head_dim=6,
        qk_rope_head_dim=8,
        v_head_dim=10,
        rotary=rotary,
        q_lora_rank=rank,
        group=group,
    )


BUILD = {
    "RMSNorm": lambda group: layers.RMSNorm(HIDDEN, 1e-5),
    "RMSNorm with a residual": lambda group: layers.RMSNorm(HIDDEN, 1e-5, donate=True),
    "GemmaRMSNorm": lambda group: layers.GemmaRMSNorm(HIDDEN, 1e-6),
    "SiluAndMul": lambda group: Perceptron(group, layers.SiluAndMul()),
    "GeluAndMul": lambda group: Perceptron(group, layers.GeluAndMul("tanh"), bias=True),
    "RotaryEmbedding": lambda group: layers.RotaryEmbedding(HEAD, 64, 1000.0),
    "ReplicatedLinear": lambda group: layers.ReplicatedLinear(HIDDEN, INTER, bias=True),
    "ColumnParallelLinear": lambda group: layers.ColumnParallelLinear(
        HIDDEN, INTER, bias=True, group=group, gather_output=True
    ),
    "ColumnParallelLinear merged": lambda group: Named(
        qkv_proj=layers.ColumnParallelLinear(
            HIDDEN,
            [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD],
            bias=True,
            group=group,
            gather_output=True,
            merged_from=("q_proj", "k_proj", "v_proj"),
        )
    ),
    "ColumnParallelLinear with copies": Projections,
    "RowParallelLinear": lambda group: layers.RowParallelLinear(
        INTER, HIDDEN, bias=True, group=group, input_is_parallel=False
    ),
    "VocabParallelEmbedding": lambda group: layers.VocabParallelEmbedding(VOCAB, HIDDEN, group=group, multiple_of=8),
    "ParallelLMHead": lambda group: layers.ParallelLMHead(VOCAB, HIDDEN, bias=True, group=group),
    "ParallelLMHead capped": lambda group: layers.ParallelLMHead(
        VOCAB, HIDDEN, scale=0.5, soft_cap=2.0, group=group, multiple_of=16
    ),
    "FusedMoE": lambda group: Experts(group, layers.FusedMoE(8, HIDDEN, INTER, 2, group=group)),
    "FusedMoE by experts": lambda group: Experts(
        group, layers.FusedMoE(8, HIDDEN, INTER, 2, group=group, parallel="expert")
    ),
    "FusedMoE in groups": lambda group: Experts(
        group,
        layers.FusedMoE(
            8,
            HIDDEN,
            INTER,
            3,
            scoring="sigmoid",
            num_groups=4,
            top_groups=2,
            scaling_factor=2.5,
            group=group,
            parallel="expert",
        ),
        corrected=True,
    ),
    "FusedMoE with biases": lambda group: biased(group, "tensor"),
    "FusedMoE with biases by experts": lambda group: biased(group, "expert"),
    "MambaMixer": lambda group: layers.MambaMixer(HIDDEN, 2 * HIDDEN, 4, 4, 3, bias=True, group=group),
    "MambaMixer2": lambda group: layers.MambaMixer2(
        HIDDEN, 4, 8, 6, 4, 2, chunk_size=8, epsilon=1e-5, bias=True, group=group
    ),
    "MambaMixer2 of one group": lambda group: layers.MambaMixer2(
        HIDDEN, 4, 8, 6, 4, 1, chunk_size=8, time_step_limit=(0.01, 0.6), group=group
    ),
    "ShortConv": lambda group: layers.ShortConv(HIDDEN, 3, bias=True, group=group),
    "MLA": lambda group: latent(group, 12),
    "MLA without a rank of queries": lambda group: latent(group, None),
    "Conv2d": lambda group: layers.Conv2d(4, 6, [2, 3], stride=2, padding=1, groups=2),
    "Conv3d": lambda group: layers.Conv3d(3, 6, (2, 4, 4), stride=(2, 4, 4), bias=False),
    "EncoderAttention": lambda group: layers.EncoderAttention(HIDDEN, HEADS, group=group),
}

TAKEN = {  # what is compared of a result that holds states as well
    name: lambda result: result[0] for name in BUILD if name.startswith(("Mamba", "ShortConv", "MLA"))
}


def result_of(name, layer, args):
    """A layer's result; its arguments are copies, since they may be given away."""
    with torch.no_grad():
        result = layer(*[a.clone() if isinstance(a, torch.Tensor) else a for a in args])
    return TAKEN.get(name, lambda result: result)(result)


def lowered(graph, inputs):
    """What our compiler makes of a graph, run as it is: Inductor's kernels take as long again for each layer."""
    return ir.compiler.lower(graph, inputs, inference=True)


def run(rank, references, compiled):
    """Build every layer over the group of all processes, load it, and return what it gives."""
    group = torch.distributed.group.WORLD
    backend = aot_autograd(fw_compiler=lowered)
    done = {}
    for name, (weights, args, _) in references.items():
        layer = BUILD[name](group)
        layers.load_full(layer, weights)
        forms = [layer, torch.compile(layer, backend=backend, fullgraph=True)][: 2 if name in compiled else 1]
        done[name] = [result_of(name, form, args) for form in forms]
        torch._dynamo.reset()
    return done


def gradients(layer, x):
    """Gradients of the weights and of x, of a loss that all processes compute alike and share."""
    x = x.clone().requires_grad_()
    (layer(x).pow(2).sum() / layer.gate_up_proj.group.size).backward()
    return {name: parameter.grad for name, parameter in layer.named_parameters()} | {"x": x.grad}


def run_and_train(rank, references, compiled):
    """As `run`, and the gradients of a perceptron: those of x are parts of a sum."""
    done = run(rank, references, compiled)
    weights, (x,), _ = references["GeluAndMul"]
    layer = BUILD["GeluAndMul"](torch.distributed.group.WORLD)
    layers.load_full(layer, weights)
    return done, gradients(layer, x)
