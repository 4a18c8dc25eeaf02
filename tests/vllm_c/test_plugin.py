"""The plugin inside irframework: what it registers, when it is chosen, and that its answers are the ops' own."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from irframework_vllm_c import implementations, library
from torch import Tensor

import irframework as ir
from irframework.code_files import content_digest, digest_package

X = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.linspace(0.5, 1.5, 64)
CACHE = torch.randn(10, 16, generator=torch.Generator().manual_seed(1))
SCALE = torch.full((1,), 0.02)
FP8 = torch.float8_e4m3fn

ARGUMENTS: dict[str, Callable[[torch.dtype], tuple[object, ...]]] = {
    "rms_norm": lambda dtype: (X.to(dtype), WEIGHT.to(dtype), 1e-6),
    "fused_add_rms_norm": lambda dtype: (X.to(dtype), X.flip(0).to(dtype), WEIGHT.to(dtype), 1e-6),
    "silu_and_mul": lambda dtype: (X.to(dtype),),
    "gelu_and_mul": lambda dtype: (X.to(dtype), "tanh"),
    "rotary_embedding": lambda dtype: (torch.arange(6), X.to(dtype), X[:, :16].to(dtype), CACHE, 16),
    "static_quant_fp8": lambda dtype: (X.to(dtype), SCALE),
    "dynamic_quant_fp8": lambda dtype: (X.to(dtype),),
    "rms_norm_static_quant_fp8": lambda dtype: (X.to(dtype), WEIGHT.to(dtype), SCALE, 1e-6),
    "rms_norm_dynamic_quant_fp8": lambda dtype: (X.to(dtype), WEIGHT.to(dtype), 1e-6),
    "fused_add_rms_norm_static_quant_fp8": lambda dtype: (
        *(X.to(dtype), X.flip(0).to(dtype), WEIGHT.to(dtype)),
        *(SCALE, 1e-6),
    ),
    "fused_add_rms_norm_dynamic_quant_fp8": lambda dtype: (X.to(dtype), X.flip(0).to(dtype), WEIGHT.to(dtype), 1e-6),
    "silu_and_mul_static_quant_fp8": lambda dtype: (X.to(dtype), SCALE),
    "silu_and_mul_dynamic_quant_fp8": lambda dtype: (X.to(dtype),),
}
OPS = list(ARGUMENTS)


def copies(args: tuple[object, ...]) -> tuple[object, ...]:
    return tuple(a.clone() if isinstance(a, Tensor) else a for a in args)


def flat(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


@pytest.mark.parametrize("op", OPS)
def test_the_cpu_chooses_the_kernels_by_default(op: str) -> None:
    decision = ir.explain(op, *ARGUMENTS[op](torch.bfloat16))
    assert decision.provider == "vllm_c", str(decision)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_eager_answers_are_native_s(op: str, dtype: torch.dtype) -> None:
    args = ARGUMENTS[op](dtype)
    expected = getattr(ir.ops, op).native(*copies(args))
    for got, want in zip(flat(getattr(ir.ops, op)(*args)), flat(expected), strict=True):
        assert got.dtype == want.dtype
        one_code = {"rtol": 2**-3, "atol": 2**-9}
        close = one_code if want.dtype == FP8 else {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
        torch.testing.assert_close(got.float(), want.float(), **close)


@pytest.mark.parametrize("op", OPS)
def test_a_functional_call_leaves_its_arguments_alone(op: str) -> None:
    args = ARGUMENTS[op](torch.float32)
    before = copies(args)
    getattr(ir.ops, op)(*args)
    assert all(torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(args, before, strict=True))


def test_fused_add_rms_norm_works_in_donated_memory() -> None:
    x, residual = X.clone(), X.flip(0).contiguous()
    y, total = ir.ops.fused_add_rms_norm.maybe_inplace(x, residual, WEIGHT, 1e-6)
    assert (y.data_ptr(), total.data_ptr()) == (x.data_ptr(), residual.data_ptr())


@pytest.mark.parametrize(
    ("op", "extra"),
    [("fused_add_rms_norm_static_quant_fp8", (SCALE,)), ("fused_add_rms_norm_dynamic_quant_fp8", ())],
)
def test_quantising_norms_write_the_sum_into_the_donated_residual_only(op: str, extra: tuple[Tensor, ...]) -> None:
    x, residual = X.clone(), X.flip(0).contiguous()
    *_, total = getattr(ir.ops, op).maybe_inplace(x, residual, WEIGHT, *extra, 1e-6)
    assert total.data_ptr() == residual.data_ptr()
    assert torch.equal(total, X + X.flip(0))
    assert torch.equal(x, X)


def test_rotary_without_a_key_returns_what_native_returns() -> None:
    got = ir.ops.rotary_embedding(torch.arange(6), X, None, CACHE, 16)
    want = ir.ops.rotary_embedding.native(torch.arange(6), X, None, CACHE, 16)
    assert got[1] is None
    torch.testing.assert_close(got[0], want[0])


@pytest.mark.parametrize(
    ("op", "args", "reason"),
    [
        ("rms_norm", (X.double(), None, 1e-6), "x is float64"),
        ("rms_norm", (X, None, 1e-6, 32), "variance_size must be None"),
        ("rms_norm", (X.t(), None, 1e-6), "the last dimension of x must have stride 1"),
        ("rms_norm", (X, torch.ones(1, 64), 1e-6), "weight has shape"),
        ("fused_add_rms_norm", (X, X.half(), None, 1e-6), "x_residual is float16"),
        ("silu_and_mul", (X[:, :63],), "multiple of 2"),
        ("gelu_and_mul", (X, "exact"), "approximate is 'exact'"),
        ("static_quant_fp8", (X, SCALE.double()), "scale is float64"),
        ("static_quant_fp8", (X, torch.ones(2)), "scale has shape (2,), needs one element"),
        ("static_quant_fp8", (X.t(), SCALE), "the last dimension of x must have stride 1"),
        ("dynamic_quant_fp8", (X.double(),), "x is float64"),
        ("rms_norm_static_quant_fp8", (X, torch.ones(1, 64), SCALE, 1e-6), "weight has shape"),
        ("rms_norm_dynamic_quant_fp8", (X.int(), None, 1e-6), "x is int32"),
        ("fused_add_rms_norm_static_quant_fp8", (X, X, None, torch.ones(0), 1e-6), "needs one element"),
        ("fused_add_rms_norm_dynamic_quant_fp8", (X, X.half(), None, 1e-6), "x_residual is float16"),
        ("silu_and_mul_static_quant_fp8", (X[:, :63], SCALE), "multiple of 2"),
        ("silu_and_mul_dynamic_quant_fp8", (X[:, :63],), "multiple of 2"),
        ("rotary_embedding", (torch.arange(6).int(), X, None, CACHE, 16), "positions is int32"),
    ],
)
def test_what_the_kernels_do_not_take_is_declined_with_a_reason(op: str, args: tuple[object, ...], reason: str) -> None:
    answer = getattr(ir.ops, op).impls["vllm_c"].supports_args(*args)
    assert not answer
    assert reason in answer.reason


def test_kernels_that_do_not_load_are_unsupported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise library.KernelsNotLoadedError("built for another torch")

    monkeypatch.setattr(implementations, "load_cpu_kernels", missing)
    answer = implementations.kernels_load()
    assert isinstance(answer, ir.Rejected)
    assert answer.reason == "built for another torch"


@pytest.mark.parametrize("backend", ["irframework", "inductor"])
def test_compiled_answers_are_eager_s(backend: str) -> None:
    """One graph with every op, since a compile costs seconds."""
    every = {op: ARGUMENTS[op](torch.bfloat16) for op in OPS}

    def call(every: dict[str, tuple[object, ...]]) -> list[Tensor]:
        return [result for op, args in every.items() for result in flat(getattr(ir.ops, op)(*args))]

    torch._dynamo.reset()
    with torch.no_grad(), ir.priority(dict.fromkeys(OPS, "vllm_c")):
        compiled = torch.compile(call, backend=backend, fullgraph=True)(every)
        for got, want in zip(compiled, call(every), strict=True):
            assert got.dtype == want.dtype
            assert torch.equal(got.float(), want.float())
    chosen = ir.last_report().selected_impls
    assert all(set(chosen[op].values()) == {"vllm_c"} for op in OPS)


def test_the_digest_for_cache_keys_reads_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    read_bytes = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", lambda path: read.append(path.name) or read_bytes(path))
    content_digest.cache_clear()
    digest_package("irframework_vllm_c")
    assert "_C_cpu.so" in read
