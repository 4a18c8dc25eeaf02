"""Quantisations fuse with what is in front of them: every family, dtypes, attributes, spellings and layouts.

Provider `k` of each fused op is its native body, so what is fused equals what is not, bit for bit. How often something
was fused is looked at first: equal results alone would show nothing.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import irframework as ir

pytestmark = pytest.mark.usefixtures("seeded", "kernels")

FP8 = torch.float8_e4m3fn
EPSILON = 1e-5
GATES = ("silu_and_mul", "gelu_and_mul")
NORMS = ("rms_norm", "fused_add_rms_norm")
KINDS = ("static_quant_fp8", "dynamic_quant_fp8", "group_quant_fp8", "quant_nvfp4")
FAMILIES = tuple(
    (first, kind) for first in (*NORMS, *GATES) for kind in KINDS if (first, kind) != ("gelu_and_mul", "quant_nvfp4")
)
FUSED = tuple(f"{first}_{kind}" for first, kind in FAMILIES)


@pytest.fixture
def kernels() -> Iterator[None]:
    for name in FUSED:
        op = getattr(ir.ops, name)
        op.register_impl("k")(op.native)
    try:
        with ir.priority({name: "k" if name in FUSED else "native" for name in ir.ops.__all__}):
            yield
    finally:
        for name in FUSED:
            getattr(ir.ops, name).unregister_impl("k")


def lowered(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile as for Inductor, with its decompositions, and run what the pipeline leaves."""
    from functorch.compile import make_boxed_func
    from torch._inductor.decomposition import select_decomp_table

    def run(graph: torch.fx.GraphModule, arguments: list[Any]) -> Callable[..., Any]:
        return make_boxed_func(ir.compiler.lower(graph, arguments, inference=True).forward)

    ir.compiler.run_pre_grad_stage(module)
    backend = aot_autograd(fw_compiler=run, inference_compiler=run, decompositions=select_decomp_table())
    return backend(module, inputs)


def bits(value: Tensor) -> Tensor:
    return value.view(torch.uint8) if value.dtype.itemsize == 1 else value


def fusions(program: Callable[..., Any], *inputs: Any, exact: bool = True, **options: Any) -> dict[str, int]:
    """What a program is fused to; what it gives is what it gives unfused: bit for bit, or as near as codes are."""
    torch._dynamo.reset()
    with torch.no_grad():
        wanted = program(*(x.clone() if isinstance(x, Tensor) else x for x in inputs))
        got = torch.compile(program, backend=lowered, fullgraph=True, **options)(*inputs)
    report = ir.last_report()
    assert report is not None
    assert len(got) == len(wanted)
    for one, other in zip(got, wanted, strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        if exact:
            assert torch.equal(bits(one), bits(other))
        else:
            apart = (one.float() - other.float()).abs() > 2.0**-9 + 2.0**-3 * other.float().abs()
            assert apart.float().mean() < (0.01 if one.dtype == torch.uint8 else 1e-6)  # two codes to a byte
    return dict(report.fusions)


def rows(dtype: torch.dtype, *shape: int) -> Tensor:
    return (torch.randn(shape or (4, 256)) * 2).to(dtype)


def quantised(kind: str, y: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    op = getattr(ir.ops, kind)
    outputs = op(y, scale) if kind in ("static_quant_fp8", "quant_nvfp4") else op(y)
    return (outputs,) if isinstance(outputs, Tensor) else outputs


# --- the whole matrix of dtypes --------------------------------------------------------------------------------------

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
WEIGHTS = ("same", "float32", "bfloat16", "none")
USUAL = [(torch.bfloat16, kind) for kind in WEIGHTS] + [(torch.float32, "bfloat16")]
MATRIX = pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        pytest.param(dtype, kind, marks=() if (dtype, kind) in USUAL else pytest.mark.slow)
        for dtype in FLOATS
        for kind in WEIGHTS
    ],
)


def weight_of(kind: str, dtype: torch.dtype) -> Tensor | None:
    dtypes = {"same": dtype, "float32": torch.float32, "bfloat16": torch.bfloat16}
    return torch.randn(256).to(dtypes[kind]) if kind in dtypes else None


@MATRIX
def test_every_family_of_ops_fuses_whatever_the_dtypes_are(dtype, kind):
    families = [family for family in FAMILIES if family[0] in NORMS or kind == "same"]

    def program(xs, weight, scale):
        outputs = []
        for (first, second), x in zip(families, xs, strict=True):
            if first == "rms_norm":
                outputs += quantised(second, ir.ops.rms_norm(x, weight, EPSILON), scale)
            elif first == "fused_add_rms_norm":
                y, total = ir.ops.fused_add_rms_norm(x, 2 * x, weight, EPSILON)
                outputs += (*quantised(second, y, scale), total)
            else:
                outputs += quantised(second, getattr(ir.ops, first)(x), scale)
        return outputs

    xs = [rows(dtype, 4, 512 if first in GATES else 256) for first, _ in families]
    # Compilers take gates apart, fused or not, which rounds otherwise now and then.
    found = fusions(program, xs, weight_of(kind, dtype), torch.tensor([0.02]), exact=kind != "same")
    assert found == Counter(f"{first}_{second}" for first, second in families)


# --- attributes are wildcards ----------------------------------------------------------------------------------------

LAYOUTS = [
    (size, column_major, powers) for size in (128, 64) for column_major in (False, True) for powers in (False, True)
]


@pytest.mark.parametrize("first", [*NORMS, *GATES])
def test_groups_of_any_size_and_layout_are_one_op(first):
    """One program with all of them, each with an epsilon or an approximation of its own."""

    def program(xs, weight):
        outputs = []
        for number, (x, layout) in enumerate(zip(xs, LAYOUTS, strict=True)):
            total = ()
            if first == "rms_norm":
                y = ir.ops.rms_norm(x, weight, 1e-6 * (number + 1))
            elif first == "fused_add_rms_norm":
                y, *total = ir.ops.fused_add_rms_norm(x, 2 * x, weight, 1e-6 * (number + 1))
            elif first == "gelu_and_mul":
                y = ir.ops.gelu_and_mul(x, ("none", "tanh")[number % 2])
            else:
                y = ir.ops.silu_and_mul(x)
            outputs += (*ir.ops.group_quant_fp8(y, *layout), *total)
        return outputs

    xs = [rows(torch.bfloat16, 4, 512) for _ in LAYOUTS]
    assert fusions(program, xs, torch.randn(512)) == {f"{first}_group_quant_fp8": len(LAYOUTS)}


def test_a_group_that_is_a_row_is_the_op_for_rows():
    found = fusions(
        lambda x, w: ir.ops.group_quant_fp8(ir.ops.rms_norm(x, w, EPSILON), 256),
        rows(torch.bfloat16),
        torch.randn(256),
    )
    assert found == {"rms_norm_dynamic_quant_fp8": 1}


def test_a_group_that_is_a_row_keeps_its_own_op_where_the_scales_are_others():
    found = fusions(lambda x: ir.ops.group_quant_fp8(ir.ops.silu_and_mul(x), 128, False, True), rows(torch.bfloat16))
    assert found == {"silu_and_mul_group_quant_fp8": 1}


# --- written out in torch --------------------------------------------------------------------------------------------


def plain_norm(x, weight):
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPSILON)
    return h.to(x.dtype) if weight is None else weight * h.to(x.dtype)


def plain_static(y, scale):
    return ((y.float() * (1.0 / scale)).clamp(-448, 448).to(FP8),)


def plain_rows(y):
    scale = (y.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    return (y.float() * (1.0 / scale)).clamp(-448, 448).to(FP8), scale


def plain_rows_in_their_dtype(y):
    scale = torch.clamp(y.abs().amax(dim=-1, keepdim=True).float() / 448.0, min=1 / (448 * 512))
    return (y.float() * scale.reciprocal()).clamp(min=-448, max=448).to(FP8), scale


def plain_groups(y, size=128, column_major=False):
    groups = y.view(*y.shape[:-1], -1, size).float()
    scale = (groups.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
    q = (groups * (1.0 / scale)).clamp(-448, 448).to(FP8).view(y.shape)
    scale = scale.squeeze(-1)
    return q, scale.transpose(-1, -2).contiguous() if column_major else scale


def plain_program(xs, weight, scale, number):
    outputs = []
    quantise = [
        lambda y: plain_static(y, scale),
        lambda y: plain_static(y, number),
        plain_rows,
        plain_rows_in_their_dtype,
        plain_groups,
        lambda y: plain_groups(y, 64, True),
    ]
    for function, (a, b) in zip(quantise, xs, strict=True):
        outputs += function(plain_norm(a, weight))
        total = a + b
        outputs += (*function(plain_norm(total, weight)), total)
    return outputs


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [*((dtype, "same") for dtype in FLOATS), (FLOATS[1], "none"), (FLOATS[1], "float32"), (FLOATS[0], "bfloat16")],
)
def test_programs_in_plain_torch_fuse_where_the_norm_rounds_as_the_op_does(dtype, kind):
    """With a weight of another dtype they promote, and quantise what the op would round: they stay as they are."""
    xs = [(rows(dtype), rows(dtype)) for _ in range(6)]
    weight = weight_of(kind, dtype)
    found = fusions(plain_program, xs, weight, torch.tensor([0.02]), torch.tensor(0.03))
    same = weight is None or weight.dtype == dtype
    assert found == ({f"{first}_{second}": 2 for first in NORMS for second in KINDS[:3]} if same else {})


@pytest.mark.parametrize("dtype", FLOATS)
def test_gates_in_plain_torch_fuse(dtype):
    def program(xs, scale):
        outputs = []
        for number, x in enumerate(xs):
            gate, up = x.chunk(2, -1) if number % 2 else (x[..., :256], x[..., 256:])
            y = F.silu(gate) * up if number < 3 else F.gelu(gate, approximate=("none", "tanh")[number % 2]) * up
            quantise = (lambda y: plain_static(y, scale), plain_rows, plain_groups)[number % 3]
            outputs += quantise(y)
        return outputs

    found = fusions(program, [rows(dtype, 4, 512) for _ in range(6)], torch.tensor([0.02]))
    assert found == {f"{first}_{second}": 1 for first in GATES for second in KINDS[:3]}


@pytest.mark.parametrize("plain_first", [False, True])
def test_one_half_may_be_an_op_and_the_other_plain_torch(plain_first):
    def program(x, weight):
        if plain_first:
            return ir.ops.dynamic_quant_fp8(plain_norm(x, weight))
        return plain_rows(ir.ops.rms_norm(x, weight, EPSILON))

    assert fusions(program, rows(torch.bfloat16), weight_of("same", torch.bfloat16)) == {
        "rms_norm_dynamic_quant_fp8": 1
    }


# --- layouts ---------------------------------------------------------------------------------------------------------

SHAPES = {
    "three dimensions": lambda: rows(torch.bfloat16, 2, 3, 256),
    "one row": lambda: rows(torch.bfloat16, 1, 256),
    "rows of a wider matrix": lambda: rows(torch.bfloat16, 4, 300)[:, 8:264],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_any_layout_fuse(shape):
    def program(x, weight):
        y, total = ir.ops.fused_add_rms_norm(x, x, weight, EPSILON)
        return (*ir.ops.group_quant_fp8(y, 64), total, *ir.ops.dynamic_quant_fp8(ir.ops.rms_norm(x, weight, EPSILON)))

    assert fusions(program, SHAPES[shape](), torch.randn(256)) == {
        "fused_add_rms_norm_group_quant_fp8": 1,
        "rms_norm_dynamic_quant_fp8": 1,
    }


def test_transposed_rows_give_contiguous_codes():
    def program(x, weight):
        return ir.ops.dynamic_quant_fp8(ir.ops.rms_norm(x, weight, EPSILON))

    found = fusions(program, rows(torch.bfloat16, 3, 2, 256).transpose(0, 1), torch.randn(256))
    assert found == {"rms_norm_dynamic_quant_fp8": 1}


RESHAPED = {
    "static_quant_fp8": lambda y: ir.ops.static_quant_fp8(y, torch.full((1,), 0.1)),
    "dynamic_quant_fp8": lambda y: ir.ops.dynamic_quant_fp8(y),
    "group_quant_fp8": lambda y: ir.ops.group_quant_fp8(y, 64),
    "group_quant_fp8, powers of two": lambda y: ir.ops.group_quant_fp8(y, 128, False, True),
    "quant_nvfp4": lambda y: ir.ops.quant_nvfp4(y, torch.full((1,), 0.01)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", RESHAPED)
def test_a_reshape_between_the_two_does_not_matter(kind, dynamic):
    def program(x, weight):
        return RESHAPED[kind](ir.ops.rms_norm(x, weight, EPSILON).view(-1, 256))

    found = fusions(program, rows(torch.bfloat16, 2, 3, 256), torch.randn(256), dynamic=dynamic)
    assert found == {f"rms_norm_{kind.split(',')[0]}": 1}


def test_rows_that_stand_otherwise_in_as_many_dimensions_are_no_view_of_computed_sizes():
    def program(x, weight):
        return ir.ops.group_quant_fp8(ir.ops.rms_norm(x, weight, EPSILON).view(x.shape[0] // 2, -1, 256), 64)

    assert fusions(program, rows(torch.bfloat16, 4, 3, 256), torch.randn(256), dynamic=True) == {}
    (missed,) = ir.last_report().missed_fusions
    assert "has another shape, with a size that is no input of the graph" in missed.reason


def test_scales_that_stand_by_columns_of_reshaped_rows_are_told():
    def program(x, weight):
        return ir.ops.group_quant_fp8(ir.ops.rms_norm(x, weight, EPSILON).view(-1, 256), 64, True)

    assert fusions(program, rows(torch.bfloat16, 2, 3, 256), torch.randn(256)) == {}
    (missed,) = ir.last_report().missed_fusions
    assert "its output 1 is computed nowhere here" in missed.reason


def test_rows_of_any_number_fuse():
    def program(x, weight):
        return (
            *ir.ops.group_quant_fp8(ir.ops.rms_norm(x, weight, EPSILON), 128),
            *plain_rows(F.silu(x[..., :128]) * x[..., 128:]),
        )

    found = fusions(program, rows(torch.bfloat16, 5, 256), torch.randn(256), dynamic=True)
    assert found == {"rms_norm_group_quant_fp8": 1, "silu_and_mul_dynamic_quant_fp8": 1}


def test_a_sum_that_nobody_reads_is_computed_by_the_op_in_front_anyway():
    def program(x, r, weight):
        return ir.ops.group_quant_fp8(ir.ops.fused_add_rms_norm(x, r, weight, EPSILON)[0], 128)

    found = fusions(program, rows(torch.bfloat16), rows(torch.bfloat16), torch.randn(256))
    assert found == {"fused_add_rms_norm_group_quant_fp8": 1}


# --- what must not ---------------------------------------------------------------------------------------------------


def test_a_norm_that_something_else_reads_is_not_computed_twice():
    def program(x, weight):
        y = ir.ops.rms_norm(x, weight, EPSILON)
        return (*ir.ops.group_quant_fp8(y, 128), y)

    assert fusions(program, rows(torch.bfloat16), torch.randn(256)) == {}


NEAR = {
    "another largest code": lambda y: ((y.float() * (1.0 / 0.5)).clamp(-240, 240).to(FP8),),
    "another smallest scale": lambda y: (
        (s := (y.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1e-12)),
        (y.float() * (1.0 / s)).clamp(-448, 448).to(FP8),
    ),
    "divided by the scale": lambda y: (
        (s := (y.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))),
        (y.float() / s).clamp(-448, 448).to(FP8),
    ),
    "the largest of a column": lambda y: (
        (s := (y.float().abs().amax(0, keepdim=True) / 448).clamp(min=1 / (448 * 512))),
        (y.float() * (1.0 / s)).clamp(-448, 448).to(FP8),
    ),
    "another format": lambda y: (
        (s := (y.float().abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))),
        (y.float() * (1.0 / s)).clamp(-448, 448).to(torch.float8_e5m2),
    ),
    "the scale of what was not rounded": lambda y: (
        (s := ((y.float() * 2).abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))),
        (y.float() * (1.0 / s)).clamp(-448, 448).to(FP8),
    ),
}


@pytest.mark.parametrize("name", NEAR)
def test_what_looks_like_a_quantisation_and_is_another_stays(name):
    assert (
        fusions(lambda x, w: NEAR[name](ir.ops.rms_norm(x, w, EPSILON)), rows(torch.bfloat16), torch.randn(256)) == {}
    )


@pytest.mark.parametrize("kind", ["float32", "same"])
def test_a_norm_that_is_not_rounded_in_front_of_the_codes_stays(kind):
    """The op for these rows rounds there, so its codes would be others; wider rows would be written to memory first."""

    def program(x, weight):
        h = x.float()
        return plain_rows(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPSILON) * weight)

    assert fusions(program, rows(torch.bfloat16), weight_of(kind, torch.bfloat16)) == {}
