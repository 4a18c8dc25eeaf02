"""Products of few rows with a gate behind them, run by Triton's interpreter on the CPU."""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("matrices_of_bfloat16")]

HALVES = (torch.float16, torch.bfloat16)
SIZES = ((64, 32), (100, 7), (40, 33), (2100, 3))  # elements of a row, columns: whole tiles, and parts of them


@pytest.fixture
def launch():
    from irframework_triton_kernels import launch

    return launch


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def arguments(rows: int, length: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return random(rows, length, dtype=dtype), (random(2 * hidden, length, seed=1) / length**0.5).to(dtype)


def assert_gated(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """Against float64. The interpreter cuts what does not fit in bfloat16, where a device rounds it."""
    wanted = ir.ops.linear_silu_and_mul.native(x.double(), weight.double())
    assert (y.shape, y.dtype) == (wanted.shape, x.dtype)
    close = {"atol": 0.05, "rtol": 0.05} if x.dtype is torch.bfloat16 else {"atol": 0.01, "rtol": 0.005}
    torch.testing.assert_close(y.double(), wanted, **close)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 2, 17, 64, 129])
@pytest.mark.parametrize(("length", "hidden"), SIZES)
def test_rows_are_multiplied_and_gated(launch, rows, length, hidden, dtype):
    x, weight = arguments(rows, length, hidden, dtype)
    assert_gated(launch.linear_silu_and_mul(x, weight), x, weight)


@pytest.mark.parametrize("rows", [1, 5])
def test_rows_and_weights_may_lie_apart(launch, rows):
    x, weight = random(2, rows, 3, 90)[:, :, 1, 7:71].half(), random(40, 90, seed=1)[:, 3:67].half() / 8
    x = x[0] if rows == 1 else x
    y = launch.linear_silu_and_mul(x, weight)
    assert_gated(y, x, weight)
    assert y.is_contiguous()


@pytest.mark.parametrize(("rows", "length", "hidden"), [(0, 16, 8), (3, 0, 8), (1, 0, 8), (3, 16, 0)])
def test_nothing_is_multiplied_to_nothing(launch, rows, length, hidden):
    x, weight = torch.ones(rows, length).half(), torch.ones(2 * hidden, length).half()
    y = launch.linear_silu_and_mul(x, weight)
    assert torch.equal(y, torch.zeros(rows, hidden).half())


@pytest.mark.parametrize("turn", [0, 1, 5])
@pytest.mark.parametrize("columns", [16, 64])
def test_a_tile_may_be_given_and_its_programs_begin_anywhere_in_a_row(launch, columns, turn):
    from irframework_triton_kernels.tiles import ProductTile

    x, weight = arguments(20, 100, 50, torch.float16)
    tile = ProductTile(32, 32, False, 4, stages=2, columns=columns, turn=turn)
    assert_gated(launch.linear_silu_and_mul(x, weight, tile=tile), x, weight)


@pytest.mark.parametrize("rows", [1, 3, 33, 64, 129])
@pytest.mark.parametrize(("length", "hidden"), [(64, 32), (144, 48), (2064, 16)])
def test_codes_are_multiplied_gated_and_quantised(launch, rows, length, hidden):
    x, weight = arguments(rows, length, hidden, torch.float32)
    x_scale, weight_scale, scale = (torch.tensor([each]) for each in (1 / 32, 1 / 1024, 1 / 64))
    codes = ir.ops.static_quant_fp8.native(x, x_scale), ir.ops.static_quant_fp8.native(weight, weight_scale)
    q = launch.scaled_linear_silu_and_mul_static_quant_fp8(*codes, x_scale, weight_scale, scale)
    wanted = ir.ops.scaled_linear_silu_and_mul_static_quant_fp8.native(*codes, x_scale, weight_scale, scale)
    assert (q.shape, q.dtype) == (wanted.shape, torch.float8_e4m3fn)
    torch.testing.assert_close(q.float(), wanted.float(), rtol=0.13, atol=2.0**-4)  # the next code


@pytest.mark.parametrize("processors", [84, 132, 304])
@pytest.mark.parametrize("memory", [65536, 101376, 166912, 232448])
def test_tiles_fit_into_shared_memory(processors, memory):
    from irframework_triton_kernels.tiles import MOST_PRODUCT_ROWS, product_tile

    assert product_tile(MOST_PRODUCT_ROWS + 1, 4096, 14336, 2, processors, memory) is None
    for rows in (1, 2, 16, 17, 32, 33, 64, 65, 128):
        for length, hidden in ((576, 1536), (4096, 1792), (4096, 14336), (8192, 28672), (100, 7)):
            for element in (1, 2):
                tile = product_tile(rows, length, hidden, element, processors, memory)
                if tile is None:
                    assert rows > 16
                    continue
                assert tile.rows >= rows
                stage = tile.block * element * (tile.rows + 2 * tile.columns)
                assert rows == 1 or (tile.stages >= 1 and tile.stages * stage <= memory)
                assert tile.block * element >= 16 or rows == 1
