"""vllm-xpu-kernels' ops are called as their schemas say, with what the kernels take, and the results are the op's.

A stand-in with the real schemas is on the path, with kernels for the CPU. No Intel GPU is involved.
"""

import importlib
import itertools
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


def run(**environment: str) -> str:
    text = (
        "import torch; torch.version.xpu = '1'\n"
        "from irframework_xpu_sycl.implementations import kernels_load; print(kernels_load())"
    )
    command = [sys.executable, "-c", text]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True).stdout


def test_the_kernels_load_when_their_ops_are_those_that_are_called():
    assert implementations.kernels_load() is True


def test_a_missing_op_is_the_reason_why_nothing_runs():
    assert "has no op gelu_tanh_and_mul" in run(STAND_IN_LEAVES_OUT="gelu_tanh_and_mul")


def test_another_parameter_is_the_reason_why_nothing_runs():
    assert "takes (result!, input, weight, eps)" in run(STAND_IN_CHANGES="rms_norm")


def test_a_library_that_does_not_load_is_the_reason_why_nothing_runs(monkeypatch):
    def fails(name: str) -> object:
        if name != "vllm_xpu_kernels._C":
            return really_import(name)
        raise OSError("libsycl.so.8: cannot open shared object file")

    really_import = importlib.import_module
    library.load_kernels.cache_clear()
    monkeypatch.setattr(importlib, "import_module", fails)
    answer = implementations.kernels_load()
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
    for mine, native in zip(got, ir.ops.rotary_embedding.native(*arguments), strict=True):
        torch.testing.assert_close(mine, native)
    assert CALLS == ["rotary_embedding"]
    assert torch.equal(query, before)


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


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm_", "gated", "rotary_embedding"])
def test_the_torch_ops_do_what_their_schemas_and_fakes_say(name):
    x, weight = random(3, 8), random(8)
    arguments = {
        "rms_norm": (x, weight, 1e-6),
        "fused_add_rms_norm_": (x, random(3, 8).flip(0), weight, 1e-6),
        "gated": (x, "tanh"),
        "rotary_embedding": (torch.tensor([0, 1, 2]), x, None, CACHE, 4, True),
    }
    op = getattr(torch.ops.irframework_xpu_sycl, name).default
    kinds = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, arguments[name], test_utils=kinds)
