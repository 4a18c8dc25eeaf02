"""The example decoder computes what the transformers model of the same config and weights does.

Prompts and single tokens, eager, compiled, and divided over two processes.
"""

import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import irframework as ir

EXAMPLE = Path(__file__).parents[2] / "examples" / "decoder"
sys.path.insert(0, str(EXAMPLE))

from tiny_decoder import Decoder, Sequences, generate  # noqa: E402
from two_processes import run_in_processes  # noqa: E402

KINDS = ("dense", "moe", "mamba", "mamba2")
PROMPTS, MORE = (19, 5), 3  # the first one fills a block of its cache and goes on in the next
COMMON = {"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24, "max_position_embeddings": 64}


def reference_model(kind):
    """The transformers model, tiny, with random weights."""
    pytest.importorskip("transformers")
    import transformers as hf

    if kind == "dense":
        model, config = hf.LlamaForCausalLM, hf.LlamaConfig(**COMMON, **HEADS)
    elif kind == "moe":
        model, config = hf.MixtralForCausalLM, hf.MixtralConfig(**COMMON, **HEADS, num_local_experts=4)
    elif kind == "mamba":
        model, config = hf.MambaForCausalLM, hf.MambaConfig(**COMMON, state_size=4)
    else:
        sizes = {"num_heads": 4, "head_dim": 8, "state_size": 6, "n_groups": 2, "chunk_size": 8}
        model, config = hf.Mamba2ForCausalLM, hf.Mamba2Config(**COMMON, **sizes)
    return model(config).eval()


@cache
@torch.no_grad()
def reference(kind):
    """Config, weights, sequences, and the logits of each sequence as a whole."""
    torch.manual_seed(0)
    model = reference_model(kind)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            weight.add_(torch.rand_like(weight) - 0.5)  # norms of ones and biases of zeros would hide mistakes
        elif "A_log" not in name:
            weight.normal_(std=weight.shape[-1] ** -0.5)
    sequences = [torch.randint(COMMON["vocab_size"], (length + MORE,)) for length in PROMPTS]
    logits = [model(ids.unsqueeze(0), use_cache=False).logits.squeeze(0) for ids in sequences]
    config = SimpleNamespace(**model.config.to_dict())  # no more of transformers is needed
    return config, {name: weight.clone() for name, weight in model.state_dict().items()}, sequences, logits


def loaded(kind, group=None):
    config, weights, _, _ = reference(kind)
    model = Decoder(config, group)
    model.load(weights)
    return model


@torch.no_grad()
def logits_of(model, ids, cuts, run=None):
    """Logits of whole sequences that are given in parts, each of which starts at one of `cuts`."""
    sequences, run = Sequences(len(ids), 32), model if run is None else run
    states, found = model.new_states(sequences), [[] for _ in ids]
    for at in range(len(cuts[0])):
        parts = [row[part[at] : (*part, len(row))[at + 1]] for row, part in zip(ids, cuts, strict=True)]
        counts = [len(part) for part in parts]
        logits, states = run(torch.cat(parts), sequences.take(counts), states)
        for rows, part in zip(found, logits.split(counts), strict=True):
            rows.append(part)
    return [torch.cat(rows) for rows in found]


def with_single_tokens(ids):
    """Cuts for a prompt, and then token by token."""
    return [(0, *range(len(row) - MORE, len(row))) for row in ids]


def close(found, expected, tolerance=2e-5):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance * float(theirs.abs().max()))


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_single_tokens_have_the_logits_of_transformers(kind):
    _, _, ids, expected = reference(kind)
    close(logits_of(loaded(kind), ids, with_single_tokens(ids)), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_may_come_in_two_parts(kind):
    _, _, ids, expected = reference(kind)
    close(logits_of(loaded(kind), ids, [(0, 17), (0, 2)]), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_traced_as_one_graph_with_the_same_logits(kind):
    _, _, ids, expected = reference(kind)
    torch._dynamo.reset()
    model = loaded(kind)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    close(logits_of(model, ids, with_single_tokens(ids), run), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_it_is_one_graph_with_the_same_logits(kind):
    _, _, ids, expected = reference(kind)
    torch._dynamo.reset()
    model = loaded(kind)
    run = torch.compile(model, backend="irframework", fullgraph=True)
    close(logits_of(model, ids, with_single_tokens(ids), run), expected)
    step = {"mamba": "selective_state_update", "mamba2": "selective_state_update"}.get(kind, "attention")
    assert step in ir.last_report().selected_impls


def test_generated_tokens_are_those_that_transformers_finds_most_likely():
    _, _, ids, _ = reference("dense")
    found = generate(loaded("dense"), [row[:-MORE] for row in ids], MORE)
    model = reference_model("dense")
    model.load_state_dict(reference("dense")[1])
    for row, new in zip(ids, found, strict=True):
        whole = torch.cat((row[:-MORE], new)).unsqueeze(0)
        with torch.no_grad():
            likely = model(whole, use_cache=False).logits[0].argmax(-1)
        assert new.tolist() == likely[-MORE - 1 : -1].tolist()


def divided(rank, references):
    """What a process of two computes with its parts of the weights."""
    group = torch.distributed.group.WORLD
    results = {}
    for kind, (config, weights, ids) in references.items():
        model = Decoder(config, group)
        model.load(weights)
        results[kind] = logits_of(model, ids, with_single_tokens(ids))
    return results


@pytest.fixture(scope="module")
def on_two_processes():
    return run_in_processes(divided, {kind: reference(kind)[:3] for kind in KINDS})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_compute_the_logits_of_one(on_two_processes, kind):
    _, _, ids, _ = reference(kind)
    alone = logits_of(loaded(kind), ids, with_single_tokens(ids))
    for found in on_two_processes:
        close(found[kind], alone)


def test_weights_that_are_kept_once_are_loaded_for_both_ends():
    config, weights, _, _ = reference("mamba")
    model = Decoder(config)
    model.load({name: weight for name, weight in weights.items() if name != "lm_head.weight"})
    assert torch.equal(model.lm_head.weight, weights["lm_head.weight"])


def test_a_sequence_that_grows_beyond_its_space_is_an_error():
    sequences = Sequences(2, 4)
    sequences.take([4, 1])
    with pytest.raises(ValueError, match="space for 4"):
        sequences.take([1, 1])


def test_its_readme_shows_its_files():
    text = (EXAMPLE / "README.md").read_text()
    for file in (EXAMPLE / "tiny_decoder").glob("[a-z]*.py"):
        assert f"`{file.name}`" in text
