"""rms_norm and fused_add_rms_norm of the C++ kernels, straight through their torch ops."""

import pytest
import torch
from reference import assert_near_exact, exact_rms_norm, native_rms_norm
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [1, 3, 33, 576, 8192, 16385]
EPSILON = 1e-5


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float = EPSILON) -> Tensor:
    return torch.ops.irframework_vllm_c.rms_norm.default(x, weight, epsilon)


def fused(x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float = EPSILON) -> None:
    torch.ops.irframework_vllm_c.fused_add_rms_norm.default(x, residual, weight, epsilon)


def normal(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_is_close_to_float64(isa: str, dtype: torch.dtype, length: int) -> None:
    x, weight = normal(5, length, dtype=dtype), normal(length, dtype=dtype)
    assert_near_exact(
        rms_norm(x, weight), exact_rms_norm(x, weight, EPSILON), roundings=4 if dtype == torch.float32 else 1.01
    )


@pytest.mark.parametrize("weight_dtype", [*DTYPES, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_rounds_where_native_rounds(isa: str, dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    """Squares of small integers sum exactly, so the scale is native's to the bit, and so must every rounding be."""
    x = torch.randint(-8, 9, (64, 1024), generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = None if weight_dtype is None else normal(1024, dtype=weight_dtype)
    torch.testing.assert_close(rms_norm(x, weight), native_rms_norm(x, weight, EPSILON), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 64), (3, 0, 64), (4, 0), (0,)])
def test_rms_norm_of_nothing_is_empty(shape: tuple[int, ...]) -> None:
    assert rms_norm(torch.empty(shape), None).shape == shape


def test_rms_norm_takes_a_single_row_without_leading_dimensions(isa: str) -> None:
    x = normal(100, dtype=torch.float32)
    torch.testing.assert_close(rms_norm(x, None), native_rms_norm(x, None, EPSILON))


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:, :, 3:40],
        lambda t: t.transpose(0, 1),
        lambda t: t[::2, 1::3],
        lambda t: t[1:, :, :1],
        lambda t: t.expand(2, *t.shape),
        lambda t: t[:1].expand(4, -1, -1),
        lambda t: t.as_strided((3, 5, 16), (7, 2, 1), 5),
        lambda t: t.unflatten(1, (2, 3)).permute(2, 0, 1, 3),
    ],
    ids=["columns", "transposed", "steps", "one column", "expanded", "repeated", "overlapping", "permuted"],
)
def test_rms_norm_reads_any_leading_strides(view, isa: str) -> None:
    x = view(normal(4, 6, 50, dtype=torch.float32))
    got = rms_norm(x, None)
    torch.testing.assert_close(got, native_rms_norm(x, None, EPSILON))
    assert got.is_contiguous()


def test_rms_norm_takes_a_weight_with_steps() -> None:
    x, weight = normal(3, 40, dtype=torch.float32), normal(120, dtype=torch.float32)[::3]
    torch.testing.assert_close(rms_norm(x, weight), native_rms_norm(x, weight, EPSILON))


def test_rms_norm_leaves_its_input_alone() -> None:
    x = normal(4, 64, dtype=torch.bfloat16)
    before = x.clone()
    rms_norm(x, None)
    assert torch.equal(x, before)


def test_rms_norm_of_a_row_does_not_depend_on_the_batch(isa: str) -> None:
    x, weight = normal(600, 576, dtype=torch.float32), normal(576, dtype=torch.float32)
    whole = rms_norm(x, weight)
    alone = torch.cat([rms_norm(row, weight) for row in x.split(1)])
    assert torch.equal(whole, alone)


def test_rms_norm_of_many_rows_agrees_between_thread_counts() -> None:
    x = normal(1000, 577, dtype=torch.bfloat16)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(rms_norm(x, None))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_streams_outputs_larger_than_the_caches(isa: str, dtype: torch.dtype) -> None:
    x, weight = normal(2100, 8192, dtype=dtype), normal(8192, dtype=dtype)
    got = rms_norm(x, weight)
    for rows in (slice(0, 3), slice(-3, None)):
        assert torch.equal(got[rows], rms_norm(x[rows], weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_keeps_nan_and_infinity(isa: str, dtype: torch.dtype) -> None:
    x = torch.ones(3, 40, dtype=dtype)
    x[0, 7] = torch.nan
    x[1, 7] = torch.inf
    torch.testing.assert_close(rms_norm(x, None), native_rms_norm(x, None, EPSILON), equal_nan=True)


@pytest.mark.parametrize("bits", [-1, 0x7FFF])
@pytest.mark.parametrize("nan_in", ["x", "weight"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weight_dtype", DTYPES, ids=str)
def test_rounding_keeps_every_nan(
    isa: str, weight_dtype: torch.dtype, dtype: torch.dtype, nan_in: str, bits: int
) -> None:
    """A rounding bias added to a NaN with all bits set would make it a zero."""
    x, weight = torch.ones(2, 80, dtype=dtype), torch.ones(80, dtype=weight_dtype)
    target = x if nan_in == "x" else weight
    pattern = bits if target.element_size() == 2 else (bits << 16) | 0xFFFF
    wide = torch.int16 if target.element_size() == 2 else torch.int32
    target.view(wide).fill_(pattern)
    assert target.isnan().all()
    assert rms_norm(x, weight).isnan().all()


def test_every_half_survives_the_conversions(isa: str) -> None:
    """All 65536 patterns, subnormals included: scale 1 (epsilon makes the mean exactly 1) returns x itself."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = x[x.isfinite() & (x.abs() < 1)]
    row = torch.zeros(finite.numel(), 1, dtype=torch.float16)
    row[:, 0] = finite
    torch.testing.assert_close(rms_norm(row, None, 1.0), native_rms_norm(row, None, 1.0), rtol=0, atol=2**-24)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_add_rms_norm_writes_the_sum_and_its_norm(isa: str, dtype: torch.dtype, length: int) -> None:
    x, residual, weight = (
        normal(5, length, dtype=dtype),
        normal(6, length, dtype=dtype)[1:],
        normal(length, dtype=dtype),
    )
    total = x + residual
    exact = exact_rms_norm(total, weight, EPSILON)
    fused(x, residual, weight)
    assert torch.equal(residual, total)
    assert_near_exact(x, exact, roundings=4 if dtype == torch.float32 else 1.01)


def test_fused_add_rms_norm_writes_into_strided_rows(isa: str) -> None:
    base_x, base_r = normal(4, 6, 50, dtype=torch.float32), normal(6, 4, 80, dtype=torch.float32)
    x, residual = base_x[1::2, :, 5:38], base_r.transpose(0, 1)[:2, :, :33]
    expected_r = x + residual
    expected_y = native_rms_norm(expected_r, None, EPSILON)
    untouched = base_x[0].clone(), base_x[:, :, 38:].clone(), base_r[:, :, 33:].clone()
    fused(x, residual, None)
    torch.testing.assert_close(x, expected_y)
    assert torch.equal(residual, expected_r)
    assert all(map(torch.equal, untouched, (base_x[0], base_x[:, :, 38:], base_r[:, :, 33:])))


def test_fused_add_rms_norm_of_nothing_does_nothing() -> None:
    fused(torch.empty(0, 8), torch.empty(0, 8), torch.ones(8))


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.ones(2, 8, dtype=torch.float64), None, "x must be float32, bfloat16 or float16"),
        (torch.ones(2, 8, dtype=torch.int32), None, "x must be float32, bfloat16 or float16"),
        (torch.ones(4, 8).t(), None, "x must be contiguous in its last dimension, got stride 8"),
        (torch.ones(()), None, "x must have at least 1 dimension"),
        (torch.ones(2, 8), torch.ones(7), r"weight must have shape \[8\], the last dimension of x, got \[7\]"),
        (torch.ones(2, 8), torch.ones(1, 8), r"got \[1, 8\]"),
        (torch.ones(2, 8), torch.ones(()), r"got \[\]"),
        (torch.ones(2, 8), torch.ones(8, dtype=torch.float64), "weight must be float32, bfloat16 or float16"),
    ],
)
def test_rms_norm_says_what_it_does_not_take(x: Tensor, weight: Tensor | None, message: str) -> None:
    with pytest.raises(RuntimeError, match=message) as error:
        rms_norm(x, weight)
    assert "irframework_vllm_c::rms_norm" in str(error.value)


def test_fused_add_rms_norm_refuses_one_memory_for_both() -> None:
    x = torch.ones(2, 8)
    with pytest.raises(RuntimeError, match="must not be the same memory"):
        fused(x, x, None)


MEMORY = torch.ones(64)
OVERLAPPING = {
    "one row further": (MEMORY[:32].view(4, 8), MEMORY[8:40].view(4, 8), None),
    "the last element": (MEMORY[:32].view(4, 8), MEMORY[31:63].view(4, 8), None),
    "in a strided row": (MEMORY.view(4, 16)[:, :8], MEMORY[17:49].view(4, 8), None),
    "weight in x": (MEMORY[:32].view(4, 8), torch.ones(4, 8), MEMORY[4:12]),
    "weight in x_residual": (torch.ones(4, 8), MEMORY[:32].view(4, 8), MEMORY[24:32]),
    "weight in a strided row": (torch.ones(4, 8), MEMORY.view(4, 16)[:, :8], MEMORY[20:28]),
}


@pytest.mark.parametrize("case", OVERLAPPING)
def test_fused_add_rms_norm_refuses_memory_that_overlaps_what_it_writes(case: str) -> None:
    x, residual, weight = OVERLAPPING[case]
    with pytest.raises(RuntimeError, match="nor overlap it"):
        fused(x, residual, weight)
    assert (MEMORY == 1).all()


@pytest.mark.parametrize("weight", [None, MEMORY[:8]], ids=["alone", "weight"])
@pytest.mark.parametrize(
    "cut",
    [
        lambda t: (t[:, :8], t[:, 8:16]),
        lambda t: (t[:2, :8], t[2:, 8:16]),
        lambda t: (t.flatten()[:64].view(8, 8), t.flatten()[64:128].view(8, 8)),
        lambda t: (t[:1, :8], t[1:2, :8]),
        lambda t: (t.flatten()[:8], t.flatten()[8:16]),
    ],
    ids=["columns", "rows and columns", "behind each other", "one row", "vectors"],
)
def test_fused_add_rms_norm_takes_disjoint_parts_of_one_memory(cut, weight: Tensor | None) -> None:
    memory = normal(4, 64, dtype=torch.float32)
    x, residual = cut(memory)
    total = x + residual
    expected = native_rms_norm(total, weight, EPSILON)
    fused(x, residual, weight)
    torch.testing.assert_close((x, residual), (expected, total))


def test_fused_add_rms_norm_takes_a_weight_between_rows_that_it_writes() -> None:
    memory = normal(4, 64, dtype=torch.float32)
    x, residual, weight = memory[:, :8], torch.ones(4, 8), memory[1, 20:28]
    expected = native_rms_norm(x + residual, weight, EPSILON)
    fused(x, residual, weight)
    torch.testing.assert_close(x, expected)


@pytest.mark.parametrize("side", [0, 1])
def test_fused_add_rms_norm_refuses_rows_that_overlap(side: int) -> None:
    pair = [torch.ones(4, 8), torch.ones(4, 8)]
    pair[side] = torch.ones(1, 8).expand(4, 8)
    with pytest.raises(RuntimeError, match="its rows overlap in memory"):
        fused(*pair, None)


@pytest.mark.parametrize(
    ("residual", "message"),
    [
        (torch.ones(3, 8), r"same shape, got \[2, 8\] and \[3, 8\]"),
        (torch.ones(2, 8, dtype=torch.float16), "x_residual must have the dtype of x"),
        (torch.ones(8, 2).t(), "x_residual must be contiguous in its last dimension"),
    ],
)
def test_fused_add_rms_norm_says_what_it_does_not_take(residual: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        fused(torch.ones(2, 8), residual, None)
