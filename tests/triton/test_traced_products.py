"""What a compiler sees of products with a gate: black boxes that ask how many rows there are when they run."""

import pytest
import torch
from test_traced import Tracer
from torch._subclasses.fake_tensor import FakeTensorMode

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
NAMES = ("linear_silu_and_mul", "scaled_linear_silu_and_mul_static_quant_fp8")
LENGTH, HIDDEN = 64, 32


@pytest.fixture
def asked(monkeypatch):
    """The numbers of rows that tiles were asked for; no kernel runs, and its results are zeros."""
    from irframework_triton_kernels.launch import call, products
    from irframework_triton_kernels.product_tiles import ProductTile

    seen = []

    def tile_for(x, weight):
        seen.append(x.shape[0])
        return ProductTile(16, 64, False, 4)

    monkeypatch.setattr(call, "abilities", lambda device: call.Abilities(True, True, True))
    monkeypatch.setattr(products, "_tile_for", tile_for)
    monkeypatch.setattr(products, "_gated_product", lambda x, weight, y, scales, tile: y.view(torch.uint8).zero_())
    return seen


def function(name: str):
    from irframework_triton_kernels import products

    return getattr(products, name)


def arguments(name: str, *rows: int) -> tuple[torch.Tensor, ...]:
    dtype = BF16 if name == NAMES[0] else FP8
    x, weight = torch.ones(*rows, LENGTH).to(dtype), torch.ones(2 * HIDDEN, LENGTH).to(dtype)
    return (x, weight) if name == NAMES[0] else (x, weight, *torch.ones(3, 1))


@pytest.mark.parametrize("name", NAMES)
def test_it_is_one_call_whose_trace_holds_for_every_number_of_rows(asked, name):
    from irframework.compiler.tracing import trace

    tracer = Tracer()
    x, *others = arguments(name, 8)
    fakes = [tracer.mode.from_tensor(each, static_shapes=True) for each in others]
    rows = tracer.rows(*x.shape, dtype=x.dtype)
    graph = trace(function(name), (rows, *fakes), tracer.mode).module.graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert [node.target for node in calls] == [getattr(torch.ops.irframework_triton_kernels, name).default]
    y = calls[0].meta["val"]
    assert (y.shape, y.dtype, y.is_contiguous()) == ((rows.shape[0], HIDDEN), x.dtype, True)
    assert not tracer.environment.guards
    assert asked == []


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", NAMES)
def test_one_compile_asks_at_each_call_how_many_rows_there_are(asked, name, backend):
    torch._dynamo.reset()
    function(name)(*arguments(name, 3))  # the launches are imported by the first call
    asked.clear()
    op = getattr(torch.ops.irframework_triton_kernels, name).default  # which a compiled graph has
    compiled = torch.compile(lambda *given: op(*given), backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        compiled(*arguments(name, 5))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for rows in (2, 64, 128, 129, 4000):
                y = compiled(*arguments(name, rows))
                assert (y.shape, y.stride()) == ((rows, HIDDEN), (HIDDEN, 1))
    assert asked == [5, 2, 64, 128, 129, 4000]


@pytest.mark.parametrize("rows", [(5,), (2, 3), (0,), (2, 0)])
def test_what_a_trace_returns_looks_like_what_a_call_returns(asked, rows):
    for name in NAMES if len(rows) == 1 else NAMES[:1]:
        given = arguments(name, *rows)
        real = function(name)(*given)
        mode = FakeTensorMode()
        with mode:
            fake = function(name)(*map(mode.from_tensor, given))
        for of in (torch.Tensor.size, torch.Tensor.stride, lambda tensor: tensor.dtype):
            assert of(fake) == of(real)
        assert real.shape == getattr(ir.ops, name).native(*given).shape
