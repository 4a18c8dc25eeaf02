"""Scales for a tensor or a group, int8, and the way back, straight through their torch ops: codes bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from irframework_vllm_c import cpu_only
from torch import Tensor

import irframework as ir

KERNELS = torch.ops.irframework_vllm_c
FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SPECIAL = [0.0, -0.0, 1e-42, 1e-7, torch.inf, -torch.inf, torch.nan]


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).mul(3).to(dtype)


def assert_same(got: tuple[Tensor, ...] | Tensor, want: tuple[Tensor, ...] | Tensor) -> None:
    """NaN equal to NaN, whatever its bits."""
    pairs = zip(got, want, strict=True) if isinstance(got, tuple) else [(got, want)]
    for index, (a, b) in enumerate(pairs):
        assert (a.dtype, a.shape, a.is_contiguous()) == (b.dtype, b.shape, True)
        a, b = a.float(), b.float()
        assert ((a == b) | (a.isnan() & b.isnan())).all(), f"output {index} differs in {(a != b).sum()} places"
        assert torch.equal(a.signbit() & (a == 0), b.signbit() & (b == 0))


# ---- one scale for the tensor --------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 33, 576, 16385])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_gets_native_s_scale_and_codes(isa: str, dtype: torch.dtype, length: int) -> None:
    x = normal(5, length, dtype=dtype)
    assert_same(KERNELS.tensor_quant_fp8.default(x), ir.ops.tensor_quant_fp8.native(x))


@pytest.mark.parametrize("place", [0, 5000, -1])
def test_the_largest_magnitude_is_found_in_any_block(isa: str, place: int) -> None:
    x = torch.full((9999,), 0.25)
    x[place] = -7
    assert KERNELS.tensor_quant_fp8.default(x)[1] == 7 / torch.tensor(448.0)


@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_with_special_values_behaves_as_native(isa: str, dtype: torch.dtype, value: float) -> None:
    x = normal(3, 33, dtype=dtype)
    x[1, 17] = value
    assert_same(KERNELS.tensor_quant_fp8.default(x), ir.ops.tensor_quant_fp8.native(x))


# ---- int8 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 33, 576, 16385])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_get_native_s_int8_codes_and_scales(isa: str, dtype: torch.dtype, length: int) -> None:
    x = normal(5, length, dtype=dtype) * torch.tensor([1e-3, 1.0, 30.0, 1e3, 1e-7], dtype=dtype)[:, None]
    assert_same(KERNELS.dynamic_quant_int8.default(x), ir.ops.dynamic_quant_int8.native(x))


def test_ties_between_int8_codes_go_to_the_even_one(isa: str) -> None:
    x = torch.cat((torch.arange(-126.5, 127.0), torch.tensor([127.0])))[None]
    got, scale = KERNELS.dynamic_quant_int8.default(x)
    assert scale == 1
    assert torch.equal(got[0, :-1] % 2, torch.zeros(254, dtype=torch.int8))
    assert_same(got, x.round().to(torch.int8))


@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_int8_rows_with_special_values_behave_as_native(isa: str, dtype: torch.dtype, value: float) -> None:
    x = torch.stack((torch.full((33,), value, dtype=dtype), normal(33, dtype=dtype)))
    x[1, 17] = value
    assert_same(KERNELS.dynamic_quant_int8.default(x), ir.ops.dynamic_quant_int8.native(x))


# ---- groups --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("size", [1, 7, 32, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_get_native_s_scales_and_codes(
    isa: str, dtype: torch.dtype, size: int, power_of_two: bool, column_major: bool
) -> None:
    x = normal(2, 3, 5 * size, dtype=dtype) * torch.tensor([1e-3, 1.0, 1e3], dtype=dtype)[:, None]
    args = (x, size, column_major, power_of_two)
    assert_same(KERNELS.group_quant_fp8.default(*args), ir.ops.group_quant_fp8.native(*args))


@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_only_the_group_of_a_special_value_is_touched_by_it(isa: str, value: float, power_of_two: bool) -> None:
    x = normal(2, 96)
    x[1, 40] = value
    args = (x, 32, False, power_of_two)
    assert_same(KERNELS.group_quant_fp8.default(*args), ir.ops.group_quant_fp8.native(*args))


def test_a_scale_that_is_a_power_of_two_is_not_raised(isa: str) -> None:
    x = torch.full((1, 64), 448.0 * 0.25)
    x[0, 32:] = torch.tensor(448.0 * 0.25).nextafter(torch.tensor(torch.inf))
    scales = KERNELS.group_quant_fp8.default(x, 32, False, True)[1]
    assert scales.tolist() == [[0.25, 0.5]]


# ---- the way back --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", [FP8, torch.int8], ids=str)
def test_every_code_gets_native_s_value(isa: str, kind: torch.dtype, dtype: torch.dtype) -> None:
    q = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(kind)[None].expand(2, -1)
    for scale in (torch.tensor(1.0), torch.tensor([1e-3]), torch.tensor([[0.3], [77.0]]), torch.rand(2, 8) + 0.1):
        assert_same(KERNELS.dequant.default(q, scale, dtype, False), ir.ops.dequant.native(q, scale, dtype))


@pytest.mark.parametrize("size", [1, 7, 64, 130])
def test_the_layout_of_the_scales_follows_from_their_shape(isa: str, size: int) -> None:
    q, scale = ir.ops.group_quant_fp8.native(normal(2, 3, 4 * size), size)
    want = ir.ops.dequant.native(q, scale)
    assert_same(KERNELS.dequant.default(q, scale, torch.float32, False), want)
    columns = scale.transpose(1, 2).contiguous()
    assert_same(KERNELS.dequant.default(q, columns, torch.float32, True), want)


@pytest.mark.parametrize("wrong", [0.0, -0.0, torch.inf, -torch.inf, torch.nan])
def test_a_wrong_scale_is_refused_before_anything_is_written(wrong: float) -> None:
    q, scale, out = torch.zeros(3, 64).to(FP8), torch.ones(3, 8), torch.full((3, 64), 7.0)
    scale[2, 5] = wrong
    assert cpu_only.supported() is True
    with pytest.raises(RuntimeError, match="dequant: scale must be finite and not zero"):
        KERNELS.dequant.out(q, scale, torch.float32, False, out=out)
    assert (out == 7).all()
    with ir.priority(dequant="vllm_c"):
        ir.ops.dequant(q, torch.ones(3, 8))
        with pytest.raises(ir.errors.ArgumentError, match="Op 'dequant': argument 'scale' holds"):
            ir.ops.dequant(q, scale)


# ---- shapes --------------------------------------------------------------------------------------------------------

QUANTISING: dict[str, tuple[Any, ...]] = {
    "tensor_quant_fp8": (),
    "dynamic_quant_int8": (),
    "group_quant_fp8": (2, False, False),
}


@pytest.mark.parametrize("name", QUANTISING)
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 8), (3, 0), (0,)])
def test_nothing_gives_native_s_nothing(name: str, shape: tuple[int, ...]) -> None:
    if name == "group_quant_fp8" and shape[-1] == 0:
        got, scale = KERNELS.group_quant_fp8.default(torch.empty(shape), 2, False, False)
        assert (got.shape, scale.shape) == (shape, shape)
        return
    x = torch.empty(shape)
    assert_same(
        getattr(KERNELS, name).default(x, *QUANTISING[name]), getattr(ir.ops, name).native(x, *QUANTISING[name])
    )


def test_a_scalar_has_a_scale_of_its_own() -> None:
    x = torch.tensor(-3.0)
    assert_same(KERNELS.tensor_quant_fp8.default(x), ir.ops.tensor_quant_fp8.native(x))


@pytest.mark.parametrize(
    "view",
    [lambda t: t[:, :, 4:40], lambda t: t.transpose(0, 1), lambda t: t[::2, 1::3], lambda t: t[:1].expand(4, -1, -1)],
    ids=["columns", "transposed", "steps", "repeated"],
)
@pytest.mark.parametrize("name", QUANTISING)
def test_any_leading_strides_are_read_without_a_difference(name: str, view: Callable[[Tensor], Tensor]) -> None:
    x = view(normal(4, 6, 52))
    got = getattr(KERNELS, name).default(x, *QUANTISING[name])
    assert_same(got, getattr(KERNELS, name).default(x.contiguous(), *QUANTISING[name]))
    want = getattr(ir.ops, name).native(x, *QUANTISING[name])
    assert_same(got, tuple(each.contiguous() for each in want))


def test_codes_larger_than_the_caches_are_native_s() -> None:
    x = normal(2050, 4160)[:, :4096].to(torch.bfloat16)
    assert_same(KERNELS.group_quant_fp8.default(x, 128, True, False), ir.ops.group_quant_fp8.native(x, 128, True))
    assert_same(KERNELS.tensor_quant_fp8.default(x), ir.ops.tensor_quant_fp8.native(x))
    codes = KERNELS.dynamic_quant_int8.default(x)
    assert_same(codes, ir.ops.dynamic_quant_int8.native(x))
    assert_same(KERNELS.dequant.default(*codes, torch.bfloat16, False), ir.ops.dequant.native(*codes, torch.bfloat16))


ROWS = torch.ones(2, 8)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("tensor_quant_fp8", (ROWS.double(),), "x must be float32, bfloat16 or float16"),
        ("tensor_quant_fp8", (ROWS.t(),), "contiguous in its last dimension"),
        ("dynamic_quant_int8", (torch.ones(()),), "at least 1 dimension"),
        ("group_quant_fp8", (ROWS, 3, False, False), "group_size must divide the last dimension of x, 8, got 3"),
        ("group_quant_fp8", (ROWS, 0, False, False), "group_size must divide"),
        ("group_quant_fp8", (ROWS[0], 4, True, False), "at least 2 dimension"),
        ("dequant", (ROWS, torch.ones(()), torch.float32, False), "float8_e4m3fn or int8"),
        ("dequant", (ROWS.to(FP8), torch.ones(()).double(), torch.float32, False), "scale must be float32"),
        ("dequant", (ROWS.to(FP8), torch.ones(2, 3), torch.float32, False), "scale does not fit q"),
        ("dequant", (ROWS.to(FP8), torch.ones(2), torch.float32, False), "scale does not fit q"),
        ("dequant", (ROWS.to(FP8), torch.ones(4, 1), torch.float32, True), "scale does not fit q"),
        ("dequant", (ROWS.to(FP8), torch.ones(()), torch.float64, False), "dtype must be"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_by_name(name: str, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name}: .*{message}"):
        getattr(KERNELS, name).default(*args)


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("group_quant_fp8", (ROWS, 3), "group_size is 3"),
        ("group_quant_fp8", (ROWS[0], 4, True), "two dimensions"),
        ("dequant", (ROWS.to(FP8), torch.ones(()), torch.float64), "dtype is torch.float64"),
        ("dequant", (ROWS.to(FP8), torch.ones(2)), "one number"),
        ("dequant", (ROWS.to(FP8), torch.ones(2, 3)), "does not fit"),
        ("dequant", (ROWS.to(FP8), torch.ones(1, 2, 1)), "rank"),
        ("dequant", (ROWS.to(torch.float8_e5m2), torch.ones(())), "q is float8_e5m2"),
    ],
)
def test_what_is_declined_has_a_reason(name: str, args: tuple[Any, ...], reason: str) -> None:
    answer = getattr(ir.ops, name).impls["vllm_c"].supports_args(*args)
    assert not answer
    assert reason in answer.reason


# ---- the `.out` overloads of all kernels of the module -------------------------------------------------------------

X, GATES = normal(6, 64), normal(6, 128)
OUTPUTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("gelu_new", "quick_gelu", "relu2", "tensor_quant_fp8", "dynamic_quant_int8"), (X,)),
    "xielu": (X, torch.ones(1), torch.ones(1), 0.5, -1e-6),
    "mul_and_silu": (GATES,),
    "fatrelu_and_mul": (GATES, 0.1),
    "swigluoai_and_mul": (GATES, 1.7, 7.0),
    "gelu_and_mul_sparse": (GATES, 1.2, True),
    "silu_mul": (X, X.flip(0)),
    "gelu_mul": (X, X.flip(0), True),
    "apply_rotary_pos_emb": (X.view(2, 3, 4, 16), X.view(2, 12, 16)[:, :3], X.view(2, 12, 16)[:, 3:6]),
    "group_quant_fp8": (X, 32, True, False),
    "dequant": (X.to(FP8), torch.ones(()), torch.bfloat16, False),
    "gemma_rms_norm": (X, X[0], 1e-6),
    "fused_add_gemma_rms_norm_functional": (X, X.flip(0), X[0], 1e-6),
}


def outputs_like(result: Tensor | tuple[Tensor, ...]) -> dict[str, Tensor]:
    if isinstance(result, Tensor):
        return {"out": torch.empty_like(result)}
    return {f"out{index}": torch.empty_like(each) for index, each in enumerate(result)}


def test_every_functional_kernel_writes_the_same_bits_to_given_memory() -> None:
    assert set(OUTPUTS) == set(cpu_only.FUNCTIONAL_KERNELS)
    assert cpu_only.supported() is True
    for name, args in OUTPUTS.items():
        want = getattr(KERNELS, name).default(*args)
        given = outputs_like(want)
        getattr(KERNELS, name).out(*args, **given)
        for output, right in zip(given.values(), (want,) if isinstance(want, Tensor) else want, strict=True):
            assert torch.equal(output.view(torch.uint8), right.view(torch.uint8)), name


@pytest.mark.parametrize("name", OUTPUTS)
def test_memory_that_does_not_fit_is_refused(name: str) -> None:
    assert cpu_only.supported() is True
    given = outputs_like(getattr(KERNELS, name).default(*OUTPUTS[name]))
    last = list(given)[-1]
    given[last] = given[last].new_empty((3, *given[last].shape))
    with pytest.raises(RuntimeError, match=f"{name}: {last} must be contiguous"):
        getattr(KERNELS, name).out(*OUTPUTS[name], **given)
