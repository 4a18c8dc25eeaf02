"""Owns the answer to "can Triton run here", given without importing Triton."""

import importlib.util

import torch

import irframework as ir


def triton_runs() -> bool | ir.Rejected:
    """Whether Triton is installed and this torch has a device that it compiles for; the reason when not."""
    if importlib.util.find_spec("triton") is None:
        return ir.reject("triton is not installed; install the version that fits this torch, e.g. pip install triton")
    version = torch.version
    if version.cuda is None and version.hip is None and getattr(version, "xpu", None) is None:
        return ir.reject(f"torch {torch.__version__} is built for the CPU only; Triton needs CUDA, ROCm or XPU")
    return True


def fp8_products_run() -> bool | ir.Rejected:
    """Whether Triton runs, and all GPUs of NVIDIA or AMD here read codes of float8_e4m3fn; the reason when not.

    One that does not read them is enough for no: the answer is one for a process.
    """
    runs = triton_runs()
    if runs is not True:
        return runs
    for index in range(torch.cuda.device_count()):
        if torch.version.hip is not None:
            name = torch.cuda.get_device_properties(index).gcnArchName
            if not name.startswith("gfx950"):
                return ir.reject(f"cuda:{index} is {name}; codes of float8_e4m3fn are multiplied from gfx950 on")
        elif torch.cuda.get_device_capability(index) < (8, 9):
            major, minor = torch.cuda.get_device_capability(index)
            return ir.reject(f"cuda:{index} has compute capability {major}.{minor}; codes are multiplied from 8.9 on")
    return True
