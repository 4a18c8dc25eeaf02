"""The kernels on a CUDA device: values against float64, codes bit for bit, layouts, graphs, and what torch compiles."""

import pytest
import torch
import torch._inductor.config
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("only_triton"),
]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
# In one piece, in two, odd, and wider than what is kept in registers.
LENGTHS = (1, 17, 128, 2048, 2561, 4096, 5120, 8192, 14336, 16387)
EPSILON = 1e-5
FP8 = torch.float8_e4m3fn


@pytest.fixture
def only_triton():
    names = [name for name in ir.ops.__all__ if "triton" in getattr(ir.ops, name).impls]
    with ir.priority(dict.fromkeys(names, "triton")):
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to("cuda", dtype)


def scale() -> Tensor:
    return torch.full((1,), 0.03, device="cuda")


def assert_near(got: Tensor, exact: Tensor) -> None:
    """Within two roundings of 16-bit dtypes; in float32, within what approximate exponentials and roots cost."""
    info = torch.finfo(got.dtype)
    allowed = (8 if got.dtype == torch.float32 else 2) * info.eps * exact.abs() + 4e-6
    error = (got.double() - exact).abs()
    assert got.shape == exact.shape
    assert (error <= allowed).all(), f"{(error / allowed).max().item():.2f} times what is allowed"


def bytes_of(q: Tensor) -> Tensor:
    assert q.dtype == FP8
    return torch.where(q.float().isnan(), 0x7F, q.view(torch.uint8)).cpu()


def assert_same(got, expected) -> None:
    """Bit for bit, with NaN equal to NaN."""
    if isinstance(expected, tuple):
        assert len(got) == len(expected)
        for g, e in zip(got, expected, strict=True):
            assert_same(g, e)
    elif expected.dtype == FP8:
        assert torch.equal(bytes_of(got), bytes_of(expected))
    else:
        torch.testing.assert_close(got.cpu(), expected.cpu(), rtol=0, atol=0, equal_nan=True)


def quantised(x: Tensor, with_scale: Tensor | None = None):
    """What native makes of these values on the CPU."""
    if with_scale is None:
        return ir.ops.dynamic_quant_fp8.native(x.cpu())
    return ir.ops.static_quant_fp8.native(x.cpu(), with_scale.cpu())


@pytest.mark.parametrize("hidden", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_norms_are_near_float64(dtype, hidden):
    x, residual, weight = random(5, hidden, dtype=dtype), random(5, hidden, dtype=dtype, seed=2), random(hidden)
    weight = weight.to(dtype)
    assert_near(ir.ops.rms_norm(x, weight, EPSILON), ir.ops.rms_norm.native(x.double(), weight.double(), EPSILON))
    y, added = ir.ops.fused_add_rms_norm(x, residual, weight, EPSILON)
    assert_near(added, x.double() + residual.double())
    assert_near(y, ir.ops.rms_norm.native(added.double(), weight.double(), EPSILON))


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_gated_activations_are_near_float64(dtype, length):
    x = random(5, 2 * length, dtype=dtype)
    assert_near(ir.ops.silu_and_mul(x), ir.ops.silu_and_mul.native(x.double()))
    for approximate in ("none", "tanh"):
        assert_near(ir.ops.gelu_and_mul(x, approximate), ir.ops.gelu_and_mul.native(x.double(), approximate))


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rotated_heads_are_near_float64(dtype, is_neox):
    angles = torch.outer(torch.arange(64.0), 100.0 ** -(torch.arange(0, 48, 2) / 48)).cuda()
    cache, positions = torch.cat((angles.cos(), angles.sin()), -1), torch.arange(33, device="cuda")
    query, key = random(33, 4 * 64, dtype=dtype), random(33, 64, dtype=dtype)
    got = ir.ops.rotary_embedding(positions, query, key, cache, 64, is_neox)
    exact = ir.ops.rotary_embedding.native(positions, query.double(), key.double(), cache.double(), 64, is_neox)
    for g, e in zip(got, exact, strict=True):
        assert (g.double() - e).abs().max() <= 8 * torch.finfo(dtype).eps


def cached(dtype: torch.dtype = torch.bfloat16, tokens: int = 33, size: int = 128) -> tuple:
    """Parts of one product for 8 heads, 2 of keys and values; a cache of 64 blocks; some tokens have no slot."""
    query, key, value = random(tokens, 12 * size, dtype=dtype).split((8 * size, 2 * size, 2 * size), -1)
    caches = random(64, 16, 2, size, dtype=dtype, seed=2), random(64, 16, 2, size, dtype=dtype, seed=3)
    slots = torch.randperm(1024, generator=torch.Generator().manual_seed(5))[:tokens]
    slots[::5] = -1
    slots[1::11] = 2**40
    angles = torch.outer(torch.arange(64.0), 100.0 ** -(torch.arange(0, size, 2) / size))
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to("cuda", dtype)
    positions = torch.arange(tokens, device="cuda") % 64
    return positions, query, key, value, *caches, slots.cuda(), cos_sin, size


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("is_neox", [True, False])
def test_rotated_heads_are_near_float64_and_written_where_native_writes_them(dtype, is_neox):
    args = (*cached(dtype), is_neox)
    got = ir.ops.rotary_embedding_reshape_and_cache(*args)
    exact = ir.ops.rotary_embedding_reshape_and_cache.native(
        *(a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in args)
    )
    for g, e in zip(got[:3], exact[:3], strict=True):
        assert (g.double() - e).abs().max() <= 16 * torch.finfo(dtype).eps
    assert torch.equal(got[3].double(), exact[3])
    assert_same(ir.ops.reshape_and_cache(got[1], *args[3:7]), got[2:])


def normed_and_cached(dtype: torch.dtype = torch.bfloat16, weight_dtype: torch.dtype | None = torch.bfloat16) -> tuple:
    *given, cos_sin, size = cached(dtype)
    weights = (None if weight_dtype is None else random(size, dtype=weight_dtype, seed=seed) for seed in (7, 8))
    return *given, *weights, cos_sin, size, EPSILON


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("is_neox", [True, False])
def test_heads_are_normed_then_rotated_and_written(dtype, weight_dtype, is_neox):
    args = (*normed_and_cached(dtype, weight_dtype), is_neox)
    got = ir.ops.qk_norm_rotary_embedding_reshape_and_cache(*args)
    exact = ir.ops.qk_norm_rotary_embedding_reshape_and_cache.native(
        *(a.double() if torch.is_tensor(a) and a.is_floating_point() else a for a in args)
    )
    eps = max(torch.finfo(each).eps for each in (dtype, weight_dtype or dtype))
    for g, e in zip(got[:3], exact[:3], strict=True):
        assert (g.double() - e).abs().max() <= 4 * eps * e.abs().max()
    assert torch.equal(got[3].double(), exact[3])
    positions, query, key, *_ = args
    alone = ir.ops.qk_norm_rotary_embedding(positions, query, key, *args[7:])
    assert_same(alone, got[:2])


def test_a_donated_cache_is_written_in_place_eager_compiled_and_in_a_graph():
    op = ir.ops.rotary_embedding_reshape_and_cache
    args = cached()
    want = op(*args)
    torch._dynamo.reset()

    def step(*given):
        query, key, value = given[1].split((1024, 256, 256), -1)
        return op.maybe_inplace(given[0], query, key, value, *given[2:], 128)

    merged = torch.cat(args[1:4], -1)
    rest = args[6:8]
    for call in (step, torch.compile(step, backend="irframework", fullgraph=True)):
        given = [cache.clone() for cache in args[4:6]]
        with torch.no_grad():
            for _ in range(3):
                got = call(args[0], merged, *given, *rest)
                assert_same(got, want)
                assert [t.data_ptr() for t in got[2:]] == [t.data_ptr() for t in given]
            graph, start = torch.cuda.CUDAGraph(), [cache.clone() for cache in args[4:6]]
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                got = call(args[0], merged, *start, *rest)
        for _ in range(2):
            for cache, before in zip(start, args[4:6], strict=True):
                cache.copy_(before)
            graph.replay()
            torch.cuda.synchronize()
            assert_same(got, want)
            assert_same(tuple(start), want[2:])


@pytest.mark.parametrize("norms", [True, False])
def test_what_a_model_calls_one_by_one_is_one_kernel_in_compiled_code(norms):
    positions, query, key, value, *caches, slots, query_weight, key_weight, cos_sin, size, _ = normed_and_cached()

    def step(positions, merged, slots, cos_sin, query_weight, key_weight, *caches):
        query, key, value = merged.split((1024, 256, 256), -1)
        if norms:
            query = ir.ops.rms_norm(query.unflatten(-1, (-1, size)), query_weight, EPSILON).flatten(-2)
            key = ir.ops.rms_norm(key.unflatten(-1, (-1, size)), key_weight, EPSILON).flatten(-2)
        query, key = ir.ops.rotary_embedding(positions, query, key, cos_sin, size)
        return query, key, *ir.ops.reshape_and_cache.maybe_inplace(key, value, *caches, slots)

    args = (positions, torch.cat((query, key, value), -1), slots, cos_sin, query_weight, key_weight)
    torch._dynamo.reset()
    compiled = torch.compile(step, backend="irframework", fullgraph=True)
    given = [cache.clone() for cache in caches]
    with torch.no_grad():
        got = compiled(*args, *given)
        report = ir.last_report()
        want = step(*args, *(cache.clone() for cache in caches))
    name = "qk_norm_rotary_embedding_reshape_and_cache" if norms else "rotary_embedding_reshape_and_cache"
    assert report.fusions == {name: 1}
    assert [t.data_ptr() for t in got[2:]] == [t.data_ptr() for t in given]
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=2**-6, atol=2**-5)


def test_no_tokens_write_nothing():
    args = cached()
    none = tuple(a[:0] for a in args[:4])
    got = ir.ops.rotary_embedding_reshape_and_cache(*none, *args[4:6], args[6][:0], *args[7:])
    assert_same(got[2:], args[4:6])
    assert_same(ir.ops.reshape_and_cache(*none[2:], *args[4:6], args[6][:0]), args[4:6])


def test_every_number_gets_its_code():
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    middles = (codes[1:] + codes[:-1]) / 2
    beside = [torch.nextafter(middles, torch.tensor(to)) for to in (1e9, -1e9)]
    edges = torch.tensor([0.0, 464.0, 464.1, 480.0, 1e9, 1e-45, 1e-38, torch.inf, torch.nan])
    bits = torch.randint(-(2**31), 2**31, (1 << 20,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    positive = torch.cat((codes, middles, *beside, edges))
    x = torch.cat((positive, -positive, bits.to(torch.int32).view(torch.float32))).cuda()
    one = torch.ones(1, device="cuda")
    assert_same(ir.ops.static_quant_fp8(x, one), quantised(x, one))
    assert_same(ir.ops.static_quant_fp8(x, scale()), quantised(x, scale()))


@pytest.mark.parametrize("hidden", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_quantised_rows_have_the_codes_and_scales_of_native(dtype, hidden):
    x = random(5, hidden, dtype=dtype)
    assert_same(ir.ops.static_quant_fp8(x, scale()), quantised(x, scale()))
    assert_same(ir.ops.dynamic_quant_fp8(x), quantised(x))


@pytest.mark.parametrize("hidden", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_in_front_of_a_quantisation_changes_nothing(dtype, hidden):
    x, residual, weight = random(5, hidden, dtype=dtype), random(5, hidden, dtype=dtype, seed=2), random(hidden)
    weight = weight.to(dtype)
    y = ir.ops.rms_norm(x, weight, EPSILON)
    assert_same(ir.ops.rms_norm_static_quant_fp8(x, weight, scale(), EPSILON), quantised(y, scale()))
    assert_same(ir.ops.rms_norm_dynamic_quant_fp8(x, weight, EPSILON), quantised(y))
    y, added = ir.ops.fused_add_rms_norm(x, residual, weight, EPSILON)
    static = ir.ops.fused_add_rms_norm_static_quant_fp8(x, residual, weight, scale(), EPSILON)
    assert_same(static, (quantised(y, scale()), added))
    dynamic = ir.ops.fused_add_rms_norm_dynamic_quant_fp8(x, residual, weight, EPSILON)
    assert_same(dynamic, (*quantised(y), added))
    wide = random(5, 2 * hidden, dtype=dtype)
    y = ir.ops.silu_and_mul(wide)
    assert_same(ir.ops.silu_and_mul_static_quant_fp8(wide, scale()), quantised(y, scale()))
    assert_same(ir.ops.silu_and_mul_dynamic_quant_fp8(wide), quantised(y))


@pytest.mark.parametrize("hidden", [17, 4096, 5120, 16387])
def test_donated_activations_give_the_same(hidden):
    x, residual, weight = random(5, hidden), random(5, hidden, seed=2), random(hidden)
    for name, given in (
        ("fused_add_rms_norm", (weight, EPSILON)),
        ("fused_add_rms_norm_static_quant_fp8", (weight, scale(), EPSILON)),
        ("fused_add_rms_norm_dynamic_quant_fp8", (weight, EPSILON)),
    ):
        op = getattr(ir.ops, name)
        for _ in range(3):  # the first call is looked at, later ones are direct
            assert_same(op.maybe_inplace(x.clone(), residual.clone(), *given), op(x, residual, *given))


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_with_any_stride_between_them_are_taken(dtype):
    for x in (random(6, 300, dtype=dtype)[:, 33:289], random(4, 3, 256, dtype=dtype).transpose(0, 1)):
        assert_near(ir.ops.rms_norm(x, None, EPSILON), ir.ops.rms_norm.native(x.double(), None, EPSILON))
        assert_same(ir.ops.dynamic_quant_fp8(x), quantised(x))
        assert_same(ir.ops.static_quant_fp8(x, scale()), quantised(x, scale()))
        assert_near(ir.ops.silu_and_mul(x), ir.ops.silu_and_mul.native(x.double()))


def test_a_tensor_that_begins_elsewhere_is_launched_as_what_it_is():
    """Calls that differ only in where memory begins need other machine code."""
    memory, weight = random(4 * 512 + 1), random(512)
    for start in (0, 1, 0, 1):
        x = memory[start : start + 4 * 512].view(4, 512)
        assert_near(ir.ops.rms_norm(x, weight, EPSILON), ir.ops.rms_norm.native(x.double(), weight.double(), EPSILON))
        assert_same(ir.ops.dynamic_quant_fp8(x), quantised(x))


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (3, 0)])
def test_no_rows_or_empty_ones_give_empty_codes(shape):
    x, weight = random(*shape), random(shape[-1])
    assert_same(ir.ops.static_quant_fp8(x, scale()), quantised(x, scale()))
    assert_same(ir.ops.dynamic_quant_fp8(x), quantised(x))
    assert_same(ir.ops.rms_norm_dynamic_quant_fp8(x, weight, EPSILON), quantised(x))
    assert ir.ops.rms_norm(x, weight, EPSILON).shape == shape


def test_infinities_and_nans_stay_in_their_row():
    x = random(4, 5120)
    x[1, 3], x[2, 5000], x[3, 0] = float("inf"), float("nan"), -float("inf")
    assert_same(ir.ops.dynamic_quant_fp8(x), quantised(x))
    y = ir.ops.rms_norm(x, None, EPSILON)
    assert torch.equal(y.isnan(), ir.ops.rms_norm.native(x, None, EPSILON).isnan())
    assert_same(ir.ops.rms_norm_dynamic_quant_fp8(x, None, EPSILON), quantised(y))


@pytest.mark.parametrize("resident", [0, 2])
@pytest.mark.parametrize("early", [False, True])
def test_every_way_to_launch_gives_the_same_in_a_graph(early, resident):
    """A chain of kernels, each of which reads what the one in front of it wrote."""
    from dataclasses import replace

    from irframework_triton_kernels import launch
    from irframework_triton_kernels.tiles import NORM, row_tile

    x, residual, weight = random(500, 5120), random(500, 5120, seed=2), random(5120)
    usual = row_tile(5120, NORM)
    tile = replace(usual, early=early, resident=resident)

    def chain(tile):
        y, added = x, residual
        for _ in range(6):
            y, added = launch.fused_add_rms_norm(y, added, weight, EPSILON, None, tile)
            y = launch.rms_norm(y, weight, EPSILON, None, tile)
        return (*launch.dynamic_quant_fp8(y, tile), added)

    expected = chain(usual)
    chain(tile)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = chain(tile)
    for _ in range(3):
        for output in got:
            output.view(torch.uint8).zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_same(got, expected)


def test_a_kernel_that_is_loaded_early_overwrites_nothing_too_soon():
    """Each kernel overwrites what the one in front of it reads, at the far end of the device."""
    from dataclasses import replace

    from irframework_triton_kernels import launch
    from irframework_triton_kernels.tiles import ADD_NORM, row_tile

    usual, start = row_tile(4096, ADD_NORM), random(3000, 4096)

    def chain(tile):
        x, residual = start.clone(), start.flip(0).contiguous()
        for _ in range(20):
            launch.fused_add_rms_norm_inplace(x, residual, None, EPSILON, None, tile)
            launch.fused_add_rms_norm_inplace(residual, x, None, EPSILON, None, tile)
            backwards = launch.rms_norm(x.flip(0), None, EPSILON, None)
            launch.fused_add_rms_norm_inplace(x, backwards, None, EPSILON, None, tile)
        return x, residual

    assert_same(chain(replace(usual, early=True)), chain(usual))


def test_a_graph_of_two_streams_holds_kernels_that_are_loaded_early():
    from dataclasses import replace

    from irframework_triton_kernels import launch
    from irframework_triton_kernels.tiles import ADD_NORM, NORM, row_tile

    tile, adding = (replace(row_tile(4096, kind), early=True) for kind in (NORM, ADD_NORM))
    x, weight, side = random(500, 4096), random(4096), torch.cuda.Stream()

    def fork_and_join():
        y = launch.rms_norm(x, weight, EPSILON, None, tile)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            a = launch.rms_norm(launch.rms_norm(y, weight, EPSILON, None, tile), None, EPSILON, None, tile)
        b = launch.rms_norm(y, None, EPSILON, None, tile)
        torch.cuda.current_stream().wait_stream(side)
        return launch.fused_add_rms_norm(a, b, weight, EPSILON, None, adding)

    expected = fork_and_join()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = fork_and_join()
    for _ in range(3):
        for output in got:
            output.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert_same(got, expected)


CALLS = {
    "rms_norm": lambda: (random(7, 256), random(256), EPSILON),
    "rms_norm_static_quant_fp8": lambda: (random(7, 256), random(256), scale(), EPSILON),
    "rms_norm_dynamic_quant_fp8": lambda: (random(7, 256), random(256), EPSILON),
    "fused_add_rms_norm": lambda: (random(7, 256), random(7, 256, seed=2), random(256), EPSILON),
    "fused_add_rms_norm_static_quant_fp8": lambda: (random(7, 256), random(7, 256, seed=2), None, scale(), EPSILON),
    "fused_add_rms_norm_dynamic_quant_fp8": lambda: (random(7, 256), random(7, 256, seed=2), random(256), EPSILON),
    "silu_and_mul": lambda: (random(7, 256),),
    "silu_and_mul_static_quant_fp8": lambda: (random(7, 256), scale()),
    "silu_and_mul_dynamic_quant_fp8": lambda: (random(7, 256),),
    "static_quant_fp8": lambda: (random(7, 256), scale()),
    "dynamic_quant_fp8": lambda: (random(7, 256),),
    "reshape_and_cache": lambda: cached()[2:7],
    "rotary_embedding_reshape_and_cache": cached,
    "qk_norm_rotary_embedding": lambda: (*normed_and_cached()[:3], *normed_and_cached()[7:]),
    "qk_norm_rotary_embedding_reshape_and_cache": normed_and_cached,
}


@pytest.mark.parametrize(("dynamic", "early"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_calls_give_what_eager_ones_give(name, dynamic, early):
    op, arguments = getattr(ir.ops, name), CALLS[name]()
    torch._dynamo.reset()
    if dynamic:
        for value in arguments:
            if isinstance(value, Tensor) and value.shape[:1] == arguments[0].shape[:1]:
                torch._dynamo.mark_dynamic(value, 0)
    compiled = torch.compile(lambda *given: op(*given), backend="irframework", fullgraph=True)
    with torch._inductor.config.patch({"triton.enable_pdl": early}):
        assert_same(compiled(*arguments), op(*arguments))


def test_kernels_run_on_the_device_of_their_arguments():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    x = random(4, 256).to("cuda:1")
    y = ir.ops.rms_norm(x, None, EPSILON)
    assert y.device == x.device
    assert_near(y, ir.ops.rms_norm.native(x.double(), None, EPSILON))
