"""Layers as tests build them, each over a group of any size, and how they are called.

Owns the sizes. Does not own the references, which only the first process computes: `test_layers.py`.
"""

import torch
from torch import nn

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
}


def run(rank, references, compiled):
    """Build every layer over the group of all processes, load it, and return what it gives."""
    group = torch.distributed.group.WORLD
    done = {}
    for name, (weights, args, _) in references.items():
        layer = BUILD[name](group)
        layers.load_full(layer, weights)
        forms = [layer, torch.compile(layer, backend="aot_eager", fullgraph=True)][: 2 if name in compiled else 1]
        with torch.no_grad():
            done[name] = [form(*[a.clone() for a in args]) for form in forms]
        torch._dynamo.reset()
    return done
