"""vllm-xpu-kernels' ops are called as their schemas say, with what the kernels take, and the results are the op's.

A stand-in with the real schemas is on the path, with kernels for the CPU. No Intel GPU is involved.
"""

import functools
import importlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from irframework_xpu_sycl import implementations, library
from torch import Tensor
from vllm_xpu_kernels.record import CALLS, SCHEMAS

import irframework as ir

CONTRACT = Path(__file__).parents[3] / "shared" / "contracts" / "vllm_xpu_kernels_0.1.16.2_schemas.txt"
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def xpu(monkeypatch):
    monkeypatch.setattr(torch.version, "xpu", "20250300", raising=False)
    library.load_kernels.cache_clear()
    library.load_kernels()
    CALLS.clear()
    yield
    library.load_kernels.cache_clear()


@pytest.fixture(scope="module", autouse=True)
def plugin():
    ir.load_plugins()


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def accepted(name: str, *arguments: object) -> bool:
    return getattr(ir.ops, name).impls["xpu_kernels"].supports_args(*arguments) is True


# --- the schemas --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schema", SCHEMAS)
def test_the_stand_in_has_the_schema_of_the_real_op(schema):
    if not CONTRACT.exists():
        pytest.skip("the file with the schemas of vllm-xpu-kernels is not here")
    name = schema.partition("(")[0]
    (real,) = re.findall(rf"^{name}\(.*", CONTRACT.read_text(), re.MULTILINE)
    assert re.sub(r"\s+", " ", real) == schema


@functools.cache
def reasons(variable: str, name: str) -> dict[str, str | None]:
    """Why each implementation does not run in a process with this variable."""
    text = (
        "import json, torch; torch.version.xpu = '1'\nimport irframework as ir; ir.load_plugins()\n"
        f"names = {('rms_norm', 'gelu_and_mul', 'silu_and_mul')}\n"
        "print(json.dumps({n: getattr(ir.ops, n).impls['xpu_kernels'].unsupported_reason for n in names}))"
    )
    command, environment = [sys.executable, "-c", text], {**os.environ, variable: name}
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    return json.loads(answer)


def test_the_kernels_load_when_their_ops_are_those_that_are_called():
    assert implementations.kernels_load(*library.CALLED) is True


def test_a_missing_op_is_the_reason_why_what_calls_it_does_not_run():
    assert "has no op gelu_tanh_and_mul" in reasons("STAND_IN_LEAVES_OUT", "gelu_tanh_and_mul")["gelu_and_mul"]


def test_what_does_not_call_a_missing_op_runs():
    assert reasons("STAND_IN_LEAVES_OUT", "gelu_tanh_and_mul")["silu_and_mul"] is None


def test_another_parameter_is_the_reason_why_what_calls_it_does_not_run():
    assert "takes (result!, input, weight, eps)" in reasons("STAND_IN_CHANGES", "rms_norm")["rms_norm"]


def test_a_library_that_does_not_load_is_the_reason_why_nothing_runs(monkeypatch):
    def fails(name: str) -> object:
        if name != "vllm_xpu_kernels._C":
            return really_import(name)
        raise OSError("libsycl.so.8: cannot open shared object file")

    really_import = importlib.import_module
    library.load_kernels.cache_clear()
    monkeypatch.setattr(importlib, "import_module", fails)
    answer = implementations.kernels_load("rms_norm")
    assert isinstance(answer, ir.Rejected)
    assert "libsycl.so.8" in answer.reason


# --- the calls and their results ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64), (2, 1, 3, 64)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_are_normed_by_one_call(dtype, shape):
    x, weight = random(*shape, dtype=dtype), random(64, dtype=dtype)
    assert accepted("rms_norm", x, weight, 1e-6)
    assert torch.equal(implementations.rms_norm(x, weight, 1e-6), ir.ops.rms_norm.native(x, weight, 1e-6))
    assert CALLS == ["rms_norm"]


@pytest.mark.parametrize("shape", [(64,), (3, 64), (2, 3, 64)])
def test_a_residual_is_added_in_place_by_one_call(shape):
    x, x_residual, weight = random(*shape), random(*shape).flip(-1).contiguous(), random(64)
    assert accepted("fused_add_rms_norm", x, x_residual, weight, 1e-6)
    expected = ir.ops.fused_add_rms_norm.native(x, x_residual, weight, 1e-6)
    y, residual = implementations.fused_add_rms_norm(x, x_residual, weight, 1e-6)
    assert CALLS == ["fused_add_rms_norm"]
    assert y is x
    assert residual is x_residual
    assert torch.equal(y, expected[0])
    assert torch.equal(residual, expected[1])


@pytest.mark.parametrize(("approximate", "function"), [("none", "gelu_and_mul"), ("tanh", "gelu_tanh_and_mul")])
def test_each_gelu_is_its_own_op(approximate, function):
    x = random(2, 3, 64)
    assert accepted("gelu_and_mul", x, approximate)
    got = implementations.gelu_and_mul(x, approximate)
    assert torch.equal(got, ir.ops.gelu_and_mul.native(x, approximate))
    assert [function] == CALLS


def test_silu_is_one_call():
    x = random(5, 64)
    assert accepted("silu_and_mul", x)
    assert torch.equal(implementations.silu_and_mul(x), ir.ops.silu_and_mul.native(x))
    assert CALLS == ["silu_and_mul"]


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("with_key", [True, False])
@pytest.mark.parametrize("lead", [(4,), (2, 3)])
@pytest.mark.parametrize("apart", [True, False])
def test_copies_of_query_and_key_are_rotated_by_one_call(apart, lead, with_key, is_neox):
    positions = torch.arange(torch.Size(lead).numel()).view(lead)
    cache = random(8, 12, dtype=torch.float32)
    query, key = random(*lead, 4, 16, dtype=torch.float32), random(*lead, 2, 16, dtype=torch.float32)
    query, key = (query, key) if apart else (query.flatten(-2), key.flatten(-2))
    arguments = (positions, query, key if with_key else None, cache, 16, is_neox)
    before = query.clone()
    assert accepted("rotary_embedding", *arguments)
    got = implementations.rotary_embedding(*arguments)
    wanted = ir.ops.rotary_embedding.native(*arguments)
    torch.testing.assert_close(got[0], wanted[0])
    if with_key:
        torch.testing.assert_close(got[1], wanted[1])
    else:  # torch sees an empty tensor in the place of nothing, and so may whoever implements an op
        assert got[1].numel() == 0
    assert CALLS == ["rotary_embedding"]
    assert torch.equal(query, before)


SCALE = torch.tensor([0.02])
QUANTISED = {
    "static_quant_fp8": ((random(3, 64), SCALE), ["static_scaled_fp8_quant"]),
    "dynamic_quant_fp8": ((random(3, 64),), ["dynamic_per_token_scaled_fp8_quant"]),
    "rms_norm_static_quant_fp8": ((random(3, 64), random(64), SCALE, 1e-6), ["rms_norm_static_fp8_quant"]),
    "rms_norm_dynamic_quant_fp8": (
        (random(3, 64), random(64), 1e-6),
        ["rms_norm", "dynamic_per_token_scaled_fp8_quant"],
    ),
    "fused_add_rms_norm_static_quant_fp8": (
        (random(3, 64), random(3, 64).flip(0), random(64), SCALE, 1e-6),
        ["fused_add_rms_norm_static_fp8_quant"],
    ),
    "fused_add_rms_norm_dynamic_quant_fp8": (
        (random(3, 64), random(3, 64).flip(0), random(64), 1e-6),
        ["fused_add_rms_norm", "dynamic_per_token_scaled_fp8_quant"],
    ),
    "silu_and_mul_static_quant_fp8": ((random(3, 64), SCALE), ["silu_and_mul_quant"]),
    "silu_and_mul_dynamic_quant_fp8": ((random(3, 64),), ["silu_and_mul", "dynamic_per_token_scaled_fp8_quant"]),
}


def copies(arguments: tuple[object, ...]) -> list[object]:
    return [value.clone() if isinstance(value, Tensor) else value for value in arguments]


def listed(outputs: object) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


@pytest.mark.parametrize("name", QUANTISED)
def test_codes_are_those_of_native(name):
    arguments, called = QUANTISED[name]
    assert accepted(name, *arguments)
    got = listed(getattr(implementations, name)(*copies(arguments)))
    assert called == CALLS
    for mine, native in zip(got, listed(getattr(ir.ops, name).native(*arguments)), strict=True):
        assert mine.dtype == native.dtype
        assert torch.equal(mine.float(), native.float())


@pytest.mark.parametrize("name", QUANTISED)
def test_a_tensor_that_begins_between_two_vectors_is_moved(name):
    def moved(value: object) -> object:
        if not isinstance(value, Tensor) or value.dim() < 2:
            return value
        return torch.cat((value.new_zeros(1), value.flatten()))[1:].view(value.shape)

    arguments, _ = QUANTISED[name]
    got = listed(getattr(implementations, name)(*map(moved, arguments)))
    for mine, native in zip(got, listed(getattr(ir.ops, name).native(*arguments)), strict=True):
        assert torch.equal(mine.float(), native.float())


@pytest.mark.parametrize("name", QUANTISED)
def test_no_rows_give_no_codes(name):
    arguments, _ = QUANTISED[name]
    empty = [value[:0] if isinstance(value, Tensor) and value.dim() == 2 else value for value in arguments]
    got = listed(getattr(implementations, name)(*empty))
    assert [y.shape for y in got] == [y.shape for y in listed(getattr(ir.ops, name).native(*empty))]
    assert not CALLS


def test_nothing_is_launched_for_no_rows():
    x, weight = random(0, 64), random(64)
    assert implementations.rms_norm(x, weight, 1e-6).shape == (0, 64)
    assert implementations.fused_add_rms_norm(x, x.clone(), weight, 1e-6)[0].shape == (0, 64)
    assert implementations.silu_and_mul(x).shape == (0, 32)
    q, k = implementations.rotary_embedding(torch.empty(0, dtype=torch.int64), x, x, random(8, 16), 16)
    assert q.shape == k.shape == (0, 64)
    assert not CALLS


@pytest.mark.parametrize("name", ["rms_norm", "silu_and_mul", "gelu_and_mul"])
def test_what_is_accepted_never_fails(name):
    """Dtypes of each tensor, layouts and sizes in every combination: the stand-in rejects what kernels misread."""
    dtypes = (*FLOATS, torch.float64)
    layouts = (
        lambda x: x,
        lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
        lambda x: torch.cat((x, x), -1)[..., : x.shape[-1]],
    )
    taken = 0
    for a, b, layout, hidden in itertools.product(dtypes, dtypes, layouts, (2, 6, 7)):
        x, weight = layout(random(2, 3, hidden, dtype=a)), random(hidden).to(b)
        arguments = (x, weight, 1e-6) if name == "rms_norm" else (x,)
        if accepted(name, *arguments):
            taken += 1
            getattr(implementations, name)(*arguments)
    assert taken


P, CACHE = torch.tensor([0, 1]), random(4, 4)


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("rms_norm", (random(2, 8), random(8).float(), 1e-6), "weight is float32"),
        ("rms_norm", (random(2, 8), None, 1e-6), "weight is None"),
        ("rms_norm", (random(2, 8), random(8), 1e-6, 4), "variance_size"),
        ("rms_norm", (random(1, 1, 1, 2, 8), random(8), 1e-6), "x has 5 dimensions"),
        ("rms_norm", (random(8, 2).t(), random(8), 1e-6), "stride 1"),
        ("fused_add_rms_norm", (random(2, 8), random(1, 8), random(8), 1e-6), "x_residual has shape"),
        ("fused_add_rms_norm", (random(2, 8), random(2, 8), None, 1e-6), "weight is None"),
        ("silu_and_mul", (random(2, 16)[:, :8],), "x must be contiguous"),
        ("gelu_and_mul", (random(2, 8), "fast"), "approximate"),
        ("static_quant_fp8", (random(2, 8), random(2, 1).float()), "needs one element"),
        ("static_quant_fp8", (random(2, 8), SCALE.double()), "scale is float64"),
        ("dynamic_quant_fp8", (random(2, 16)[:, :8],), "x must be contiguous"),
        ("rms_norm_static_quant_fp8", (random(2, 8), None, SCALE, 1e-6), "weight is None"),
        ("rms_norm_static_quant_fp8", (random(2, 8), random(8), SCALE.expand(2), 1e-6), "needs one element"),
        ("fused_add_rms_norm_dynamic_quant_fp8", (random(2, 8), random(2, 8), None, 1e-6), "weight is None"),
        ("rotary_embedding", (P.int(), random(2, 8), None, CACHE, 4), "positions is int32"),
        ("rotary_embedding", (P, random(2, 8), None, CACHE.float(), 4), "cos_sin_cache is float32"),
        ("rotary_embedding", (P, random(2, 12), random(2, 8), CACHE, 4), "3 heads of queries"),
        ("rotary_embedding", (P, random(2, 6), None, CACHE, 4), "does not fit head_size=4"),
        ("rotary_embedding", (P, random(2, 6), None, CACHE, 2), "rotates 4 elements"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_with_the_reason(name, arguments, why):
    answer = getattr(ir.ops, name).impls["xpu_kernels"].supports_args(*arguments)
    assert isinstance(answer, ir.Rejected)
    assert why in answer.reason


# --- in graphs ----------------------------------------------------------------------------------------------------


GRAPH_OPS = (
    *("rms_norm", "fused_add_rms_norm_", "gated", "rotary_embedding", "static_quant", "dynamic_quant"),
    *("rms_norm_static_quant", "fused_add_rms_norm_static_quant_", "silu_static_quant"),
)


@pytest.mark.parametrize("name", GRAPH_OPS)
def test_the_torch_ops_do_what_their_schemas_and_fakes_say(name):
    x, weight = random(3, 8), random(8)
    arguments = {
        "rms_norm": (x, weight, 1e-6),
        "fused_add_rms_norm_": (x, random(3, 8).flip(0), weight, 1e-6),
        "gated": (x, "tanh"),
        "rotary_embedding": (torch.tensor([0, 1, 2]), x, None, CACHE, 4, True),
        "static_quant": (x, SCALE),
        "dynamic_quant": (x,),
        "rms_norm_static_quant": (x, weight, SCALE, 1e-6),
        "fused_add_rms_norm_static_quant_": (x, random(3, 8).flip(0), weight, SCALE, 1e-6),
        "silu_static_quant": (x, SCALE),
    }
    op = getattr(torch.ops.irframework_xpu_sycl, name).default
    kinds = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, arguments[name], test_utils=kinds)
