"""The quantising C++ kernels, straight through their torch ops: codes bit for bit, scales, layouts, refusals."""

import pytest
import torch
from torch import Tensor

import irframework as ir

KERNELS = torch.ops.irframework_vllm_c
FP8 = torch.float8_e4m3fn
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPSILON = 1e-5
ONE = torch.ones(1)
SMALL = torch.tensor([0.02])
HIDDEN = 33


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).mul(3).to(dtype)


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Codes compared as bytes, other numbers as they are, NaN equal to NaN."""
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    if got.dtype == FP8:
        got, want = got.view(torch.uint8), want.view(torch.uint8)
        return torch.equal(got, want)
    return bool(((got == want) | (got.isnan() & want.isnan())).all())


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert same_bits(a, b), f"output {index} differs in {(a.float() != b.float()).sum()} places"


def float32_at_every_boundary() -> Tensor:
    """All upper halves of a float32, NaNs included, with lower halves that sit on, above and below each tie."""
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    patterns = torch.cat([upper | lower for lower in (0, 1, 0x7FFF, 0x8000, 0xFFFF)])
    return (patterns - ((patterns >> 31) << 32)).to(torch.int32).view(torch.float32)


# ---- the conversion ------------------------------------------------------------------------------------------------


def test_float32_becomes_the_code_that_torch_gives(isa: str) -> None:
    x = float32_at_every_boundary()
    assert same_bits(KERNELS.static_quant_fp8.default(x, ONE), x.clamp(-448, 448).to(FP8))


def test_ties_between_codes_go_to_the_even_one(isa: str) -> None:
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    ties = (codes[1:] + codes[:-1]) / 2
    beside = torch.cat((ties.nextafter(torch.tensor(torch.inf)), ties.nextafter(torch.tensor(-torch.inf))))
    x = torch.cat((codes, ties, beside))
    x = torch.cat((x, -x))
    got = KERNELS.static_quant_fp8.default(x, ONE)
    assert same_bits(got, x.to(FP8))
    assert (got[codes.numel() : codes.numel() + ties.numel()].view(torch.uint8) % 2 == 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_16_bit_number_becomes_native_s_code(isa: str, dtype: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    assert same_bits(KERNELS.static_quant_fp8.default(x, SMALL), ir.ops.static_quant_fp8.native(x, SMALL))


@pytest.mark.parametrize("scale", [0.0, -0.0, torch.inf, -torch.inf, torch.nan])
def test_a_scale_that_is_none_is_refused(isa: str, scale: float) -> None:
    with pytest.raises(RuntimeError, match="scale must be finite and not zero"):
        KERNELS.static_quant_fp8.default(normal(3), torch.tensor(scale))


@pytest.mark.parametrize("scale", [3.7, 1e-30, 1e-42, 1e30, -0.5])
def test_any_scale_gives_native_s_codes(isa: str, scale: float) -> None:
    x = torch.cat((normal(1000), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-42])))
    got, want = KERNELS.static_quant_fp8.default(x, torch.tensor(scale)), x * (1.0 / torch.tensor(scale))
    # Of a NaN that the arithmetic makes only that it is one is defined, not its sign.
    assert same_bits(got.float(), want.clamp(-448, 448).to(FP8).float())


# ---- scales of rows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, 33, 576, 8192, 16385])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_get_native_s_scales_and_codes(isa: str, dtype: torch.dtype, length: int) -> None:
    x = normal(5, length, dtype=dtype) * torch.tensor([1e-3, 1.0, 30.0, 1e3, 1e-7], dtype=dtype)[:, None]
    assert_same(KERNELS.dynamic_quant_fp8.default(x), ir.ops.dynamic_quant_fp8.native(x))
    assert same_bits(KERNELS.static_quant_fp8.default(x, SMALL), ir.ops.static_quant_fp8.native(x, SMALL))


@pytest.mark.parametrize("length", [1, 8, 15, 40, 100])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_magnitude_is_found_wherever_it_is(isa: str, dtype: torch.dtype, place: int, length: int) -> None:
    x = torch.full((2, length), 0.25, dtype=dtype)
    x[0, place], x[1, place] = -7, 7
    assert_same(KERNELS.dynamic_quant_fp8.default(x), ir.ops.dynamic_quant_fp8.native(x))


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-42, 1e-7, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_with_special_values_behave_as_native(isa: str, dtype: torch.dtype, value: float) -> None:
    whole, one = torch.full((1, HIDDEN), value, dtype=dtype), normal(1, HIDDEN, dtype=dtype)
    one[0, 17] = value
    for x in (whole, one):
        got, want = KERNELS.dynamic_quant_fp8.default(x), ir.ops.dynamic_quant_fp8.native(x)
        assert_same([t.float() for t in got], [t.float() for t in want])
        pairs = KERNELS.silu_and_mul_dynamic_quant_fp8.default(torch.cat((x, x), -1))
        wants = ir.ops.dynamic_quant_fp8.native(KERNELS.silu_and_mul.default(torch.cat((x, x), -1)))
        assert_same([t.float() for t in pairs], [t.float() for t in wants])
        normed = KERNELS.rms_norm_dynamic_quant_fp8.default(x, None, EPSILON)
        parts = ir.ops.dynamic_quant_fp8.native(KERNELS.rms_norm.default(x, None, EPSILON))
        assert_same([t.float() for t in normed], [t.float() for t in parts])


# ---- fused ops -----------------------------------------------------------------------------------------------------


def as_tuple(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def quantised(y: Tensor, dynamic: bool) -> tuple[Tensor, ...]:
    return as_tuple(ir.ops.dynamic_quant_fp8.native(y) if dynamic else ir.ops.static_quant_fp8.native(y, SMALL))


def normed(x: Tensor, weight: Tensor | None, dynamic: bool) -> tuple[Tensor, ...]:
    if dynamic:
        return KERNELS.rms_norm_dynamic_quant_fp8.default(x, weight, EPSILON)
    return (KERNELS.rms_norm_static_quant_fp8.default(x, weight, SMALL, EPSILON),)


def added(x: Tensor, residual: Tensor, weight: Tensor | None, dynamic: bool) -> tuple[Tensor, ...]:
    if dynamic:
        return KERNELS.fused_add_rms_norm_dynamic_quant_fp8.default(x, residual, weight, EPSILON)
    return (KERNELS.fused_add_rms_norm_static_quant_fp8.default(x, residual, weight, SMALL, EPSILON),)


def gated(x: Tensor, dynamic: bool) -> tuple[Tensor, ...]:
    if dynamic:
        return KERNELS.silu_and_mul_dynamic_quant_fp8.default(x)
    return (KERNELS.silu_and_mul_static_quant_fp8.default(x, SMALL),)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("length", [1, 33, 576, 8192, 16385])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_ops_give_the_codes_of_their_parts(isa: str, dtype: torch.dtype, length: int, dynamic: bool) -> None:
    """Whatever the float32 input of the quantisation, native's quantisation of our own unfused result is it."""
    x, residual, weight = normal(5, length, dtype=dtype), normal(6, length, dtype=dtype)[1:], normal(length).to(dtype)
    assert_same(normed(x, weight, dynamic), quantised(KERNELS.rms_norm.default(x, weight, EPSILON), dynamic))
    wide = normal(3, 2 * length, dtype=dtype)
    assert_same(gated(wide, dynamic), quantised(KERNELS.silu_and_mul.default(wide), dynamic))
    y, total = KERNELS.fused_add_rms_norm_functional.default(x, residual, weight, EPSILON)
    before = x.clone()
    assert_same(added(x, residual, weight, dynamic), quantised(y, dynamic))
    assert torch.equal(x, before)
    assert torch.equal(residual, total)


@pytest.mark.parametrize("weight_dtype", [*DTYPES, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_round_where_native_rounds_before_they_quantise(
    isa: str, dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    """Squares of small integers sum exactly, so the scale is native's to the bit, and so must every rounding be."""
    x = torch.randint(-8, 9, (64, 1024), generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = None if weight_dtype is None else normal(1024, dtype=weight_dtype)
    assert_same(normed(x, weight, True), ir.ops.rms_norm_dynamic_quant_fp8.native(x, weight, EPSILON))
    assert_same(normed(x, weight, False), (ir.ops.rms_norm_static_quant_fp8.native(x, weight, SMALL, EPSILON),))
    residual = x.flip(0).contiguous()
    q, scale, total = ir.ops.fused_add_rms_norm_dynamic_quant_fp8.native(x, residual, weight, EPSILON)
    assert_same((*added(x, residual, weight, True), residual), (q, scale, total))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_silu_is_rounded_before_the_product_and_the_product_before_the_codes(isa: str, dtype: torch.dtype) -> None:
    x = normal(50, 2000, dtype=dtype)
    got, want = gated(x, False)[0], ir.ops.silu_and_mul_static_quant_fp8.native(x, SMALL)
    assert (got.float() != want.float()).float().mean() < 1e-3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_add_rms_norm_functional_writes_fresh_tensors(isa: str, dtype: torch.dtype) -> None:
    x, residual, weight = normal(7, 130, dtype=dtype), normal(8, 130, dtype=dtype)[1:], normal(130, dtype=dtype)
    before = x.clone(), residual.clone()
    y, total = KERNELS.fused_add_rms_norm_functional.default(x, residual, weight, EPSILON)
    assert all(map(torch.equal, (x, residual), before))
    KERNELS.fused_add_rms_norm.default(x, residual, weight, EPSILON)
    assert_same((y, total), (x, residual))


# ---- layouts -------------------------------------------------------------------------------------------------------

VIEWS = {
    "columns": lambda t: t[:, :, 3:41],
    "transposed": lambda t: t.transpose(0, 1),
    "steps": lambda t: t[::2, 1::3],
    "offset": lambda t: t.flatten()[1:1153].view(4, 6, 48),
    "two columns": lambda t: t[1:, :, :2],
    "repeated": lambda t: t[:1].expand(4, -1, -1),
    "row": lambda t: t[1, 2],
}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_leading_strides_are_read_without_a_difference(
    isa: str, dtype: torch.dtype, view: str, dynamic: bool
) -> None:
    x = VIEWS[view](normal(4, 6, 50, dtype=dtype))
    dense = x.contiguous()
    bare = KERNELS.dynamic_quant_fp8.default(x) if dynamic else (KERNELS.static_quant_fp8.default(x, SMALL),)
    assert_same(bare, quantised(dense, dynamic))
    assert_same(normed(x, None, dynamic), normed(dense, None, dynamic))
    assert_same(gated(x, dynamic), gated(dense, dynamic))
    residual = torch.ones_like(dense)
    assert_same(added(x, residual.clone(), None, dynamic), added(dense, residual, None, dynamic))
    assert all(t.is_contiguous() for t in (*bare, *normed(x, None, dynamic), *gated(x, dynamic)))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_the_sum_is_written_into_the_residual_s_own_strided_rows(isa: str, dynamic: bool) -> None:
    x, base = normal(4, HIDDEN), normal(8, 80)
    residual, rest = base[1::2, 5 : 5 + HIDDEN], base[::2].clone()
    expected = x + residual
    got = added(x, residual, None, dynamic)
    assert torch.equal(residual, expected)
    assert torch.equal(base[::2], rest)
    assert_same(got, quantised(KERNELS.rms_norm.default(expected, None, EPSILON), dynamic))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (4, 0), (0,)])
def test_nothing_gives_empty_codes_and_the_smallest_scale(shape: tuple[int, ...], dynamic: bool) -> None:
    x = torch.empty(shape)
    bare = KERNELS.dynamic_quant_fp8.default(x) if dynamic else (KERNELS.static_quant_fp8.default(x, SMALL),)
    native = quantised(x, dynamic)
    for got in (bare, normed(x, None, dynamic), added(x, x.clone(), None, dynamic)):
        assert_same(got, native)
    assert_same(gated(x, dynamic), quantised(x[..., : shape[-1] // 2], dynamic))


def test_a_scalar_is_quantised_with_a_scale_that_is_one() -> None:
    got = KERNELS.static_quant_fp8.default(torch.tensor(3.0), torch.tensor(2.0))
    assert (got.shape, got.float().item()) == ((), 1.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_larger_than_the_caches_agree_with_small_ones(isa: str, dtype: torch.dtype) -> None:
    x, weight = normal(1100, 8192, dtype=dtype), normal(8192, dtype=dtype)
    for call in (
        lambda t: (KERNELS.static_quant_fp8.default(t, SMALL),),
        KERNELS.dynamic_quant_fp8.default,
        lambda t: normed(t, weight, False),
        lambda t: normed(t, weight, True),
    ):
        large = call(x)
        for rows in (slice(0, 2), slice(-3, None)):
            assert_same([t[rows] for t in large], call(x[rows]))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_large_gated_outputs_agree_with_small_ones(isa: str, dynamic: bool) -> None:
    x = normal(1100, 2 * 8192, dtype=torch.bfloat16)
    large = gated(x, dynamic)
    for rows in (slice(0, 2), slice(-3, None)):
        assert_same(tuple(t[rows] for t in large), gated(x[rows], dynamic))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_row_depends_neither_on_its_batch_nor_on_the_threads(dynamic: bool) -> None:
    x, weight = normal(700, 577, dtype=torch.bfloat16), normal(577, dtype=torch.bfloat16)
    wide = normal(700, 2 * 576, dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            residual = x.flip(0).contiguous()
            results.append((*normed(x, weight, dynamic), *gated(wide, dynamic), *added(x, residual, weight, dynamic)))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert_same(other, results[0])
    alone = [normed(row, weight, dynamic) for row in x.split(1)]
    assert_same(tuple(map(torch.cat, zip(*alone, strict=True))), normed(x, weight, dynamic))


# ---- refusals ------------------------------------------------------------------------------------------------------

X = torch.ones(2, 8)
ONES = torch.ones(2, 8)


@pytest.mark.parametrize(
    ("op", "args", "message"),
    [
        ("static_quant_fp8", (X.double(), ONE), "x must be float32, bfloat16 or float16"),
        ("static_quant_fp8", (X, torch.ones(2)), r"scale must hold one float32 number, got shape \[2\]"),
        ("static_quant_fp8", (X, ONE.double()), "scale must hold one float32 number, .* another dtype"),
        ("static_quant_fp8", (X.t(), ONE), "x must be contiguous in its last dimension, got stride 8"),
        ("dynamic_quant_fp8", (torch.ones(()),), "x must have at least 1 dimension"),
        ("dynamic_quant_fp8", (X.int(),), "x must be float32, bfloat16 or float16"),
        ("dynamic_quant_fp8", (X.t(),), "x must be contiguous in its last dimension"),
        ("rms_norm_static_quant_fp8", (X, torch.ones(7), ONE, 1e-6), r"weight must have shape \[8\]"),
        ("rms_norm_static_quant_fp8", (X, None, torch.ones(0), 1e-6), "scale must hold one float32 number"),
        ("rms_norm_dynamic_quant_fp8", (X.t(), None, 1e-6), "x must be contiguous in its last dimension"),
        ("fused_add_rms_norm_static_quant_fp8", (X, X, None, ONE, 1e-6), "must not be the same memory as x"),
        ("fused_add_rms_norm_static_quant_fp8", (X, X.half(), None, ONE, 1e-6), "must have the dtype of x"),
        ("fused_add_rms_norm_static_quant_fp8", (X, ONES, None, ONES[1, 3], 1e-6), "nor overlap it"),
        ("fused_add_rms_norm_static_quant_fp8", (X, ONES, ONES[1], ONE, 1e-6), "nor overlap it"),
        ("fused_add_rms_norm_dynamic_quant_fp8", (ONES.view(1, 16)[:, 3:11], ONES[:1], None, 1e-6), "nor overlap it"),
        ("fused_add_rms_norm_dynamic_quant_fp8", (X, X[:1], None, 1e-6), "must have the same shape"),
        (
            "fused_add_rms_norm_dynamic_quant_fp8",
            (X, torch.ones(1, 8).expand(2, 8), None, 1e-6),
            "its rows overlap in memory",
        ),
        ("fused_add_rms_norm_functional", (X, X.half(), None, 1e-6), "must have the dtype of x"),
        ("silu_and_mul_static_quant_fp8", (X[:, :7], ONE), "last dimension of x must be even"),
        ("silu_and_mul_dynamic_quant_fp8", (X.t(),), "x must be contiguous in its last dimension"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_by_name(op: str, args: tuple[object, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as error:
        getattr(KERNELS, op).default(*args)
    assert f"irframework_vllm_c::{op}:" in str(error.value)


def test_a_residual_that_is_refused_is_not_written_to() -> None:
    x, residual = torch.ones(2, 8), torch.ones(2, 8)
    with pytest.raises(RuntimeError, match="scale must hold one"):
        KERNELS.fused_add_rms_norm_static_quant_fp8.default(x, residual, None, torch.ones(2), EPSILON)
    assert torch.equal(residual, torch.ones(2, 8))
