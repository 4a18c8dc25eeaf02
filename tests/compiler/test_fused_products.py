"""Fusion of a matrix product and the gate behind it: every spelling, any number of rows, and what must not be fused.

Provider `k` of each fused op is its native body, so what is fused equals what is not. How often something was fused is
looked at first: equal results alone would show nothing.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_fused_quantization import lowered  # with Inductor's decompositions
from torch import Tensor, nn

import irframework as ir

pytestmark = pytest.mark.usefixtures("seeded", "kernels")

FP8 = torch.float8_e4m3fn
LINEAR = "linear_silu_and_mul"
SCALED = "scaled_linear_silu_and_mul_static_quant_fp8"
PARTS = ("silu_and_mul", "static_quant_fp8", "silu_and_mul_static_quant_fp8")
IN, HIDDEN = 32, 48
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DYNAMIC = pytest.mark.parametrize("dynamic", [False, True])


@pytest.fixture
def kernels() -> Iterator[None]:
    """Provider `k` for products, gates and codes; it is chosen for the products alone."""
    names = (LINEAR, SCALED, *PARTS)
    for name in names:
        op = getattr(ir.ops, name)
        op.register_impl("k")(op.native)
    try:
        yield
    finally:
        for name in names:
            getattr(ir.ops, name).unregister_impl("k")


def fusions(
    program: Callable[..., Any],
    *inputs: Any,
    chosen: tuple[str, ...] = (LINEAR, SCALED),
    backend: Any = lowered,
    **options: Any,
) -> dict[str, int]:
    """What a program is fused to, where provider `k` is chosen for some ops; it gives what it gives unfused."""
    torch._dynamo.reset()
    with torch.no_grad(), ir.priority({name: "k" if name in chosen else "native" for name in ir.ops.__all__}):
        wanted = program(*inputs)
        got = torch.compile(program, backend=backend, fullgraph=True, **options)(*inputs)
    for one, other in zip(*((each,) if isinstance(each, Tensor) else each for each in (got, wanted)), strict=True):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        if one.dtype == FP8:
            torch.testing.assert_close(one.float(), other.float(), atol=2.0**-9, rtol=2.0**-3)
        else:
            torch.testing.assert_close(one, other)
    report = ir.last_report()
    assert report is not None
    return dict(report.fusions)


def reasons() -> dict[str, str]:
    report = ir.last_report()
    assert report is not None
    return {miss.op: miss.reason for miss in report.missed_fusions}


def by_slices(h: Tensor) -> Tensor:
    return F.silu(h[..., : h.shape[-1] // 2]) * h[..., h.shape[-1] // 2 :]


def by_chunks(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, dim=-1)
    return up * F.silu(gate)


GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "silu_and_mul": lambda h: ir.ops.silu_and_mul(h),
    "slices": by_slices,
    "chunks": by_chunks,
}
GATE = pytest.mark.parametrize("gate", GATES.values(), ids=GATES)


class Layer(nn.Module):
    """A product and a gate, spelt in some way."""

    def __init__(
        self, product: str, gate: Callable[[Tensor], Tensor], dtype: torch.dtype, biased: bool = False
    ) -> None:
        super().__init__()
        self.product, self.gate = product, gate
        self.weight = nn.Parameter((torch.randn(2 * HIDDEN, IN) / IN**0.5).to(dtype))
        self.bias = nn.Parameter(torch.randn(2 * HIDDEN).to(dtype)) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        if self.product == "op":
            return self.gate(ir.ops.linear(x, self.weight, self.bias))
        if self.product == "matmul":
            return self.gate(x @ self.weight.t())
        return self.gate(F.linear(x, self.weight, self.bias))


# --- numbers ---------------------------------------------------------------------------------------------------------


@DYNAMIC
@GATE
@pytest.mark.parametrize("shape", [(5, IN), (2, 3, IN)])
@pytest.mark.parametrize(("product", "biased"), [("F", False), ("F", True), ("op", False), ("op", True)])
def test_a_product_and_a_gate_are_one_op_however_they_are_spelt(product, biased, shape, gate, dynamic):
    layer = Layer(product, gate, torch.bfloat16, biased)
    assert fusions(layer, torch.randn(shape).bfloat16(), dynamic=dynamic) == {LINEAR: 1}


@GATE
@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes_make_no_difference(gate, dtype):
    assert fusions(Layer("matmul", gate, dtype), torch.randn(5, IN).to(dtype)) == {LINEAR: 1}


@DYNAMIC
@pytest.mark.parametrize("backend", ["irframework", "inductor"])
def test_both_backends_fuse_it(backend, dynamic):
    ir.install()
    layer = Layer("F", by_chunks, torch.float32)
    assert fusions(layer, torch.randn(5, IN), backend=backend, dynamic=dynamic) == {LINEAR: 1}


def test_one_graph_serves_any_number_of_rows():
    layer = Layer("F", by_slices, torch.bfloat16)
    few, many = torch.randn(5, IN).bfloat16(), torch.randn(300, IN).bfloat16()
    assert fusions(layer, few, dynamic=True) == {LINEAR: 1}
    with torch.no_grad(), ir.priority({LINEAR: "k"}):
        compiled = torch.compile(layer, backend=lowered, dynamic=True, fullgraph=True)
        compiled(few)
        with torch._dynamo.config.patch(error_on_recompile=True):
            torch.testing.assert_close(compiled(many), layer(many))


def test_a_norm_in_front_and_a_product_behind_stay_what_they_are():
    layer, norm, down = Layer("F", by_chunks, torch.bfloat16), torch.ones(IN), torch.randn(IN, HIDDEN).bfloat16()
    found = fusions(lambda x: F.linear(layer(ir.ops.rms_norm(x, norm, 1e-6)), down), torch.randn(5, IN).bfloat16())
    assert found == {LINEAR: 1}


# --- codes -----------------------------------------------------------------------------------------------------------


def multiplied(x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, **more: Any) -> Tensor:
    options: dict[str, Any] = {"out_dtype": torch.bfloat16, "use_fast_accum": True} | more
    return torch._scaled_mm(x, weight.t(), x_scale, weight_scale, **options)


def quantised(y: Tensor, scale: Tensor) -> Tensor:
    return (y.float() * (1.0 / scale)).clamp(-448, 448).to(FP8)


def codes(by_row: bool = False) -> tuple[Tensor, ...]:
    """Codes and scales of a product, and the scale of what comes out."""
    made = list(ir.ops.scaled_linear.input_generator(shape=(5, IN), dtype=torch.float32, device="cpu"))
    return *made[int(by_row)][:4], torch.tensor([0.02])


class Codes(nn.Module):
    """A product of codes, a gate and a quantisation, spelt in some way; the weight and its scale are the module's."""

    def __init__(self, program: Callable[..., Any], by_row: bool = False) -> None:
        super().__init__()
        self.program = program
        x, weight, x_scale, weight_scale, scale = codes(by_row)
        self.inputs = x, x_scale
        for name, tensor in {"weight": weight, "weight_scale": weight_scale, "scale": scale}.items():
            self.register_buffer(name, tensor)

    def forward(self, x: Tensor, x_scale: Tensor) -> Any:
        return self.program(x, self.weight, x_scale, self.weight_scale, self.scale)


PROGRAMS: dict[str, Callable[..., Tensor]] = {
    "ops behind torch's product": lambda x, w, a, b, s: ir.ops.static_quant_fp8(
        ir.ops.silu_and_mul(multiplied(x, w, a, b)), s
    ),
    "the fused op behind torch's product": lambda x, w, a, b, s: ir.ops.silu_and_mul_static_quant_fp8(
        multiplied(x, w, a, b), s
    ),
    "plain torch": lambda x, w, a, b, s: quantised(by_chunks(multiplied(x, w, a, b)), s),
    "ops only": lambda x, w, a, b, s: ir.ops.static_quant_fp8(ir.ops.silu_and_mul(ir.ops.scaled_linear(x, w, a, b)), s),
}


@DYNAMIC
@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_a_product_of_codes_a_gate_and_codes_are_one_op_however_they_are_spelt(program, by_row, dynamic):
    module = Codes(program, by_row)
    assert fusions(module, *module.inputs, dynamic=dynamic) == {SCALED: 1}


@pytest.mark.parametrize(
    "more", [{"use_fast_accum": False}, {"out_dtype": torch.float16}, {"out_dtype": torch.float32}], ids=str
)
def test_how_sums_are_kept_and_rounded_is_an_argument_of_the_op(more):
    module = Codes(lambda x, w, a, b, s: quantised(by_slices(multiplied(x, w, a, b, **more)), s))
    assert fusions(module, *module.inputs) == {SCALED: 1}
    compiled = ir.last_report().selected_impls
    assert set(compiled[SCALED].values()) == {"k"}


@DYNAMIC
@pytest.mark.parametrize("backend", ["irframework", "inductor"])
def test_both_backends_fuse_codes(backend, dynamic):
    ir.install()
    module = Codes(PROGRAMS["plain torch"])
    assert fusions(module, *module.inputs, backend=backend, dynamic=dynamic) == {SCALED: 1}


# --- which op wins ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", [GATES["silu_and_mul"], by_chunks])
def test_codes_of_a_gated_product_of_numbers_are_made_by_the_gate(gate):
    """No op has all three, and the gate with the codes is larger than the product with the gate."""
    layer, scale = Layer("F", gate, torch.bfloat16), torch.tensor([0.02])
    x = torch.randn(5, IN).bfloat16()
    both = (LINEAR, *PARTS)
    assert fusions(lambda x: quantised(layer(x), scale), x, chosen=both) == {"silu_and_mul_static_quant_fp8": 1}
    found = fusions(lambda x: ir.ops.static_quant_fp8(layer(x), scale), x)
    assert found == {LINEAR: 1}


def test_a_product_of_codes_keeps_the_gate_with_codes_where_nobody_has_all():
    module = Codes(PROGRAMS["plain torch"])
    assert fusions(module, *module.inputs, chosen=PARTS) == {"silu_and_mul_static_quant_fp8": 1}


# --- what must not be fused ------------------------------------------------------------------------------------------


def test_a_product_that_something_else_reads_is_not_computed_twice():
    layer = Layer("F", lambda h: (by_slices(h), h.sum()), torch.bfloat16)
    assert fusions(layer, torch.randn(5, IN).bfloat16()) == {}
    assert "is also used by" in reasons()[LINEAR]
    module = Codes(lambda x, w, a, b, s: (quantised(by_slices(h := multiplied(x, w, a, b)), s), h.sum()))
    assert fusions(module, *module.inputs) == {}
    assert "is also used by" in reasons()[SCALED]


def test_nothing_is_fused_where_native_alone_is_chosen():
    assert fusions(Layer("F", by_slices, torch.bfloat16), torch.randn(5, IN).bfloat16(), chosen=()) == {}
    assert reasons()[LINEAR].startswith("only native would run it")
    module = Codes(PROGRAMS["plain torch"])
    assert fusions(module, *module.inputs, chosen=()) == {}
    assert reasons()[SCALED].startswith("only native would run it")


def test_gates_of_two_products_are_no_product_with_a_gate():
    gate, up = (nn.Linear(IN, HIDDEN, bias=False) for _ in range(2))
    found = fusions(lambda x: F.silu(gate(x)) * up(x), torch.randn(5, IN), chosen=(LINEAR, SCALED, *PARTS))
    assert found == {}
    assert LINEAR not in reasons()


@pytest.mark.parametrize(
    "gate",
    [
        lambda h: F.gelu(h[..., :HIDDEN]) * h[..., HIDDEN:],
        lambda h: F.silu(h[..., HIDDEN:]) * h[..., :HIDDEN],
        lambda h: F.silu(h[..., :HIDDEN]) * h[..., 1 : HIDDEN + 1],
        lambda h: F.silu(h[..., :HIDDEN] * 2) * h[..., HIDDEN:],
        lambda h: (F.silu(h[..., :HIDDEN].float()) * h[..., HIDDEN:].float()).bfloat16(),
    ],
    ids=["GELU", "up first", "other columns", "twice the gate", "rounded once"],
)
def test_what_looks_like_a_gate_and_is_another_stays(gate):
    assert fusions(Layer("F", gate, torch.bfloat16), torch.randn(5, IN).bfloat16()) == {}


def test_a_weight_that_stands_by_columns_is_no_weight_of_the_op():
    """Its rows are made nowhere in the graph."""
    weight = torch.randn(IN, 2 * HIDDEN)
    assert fusions(lambda x: by_slices(x @ weight), torch.randn(5, IN)) == {}
