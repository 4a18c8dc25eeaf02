"""What the plugin registers where there is no vllm-xpu-kernels, and the reasons why its own kernels do not run."""

import importlib.metadata
import importlib.util
import os
import subprocess
from pathlib import Path

import pytest
import torch
from irframework_xpu_sycl import library, route, sycl_conditions, sycl_runtime

import irframework as ir

OPS = (
    *("rms_norm", "fused_add_rms_norm", "silu_and_mul", "gelu_and_mul", "rotary_embedding"),
    *("static_quant_fp8", "dynamic_quant_fp8", "rms_norm_static_quant_fp8", "rms_norm_dynamic_quant_fp8"),
    *("fused_add_rms_norm_static_quant_fp8", "fused_add_rms_norm_dynamic_quant_fp8"),
    *("silu_and_mul_static_quant_fp8", "silu_and_mul_dynamic_quant_fp8"),
)


class Distribution:
    """An installed distribution with these files."""

    version = "2026.0.0"

    def __init__(self, directory: Path, *files: str) -> None:
        self.directory = directory
        self.files = [importlib.metadata.PackagePath(name) for name in files]
        for name in files:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).touch()

    def locate_file(self, file: os.PathLike[str]) -> Path:
        return self.directory / file


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Say which files `intel-sycl-rt` consists of."""

    def install(*files: str) -> None:
        distribution = Distribution(tmp_path, *files)
        monkeypatch.setattr(importlib.metadata, "distribution", lambda name: distribution)

    return install


def runtime(directory: Path, major: int = 9) -> sycl_runtime.Runtime:
    return sycl_runtime.Runtime("2026.0.0", directory / f"libsycl.so.{major}", directory / "include")


# ---- what is registered ------------------------------------------------------------------------------------------


def test_the_plugin_loads():
    (info,) = (plugin for plugin in ir.plugins() if plugin.name == "xpu_sycl")
    assert (info.status, info.providers) == ("loaded", ("xpu_kernels",))


@pytest.mark.parametrize("name", OPS)
def test_its_implementations_are_for_intel_gpus(name):
    ir.load_plugins()
    assert getattr(ir.ops, name).impls["xpu_kernels"].device_types == ("xpu",)


def test_the_kernels_are_preferred_on_intel_gpus_only():
    import irframework_xpu_sycl as plugin

    from irframework.platform import BUILT_IN

    chosen = {p.name: plugin.irframework_default_priorities(p, "eager") for p in BUILT_IN}
    assert chosen == {"xpu": {"*": ("xpu_kernels",)}, "rocm": None, "cuda": None, "cpu": None}


def test_an_unknown_device_is_an_error_that_names_the_variable(monkeypatch):
    monkeypatch.setenv("IRFRAMEWORK_XPU_SYCL_DEVICE", "gpu")
    with pytest.raises(ValueError, match="IRFRAMEWORK_XPU_SYCL_DEVICE='gpu': expected cpu or xpu"):
        route.runs_on_cpu()


# ---- reasons -----------------------------------------------------------------------------------------------------


def test_a_torch_without_xpu_is_the_reason_why_nothing_runs(monkeypatch):
    monkeypatch.setattr(torch.version, "xpu", None, raising=False)
    assert "is not built for Intel GPUs" in sycl_conditions.kernels_run().reason


def test_a_machine_without_an_intel_gpu_is_the_reason_why_nothing_runs(monkeypatch):
    monkeypatch.setattr(torch.version, "xpu", "20260000", raising=False)
    assert "sees no Intel GPU" in sycl_conditions.kernels_run().reason


def test_a_torch_without_xpu_is_the_reason_why_vllm_xpu_kernels_is_not_loaded(monkeypatch):
    monkeypatch.setattr(torch.version, "xpu", None, raising=False)
    library.load_kernels.cache_clear()
    with pytest.raises(library.XpuKernelsError, match="is not built for Intel GPUs"):
        library.check_ops("rms_norm")


def test_a_missing_runtime_is_a_reason(monkeypatch):
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", absent)
    with pytest.raises(sycl_runtime.SyclError, match="intel-sycl-rt is not installed"):
        sycl_runtime.find_runtime()


def test_a_runtime_without_headers_is_a_reason(installed):
    installed("lib/libsycl.so.9", "lib/libsycl-preview.so.9")
    with pytest.raises(sycl_runtime.SyclError, match=r"2026\.0\.0 does not hold the headers"):
        sycl_runtime.find_runtime()


def test_headers_without_a_library_are_a_reason(installed):
    installed("include/sycl/sycl.hpp", "lib/libsycl-preview.so.9", "lib/libsycl.so.9.0.0-gdb.py")
    with pytest.raises(sycl_runtime.SyclError, match=r"2026\.0\.0 does not hold libsycl\.so"):
        sycl_runtime.find_runtime()


def test_the_runtime_is_found_by_what_its_distribution_lists(installed, tmp_path):
    installed("include/sycl/sycl.hpp", "lib/libsycl.so", "lib/libsycl.so.9", "lib/libsycl.so.9.0.0")
    found = sycl_runtime.find_runtime()
    assert found == sycl_runtime.Runtime("2026.0.0", tmp_path / "lib/libsycl.so.9", tmp_path / "include")


def test_another_runtime_in_the_process_is_a_reason(monkeypatch, tmp_path):
    maps = f"7f00 r-xp 0000 08:01 1 /torch/lib/libsycl.so.8\n7f01 r-xp 0000 08:01 1 {tmp_path}/libsycl.so.9\n"
    monkeypatch.setattr(Path, "read_text", lambda path: maps)
    with pytest.raises(sycl_runtime.SyclError, match=r"this process runs on /torch/lib/libsycl\.so\.8"):
        sycl_runtime.check_loaded(runtime(tmp_path))


def test_the_same_runtime_in_the_process_is_none(monkeypatch, tmp_path):
    monkeypatch.setattr(Path, "read_text", lambda path: f"7f01 r-xp 0000 08:01 1 {tmp_path}/libsycl.so.9\n")
    sycl_runtime.check_loaded(runtime(tmp_path))


def test_a_missing_compiler_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(sycl_runtime.SyclError, match=r"no C\+\+ compiler is found \(CXX=no-such-compiler\)"):
        sycl_runtime.host_library(runtime(tmp_path))


def test_the_first_error_of_a_compiler_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("IRFRAMEWORK_XPU_SYCL_CACHE", str(tmp_path / "cache"))
    with pytest.raises(sycl_runtime.SyclError, match=r"does not compile .* 2026\.0\.0:\n.*sycl/sycl\.hpp"):
        sycl_runtime.host_library(runtime(tmp_path))
    assert not list((tmp_path / "cache").iterdir())


def test_a_directory_that_cannot_be_written_is_a_reason(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("IRFRAMEWORK_XPU_SYCL_CACHE", str(tmp_path / "file"))
    with pytest.raises(sycl_runtime.SyclError, match="another directory by IRFRAMEWORK_XPU_SYCL_CACHE"):
        sycl_runtime.host_library(runtime(tmp_path))


def test_the_host_library_is_built_once(monkeypatch, tmp_path):
    builds = []

    def compiles(command, **options):
        builds.append(command)
        Path(command[-1]).write_bytes(b"")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("IRFRAMEWORK_XPU_SYCL_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", compiles)
    assert sycl_runtime.host_library(runtime(tmp_path)) == sycl_runtime.host_library(runtime(tmp_path))
    assert len(builds) == 1


def test_another_runtime_gets_a_host_library_of_its_own(monkeypatch, tmp_path):
    def compiles(command, **options):
        Path(command[-1]).write_bytes(b"")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setenv("IRFRAMEWORK_XPU_SYCL_CACHE", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", compiles)
    assert sycl_runtime.host_library(runtime(tmp_path, 8)) != sycl_runtime.host_library(runtime(tmp_path, 9))
