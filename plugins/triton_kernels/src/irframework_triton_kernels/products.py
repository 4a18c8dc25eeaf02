"""Owns which products with a gate behind them the kernels take, and the functions that are registered for them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import irframework as ir
from irframework_triton_kernels.availability import fp8_products_run
from irframework_triton_kernels.conditions import launches

_HALF_PRECISION = (torch.bfloat16, torch.float16)
_WHOLE = 16  # torch's product, which has many rows, takes multiples of it only


def linear_silu_and_mul(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `irframework.ops.linear_silu_and_mul`."""
    y: Tensor = launches().linear_silu_and_mul(x, weight)
    return y


def scaled_linear_silu_and_mul_static_quant_fp8(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulation: bool = True,
) -> Tensor:
    """See `irframework.ops.scaled_linear_silu_and_mul_static_quant_fp8`."""
    q: Tensor = launches().scaled_linear_silu_and_mul_static_quant_fp8(x, weight, x_scale, weight_scale, scale)
    return q


def product_fits(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool | ir.Rejected:
    """Sizes fit each other; how many rows there are is looked at when it runs."""
    return _sizes_fit(x, weight)


def scaled_product_fits(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulation: bool = True,
) -> bool | ir.Rejected:
    """As `product_fits`; sums are kept and rounded in one way, and many rows are torch's."""
    if dtype is not torch.bfloat16:
        return ir.reject(f"dtype is {dtype}, needs torch.bfloat16")
    if not fast_accumulation:
        return ir.reject("fast_accumulation is False; the kernel's sums are fast ones")
    fit = _sizes_fit(x, weight)
    if fit is True and (weight.shape[0] % (2 * _WHOLE) or weight.shape[1] % _WHOLE):
        return ir.reject(f"weight has shape {tuple(weight.shape)}, needs a multiple of {2 * _WHOLE} rows of {_WHOLE}")
    return fit


def _sizes_fit(x: Tensor, weight: Tensor) -> bool | ir.Rejected:
    """The weight is as long as a row, and has two halves; one that does not is a mistake that native explains."""
    if not all(isinstance(size, int) for size in (*weight.shape, x.shape[-1])):
        return ir.reject("sizes of the weight are symbolic; those of a module's weight are not")
    if weight.shape[1] != x.shape[-1]:
        return ir.reject(f"weight has shape {tuple(weight.shape)}, does not fit rows of {x.shape[-1]}")
    if weight.shape[0] % 2:
        return ir.reject(f"weight has {weight.shape[0]} rows, needs as many for the gate as for what it multiplies")
    return True


def register(add: Callable[..., Any]) -> None:
    """Register the products by `add`, a function of an implementation and its conditions."""
    matrix: dict[str, Any] = {"row_contiguous": ("x", "weight")}
    # Few rows are summed up in another order than many.
    add(
        linear_silu_and_mul,
        ir.supports(dtype=_HALF_PRECISION, same_dtype=("x", "weight"), none=("bias",), ndim={"weight": 2}, **matrix)
        & product_fits,
        batch_invariant=False,
    )
    scales = ("x_scale", "weight_scale", "scale")
    codes = dict.fromkeys(("x", "weight"), (torch.float8_e4m3fn,))
    add(
        scaled_linear_silu_and_mul_static_quant_fp8,
        ir.supports(
            dtype={**codes, **dict.fromkeys(scales, (torch.float32,))},
            ndim={"x": 2, "weight": 2},
            one_element=scales,
            **matrix,
        )
        & scaled_product_fits,
        batch_invariant=False,
        supported={"cuda": fp8_products_run, "xpu": ir.reject("no Intel GPU is known to multiply codes")},
    )
