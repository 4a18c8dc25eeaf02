"""Rules of layers over ops: states and caches, rotary tables, loading, division, replacement."""

import json
import subprocess
import sys

import pytest
import torch
from layer_cases import BUILD, HEAD, HEADS, HIDDEN, result_of
from layer_references import reference
from torch import nn

from irframework import errors, layers
from irframework.layers.parallel_layer import Rows

pytestmark = pytest.mark.usefixtures("seeded")


def loaded(name):
    layer = BUILD[name](None)
    layers.load_full(layer, reference(name)[0])
    return layer.requires_grad_(False)


def close(got, wanted):
    torch.testing.assert_close(got, wanted, atol=2e-5, rtol=1e-4)


# --- states and caches -----------------------------------------------------------------------------------------------

MIXERS = pytest.mark.parametrize("name", ["MambaMixer", "MambaMixer2", "MambaMixer2 of one group"])


def packed(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


@MIXERS
def test_a_sequence_behind_its_states_goes_on_where_it_stopped(name):
    layer, x = loaded(name), torch.randn(2, 9, HIDDEN)
    whole, conv_states, ssm_states = layer(x)
    first, *states = layer(x[:, :4])
    rest, *after = layer(x[:, 4:], None, *states)
    close(torch.cat((first, rest), 1), whole)
    close(after, [conv_states, ssm_states])


@MIXERS
@pytest.mark.parametrize("compiled", [False, True])
def test_steps_give_what_a_sequence_gives(name, compiled):
    torch._dynamo.reset()
    layer, x = loaded(name), torch.randn(2, 6, HIDDEN)
    step = torch.compile(layer.step, backend="aot_eager", fullgraph=True) if compiled else layer.step
    whole, *after = layer(x)
    states = [torch.zeros(shape) for shape in layer.state_shapes(2)]
    outs = []
    for token in x.unbind(1):
        out, *states = step(token, *states)
        outs.append(out)
    close(torch.stack(outs, 1), whole)
    close(states, after)


@MIXERS
def test_a_step_finds_each_sequence_in_its_slot(name):
    layer, x = loaded(name), torch.randn(2, HIDDEN)
    slots = [torch.randn(shape) for shape in layer.state_shapes(4)]
    where = torch.tensor([3, 1])
    wanted, *changed = layer.step(x, *[slot[where].clone() for slot in slots])
    out, *after = layer.step(x, *[slot.clone() for slot in slots], where)
    close(out, wanted)
    for slot, new, old in zip(after, changed, slots, strict=True):
        close(slot[where], new)
        assert torch.equal(slot[[0, 2]], old[[0, 2]])


@pytest.mark.parametrize("name", ["MambaMixer", "MambaMixer2", "ShortConv"])
def test_packed_sequences_do_not_see_each_other(name):
    layer, lengths = loaded(name), (3, 1, 5)
    x = torch.randn(sum(lengths), HIDDEN)
    out, *states = layer(x, packed(lengths))
    for number, rows in enumerate(x.split(lengths)):
        alone, *own = layer(rows.unsqueeze(0))
        close(out.split(lengths)[number], alone.squeeze(0))
        close([state[number : number + 1] for state in states], own)


def test_tokens_of_the_short_convolution_give_what_a_sequence_gives():
    layer, x = loaded("ShortConv"), torch.randn(2, 6, HIDDEN)
    whole, after = layer(x)
    states, outs = torch.zeros(layer.state_shape(2)), []
    for token in x.split(1, 1):
        out, states = layer(token, None, states)
        outs.append(out)
    close(torch.cat(outs, 1), whole)
    close(states, after)


@pytest.mark.parametrize("compiled", [False, True])
def test_latent_attention_through_a_cache_gives_what_the_whole_sequences_give(compiled):
    torch._dynamo.reset()
    layer, lengths = loaded("MLA"), (4, 5)
    x, positions, *_ = reference("MLA")[1]
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)  # two blocks of 4 for each
    cache = torch.full((5, 4, layer.rank + layer.rope), torch.nan)
    slots = torch.cat([table[s, torch.arange(n) // 4] * 4 + torch.arange(n) % 4 for s, n in enumerate(lengths)])
    before = torch.tensor([n - 1 for n in lengths], dtype=torch.int32)
    kept = torch.cat([torch.arange(n) < n - 1 for n in lengths])
    first, cache = call(x[kept], positions[kept], packed(before.tolist()), 4, cache, slots[kept], before, 4, table)
    last, cache = call(x[~kept], positions[~kept], packed([1, 1]), 1, cache, slots[~kept], before + 1, 5, table)
    wanted = reference("MLA")[2]
    close(first, wanted[kept])
    close(last, wanted[~kept])


def test_packed_images_do_not_see_each_other():
    layer, lengths = loaded("EncoderAttention"), (3, 4)
    x = torch.randn(sum(lengths), HIDDEN)
    angles = torch.randn(sum(lengths), HIDDEN // HEADS // 2)
    out = layer(x, packed(lengths), 4, None, angles.cos(), angles.sin())
    for got, rows, turn in zip(out.split(lengths), x.split(lengths), angles.split(lengths), strict=True):
        close(got, layer(rows, None, None, None, turn.cos(), turn.sin()))
    assert not torch.allclose(out, layer(x, packed(lengths), 4), atol=1e-3)


@pytest.mark.parametrize("donate", [False, True])
def test_the_residual_form_leaves_its_inputs_unless_they_are_given_away(donate):
    layer = layers.RMSNorm(HIDDEN, donate=donate)
    x, residual = torch.randn(3, HIDDEN), torch.randn(3, HIDDEN)
    kept = x.clone(), residual.clone()
    _, total = layer(x, residual)
    close(total, kept[0] + kept[1])
    assert donate or (torch.equal(x, kept[0]) and torch.equal(residual, kept[1]))


# --- rotary tables ---------------------------------------------------------------------------------------------------

ROPES = {
    "default": {"rope_type": "default"},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    "yarn of DeepSeek": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16,
        "beta_slow": 2,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
}


def rope_config(**rope):
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        head_dim=64,
        max_position_embeddings=512,
        rope_parameters={"rope_theta": 5000.0} | rope,
    )


@pytest.mark.parametrize("name", ROPES)
def test_the_table_is_that_of_transformers(name):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    config = rope_config(**ROPES[name])
    theirs = Phi3RotaryEmbedding if name == "partial" else LlamaRotaryEmbedding
    cos, sin = theirs(config)(torch.empty(0), torch.arange(512).unsqueeze(0))
    half = cos.shape[-1] // 2
    wanted = torch.cat((cos[0, :, :half], sin[0, :, :half]), -1)
    table = layers.RotaryEmbedding.from_config(config).cos_sin_cache
    torch.testing.assert_close(table, wanted, atol=1e-4, rtol=0)


def test_a_rope_without_a_table_is_named():
    with pytest.raises(errors.ConfigError, match=r"'longrope' has no table here\. .*Known: default, linear"):
        layers.RotaryEmbedding(HEAD, 8, scaling={"rope_type": "longrope"})


def test_a_rope_that_lacks_a_number_names_it():
    with pytest.raises(errors.ConfigError, match="'linear' needs 'factor' among"):
        layers.RotaryEmbedding(HEAD, 8, scaling={"rope_type": "linear"})


@pytest.mark.parametrize("rotary_dim", [3, 0, HEAD + 2])
def test_a_rotary_part_that_does_not_fit_a_head_is_refused(rotary_dim):
    with pytest.raises(errors.LayerSizeError, match=f"rotary_dim={rotary_dim} must be even"):
        layers.RotaryEmbedding(HEAD, 8, rotary_dim=rotary_dim)


def test_the_table_is_not_rounded_with_the_model():
    model = nn.ModuleList([layers.RotaryEmbedding(HEAD, 32)])
    exact = model[0].cos_sin_cache.clone()
    for convert in (nn.Module.half, nn.Module.bfloat16, nn.Module.float):
        convert(model)
        assert torch.equal(model[0].cos_sin_cache, exact)
    assert not model.state_dict()


def test_the_table_is_built_where_a_model_gets_its_memory():
    with torch.device("meta"):
        model = layers.RotaryEmbedding(HEAD, 32)
    assert torch.equal(model.to_empty(device="cpu").cos_sin_cache, layers.RotaryEmbedding(HEAD, 32).cos_sin_cache)


# --- weights ---------------------------------------------------------------------------------------------------------


def test_a_layer_takes_full_weights_by_name():
    layer = layers.ColumnParallelLinear(4, [2, 6], bias=True)
    weight, bias = torch.randn(8, 4), torch.randn(8)
    layer.load_full(weight=weight, bias=bias)
    assert torch.equal(layer.weight, weight)
    assert torch.equal(layer.bias, bias)


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ({"weight": torch.ones(8, 5)}, r"weight has shape \(8, 4\); the weight has \(8, 5\)"),
        ({"weight": torch.ones(3)}, r"weight has shape \(8, 4\); the weight has \(3,\)"),
        ({"scale": torch.ones(3)}, "ColumnParallelLinear has no parameter 'scale'; it has weight, bias"),
    ],
)
def test_a_weight_that_does_not_fit_a_layer_is_named(weights, problem):
    with pytest.raises(errors.WeightError, match=problem):
        layers.ColumnParallelLinear(4, [2, 6], bias=True).load_full(**weights)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda w: w.pop("up_proj.weight"), r"Missing: gate_up_proj.weight\. Left over: gate_proj.weight"),
        (lambda w: w.update(other=torch.ones(1)), "Left over: other"),
        (lambda w: w.update({"down_proj.weight": torch.ones(2, 2)}), r"down_proj.weight has shape .* has \(2, 2\)"),
    ],
)
def test_weights_of_another_model_are_refused(change, problem):
    weights = dict(reference("SiluAndMul")[0])
    change(weights)
    with pytest.raises(errors.WeightError, match=problem):
        layers.load_full(BUILD["SiluAndMul"](None), weights)


def test_merged_weights_load_as_they_are_too():
    layer = loaded("SiluAndMul")
    other = BUILD["SiluAndMul"](None)
    layers.load_full(other, layer.state_dict())
    x = torch.randn(3, HIDDEN)
    assert torch.equal(layer(x), other(x))


def test_a_layer_without_memory_says_so():
    layer = layers.ReplicatedLinear(4, 2, device="meta")
    with pytest.raises(errors.WeightError, match="weight has no memory yet"):
        layer.load_full(weight=torch.ones(2, 4))


def test_a_head_uses_the_weight_of_its_embedding():
    embedding, head = layers.VocabParallelEmbedding(10, 4), layers.ParallelLMHead(10, 4)
    head.tie_to(embedding)
    assert head.weight is embedding.weight
    with pytest.raises(errors.LayerSizeError, match="cannot be tied"):
        layers.ParallelLMHead(12, 4).tie_to(embedding)


# --- division --------------------------------------------------------------------------------------------------------


def of(size, rank=0):
    """A group of processes that are not there: enough to see what one of them holds."""
    return layers.Group("nobody", size, rank)


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (lambda: layers.ColumnParallelLinear(4, [8, 6], group=of(4)), "6 rows, held 1 times, cannot be divided"),
        (lambda: layers.ColumnParallelLinear(4, 8, group=of(4), copies=(3,)), r"copies=\(3,\) must be"),
        (lambda: layers.ColumnParallelLinear(4, 8, group=of(2), copies=(2,), gather_output=True), "does not go with"),
        (lambda: layers.ColumnParallelLinear(4, [8, 8], merged_from=("q",)), "must name all 2 merged layers"),
        (lambda: layers.RowParallelLinear(6, 4, group=of(4)), "6 input columns cannot be divided evenly"),
        (lambda: layers.FusedMoE(6, 4, 8, 2, group=of(4), parallel="expert"), "6 experts cannot be divided"),
        (lambda: layers.FusedMoE(6, 4, 6, 2, group=of(4)), "6 columns of an expert cannot be divided"),
        (lambda: layers.FusedMoE(6, 4, 6, 2, parallel="pipeline"), "parallel must be 'tensor' or 'expert'"),
        (lambda: layers.MambaMixer(4, 6, 2, 2, 1, group=of(4)), "6 channels cannot be divided"),
        (lambda: layers.MambaMixer2(4, 6, 2, 2, 2, group=of(4)), "6 heads cannot be divided"),
        (lambda: layers.MambaMixer2(4, 6, 2, 2, 2, 4), "4 groups do not divide 6 heads"),
        (lambda: layers.EncoderAttention(12, 6, group=of(4)), "6 heads cannot be divided"),
        (lambda: layers.EncoderAttention(13, 6), "6 heads do not divide 13 columns"),
        (lambda: layers.Conv2d(4, 6, 3, groups=4), "4 groups do not divide 4 and 6 channels"),
        (lambda: layers.VocabParallelEmbedding(0, 4), "vocab_size=0"),
        (lambda: layers.ReplicatedLinear(4, 4) and layers.Group.of("world"), "group must be a ProcessGroup"),
    ],
)
def test_sizes_that_cannot_be_divided_are_named(build, problem):
    with pytest.raises(errors.LayerSizeError, match=problem):
        build()


def test_neighbours_hold_the_same_rows_where_there_are_fewer_heads_than_processes():
    full = torch.arange(12)  # eight rows of queries, two heads of two rows of keys
    held = [Rows.of(of(4, rank), [8, 4], (1, 2)).part_of(full).tolist() for rank in range(4)]
    assert held == [[0, 1, 8, 9], [2, 3, 8, 9], [4, 5, 10, 11], [6, 7, 10, 11]]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_word_is_held_once(size):
    full = torch.randn(10, 4)
    tables = [layers.VocabParallelEmbedding(10, 4, group=of(size, rank), reduce=False) for rank in range(size)]
    for table in tables:
        table.load_full(weight=full)
    ids = torch.arange(10)
    assert torch.equal(sum(table(ids) for table in tables), full)
    heads = [layers.ParallelLMHead(10, 4, group=of(size, rank), gather=False) for rank in range(size)]
    for head in heads:
        head.load_full(weight=full)
    x = torch.randn(3, 4)
    close(torch.cat([head(x) for head in heads], -1)[:, :10], x @ full.T)


def test_parts_of_a_sum_are_the_callers_to_add_up():
    weight, bias, x = torch.randn(5, 8), torch.randn(5), torch.randn(3, 8)
    parts = [layers.RowParallelLinear(8, 5, True, group=of(2, rank), reduce=False) for rank in range(2)]
    for part in parts:
        part.load_full(weight=weight, bias=bias)
    close(sum(part(half) for part, half in zip(parts, x.chunk(2, -1), strict=True)), x @ weight.T + bias)


def test_a_choice_of_experts_may_be_made_elsewhere():
    block, x = loaded("FusedMoE"), torch.randn(3, HIDDEN)
    weights, ids = block.experts.chosen(block.gate(x))
    assert torch.equal(block.experts(x, topk_weights=weights, topk_ids=ids), block(x))
    with pytest.raises(errors.ArgumentError, match="needs router_logits"):
        block.experts(x)


# --- dtypes, sizes, replacement --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILD)
def test_a_layer_works_in_half_precision(name):
    layer = loaded(name).bfloat16()
    args = [a.bfloat16() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in reference(name)[1]]
    got, wanted = result_of(name, layer, args), reference(name)[2]
    for one, other in zip(*[[r] if isinstance(r, torch.Tensor) else r for r in (got, wanted)], strict=True):
        assert one.dtype == torch.bfloat16
        assert one.shape == other.shape


@pytest.mark.parametrize("name", ["RMSNorm with a residual", "SiluAndMul", "ParallelLMHead", "FusedMoE in groups"])
def test_another_batch_is_not_compiled_anew(name):
    torch._dynamo.reset()
    from torch._dynamo.testing import CompileCounterWithBackend

    layer, counter = loaded(name), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for rows in (5, 7, 12):
        args = [torch.randn(rows, HIDDEN) for _ in reference(name)[1]]
        close(result_of(name, compiled, args), result_of(name, layer, args))
        counts.append(counter.frame_count)  # a graph of nothing comes first, where torch makes a float of ours a number
    assert counts[0] == counts[-1]


@pytest.mark.filterwarnings("default")
def test_a_plugin_replaces_a_layer_as_a_whole():
    @layers.RMSNorm.register_oot
    class Doubled(layers.RMSNorm):
        def forward(self, x, residual=None):
            return 2 * super().forward(x)

    built = layers.RMSNorm(HIDDEN)
    assert type(built) is Doubled
    x = torch.randn(2, HIDDEN)
    assert torch.equal(built(x), 2 * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_layers_are_imported_where_they_are_used():
    code = """
import json, sys
import irframework
before = "irframework.layers" in sys.modules
from irframework.layers import RMSNorm
print(json.dumps([before, "irframework.layers.mamba" in sys.modules, RMSNorm.__name__]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [False, False, "RMSNorm"]


def test_every_public_name_is_there():
    assert all(getattr(layers, name) is not None for name in layers.__all__)
    assert set(layers.__all__) <= set(dir(layers))
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = layers.Nothing
