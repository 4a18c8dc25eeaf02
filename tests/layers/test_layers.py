"""Layers over ops: each against torch's or transformers' module of its kind, whole, compiled and on two processes."""

import copy
import pickle
from functools import cache

import pytest
import torch
from layer_cases import BUILD, HEAD, HEADS, HIDDEN, INTER, KV_HEADS, VOCAB, run
from torch import nn
from two_processes import run_in_processes

from irframework import layers

pytestmark = pytest.mark.usefixtures("seeded")


# --- the modules that layers are compared with -----------------------------------------------------------------------


def _called(module, *args, then=lambda out: out):
    """Weights, arguments and result of a reference."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point() and tensor.dim() == 1:
                tensor.add_(torch.rand_like(tensor) - 0.5)  # norms of ones and biases of zeros would hide mistakes
        return module.state_dict(), args, then(module(*args))


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
}
EVERY_LAYER = pytest.mark.parametrize("name", REFERENCES)
ON_TWO_COMPILED = ("SiluAndMul", "ColumnParallelLinear merged", "VocabParallelEmbedding", "ParallelLMHead")


@cache
def reference(name):
    torch.manual_seed(0)
    return REFERENCES[name]()


def loaded(name):
    layer = BUILD[name](None)
    layers.load_full(layer, reference(name)[0])
    return layer


def called(layer, name):
    """A layer's result; its arguments are copies, since they may be given away."""
    return layer(*[a.clone() for a in reference(name)[1]])


def close(got, wanted):
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


# --- what holds for all of them --------------------------------------------------------------------------------------


def test_every_layer_that_is_built_has_a_reference():
    assert REFERENCES.keys() == BUILD.keys()


@EVERY_LAYER
def test_a_layer_computes_what_its_reference_does(name):
    close(called(loaded(name), name), reference(name)[2])


@EVERY_LAYER
def test_a_layer_compiles_as_one_graph(name):
    torch._dynamo.reset()
    layer = loaded(name)
    close(called(torch.compile(layer, backend="aot_eager", fullgraph=True), name), reference(name)[2])


@EVERY_LAYER
def test_a_layer_can_be_copied_and_pickled(name):
    for clone in (copy.deepcopy(loaded(name)), pickle.loads(pickle.dumps(loaded(name)))):
        close(called(clone, name), reference(name)[2])


@pytest.fixture(scope="module")
def on_two_processes():
    return run_in_processes(run, {name: reference(name) for name in REFERENCES}, ON_TWO_COMPILED)


@EVERY_LAYER
def test_a_layer_that_is_divided_over_two_processes_computes_the_same(on_two_processes, name):
    for rank in range(2):
        results = on_two_processes[rank][name]
        assert len(results) == 1 + (name in ON_TWO_COMPILED)
        for result in results:
            close(result, reference(name)[2])
