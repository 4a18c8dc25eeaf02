"""Owns finding and loading the compiled kernels, and the fake implementations that let their ops be traced.

Knows nothing of irframework: what the kernels implement is in `implementations`.
"""

import ctypes
import functools
import importlib.util
import platform

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
        torch.ops.load_library(spec.origin)
    except OSError as error:
        raise KernelsNotLoadedError(
            f"{spec.origin} does not load into torch {torch.__version__} on {platform.machine()}: "
            f"{error.__cause__ or error}. It needs torch >= 2.11; reinstall irframework-vllm-c for this environment"
        ) from error
    _register_fakes()
    return spec.origin


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


def _register_fakes() -> None:
    """Shapes and dtypes of the ops' results. All results are contiguous."""

    def like(x: Tensor) -> Tensor:
        return x.new_empty(x.shape)

    def half(x: Tensor) -> Tensor:
        return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))

    @torch.library.register_fake(f"{NAMESPACE}::rms_norm")
    def _(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
        return like(x)

    @torch.library.register_fake(f"{NAMESPACE}::fused_add_rms_norm")
    def _(x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
        return None

    @torch.library.register_fake(f"{NAMESPACE}::silu_and_mul")
    def _(x: Tensor) -> Tensor:
        return half(x)

    @torch.library.register_fake(f"{NAMESPACE}::gelu_and_mul")
    def _(x: Tensor, tanh_approximation: bool) -> Tensor:
        return half(x)

    @torch.library.register_fake(f"{NAMESPACE}::rotary_embedding")
    def _(
        positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, head_size: int, is_neox: bool
    ) -> tuple[Tensor, Tensor]:
        return like(query), like(key)

    @torch.library.register_fake(f"{NAMESPACE}::rotary_embedding_query")
    def _(positions: Tensor, query: Tensor, cos_sin_cache: Tensor, head_size: int, is_neox: bool) -> Tensor:
        return like(query)
