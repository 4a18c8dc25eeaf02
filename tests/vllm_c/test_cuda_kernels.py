"""The CUDA kernels, straight through their torch ops: numerics, layouts, plans, streams and graphs. All need a GPU.

Codes and dynamic scales are compared with native on the CPU, bit for bit: there torch divides where its GPU kernels
multiply by a rounded reciprocal. Norms of small integers have sums of squares without rounding, so that every rounding
behind them can be compared bit for bit, too.
"""

import itertools
from collections.abc import Iterator

import pytest
import torch
from irframework_vllm_c import implementations, library
from reference import assert_near_exact, exact_gated, exact_rms_norm, exact_rotary, native_gated, native_rms_norm
from torch import Tensor

import irframework as ir

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

K = torch.ops.irframework_vllm_c
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTHS = [1, 3, 8, 33, 128, 576, 1030, 4096, 5120, 8192, 16385, 40000, 131072, 300000]
EPSILON = 1e-5
FP8 = torch.float8_e4m3fn
PLANS = [
    {"threads": threads, "vectors": vectors, "rows_per_block": rows, "blocks_per_sm": per_sm, "ahead": ahead}
    for threads, vectors, (rows, per_sm, ahead) in itertools.product(
        (64, 128, 512), (0, 1, 2, 4), ((1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 1, 1), (4, 1, 1))
    )
] + [{"cluster": cluster, "threads": 64, "vectors": 4, "rows_per_block": 1} for cluster in (2, 4, 8)]


@pytest.fixture(scope="module", autouse=True)
def _loaded() -> None:
    assert implementations.cuda_kernels_load() is True


@pytest.fixture(autouse=True)
def _own_plan() -> Iterator[None]:
    yield
    library.use_cuda_plan()
    torch.cuda.synchronize()


def normal(*shape: int, dtype: torch.dtype = torch.float32, times: float = 1.0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))
    return made.mul(times).to(dtype).cuda()


def integers(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(1)).to(dtype).cuda()


def on_cpu(*values: object) -> list[object]:
    return [value.cpu() if isinstance(value, Tensor) else value for value in values]


def same_bits(got: Tensor, want: Tensor) -> bool:
    """Codes as bytes but for the sign of NaN, other numbers as they are, NaN equal to NaN."""
    got, want = got.cpu(), want.cpu()
    if got.dtype != want.dtype or got.shape != want.shape:
        return False
    if got.dtype == FP8:
        nan = got.float().isnan()
        bits = torch.equal(got.view(torch.uint8)[~nan], want.view(torch.uint8)[~nan])
        return bits and torch.equal(nan, want.float().isnan())
    return bool(((got == want) | (got.isnan() & want.isnan())).all())


def assert_as_native(name: str, got: Tensor | tuple[Tensor, ...], *args: object) -> None:
    """Bit for bit as native on the CPU."""
    want = getattr(ir.ops, name).native(*on_cpu(*args))
    pairs = zip((got,) if isinstance(got, Tensor) else got, (want,) if isinstance(want, Tensor) else want, strict=True)
    for index, (a, b) in enumerate(pairs):
        assert same_bits(a, b), f"output {index} differs in {(a.cpu().float() != b.float()).sum()} places"


# ---- numerics ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_is_close_to_float64(dtype: torch.dtype, length: int) -> None:
    x, weight = normal(5, length, dtype=dtype), normal(length, dtype=dtype)
    exact = exact_rms_norm(x, weight, EPSILON)
    assert_near_exact(K.rms_norm.default(x, weight, EPSILON), exact, 6 if dtype == torch.float32 else 1.01)


@pytest.mark.parametrize("weight_dtype", [*DTYPES, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_rounds_where_native_rounds(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    x = integers(64, 1024, dtype=dtype)
    weight = None if weight_dtype is None else normal(1024, dtype=weight_dtype)
    assert torch.equal(K.rms_norm.default(x, weight, EPSILON), native_rms_norm(x, weight, EPSILON))


@pytest.mark.parametrize("length", [8, 1024, 1030, 40000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fused_add_gives_the_rounded_sum_and_its_norm_in_both_forms(dtype: torch.dtype, length: int) -> None:
    x, residual, weight = (
        normal(6, length, dtype=dtype),
        normal(7, length, dtype=dtype)[1:],
        normal(length, dtype=dtype),
    )
    y, total = K.fused_add_rms_norm_functional.default(x, residual, weight, EPSILON)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, K.rms_norm.default(total, weight, EPSILON))
    own_x, own_residual = x.clone(), residual.clone()
    K.fused_add_rms_norm.default(own_x, own_residual, weight, EPSILON)
    assert torch.equal(own_x, y)
    assert torch.equal(own_residual, total)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", ["silu", "none", "tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_activations_are_close_to_float64(dtype: torch.dtype, name: str, length: int) -> None:
    x = normal(4, 2 * length, dtype=dtype, times=3)
    got = K.silu_and_mul.default(x) if name == "silu" else K.gelu_and_mul.default(x, name == "tanh")
    assert_near_exact(got, exact_gated(x, name), 100 if dtype == torch.float32 else 1.6, x[:, length:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_silu_and_mul_rounds_where_native_rounds(dtype: torch.dtype) -> None:
    x = normal(50, 2000, dtype=dtype, times=3)
    assert (K.silu_and_mul.default(x) != native_gated(x, "silu")).float().mean() < 1e-3


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "pairs"])
@pytest.mark.parametrize("rotary_dim", [128, 64, 12])
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotary_is_the_formula_in_float32_bit_for_bit(
    dtype: torch.dtype, cache_dtype: torch.dtype, rotary_dim: int, is_neox: bool
) -> None:
    positions = torch.randint(0, 90, (33,)).cuda()
    query, key, cache = normal(33, 5 * 128, dtype=dtype), normal(33, 2, 128, dtype=dtype), normal(90, rotary_dim)
    cache = cache.to(cache_dtype)
    turned = K.rotary_embedding.default(positions, query, key, cache, 128, is_neox)
    alone = K.rotary_embedding_query.default(positions, query, cache, 128, is_neox)
    for got, x in zip((*turned, alone), (query, key, query), strict=True):
        assert torch.equal(got, exact_rotary(positions, x, cache, 128, is_neox, torch.float32).to(dtype))


def test_rotary_gives_nan_for_a_position_outside_the_cache_and_for_no_other() -> None:
    positions, query = torch.tensor([1, 99, -1, 2]).cuda(), normal(4, 64)
    got = K.rotary_embedding_query.default(positions, query, normal(50, 32), 32, True)
    assert got[1:3].isnan().all()
    assert not got[::3].isnan().any()


# ---- codes ----------------------------------------------------------------------------------------------------------


def test_every_float_near_a_tie_becomes_the_code_that_torch_gives() -> None:
    upper = torch.arange(2**16, dtype=torch.int64) << 16
    patterns = torch.cat([upper | lower for lower in (0, 1, 0x7FFF, 0x8000, 0xFFFF)])
    x = (patterns - ((patterns >> 31) << 32)).to(torch.int32).view(torch.float32)
    assert same_bits(K.static_quant_fp8.default(x.cuda(), torch.ones(1).cuda()), x.clamp(-448, 448).to(FP8))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_quantisation_is_native_s(dtype: torch.dtype, length: int) -> None:
    x, scale = normal(5, length, dtype=dtype, times=3), torch.tensor([0.0213]).cuda()
    assert_as_native("static_quant_fp8", K.static_quant_fp8.default(x, scale), x, scale)
    assert_as_native("dynamic_quant_fp8", K.dynamic_quant_fp8.default(x), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [16, 1000, 1024, 1030, 8192, 40000])
def test_fused_quantisation_is_the_quantisation_of_the_unfused_result(dtype: torch.dtype, length: int) -> None:
    x, residual, weight = (normal(count, length, dtype=dtype)[:6] for count in (6, 7, 8))
    weight, scale = weight[0].contiguous(), torch.tensor(0.0213).cuda()
    gate = normal(6, 2 * length, dtype=dtype)

    y, total = K.rms_norm.default(x, weight, EPSILON), x + residual
    z, silu = K.rms_norm.default(total, weight, EPSILON), K.silu_and_mul.default(gate)
    fixed = [K.static_quant_fp8.default(each, scale) for each in (y, z, silu)]
    dynamic = [K.dynamic_quant_fp8.default(each) for each in (y, z, silu)]

    assert same_bits(K.rms_norm_static_quant_fp8.default(x, weight, scale, EPSILON), fixed[0])
    assert same_bits(K.silu_and_mul_static_quant_fp8.default(gate, scale), fixed[2])
    own = residual.clone()
    assert same_bits(K.fused_add_rms_norm_static_quant_fp8.default(x, own, weight, scale, EPSILON), fixed[1])
    assert torch.equal(own, total)
    for got, want in zip(K.rms_norm_dynamic_quant_fp8.default(x, weight, EPSILON), dynamic[0], strict=True):
        assert same_bits(got, want)
    for got, want in zip(K.silu_and_mul_dynamic_quant_fp8.default(gate), dynamic[2], strict=True):
        assert same_bits(got, want)
    own = residual.clone()
    results = K.fused_add_rms_norm_dynamic_quant_fp8.default(x, own, weight, EPSILON)
    assert torch.equal(own, total)
    for got, want in zip(results, dynamic[1], strict=True):
        assert same_bits(got, want)
    before = residual.clone()
    codes, own = K.fused_add_rms_norm_static_quant_fp8_functional.default(x, residual, weight, scale, EPSILON)
    *results, again = K.fused_add_rms_norm_dynamic_quant_fp8_functional.default(x, residual, weight, EPSILON)
    assert all(map(torch.equal, (own, again, residual), (total, total, before)))
    for got, want in zip((codes, *results), (fixed[1], *dynamic[1]), strict=True):
        assert same_bits(got, want)


# ---- special values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_behave_as_native(dtype: torch.dtype) -> None:
    x = normal(10, 64, dtype=dtype)
    x[0], x[1, 3], x[2, 5], x[4, 0] = 0.0, torch.inf, torch.nan, -torch.inf
    x[3], x[5], x[6, 1] = torch.finfo(dtype).smallest_normal / 4, torch.finfo(dtype).max, -torch.nan
    scale = torch.tensor([0.01]).cuda()
    assert_as_native("static_quant_fp8", K.static_quant_fp8.default(x, scale), x, scale)
    assert_as_native("dynamic_quant_fp8", K.dynamic_quant_fp8.default(x), x)
    for got, want in (
        (K.rms_norm.default(x, None, EPSILON), ir.ops.rms_norm.native(x, None, EPSILON)),
        (K.rms_norm.default(x[:1], None, 0.0), ir.ops.rms_norm.native(x[:1], None, 0.0)),
        (K.silu_and_mul.default(x), ir.ops.silu_and_mul.native(x)),
    ):
        torch.testing.assert_close(got, want, equal_nan=True, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (3, 0), (0,)])
def test_nothing_gives_nothing(shape: tuple[int, ...]) -> None:
    x, scale = torch.empty(shape, device="cuda"), torch.ones(1, device="cuda")
    assert K.rms_norm.default(x, None, EPSILON).shape == shape
    assert K.silu_and_mul.default(x).shape == (*shape[:-1], shape[-1] // 2)
    assert K.static_quant_fp8.default(x, scale).shape == shape
    assert_as_native("dynamic_quant_fp8", K.dynamic_quant_fp8.default(x), x)
    assert_as_native("rms_norm_dynamic_quant_fp8", K.rms_norm_dynamic_quant_fp8.default(x, None, 1.0), x, None, 1.0)


# ---- layouts --------------------------------------------------------------------------------------------------------

VIEWS = {
    "columns": lambda t: t[:, :, 3:41],
    "aligned columns": lambda t: t[:, :, 16:48],
    "transposed": lambda t: t.transpose(0, 1),
    "steps": lambda t: t[::2, 1::3],
    "one column": lambda t: t[1:, :, :1],
    "repeated": lambda t: t[:1].expand(4, -1, -1),
    "permuted": lambda t: t.unflatten(1, (2, 3)).permute(2, 0, 1, 3),
    "moved by one": lambda t: t.flatten()[1:1441].view(4, 6, 60),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", VIEWS)
def test_any_leading_strides_and_any_address_are_read(name: str, dtype: torch.dtype) -> None:
    x, scale = VIEWS[name](normal(4, 6, 64, dtype=dtype)), torch.tensor([0.02]).cuda()
    plain = x.contiguous().clone()
    for got, want in (
        (K.rms_norm.default(x, None, EPSILON), K.rms_norm.default(plain, None, EPSILON)),
        (K.static_quant_fp8.default(x, scale), K.static_quant_fp8.default(plain, scale)),
        (K.dynamic_quant_fp8.default(x)[0], K.dynamic_quant_fp8.default(plain)[0]),
        (
            K.fused_add_rms_norm_functional.default(x, x.flip(0), None, EPSILON)[0],
            K.fused_add_rms_norm_functional.default(plain, plain.flip(0), None, EPSILON)[0],
        ),
    ):
        assert same_bits(got, want)
        assert got.is_contiguous()
    if x.shape[-1] % 2 == 0:
        assert torch.equal(K.silu_and_mul.default(x), K.silu_and_mul.default(plain))
        codes = K.silu_and_mul_dynamic_quant_fp8
        assert all(same_bits(a, b) for a, b in zip(codes.default(x), codes.default(plain), strict=True))


def test_in_place_rows_with_gaps_leave_the_gaps_alone() -> None:
    wide_x, wide_residual = normal(9, 300), normal(8, 300)[:8]
    wide_x = wide_x[:8]
    before = wide_x.clone(), wide_residual.clone()
    x, residual = wide_x[:, 4:132], wide_residual[:, 5:133]
    want = K.fused_add_rms_norm_functional.default(x.clone(), residual.clone(), None, EPSILON)
    K.fused_add_rms_norm.default(x, residual, None, EPSILON)
    assert torch.equal(x, want[0])
    assert torch.equal(residual, want[1])
    for now, then, part in ((wide_x, before[0], slice(4, 132)), (wide_residual, before[1], slice(5, 133))):
        then[:, part] = now[:, part]
        assert torch.equal(now, then)


def test_a_weight_with_steps_or_at_any_address_is_read() -> None:
    x, weight = normal(3, 512, dtype=torch.bfloat16), normal(1537, dtype=torch.bfloat16)
    for each in (weight[1:513], weight[:1536:3]):
        assert torch.equal(K.rms_norm.default(x, each, 1e-6), K.rms_norm.default(x, each.clone(), 1e-6))


@pytest.mark.parametrize("length", [128, 1030, 8192, 40000])
def test_a_row_s_result_depends_on_the_row_alone(length: int) -> None:
    x, weight = normal(3000, length, dtype=torch.bfloat16), normal(length, dtype=torch.bfloat16)
    whole = K.rms_norm.default(x, weight, EPSILON)
    moved = torch.empty(5 * length + 1, dtype=x.dtype, device="cuda")[1:].view(5, length).copy_(x[7:12])
    for part, rows in ((x[7:8], whole[7:8]), (x[:100], whole[:100]), (x[5:1005], whole[5:1005]), (moved, whole[7:12])):
        assert torch.equal(K.rms_norm.default(part, weight, EPSILON), rows)


# ---- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: "-".join(map(str, plan.values())))
def test_every_plan_computes_the_same(plan: dict[str, int], dtype: torch.dtype) -> None:
    x, residual, weight = integers(333, 2048, dtype=dtype), integers(333, 2048, dtype=dtype).flip(0), normal(2048)
    weight, scale = weight.to(dtype), torch.tensor([0.02]).cuda()

    def results() -> list[Tensor]:
        own = residual.clone()
        return [
            K.rms_norm.default(x, weight, EPSILON),
            K.rms_norm.default(x, None, EPSILON),
            *K.fused_add_rms_norm_functional.default(x, residual, weight, EPSILON),
            K.rms_norm_static_quant_fp8.default(x, weight, scale, EPSILON),
            K.fused_add_rms_norm_static_quant_fp8.default(x, own, weight, scale, EPSILON),
            *K.rms_norm_dynamic_quant_fp8.default(x, weight, EPSILON),
            *K.dynamic_quant_fp8.default(x),
            *K.silu_and_mul_dynamic_quant_fp8.default(x),
            K.silu_and_mul.default(x),
            K.static_quant_fp8.default(x, scale),
        ]

    want = results()
    library.use_cuda_plan(**plan)
    assert all(same_bits(got, right) for got, right in zip(results(), want, strict=True))


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_chain_of_kernels_sees_what_the_one_before_wrote(overlap: int) -> None:
    """Launched early, a kernel still waits for the one before it."""
    library.use_cuda_plan(overlap=overlap)
    for rows in (1, 64, 3000):
        x = normal(rows, 4096, dtype=torch.bfloat16)
        want = got = x
        for _ in range(50):
            got = K.rms_norm.default(got, None, 1e-6)
        for _ in range(50):
            want = K.rms_norm.default(want, None, 1e-6)
            torch.cuda.synchronize()
        assert torch.equal(got, want)


# ---- streams, graphs, size ------------------------------------------------------------------------------------------


def test_a_graph_replays_on_new_inputs() -> None:
    x, residual, weight = (normal(65, 4096, dtype=torch.bfloat16) for _ in range(3))
    weight, scale = weight[0].contiguous(), torch.tensor([0.02]).cuda()

    def block(x: Tensor, residual: Tensor) -> list[Tensor]:
        y, total = K.fused_add_rms_norm_functional.default(x, residual, weight, EPSILON)
        gated = K.silu_and_mul.default(y)
        return [y, total, gated, *K.dynamic_quant_fp8.default(gated), K.static_quant_fp8.default(y, scale)]

    block(x, residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = block(x, residual)
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_()
        residual.normal_()
        graph.replay()
        assert all(same_bits(a, b) for a, b in zip(held, block(x, residual), strict=True))


def test_a_kernel_runs_on_the_current_stream() -> None:
    x, stream = torch.zeros(8, 4096, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(2.0)
        got = K.rms_norm.default(x, None, 0.0)
    stream.synchronize()
    assert (got == 1.0).all()


def test_a_tensor_of_more_than_2_31_elements_is_computed_to_its_end() -> None:
    rows, length = 2**19 + 3, 4096
    if torch.cuda.mem_get_info()[0] < 3 * rows * length * 2:
        pytest.skip("needs 13 GB of free device memory")
    x = torch.zeros(rows, length, dtype=torch.bfloat16, device="cuda")
    x[-2:] = normal(2, length, dtype=torch.bfloat16)
    for call in (
        lambda t: K.rms_norm.default(t, None, EPSILON),
        K.silu_and_mul.default,
        lambda t: K.dynamic_quant_fp8.default(t)[0],
        lambda t: K.static_quant_fp8.default(t, torch.tensor(0.02, device="cuda")),
    ):
        got = call(x)
        assert same_bits(got[-2:], call(x[-2:]))
        assert (got[:-2].view(torch.uint8).amax() if got.dtype == FP8 else got[:-2].abs().amax()) == 0
        del got


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_a_tensor_somewhere_else_is_refused_by_name() -> None:
    x = normal(2, 64)
    with pytest.raises(RuntimeError, match="weight is not on cuda:0 but on the CPU"):
        K.rms_norm.default(x, torch.ones(64), EPSILON)
    with pytest.raises(RuntimeError, match="scale is not on cuda:0 but on the CPU"):
        K.static_quant_fp8.default(x, torch.ones(1))


def test_other_types_are_refused_before_anything_is_launched() -> None:
    with pytest.raises(RuntimeError, match="x must be float32, bfloat16 or float16"):
        K.rms_norm.default(normal(2, 64).double(), None, EPSILON)
    with pytest.raises(RuntimeError, match="x must be contiguous in its last dimension"):
        K.silu_and_mul.default(normal(8, 4).t())


# ---- inside irframework ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["rms_norm", "fused_add_rms_norm", "silu_and_mul_dynamic_quant_fp8"])
def test_a_call_is_one_kernel_and_no_copy(op: str) -> None:
    args = getattr(ir.ops, op).generate_inputs(shape=(64, 4096), dtype=torch.bfloat16, device="cuda")
    call = getattr(ir.ops, op)
    with ir.priority({op: "vllm_c"}), torch.no_grad():
        for _ in range(3):
            call(*args)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            call(*args)
            torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(names) == 1, names
    assert "irframework_vllm_c" in names[0]


def test_fused_add_rms_norm_works_in_donated_memory() -> None:
    x, residual, weight = (normal(count, 4096, dtype=torch.bfloat16)[:8] for count in (8, 9, 10))
    x, residual, weight = x.clone(), residual.clone(), weight[0].clone()
    with ir.priority({"fused_add_rms_norm": "vllm_c"}):
        y, total = ir.ops.fused_add_rms_norm.maybe_inplace(x, residual, weight, 1e-6)
    assert (y.data_ptr(), total.data_ptr()) == (x.data_ptr(), residual.data_ptr())
