"""The activations that only the CPU library has, straight through their torch ops: values, layouts, refusals."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from irframework_vllm_c import cpu_only
from reference import assert_near_exact
from torch import Tensor

import irframework as ir

KERNELS = torch.ops.irframework_vllm_c
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALPHAS = (torch.tensor([0.2]), torch.tensor(-1.05))
ELEMENTS: dict[str, tuple[Any, ...]] = {
    "gelu_new": (),
    "quick_gelu": (),
    "relu2": (),
    "xielu": (*ALPHAS, 0.5, -1e-6),
}
GATED: dict[str, tuple[Any, ...]] = {
    "mul_and_silu": (),
    "fatrelu_and_mul": (0.1,),
    "swigluoai_and_mul": (1.702, 2.5),
    "gelu_and_mul_sparse": (0.95, "tanh"),
}
OPS = ELEMENTS | GATED
CALLS: dict[str, Callable[..., Tensor]] = {name: getattr(cpu_only, name) for name in OPS}


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).mul(3).to(dtype)


def exact(name: str, x: Tensor) -> Tensor:
    """In float64, in forms that do not cancel in the lower tail."""
    h = x.double()
    if name == "gelu_new":
        return h * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (h + 0.044715 * h**3))
    native: Tensor = getattr(ir.ops, name).native(h, *(a.double() if isinstance(a, Tensor) else a for a in OPS[name]))
    return native


@pytest.mark.parametrize("length", [1, 33, 576, 16385])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["gelu_new", "quick_gelu", "relu2"])
def test_functions_of_an_element_are_close_to_float64(isa: str, name: str, dtype: torch.dtype, length: int) -> None:
    x = normal(3, length, dtype=dtype)
    assert_near_exact(CALLS[name](x), exact(name, x), 100 if dtype == torch.float32 else 0.51)


@pytest.mark.parametrize("name", ["quick_gelu", "relu2", "xielu", *GATED])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_inputs_of_the_generator_give_native_s_answers(isa: str, name: str, dtype: torch.dtype) -> None:
    op = getattr(ir.ops, name)
    made = op.input_generator(shape=(5, 2, 2306), dtype=dtype, device="cpu")
    for args in made if inspect.isgenerator(made) else [made]:
        got, want = CALLS[name](*args), op.native(*args)
        # Where the definition is a sum of terms the last bits of float32 are lost there too.
        close = {"rtol": 2e-5, "atol": 2e-6}
        if dtype != torch.float32:
            # What is rounded twice may be off by one each time, where the sums before it are added up otherwise.
            close = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-5}
            assert (got != want).float().mean() < 2e-3
        torch.testing.assert_close(got, want, **close)


def test_gelu_fast_has_the_factor_of_gelu_new_in_float32() -> None:
    assert torch.tensor(0.7978845608) == torch.tensor(math.sqrt(2 / math.pi))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates_and_squares_of_numbers_are_native_s_bits(isa: str, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(dtype)
    halves = torch.stack((x, x.flip(0)))
    assert torch.equal(CALLS["relu2"](x).nan_to_num(7.0), ir.ops.relu2.native(x).nan_to_num(7.0))
    for threshold in (0.0, 0.1, -0.5):
        got, want = (f(halves, threshold) for f in (CALLS["fatrelu_and_mul"], ir.ops.fatrelu_and_mul.native))
        assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*ELEMENTS, "mul_and_silu", "swigluoai_and_mul"])
def test_extremes_behave_as_native(isa: str, name: str, dtype: torch.dtype) -> None:
    x = torch.tensor([0.0, -0.0, 1e-7, -1e-7, 80.0, -80.0, 1e4, -1e4, torch.nan, torch.inf], dtype=dtype)
    x = torch.stack((x, torch.ones_like(x)), -1).flatten() if name in GATED else x
    got, want = CALLS[name](x, *OPS[name]), getattr(ir.ops, name).native(x, *OPS[name])
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-7)


@pytest.mark.parametrize("x", [-1e-4, -3e-3, -0.2, -0.4, -5.0])
def test_xielu_does_not_cancel_near_zero(isa: str, x: float) -> None:
    row = torch.full((40,), x)
    want = exact("xielu", row)
    assert ((CALLS["xielu"](row, *OPS["xielu"]).double() - want).abs() <= 4 * 2**-24 * want.abs()).all()


def test_a_sparsity_of_zero_is_gelu_and_mul(isa: str) -> None:
    x = normal(3, 66)
    assert torch.equal(CALLS["gelu_and_mul_sparse"](x, 0.0), KERNELS.gelu_and_mul.default(x, True))


def test_the_share_of_gates_that_is_asked_for_is_dropped(isa: str) -> None:
    x = torch.cat((torch.randn(2, 8192, generator=torch.Generator().manual_seed(0)), torch.ones(2, 8192)), -1)
    dropped = (CALLS["gelu_and_mul_sparse"](x, 0.8) == 0).float().mean()
    assert abs(dropped - 0.8) < 0.02


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 8), (3, 0), (0,)])
def test_nothing_gives_nothing(name: str, shape: tuple[int, ...]) -> None:
    got = CALLS[name](torch.empty(shape), *OPS[name])
    assert got.shape == (*shape[:-1], shape[-1] // 2 if name in GATED else shape[-1])


@pytest.mark.parametrize(
    "view",
    [lambda t: t[:, :, 3:41], lambda t: t.transpose(0, 1), lambda t: t[::2, 1::3], lambda t: t[:1].expand(4, -1, -1)],
    ids=["columns", "transposed", "steps", "repeated"],
)
@pytest.mark.parametrize("name", OPS)
def test_any_leading_strides_are_read_without_a_difference(name: str, view: Callable[[Tensor], Tensor]) -> None:
    x = view(normal(4, 6, 50))
    got = CALLS[name](x, *OPS[name])
    torch.testing.assert_close(got, CALLS[name](x.contiguous(), *OPS[name]))
    assert got.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPS)
def test_outputs_larger_than_the_caches_agree_with_small_ones(name: str, dtype: torch.dtype) -> None:
    x = normal(1030, 4160).to(dtype).repeat(2 if name in GATED else 1, 2 if dtype == torch.bfloat16 else 1)
    got = CALLS[name](x, *OPS[name])
    assert got.numel() * got.element_size() > 8 << 20
    for rows in (slice(0, 2), slice(-2, None)):
        torch.testing.assert_close(got[rows], CALLS[name](x[rows], *OPS[name]), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(2, 8, dtype=torch.float64), "x must be float32, bfloat16 or float16"),
        (torch.ones(8, 4).t(), "x must be contiguous in its last dimension"),
    ],
)
@pytest.mark.parametrize("name", OPS)
def test_what_the_kernels_do_not_take_is_refused(name: str, x: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        CALLS[name](x, *OPS[name])


@pytest.mark.parametrize("name", GATED)
def test_an_odd_last_dimension_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match="last dimension of x must be even"):
        CALLS[name](torch.ones(2, 7), *GATED[name])


def test_xielu_takes_one_number_each(isa: str) -> None:
    with pytest.raises(RuntimeError, match="alpha_n must hold one number"):
        CALLS["xielu"](torch.ones(4), torch.ones(1), torch.ones(2))


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("swigluoai_and_mul", (torch.ones(2, 8), 1.0, 0.0), "limit is 0.0"),
        ("gelu_and_mul_sparse", (torch.ones(2, 8), 1.0), "activation_sparsity is 1.0"),
        ("gelu_and_mul_sparse", (torch.ones(2, 8), 0.5, "exact"), "approximate is 'exact'"),
        ("mul_and_silu", (torch.ones(2, 7),), "multiple of 2"),
        ("relu2", (torch.ones(2, 7).double(),), "x is float64"),
        ("xielu", (torch.ones(2, 8), torch.ones(2), torch.ones(1)), "needs one element"),
    ],
)
def test_what_is_declined_has_a_reason(name: str, args: tuple[Any, ...], reason: str) -> None:
    answer = getattr(ir.ops, name).impls["vllm_c"].supports_args(*args)
    assert not answer
    assert reason in answer.reason
