"""Owns finding and loading the compiled kernels, and the fake implementations that let their ops be traced.

Knows nothing of irframework: what the kernels implement is in `implementations`.
"""

import ctypes
import functools
import importlib.util
import platform
import struct
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "irframework_vllm_c"


class KernelsNotLoadedError(ImportError):
    """The compiled kernels are missing, or do not fit this torch or this machine."""


@functools.cache
def load_cpu_kernels() -> str:
    """Loads `_C_cpu.so` once, so that `torch.ops.irframework_vllm_c` holds the CPU ops.

    Returns:
        The path of the library.

    Raises:
        KernelsNotLoadedError: the library was not built, or the loader refuses it; the message says what to do.
    """
    # The finder knows where an editable install keeps the library; the directory of this file does not.
    spec = importlib.util.find_spec(f"{__package__}._C_cpu")
    if spec is None or spec.origin is None:
        raise KernelsNotLoadedError(
            f"{__package__} holds no _C_cpu.so for this machine ({platform.machine()}): install a wheel for it, or "
            "build from source with `pip install --no-build-isolation -e plugins/vllm_c`"
        )
    try:
        _check_whole(spec.origin)
        torch.ops.load_library(spec.origin)
    except OSError as error:
        raise KernelsNotLoadedError(
            f"{spec.origin} does not load into torch {torch.__version__} on {platform.machine()}: "
            f"{error.__cause__ or error}. It needs torch >= 2.11; reinstall irframework-vllm-c for this environment"
        ) from error
    _register_fakes(spec.origin)
    return spec.origin


@functools.cache
def load_cuda_kernels() -> str:
    """Loads `_C_cuda.so` once, so that the ops of `torch.ops.irframework_vllm_c` run on CUDA devices, too.

    Asks for the visible devices; no CUDA context is made for it.

    Returns:
        The path of the library.

    Raises:
        KernelsNotLoadedError: it was not built, does not fit this torch or driver, or holds no code for a visible
            device; the message says which, and what to do.
    """
    load_cpu_kernels()  # it declares the ops
    spec = importlib.util.find_spec(f"{__package__}._C_cuda")
    if spec is None or spec.origin is None:
        raise KernelsNotLoadedError(
            f"{__package__} was built without CUDA kernels: install a wheel that holds _C_cuda.so, or build from "
            "source where nvcc is, with IRFRAMEWORK_CUDA=ON and `pip install --no-build-isolation -e plugins/vllm_c`"
        )
    if torch.version.cuda is None:
        raise KernelsNotLoadedError(f"the CUDA kernels need a CUDA build of torch; torch {torch.__version__} is none")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        why = f": {said[-1].message}" if said else ""
        raise KernelsNotLoadedError(f"no CUDA device can be used here{why}")
    try:
        _check_whole(spec.origin)
        torch.ops.load_library(spec.origin)
    except OSError as error:
        raise KernelsNotLoadedError(
            f"{spec.origin} does not load into torch {torch.__version__} (CUDA {torch.version.cuda}): "
            f"{error.__cause__ or error}. It needs torch >= 2.11; reinstall irframework-vllm-c for this environment"
        ) from error
    _check_driver(*_cuda_versions(spec.origin))
    _check_devices(
        cuda_architectures(spec.origin),
        [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())],
    )
    return spec.origin


def _check_whole(path: str) -> None:
    """A library cut short must not reach the loader: it maps what is missing, and touching that kills the process."""
    with Path(path).open("rb") as file:
        start = file.read(64)
        if len(start) < 64 or start[:6] != b"\x7fELF\x02\x01":
            return  # not 64-bit little-endian ELF: the loader says so
        table, size, count = struct.unpack_from("<32xQ14xHH", start)
        file.seek(table)
        headers = file.read(size * count)
    needed = table + size * count
    if size == 56 and count and len(headers) == size * count:
        needed = max(offset + held for _, _, offset, _, _, held, _, _ in struct.iter_unpack("<2L6Q", headers))
    there = Path(path).stat().st_size
    if there < needed:
        raise KernelsNotLoadedError(
            f"{path} is cut short: it holds {there} of at least {needed} bytes. Reinstall irframework-vllm-c"
        )


def _cuda_versions(path: str) -> tuple[int, int]:
    runtime, driver = ctypes.c_int(), ctypes.c_int()
    try:
        read = ctypes.CDLL(path).irframework_vllm_c_cuda_versions
    except AttributeError as error:
        raise KernelsNotLoadedError(
            f"{path} is not the library of this irframework-vllm-c: {error}. Reinstall it"
        ) from error
    read(ctypes.byref(runtime), ctypes.byref(driver))
    return runtime.value, driver.value


def _check_driver(runtime: int, driver: int) -> None:
    """Within one major version any driver will do; versions are `1000 * major + 10 * minor`."""
    if driver // 1000 < runtime // 1000:
        raise KernelsNotLoadedError(
            f"the CUDA kernels were built with CUDA {runtime // 1000}.{runtime % 1000 // 10}, the driver here knows "
            f"CUDA {driver // 1000}.{driver % 1000 // 10} at most: update the driver, or build with an older nvcc"
        )


def cuda_architectures(path: str) -> tuple[int, ...]:
    """The architectures that a CUDA library holds code for, e.g. (80, 90, 100); for the last PTX, too."""
    read = ctypes.CDLL(path).irframework_vllm_c_cuda_architectures
    read.restype = ctypes.c_char_p
    return tuple(int(name) for name in read().decode().split(","))


def _check_devices(architectures: Sequence[int], capabilities: Sequence[tuple[int, int]]) -> None:
    """Native code runs on its own major version from its minor on; PTX on every later device."""
    for index, (major, minor) in enumerate(capabilities):
        here = 10 * major + minor
        native = any(each // 10 == major and each <= here for each in architectures)
        if not native and here < architectures[-1]:
            raise KernelsNotLoadedError(
                f"cuda:{index} has compute capability {major}.{minor}; the CUDA kernels were built for "
                f"{', '.join(f'{each // 10}.{each % 10}' for each in architectures)}: rebuild the plugin with "
                f"IRFRAMEWORK_CUDA_ARCHITECTURES={here}, or hide that device with CUDA_VISIBLE_DEVICES"
            )


def use_cuda_plan(
    *,
    threads: int = -1,
    vectors: int = -1,
    rows_per_block: int = -1,
    cluster: int = -1,
    blocks_per_sm: int = -1,
    ahead: int = -1,
    overlap: int = -1,
) -> None:
    """Changes how this process's CUDA kernels are launched; -1 is their own choice. Meant for tests and benchmarks.

    A choice that a kernel has no instance for is not followed. Sums may be added up in another order. The numbers are
    explained in csrc/cuda/plan.h.

    Raises:
        KernelsNotLoadedError: see `load_cuda_kernels`.
    """
    change = ctypes.CDLL(load_cuda_kernels()).irframework_vllm_c_use_plan
    change(threads, vectors, rows_per_block, cluster, blocks_per_sm, ahead, overlap)


def instruction_set() -> str:
    """The instruction set that the CPU kernels run with: "avx512", "avx2" or "plain".

    Raises:
        KernelsNotLoadedError: see `load_cpu_kernels`.
        ValueError: IRFRAMEWORK_VLLM_C_ISA names an instruction set that this machine or build does not have.
    """
    read = ctypes.CDLL(load_cpu_kernels()).irframework_vllm_c_isa
    read.restype = ctypes.c_char_p
    name: str = read().decode()
    if not name:
        raise ValueError("IRFRAMEWORK_VLLM_C_ISA names an instruction set that this machine or build does not have")
    return name


def use_instruction_set(name: str | None) -> None:
    """Switches the CPU kernels of this process to another instruction set; None is the best one. Meant for tests.

    Raises:
        KernelsNotLoadedError: see `load_cpu_kernels`.
        ValueError: this machine or build does not have it.
    """
    switch = ctypes.CDLL(load_cpu_kernels()).irframework_vllm_c_use_isa
    switch.restype = ctypes.c_bool
    if not switch(name.encode() if name is not None else None):
        raise ValueError(f"this machine or build has no instruction set {name!r}")


def _like(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _gated(x: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


def _rotated_pair(positions: Tensor, query: Tensor, key: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _like(query), _like(key)


def _rotated(positions: Tensor, query: Tensor, *_: object) -> Tensor:
    return _like(query)


def _pair_like(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _like(x), _like(x)


def _attended(query: Tensor, keys: Tensor, values: Tensor, *_: object) -> Tensor:
    return query.new_empty(*query.shape[:2], values.shape[-1])


def _codes(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn)


def _codes_and_scales(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _codes(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _gated_codes(x: Tensor, *_: object) -> Tensor:
    return _codes(_gated(x))


def _gated_codes_and_scales(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _codes_and_scales(_gated(x))


def _codes_and_scale(x: Tensor) -> tuple[Tensor, Tensor]:
    return _codes(x), x.new_empty(1, dtype=torch.float32)


def _int8_codes_and_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _codes_and_group_scales(
    x: Tensor, group_size: int, column_major_scales: bool, power_of_two_scales: bool
) -> tuple[Tensor, Tensor]:
    groups = x.shape[-1] // group_size
    shape = (*x.shape[:-2], groups, x.shape[-2]) if column_major_scales else (*x.shape[:-1], groups)
    return _codes(x), x.new_empty(shape, dtype=torch.float32)


def _normed_codes_and_group_scales(
    x: Tensor, weight: Tensor | None, epsilon: float, *grouping: Any
) -> tuple[Tensor, Tensor]:
    return _codes_and_group_scales(x, *grouping)


def _added_codes_and_group_scales(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, *grouping: Any
) -> tuple[Tensor, Tensor]:
    return _codes_and_group_scales(x, *grouping)


def _codes_group_scales_and_sum(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, *grouping: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return *_codes_and_group_scales(x, *grouping), _like(x)


def _codes_scales_and_sum(x: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return *_codes_and_scales(x), _like(x)


def _codes_and_sum(x: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return _codes(x), _like(x)


def _gated_codes_and_group_scales(x: Tensor, *grouping: Any) -> tuple[Tensor, Tensor]:
    return _codes_and_group_scales(_gated(x), *grouping)


def _gelu_codes_and_group_scales(x: Tensor, tanh_approximation: bool, *grouping: Any) -> tuple[Tensor, Tensor]:
    return _codes_and_group_scales(_gated(x), *grouping)


def _values(q: Tensor, scale: Tensor, dtype: torch.dtype, column_major_scales: bool) -> Tensor:
    return q.new_empty(q.shape, dtype=dtype)


def _nothing(*_: object) -> None:
    return None


def _register_fakes(path: str) -> None:
    """Shapes and dtypes of the ops' results. All results are contiguous."""
    fakes: dict[str, Callable[..., object]] = {
        "rms_norm": _like,
        "fused_add_rms_norm": _nothing,
        "silu_and_mul": _gated,
        "gelu_and_mul": _gated,
        "rotary_embedding": _rotated_pair,
        "rotary_embedding_query": _rotated,
        "reshape_and_cache": _nothing,
        "rotary_embedding_reshape_and_cache": _rotated_pair,
        "decode_attention": _attended,
        "fused_add_rms_norm_functional": _pair_like,
        "static_quant_fp8": _codes,
        "dynamic_quant_fp8": _codes_and_scales,
        "rms_norm_static_quant_fp8": _codes,
        "rms_norm_dynamic_quant_fp8": _codes_and_scales,
        "fused_add_rms_norm_static_quant_fp8": _codes,
        "fused_add_rms_norm_dynamic_quant_fp8": _codes_and_scales,
        "silu_and_mul_static_quant_fp8": _gated_codes,
        "silu_and_mul_dynamic_quant_fp8": _gated_codes_and_scales,
        "fused_add_rms_norm_static_quant_fp8_functional": _codes_and_sum,
        "fused_add_rms_norm_dynamic_quant_fp8_functional": _codes_scales_and_sum,
        "qk_norm_rotary_embedding": _rotated_pair,
        "qk_norm_rotary_embedding_query": _rotated,
        "qk_norm_rotary_embedding_reshape_and_cache": _rotated_pair,
        "rms_norm_group_quant_fp8": _normed_codes_and_group_scales,
        "fused_add_rms_norm_group_quant_fp8": _added_codes_and_group_scales,
        "fused_add_rms_norm_group_quant_fp8_functional": _codes_group_scales_and_sum,
        "silu_and_mul_group_quant_fp8": _gated_codes_and_group_scales,
        "gelu_and_mul_static_quant_fp8": _gated_codes,
        "gelu_and_mul_dynamic_quant_fp8": _gated_codes_and_scales,
        "gelu_and_mul_group_quant_fp8": _gelu_codes_and_group_scales,
        "gelu_new": _like,
        "quick_gelu": _like,
        "relu2": _like,
        "xielu": _like,
        "mul_and_silu": _gated,
        "fatrelu_and_mul": _gated,
        "swigluoai_and_mul": _gated,
        "gelu_and_mul_sparse": _gated,
        "silu_mul": _like,
        "gelu_mul": _like,
        "apply_rotary_pos_emb": _like,
        "tensor_quant_fp8": _codes_and_scale,
        "dynamic_quant_int8": _int8_codes_and_scales,
        "group_quant_fp8": _codes_and_group_scales,
        "dequant": _values,
        "gemma_rms_norm": _like,
        "fused_add_gemma_rms_norm": _nothing,
        "fused_add_gemma_rms_norm_functional": _pair_like,
    }
    # Asked before any is registered: a second attempt must find the same fault.
    missing = [name for name in fakes if not hasattr(getattr(torch.ops, NAMESPACE), name)]
    if missing:
        raise KernelsNotLoadedError(
            f"{path} is not the library of this irframework-vllm-c: it lacks {', '.join(missing)}. Reinstall it"
        )
    for name, fake in fakes.items():
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake)
