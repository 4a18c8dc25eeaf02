"""AITER is called as its signatures say, with what its kernels take, and its results are the op's.

A stand-in with AITER's signatures is on the path. No AMD device is involved.
"""

import inspect
import itertools
import re
import shutil
from pathlib import Path

import aiter.ops.activation
import aiter.ops.quant
import aiter.ops.rmsnorm
import pytest
import torch
from aiter.record import CALLS
from irframework_aiter_rocm import implementations, library, operators

import irframework as ir

CONTRACT = Path(__file__).parents[3] / "shared" / "contracts" / "aiter_0.1.7_signatures.txt"
HALVES = (torch.bfloat16, torch.float16)
CODES = torch.float8_e4m3fn
SCALE = torch.tensor([0.02])
QUANTISING = tuple(
    name
    for name in ir.ops.__all__
    if name.endswith("static_quant_fp8") and not name.startswith(("gelu", "all_reduce", "scaled_linear"))
)


@pytest.fixture(autouse=True)
def rocm(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    library.check_aiter.cache_clear()
    library.aiter_function.cache_clear()
    CALLS.clear()
    yield
    library.check_aiter.cache_clear()
    library.architecture_of.cache_clear()


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_near(got: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    """One rounding."""
    assert got.dtype == dtype
    assert got.shape == exact.shape
    assert ((got.double() - exact).abs() <= torch.finfo(dtype).eps * exact.abs() + 1e-6).all()


def assert_codes(got: torch.Tensor, h: torch.Tensor, scale: torch.Tensor = SCALE) -> None:
    """The codes of rows that were rounded to the dtype of x before."""
    assert got.dtype == CODES
    want = ir.ops.static_quant_fp8.native(h, scale)
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


def accepted(name: str, *arguments: object) -> bool:
    return getattr(ir.ops, name).impls["aiter"].supports_args(*arguments) is True


@pytest.fixture(scope="module", autouse=True)
def plugin():
    ir.load_plugins()


# --- the signatures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, names in library.CALLED.items() for n in names])
def test_the_stand_in_has_the_signature_of_the_real_function(module, name):
    if not CONTRACT.exists():
        pytest.skip("the file with AITER's signatures is not here")
    section = CONTRACT.read_text().partition(f"## {module}.py\n")[2].partition("\n## ")[0]
    (real,) = re.findall(rf"^  {name}\((.*)\) -> ", section, re.MULTILINE)
    stand_in = inspect.signature(getattr(getattr(aiter.ops, module), name))
    shown = [re.sub(r"\b(torch\.)?Tensor\b", "Tensor", text) for text in real.split(", ")]
    assert shown == [
        f"{p.name}: {p.annotation.__name__}" + ("" if p.default is p.empty else f"={p.default!r}")
        for p in stand_in.parameters.values()
    ]


def test_aiter_is_usable_when_its_functions_take_what_is_passed():
    assert implementations.aiter_runs() is True


@pytest.mark.parametrize(
    ("module", "old", "new", "why"),
    [
        ("rmsnorm", "def rmsnorm2d_fwd(", "def renamed(", "aiter.ops.rmsnorm.rmsnorm2d_fwd does not exist"),
        ("rmsnorm", "residual_in: Tensor,\n    residual_out", "residual_out: Tensor,\n    residual_in", "takes (out,"),
        ("rmsnorm", "    epsilon: float,\n    use", "    epsilon: float,\n    gemma: bool,\n    use", "needs gemma"),
        (
            "activation",
            "def silu_and_mul(out: Tensor, input",
            "def silu_and_mul(input: Tensor, out",
            "takes (input, out",
        ),
        ("activation", "def gelu_and_mul(", "def gelu_and_mul(((", "cannot be read"),
        ("quant", "scale: Tensor) -> None", "scale: Tensor, rows: int) -> None", "static_per_tensor_quant needs rows"),
    ],
)
def test_other_signatures_are_the_reason_why_aiter_is_not_used(tmp_path, monkeypatch, module, old, new, why):
    shutil.copytree(Path(__file__).parent / "stand_in" / "aiter", tmp_path / "aiter")
    file = tmp_path / "aiter" / "ops" / f"{module}.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))
    spec = library.importlib.util.spec_from_file_location(
        "aiter", tmp_path / "aiter" / "__init__.py", submodule_search_locations=[str(tmp_path / "aiter")]
    )
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: spec)
    answer = implementations.aiter_runs()
    assert isinstance(answer, ir.Rejected)
    assert why in answer.reason
    assert "amd-aiter 0.1.7" in answer.reason


def test_a_new_parameter_with_a_default_does_no_harm():
    found = library.ast.parse("def f(out, input, limit=0.0): ...").body[0].args
    assert library._difference(found, ("out", "input")) is None


# --- the calls and their results ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 64), (64,), (2, 3, 64)])
@pytest.mark.parametrize("dtype", HALVES)
def test_rows_are_normed_by_one_call(dtype, shape):
    x, weight = random(*shape, dtype=dtype), random(64, dtype=dtype)
    assert accepted("rms_norm", x, weight, 1e-6)
    y = implementations.rms_norm(x, weight, 1e-6)
    assert CALLS == ["rmsnorm2d_fwd"]
    assert_near(y, ir.ops.rms_norm.native(x.double(), weight.double(), 1e-6), dtype)


@pytest.mark.parametrize("shape", [(3, 64), (64,), (2, 3, 64)])
def test_a_residual_is_added_by_one_call_that_overwrites_no_input(shape):
    x, x_residual, weight = random(*shape), random(*shape).flip(-1).contiguous(), random(64)
    before = x.clone(), x_residual.clone()
    assert accepted("fused_add_rms_norm", x, x_residual, weight, 1e-6)
    y, residual = implementations.fused_add_rms_norm(x, x_residual, weight, 1e-6)
    assert CALLS == ["rmsnorm2d_fwd_with_add"]
    assert torch.equal(residual, x + x_residual)
    assert_near(y, ir.ops.rms_norm.native(residual.double(), weight.double(), 1e-6), x.dtype)
    assert torch.equal(x, before[0])
    assert torch.equal(x_residual, before[1])


@pytest.mark.parametrize(("approximate", "function"), [("none", "gelu_and_mul"), ("tanh", "gelu_tanh_and_mul")])
def test_each_gelu_is_its_own_function(approximate, function):
    x = random(2, 3, 64)
    assert accepted("gelu_and_mul", x, approximate)
    y = implementations.gelu_and_mul(x, approximate)
    assert [function] == CALLS
    assert_near(y, ir.ops.gelu_and_mul.native(x.double(), approximate), x.dtype)


def test_silu_is_one_call():
    x = random(5, 64)
    assert accepted("silu_and_mul", x)
    assert_near(implementations.silu_and_mul(x), ir.ops.silu_and_mul.native(x.double()), x.dtype)
    assert CALLS == ["silu_and_mul"]


@pytest.mark.parametrize("shape", [(3, 64), (64,), (2, 3, 64)])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scale_shape", [(1,), ()])
def test_rows_are_quantised_by_one_call(dtype, shape, scale_shape):
    x, scale = random(*shape, dtype=dtype), SCALE.reshape(scale_shape)
    assert accepted("static_quant_fp8", x, scale)
    assert_codes(implementations.static_quant_fp8(x, scale), x)
    assert CALLS == ["static_per_tensor_quant"]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scale", [0.02, 0.0137, 1.0, 146.0])
def test_what_is_too_large_is_clamped_before_aiter_would_make_it_nan(dtype, scale):
    factors = torch.tensor([1.0, 447.9, 448.0, 449.0, 464.1, 480.0, 5000.0, float("inf")])
    x = torch.cat((factors, -factors)).mul(scale).to(dtype)
    before = x.clone()
    assert_codes(implementations.static_quant_fp8(x, torch.tensor([scale])), x, torch.tensor([scale]))
    assert torch.equal(x, before)


def test_an_infinity_whose_code_float16_cannot_hold_gets_the_code_of_its_largest_number():
    x = torch.full((16,), float("inf"), dtype=torch.float16)
    codes = implementations.static_quant_fp8(x, torch.tensor([1000.0]))
    assert_codes(codes, torch.full((16,), 65504.0), torch.tensor([1000.0]))


def test_nan_keeps_its_code():
    x = random(16).index_fill(0, torch.tensor([3]), float("nan"))
    assert implementations.static_quant_fp8(x, SCALE).float().isnan().nonzero().tolist() == [[3]]


def test_more_elements_than_aiter_counts_are_several_calls(monkeypatch):
    monkeypatch.setattr(operators, "_LARGEST_CALL", 100)
    x = random(7, 32)
    assert_codes(implementations.static_quant_fp8(x, SCALE), x)
    assert CALLS == ["static_per_tensor_quant"] * 3


def test_a_norm_is_rounded_before_it_is_quantised():
    x, x_residual, weight = random(4, 64), random(4, 64).flip(-1).contiguous(), random(64)
    assert accepted("rms_norm_static_quant_fp8", x, weight, SCALE, 1e-6)
    codes = implementations.rms_norm_static_quant_fp8(x, weight, SCALE, 1e-6)
    assert CALLS == ["rmsnorm2d_fwd", "static_per_tensor_quant"]
    assert_codes(codes, implementations.rms_norm(x, weight, 1e-6))
    CALLS.clear()
    assert accepted("fused_add_rms_norm_static_quant_fp8", x, x_residual, weight, SCALE, 1e-6)
    codes, residual = implementations.fused_add_rms_norm_static_quant_fp8(x, x_residual, weight, SCALE, 1e-6)
    assert CALLS == ["rmsnorm2d_fwd_with_add", "static_per_tensor_quant"]
    assert torch.equal(residual, x + x_residual)
    assert_codes(codes, implementations.rms_norm(residual, weight, 1e-6))


def test_a_gate_is_rounded_before_it_is_quantised():
    x = random(4, 64)
    assert accepted("silu_and_mul_static_quant_fp8", x, SCALE)
    codes = implementations.silu_and_mul_static_quant_fp8(x, SCALE)
    assert CALLS == ["silu_and_mul", "static_per_tensor_quant"]
    assert_codes(codes, implementations.silu_and_mul(x))


def test_nothing_is_launched_for_no_rows():
    x, weight = random(0, 64), random(64)
    assert implementations.rms_norm(x, weight, 1e-6).shape == (0, 64)
    assert [t.shape for t in implementations.fused_add_rms_norm(x, x, weight, 1e-6)] == [(0, 64)] * 2
    assert implementations.silu_and_mul(x).shape == (0, 32)
    assert implementations.static_quant_fp8(x, SCALE).shape == (0, 64)
    assert implementations.static_quant_fp8(random(3, 0), SCALE).shape == (3, 0)
    assert not CALLS


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm", "silu_and_mul", "gelu_and_mul", *QUANTISING])
def test_what_is_accepted_never_fails(name):
    """Dtypes of each tensor, layouts and sizes in every combination: the stand-in rejects what AITER cannot take."""
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    layouts = (
        lambda x: x,
        lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
        lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    )
    taken = 0
    for a, b, c, layout, hidden in itertools.product(dtypes, dtypes, dtypes, layouts, (1, 4, 6, 7, 32)):
        x, x_residual, weight = (
            layout(random(2, 3, hidden, dtype=a)),
            random(2, 3, hidden, dtype=b),
            random(hidden).to(c),
        )
        given = {"x": x, "x_residual": x_residual, "weight": weight, "scale": SCALE, "epsilon": 1e-6}
        parameters = getattr(ir.ops, name).signature.parameters
        arguments = [given[parameter] for parameter in parameters if parameter in given]
        if accepted(name, *arguments):
            taken += 1
            getattr(implementations, name)(*arguments)
    assert taken


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("rms_norm", (random(2, 8).float(), random(8).float(), 1e-6), "x is float32"),
        ("rms_norm", (random(2, 8), random(8).float(), 1e-6), "weight is float32"),
        ("rms_norm", (random(2, 8), None, 1e-6), "weight is None"),
        ("rms_norm", (random(2, 8), random(8), 1e-6, 4), "variance_size"),
        ("rms_norm", (random(2, 16)[:, :8], random(8), 1e-6), "x must be contiguous"),
        ("fused_add_rms_norm", (random(2, 8), random(2, 16)[:, :8], random(8), 1e-6), "x_residual must be contiguous"),
        ("fused_add_rms_norm", (random(2, 8), random(2, 8), None, 1e-6), "weight is None"),
        ("silu_and_mul", (random(2, 6),), "multiple of 4"),
        ("gelu_and_mul", (random(2, 8), "fast"), "approximate"),
        ("static_quant_fp8", (random(2, 16).float(), SCALE), "x is float32"),
        ("static_quant_fp8", (random(2, 16), SCALE.double()), "scale is float64"),
        ("static_quant_fp8", (random(2, 16), torch.ones(2)), "scale"),
        ("static_quant_fp8", (random(2, 24), SCALE), "multiple of 16"),
        ("static_quant_fp8", (random(2, 32)[:, :16], SCALE), "x must be contiguous"),
        ("static_quant_fp8", (random(1)[0], SCALE), "multiple of 16"),
        ("silu_and_mul_static_quant_fp8", (random(2, 48), SCALE), "multiple of 32"),
        ("rms_norm_static_quant_fp8", (random(2, 16), None, SCALE, 1e-6), "weight is None"),
        ("rms_norm_static_quant_fp8", (random(2, 16), random(16).float(), SCALE, 1e-6), "weight is float32"),
        ("fused_add_rms_norm_static_quant_fp8", (random(2, 16), random(2, 16), None, SCALE, 1e-6), "weight is None"),
    ],
)
def test_what_aiter_does_not_take_is_refused_with_the_reason(name, arguments, why):
    answer = getattr(ir.ops, name).impls["aiter"].supports_args(*arguments)
    assert isinstance(answer, ir.Rejected)
    assert why in answer.reason


def on_a_device(monkeypatch: pytest.MonkeyPatch, name: str) -> torch.Tensor:
    """Rows on a device of which torch says this name, as it does: with features behind a colon."""
    properties = type("Properties", (), {"gcnArchName": name})()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    library.architecture_of.cache_clear()
    with torch._subclasses.FakeTensorMode():
        return torch.empty(2, 32, dtype=torch.bfloat16, device="cuda:0")


@pytest.mark.parametrize("name", ["gfx90a:sramecc+:xnack-", "gfx942:sramecc+:xnack-", "gfx950"])
def test_devices_that_aiter_has_code_for_are_taken(monkeypatch, name):
    assert implementations.made_for(on_a_device(monkeypatch, name)) is True


@pytest.mark.parametrize("name", ["gfx1100", "gfx908:sramecc+:xnack-"])
def test_a_device_that_aiter_has_no_code_for_is_refused(monkeypatch, name):
    answer = implementations.made_for(on_a_device(monkeypatch, name))
    assert isinstance(answer, ir.Rejected)
    assert name.partition(":")[0] in answer.reason


def test_codes_are_made_where_aiters_8_bit_floats_are_e4m3fn(monkeypatch):
    assert implementations.made_for_codes(on_a_device(monkeypatch, "gfx950:sramecc+")) is True


@pytest.mark.parametrize(("name", "why"), [("gfx942:sramecc+", "float8_e4m3fnuz"), ("gfx90a", "e4m3fn on gfx950")])
def test_devices_with_other_8_bit_floats_make_no_codes(monkeypatch, name, why):
    x = on_a_device(monkeypatch, name)
    with torch._subclasses.FakeTensorMode():
        weight = torch.empty(32, dtype=torch.bfloat16, device="cuda:0")
    for op in QUANTISING:
        given = {"x": x, "x_residual": x, "weight": weight, "scale": SCALE, "epsilon": 1e-6}
        arguments = [given[parameter] for parameter in getattr(ir.ops, op).signature.parameters]
        answer = getattr(ir.ops, op).impls["aiter"].supports_args(*arguments)
        assert isinstance(answer, ir.Rejected)
        assert why in answer.reason


# --- in graphs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm", "gated", "static_quant"])
def test_the_torch_ops_do_what_their_schemas_and_fakes_say(name):
    x, weight = random(3, 16), random(16)
    arguments = {
        "rms_norm": (x, weight, 1e-6),
        "fused_add_rms_norm": (x, random(3, 16).flip(0), weight, 1e-6),
        "static_quant": (x, SCALE),
    }
    op = getattr(torch.ops.irframework_aiter_rocm, name).default
    kinds = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, arguments.get(name, (x, "tanh")), test_utils=kinds)
