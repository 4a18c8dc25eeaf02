"""Our own SYCL kernels compute what the ops mean. They are compiled and run here, on the CPU device of OpenCL."""

import itertools
import os

import pytest
import torch
from torch import Tensor

import irframework as ir

pytestmark = [
    pytest.mark.sycl,
    pytest.mark.skipif(
        os.environ.get("IRFRAMEWORK_XPU_SYCL_DEVICE") != "cpu",
        reason="the SYCL kernels run on CPU tensors where IRFRAMEWORK_XPU_SYCL_DEVICE=cpu (make test-sycl)",
    ),
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
FP8 = torch.float8_e4m3fn
SCALE = torch.tensor([0.02])
OPS = (
    *("rms_norm", "fused_add_rms_norm", "silu_and_mul", "gelu_and_mul", "rotary_embedding"),
    *("static_quant_fp8", "dynamic_quant_fp8", "rms_norm_static_quant_fp8", "rms_norm_dynamic_quant_fp8"),
    *("fused_add_rms_norm_static_quant_fp8", "fused_add_rms_norm_dynamic_quant_fp8"),
    *("silu_and_mul_static_quant_fp8", "silu_and_mul_dynamic_quant_fp8"),
)
QUANTISING = [name for name in OPS if "quant" in name]


@pytest.fixture(scope="module", autouse=True)
def plugin():
    ir.load_plugins()
    impl = ir.ops.rms_norm.impls["xpu_kernels"]
    assert impl.supported, impl.unsupported_reason


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def arguments_of(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[object, ...]:
    """What the op's own generator makes; rows of gates have twice the length."""
    gated = name.startswith(("silu", "gelu")) or name == "rotary_embedding"
    shape = (*shape[:-1], 2 * shape[-1]) if gated else shape
    return getattr(ir.ops, name).generate_inputs(shape=shape, dtype=dtype, device="cpu")


def copies(arguments: tuple[object, ...]) -> list[object]:
    return [value.clone() if isinstance(value, Tensor) else value for value in arguments]


def listed(outputs: object) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def run(name: str, *arguments: object) -> list[Tensor]:
    """Call our implementation through the op; the arguments are seen to be left alone."""
    before = copies(arguments)
    assert getattr(ir.ops, name).impls["xpu_kernels"].supports_args(*arguments) is True
    with ir.priority({name: ["xpu_kernels"]}):
        outputs = there(listed(getattr(ir.ops, name)(*arguments)))
    for was, value in zip(before, arguments, strict=True):
        if isinstance(value, Tensor):
            assert same(was, value)
    return outputs


def native(name: str, *arguments: object) -> list[Tensor]:
    return there(listed(getattr(ir.ops, name).native(*arguments)))


def there(outputs: list[Tensor | None]) -> list[Tensor]:
    """The outputs without those that are nothing."""
    return [output for output in outputs if output is not None]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal, with NaN where NaN is."""
    return a.dtype == b.dtype and torch.equal(a.float().nan_to_num(nan=1e33), b.float().nan_to_num(nan=1e33))


def exact(name: str, *arguments: object) -> None:
    got, wanted = run(name, *arguments), native(name, *arguments)
    for mine, its in zip(got, wanted, strict=True):
        assert mine.shape == its.shape
        assert same(mine, its)


def close(name: str, *arguments: object) -> None:
    """As near to float64 as the op allows; shapes, dtypes and layouts are native's."""
    wide = [v.double() if isinstance(v, Tensor) and v.dtype in FLOATS and v is not SCALE else v for v in arguments]
    if "static" in name:
        wide = [v.float() if isinstance(v, Tensor) and v.numel() == 1 and v.dim() == 1 else v for v in wide]
    wanted = native(name, *wide)
    for mine, its, exactly in zip(run(name, *arguments), native(name, *arguments), wanted, strict=True):
        assert (mine.shape, mine.dtype, mine.is_contiguous()) == (its.shape, its.dtype, True)
        dtype = FP8 if mine.dtype is FP8 else arguments[0].dtype if arguments[0].is_floating_point() else mine.dtype
        tolerance = getattr(ir.ops, name).get_tolerance(dtype)
        torch.testing.assert_close(mine.double(), exactly.double(), atol=tolerance.atol, rtol=tolerance.rtol)


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All values of a dtype of 16 bits; of float32, many with random bits, and all that bfloat16 has."""
    short = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    if dtype is not torch.float32:
        return short.view(dtype)
    random = torch.randint(-(2**31), 2**31, (2**16,)).to(torch.int32).view(torch.float32)
    return torch.cat((short.view(torch.bfloat16).float(), random))


# ---- numerics ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(1,), (3, 7), (1, 1), (2, 3, 33), (5, 513), (2, 1, 2, 64), (4, 4096), (1, 20001)])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", OPS)
def test_a_kernel_is_as_near_to_float64_as_its_op_allows(name, dtype, shape):
    close(name, *arguments_of(name, shape, dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_codes_of_a_given_scale_are_exactly_natives(dtype):
    x = every_pattern(dtype)
    for scale in (0.02, 1.0, 1.7e-3, 3.1e30, 5e-39, 1e-39, -2.0):
        exact("static_quant_fp8", x, torch.tensor(scale))


def test_codes_come_from_the_product_with_the_inverse_scale():
    """Numbers whose quotient is half way between two codes: there the product is often on one side of it."""
    half_way = 1 + torch.arange(1, 16, 2) / 16
    differ = 0
    for scale in torch.arange(3.0, 200.0, 2.0):
        exact("static_quant_fp8", half_way * scale, scale)
        differ += int(
            (half_way.to(FP8).float() != native("static_quant_fp8", half_way * scale, scale)[0].float()).sum()
        )
    assert differ > 20


@pytest.mark.parametrize("dtype", FLOATS)
def test_codes_and_scales_of_rows_are_exactly_natives(dtype):
    exact("dynamic_quant_fp8", every_pattern(dtype).view(-1, 64))


@pytest.mark.parametrize("dtype", FLOATS)
def test_sums_are_rounded_as_torch_rounds(dtype):
    x = every_pattern(dtype).view(-1, 64)
    for added in (0.0, 1.0, -3.1, 6e4, 1e-7, 3e38):
        residual = torch.full(x.shape, added).to(dtype)
        assert same(run("fused_add_rms_norm", x, residual, None, 1e-6)[1], x + residual)


@pytest.mark.parametrize("name", [name for name in QUANTISING if name not in ("static_quant_fp8", "dynamic_quant_fp8")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fused_codes_are_those_of_the_parts(name, dtype):
    """The parts are the kernels of this provider, so that what is quantised is the same number."""
    arguments = arguments_of(name, (16, 1000), dtype)
    first, kind = ("silu_and_mul", "static") if name.startswith("silu") else (name.split("_static")[0], "static")
    first = first.split("_dynamic")[0]
    kind = "dynamic" if "dynamic" in name else kind
    parts = [value for value in arguments if not (isinstance(value, Tensor) and value.shape == (1,))]
    y, *residual = run(first, *parts)
    wanted = native(f"{kind}_quant_fp8", y, SCALE) if kind == "static" else native("dynamic_quant_fp8", y)
    for mine, its in zip(run(name, *arguments), [*wanted, *residual], strict=True):
        assert same(mine, its)


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm", "silu_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_kernel_rounds_in_between_where_native_rounds(name, dtype):
    """A difference in the last place of float32 reaches few results; another rounding in between reaches many."""
    arguments = arguments_of(name, (32, 1000), dtype)
    for mine, its in zip(run(name, *arguments), native(name, *arguments), strict=True):
        assert (mine != its).float().mean() < 0.005


SPECIAL = torch.tensor([0.0, -0.0, 1.0, -2.5, 1e-40, 6e4, -6e4, 3e38, float("inf"), -float("inf"), float("nan"), 448.0])


@pytest.mark.parametrize("value", [*SPECIAL.tolist(), "all"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", [name for name in OPS if name != "rotary_embedding"])
def test_special_values_give_what_native_gives(name, dtype, value):
    x, *others = arguments_of(name, (2, 12), dtype)
    x[0] = SPECIAL.to(dtype).repeat(x.shape[-1] // 12) if value == "all" else torch.tensor(value).to(dtype)
    for mine, its in zip(run(name, x, *others), native(name, x, *others), strict=True):
        assert torch.equal(mine.float().isnan(), its.float().isnan())
        tolerance = getattr(ir.ops, name).get_tolerance(FP8 if mine.dtype is FP8 else dtype)
        torch.testing.assert_close(mine.float(), its.float(), atol=tolerance.atol, rtol=tolerance.rtol, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in OPS if "norm" in name])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_weight_may_be_float32(name, dtype):
    arguments = [
        v.float() if isinstance(v, Tensor) and v.shape == (96,) else v for v in arguments_of(name, (5, 96), dtype)
    ]
    close(name, *arguments)


def test_no_bits_of_a_nan_become_a_number():
    weight = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    for dtype in FLOATS:
        assert run("rms_norm", torch.ones(1, 4).to(dtype), weight, 1e-6)[0].isnan().all()


@pytest.mark.parametrize("name", [name for name in OPS if "norm" in name])
def test_a_weight_may_be_left_out(name):
    close(
        name,
        *[None if isinstance(v, Tensor) and v.shape == (96,) else v for v in arguments_of(name, (5, 96), FLOATS[1])],
    )


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_each_gelu_is_near_to_float64(approximate):
    for dtype in FLOATS:
        close("gelu_and_mul", torch.randn(7, 66).to(dtype), approximate)


def test_a_row_does_not_depend_on_the_others():
    x, weight = torch.randn(33, 1000), torch.randn(1000)
    together = run("rms_norm", x, weight, 1e-6)[0]
    for row in (0, 17, 32):
        assert torch.equal(run("rms_norm", x[row : row + 1], weight, 1e-6)[0], together[row : row + 1])


# ---- layouts and sizes -------------------------------------------------------------------------------------------

LAYOUTS = {
    "rows of a wider tensor": lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    "every second row": lambda x: torch.stack((x, x), -2)[..., 0, :],
    "leading dimensions exchanged": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "behind an offset": lambda x: torch.cat((x.new_zeros(3), x.flatten()))[3:].view(x.shape),
    "one row for all": lambda x: x[:1, :1].expand(x.shape),
    "contiguous with a stride of its own": lambda x: torch.cat((x[:, :1], x[:, :1]), 1)[:, :1],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [name for name in OPS if name != "rotary_embedding"])
def test_rows_are_read_where_they_lie(name, layout):
    arguments = arguments_of(name, (3, 4, 30), torch.bfloat16)
    close(name, *[LAYOUTS[layout](v) if isinstance(v, Tensor) and v.dim() == 3 else v for v in arguments])


def test_rows_with_three_leading_dimensions_of_any_strides_are_read():
    x = torch.randn(4, 3, 2, 30).permute(2, 0, 1, 3)
    exact("dynamic_quant_fp8", x)


def test_a_position_of_memory_beyond_32_bits_is_reached():
    memory = torch.empty(2**31 + 64, dtype=torch.bfloat16)  # pages that nobody touches cost nothing
    x = memory.as_strided((2, 64), (2**31, 1))
    x.copy_(torch.randn(2, 64))
    exact("dynamic_quant_fp8", x)


def test_there_may_be_more_rows_than_work_groups():
    exact("dynamic_quant_fp8", torch.randn(70001, 3))


@pytest.mark.parametrize("name", OPS)
def test_no_rows_give_no_rows(name):
    exact(name, *arguments_of(name, (0, 64), torch.bfloat16))


@pytest.mark.parametrize("name", ["dynamic_quant_fp8", "rms_norm_dynamic_quant_fp8"])
def test_rows_of_no_elements_have_a_scale(name):
    exact(name, *arguments_of(name, (3, 0), torch.float32))


# ---- rotary_embedding --------------------------------------------------------------------------------------------


def heads(lead: tuple[int, ...], count: int, dtype: torch.dtype, apart: bool) -> Tensor:
    x = torch.randn(*lead, count, 16).to(dtype)
    return x if apart else x.flatten(-2)


@pytest.mark.parametrize(("apart", "with_key", "is_neox"), list(itertools.product((True, False), repeat=3)))
@pytest.mark.parametrize("lead", [(5,), (2, 3), (2, 2, 2)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_heads_are_rotated(dtype, lead, apart, with_key, is_neox):
    positions, cache = torch.randint(0, 8, lead), torch.randn(8, 12).to(dtype)
    query, key = heads(lead, 4, dtype, apart), heads(lead, 3, dtype, apart)
    arguments = (positions, query, key if with_key else None, cache, 16, is_neox)
    if dtype is torch.float32:
        exact("rotary_embedding", *arguments)
    for mine, its in zip(run("rotary_embedding", *arguments), native("rotary_embedding", *arguments), strict=True):
        assert same(mine, its)


def test_positions_may_be_int32_and_angles_float32():
    query = heads((5,), 4, torch.bfloat16, False)
    exact("rotary_embedding", torch.arange(5, dtype=torch.int32), query, None, torch.randn(8, 16), 16)


def test_heads_are_read_where_they_lie():
    merged = torch.randn(5, 4 * 16 + 2 * 16 + 2 * 16)
    query, key, _ = merged.split((64, 32, 32), -1)
    cache = torch.randn(8, 32)[:, :16]
    exact("rotary_embedding", torch.arange(5), query, key, cache, 16)
    turned = torch.randn(4, 5, 16).transpose(0, 1)
    exact("rotary_embedding", torch.arange(5), turned, turned[:, 1:3], cache, 16)


@pytest.mark.parametrize("position", [-1, 8, 2**40])
def test_a_position_outside_the_cache_gives_nan(position):
    positions, cache = torch.tensor([1, position, 2]), torch.randn(8, 12)
    query = torch.randn(3, 32)
    kernel = ir.ops.rotary_embedding.impls["xpu_kernels"]
    got = kernel.fn(positions, query, None, cache, 16)[0]  # a call of the op looks at positions first
    wanted = native("rotary_embedding", torch.tensor([1, 3, 2]), query, None, cache, 16)[0]
    assert torch.equal(got[::2], wanted[::2])
    assert got[1].view(2, 16)[:, :12].isnan().all()
    assert torch.equal(got[1].view(2, 16)[:, 12:], query[1].view(2, 16)[:, 12:])


def test_leading_dimensions_that_differ_are_an_error_of_the_op():
    with ir.priority(rotary_embedding="xpu_kernels"), pytest.raises(ir.errors.ArgumentError, match="query"):
        ir.ops.rotary_embedding(torch.arange(4), torch.randn(3, 32), None, torch.randn(8, 16), 16)
