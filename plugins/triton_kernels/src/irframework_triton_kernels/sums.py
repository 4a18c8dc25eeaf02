"""Norms of sums over the processes of a group: which calls the kernel takes, and what is registered."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import irframework as ir
from irframework.distributed.symmetric_memory import memory_of, shares_memory
from irframework_triton_kernels.conditions import ADD_NORM, FLOATS, NORM, launches


def all_reduce_rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, group: str) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.all_reduce_rms_norm`."""
    pair: tuple[Tensor, Tensor] = launches().all_reduce_rms_norm(x, weight, epsilon, group)
    return pair


def all_reduce_fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, group: str
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.all_reduce_fused_add_rms_norm`."""
    pair: tuple[Tensor, Tensor] = launches().all_reduce_fused_add_rms_norm(x, x_residual, weight, epsilon, group)
    return pair


def all_reduce_fused_add_rms_norm_static_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float, group: str
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.all_reduce_fused_add_rms_norm_static_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = launches().all_reduce_fused_add_rms_norm_static_quant_fp8(
        x, x_residual, weight, scale, epsilon, group
    )
    return pair


def all_reduce_fused_add_rms_norm_dynamic_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, group: str
) -> tuple[Tensor, Tensor, Tensor]:
    """See `irframework.ops.all_reduce_fused_add_rms_norm_dynamic_quant_fp8`."""
    outputs: tuple[Tensor, Tensor, Tensor] = launches().all_reduce_fused_add_rms_norm_dynamic_quant_fp8(
        x, x_residual, weight, epsilon, group
    )
    return outputs


def row_fits(x: Tensor, group: str) -> bool | ir.Rejected:
    """The group shares memory in which at least a row can be added up.

    How many rows there are is looked at when it runs, and how long they are where that is symbolic; more than fits is
    added up by the group's backend.
    """
    memory = memory_of(group)
    if memory is None:
        return shares_memory(group)
    row = x.shape[-1] * x.element_size()
    if not isinstance(row, int) or row <= memory.capacity:
        return True
    return ir.reject(
        f"a row has {row} bytes, sums of at most {memory.capacity} are one-shot: one_shot_bytes of "
        "enable_symmetric_memory"
    )


def norm_fits(x: Tensor, weight: Tensor | None, epsilon: float, group: str) -> bool | ir.Rejected:
    """See `row_fits`."""
    return row_fits(x, group)


def add_norm_fits(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, group: str
) -> bool | ir.Rejected:
    """See `row_fits`."""
    return row_fits(x, group)


def add_norm_codes_fit(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float, group: str
) -> bool | ir.Rejected:
    """See `row_fits`."""
    return row_fits(x, group)


def register(add: Callable[..., Any]) -> None:
    """Register the norms of sums by `add`, a function of an implementation and its conditions."""
    values: dict[str, Any] = {"x": FLOATS, "weight": FLOATS}
    scaled = ir.supports(dtype=values | {"scale": (torch.float32,)}, one_element=("scale",), **ADD_NORM)
    # A batch with more rows than fit is added up by the group's backend, in an order of its own.
    for fn, conditions in (
        (all_reduce_rms_norm, ir.supports(dtype=values, **NORM) & norm_fits),
        (all_reduce_fused_add_rms_norm, ir.supports(dtype=values, **ADD_NORM) & add_norm_fits),
        (all_reduce_fused_add_rms_norm_static_quant_fp8, scaled & add_norm_codes_fit),
        (all_reduce_fused_add_rms_norm_dynamic_quant_fp8, ir.supports(dtype=values, **ADD_NORM) & add_norm_fits),
    ):
        add(fn, conditions, batch_invariant=False)
