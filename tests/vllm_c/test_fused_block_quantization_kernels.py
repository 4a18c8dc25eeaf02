"""What ends in fp8 codes with a scale for a group, and GELU's codes, straight through their torch ops: bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from irframework_vllm_c import fused
from torch import Tensor

import irframework as ir

KERNELS = torch.ops.irframework_vllm_c
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPSILON = 1e-5
SCALE = torch.full((1,), 0.02)
LAYOUTS = {"rows": (False, False), "columns": (True, False), "powers": (False, True), "both": (True, True)}


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).mul(3).to(dtype)


def assert_same(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> None:
    """NaN equal to NaN, whatever its bits."""
    for index, (a, b) in enumerate(zip(got, want, strict=True)):
        assert (a.dtype, a.shape, a.is_contiguous()) == (b.dtype, b.shape, True)
        a, b = a.float(), b.float()
        assert ((a == b) | (a.isnan() & b.isnan())).all(), f"output {index} differs in {(a != b).sum()} places"


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("size", [1, 7, 64, 128])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_get_the_codes_of_the_parts(isa: str, dtype: torch.dtype, size: int, layout: tuple[bool, bool]) -> None:
    """The quantisation is native's bit for bit (see the tests of its own kernel), and so it must be here."""
    x, residual, weight = (normal(2, 3, 5 * size, dtype=dtype), normal(2, 4, 5 * size, dtype=dtype)[:, 1:],
                           normal(5 * size, dtype=dtype))  # fmt: skip
    groups = (size, *layout)
    quantised: Callable[..., tuple[Tensor, Tensor]] = KERNELS.group_quant_fp8.default
    assert_same(
        KERNELS.rms_norm_group_quant_fp8(x, weight, EPSILON, *groups),
        quantised(KERNELS.rms_norm(x, weight, EPSILON), *groups),
    )
    wide = normal(2, 3, 10 * size, dtype=dtype)
    assert_same(KERNELS.silu_and_mul_group_quant_fp8(wide, *groups), quantised(KERNELS.silu_and_mul(wide), *groups))
    for tanh in (False, True):
        assert_same(
            KERNELS.gelu_and_mul_group_quant_fp8(wide, tanh, *groups),
            quantised(KERNELS.gelu_and_mul(wide, tanh), *groups),
        )
    y, total = KERNELS.fused_add_rms_norm_functional(x, residual, weight, EPSILON)
    before = x.clone(), residual.clone()
    got = KERNELS.fused_add_rms_norm_group_quant_fp8_functional(x, residual, weight, EPSILON, *groups)
    assert_same(got, (*quantised(y, *groups), total))
    assert all(map(torch.equal, (x, residual), before))
    target = residual.clone()
    assert_same(KERNELS.fused_add_rms_norm_group_quant_fp8(x, target, weight, EPSILON, *groups), got[:2])
    assert torch.equal(target, total)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_a_sum_in_memory_of_its_own_is_that_of_the_parts(isa: str, kind: str, dtype: torch.dtype) -> None:
    x, residual, weight = normal(5, 577, dtype=dtype), normal(6, 577, dtype=dtype)[1:], normal(577)
    scale = (SCALE,) if kind == "static" else ()
    y, total = KERNELS.fused_add_rms_norm_functional(x, residual, weight, EPSILON)
    codes = getattr(KERNELS, f"{kind}_quant_fp8")(y, *scale)
    before = x.clone(), residual.clone()
    got = getattr(KERNELS, f"fused_add_rms_norm_{kind}_quant_fp8_functional")(x, residual, weight, *scale, EPSILON)
    assert_same(got, (*(codes if kind == "dynamic" else (codes,)), total))
    assert all(map(torch.equal, (x, residual), before))


@pytest.mark.parametrize("tanh", [False, True])
@pytest.mark.parametrize("length", [1, 33, 576, 8193])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_s_codes_are_those_of_its_parts(isa: str, dtype: torch.dtype, length: int, tanh: bool) -> None:
    x = normal(4, 2 * length, dtype=dtype)
    y = KERNELS.gelu_and_mul(x, tanh)
    assert_same(
        (KERNELS.gelu_and_mul_static_quant_fp8(x, SCALE, tanh),), (KERNELS.static_quant_fp8(y, SCALE),)
    )  # fmt: skip
    assert_same(KERNELS.gelu_and_mul_dynamic_quant_fp8(x, tanh), KERNELS.dynamic_quant_fp8(y))


@pytest.mark.parametrize("layout", [(False, False), (True, True)], ids=["rows", "both"])
@pytest.mark.parametrize("weight_dtype", [*DTYPES, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_round_where_native_rounds_before_they_quantise(
    isa: str, dtype: torch.dtype, weight_dtype: torch.dtype | None, layout: tuple[bool, bool]
) -> None:
    """Squares of small integers sum exactly, so the scale is native's to the bit, and so must every rounding be."""
    x = torch.randint(-8, 9, (8, 512), generator=torch.Generator().manual_seed(1)).to(dtype)
    weight = None if weight_dtype is None else normal(512, dtype=weight_dtype)
    args = (weight, EPSILON, 128, *layout)
    assert_same(KERNELS.rms_norm_group_quant_fp8(x, *args), ir.ops.rms_norm_group_quant_fp8.native(x, *args))
    residual = x.flip(0).contiguous()
    assert_same(
        KERNELS.fused_add_rms_norm_group_quant_fp8_functional(x, residual, *args),
        ir.ops.fused_add_rms_norm_group_quant_fp8.native(x, residual, *args),
    )


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gates_are_rounded_before_the_product_and_the_product_before_the_codes(
    isa: str, dtype: torch.dtype, name: str
) -> None:
    """Where the activation is rounded to the other neighbour a code may flip; nowhere else."""
    x = normal(50, 2048, dtype=dtype)
    first = () if name == "silu_and_mul" else (True,)
    got, scales = getattr(KERNELS, f"{name}_group_quant_fp8")(x, *first, 128, False, False)
    native = getattr(ir.ops, f"{name}_group_quant_fp8").native
    want, native_scales = native(x, *(("tanh",) if first else ()))
    assert (got.float() != want.float()).float().mean() < 2e-3
    torch.testing.assert_close(scales, native_scales, atol=0, rtol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("value", [0.0, 1e-7, torch.inf, torch.nan])
def test_only_the_group_of_a_special_value_is_touched_by_it(isa: str, value: float) -> None:
    x = torch.cat((normal(2, 96), torch.ones(2, 96)), -1)
    x[1, 96 + 40] = value
    got = KERNELS.silu_and_mul_group_quant_fp8(x, 32, False, True)
    assert_same(got, KERNELS.group_quant_fp8(KERNELS.silu_and_mul(x), 32, False, True))
    assert got[1].isfinite().sum() == (6 if value == value and value != torch.inf else 5)


def test_any_leading_strides_are_read_without_a_difference(isa: str) -> None:
    base = normal(4, 6, 60, dtype=torch.bfloat16)
    first = base[:, :, :48]
    for x in (base[:, :, 4:52], first.transpose(0, 1), first[::2, 1::3], first[:1].expand(4, -1, -1)):
        dense = x.contiguous()
        for call in (
            lambda t: KERNELS.rms_norm_group_quant_fp8(t, None, EPSILON, 16, True, False),
            lambda t: KERNELS.fused_add_rms_norm_group_quant_fp8_functional(t, t, None, EPSILON, 16, True, True),
            lambda t: KERNELS.silu_and_mul_group_quant_fp8(t, 8, True, False),
            lambda t: KERNELS.gelu_and_mul_group_quant_fp8(t, True, 8, False, False),
        ):
            assert_same(call(x), call(dense))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_larger_than_the_caches_agree_with_small_ones(isa: str, dtype: torch.dtype) -> None:
    x, weight = normal(1100, 8192, dtype=dtype), normal(8192, dtype=dtype)
    wide = torch.cat((x, x.flip(0)), -1)
    for call, given in (
        (lambda t: KERNELS.rms_norm_group_quant_fp8(t, weight, EPSILON, 128, False, False), x),
        (lambda t: KERNELS.silu_and_mul_group_quant_fp8(t, 128, False, False), wide),
        (lambda t: KERNELS.gelu_and_mul_dynamic_quant_fp8(t, True), wide),
    ):
        large = call(given)
        for rows in (slice(0, 2), slice(-3, None)):
            assert_same(tuple(t[rows] for t in large), call(given[rows]))


def test_a_row_depends_neither_on_its_batch_nor_on_the_threads() -> None:
    x, weight = normal(700, 1280, dtype=torch.bfloat16), normal(640)
    threads = torch.get_num_threads()
    try:
        results = []
        for count in (1, 5):
            torch.set_num_threads(count)
            results.append(
                (
                    *KERNELS.rms_norm_group_quant_fp8(x[:, :640], weight, EPSILON, 128, False, False),
                    *KERNELS.silu_and_mul_group_quant_fp8(x, 128, False, False),
                )
            )
    finally:
        torch.set_num_threads(threads)
    assert_same(results[1], results[0])
    alone = [KERNELS.rms_norm_group_quant_fp8(row, weight, EPSILON, 128, False, False) for row in x[:, :640].split(1)]
    assert_same(tuple(map(torch.cat, zip(*alone, strict=True))), results[0][:2])


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 8), (3, 0)])
def test_nothing_gives_native_s_nothing(shape: tuple[int, ...]) -> None:
    x, wide = torch.empty(shape), torch.empty(*shape[:-1], 2 * shape[-1])
    assert_same(KERNELS.rms_norm_group_quant_fp8(x, None, EPSILON, 8, True, False),
                KERNELS.group_quant_fp8(x, 8, True, False))  # fmt: skip
    assert_same(KERNELS.silu_and_mul_group_quant_fp8(wide, 8, True, False), KERNELS.group_quant_fp8(x, 8, True, False))
    assert_same(KERNELS.gelu_and_mul_dynamic_quant_fp8(wide, True), KERNELS.dynamic_quant_fp8(x))


# ---- refusals, and the op's own words ------------------------------------------------------------------------------

X = torch.ones(2, 8)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        (
            "rms_norm_group_quant_fp8",
            (X, None, 1e-6, 3, False, False),
            "group_size must divide the last dimension of x",
        ),
        ("rms_norm_group_quant_fp8", (X[0], None, 1e-6, 4, True, False), "at least 2 dimension"),
        ("rms_norm_group_quant_fp8", (X, X[0, :7], 1e-6, 4, False, False), r"weight must have shape \[8\]"),
        ("fused_add_rms_norm_group_quant_fp8", (X, X, None, 1e-6, 4, False, False), "must not be the same memory as x"),
        ("fused_add_rms_norm_group_quant_fp8", (X, X[:1], None, 1e-6, 4, False, False), "must have the same shape"),
        (
            "fused_add_rms_norm_group_quant_fp8_functional",
            (X, X.half(), None, 1e-6, 4, False, False),
            "must have the dtype of x",
        ),
        (
            "silu_and_mul_group_quant_fp8",
            (X, 8, False, False),
            "must divide the last dimension of the codes, 4, got 8",
        ),
        ("silu_and_mul_group_quant_fp8", (X[:, :7], 1, False, False), "last dimension of x must be even"),
        ("gelu_and_mul_group_quant_fp8", (X, True, 0, False, False), "group_size must divide"),
        ("gelu_and_mul_static_quant_fp8", (X, torch.zeros(1), True), "scale must be finite and not zero"),
        ("gelu_and_mul_dynamic_quant_fp8", (X.double(), True), "x must be float32, bfloat16 or float16"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_by_name(name: str, args: tuple[Any, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"{name}: .*{message}"):
        getattr(KERNELS, name).default(*args)


@pytest.mark.parametrize(
    ("name", "good", "bad", "problem"),
    [
        ("rms_norm_group_quant_fp8", (X, None, 1e-6, 4), (X, None, 1e-6, 3), "group_size"),
        ("fused_add_rms_norm_group_quant_fp8", (X, X + 1, None, 1e-6, 4), (X, X + 1, None, 1e-6, 3), "group_size"),
        ("silu_and_mul_group_quant_fp8", (X, 4), (X, 8), "group_size"),
        ("gelu_and_mul_group_quant_fp8", (X, "tanh", 4), (X, "tanh", 3), "group_size"),
        ("gelu_and_mul_static_quant_fp8", (X, SCALE), (X, torch.zeros(1)), "'scale' holds 0.0"),
    ],
)
def test_the_ops_own_words_are_heard(name: str, good: tuple[Any, ...], bad: tuple[Any, ...], problem: str) -> None:
    op = getattr(ir.ops, name)
    with ir.priority({name: "vllm_c"}):
        assert op.dispatch(*good).provider == "vllm_c"
        op(*good)
        with pytest.raises(ir.errors.ArgumentError, match=problem):
            op(*bad)


def test_a_donated_residual_holds_the_sum() -> None:
    x, residual, weight = normal(4, 64), normal(5, 64)[1:].clone(), normal(64)
    want = x + residual
    with ir.priority(fused_add_rms_norm_group_quant_fp8="vllm_c"):
        total = ir.ops.fused_add_rms_norm_group_quant_fp8.maybe_inplace(x, residual, weight, EPSILON, 32)[2]
    assert total.data_ptr() == residual.data_ptr()
    assert torch.equal(total, want)


def test_a_model_written_with_the_parts_runs_the_fused_kernel() -> None:
    torch._dynamo.reset()
    x, residual, weight = normal(6, 256), normal(7, 256)[1:], normal(256)

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        y, total = ir.ops.fused_add_rms_norm(x, residual, weight, EPSILON)
        return *ir.ops.group_quant_fp8(y, 64, True, True), total

    with torch.no_grad():
        got = torch.compile(block, backend="irframework", fullgraph=True)(x, residual)
    assert ir.last_report().fusions == {"fused_add_rms_norm_group_quant_fp8": 1}
    assert_same(
        got, KERNELS.fused_add_rms_norm_group_quant_fp8_functional(x, residual, weight, EPSILON, 64, True, True)
    )


# ---- the `.out` overloads of all kernels of the module -------------------------------------------------------------

ROWS, GATES, WEIGHT = normal(6, 64), normal(6, 128), normal(64)
HEADS, CACHE, PLACES = normal(6, 64), normal(10, 16), torch.arange(6)
OUTPUTS: dict[str, tuple[Any, ...]] = {
    "rms_norm_group_quant_fp8": (ROWS, WEIGHT, EPSILON, 32, True, False),
    "fused_add_rms_norm_group_quant_fp8_functional": (ROWS, ROWS.flip(0), WEIGHT, EPSILON, 32, False, True),
    "silu_and_mul_group_quant_fp8": (GATES, 32, True, False),
    "gelu_and_mul_static_quant_fp8": (GATES, SCALE, True),
    "gelu_and_mul_dynamic_quant_fp8": (GATES, False),
    "gelu_and_mul_group_quant_fp8": (GATES, True, 32, True, False),
    "qk_norm_rotary_embedding": (PLACES, HEADS, HEADS[:, :16], WEIGHT[:16], None, CACHE, 16, EPSILON, True),
    "qk_norm_rotary_embedding_query": (PLACES, HEADS, WEIGHT[:16], CACHE, 16, EPSILON, False),
}


def outputs_like(result: Tensor | tuple[Tensor, ...]) -> dict[str, Tensor]:
    if isinstance(result, Tensor):
        return {"out": torch.empty_like(result)}
    return {f"out{index}": torch.empty_like(each) for index, each in enumerate(result)}


def test_every_functional_kernel_writes_the_same_bits_to_given_memory() -> None:
    assert set(OUTPUTS) == set(fused.FUNCTIONAL_KERNELS)
    assert fused.supported() is True
    for name, args in OUTPUTS.items():
        want = getattr(KERNELS, name).default(*args)
        given = outputs_like(want)
        getattr(KERNELS, name).out(*args, **given)
        for output, right in zip(given.values(), (want,) if isinstance(want, Tensor) else want, strict=True):
            assert torch.equal(output.view(torch.uint8), right.view(torch.uint8)), name


@pytest.mark.parametrize("name", OUTPUTS)
def test_memory_that_does_not_fit_is_refused(name: str) -> None:
    assert fused.supported() is True
    given = outputs_like(getattr(KERNELS, name).default(*OUTPUTS[name]))
    last = list(given)[-1]
    given[last] = given[last].new_empty((3, *given[last].shape))
    with pytest.raises(RuntimeError, match=f"{name}: {last} must be contiguous"):
        getattr(KERNELS, name).out(*OUTPUTS[name], **given)
