"""Launches of the choice of experts, and its torch ops."""

import torch
from torch import Tensor

from irframework_triton_kernels.kernels.routing import SIGMOID, SOFTMAX, routing_kernel
from irframework_triton_kernels.launch.call import as_float, launch, rows_of, tiles_of, torch_op
from irframework_triton_kernels.tiles import Tile, experts_tile, power_of_two

SCORINGS: dict[str, int] = {"softmax": SOFTMAX.value, "sigmoid": SIGMOID.value}


def _route(
    logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    groups: int,
    top_groups: int,
    by_logits: bool,
    renormalize: bool,
    scoring: str,
    factor: float,
    tile: Tile | None,
) -> tuple[Tensor, Tensor]:
    shape = (*logits.shape[:-1], top_k)
    weights, ids = logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)
    rows = rows_of(logits)
    members = int(logits.shape[-1]) // groups
    group_block, member_block = power_of_two(groups), power_of_two(members)
    tile = tile or experts_tile(group_block * member_block)
    counted = 1 if bias is None else min(2, members)
    numbers = (
        rows.stride(0), as_float(factor), groups, members, top_k, top_groups, counted, by_logits, bias is not None,
        renormalize, SCORINGS[scoring], tile.rows, group_block, member_block, power_of_two(top_k),
    )  # fmt: skip
    count = rows.shape[0]
    tensors = (rows, rows if bias is None else bias, weights, ids)
    launch(routing_kernel, tiles_of(count, tile.rows), tensors, count, numbers, tile)
    return weights, ids


@torch_op()
def fused_topk(
    router_logits: Tensor, top_k: int, renormalize: bool, scoring: str, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the experts with the largest logits; returns their weights in float32 and numbers in int32."""
    return _route(router_logits, None, top_k, 1, 0, True, renormalize, scoring, 1.0, tile)


@torch_op()
def grouped_topk(
    router_logits: Tensor,
    top_k: int,
    num_groups: int,
    top_groups: int,
    renormalize: bool,
    scoring: str,
    correction_bias: Tensor | None,
    scaling_factor: float,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose the best experts of the best groups; returns their weights in float32 and numbers in int32."""
    return _route(
        router_logits, correction_bias, top_k, num_groups, top_groups, False, renormalize, scoring, scaling_factor, tile
    )
