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


def tile_of(rows: int):
    """A tile for as many rows: of the interpreter's own, most would be left to torch. None for what always is."""
    from irframework_triton_kernels.product_tiles import MOST_PRODUCT_ROWS, ProductTile

    if rows == 1 or rows > MOST_PRODUCT_ROWS:
        return None
    return ProductTile(max(16, 1 << (rows - 1).bit_length()), 32, False, 4, stages=2, columns=16, turn=5)


def assert_gated(y: Tensor, x: Tensor, weight: Tensor) -> None:
    """Against float64. The interpreter cuts what does not fit in bfloat16, where a device rounds it."""
    wanted = ir.ops.linear_silu_and_mul.native(x.double(), weight.double())
    assert (y.shape, y.dtype) == (wanted.shape, x.dtype)
    close = {"atol": 0.05, "rtol": 0.05} if x.dtype is torch.bfloat16 else {"atol": 0.01, "rtol": 0.005}
    torch.testing.assert_close(y.double(), wanted, **close)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("rows", [1, 2, 17, 64, 128, 129])
@pytest.mark.parametrize(("length", "hidden"), SIZES)
def test_rows_are_multiplied_and_gated(launch, rows, length, hidden, dtype):
    x, weight = arguments(rows, length, hidden, dtype)
    assert_gated(launch.linear_silu_and_mul(x, weight, tile=tile_of(rows)), x, weight)


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
    from irframework_triton_kernels.product_tiles import ProductTile

    x, weight = arguments(20, 100, 50, torch.float16)
    tile = ProductTile(32, 32, False, 4, stages=2, columns=columns, turn=turn)
    assert_gated(launch.linear_silu_and_mul(x, weight, tile=tile), x, weight)


@pytest.mark.parametrize("rows", [1, 3, 33, 64, 129])
@pytest.mark.parametrize(("length", "hidden"), [(64, 32), (144, 48), (2064, 16)])
def test_codes_are_multiplied_gated_and_quantised(launch, rows, length, hidden):
    x, weight = arguments(rows, length, hidden, torch.float32)
    x_scale, weight_scale, scale = (torch.tensor([each]) for each in (1 / 32, 1 / 1024, 1 / 64))
    codes = ir.ops.static_quant_fp8.native(x, x_scale), ir.ops.static_quant_fp8.native(weight, weight_scale)
    given = (*codes, x_scale, weight_scale, scale)
    q = launch.scaled_linear_silu_and_mul_static_quant_fp8(*given, tile=tile_of(rows))
    wanted = ir.ops.scaled_linear_silu_and_mul_static_quant_fp8.native(*given)
    assert (q.shape, q.dtype) == (wanted.shape, torch.float8_e4m3fn)
    torch.testing.assert_close(q.float(), wanted.float(), rtol=0.13, atol=2.0**-4)  # the next code


def test_a_tile_of_fewer_rows_is_an_error(launch):
    x, weight = arguments(17, 64, 32, torch.float16)
    with pytest.raises(ValueError, match="A tile of 16 rows was given for 17 rows"):
        launch.linear_silu_and_mul(x, weight, tile=tile_of(16))


@pytest.mark.parametrize("rows", [(0,), (1,), (2, 3), (129,)])
def test_the_torch_ops_do_what_their_schemas_say_and_traces_get_what_calls_get(launch, rows):
    ops, one = torch.ops.irframework_triton_kernels, torch.ones(1)
    x, weight = random(*rows, 64).half(), random(32, 64, seed=1).half() / 8
    both = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.linear_silu_and_mul.default, (x, weight), test_utils=both)
    codes = (ir.ops.static_quant_fp8.native(each, one) for each in (x.flatten(0, -2), weight))
    op = ops.scaled_linear_silu_and_mul_static_quant_fp8.default
    torch.library.opcheck(op, (*codes, one, one, one), test_utils=both[1:])  # the other multiplies codes by numbers
