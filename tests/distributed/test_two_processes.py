"""Two processes compute with the passes what they compute without them: a decoder of four layers, tensor parallel.

How many collectives there are is asserted first: a pass that does nothing has right values, too.
"""

import pytest
import torch
from parallel_support import HIDDEN, made_of, stage, weights
from two_processes import run_in_processes

import irframework as ir

SIZE, LAYERS = 2, 4
TOKENS = (1, 3, 7, 64)
SUMS = 2 * LAYERS + 1


def inputs(tokens, rank, dtype=torch.float32):
    """What the embedding of a process gives, which all of them add up."""
    generator = torch.Generator().manual_seed(tokens)
    return torch.randn(SIZE, tokens, HIDDEN, generator=generator).to(dtype)[rank]


def whole(tokens):
    """The program of one process that has all weights, in float64."""
    x = sum(inputs(tokens, rank).double() for rank in range(SIZE))
    layers = weights(LAYERS, 1, 0)
    residual = None
    for layer in layers:
        for norm, (up, down) in zip(layer.norms, (layer.mixer, layer.dense), strict=True):
            residual = x if residual is None else x + residual
            x = normed(residual, norm) @ up.double().T
            x = x.tanh() @ down.double().T
    return normed(x + residual, layers[0].norms[0])


def normed(x, weight):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.double()


def moved(layers, device):
    from parallel_support import Weights

    return [
        Weights(
            tuple(w.to(device) for w in layer.norms),
            tuple(w.to(device) for w in layer.mixer),
            tuple(w.to(device) for w in layer.dense),
        )
        for layer in layers
    ]


def work(rank, inductor):
    """What a process finds: results and counts of every program, without and with the passes."""
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    name = torch.distributed.group.WORLD.group_name
    layers = moved(weights(LAYERS, SIZE, rank), device)

    def first(x):
        return stage(x, None, layers, name)

    def middle(x, residual):
        return stage(x, residual, layers, name, last=False)

    found = {}
    with torch.no_grad():
        for tokens in TOKENS:
            found["eager", tokens] = first(inputs(tokens, rank).to(device)).cpu()
        x, residual = inputs(64, 0).to(device), inputs(64, 1).to(device)
        found["middle", "eager"] = [each.cpu() for each in middle(x, residual)]
    ir.configure(ir.KernelConfig(sequence_parallel=1, fusion=False))
    for tokens in TOKENS:
        made = made_of(first, inputs(tokens, rank).to(device))
        found["compiled", tokens] = made.result.cpu()
        found["counts", tokens] = made.counts
    made = made_of(middle, x, residual)
    found["middle", "compiled"] = [each.cpu() for each in made.result]
    found["middle", "counts"] = made.counts
    if inductor:
        torch._dynamo.reset()
        with torch.no_grad():
            compiled = torch.compile(first, backend="irframework", fullgraph=True)
            found["inductor"] = compiled(inputs(64, rank).to(device)).cpu()
        found["inductor", "report"] = ir.last_report().fusions
    found["fused"] = fused_work(rank, name, layers, device)
    return found


def fused_work(rank, name, layers, device):
    """Collectives beside norms and products, as ops of their own: a provider that does what native does takes them."""
    taken = []

    def provider(op):
        def implementation(*args, **kwargs):
            taken.append(op.name)
            return op.native(*args, **kwargs)

        implementation.__signature__ = op.signature
        implementation.__name__ = op.name
        return implementation

    names = ("all_reduce_rms_norm", "all_reduce_fused_add_rms_norm", "linear_reduce_scatter", "all_gather_linear")
    for op in (getattr(ir.ops, name) for name in names):
        op.register_impl("stand_in")(provider(op))
    others = [op for op in ir.ops.__all__ if getattr(ir.ops, op).fuse and op not in names]
    x = inputs(64, rank).to(device)
    found = {}
    try:
        for tokens, kind in ((0, "norms"), (1, "products")):
            ir.configure(ir.KernelConfig(sequence_parallel=tokens, disable_fusions=others))
            made = made_of(lambda x: stage(x, None, layers, name), x)
            found[kind] = made.result.cpu(), made.report.fusions, made.counts
    finally:
        for op in (getattr(ir.ops, name) for name in names):
            op.unregister_impl("stand_in")
    found["taken"] = sorted(set(taken))
    return found


def check(done):
    for tokens in TOKENS:
        divides = tokens % SIZE == 0
        expected = {"reduce_scatter": SUMS, "all_gather": SUMS} if divides else {"all_reduce": SUMS}
        for each in done:
            assert each["counts", tokens] == expected
            torch.testing.assert_close(each["eager", tokens].double(), whole(tokens), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(each["compiled", tokens], each["eager", tokens], rtol=1e-5, atol=1e-5)
    for each in done:
        inner = SUMS - 2
        counts = {"reduce_scatter": inner, "all_gather": inner + 1, "own_rows": 1, "all_reduce": 1}
        assert each["middle", "counts"] == counts
        torch.testing.assert_close(each["middle", "compiled"], each["middle", "eager"], rtol=1e-5, atol=1e-5)
        check_fused(each)
    assert torch.equal(done[0]["compiled", 64], done[1]["compiled", 64])


def check_fused(each):
    result, fusions, counts = each["fused"]["norms"]
    assert fusions == {"all_reduce_rms_norm": 1, "all_reduce_fused_add_rms_norm": SUMS - 1}
    assert counts == {"all_reduce": SUMS}
    torch.testing.assert_close(result, each["eager", 64], rtol=1e-5, atol=1e-5)
    result, fusions, counts = each["fused"]["products"]
    assert fusions == {"sequence_parallel": SUMS, "linear_reduce_scatter": SUMS - 1, "all_gather_linear": SUMS - 1}
    assert counts == {"reduce_scatter": SUMS, "all_gather": SUMS}
    torch.testing.assert_close(result, each["eager", 64], rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def done():
    return run_in_processes(work, False)


def test_two_processes_compute_the_same_with_and_without_the_passes(done):
    check(done)


def check_inductor(done):
    for each in done:
        assert each["inductor", "report"] == {"sequence_parallel": SUMS}
        torch.testing.assert_close(each["inductor"], each["eager", 64], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_compiled_by_inductor_they_compute_the_same():
    check_inductor(run_in_processes(work, True))


@pytest.mark.cuda
def test_two_devices_compute_the_same_with_and_without_the_passes():
    if not torch.distributed.is_nccl_available() or torch.cuda.device_count() < SIZE:
        pytest.skip("needs NCCL and two CUDA devices")
    done = run_in_processes(work, True, backend="nccl")
    check(done)
    check_inductor(done)
