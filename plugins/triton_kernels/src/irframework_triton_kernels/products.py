"""Owns which products with a gate behind them the kernels take, and the functions that are registered for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import irframework as ir
from irframework_triton_kernels.conditions import launches

HALVES = (torch.bfloat16, torch.float16)


def linear_silu_and_mul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `irframework.ops.linear_silu_and_mul`."""
    y: Tensor = launches().linear_silu_and_mul(x, weight)
    return y


def product_fits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool | ir.Rejected:
    """Sizes fit each other; how many rows there are is looked at when it runs."""
    if not x.dim():
        return ir.reject("x is a scalar")
    return sizes_fit(x, weight)


def sizes_fit(x: Tensor, weight: Tensor) -> bool | ir.Rejected:
    """The weight is as long as a row, and has two halves; one that does not is a mistake that native explains."""
    if weight.shape[1] != x.shape[-1]:
        return ir.reject(f"weight has shape {tuple(weight.shape)}, does not fit rows of {x.shape[-1]}")
    if weight.shape[0] % 2:
        return ir.reject(f"weight has {weight.shape[0]} rows, needs as many for the gate as for what it multiplies")
    return True


def register(add: Callable[..., Any]) -> None:
    """Register the products by `add`, a function of an implementation and its conditions."""
    # Few rows are summed up in another order than many.
    add(
        linear_silu_and_mul,
        ir.supports(
            dtype=HALVES,
            same_dtype=("x", "weight"),
            none=("bias",),
            ndim={"weight": 2},
            contiguous=("weight",),
            row_contiguous=("x",),
        )
        & product_fits,
        batch_invariant=False,
    )
