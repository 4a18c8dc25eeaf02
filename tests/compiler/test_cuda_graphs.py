"""On a CUDA device: graph capture, `reduce-overhead`, and what the other files of this directory test on the CPU.

One command runs them all: `pytest -m cuda tests/compiler/test_cuda_graphs.py`.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import standard_calls
import torch
from compiler_support import lowered
from standard_calls import (
    HIDDEN,
    Call,
    all_calls_and_providers,
    available,
    copies,
    expected,
    fake_providers,
    only,
    prefer,
)
from torch import Tensor
from torch._dynamo.utils import counters
from torch.export import Dim
from torch.func import vmap

import irframework as ir

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*CUDA Graph is empty.*:UserWarning"),  # no rows; torch's own graph trees
    pytest.mark.filterwarnings("ignore:.*TensorFloat32.*:UserWarning"),  # Inductor's advice
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # torch's own, where it copies modules
]
BACKENDS = pytest.mark.parametrize("backend", ["irframework", "inductor"])
PROVIDERS = pytest.mark.parametrize("provider", ["native", "triton", "overwriting"])


@pytest.fixture(autouse=True, scope="module")
def _fakes() -> Iterator[None]:
    with fake_providers():
        yield


same = partial(standard_calls.same, tolerance=1e-4)


def fill(arguments: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    """Put other data where a captured graph reads."""
    for mine, new in zip(arguments, other, strict=True):
        if isinstance(mine, Tensor):
            mine.copy_(new)


def captured(function: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Capture a call, after the warm-up calls on a stream of their own that torch asks for."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            function(*copies(arguments))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = function(*arguments)
    return graph, outputs


# --- eager calls in a captured graph ---------------------------------------------------------------------------------


@all_calls_and_providers(kernels="triton")
@pytest.mark.parametrize("rows", [5, 0])
def test_a_captured_call_replays_with_new_data(call: Call, provider: str, rows: int):
    arguments = call.arguments(rows, "cuda")
    with torch.no_grad(), prefer(available(provider)):
        graph, outputs = captured(call.form, arguments)
        for seed in (1, 2):
            other = tuple(
                a + seed if isinstance(a, Tensor) and a.is_floating_point() else a for a in call.arguments(rows, "cuda")
            )
            fill(arguments, other)
            graph.replay()
            same(outputs, expected(call, other))


def test_a_captured_chain_of_donations_replays():
    """Each replay overwrites the inputs that were given away, and nothing else."""

    def layers(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        for _ in range(3):
            x, r = ir.ops.fused_add_rms_norm.maybe_inplace(x, r, w, 1e-6)
        return x, r

    def data(seed: int) -> tuple[Tensor, ...]:
        torch.manual_seed(seed)
        return tuple(torch.randn(shape, device="cuda") for shape in ((5, HIDDEN), (5, HIDDEN), (HIDDEN,)))

    arguments = data(0)
    with torch.no_grad(), prefer("overwriting"):
        graph, outputs = captured(layers, arguments)
        assert outputs[0] is arguments[0]
        for seed in (1, 2):
            fill(arguments, data(seed))
            graph.replay()
            with prefer("native"):
                same(outputs, layers(*data(seed)))
            same(arguments[2], data(seed)[2])


def test_a_compiled_function_in_a_captured_graph():
    def function(x: Tensor, w: Tensor) -> Tensor:
        return ir.ops.rms_norm(x * 2, w, 1e-6) + 1

    compiled = torch.compile(function, backend="irframework")
    x, w = torch.randn(5, HIDDEN, device="cuda"), torch.ones(HIDDEN, device="cuda")
    with torch.no_grad():
        graph, output = captured(compiled, (x, w))
        x.normal_()
        graph.replay()
        same(output, function(x, w))


# --- mode="reduce-overhead" ------------------------------------------------------------------------------------------


def model(x: Tensor, r: Tensor, w: Tensor, positions: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    y, r = ir.ops.fused_add_rms_norm.maybe_inplace(x * 1, r * 1, w, 1e-6)
    y = torch.cat((ir.ops.silu_and_mul(y), ir.ops.gelu_and_mul(y)), -1)
    y = ir.ops.rms_norm(x=y, weight=w, epsilon=1e-6)
    q, k = ir.ops.rotary_embedding(positions, y, r, cache, 16)
    return y, r, q, k


def data_of(rows: int, seed: int = 0) -> tuple[Tensor, ...]:
    torch.manual_seed(100 * rows + seed)
    x, r = torch.randn(rows, HIDDEN, device="cuda"), torch.randn(rows, HIDDEN, device="cuda")
    return x, r, torch.ones(HIDDEN, device="cuda"), torch.arange(rows, device="cuda") % 8, torch.randn(8, 8).cuda()


@BACKENDS
@PROVIDERS
def test_reduce_overhead_uses_graphs_and_is_right_every_time(backend, provider):
    function = torch.compile(model, backend=backend, mode="reduce-overhead")
    with torch.no_grad(), prefer(available(provider)):
        for seed in range(5):
            arguments = data_of(6, seed)
            torch.compiler.cudagraph_mark_step_begin()
            got = function(*copies(arguments))
            with prefer("native"):
                same(got, model(*arguments))
    assert counters["inductor"]["cudagraph_skips"] == 0


@BACKENDS
@PROVIDERS
def test_reduce_overhead_with_donated_inputs(backend, provider):
    """What is given away may be overwritten; what is not stays; every call is right, whoever owns the memory."""

    def function(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y, r = ir.ops.fused_add_rms_norm.maybe_inplace(x, r, w, 1e-6)
        return ir.ops.fused_add_rms_norm.maybe_inplace(y, r, w, 1e-6)

    compiled = torch.compile(function, backend=backend, mode="reduce-overhead")
    with torch.no_grad(), prefer(available(provider)):
        for seed in range(5):
            x, r, w, *_ = data_of(6, seed)
            with prefer("native"):
                want = function(x.clone(), r.clone(), w)
            kept = w.clone()
            torch.compiler.cudagraph_mark_step_begin()
            same(compiled(x, r, w), want)
            same(w, kept)
        x, r, w, *_ = data_of(6, 9)  # the same tensors again, with new data in them
        for seed in range(10, 13):
            x.copy_(data_of(6, seed)[0])
            r.copy_(data_of(6, seed)[1])
            with prefer("native"):
                want = function(x.clone(), r.clone(), w)
            torch.compiler.cudagraph_mark_step_begin()
            same(compiled(x, r, w), want)


@BACKENDS
def test_reduce_overhead_with_an_output_that_is_donated_to_the_next_call(backend):
    """A decoding loop: the residual that one graph returns is given away to the next run of the same graph."""

    def step(x: Tensor, r: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return ir.ops.fused_add_rms_norm.maybe_inplace(x, r, w, 1e-6)

    compiled = torch.compile(step, backend=backend, mode="reduce-overhead")
    x, r, w, *_ = data_of(6)
    with torch.no_grad():
        y, s, want_y, want_s = x.clone(), r.clone(), x.clone(), r.clone()
        for _ in range(6):
            with prefer("native"):
                want_y, want_s = step(want_y, want_s, w)
            with prefer("overwriting"):
                torch.compiler.cudagraph_mark_step_begin()
                y, s = (t.clone() for t in compiled(y, s, w))
            same((y, s), (want_y, want_s))


@BACKENDS
def test_reduce_overhead_with_a_users_own_mutation(backend):
    def function(x: Tensor, count: Tensor) -> Tensor:
        count.add_(1)
        return ir.ops.rms_norm(x, None, 1e-6) * count

    compiled = torch.compile(function, backend=backend, mode="reduce-overhead")
    count, x = torch.zeros((), device="cuda"), torch.randn(4, HIDDEN, device="cuda")
    with torch.no_grad():
        for number in range(1, 6):
            torch.compiler.cudagraph_mark_step_begin()
            same(compiled(x, count), ir.ops.rms_norm(x, None, 1e-6) * number)
            assert count.item() == number


@BACKENDS
def test_reduce_overhead_for_several_sizes_and_priorities(backend):
    function = torch.compile(model, backend=backend, mode="reduce-overhead", dynamic=False)
    with torch.no_grad():
        for _ in range(3):
            for rows in (3, 6):
                for provider in ("native", "overwriting"):
                    with prefer(provider):
                        torch.compiler.cudagraph_mark_step_begin()
                        got = function(*data_of(rows))
                    with prefer("native"):
                        same(got, model(*data_of(rows)))


@BACKENDS
def test_reduce_overhead_training(backend):
    function = torch.compile(model, backend=backend, mode="reduce-overhead")
    for seed in range(4):
        arguments = data_of(5, seed)
        inputs = [a.requires_grad_() for a in arguments[:3]]
        want = torch.autograd.grad(sum(t.sin().sum() for t in model(*arguments)), inputs)
        torch.compiler.cudagraph_mark_step_begin()
        got = torch.autograd.grad(sum(t.sin().sum() for t in function(*arguments)), inputs)
        same(got, want)


# --- what other files test on the CPU --------------------------------------------------------------------------------


@all_calls_and_providers(kernels="triton")
def test_one_compile_serves_every_batch_size(call: Call, provider: str):
    compiles = []

    def backend(module: Any, inputs: Any) -> Any:
        compiles.append(module)
        return lowered(module, inputs)

    function = torch.compile(lambda *a: call.form(*a), backend=backend, fullgraph=True)
    with torch.no_grad(), prefer(available(provider)):
        for rows in (17, 2, 5):
            arguments = call.arguments(rows, "cuda")
            given = copies(arguments)
            for position, dimension in call.batch.items():
                if given[position] is not None:
                    torch._dynamo.mark_dynamic(given[position], dimension)
            same(function(*given), expected(call, arguments))
        assert len(compiles) == 1
        for rows in (1, 0):
            arguments = call.arguments(rows, "cuda")
            same(function(*copies(arguments)), expected(call, arguments))


@BACKENDS
@PROVIDERS
def test_inductor_compiles_no_size_again(backend, provider):
    function = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    with torch.no_grad(), prefer(available(provider)):
        same(function(*data_of(17)), model(*data_of(17)))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for rows in (2, 33, 11):
                got = function(*data_of(rows))
                with prefer("native"):
                    same(got, model(*data_of(rows)))


def layout(tensor: Tensor) -> Any:
    """Inductor itself gives tensors without elements other strides than eager torch does."""
    return tensor.shape, tensor.dtype, tensor.stride() if tensor.numel() else None


@BACKENDS
@PROVIDERS
def test_no_rows_after_some(backend, provider):
    function = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad(), prefer(available(provider)):
        for rows in (4, 0, 1, 4):
            got, want = function(*data_of(rows)), model(*data_of(rows))
            same(got, want)
            assert [layout(t) for t in got] == [layout(t) for t in want]


@all_calls_and_providers(kernels="triton")
def test_exported_then_lowered_equals_eager(call: Call, provider: str):
    class One(torch.nn.Module):
        def forward(self, *arguments: Any) -> Any:
            return call.form(*arguments)

    available(provider)
    arguments = call.arguments(5, "cuda")
    rows = {position: {dim: Dim.DYNAMIC} for position, dim in call.batch.items() if arguments[position] is not None}
    with torch.no_grad():
        program = torch.export.export(
            One(), copies(arguments), dynamic_shapes=(tuple(rows.get(p) for p in range(len(arguments))),)
        )
        with prefer(provider):
            module = ir.compiler.lower(program.run_decompositions({}).module())
        for size in (5, 9):
            arguments = call.arguments(size, "cuda")
            same(module(*copies(arguments)), expected(call, arguments))


@pytest.mark.parametrize("provider", ["native", "triton", "overwriting"])
def test_vmap_of_a_donating_call_writes_nowhere(provider):
    x, r = torch.randn(2, 3, 4, HIDDEN, device="cuda")
    w = torch.ones(HIDDEN, device="cuda")
    want = ir.ops.fused_add_rms_norm.native(x, r, w, 1e-6)
    kept = x.clone(), r.clone()
    with torch.no_grad(), only("fused_add_rms_norm", available(provider)):
        for _ in range(3):
            ir.ops.fused_add_rms_norm.maybe_inplace(x.clone(), r.clone(), w, 1e-6)
            same(vmap(lambda x, r: ir.ops.fused_add_rms_norm.maybe_inplace(x, r, w, 1e-6))(x, r), want)
    same((x, r), kept)


def test_a_copy_of_a_compiled_model_is_independent():
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(HIDDEN, device="cuda"))
            self.norm = ir.ops.rms_norm

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x, self.weight, 1e-6)

    compiled = torch.compile(Norm(), backend="irframework", mode="reduce-overhead")
    x = torch.randn(4, HIDDEN, device="cuda")
    with torch.no_grad():
        want = compiled(x).clone()
        other = copy.deepcopy(compiled)
        other._orig_mod.weight.data *= 2
        same(other(x), want * 2)
        same(compiled(x), want)
