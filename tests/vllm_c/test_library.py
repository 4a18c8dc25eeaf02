"""Loading the kernels, choosing the instruction set, and what tracing needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from irframework_vllm_c import library

FORCED = "from irframework_vllm_c import library; print(library.instruction_set())"


def run_with_isa(name: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "IRFRAMEWORK_VLLM_C_ISA": name}
    return subprocess.run([sys.executable, "-c", FORCED], env=environment, capture_output=True, text=True, check=False)


def test_the_variable_chooses_the_instruction_set() -> None:
    assert run_with_isa("plain").stdout.strip() == "plain"


def test_an_unknown_instruction_set_is_an_error_that_names_the_variable() -> None:
    run = run_with_isa("sse9")
    assert run.returncode != 0
    assert "IRFRAMEWORK_VLLM_C_ISA" in run.stderr


def test_switching_to_an_unknown_instruction_set_is_an_error() -> None:
    with pytest.raises(ValueError, match="sse9"):
        library.use_instruction_set("sse9")


def test_a_missing_library_is_reported_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(library.KernelsNotLoadedError, match="install a wheel for it, or build from source"):
        library.load_cpu_kernels.__wrapped__()


def test_a_library_that_does_not_load_is_reported_with_the_loader_s_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    broken = tmp_path / "_C_cpu.so"
    broken.write_bytes(b"not a library")
    spec = library.importlib.util.spec_from_file_location("irframework_vllm_c._C_cpu", broken)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: spec)
    with pytest.raises(
        library.KernelsNotLoadedError, match=r"does not load into torch .*(invalid ELF header|file too short)"
    ):
        library.load_cpu_kernels.__wrapped__()


def decoding() -> tuple[object, ...]:
    query, keys, values = torch.randn(2, 4, 16), torch.randn(3, 8, 2, 16), torch.randn(3, 8, 2, 24)
    offsets, lengths, table = ([0, 1, 2], [9, 5], [[2, 0], [1, 0]])
    numbers = [torch.tensor(each, dtype=torch.int32) for each in (offsets, lengths, table)]
    return query, keys, values, *numbers[:2], 9, numbers[2], 0.25, 7, 2.0, torch.ones(4)


def arguments(op: str) -> tuple[object, ...]:
    x, weight = torch.randn(4, 32, dtype=torch.bfloat16), torch.ones(32, dtype=torch.bfloat16)
    positions, cache = torch.arange(4), torch.randn(8, 16)
    scale = torch.full((1,), 0.02)
    return {
        "rms_norm": (x, weight, 1e-6),
        "fused_add_rms_norm": (x, x.clone(), weight, 1e-6),
        "silu_and_mul": (x,),
        "gelu_and_mul": (x, True),
        "rotary_embedding": (positions, x, x.clone(), cache, 16, True),
        "rotary_embedding_query": (positions, x, cache, 16, False),
        "decode_attention": decoding(),
        "fused_add_rms_norm_functional": (x, x.clone(), weight, 1e-6),
        "static_quant_fp8": (x, scale),
        "dynamic_quant_fp8": (x,),
        "rms_norm_static_quant_fp8": (x, weight, scale, 1e-6),
        "rms_norm_dynamic_quant_fp8": (x, weight, 1e-6),
        "fused_add_rms_norm_static_quant_fp8": (x, x.clone(), weight, scale, 1e-6),
        "fused_add_rms_norm_dynamic_quant_fp8": (x, x.clone(), weight, 1e-6),
        "silu_and_mul_static_quant_fp8": (x, scale),
        "silu_and_mul_dynamic_quant_fp8": (x,),
    }[op]


OPS = [
    "rms_norm",
    "fused_add_rms_norm",
    "silu_and_mul",
    "gelu_and_mul",
    "rotary_embedding",
    "rotary_embedding_query",
    "decode_attention",
    "fused_add_rms_norm_functional",
    "static_quant_fp8",
    "dynamic_quant_fp8",
    "rms_norm_static_quant_fp8",
    "rms_norm_dynamic_quant_fp8",
    "fused_add_rms_norm_static_quant_fp8",
    "fused_add_rms_norm_dynamic_quant_fp8",
    "silu_and_mul_static_quant_fp8",
    "silu_and_mul_dynamic_quant_fp8",
]


@pytest.mark.parametrize("op", OPS)
def test_schema_and_fake_agree_with_the_kernel(op: str) -> None:
    overload = getattr(torch.ops.irframework_vllm_c, op).default
    torch.library.opcheck(overload, arguments(op), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("op", OPS)
def test_meta_tensors_never_reach_the_kernels(op: str) -> None:
    moved = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments(op)]
    result = getattr(torch.ops.irframework_vllm_c, op).default(*moved)
    outputs = result if isinstance(result, tuple) else (result,)
    assert all(output is None or output.is_meta for output in outputs)


def loaded_from(monkeypatch: pytest.MonkeyPatch, file) -> None:
    spec = library.importlib.util.spec_from_file_location("irframework_vllm_c._C_cpu", file)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: spec)


@pytest.mark.parametrize("share", [0.0001, 0.02, 0.9])
def test_a_library_that_is_cut_short_is_refused_before_the_loader_touches_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path, share: float
) -> None:
    def loader(path: str) -> None:
        pytest.fail("would be killed by a bus error")

    whole = Path(library.load_cpu_kernels()).read_bytes()
    short = tmp_path / "_C_cpu.so"
    short.write_bytes(whole[: int(len(whole) * share)])
    loaded_from(monkeypatch, short)
    monkeypatch.setattr(torch.ops, "load_library", loader)
    with pytest.raises(library.KernelsNotLoadedError, match=r"_C_cpu.so is cut short: .* Reinstall"):
        library.load_cpu_kernels.__wrapped__()


def test_a_library_of_other_ops_is_refused_with_those_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded_from(monkeypatch, library.load_cpu_kernels())
    monkeypatch.setattr(library, "NAMESPACE", "irframework_vllm_c_of_another_version")
    with pytest.raises(library.KernelsNotLoadedError, match=r"is not the library of .* it lacks rms_norm, "):
        library.load_cpu_kernels.__wrapped__()
