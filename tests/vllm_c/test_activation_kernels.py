"""silu_and_mul and gelu_and_mul of the C++ kernels, straight through their torch ops."""

import pytest
import torch
from reference import activation, assert_near_exact, exact_activation, exact_gated, native_gated
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [1, 3, 33, 576, 8192, 16385]
NAMES = ["silu", "none", "tanh"]


def gated(x: Tensor, name: str) -> Tensor:
    ops = torch.ops.irframework_vllm_c
    return ops.silu_and_mul.default(x) if name == "silu" else ops.gelu_and_mul.default(x, name == "tanh")


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).mul(3).to(dtype)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gated_activation_is_close_to_float64(isa: str, name: str, dtype: torch.dtype, length: int) -> None:
    x = normal(4, 2 * length, dtype=dtype)
    assert_near_exact(gated(x, name), exact_gated(x, name), 100 if dtype == torch.float32 else 1.6, x[:, length:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_activation_is_about_as_close_to_float64_as_torch_or_closer(isa: str, name: str, dtype: torch.dtype) -> None:
    gate = torch.linspace(-12, 12, 100_001).to(dtype)[None]
    got = gated(torch.cat((gate, torch.ones_like(gate)), dim=-1), name)
    exact = exact_activation(gate, name)
    error, native_error = ((value.double() - exact).abs().max() for value in (got, activation(gate, name)))
    assert error <= native_error * 1.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_silu_and_mul_rounds_where_native_rounds(isa: str, dtype: torch.dtype) -> None:
    x = normal(50, 2000, dtype=dtype)
    assert (gated(x, "silu") != native_gated(x, "silu")).float().mean() < 1e-3


@pytest.mark.parametrize("name", NAMES)
def test_extremes_behave_as_native(isa: str, name: str) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0, 1e4, -1e4, torch.nan])
    x = torch.cat((gate, torch.ones_like(gate)))
    torch.testing.assert_close(gated(x, name), native_gated(x, name), equal_nan=True, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 8), (3, 0), (0,)])
def test_gated_activation_of_nothing_is_empty(name: str, shape: tuple[int, ...]) -> None:
    assert gated(torch.empty(shape), name).shape == (*shape[:-1], shape[-1] // 2)


@pytest.mark.parametrize(
    "view",
    [lambda t: t[:, :, 3:41], lambda t: t.transpose(0, 1), lambda t: t[::2, 1::3], lambda t: t[:1].expand(4, -1, -1)],
    ids=["columns", "transposed", "steps", "repeated"],
)
def test_gated_activation_reads_any_leading_strides(view, isa: str) -> None:
    x = view(normal(4, 6, 50, dtype=torch.float32))
    got = gated(x, "silu")
    torch.testing.assert_close(got, native_gated(x, "silu"))
    assert got.is_contiguous()


@pytest.mark.parametrize("name", NAMES)
def test_large_outputs_agree_with_small_ones(isa: str, name: str) -> None:
    x = normal(1030, 2 * 8192, dtype=torch.float32)
    got = gated(x, name)
    for rows in (slice(0, 2), slice(-2, None)):
        assert torch.equal(got[rows], gated(x[rows], name))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(2, 7), "last dimension of x must be even"),
        (torch.ones(2, 8, dtype=torch.float64), "x must be float32, bfloat16 or float16"),
        (torch.ones(8, 4).t(), "x must be contiguous in its last dimension"),
        (torch.ones(()), "x must have at least 1 dimension"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_gated_activation_says_what_it_does_not_take(name: str, x: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        gated(x, name)
