"""Two processes compute with the passes what they compute without them: a decoder of four layers, tensor parallel.

How many collectives there are is asserted first: a pass that does nothing has right values, too.
"""

import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from parallel_support import EPSILON, HIDDEN, Weights, made_of, stage, weights
from two_processes import run_in_processes

import irframework as ir
from irframework.distributed import enable_symmetric_memory, symmetric_memory

SIZE, LAYERS = 2, 4
TOKENS = (1, 3, 7, 64)
SUMS = 2 * LAYERS + 1
NORMS = ("all_reduce_rms_norm", "all_reduce_fused_add_rms_norm")
PRODUCTS = ("linear_reduce_scatter", "all_gather_linear")


def inputs(tokens, rank):
    """What the embedding of a process gives, which all of them add up."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(SIZE, tokens, HIDDEN, generator=generator)[rank]


def whole(tokens):
    """The program of one process that has all weights, in float64."""
    x = sum(inputs(tokens, rank).double() for rank in range(SIZE))
    layers = weights(LAYERS, 1, 0, bias=True)
    residual = None
    for layer in layers:
        pairs = (layer.norms[0], layer.mixer, layer.bias), (layer.norms[1], layer.dense, torch.zeros(HIDDEN))
        for norm, (up, down), bias in pairs:
            residual = x if residual is None else x + residual
            x = normed(residual, norm) @ up.double().T
            x = x.tanh() @ down.double().T + bias
    return normed(x + residual, layers[0].norms[0])


def normed(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON) * weight.double()


def moved(layer, device):
    norms, mixer, dense = (tuple(w.to(device) for w in pair) for pair in (layer.norms, layer.mixer, layer.dense))
    return Weights(norms, mixer, dense, None if layer.bias is None else layer.bias.to(device))


# --- what the processes do -------------------------------------------------------------------------------------------


def work(rank):
    """Results and counts of the program, eager and compiled; the first process has a bias, the other one has none."""
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    name = torch.distributed.group.WORLD.group_name
    layers = [moved(layer, device) for layer in weights(LAYERS, SIZE, rank, bias=True)]

    def first(x):
        return stage(x, None, layers, name)

    def middle(x, residual):
        return stage(x, residual, layers, name, last=False, donate=True)

    found = {}
    with torch.no_grad(), ir.priority(dict.fromkeys(ir.ops.__all__, "native")):
        for count in TOKENS:
            found["eager", count] = first(inputs(count, rank).to(device)).cpu()
        x, residual = inputs(64, 0).to(device), inputs(64, 1).to(device)
        found["middle", "eager"] = [each.cpu() for each in middle(x.clone(), residual.clone())]
        ir.configure(ir.KernelConfig(sequence_parallel=1, fusion=False))
        for count in TOKENS:
            made = made_of(first, inputs(count, rank).to(device))
            found["compiled", count], found["counts", count] = made.result.cpu(), made.counts
        made = made_of(middle, x, residual)
        found["middle", "compiled"], found["middle", "counts"] = [each.cpu() for each in made.result], made.counts
    found["norms"] = fused(first, inputs(64, rank).to(device), NORMS, 0, natively)
    found["products"] = fused(first, inputs(64, rank).to(device), PRODUCTS, 1, by_torch)
    return found


def fused(program, x, names, tokens, provider):
    """The program with collectives that are fused with norms, or with products."""
    others = [name for name in ir.ops.__all__ if getattr(ir.ops, name).fuse and name not in names]
    ir.configure(ir.KernelConfig(sequence_parallel=tokens, disable_fusions=others))
    with provider(names) as chosen, ir.priority(dict.fromkeys(names, chosen)):
        made = made_of(program, x)
        chosen_for = {name: set(made.report.selected_impls.get(name, {}).values()) for name in names}
    return made.result.cpu(), made.report.fusions, made.counts, chosen_for


@contextmanager
def natively(names):
    """A provider that does what native does."""
    ops = [getattr(ir.ops, name) for name in names]
    for op in ops:

        def implementation(*args, op=op):
            return op.native(*args)

        implementation.__signature__ = op.signature
        op.register_impl("stand_in")(implementation)
    yield "stand_in"
    for op in ops:
        op.unregister_impl("stand_in")


@contextmanager
def by_torch(names):
    """The implementations of `symm_mem`: on GPUs as they are, on the CPU over stand-ins for torch's two products."""
    if torch.distributed.get_backend() == "nccl":
        enable_symmetric_memory()
        yield symmetric_memory.PROVIDER
        return
    from torch.distributed import _symmetric_memory  # noqa: F401 -- declares its ops

    library = torch.library.Library("symm_mem", "IMPL")
    functional = torch.ops._c10d_functional

    def multiplied(a, b, reduce_op, scatter_dim, group):
        assert scatter_dim == 0
        return functional.wait_tensor(functional.reduce_scatter_tensor(a @ b, reduce_op, SIZE, group))

    def gathered(a, bs, gather_dim, group, return_A=True):  # noqa: N803 -- torch's name
        assert (gather_dim, return_A) == (0, False)
        rows = functional.wait_tensor(functional.all_gather_into_tensor(a, SIZE, group))
        return None, [rows @ b for b in bs]

    library.impl("fused_matmul_reduce_scatter", multiplied, "CPU")
    library.impl("fused_all_gather_matmul", gathered, "CPU")
    bodies = {"linear_reduce_scatter": symmetric_memory.product_and_scatter}
    bodies |= {"all_gather_linear": symmetric_memory.gather_and_product}
    for name in names:
        getattr(ir.ops, name).register_impl("stand_in")(bodies[name])
    yield "stand_in"
    for name in names:
        getattr(ir.ops, name).unregister_impl("stand_in")


def by_inductor(rank):
    """The program as Inductor compiles it, with and without the passes."""
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    name = torch.distributed.group.WORLD.group_name
    layers = [moved(layer, device) for layer in weights(LAYERS, SIZE, rank, bias=True)]
    others = [name for name in ir.ops.__all__ if getattr(ir.ops, name).fuse and name not in PRODUCTS]
    if device == "cuda":
        enable_symmetric_memory()  # from now on products, and sums of few bytes, are torch's own
    found = {}
    for tokens in (0, 1) if device == "cuda" else (1,):
        torch._dynamo.reset()
        ir.configure(ir.KernelConfig(sequence_parallel=tokens, disable_fusions=others))
        with torch.no_grad():
            run = torch.compile(lambda x: stage(x, None, layers, name), backend="irframework", fullgraph=True)
            results = [run(inputs(64, rank).to(device)).cpu() for _ in range(3)]
        assert all(torch.equal(results[0], each) for each in results)
        found[tokens] = results[0], ir.last_report().fusions
        found[tokens, "sums"] = set(ir.last_report().selected_impls.get("all_reduce", {}).values())
    return found


def example(rank):
    """The example decoder over a prompt, without the pass and with it."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "decoder"))
    from tiny_decoder import Decoder, Sequences

    sizes = {"vocab_size": 38, "hidden_size": 16, "num_hidden_layers": LAYERS, "intermediate_size": 24}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 64}
    rope = {"rope_theta": 1e4, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": None}
    config = SimpleNamespace(model_type="llama", rms_norm_eps=1e-6, tie_word_embeddings=False, **sizes, **heads, **rope)
    torch.manual_seed(0)
    model = Decoder(config, torch.distributed.group.WORLD)
    model.load(random_weights(config))

    def run(ids, step, states):
        return model(ids, step, states)[0]

    ids, found = torch.arange(32) * 5 % 38, []
    for tokens in (0, 1):
        ir.configure(ir.KernelConfig(sequence_parallel=tokens, fusion=False))
        sequences = Sequences(1, 64)
        made = made_of(run, ids, sequences.take([32]), model.new_states(sequences))
        found.append((made.result, made.counts))
    return found


def random_weights(config):
    """A full state dict by the names of transformers."""
    hidden, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    shapes |= {"self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (config.intermediate_size, hidden)}
    shapes |= {"mlp.up_proj": (config.intermediate_size, hidden), "mlp.down_proj": (hidden, config.intermediate_size)}
    shapes |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    layers = range(config.num_hidden_layers)
    named = {f"model.layers.{index}.{name}.weight": shape for index in layers for name, shape in shapes.items()}
    ends = {"model.embed_tokens.weight": (config.vocab_size, hidden), "lm_head.weight": (config.vocab_size, hidden)}
    named |= {"model.norm.weight": (hidden,), **ends}
    return {name: torch.randn(shape) * shape[-1] ** -0.5 + (len(shape) == 1) for name, shape in named.items()}


# --- what is said about it -------------------------------------------------------------------------------------------


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def check(done):
    for each in done:
        for count in TOKENS:
            divided = {"reduce_scatter": SUMS, "all_gather": SUMS}
            assert each["counts", count] == (divided if count % SIZE == 0 else {"all_reduce": SUMS})
            close(each["eager", count].double(), whole(count))
            close(each["compiled", count], each["eager", count])
        assert each["middle", "counts"] == {
            "reduce_scatter": SUMS - 2,
            "all_gather": SUMS - 1,
            "own_rows": 1,
            "all_reduce": 1,
        }
        close(each["middle", "compiled"], each["middle", "eager"])
        assert each["norms"][1] == {"all_reduce_rms_norm": 1, "all_reduce_fused_add_rms_norm": SUMS - 1}
        close(each["norms"][0], each["eager", 64])
        products = {"linear_reduce_scatter": SUMS - 1, "all_gather_linear": SUMS - 1}
        assert each["products"][1] == {"sequence_parallel": SUMS, **products}
        close(each["products"][0], each["eager", 64])
        for kind in ("norms", "products"):
            assert all(len(providers) == 1 and providers != {"native"} for providers in each[kind][3].values())
    assert torch.equal(done[0]["compiled", 64], done[1]["compiled", 64])


@pytest.mark.slow
def test_two_processes_compute_the_same_with_and_without_the_passes():
    check(run_in_processes(work))


def check_by_inductor(done, products):
    for each in done:
        expected = {"linear_reduce_scatter": SUMS - 1, "all_gather_linear": SUMS - 1} if products else {}
        assert each[1][1] == {"sequence_parallel": SUMS, **expected}
        close(each[1][0].double(), whole(64))


@pytest.mark.slow
def test_compiled_by_inductor_they_compute_the_same():
    check_by_inductor(run_in_processes(by_inductor), products=False)


@pytest.mark.slow
def test_the_example_decoder_computes_the_same():
    sums = 2 * LAYERS + 1
    for each in run_in_processes(example):
        (plain, before), (divided, after) = each
        assert before == {"all_reduce": sums, "all_gather": 1}  # the last one gathers logits
        assert after == {"reduce_scatter": sums, "all_gather": sums + 1}
        close(divided, plain)


def two_devices():
    if not torch.distributed.is_nccl_available() or torch.cuda.device_count() < SIZE:
        pytest.skip("needs NCCL and two CUDA devices")


@pytest.mark.cuda
def test_two_devices_compute_the_same_with_and_without_the_passes():
    two_devices()
    check(run_in_processes(work, backend="nccl"))


@pytest.mark.cuda
def test_two_devices_compute_the_same_compiled_by_inductor():
    two_devices()
    done = run_in_processes(by_inductor, backend="nccl")
    check_by_inductor(done, products=True)
    for each in done:  # without the pass, sums stay; of few bytes, they are one-shot
        assert each[0][1] == {}
        assert each[0, "sums"] == {symmetric_memory.PROVIDER}
        close(each[0][0].double(), whole(64))
