"""Owns where AITER is, and whether its functions still have the signatures that this plugin calls.

AITER's functions are read as source text: importing it takes seconds and needs a ROCm device. Knows nothing of
irframework.
"""

import ast
import functools
import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

# What is passed, by position; further parameters must have defaults. Written for amd-aiter 0.1.7.
CALLED: dict[str, dict[str, tuple[str, ...]]] = {
    "rmsnorm": {
        "rmsnorm2d_fwd": ("input", "weight", "epsilon"),
        "rmsnorm2d_fwd_with_add": ("out", "input", "residual_in", "residual_out", "weight", "epsilon"),
    },
    "activation": {
        "silu_and_mul": ("out", "input"),
        "gelu_and_mul": ("out", "input"),
        "gelu_tanh_and_mul": ("out", "input"),
    },
    "quant": {"static_per_tensor_quant": ("out", "input", "scale")},
}
# The architectures that AITER is made for (MI200, MI300 and MI350 series).
ARCHITECTURES = ("gfx90a", "gfx942", "gfx950")
# Where its 8-bit floats are torch's float8_e4m3fn. On gfx942 they are float8_e4m3fnuz; gfx90a has none.
FP8_ARCHITECTURES = ("gfx950",)


class AiterUnusableError(ImportError):
    """AITER is missing, or is not the AITER that this plugin was written for."""


@functools.cache
def check_aiter() -> None:
    """Check, without importing AITER, that it can be called.

    Raises:
        AiterUnusableError: torch is not built for ROCm; AITER is not installed; or a function that this plugin calls is
            gone or takes other parameters. The message says which.
    """
    if torch.version.hip is None:
        raise AiterUnusableError(f"torch {torch.__version__} is not built for ROCm, which AITER needs")
    spec = importlib.util.find_spec("aiter")
    if spec is None or not spec.submodule_search_locations:
        raise AiterUnusableError("aiter is not installed; install amd-aiter for this ROCm")
    ops = Path(next(iter(spec.submodule_search_locations))) / "ops"
    for module, functions in CALLED.items():
        try:
            tree = ast.parse((ops / f"{module}.py").read_text(encoding="utf-8"))
        except (OSError, SyntaxError) as error:
            raise AiterUnusableError(
                f"aiter.ops.{module} cannot be read ({error}); written for amd-aiter 0.1.7"
            ) from error
        defined = {node.name: node.args for node in tree.body if isinstance(node, ast.FunctionDef)}
        for name, passed in functions.items():
            problem = _difference(defined.get(name), passed)
            if problem:
                raise AiterUnusableError(
                    f"aiter.ops.{module}.{name} {problem}; this plugin was written for amd-aiter 0.1.7"
                )


def _difference(found: ast.arguments | None, passed: tuple[str, ...]) -> str | None:
    if found is None:
        return "does not exist"
    names = tuple(parameter.arg for parameter in (*found.posonlyargs, *found.args))
    if names[: len(passed)] != passed:
        return f"takes ({', '.join(names)}), is called with ({', '.join(passed)})"
    needed = names[len(passed) : len(names) - len(found.defaults)]
    needed += tuple(p.arg for p, default in zip(found.kwonlyargs, found.kw_defaults, strict=True) if default is None)
    return f"needs {', '.join(needed)}, which is not passed" if needed else None


@functools.cache
def aiter_function(module: str, name: str) -> Callable[..., Any]:
    """Return a function of `aiter.ops`, importing AITER at first need.

    Raises:
        AiterUnusableError: see `check_aiter`.
    """
    check_aiter()
    function: Callable[..., Any] = getattr(importlib.import_module(f"aiter.ops.{module}"), name)
    return function


@functools.cache
def architecture_of(index: int | None) -> str:
    """Return the architecture of a ROCm device, e.g. `gfx942`; torch adds its features behind a colon."""
    name: str = torch.cuda.get_device_properties(index).gcnArchName
    return name.partition(":")[0]
