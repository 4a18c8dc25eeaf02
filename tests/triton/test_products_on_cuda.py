"""Products with a gate behind them on a CUDA device, at sizes of models: against float64, in graphs and compiled."""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("only_triton"),
]

HALVES = (torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
ROWS = (1, 2, 16, 17, 40, 64, 100, 128, 129, 500)  # each tile, whole and in part, and what torch multiplies
SIZES = ((576, 1536), (4096, 14336), (4096, 1792), (2064, 1000), (4096, 24))  # elements of a row, columns


@pytest.fixture
def only_triton():
    with ir.priority(dict.fromkeys(("linear_silu_and_mul", "scaled_linear_silu_and_mul_static_quant_fp8"), "triton")):
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def values(rows: int, length: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return random(rows, length, dtype=dtype), (random(2 * hidden, length, seed=2) / length**0.5).to(dtype)


def codes(rows: int, length: int, hidden: int) -> tuple[Tensor, ...]:
    """Of values with a deviation of 8, whose product has one of 1, and is divided by 1/64 in the end."""
    scales = torch.tensor([[0.125], [0.125 / length**0.5], [1 / 64]], device="cuda")
    x, weight = (random(count, length, seed=count).mul(8).to(FP8) for count in (rows, 2 * hidden))
    return x, weight, *scales


def assert_gated(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """Within some roundings of a product, of its gate, and of what they come to."""
    wanted = ir.ops.linear_silu_and_mul.native(x.double(), weight.double())
    assert (y.shape, y.dtype) == (wanted.shape, x.dtype)
    few = 4 * torch.finfo(x.dtype).eps
    torch.testing.assert_close(y.double(), wanted, rtol=few, atol=few)


def assert_coded(q: Tensor, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, scale: Tensor) -> None:
    """The code of the exact value, or the next one to it."""
    exact = ir.ops.linear_silu_and_mul.native(x.double() * x_scale.double(), weight.double() * weight_scale.double())
    assert (q.shape, q.dtype) == (exact.shape, FP8)
    wanted = (exact / scale.double()).clamp(-448, 448).float().to(FP8)
    torch.testing.assert_close(q.double(), wanted.double(), rtol=0.13, atol=2.0**-4)
    assert (q.view(torch.uint8) == wanted.view(torch.uint8)).float().mean() > 0.9


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("length", "hidden"), SIZES)
def test_rows_are_multiplied_and_gated(length, hidden, dtype):
    for rows in ROWS:
        x, weight = values(rows, length, hidden, dtype)
        assert_gated(ir.ops.linear_silu_and_mul(x, weight), x, weight)


@pytest.mark.parametrize(("length", "hidden"), [(576, 1536), (4096, 14336), (4096, 1792), (2064, 1008)])
def test_codes_are_multiplied_gated_and_quantised(length, hidden):
    for rows in ROWS:
        given = codes(rows, length, hidden)
        assert_coded(ir.ops.scaled_linear_silu_and_mul_static_quant_fp8(*given), *given)


@pytest.mark.parametrize("rows", ROWS)
def test_rows_and_weights_may_lie_apart_and_begin_anywhere(rows):
    x = random(rows, 3, 641, dtype=torch.bfloat16)[:, 1, 1:577]
    weight = (random(3072, 640, seed=2) / 24).bfloat16()[:, 3:579]
    assert_gated(ir.ops.linear_silu_and_mul(x, weight), x, weight)


def test_a_weight_may_lie_as_far_apart_as_32_bits_do_not_count():
    memory = torch.empty(31 * 2**27 + 64, dtype=torch.float16, device="cuda")
    weight = memory.as_strided((32, 64), (2**27, 1))
    weight.copy_(random(32, 64, seed=2) / 8)
    for rows in (1, 16):
        x = random(rows, 64, dtype=torch.float16)
        assert_gated(ir.ops.linear_silu_and_mul(x, weight), x, weight.contiguous())


@pytest.mark.parametrize("shape", [(0, 4096), (2, 0, 4096), (2, 3, 4096), (2, 100, 4096), (4096,)])
def test_there_may_be_no_rows_and_any_rank(shape):
    x, weight = random(*shape, dtype=torch.bfloat16), values(1, 4096, 512, torch.bfloat16)[1]
    y = ir.ops.linear_silu_and_mul(x, weight)
    assert y.is_contiguous()
    assert_gated(y, x, weight)


@pytest.mark.parametrize("rows", [1, 16, 64, 128, 129])
def test_a_graph_gives_what_calls_give(rows):
    given, coded = values(rows, 4096, 14336, torch.bfloat16), codes(rows, 4096, 14336)
    calls = (
        lambda: ir.ops.linear_silu_and_mul(*given),
        lambda: ir.ops.scaled_linear_silu_and_mul_static_quant_fp8(*coded),
    )
    expected = [call().view(torch.uint8) for call in calls]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = [call().view(torch.uint8) for call in calls]
    for _ in range(3):
        for each in got:
            each.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, got, expected))


def test_one_compile_takes_every_number_of_rows():
    torch._dynamo.reset()
    weight = values(1, 4096, 1792, torch.bfloat16)[1]
    compiled = torch.compile(lambda x: ir.ops.linear_silu_and_mul(x, weight), backend="irframework", fullgraph=True)
    first = random(7, 4096, dtype=torch.bfloat16)
    torch._dynamo.mark_dynamic(first, 0)
    compiled(first)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for rows in ROWS[1:]:
            x = random(rows, 4096, dtype=torch.bfloat16)
            assert torch.equal(compiled(x), ir.ops.linear_silu_and_mul(x, weight))


def test_plain_torch_is_raised_with_the_product():
    torch._dynamo.reset()
    x, weight = values(16, 4096, 1792, torch.bfloat16)

    def gated(x: Tensor) -> Tensor:
        gate, up = torch.nn.functional.linear(x, weight).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    with torch.inference_mode():
        y = torch.compile(gated, backend="irframework", fullgraph=True)(x)
    report = ir.last_report()
    assert report is not None
    assert dict(report.fusions) == {"linear_silu_and_mul": 1}
    assert_gated(y, x, weight)
