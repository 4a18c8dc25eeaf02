"""Owns which calls of the ops that models write out the kernels take, and the functions registered for them."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

import irframework as ir
from irframework_triton_kernels.conditions import FLOATS, launches


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See `irframework.ops.silu_mul`."""
    y: Tensor = launches().gated_apart(gate, up, "silu")
    return y


def gelu_mul(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """See `irframework.ops.gelu_mul`."""
    y: Tensor = launches().gated_apart(gate, up, approximate)
    return y


def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `irframework.ops.apply_rotary_pos_emb`.

    Raises:
        ValueError: cos and sin are not for as many sequences and tokens as there are.
    """
    if cos.shape[1] != x.shape[1] or (cos.shape[0] != 1 and cos.shape[0] != x.shape[0]):
        raise ValueError(f"cos has shape {tuple(cos.shape)}, does not fit x of shape {tuple(x.shape)}")
    y: Tensor = launches().apply_rotary_pos_emb(x, cos, sin)
    return y


def angles_fit(x: Tensor, cos: Tensor, sin: Tensor) -> bool | ir.Rejected:
    """One angle for each element of an even head; how many tokens there are is not looked at."""
    size = x.shape[3]
    if size % 2 or cos.shape[2] != size:
        return ir.reject(f"cos has {cos.shape[2]} elements for a head of {size}, needs as many, and an even number")
    return True


def gate_is_a_loop(gate: Tensor) -> ir.Rejected:
    """Compiled code is given no gate unasked: over 1 to 8192 tokens the kernel took as long as Inductor's loop did."""
    return ir.reject("Inductor's own loop takes no longer than the kernel")


def angles_are_a_loop(x: Tensor) -> ir.Rejected:
    """Compiled code is given no angles unasked: Inductor's loop took 0.75 of the kernel's time over few tokens."""
    return ir.reject("Inductor's own loop takes less time than the kernel over few tokens")


def register(add: Callable[..., Any]) -> None:
    """Register all by `add`, a function of an implementation and its conditions."""
    gates: dict[str, Any] = {
        "dtype": {"gate": FLOATS, "up": FLOATS},
        "same_dtype": ("gate", "up"),
        "same_shape": ("gate", "up"),
        "row_contiguous": ("gate", "up"),
    }
    add(silu_mul, ir.supports(**gates), compiled_where=gate_is_a_loop)
    add(gelu_mul, ir.supports(one_of={"approximate": ("none", "tanh")}, **gates))
    add(
        apply_rotary_pos_emb,
        ir.supports(
            dtype={"x": FLOATS, "cos": FLOATS, "sin": FLOATS},
            ndim={"x": 4, "cos": 3, "sin": 3},
            same_dtype=("cos", "sin"),
            same_shape=("cos", "sin"),
            row_contiguous=("x", "cos", "sin"),
        )
        & angles_fit,
        compiled_where=angles_are_a_loop,
    )
