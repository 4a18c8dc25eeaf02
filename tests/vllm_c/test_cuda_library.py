"""What nvcc made of the CUDA kernels, and when they are refused: none of this needs a GPU, some of it `make cuda`."""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from irframework_vllm_c import implementations, library

import irframework as ir

BUILT = Path(__file__).parents[2] / "build/cuda/_C_cuda.so"
ARCHITECTURES = (80, 90, 100)
# Beside the C library, C++'s and torch's stable C ABI: what the linker and the C++ runtime put into every library.
OF_EVERY_LIBRARY = {"__gmon_start__", "_ITM_deregisterTMCloneTable", "_ITM_registerTMCloneTable", "__cxa_finalize"}


@pytest.fixture(scope="module")
def built() -> Path:
    if shutil.which("nvcc") is None and not BUILT.exists():
        pytest.skip("needs nvcc: `make cuda` builds the library that this looks at")
    assert BUILT.exists(), "nvcc is here, so `make cuda` must have built it"
    return BUILT


def cuobjdump() -> str:
    """Triton's package carries one."""
    tool = shutil.which("cuobjdump")
    spec = importlib.util.find_spec("triton")
    if tool is None and spec is not None and spec.origin is not None:
        carried = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump"
        tool = str(carried) if carried.exists() else None
    if tool is None:
        pytest.skip("needs cuobjdump, from CUDA or from triton's package")
    return tool


def output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


# ---- what was built -------------------------------------------------------------------------------------------------


def test_the_library_holds_native_code_for_each_architecture_and_ptx_of_the_last(built: Path) -> None:
    tool = cuobjdump()
    native = {int(name) for name in re.findall(r"\.sm_(\d+)\.cubin", output(tool, "--list-elf", str(built)))}
    ptx = {int(name) for name in re.findall(r"\.sm_(\d+)\.ptx", output(tool, "--list-ptx", str(built)))}
    assert native == set(ARCHITECTURES)
    assert ptx == {ARCHITECTURES[-1]}


def test_the_library_needs_nothing_but_c_cxx_and_torch_s_stable_abi(built: Path) -> None:
    lines = output("nm", "-D", "--undefined-only", str(built)).splitlines()
    names = {line.split()[-1] for line in lines}
    others = {name for name in names if "@GLIBC" not in name and "@CXXABI" not in name and "@GCC" not in name}
    strange = {name for name in others if not name.startswith(("aoti_torch_", "torch_"))} - OF_EVERY_LIBRARY
    assert not strange


def test_the_library_holds_no_path_of_the_machine_that_built_it(built: Path) -> None:
    assert str(BUILT.parents[2]).encode() not in built.read_bytes()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_kernels_that_hold_rows_in_registers_spill_none(built: Path, architecture: int) -> None:
    listing = output(cuobjdump(), "-res-usage", "-arch", f"sm_{architecture}", str(built))
    found = re.findall(r"Function (\S*held_rows\S*):\s+REG:(\d+) STACK:(\d+) \S+ LOCAL:(\d+)", listing)
    assert len(found) > 50
    # A frame without spills is what the slow path of a division is called with: at most 16 bytes.
    assert not [name for name, _, stack, local in found if int(local) > 0 or int(stack) > 16]
    assert max(int(registers) for _, registers, _, _ in found) <= 128


# ---- when it is refused ---------------------------------------------------------------------------------------------


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(library.KernelsNotLoadedError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)])
def test_a_device_of_a_major_version_with_code_or_newer_than_the_ptx_will_do(capability: tuple[int, int]) -> None:
    library._check_devices(ARCHITECTURES, [capability])


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_a_device_without_code_is_named_with_what_to_do(capability: tuple[int, int]) -> None:
    message = refusal(lambda: library._check_devices((80, 100), [(8, 0), capability]))
    assert f"cuda:1 has compute capability {capability[0]}.{capability[1]}" in message
    assert "built for 8.0, 10.0" in message
    assert f"IRFRAMEWORK_CUDA_ARCHITECTURES={capability[0]}{capability[1]}" in message


def test_a_driver_of_an_older_major_version_is_refused_with_both_versions() -> None:
    library._check_driver(13000, 13020)
    library._check_driver(12080, 13000)
    message = refusal(lambda: library._check_driver(13000, 12080))
    assert "built with CUDA 13.0" in message
    assert "CUDA 12.8 at most" in message


def test_a_library_that_was_not_built_is_reported_with_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    assert "IRFRAMEWORK_CUDA=ON" in refusal(library.load_cuda_kernels.__wrapped__)


def test_a_torch_without_cuda_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("irframework_vllm_c._C_cuda", tmp_path / "_C_cuda.so")
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "need a CUDA build of torch" in refusal(library.load_cuda_kernels.__wrapped__)


def test_a_library_that_does_not_load_is_reported_with_the_loader_s_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    broken = tmp_path / "_C_cuda.so"
    broken.write_bytes(b"not a library")
    spec = importlib.util.spec_from_file_location("irframework_vllm_c._C_cuda", broken)
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    message = refusal(library.load_cuda_kernels.__wrapped__)
    assert re.search(r"does not load into torch .*\(CUDA 13.0\): .*(invalid ELF header|file too short)", message)


def test_a_library_that_is_another_s_is_refused() -> None:
    assert "is not the library of this irframework-vllm-c" in refusal(
        lambda: library._cuda_versions(library.load_cpu_kernels())
    )


def test_where_the_cuda_kernels_do_not_load_the_provider_still_has_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused() -> str:
        raise library.KernelsNotLoadedError("built for another torch")

    monkeypatch.setattr(implementations, "load_cuda_kernels", refused)
    answer = implementations.cuda_kernels_load()
    assert isinstance(answer, ir.Rejected)
    assert answer.reason == "built for another torch"
    assert implementations.kernels_load() is True
