"""Owns which calls the kernels of the single activations take, and the functions that are registered for them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

import irframework as ir
from irframework_triton_kernels.conditions import FLOATS, GATED, launches


def gelu_new(x: Tensor) -> Tensor:
    """See `irframework.ops.gelu_new`."""
    y: Tensor = launches().activated(x, "gelu_new")
    return y


def gelu_fast(x: Tensor) -> Tensor:
    """See `irframework.ops.gelu_fast`."""
    y: Tensor = launches().activated(x, "gelu_fast")
    return y


def quick_gelu(x: Tensor) -> Tensor:
    """See `irframework.ops.quick_gelu`."""
    y: Tensor = launches().activated(x, "quick_gelu")
    return y


def relu2(x: Tensor) -> Tensor:
    """See `irframework.ops.relu2`."""
    y: Tensor = launches().activated(x, "relu2")
    return y


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, epsilon: float = -1e-6) -> Tensor:
    """See `irframework.ops.xielu`."""
    y: Tensor = launches().xielu(x, alpha_p, alpha_n, beta, epsilon)
    return y


def mul_and_silu(x: Tensor) -> Tensor:
    """See `irframework.ops.mul_and_silu`."""
    y: Tensor = launches().gated_by(x, "mul_and_silu", 0.0, 0.0)
    return y


def swigluoai_and_mul(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """See `irframework.ops.swigluoai_and_mul`."""
    y: Tensor = launches().gated_by(x, "swigluoai_and_mul", alpha, limit)
    return y


def fatrelu_and_mul(x: Tensor, threshold: float = 0.0) -> Tensor:
    """See `irframework.ops.fatrelu_and_mul`."""
    y: Tensor = launches().gated_by(x, "fatrelu_and_mul", threshold, 0.0)
    return y


def limit_fits(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> bool | ir.Rejected:
    """A limit that is not positive is a mistake that native explains."""
    return True if limit > 0 else ir.reject(f"limit is {limit}, must be more than 0")


def register(add: Callable[..., Any]) -> None:
    """Register the activations by `add`, a function of an implementation and its conditions."""
    for fn in (gelu_new, gelu_fast, quick_gelu, relu2):
        add(fn, ir.supports(dtype=FLOATS, row_contiguous=("x",)))
    numbers = {"x": FLOATS, "alpha_p": FLOATS, "alpha_n": FLOATS}
    add(xielu, ir.supports(dtype=numbers, row_contiguous=("x",), one_element=("alpha_p", "alpha_n")))
    for fn in (mul_and_silu, fatrelu_and_mul):
        add(fn, ir.supports(dtype=FLOATS, **GATED))
    add(swigluoai_and_mul, ir.supports(dtype=FLOATS, **GATED) & limit_fits)
