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
