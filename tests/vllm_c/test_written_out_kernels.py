"""silu_mul, gelu_mul and apply_rotary_pos_emb of the C++ kernels, straight through their torch ops."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from irframework_vllm_c import cpu_only
from reference import assert_near_exact, exact_activation
from torch import Tensor

import irframework as ir

KERNELS = torch.ops.irframework_vllm_c
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
GATES = ["silu", "none", "tanh"]  # silu_mul, and the words of gelu_mul


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).mul(3).to(dtype)


def gated(gate: Tensor, up: Tensor, name: str) -> Tensor:
    return cpu_only.silu_mul(gate, up) if name == "silu" else cpu_only.gelu_mul(gate, up, name)


def native_gated(gate: Tensor, up: Tensor, name: str) -> Tensor:
    return ir.ops.silu_mul.native(gate, up) if name == "silu" else ir.ops.gelu_mul.native(gate, up, name)


# ---- gates ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 33, 576, 5000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GATES)
def test_gates_are_close_to_float64(isa: str, name: str, dtype: torch.dtype, length: int) -> None:
    gate, up = normal(3, length, dtype=dtype), normal(length, 3, dtype=dtype).view(3, length)
    exact = exact_activation(gate, name)
    # Two roundings to a small dtype; in float32 those of the activation itself.
    roundings = 100 if dtype == torch.float32 else 1.02
    assert_near_exact(gated(gate, up, name), exact * up.double(), roundings, factor=up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GATES)
def test_two_tensors_give_the_bits_of_one(isa: str, name: str, dtype: torch.dtype) -> None:
    gate, up = normal(3, 5, 577, dtype=dtype), normal(5, 3, 577, dtype=dtype).view(3, 5, 577)
    both = torch.cat((gate, up), dim=-1)
    one = KERNELS.silu_and_mul.default(both) if name == "silu" else KERNELS.gelu_and_mul.default(both, name == "tanh")
    assert torch.equal(gated(gate, up, name), one)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GATES)
def test_extremes_of_gates_behave_as_native(isa: str, name: str, dtype: torch.dtype) -> None:
    gate = torch.tensor([0.0, -0.0, 1e-7, -1e-7, 80.0, -80.0, 1e4, -1e4, torch.nan, torch.inf], dtype=dtype)
    if name == "none":
        gate = gate[:-1]  # torch's own GELU of infinity is infinity or NaN, as vectors fall
    for up in (torch.ones_like(gate), gate.flip(0)):
        got, want = gated(gate, up, name), native_gated(gate, up, name)
        torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-2 if dtype != torch.float32 else 1e-5, atol=1e-6)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda t: t.contiguous(),
    "columns": lambda t: t[..., 3:41],
    "transposed": lambda t: t.transpose(0, 1),
    "steps": lambda t: t[::2, 1::3],
    "repeated": lambda t: t[:1].expand(4, -1, -1),
    "backwards": lambda t: t.permute(1, 0, 2)[2:5],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", GATES)
def test_gates_read_any_leading_strides_and_two_layouts(name: str, view: str) -> None:
    gate, up = VIEWS[view](normal(4, 6, 50)), VIEWS[view](normal(6, 4, 50).reshape(4, 6, 50))
    want = gated(gate.contiguous(), up.contiguous(), name)
    for pair in ((gate, up), (gate.contiguous(), up), (gate, up.contiguous())):
        got = gated(*pair, name)
        torch.testing.assert_close(got, want)
        assert got.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gates_larger_than_the_caches_agree_with_small_ones(isa: str, dtype: torch.dtype) -> None:
    gate = normal(1030, 4160).to(dtype).repeat(1, 2 if dtype == torch.bfloat16 else 1)
    up = gate.flip(0)
    got = gated(gate, up, "silu")
    assert got.numel() * got.element_size() > 8 << 20
    for rows in (slice(0, 2), slice(-2, None)):
        torch.testing.assert_close(got[rows], gated(gate[rows], up[rows], "silu"), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 8), (3, 0), (0,), ()])
@pytest.mark.parametrize("name", GATES)
def test_gates_of_nothing_and_of_one_number(name: str, shape: tuple[int, ...]) -> None:
    x = torch.ones(shape)
    torch.testing.assert_close(gated(x, x, name), native_gated(x, x, name))


@pytest.mark.parametrize(
    ("gate", "up", "message"),
    [
        (torch.ones(2, 8).double(), torch.ones(2, 8).double(), "gate must be float32, bfloat16 or float16"),
        (torch.ones(2, 8), torch.ones(2, 8).half(), "up must have the dtype of gate"),
        (torch.ones(2, 8), torch.ones(2, 7), r"gate and up must have the same shape, got \[2, 8\] and \[2, 7\]"),
        (torch.ones(2, 8), torch.ones(16), "gate and up must have the same shape"),
        (torch.ones(8, 4).t(), torch.ones(4, 8), "gate must be contiguous in its last dimension"),
        (torch.ones(4, 8), torch.ones(8, 4).t(), "up must be contiguous in its last dimension"),
    ],
)
@pytest.mark.parametrize("name", GATES)
def test_gates_say_what_they_do_not_take(name: str, gate: Tensor, up: Tensor, message: str) -> None:
    with pytest.raises(RuntimeError, match=f"{'silu' if name == 'silu' else 'gelu'}_mul: {message}"):
        gated(gate, up, name)


# ---- rotation ------------------------------------------------------------------------------------------------------

rotated = cpu_only.apply_rotary_pos_emb


def angles(batch: int, tokens: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Every element has a number of its own: the halves of a row need not be alike."""
    return normal(batch, tokens, size).cos().to(dtype), normal(batch, tokens, size).sin().to(dtype)


@pytest.mark.parametrize("angle_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_is_native_s_bits_in_every_pair_of_dtypes(
    isa: str, dtype: torch.dtype, angle_dtype: torch.dtype
) -> None:
    for batch, tokens, heads, size in ((2, 3, 3, 64), (1, 1, 5, 128), (2, 2, 1, 80), (3, 2, 2, 2), (1, 2, 2, 1100)):
        x = normal(batch, tokens, heads, size, dtype=dtype)
        for rows in {1, batch}:
            cos, sin = angles(rows, tokens, size, angle_dtype)
            assert torch.equal(rotated(x, cos, sin), ir.ops.apply_rotary_pos_emb.native(x, cos, sin))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation_is_close_to_float64(isa: str, dtype: torch.dtype) -> None:
    x, (cos, sin) = normal(2, 3, 4, 96, dtype=dtype), angles(2, 3, 96, dtype)
    a, b = x.double().chunk(2, dim=-1)
    terms = x.double() * cos.double().unsqueeze(2), torch.cat((-b, a), dim=-1) * sin.double().unsqueeze(2)
    error = (rotated(x, cos, sin).double() - sum(terms)).abs()
    # Half a unit of each term, and of their sum.
    assert (error <= 1.01 * torch.finfo(dtype).eps * sum(term.abs() for term in terms) + 1e-7).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_that_are_none_and_infinities_behave_as_native(isa: str, dtype: torch.dtype) -> None:
    x = normal(1, 2, 2, 70).to(dtype)
    x[0, 0, 0, 3], x[0, 1, 1, 40], x[0, 1, 0, 69] = torch.nan, torch.inf, -torch.inf
    cos, sin = angles(1, 2, 70, torch.float32)
    cos.view(torch.int32)[0, 1, 7] = -1  # a NaN with all bits set
    for pair in ((cos, sin), (cos.to(dtype), sin.to(dtype))):
        got, want = rotated(x, *pair), ir.ops.apply_rotary_pos_emb.native(x, *pair)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "part of a projection": lambda x: torch.cat((x, 2 * x), dim=2)[:, :, : x.shape[2]],
    "steps": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "longer heads": lambda x: torch.cat((x, x), dim=-1)[..., : x.shape[-1]],
    "repeated": lambda x: x[:1].expand(3, -1, -1, -1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotation_reads_any_leading_strides(isa: str, layout: str) -> None:
    x = LAYOUTS[layout](normal(2, 5, 3, 40))
    cos, sin = angles(1, 5, 40)
    got = rotated(x, cos, sin)
    assert torch.equal(got, rotated(x.contiguous(), cos, sin))
    assert got.is_contiguous()


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.expand(3, -1, -1),
        lambda t: t[:, :1].expand(3, 6, -1),
        lambda t: t.expand(3, -1, -1).transpose(0, 1).contiguous().transpose(0, 1),
        lambda t: torch.cat((t, t), dim=-1)[..., :40],
    ],
    ids=["one for the batch", "one for all", "tokens first", "part of rows"],
)
def test_rotation_reads_angles_of_any_leading_strides(view: Callable[[Tensor], Tensor]) -> None:
    x, (cos, sin) = normal(3, 6, 2, 40), angles(1, 6, 40)
    for pair in ((view(cos), view(sin)), (view(cos).contiguous(), view(sin)), (view(cos), view(sin).contiguous())):
        assert torch.equal(rotated(x, *pair), ir.ops.apply_rotary_pos_emb.native(x, *pair))


@pytest.mark.parametrize("shape", [(1, 0, 3, 8), (0, 4, 3, 8), (1, 4, 0, 8), (1, 4, 3, 0)])
def test_rotation_of_nothing_is_empty(shape: tuple[int, ...]) -> None:
    assert rotated(torch.empty(shape), *angles(1, shape[1], shape[3])).shape == shape


def test_rotation_of_many_tokens_agrees_with_few(isa: str) -> None:
    x, (cos, sin) = normal(2, 900, 9, 64), angles(2, 900, 64)
    whole = rotated(x, cos, sin)
    assert torch.equal(whole[1:, -3:], rotated(x[1:, -3:], cos[1:, -3:], sin[1:, -3:]))


X, COS = normal(2, 3, 4, 8), normal(1, 3, 8)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X.double(), COS, COS), "x must be float32, bfloat16 or float16"),
        ((X, COS.double(), COS.double()), "cos must be float32, bfloat16 or float16"),
        ((X, COS, COS.half()), "sin must have the dtype of cos"),
        ((X[0], COS, COS), r"x must have shape \[batch, tokens, heads, head_size\] .*, got \[3, 4, 8\]"),
        ((X[..., :7], COS[..., :7], COS[..., :7]), "x must have shape .* with an even head_size"),
        ((X, COS[:, :2], COS), r"cos must have shape .* as x has \[2, 3, 4, 8\], got \[1, 2, 8\]"),
        ((X, COS, COS[..., :4]), "sin must have shape"),
        ((X, COS.expand(3, 3, 8), COS), "cos must have shape"),
        ((X, COS[0], COS), "cos must have shape"),
        ((normal(2, 3, 8, 4).transpose(2, 3), COS, COS), "x must be contiguous in its last dimension"),
        ((X, COS, normal(1, 8, 3).transpose(1, 2)), "sin must be contiguous in its last dimension"),
    ],
)
def test_rotation_says_what_it_does_not_take(args: tuple[Tensor, ...], message: str) -> None:
    with pytest.raises(RuntimeError, match=f"apply_rotary_pos_emb: {message}"):
        rotated(*args)


# ---- as implementations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("silu_mul", (X.double(), X.double()), "gate is float64"),
        ("silu_mul", (X, X.half()), "up is float16"),
        ("silu_mul", (X, X[..., :1]), "up has shape"),
        ("silu_mul", (X.transpose(2, 3), X.transpose(2, 3)), "the last dimension of gate must have stride 1"),
        ("gelu_mul", (X, X, "exact"), "approximate is 'exact'"),
        ("apply_rotary_pos_emb", (X, COS.double(), COS.double()), "cos is float64"),
        ("apply_rotary_pos_emb", (X, COS, COS.half()), "sin is float16"),
        ("apply_rotary_pos_emb", (X[0], COS, COS), "x has 3 dimensions"),
        ("apply_rotary_pos_emb", (X[..., :7], COS[..., :7], COS[..., :7]), "multiple of 2"),
    ],
)
def test_what_is_declined_has_a_reason(name: str, args: tuple[Any, ...], reason: str) -> None:
    answer = getattr(ir.ops, name).impls["vllm_c"].supports_args(*args)
    assert not answer
    assert reason in answer.reason


class Written(torch.nn.Module):
    """A gated layer in plain torch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (torch.nn.Linear(64, 64, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.nn.functional.gelu(self.gate(x), approximate="tanh") * self.up(x))


@pytest.mark.parametrize(("rows", "asked"), [(5, False), (5, True), (512, False)], ids=["few", "asked for", "many"])
def test_compiled_cpu_code_leaves_few_rows_of_a_model_s_own_lines_to_inductor(rows: int, asked: bool) -> None:
    model, x = Written(), normal(rows, 64)
    torch._dynamo.reset()
    options = {"ir_op_priority": {"gelu_mul": ["vllm_c"]}} if asked else {}
    with torch.no_grad():
        got = torch.compile(model, backend="irframework", dynamic=False, options=options)(x)
        torch.testing.assert_close(got, model(x))
    report = ir.last_report()
    raised = asked or rows == 512
    assert report.fusions.get("gelu_mul", 0) == int(raised)
    if not raised:
        (reason,) = [miss.reason for miss in report.missed_fusions if miss.op == "gelu_mul"]
        assert reason.startswith("only native would run it (vllm_c: gate has 320 numbers; ")


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul", "apply_rotary_pos_emb"])
def test_eager_calls_have_the_kernels_by_default(name: str) -> None:
    args = (X, COS, COS) if name == "apply_rotary_pos_emb" else (X, X)
    assert ir.explain(name, *args).provider == "vllm_c"
