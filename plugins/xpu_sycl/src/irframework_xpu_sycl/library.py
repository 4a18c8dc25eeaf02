"""Owns finding and loading vllm-xpu-kernels, and the check that its ops are those that this plugin calls.

Knows nothing of irframework.

Private torch API used here (read in 2.11 and 2.13): `_schema` of an `OpOverload`.
"""

import functools
import importlib
from typing import Any

import torch

from irframework_xpu_sycl.route import PACKAGE, package_is_here

# The parameters of the ops that are called; those with `!` are written. Written for vllm-xpu-kernels 0.1.16.2.
CALLED: dict[str, tuple[str, ...]] = {
    "rms_norm": ("result!", "input", "weight", "epsilon"),
    "fused_add_rms_norm": ("input!", "residual!", "weight", "epsilon"),
    "silu_and_mul": ("result!", "input"),
    "gelu_and_mul": ("out!", "input"),
    "gelu_tanh_and_mul": ("out!", "input"),
    "rotary_embedding": ("positions", "query!", "key!", "head_size", "cos_sin_cache", "is_neox"),
    "static_scaled_fp8_quant": ("result!", "input", "scale"),
    "dynamic_per_token_scaled_fp8_quant": ("result!", "input", "scale!", "scale_ub"),
    "rms_norm_static_fp8_quant": ("result!", "input", "weight", "scale", "epsilon"),
    "fused_add_rms_norm_static_fp8_quant": ("result!", "input", "residual!", "weight", "scale", "epsilon"),
    "silu_and_mul_quant": ("result!", "input", "scale"),
}


class XpuKernelsError(ImportError):
    """vllm-xpu-kernels is missing, does not load here, or has other ops."""


def check_ops(*names: str) -> None:
    """See to it that `torch.ops._C` holds ops of vllm-xpu-kernels, with the parameters that they are called with.

    Args:
        names: Keys of `CALLED`.

    Raises:
        XpuKernelsError: See `load_kernels`; or an op is gone or takes other parameters. The message says which.
    """
    load_kernels()
    for name in names:
        if not hasattr(torch.ops._C, name):
            raise XpuKernelsError(f"vllm-xpu-kernels has no op {name}; this plugin was written for 0.1.16.2")
        found, wanted = _parameters(getattr(torch.ops._C, name).default), CALLED[name]
        if found != wanted:
            raise XpuKernelsError(
                f"the op {name} of vllm-xpu-kernels takes ({', '.join(found)}), is called with ({', '.join(wanted)}); "
                "this plugin was written for 0.1.16.2"
            )


@functools.cache
def load_kernels() -> None:
    """Load vllm-xpu-kernels once, so that `torch.ops._C` holds its ops.

    Raises:
        XpuKernelsError: torch is not built for Intel GPUs; the package is not installed or does not load.
    """
    if getattr(torch.version, "xpu", None) is None:
        raise XpuKernelsError(f"torch {torch.__version__} is not built for Intel GPUs (XPU)")
    if not package_is_here():
        raise XpuKernelsError("vllm-xpu-kernels is not installed; install the version that fits this torch")
    try:
        importlib.import_module(f"{PACKAGE}._C")
    except (ImportError, OSError, RuntimeError) as error:
        raise XpuKernelsError(f"vllm-xpu-kernels does not load into torch {torch.__version__}: {error}") from error


def _parameters(op: Any) -> tuple[str, ...]:
    needed = (argument for argument in op._schema.arguments if not argument.has_default_value())
    return tuple(
        argument.name + ("!" if argument.alias_info is not None and argument.alias_info.is_write else "")
        for argument in needed
    )
