"""Owns which kernels stand behind the provider, and on which device types: vllm-xpu-kernels' ops, or our own in SYCL.

Decided once, when the implementations are registered, without importing anything: whoever installs vllm-xpu-kernels
gets its kernels, and a reason if they do not load. The environment variable IRFRAMEWORK_XPU_SYCL_DEVICE=cpu chooses
our own kernels and lets them run on CPU tensors, through the CPU device of OpenCL; it is meant for tests.

Knows nothing of irframework.
"""

import importlib.util
import os

PACKAGE = "vllm_xpu_kernels"
VARIABLE = "IRFRAMEWORK_XPU_SYCL_DEVICE"


def runs_on_cpu() -> bool:
    """Whether our own kernels were asked to run on CPU tensors.

    Raises:
        ValueError: The variable has another value than `cpu` or `xpu`.
    """
    word = os.environ.get(VARIABLE, "").strip().lower()
    if word not in ("", "xpu", "cpu"):
        raise ValueError(f"Environment variable {VARIABLE}={word!r}: expected cpu or xpu.")
    return word == "cpu"


def package_is_here() -> bool:
    """Whether vllm-xpu-kernels is installed; it is not imported."""
    return importlib.util.find_spec(PACKAGE) is not None
