"""Owns which calls the kernel that chooses experts takes, and the functions that are registered for it."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

import irframework as ir
from irframework_triton_kernels.conditions import FLOATS, launches
from irframework_triton_kernels.tiles import MOST_EXPERTS, power_of_two

_SCORINGS = ("softmax", "sigmoid")


def fused_topk(
    router_logits: Tensor, top_k: int, renormalize: bool = False, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_topk`."""
    pair: tuple[Tensor, Tensor] = launches().fused_topk(router_logits, top_k, renormalize, scoring)
    return pair


def grouped_topk(
    router_logits: Tensor,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalize: bool = True,
    scoring: str = "softmax",
    correction_bias: Tensor | None = None,
    scaling_factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.grouped_topk`."""
    pair: tuple[Tensor, Tensor] = launches().grouped_topk(
        router_logits, top_k, num_groups, top_groups, renormalize, scoring, correction_bias, scaling_factor
    )
    return pair


def experts_fit(
    router_logits: Tensor, top_k: int, renormalize: bool = False, scoring: str = "softmax"
) -> bool | ir.Rejected:
    """All experts of a token are held in registers. What does not fit them is a mistake that native explains."""
    experts = router_logits.shape[-1]
    if not 0 < experts <= MOST_EXPERTS:
        return ir.reject(f"router_logits has {experts} experts, needs 1 to {MOST_EXPERTS}")
    return True if 0 < top_k <= experts else ir.reject(f"top_k is {top_k}, does not fit {experts} experts")


def groups_fit(
    router_logits: Tensor,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalize: bool = True,
    scoring: str = "softmax",
    correction_bias: Tensor | None = None,
    scaling_factor: float = 1.0,
) -> bool | ir.Rejected:
    """See `experts_fit`; groups are padded to powers of two."""
    experts = router_logits.shape[-1]
    if num_groups < 1 or experts % num_groups:
        return ir.reject(f"num_groups is {num_groups}, does not divide {experts} experts")
    size = experts // num_groups
    if not 0 < top_groups <= num_groups or top_k > top_groups * size:
        return ir.reject(f"top_groups is {top_groups}, does not fit {num_groups} groups of {size} and top_k={top_k}")
    padded = power_of_two(num_groups) * power_of_two(size)
    if padded > MOST_EXPERTS:
        return ir.reject(f"router_logits has {experts} experts, {padded} when padded, needs at most {MOST_EXPERTS}")
    return experts_fit(router_logits, top_k)


def register(add: Callable[..., Any]) -> None:
    """Register the choices by `add`, a function of an implementation and its conditions."""
    logits = {"router_logits": FLOATS}
    known: dict[str, Any] = {"row_contiguous": ("router_logits",), "one_of": {"scoring": _SCORINGS}}
    add(fused_topk, ir.supports(dtype=logits, **known) & experts_fit)
    add(
        grouped_topk,
        ir.supports(
            dtype=logits | {"correction_bias": FLOATS},
            last_dim_of={"correction_bias": "router_logits"},
            contiguous=("correction_bias",),
            **known,
        )
        & groups_fit,
    )
