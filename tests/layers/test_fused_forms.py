"""Forms of the layers that call a fused op: each is the layer without it, and what the op adds, bit for bit."""

import copy
import pickle

import pytest
import torch
from two_processes import run_in_processes

import irframework as ir
from irframework import layers
from irframework.errors import ConfigError
from irframework.layers import Quantization
from irframework.registry import registry

pytestmark = pytest.mark.usefixtures("seeded")

HIDDEN, HEADS, KV_HEADS, HEAD = 32, 4, 2, 8
KINDS = [
    Quantization("static"),
    Quantization("dynamic"),
    Quantization("group", 16),
    Quantization("group", 8, column_major_scales=True, power_of_two_scales=True),
]
NVFP4 = Quantization("nvfp4")


def shown(kind):
    return f"{kind.kind}{kind.group_size if kind.kind == 'group' else ''}"


def quantised(x, kind, scale):
    """Codes and scales of rows, by the op that quantises alone."""
    if kind.kind == "static":
        return ir.ops.static_quant_fp8(x, scale), scale
    if kind.kind == "dynamic":
        return ir.ops.dynamic_quant_fp8(x)
    if kind.kind == "nvfp4":
        return ir.ops.quant_nvfp4(x, scale)
    return ir.ops.group_quant_fp8(x, kind.group_size, kind.column_major_scales, kind.power_of_two_scales)


def same(got, wanted):
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=0)


def built(layer):
    """A layer whose scale and weights are not those that it is built with."""
    with torch.no_grad():
        for _, buffer in layer.named_buffers():
            if buffer.dim() == 0:
                buffer.fill_(0.37)
        for parameter in layer.parameters():
            parameter.uniform_(0.5, 1.5)
    return layer


@pytest.mark.parametrize("kind", [*KINDS, NVFP4], ids=shown)
@pytest.mark.parametrize("donate", [False, True])
def test_a_norm_that_quantises_is_the_norm_and_the_quantisation(kind, donate):
    layer = built(layers.RMSNorm(HIDDEN, 1e-5, donate=donate, quantization=kind))
    x, residual = torch.randn(2, 5, HIDDEN)
    scale = getattr(layer, "scale", None)
    with torch.no_grad(), ir.priority(dict.fromkeys(registry.ops, "native")):
        same(layer(x), quantised(ir.ops.rms_norm(x, layer.weight, 1e-5), kind, scale))
        normed, total = ir.ops.fused_add_rms_norm(x, residual, layer.weight, 1e-5)
        same(layer(x.clone(), residual.clone()), (*quantised(normed, kind, scale), total))


@pytest.mark.parametrize("kind", [*KINDS, NVFP4], ids=shown)
def test_a_gate_that_quantises_is_the_gate_and_the_quantisation(kind):
    x = torch.randn(5, 2 * HIDDEN)
    with ir.priority(dict.fromkeys(registry.ops, "native")):
        gates = [(layers.SiluAndMul(quantization=kind), ir.ops.silu_and_mul(x))]
        if kind is not NVFP4:
            gates.append((layers.GeluAndMul("tanh", quantization=kind), ir.ops.gelu_and_mul(x, "tanh")))
        for layer, gated in gates:
            same(built(layer)(x), quantised(gated, kind, getattr(layer, "scale", None)))


def test_a_scale_is_loaded_saved_copied_and_not_rounded_with_the_model():
    layer = built(layers.SiluAndMul(quantization=KINDS[0]))
    layer.load_full(scale=torch.tensor(1.2345678))
    assert layer.half().scale.dtype == torch.float32
    for clone in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert clone.scale == torch.tensor(1.2345678)
    assert layers.SiluAndMul(quantization=KINDS[0], device="meta").to_empty(device="cpu").scale == 1
    assert layer.state_dict().keys() == {"scale"}


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (lambda: Quantization("statik"), "static"),
        (lambda: Quantization("dynamic", 64), "group"),
        (lambda: layers.GeluAndMul(quantization=NVFP4), "gelu_and_mul"),
        (lambda: layers.RMSNorm(HIDDEN, variance_size=8, quantization=NVFP4), "variance_size"),
        (lambda: layers.RMSNorm(HIDDEN, summed_over=layers.Group(), quantization=NVFP4), "summed_over"),
        (lambda: layers.RowParallelLinear(8, 8, reduce=False, sequence_parallel=True), "reduce"),
    ],
)
def test_what_no_op_does_is_refused(build, problem):
    with pytest.raises(ConfigError, match=problem):
        build()


def test_a_kind_without_one_scale_keeps_none():
    assert not layers.RMSNorm(HIDDEN, quantization=KINDS[1]).state_dict().keys() - {"weight"}


@pytest.mark.parametrize("normed", [False, True])
def test_a_rotary_layer_writes_to_the_cache_in_one_op(normed):
    kind = layers.NormedRotaryEmbedding if normed else layers.RotaryEmbedding
    layer = built(kind(HEAD, 64, 1000.0))
    positions = torch.tensor([0, 3, 63])
    query, key, value = torch.randn(3, HEADS * HEAD), torch.randn(3, KV_HEADS * HEAD), torch.randn(3, KV_HEADS * HEAD)
    caches = torch.zeros(2, 2, 4, KV_HEADS, HEAD).unbind()
    slots = torch.tensor([5, 0, 2])
    with torch.no_grad():
        turned = layer(positions, query, key)
        wanted = (*turned, *ir.ops.reshape_and_cache(turned[1], value, *caches, slots))
        got = layer.with_cache(positions, query, key, value, *(cache.clone() for cache in caches), slots)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_norms_before_a_rotation_are_those_of_heads():
    layer = built(layers.NormedRotaryEmbedding(HEAD, 64, 1000.0, epsilon=1e-5))
    plain = layers.RotaryEmbedding(HEAD, 64, 1000.0)
    positions, query, key = torch.tensor([0, 3, 63]), torch.randn(3, HEADS, HEAD), torch.randn(3, KV_HEADS, HEAD)
    with torch.no_grad():
        wanted = plain(positions, layer.q_norm(query), layer.k_norm(key))
        for one, other in zip(layer(positions, query, key), wanted, strict=True):
            torch.testing.assert_close(one, other)
        torch.testing.assert_close(layer(positions, query)[0], wanted[0])
    assert layer.state_dict().keys() == {"q_norm.weight", "k_norm.weight"}


def divided(rank):
    """A block between two norms, whole and with each process holding its part of the tokens."""
    torch.manual_seed(0)
    group = torch.distributed.group.WORLD
    x, residual, up, down, weight = (torch.randn(6, HIDDEN), torch.randn(6, HIDDEN), *torch.randn(3, HIDDEN, HIDDEN))
    mine = layers.Group.of(group)

    def block(**options):
        into = layers.ColumnParallelLinear(HIDDEN, HIDDEN, bias=True, group=group, **options)
        out = layers.RowParallelLinear(HIDDEN, HIDDEN, bias=True, group=group, **options)
        into.load_full(weight=up, bias=up[0])
        out.load_full(weight=down, bias=down[0])
        return lambda rows: out(into(rows))

    parts = layers.RowParallelLinear(HIDDEN, HIDDEN, group=group, reduce=False)
    parts.load_full(weight=down)
    norm = layers.RMSNorm(HIDDEN, 1e-5)
    summed = layers.RMSNorm(HIDDEN, 1e-5, summed_over=group)
    for each in (norm, summed):
        each.load_full(weight=weight[0])
    with torch.no_grad():
        part = parts(mine.part_of(x, -1))
        total = mine.all_reduce(part)
        return {
            "tokens": (mine.all_gather(block(sequence_parallel=True)(mine.part_of(x, 0)), 0), block()(x)),
            "sum": (torch.cat(summed(part)), torch.cat((norm(total), total))),
            "sum with a residual": (torch.cat(summed(part, residual)), torch.cat(norm(total, residual))),
        }


def test_divided_tokens_and_sums_over_processes_give_what_whole_ones_do():
    for done in run_in_processes(divided):
        for got, wanted in done.values():
            torch.testing.assert_close(got, wanted, atol=1e-4, rtol=1e-4)


def test_a_form_with_a_fused_op_compiles_as_one_graph():
    torch._dynamo.reset()
    layer = built(layers.RMSNorm(HIDDEN, 1e-5, quantization=KINDS[0]))
    x, residual = torch.randn(2, 5, HIDDEN)
    with torch.no_grad():
        same(torch.compile(layer, backend="aot_eager", fullgraph=True)(x, residual), layer(x, residual))
