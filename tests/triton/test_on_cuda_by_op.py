"""The kernels of the further ops on a CUDA device, at sizes of models: values against float64, codes bit for bit."""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("only_triton"),
]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (1, 17, 2048, 2561, 14336, 16387)
EPSILON = 1e-5


@pytest.fixture
def only_triton():
    names = [name for name in ir.ops.__all__ if "triton" in getattr(ir.ops, name).impls]
    with ir.priority(dict.fromkeys(names, "triton")):
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to("cuda", dtype)


def wide(value: object) -> object:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def on_cpu(value: object) -> object:
    return value.cpu() if isinstance(value, Tensor) else value


def assert_near(got: Tensor, exact: Tensor) -> None:
    """Within two roundings of 16-bit dtypes; in float32, within what approximate exponentials and roots cost."""
    info = torch.finfo(got.dtype)
    allowed = (8 if got.dtype == torch.float32 else 2) * info.eps * exact.abs() + 4e-6
    error = (got.double() - exact).abs()
    assert got.shape == exact.shape
    assert (error <= allowed).all(), f"{(error / allowed).max().item():.2f} times what is allowed"


def assert_near_native(name: str, *arguments: object) -> None:
    op = getattr(ir.ops, name)
    got, exact = op(*arguments), op.native(*map(wide, arguments))
    for one, other in zip(*((t,) if isinstance(t, Tensor) else t for t in (got, exact)), strict=True):
        assert_near(one, other)


def alphas() -> tuple[Tensor, Tensor]:
    return torch.full((1,), 0.2, device="cuda"), torch.full((), -1.05, device="cuda")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_activations_are_near_float64(dtype, length):
    x = 2 * random(5, 2 * length, dtype=dtype)
    for name in ("gelu_new", "gelu_fast", "quick_gelu", "relu2", "mul_and_silu"):
        assert_near_native(name, x)
    for part in (x[:, :length], x[:, length:]):
        assert_near_native("xielu", part, *alphas())
    for more in ((), (1.0, 2.0)):
        assert_near_native("swigluoai_and_mul", x, *more)
    for threshold in (0.0, 0.01, -0.5):
        assert_near_native("fatrelu_and_mul", x, threshold)


def angles(batch: int, tokens: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    at = random(batch, tokens, size)
    return at.cos().to(dtype), at.sin().to(dtype)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_gates_that_are_a_tensor_of_their_own_are_near_float64(dtype, length):
    gate, up = 2 * random(5, length, dtype=dtype), random(5, 2 * length, dtype=dtype, seed=2)[:, length:]
    assert_near_native("silu_mul", gate, up)
    for approximate in ("none", "tanh"):
        assert_near_native("gelu_mul", gate, up, approximate)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [2, 64, 96, 128, 256])
@pytest.mark.parametrize("batch", [1, 2])
def test_heads_are_turned_as_native_turns_them(dtype, size, batch):
    x = random(2, 5, 9 * size, dtype=dtype)[..., size:].unflatten(-1, (8, size))
    for heads in (x, x.transpose(1, 2).contiguous().transpose(1, 2)):
        for angles_dtype in (dtype, torch.float32):
            cos, sin = angles(batch, 5, size, angles_dtype)
            got = ir.ops.apply_rotary_pos_emb(heads, cos, sin)
            want = ir.ops.apply_rotary_pos_emb.native(heads, cos, sin)
            assert got.is_contiguous()
            if dtype != torch.float32 and angles_dtype == dtype:
                assert torch.equal(got, want)
            else:  # in float32, a product and a sum may be one step
                torch.testing.assert_close(got, want)


@pytest.mark.parametrize("hidden", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_gemma_norms_are_near_float64(dtype, hidden):
    x, residual, weight = random(5, hidden, dtype=dtype), random(5, hidden, dtype=dtype, seed=2), random(hidden)
    for w in (weight, weight.to(dtype)):
        assert_near_native("gemma_rms_norm", x, w, EPSILON)
        y, added = ir.ops.fused_add_gemma_rms_norm(x, residual, w, EPSILON)
        assert_near(added, x.double() + residual.double())
        assert_near(y, ir.ops.gemma_rms_norm.native(added.double(), w.double(), EPSILON))
        given = x.clone(), residual.clone()
        again = ir.ops.fused_add_gemma_rms_norm.maybe_inplace(*given, w, EPSILON)
        assert torch.equal(again[0], y)
        assert torch.equal(again[1], added)


def assert_as_on_cpu(name: str, x: Tensor, *more: object) -> None:
    """Codes and scales are native's on the CPU, bit for bit; NaN is equal to NaN."""
    op = getattr(ir.ops, name)
    (q, scale), (want, want_scale) = op(x, *more), op.native(x.cpu(), *more)
    assert q.dtype == want.dtype
    codes = [t.cpu() if t.dtype == torch.int8 else t.cpu().view(torch.uint8) for t in (q, want)]
    if q.dtype != torch.int8:
        codes = [torch.where(code & 0x7F == 0x7F, 0x7F, code) for code in codes]
    assert torch.equal(*codes)
    torch.testing.assert_close(scale.cpu(), want_scale, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 7168), (500, 2048), (33, 5120), (3, 7, 256), (5, 3 * 4096 + 128)])
def test_quantised_groups_rows_and_tensors_have_the_codes_and_scales_of_native(dtype, shape):
    x = random(*shape, dtype=dtype)
    for size in (128, 64):
        for column_major in (False, True):
            for power_of_two in (False, True):
                assert_as_on_cpu("group_quant_fp8", x, size, column_major, power_of_two)
    for name in ("tensor_quant_fp8", "dynamic_quant_int8"):
        assert_as_on_cpu(name, x)
        assert_as_on_cpu(name, x[..., 7:-3])


@pytest.mark.parametrize("name", ["tensor_quant_fp8", "group_quant_fp8", "dynamic_quant_int8"])
def test_what_is_not_finite_or_not_there_is_quantised_as_by_native(name):
    for value in (torch.inf, -torch.inf, torch.nan, 0.0, 1e-30, 1e38):
        x = random(4, 1024)
        x[1, 700] = value
        x[2] = 0
        assert_as_on_cpu(name, x)
    for shape in ((0, 256), (2, 0, 128), (3, 0)):
        assert_as_on_cpu(name, random(*shape))


def test_more_elements_than_32_bits_count_are_quantised():
    x = torch.zeros(2**18 + 1, 8192, dtype=torch.bfloat16, device="cuda")  # 4 GiB
    x[-1] = random(8192, dtype=torch.bfloat16)
    x[0, 0] = 5.0
    q, scale = ir.ops.tensor_quant_fp8(x)
    want = ir.ops.tensor_quant_fp8.native(torch.stack((x[0], x[-1])).cpu())
    assert torch.equal(scale.cpu(), want[1])
    assert torch.equal(q[-1].view(torch.uint8).cpu(), want[0][-1].view(torch.uint8))
    del q
    q, scale = ir.ops.group_quant_fp8(x)
    want = ir.ops.group_quant_fp8.native(x[-1:].cpu())
    assert torch.equal(scale[-1:].cpu(), want[1])
    assert torch.equal(q[-1:].view(torch.uint8).cpu(), want[0].view(torch.uint8))
    del q
    whole = torch.ones(1, device="cuda")
    assert_nvfp4(tuple(out[-1:] for out in ir.ops.quant_nvfp4(x, whole)), x[-1:], whole)


def assert_quantises_what_its_first_part_gives(name: str, args: tuple, first: str, *more: object) -> None:
    """Codes and scales are, bit for bit, those of what the kernel without a quantisation computes."""
    kind = name.removeprefix(f"{first}_")
    got = getattr(ir.ops, name)(*args, *more)
    y = getattr(ir.ops, first)(*args, *(more[:1] if "norm" in first or first.startswith("gelu") else ()))
    y, total = y if isinstance(y, tuple) else (y, None)
    want = getattr(ir.ops, kind).native(y.cpu(), *(more if first == "silu_and_mul" else more[1:]))
    got, want = ((out,) if isinstance(out, Tensor) else out for out in (got, want))
    codes = [torch.where(q.float().isnan(), 0x7F, q.view(torch.uint8)).cpu() for q in (got[0], want[0])]
    assert torch.equal(*codes)
    if len(want) > 1:
        torch.testing.assert_close(got[1].cpu(), want[1], rtol=0, atol=0, equal_nan=True)
    if total is not None:
        assert torch.equal(got[-1], total)
    assert all(out.is_contiguous() for out in got)


GROUPS = [
    (size, column_major, powers) for size in (128, 64) for column_major in (False, True) for powers in (False, True)
]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 7168), (500, 2048), (33, 5120), (3, 7, 256), (5, 14336), (5, 16384 + 128)])
def test_norms_and_gates_that_end_in_groups_quantise_what_they_compute(dtype, shape):
    x, residual, weight = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=2), random(shape[-1])
    wide = 2 * random(*shape[:-1], 2 * shape[-1], dtype=dtype)
    for layout in GROUPS:
        for w in (weight, weight.to(dtype), None):
            more = (EPSILON, *layout)
            assert_quantises_what_its_first_part_gives("rms_norm_group_quant_fp8", (x, w), "rms_norm", *more)
            assert_quantises_what_its_first_part_gives(
                "fused_add_rms_norm_group_quant_fp8", (x, residual, w), "fused_add_rms_norm", *more
            )
        assert_quantises_what_its_first_part_gives("silu_and_mul_group_quant_fp8", (wide,), "silu_and_mul", *layout)
        for approximate in ("none", "tanh"):
            assert_quantises_what_its_first_part_gives(
                "gelu_and_mul_group_quant_fp8", (wide,), "gelu_and_mul", approximate, *layout
            )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("length", LENGTHS)
def test_gelu_that_ends_in_codes_quantises_what_it_computes(dtype, length):
    x, scale = 2 * random(5, 2 * length, dtype=dtype), torch.full((1,), 0.02, device="cuda")
    for approximate in ("none", "tanh"):
        y = ir.ops.gelu_and_mul(x, approximate).cpu()
        q, want = (
            ir.ops.gelu_and_mul_static_quant_fp8(x, scale, approximate),
            ir.ops.static_quant_fp8.native(y, scale.cpu()),
        )
        assert torch.equal(q.view(torch.uint8).cpu(), want.view(torch.uint8))
        assert_quantises_what_its_first_part_gives("gelu_and_mul_dynamic_quant_fp8", (x,), "gelu_and_mul", approximate)


def test_a_residual_that_is_given_away_holds_the_sum_of_what_ends_in_groups():
    x, residual, weight = random(100, 4096), random(100, 4096, seed=2), random(4096)
    q, scale, total = ir.ops.fused_add_rms_norm_group_quant_fp8(x, residual, weight, EPSILON)
    given = x.clone(), residual.clone()
    again = ir.ops.fused_add_rms_norm_group_quant_fp8.maybe_inplace(*given, weight, EPSILON)
    assert torch.equal(again[0].view(torch.uint8), q.view(torch.uint8))
    assert torch.equal(again[1], scale)
    assert torch.equal(again[2], total)
    assert again[2].data_ptr() == given[1].data_ptr()


def test_codes_of_fused_ops_are_those_of_the_definition_but_for_few():
    """Sums in another order round otherwise now and then: the share of codes that are another is said here."""
    x, weight = random(512, 4096, dtype=torch.bfloat16), random(4096, dtype=torch.bfloat16)
    for name, args in (("rms_norm_group_quant_fp8", (x, weight, EPSILON)), ("silu_and_mul_group_quant_fp8", (x,))):
        op = getattr(ir.ops, name)
        got, want = (q.view(torch.uint8).cpu() for q in (op(*args)[0], op.native(*args)[0]))
        flipped = (got != want).double().mean().item()
        print(f"{name}: {flipped:.2e} of the codes are another")
        assert flipped < 2e-3


def assert_nvfp4(got: tuple[Tensor, ...], x: Tensor, whole: Tensor) -> None:
    """Codes and scales are those that native makes of x on the CPU, bit for bit; NaN is equal to NaN."""
    want = ir.ops.quant_nvfp4.native(x.cpu(), whole.cpu())
    assert torch.equal(got[0].cpu(), want[0])
    scales = [torch.where(scale.float().isnan(), 0x7F, scale.view(torch.uint8)).cpu() for scale in (got[1], want[1])]
    assert torch.equal(*scales)
    assert all(out.is_contiguous() for out in got)


WHOLES = [torch.full((1,), 2.0**-9), torch.tensor(1e-3), torch.tensor([-0.3]), torch.tensor(3e38), torch.tensor(1e-42)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 7168), (500, 2048), (33, 5120), (3, 7, 48), (5, 16384 + 16), (16,)])
def test_rows_become_nvfp4_as_by_native(dtype, shape):
    x = random(*shape, dtype=dtype)
    for whole in WHOLES:
        assert_nvfp4(ir.ops.quant_nvfp4(x, whole.cuda()), x, whole)
    wide = torch.cat((x, x), -1)[..., 16 : 16 + shape[-1]]
    assert_nvfp4(ir.ops.quant_nvfp4(wide, WHOLES[0].cuda()), wide, WHOLES[0])


@pytest.mark.parametrize("whole", [*WHOLES, torch.tensor(1.0)])
def test_any_bits_become_nvfp4_as_by_native(whole):
    """Infinities, NaN and small numbers that lose digits; every value of both formats and what lies between."""
    bits = torch.randint(-(2**31), 2**31, (2**20,), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    steps = torch.arange(-(2**15), 2**15).float() / 2**12
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 1e-45, 1e38, 6.0]).repeat_interleave(16)
    x = torch.cat(
        (bits.to(torch.int32).view(torch.float32), steps, special, steps * whole, special.view(16, 8).mT.ravel())
    )
    x = x.view(-1, 64).cuda()
    assert_nvfp4(ir.ops.quant_nvfp4(x, whole.cuda()), x, whole)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(1, 7168), (500, 2048), (33, 5120), (3, 7, 48), (5, 14336), (5, 16384 + 128)])
def test_norms_and_gates_that_end_in_nvfp4_quantise_what_they_compute(dtype, shape):
    x, residual, weight = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=2), random(shape[-1])
    whole = torch.full((1,), 2.0**-9, device="cuda")
    for w in (weight, weight.to(dtype), None):
        got = ir.ops.rms_norm_quant_nvfp4(x, w, whole, EPSILON)
        assert_nvfp4(got, ir.ops.rms_norm(x, w, EPSILON), whole)
        y, total = ir.ops.fused_add_rms_norm(x, residual, w, EPSILON)
        *got, added = ir.ops.fused_add_rms_norm_quant_nvfp4(x, residual, w, whole, EPSILON)
        assert_nvfp4(tuple(got), y, whole)
        assert torch.equal(added, total)
        given = x.clone(), residual.clone()
        *got, added = ir.ops.fused_add_rms_norm_quant_nvfp4.maybe_inplace(*given, w, whole, EPSILON)
        assert_nvfp4(tuple(got), y, whole)
        assert torch.equal(added, total)
        assert added.data_ptr() == given[1].data_ptr()
    gate = 2 * random(*shape[:-1], 2 * shape[-1], dtype=dtype)
    assert_nvfp4(ir.ops.silu_and_mul_quant_nvfp4(gate, whole), ir.ops.silu_and_mul(gate), whole)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (3, 0)])
def test_nothing_becomes_nvfp4(shape):
    x, whole = random(*shape), torch.ones(1, device="cuda")
    assert_nvfp4(ir.ops.quant_nvfp4(x, whole), x, whole)
    assert_nvfp4(ir.ops.rms_norm_quant_nvfp4(x, None, whole, EPSILON), x, whole)
    assert_nvfp4(ir.ops.silu_and_mul_quant_nvfp4(torch.cat((x, x), -1), whole), x, whole)


def test_what_is_in_front_of_nvfp4_is_fused_with_it_in_compiled_code():
    """With the kernels' own codes: those of the parts, one after the other, in eager mode."""

    def step(x, residual, gate, weight, whole):
        y, total = ir.ops.fused_add_rms_norm(x, residual, weight, EPSILON)
        return (
            *ir.ops.quant_nvfp4(ir.ops.rms_norm(x, weight, EPSILON), whole),
            *ir.ops.quant_nvfp4(y, whole),
            total,
            *ir.ops.quant_nvfp4(ir.ops.silu_and_mul(gate), whole),
        )

    given = [random(33, size, dtype=torch.bfloat16, seed=seed) for size, seed in ((5120, 1), (5120, 2), (10240, 3))]
    given += [random(5120), torch.full((1,), 2.0**-9, device="cuda")]
    torch._dynamo.reset()
    with torch.no_grad():
        wanted, got = step(*given), torch.compile(step, backend="irframework", fullgraph=True)(*given)
    families = "rms_norm", "fused_add_rms_norm", "silu_and_mul"
    assert ir.last_report().fusions == dict.fromkeys((f"{first}_quant_nvfp4" for first in families), 1)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def assert_routed_as_on_cpu(name: str, logits: Tensor, *more: object, all_alike: bool) -> None:
    """As native on the CPU; where scores differ by the last bit only, a few may be chosen otherwise."""
    op = getattr(ir.ops, name)
    weights, ids = (t.cpu() for t in op(logits, *more))
    want, want_ids = op.native(logits.cpu(), *map(on_cpu, more))
    same = (ids == want_ids).all(-1)
    assert same.all() if all_alike else same.float().mean() > 0.99
    torch.testing.assert_close(weights[same], want[same], rtol=4e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 2), (60, 4), (128, 8), (160, 6), (256, 8), (512, 22)])
def test_the_experts_of_native_are_chosen(dtype, experts, top_k):
    logits, bias = random(700, experts, dtype=dtype), random(experts) / 4
    for scoring in ("softmax", "sigmoid"):
        for x in (logits, logits.round()):
            assert_routed_as_on_cpu("fused_topk", x, top_k, True, scoring, all_alike=True)
        groups, best = (8, 4) if experts % 8 == 0 and experts > 8 else (4, 3)
        assert_routed_as_on_cpu(
            "grouped_topk", logits.round(), top_k, groups, best, True, scoring, None, 2.5, all_alike=True
        )
        for given in (bias, bias.to(dtype), None):
            assert_routed_as_on_cpu(
                "grouped_topk", logits, top_k, groups, best, False, scoring, given, 1.0, all_alike=False
            )


def decoding(
    lengths: tuple[int, ...], heads: int = 32, kv_heads: int = 8, sizes: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16, block_size: int = 16,
) -> dict[str, object]:  # fmt: skip
    """A sequence of each length, whose blocks lie anywhere."""
    width = max(1, *(-(-length // block_size) for length in lengths))
    count = len(lengths) * width
    table = torch.randperm(count, generator=torch.Generator().manual_seed(1)).view(len(lengths), width)
    return {
        "query": random(len(lengths), heads, sizes[0], dtype=dtype),
        "key": None,
        "value": None,
        "cu_seqlens_q": torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda"),
        "max_seqlen_q": 1,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        "max_seqlen_k": max(lengths),
        "key_cache": random(count, block_size, kv_heads, sizes[0], dtype=dtype, seed=2),
        "value_cache": random(count, block_size, kv_heads, sizes[1], dtype=dtype, seed=3),
        "block_table": table.to("cuda", torch.int32),
    }


def assert_attends(given: dict[str, object]) -> Tensor:
    """Within roundings of the weights and of the result, of values of about 1."""
    got = ir.ops.attention(**given)
    exact = ir.ops.attention.native(**{name: wide(value) for name, value in given.items()})
    assert (got.double() - exact).abs().max() <= max(4 * torch.finfo(got.dtype).eps, 2e-5)
    return got


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "sizes", "block_size"),
    [(32, 8, (128, 128), 16), (8, 8, (64, 64), 32), (28, 4, (80, 96), 16), (40, 1, (256, 256), 7), (2, 1, (20, 5), 64)],
)
def test_queries_attend_to_their_sequences(dtype, heads, kv_heads, sizes, block_size):
    assert_attends(decoding((1, 17, 300, 4096, 777), heads, kv_heads, sizes, dtype, block_size))


@pytest.mark.parametrize(
    "more", [{"scale": 0.3}, {"window": 100}, {"window": 1}, {"soft_cap": 5.0}, {"sinks": True},
             {"sinks": True, "soft_cap": 20.0, "window": 1000, "causal": False}],
)  # fmt: skip
def test_scores_are_scaled_capped_and_shared_with_sinks(more):
    if "sinks" in more:
        more = {**more, "sinks": random(32, dtype=torch.bfloat16)}
    for lengths in ((40, 200, 1), (9000, 3, 1000)):
        assert_attends(decoding(lengths) | more)


def test_a_sequence_has_the_same_bits_in_every_batch_and_in_a_graph():
    given = decoding((9000, 3, 256, 1000))
    whole = assert_attends(given)
    for row in range(4):
        alone = given | {
            "query": given["query"][row : row + 1],
            "cu_seqlens_q": given["cu_seqlens_q"][:2],
            "seq_lens": given["seq_lens"][row : row + 1],
            "block_table": given["block_table"][row : row + 1],
            "max_seqlen_k": int(given["seq_lens"][row]),
        }
        assert torch.equal(ir.ops.attention(**alone)[0], whole[row])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ir.ops.attention(**given)
    for _ in range(3):
        got.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, whole)


@pytest.mark.parametrize("lengths", [(40, 200, 1), (9000, 3, 1000)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_with_an_output_scale_it_stores_the_codes_of_its_result(lengths, dtype):
    given = decoding(lengths, dtype=dtype)
    scale = torch.tensor([0.004], device="cuda")
    want = ir.ops.static_quant_fp8.native(ir.ops.attention(**given), scale)
    torch._dynamo.reset()
    compiled = torch.compile(lambda g, s: ir.ops.attention(**g, output_scale=s), backend="irframework", fullgraph=True)
    for got in (ir.ops.attention(**given, output_scale=scale), compiled(given, scale)):
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def test_a_quantisation_behind_attention_is_its_output_scale_in_compiled_code():
    given, scale = decoding((40, 200, 1)), torch.tensor([0.004], device="cuda")
    torch._dynamo.reset()

    def step(given, scale):
        return ir.ops.static_quant_fp8(ir.ops.attention(**given).flatten(-2), scale)

    compiled = torch.compile(step, backend="irframework", fullgraph=True)
    with torch.no_grad():
        got = compiled(given, scale)
        assert ir.last_report().fusions == {"attention": 1}
        assert torch.equal(got.view(torch.uint8), step(given, scale).view(torch.uint8))


def test_tokens_without_keys_or_without_a_sequence_give_zeros():
    given = decoding((500, 20, 1, 30))
    given["seq_lens"][1] = 0
    given["cu_seqlens_q"] = torch.tensor([0, 1, 2, 2, 3], dtype=torch.int32, device="cuda")
    got = assert_attends(given)
    assert (got[[1, 3]] == 0).all()
    assert (got[[0, 2]] != 0).any(-1).all()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_attention_gives_what_eager_attention_gives(dynamic):
    given = decoding((500, 20, 1, 3000))
    torch._dynamo.reset()
    if dynamic:
        for name in ("query", "seq_lens", "cu_seqlens_q", "block_table"):
            torch._dynamo.mark_dynamic(given[name], 0)
    compiled = torch.compile(lambda given: ir.ops.attention(**given), backend="irframework", fullgraph=True)
    assert torch.equal(compiled(given), ir.ops.attention(**given))


CALLS = {
    "gelu_new": lambda: (random(7, 256),),
    "relu2": lambda: (random(7, 256),),
    "xielu": lambda: (random(7, 256), *alphas()),
    "mul_and_silu": lambda: (random(7, 256),),
    "swigluoai_and_mul": lambda: (random(7, 256),),
    "fatrelu_and_mul": lambda: (random(7, 256), 0.01),
    "tensor_quant_fp8": lambda: (random(7, 256),),
    "group_quant_fp8": lambda: (random(7, 256), 64, True, True),
    "dynamic_quant_int8": lambda: (random(7, 256),),
    "silu_mul": lambda: (random(7, 256), random(7, 256, seed=2)),
    "gelu_mul": lambda: (random(7, 256), random(7, 256, seed=2), "tanh"),
    "apply_rotary_pos_emb": lambda: (random(2, 7, 3, 64), *angles(1, 7, 64)),
    "fused_topk": lambda: (random(7, 256), 8, True),
    "grouped_topk": lambda: (random(7, 256), 8, 8, 4, True, "sigmoid", random(256), 2.5),
    "gemma_rms_norm": lambda: (random(7, 256), random(256), EPSILON),
    "rms_norm_group_quant_fp8": lambda: (random(7, 256), random(256), EPSILON, 64, True, True),
    "fused_add_rms_norm_group_quant_fp8": lambda: (random(7, 256), random(7, 256, seed=2), None, EPSILON),
    "silu_and_mul_group_quant_fp8": lambda: (random(7, 256), 64, True, False),
    "gelu_and_mul_group_quant_fp8": lambda: (random(7, 256), "tanh", 64, False, True),
    "gelu_and_mul_static_quant_fp8": lambda: (random(7, 256), torch.full((1,), 0.02, device="cuda")),
    "gelu_and_mul_dynamic_quant_fp8": lambda: (random(7, 256),),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_calls_give_what_eager_ones_give(name, dynamic):
    op, arguments = getattr(ir.ops, name), CALLS[name]()
    torch._dynamo.reset()
    if dynamic:
        for given in arguments:
            if isinstance(given, Tensor) and given.shape == arguments[0].shape:
                torch._dynamo.mark_dynamic(given, 0)
    compiled = torch.compile(lambda *given: op(*given), backend="irframework", fullgraph=True)
    with ir.priority(**{name: "triton"}):  # what compiled code is not given unasked, too
        outputs = compiled(*arguments), op(*arguments)
    for got, expected in zip(*((t,) if isinstance(t, Tensor) else t for t in outputs), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def latent_decoding(
    lengths: tuple[int, ...], heads: int = 128, sizes: tuple[int, int] = (512, 64),
    dtype: torch.dtype = torch.bfloat16, block_size: int = 64, up: bool = True,
) -> dict[str, object]:  # fmt: skip
    """As `decoding`, over latent rows; queries and results are outside of the latent space, or in it."""
    rank, rope = sizes
    keys = decoding(lengths, 1, 1, (rank + rope, 1), dtype, block_size)
    kept = ("cu_seqlens_q", "max_seqlen_q", "seq_lens", "max_seqlen_k", "block_table")
    return {
        "query_nope": random(len(lengths), heads, 128 if up else rank, dtype=dtype),
        "query_rope": random(len(lengths), heads, rope, dtype=dtype),
        "latent": None,
        "scale": ((128 if up else rank) + rope) ** -0.5,
        "key_up": random(heads, 128, rank, dtype=dtype) / rank**0.5 if up else None,
        "value_up": random(heads, rank, 128, dtype=dtype, seed=4) / rank**0.5 if up else None,
        "latent_cache": keys["key_cache"].squeeze(2),
        **{name: keys[name] for name in kept},
    }


def assert_attends_to_rows(given: dict[str, object]) -> Tensor:
    """Within roundings of the queries, of the weights and of the result, of values of about 1."""
    got = ir.ops.mla_attention(**given)
    exact = ir.ops.mla_attention.native(**{name: wide(value) for name, value in given.items()})
    assert got.shape == exact.shape
    assert (got.double() - exact).abs().max() <= max(4 * torch.finfo(got.dtype).eps, 2e-5)
    return got


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("up", [True, False])
@pytest.mark.parametrize(
    ("heads", "sizes", "block_size"), [(128, (512, 64), 64), (16, (512, 64), 16), (20, (96, 24), 7), (1, (3, 5), 64)]
)
def test_queries_attend_to_the_latent_rows_of_their_sequences(dtype, heads, sizes, block_size, up):
    assert_attends_to_rows(latent_decoding((1, 17, 300, 4096, 777), heads, sizes, dtype, block_size, up))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("heads", [16, 20, 128])
@pytest.mark.parametrize("sequences", [1, 4, 40, 300])
def test_few_and_many_sequences_attend_to_their_latent_rows(dtype, heads, sequences):
    lengths = tuple(1 + 37 * number % 700 for number in range(sequences - 1))
    assert_attends_to_rows(latent_decoding((1500, *lengths), heads, dtype=dtype, up=False))


@pytest.mark.parametrize("sequences", [3, 200])
def test_latent_attention_compiled_for_any_number_of_sequences_attends_to_their_rows(sequences):
    torch._dynamo.reset()
    names = ("query_nope", "query_rope", "cu_seqlens_q", "seq_lens", "block_table")

    def step(given):
        return ir.ops.mla_attention(**given)

    compiled = torch.compile(step, backend="irframework", fullgraph=True)
    for count in (sequences, sequences + 1):
        given = latent_decoding((1500,) + (40,) * (count - 1), up=False)
        for name in names:
            torch._dynamo.mark_dynamic(given[name], 0)
        exact = ir.ops.mla_attention.native(**{name: wide(value) for name, value in given.items()})
        assert (compiled(given).double() - exact).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps


def test_latent_attention_gives_the_same_bits_in_a_graph():
    given = latent_decoding((9000, 3, 256, 1000), up=False)
    whole = assert_attends_to_rows(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = ir.ops.mla_attention(**given)
    for _ in range(3):
        got.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(got, whole)


@pytest.mark.parametrize("lengths", [(40, 200, 1), (9000, 3, 1000)])
@pytest.mark.parametrize("up", [True, False])
def test_codes_of_latent_attention_are_those_of_its_result(lengths, up):
    given, scale = latent_decoding(lengths, up=up), torch.tensor([0.004], device="cuda")
    y = ir.ops.mla_attention(**given)
    q, scales = ir.ops.mla_attention_group_quant_fp8(**given, column_major_scales=True)
    want, want_scales = ir.ops.group_quant_fp8.native(y.flatten(-2), 128, True)
    assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scales, want_scales)
    want = ir.ops.static_quant_fp8.native(y, scale)
    assert torch.equal(ir.ops.mla_attention(**given, output_scale=scale).view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("grouped", [False, True])
def test_a_quantisation_behind_latent_attention_is_fused_with_it_in_compiled_code(grouped):
    # In the latent space: Inductor may lay a product out otherwise, and it then be summed in another order.
    given, scale = latent_decoding((40, 2000, 1), heads=16, up=False), torch.tensor([0.004], device="cuda")
    torch._dynamo.reset()

    def step(given, scale):
        y = ir.ops.mla_attention(**given).flatten(-2)
        return ir.ops.group_quant_fp8(y) if grouped else (ir.ops.static_quant_fp8(y, scale),)

    with torch.no_grad():
        wanted, got = step(given, scale), torch.compile(step, backend="irframework", fullgraph=True)(given, scale)
        assert ir.last_report().fusions == {"mla_attention_group_quant_fp8" if grouped else "mla_attention": 1}
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))
