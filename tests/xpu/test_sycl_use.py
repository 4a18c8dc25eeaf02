"""Our own SYCL kernels in programs: what is refused, in place, in threads and compiled; and how they fail."""

import os
import subprocess
import sys
import threading

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

SCALE = torch.tensor([0.02])
CACHE = torch.randn(8, 16)
X, W = torch.randn(3, 32), torch.randn(32)
OURS = {"rms_norm", "fused_add_rms_norm", "silu_and_mul", "rotary_embedding"}


@pytest.fixture(scope="module", autouse=True)
def plugin():
    ir.load_plugins()


@pytest.fixture
def prefer():
    with ir.priority({name: ["xpu_kernels"] for name in (*OURS, "fused_add_rms_norm_dynamic_quant_fp8")}):
        yield


# ---- bad input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("rms_norm", (X.double(), W.double(), 1e-6), "x is float64"),
        ("rms_norm", (X.half(), W.bfloat16(), 1e-6), "weight is torch.bfloat16"),
        ("rms_norm", (X, W[:8], 1e-6), "weight has shape"),
        ("rms_norm", (X, torch.randn(64)[::2], 1e-6), "weight must be contiguous"),
        ("rms_norm", (X, W, 1e-6, 4), "variance_size"),
        ("rms_norm", (X.t(), W[:3], 1e-6), "stride 1"),
        ("rms_norm", (torch.randn(2, 2, 2, 2, 64)[..., :32], W, 1e-6), "x has 5 dimensions and is not contiguous"),
        ("fused_add_rms_norm", (X, X[:1], W, 1e-6), "x_residual has shape"),
        ("fused_add_rms_norm", (X, X.half(), W, 1e-6), "x_residual is float16"),
        ("silu_and_mul", (X[:, :7],), "must be a multiple of 2"),
        ("gelu_and_mul", (X, "fast"), "approximate"),
        ("static_quant_fp8", (X, SCALE.double()), "scale is float64"),
        ("static_quant_fp8", (X, SCALE.expand(2)), "scale has shape (2,), needs one element"),
        ("dynamic_quant_fp8", (torch.tensor(1.0),), "stride 1"),
        ("rms_norm_static_quant_fp8", (X, W, SCALE.expand(2), 1e-6), "needs one element"),
        ("rotary_embedding", (torch.arange(3).short(), X, None, CACHE, 16), "positions is int16"),
        ("rotary_embedding", (torch.arange(3), X, None, CACHE.half(), 16), "cos_sin_cache is torch.float16"),
        ("rotary_embedding", (torch.arange(3), X, None, CACHE, 8), "rotates 16 elements"),
        ("rotary_embedding", (torch.arange(3), X, None, CACHE[:, :8], 12), "does not fit head_size=12"),
        ("rotary_embedding", (torch.arange(6)[::2], X, None, CACHE, 16), "positions must be contiguous"),
        ("rotary_embedding", (torch.arange(3), X[None, None], None, CACHE, 16), "query has 4 dimensions"),
    ],
)
def test_what_the_kernels_do_not_take_is_refused_with_the_reason(name, arguments, why):
    answer = getattr(ir.ops, name).impls["xpu_kernels"].supports_args(*arguments)
    assert isinstance(answer, ir.Rejected)
    assert why in answer.reason


# ---- in programs -------------------------------------------------------------------------------------------------


def test_donated_memory_takes_the_results(prefer):
    x, residual = X.clone(), torch.randn(3, 32)
    wanted = ir.ops.fused_add_rms_norm.native(x, residual, W, 1e-6)
    places = x.data_ptr(), residual.data_ptr()
    got = ir.ops.fused_add_rms_norm.maybe_inplace(x, residual, W, 1e-6)
    assert tuple(y.data_ptr() for y in got) == places
    torch.testing.assert_close(got, wanted)


def test_only_the_residual_is_overwritten_where_codes_are_the_result(prefer):
    x, residual = X.clone(), torch.randn(3, 32)
    wanted = x + residual
    place = residual.data_ptr()
    _, _, total = ir.ops.fused_add_rms_norm_dynamic_quant_fp8.maybe_inplace(x, residual, W, 1e-6)
    assert total.data_ptr() == place
    assert torch.equal(total, wanted)
    assert torch.equal(x, X)


def test_two_threads_get_their_own_results(prefer):
    inputs = [torch.randn(64, 1000) for _ in range(2)]
    wanted = [ir.ops.silu_and_mul.native(x) for x in inputs]
    right = [0, 0]
    barrier = threading.Barrier(2)

    def work(number: int) -> None:
        barrier.wait()
        with ir.priority(silu_and_mul="xpu_kernels"):
            for _ in range(50):
                right[number] += torch.allclose(ir.ops.silu_and_mul(inputs[number]), wanted[number])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [50, 50]


def block(x: Tensor, residual: Tensor, weight: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    y, residual = ir.ops.fused_add_rms_norm.maybe_inplace(x * 2, residual + 1, weight, 1e-6)
    query, _ = ir.ops.rotary_embedding(positions, y, None, CACHE, 16)
    return ir.ops.silu_and_mul(query), ir.ops.rms_norm(residual, weight, 1e-6)


@pytest.mark.parametrize("backend", ["irframework", "inductor"])
def test_a_compiled_program_runs_them(prefer, backend):
    torch._dynamo.reset()
    arguments = (X, torch.randn(3, 32), W, torch.arange(3))
    wanted = block(*arguments)
    torch.testing.assert_close(torch.compile(block, backend=backend)(*arguments), wanted)
    chosen = {op: set(nodes.values()) for op, nodes in ir.last_report().selected_impls.items()}
    assert chosen == {name: {"xpu_kernels"} for name in OURS}


CALLS = {
    "rms_norm": (X, W, 1e-6),
    "fused_add_rms_norm_": (X, X.flip(0), W, 1e-6),
    "rms_norm_static_quant": (X, W, SCALE, 1e-6),
    "rms_norm_dynamic_quant": (X, None, 1e-6),
    "fused_add_rms_norm_static_quant_": (X, X.flip(0), W, SCALE, 1e-6),
    "fused_add_rms_norm_dynamic_quant_": (X, X.flip(0), W, 1e-6),
    "gated": (X, "tanh"),
    "silu_static_quant": (X, SCALE),
    "silu_dynamic_quant": (X,),
    "static_quant": (X, SCALE),
    "dynamic_quant": (X,),
    "rotary_embedding": (torch.arange(3), X, X[:, :16], CACHE, 16, False),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_torch_ops_do_what_their_schemas_and_fakes_say(name):
    op = getattr(torch.ops.irframework_xpu_sycl, f"sycl_{name}").default
    kinds = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, CALLS[name], test_utils=kinds)


# ---- failures ----------------------------------------------------------------------------------------------------


@pytest.fixture
def uncompiled(monkeypatch):
    """Kernels that nobody has compiled, as they lie in another directory."""
    from irframework_xpu_sycl import sycl_kernels, sycl_runtime

    def sources(directory) -> None:
        monkeypatch.setattr(sycl_kernels, "_compiled", {})
        monkeypatch.setattr(sycl_kernels, "_failed", {})
        monkeypatch.setattr(sycl_runtime, "SOURCES", directory)

    return sources


def test_kernels_that_do_not_compile_are_a_reason(uncompiled, tmp_path):
    from irframework_xpu_sycl import sycl_kernels, sycl_runtime

    for name in ("kernels.cpp", "arguments.h", "host.cpp"):
        (tmp_path / name).write_text((sycl_runtime.SOURCES / name).read_text())
    (tmp_path / "kernels.cpp").write_text('#include "arguments.h"\nfloat half_a_line = ;\n')
    uncompiled(tmp_path)
    for _ in range(2):  # the second time from memory
        with pytest.raises(sycl_runtime.SyclError, match=r"do not compile with intel-sycl-rt .*\n.*error"):
            sycl_kernels.compiled(torch.float32, torch.device("cpu"))


def test_a_forked_process_is_told_to_be_spawned(monkeypatch):
    from irframework_xpu_sycl import sycl_kernels

    monkeypatch.setattr(sycl_kernels, "_used_before_fork", False)
    sycl_kernels._after_fork()
    with pytest.raises(RuntimeError, match="Start processes by spawn"):
        ir.ops.silu_and_mul.impls["xpu_kernels"](X)


def test_no_device_is_the_reason_why_nothing_runs_and_names_the_driver():
    text = "import irframework as ir; ir.load_plugins(); print(ir.ops.rms_norm.impls['xpu_kernels'].unsupported_reason)"
    environment = {name: value for name, value in os.environ.items() if name != "OCL_ICD_FILENAMES"}
    done = subprocess.run([sys.executable, "-c", text], env=environment, capture_output=True, text=True, check=True)
    assert "finds no CPU device of OpenCL; set OCL_ICD_FILENAMES=" in done.stdout
