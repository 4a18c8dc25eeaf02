"""Meanings of the ops of a mixture of experts: routing, and the experts themselves. Does not hold kernels."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.activation import gelu_and_mul, silu_and_mul, swigluoai_and_mul
from irframework.ops.blocked_segments import blocks_of, with_zero_row
from irframework.ops.layernorm import check_floating, widened
from irframework.symbolic import same_sizes

_SCORINGS = ("softmax", "sigmoid")
_TINY = 1e-20  # keeps a sum of weights that are all zero from being divided by


def _check_routing(op: str, router_logits: Tensor, top_k: int, scoring: str, bias: Tensor | None) -> None:
    check_floating(op, "router_logits", router_logits)
    if router_logits.dim() == 0:
        raise ArgumentError(f"Op {op!r}: argument 'router_logits' must be [..., experts], it is a scalar.")
    experts = router_logits.shape[-1]
    if scoring not in _SCORINGS:
        raise ArgumentError(f"Op {op!r}: scoring must be one of {', '.join(map(repr, _SCORINGS))}, got {scoring!r}.")
    if not 0 < top_k <= experts:
        raise ArgumentError(f"Op {op!r}: top_k={top_k} must be between 1 and the number of experts, {experts}.")
    if bias is None:
        return
    check_floating(op, "correction_bias", bias)
    if not same_sizes(bias.shape, router_logits.shape[-1:]):
        raise ArgumentError(
            f"Op {op!r}: argument 'correction_bias' must have one entry per expert, {experts}; it has shape "
            f"{tuple(bias.shape)}."
        )


def _scores(router_logits: Tensor, scoring: str) -> Tensor:
    wide = widened(router_logits)
    return wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()


def _largest(values: Tensor, count: int) -> Tensor:
    """Places of the largest values, largest first; of equal ones the first. `topk` leaves the order of those open.

    NaN is largest, whatever its sign: some devices sort by bits.
    """
    values = values.masked_fill(values.isnan(), float("nan"))
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _weights(scores: Tensor, ids: Tensor, renormalize: bool, factor: float) -> tuple[Tensor, Tensor]:
    weights = scores.gather(-1, ids)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return (weights * factor).to(torch.float32), ids.to(torch.int32)


@register_op(activations=("router_logits",))
def fused_topk(
    router_logits: Tensor, top_k: int, renormalize: bool = False, scoring: str = "softmax"
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token: those with the largest scores.

    `scores = softmax(router_logits)` over all experts, or their sigmoid; `ids = topk(scores)`; `weights = scores[ids]`,
    divided by their sum (plus 1e-20) when renormalised. Computed in float32 (float64 for float64 logits). The largest
    comes first, and of equal logits the expert with the lower number.

    Args:
        router_logits: `[..., experts]`, floating point.
        top_k: Experts per token.
        renormalize: Let the weights of a token add up to 1.
        scoring: `softmax` or `sigmoid`.

    Returns:
        `(weights, ids)`: `[..., top_k]` in float32 and in int32.

    Raises:
        ArgumentError: The logits are not floating point, `top_k` is not between 1 and the number of experts, or
            `scoring` is another word.

    Source: Shazeer et al., "Outrageously Large Neural Networks" (2017); Mixtral (renormalised), Qwen2-MoE, Llama 4
        (sigmoid). GPT-OSS's softmax over the chosen logits is the renormalised softmax.
    """
    _check_routing("fused_topk", router_logits, top_k, scoring, None)
    ids = _largest(router_logits, top_k)
    return _weights(_scores(router_logits, scoring), ids, renormalize, 1.0)


@register_op(activations=("router_logits",))
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
    """Choose the experts of each token within its best groups of experts.

    The experts are `num_groups` groups of neighbours. With `scores` as in `fused_topk` and `choice = scores +
    correction_bias`, a group counts its largest `choice`, or with a bias the sum of its two largest. Within the
    `top_groups` best groups, `ids = topk(choice)`; `weights = scores[ids]` (without the bias), divided by their sum
    (plus 1e-20) when renormalised, times `scaling_factor`. Computed in float32 (float64 for float64 logits). The
    largest comes first; of equal ones the lower number, for experts and groups.

    Args:
        router_logits: `[..., experts]`, floating point.
        top_k: Experts per token.
        num_groups: Groups of experts; divides their number.
        top_groups: Groups that a token may choose from; they hold at least `top_k` experts.
        renormalize: Let the weights of a token add up to `scaling_factor`.
        scoring: `softmax` or `sigmoid`.
        correction_bias: `[experts]`, floating point: added for the choice only; or None.
        scaling_factor: Multiplies the weights.

    Returns:
        `(weights, ids)`: `[..., top_k]` in float32 and in int32.

    Raises:
        ArgumentError: As `fused_topk`; or the groups do not fit the experts, or the bias does not.

    Source: DeepSeek-V2 (2024; softmax, largest of a group) and DeepSeek-V3 (2024; sigmoid, bias, two largest). Groups
        that are not chosen count as minus infinity, as in DeepSeek's own code, also if all scores are negative.
    """
    op = "grouped_topk"
    _check_routing(op, router_logits, top_k, scoring, correction_bias)
    experts = router_logits.shape[-1]
    if num_groups < 1 or experts % num_groups:
        raise ArgumentError(f"Op {op!r}: num_groups={num_groups} must divide the number of experts, {experts}.")
    if not 0 < top_groups <= num_groups:
        raise ArgumentError(f"Op {op!r}: top_groups={top_groups} must be between 1 and num_groups={num_groups}.")
    size = experts // num_groups
    if top_k > top_groups * size:
        raise ArgumentError(
            f"Op {op!r}: top_k={top_k} is more than the {top_groups * size} experts in top_groups={top_groups} groups."
        )
    scores = _scores(router_logits, scoring)
    choice = scores if correction_bias is None else scores + correction_bias.to(scores.dtype)
    grouped = choice.unflatten(-1, (num_groups, size))
    counted = 1 if correction_bias is None else min(2, size)
    best = _largest(grouped.sort(-1, descending=True).values[..., :counted].sum(-1), top_groups)
    open_groups = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(
        -1, best, torch.ones_like(best, dtype=torch.bool)
    )
    masked = grouped.masked_fill(~open_groups.unsqueeze(-1), float("-inf")).flatten(-2)
    return _weights(scores, _largest(masked, top_k), renormalize, scaling_factor)


def _expert_starts(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sort pairs by expert: their order, and where each expert's pairs start and the last one's end."""
    kept = torch.where((ids >= 0) & (ids < experts), ids, experts).to(torch.int64)
    counts = torch.zeros(experts + 1, dtype=torch.int64, device=ids.device).scatter_add(0, kept, torch.ones_like(kept))
    return kept.argsort(stable=True), F.pad(counts[:-1].cumsum(0), (1, 0))


def _check_ids(op: str, topk_ids: Tensor) -> None:
    if topk_ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(f"Op {op!r}: argument 'topk_ids' must have dtype int32 or int64, it has {topk_ids.dtype}.")


def _check_alignment(topk_ids: Tensor, block_size: int, num_experts: int) -> None:
    op = "moe_align_block_size"
    _check_ids(op, topk_ids)
    for name, number in (("block_size", block_size), ("num_experts", num_experts)):
        if number < 1:
            raise ArgumentError(f"Op {op!r}: {name}={number} must be at least 1.")


@register_op(activations=("topk_ids",))
def moe_align_block_size(topk_ids: Tensor, block_size: int, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the pairs of token and expert by expert, and pad each expert's to whole blocks.

    Pair `i` is entry `i` of the flattened ids. Each block belongs to one expert; experts follow each other by number,
    the pairs of an expert in their order. Padding is marked by the number of pairs. The sizes are the most that can
    be needed: `blocks = (pairs + num_experts * (block_size - 1)) // block_size`.

    Args:
        topk_ids: `[..., top_k]`, int32 or int64: the expert of each pair; -1 for pairs that are left out.
        block_size: Pairs of a block.
        num_experts: The number of experts.

    Returns:
        `(sorted_ids, expert_ids, num_padded)`, all int32: the pairs with padding, `[blocks * block_size]`; the expert
        of each block, `[blocks]`, -1 for unused blocks; and how many entries of `sorted_ids` are in used blocks, `[1]`.

    Raises:
        ArgumentError: The ids are not integers, or `block_size` or `num_experts` is less than 1.

    Source: the block layout of grouped matrix products for mixtures of experts, as in Gale et al., "MegaBlocks" (2022).
    """
    _check_alignment(topk_ids, block_size, num_experts)
    ids = topk_ids.flatten()
    pairs = ids.shape[0]
    order, starts = _expert_starts(ids, num_experts)
    blocks = blocks_of(starts, pairs, block_size)
    sentinel = torch.full((1,), pairs, dtype=torch.int64, device=ids.device)
    sorted_ids = torch.cat((order, sentinel))[blocks.source].flatten()
    expert_ids = torch.where(blocks.segment < num_experts, blocks.segment, -1)
    return sorted_ids.to(torch.int32), expert_ids.to(torch.int32), (blocks.first[-1:] * block_size).to(torch.int32)


_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")


def _gated(h: Tensor, activation: str) -> Tensor:
    op = {"silu": silu_and_mul, "swigluoai": swigluoai_and_mul}.get(activation, gelu_and_mul)
    words = ("tanh" if activation == "gelu_tanh" else "none",) if op is gelu_and_mul else ()
    gated: Tensor = op.native(h, *words)
    return gated


def _check_experts(
    x: Tensor, w13: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor, w13_bias: Tensor | None, w2_bias: Any
) -> None:
    op = "fused_moe"
    for name, tensor in (("x", x), ("w13", w13), ("w2", w2), ("topk_weights", topk_weights)):
        check_floating(op, name, tensor)
    _check_ids(op, topk_ids)
    if x.dim() == 0 or w13.dim() != 3 or w2.dim() != 3:
        raise ArgumentError(
            f"Op {op!r}: x must be [..., hidden], w13 [experts, 2 * inter, hidden] and w2 [experts, hidden, inter]; "
            f"their shapes are {tuple(x.shape)}, {tuple(w13.shape)} and {tuple(w2.shape)}."
        )
    experts, hidden, inter = w2.shape
    if experts == 0:
        raise ArgumentError(f"Op {op!r}: there are no experts, w2 has shape {tuple(w2.shape)}.")
    wanted = {
        "w13": (w13, (experts, 2 * inter, x.shape[-1])),
        "w2": (w2, (experts, x.shape[-1], inter)),
        "topk_ids": (topk_ids, (*x.shape[:-1], topk_ids.shape[-1] if topk_ids.dim() else 0)),
        "topk_weights": (topk_weights, topk_ids.shape),
        "w13_bias": (w13_bias, (experts, 2 * inter)),
        "w2_bias": (w2_bias, (experts, hidden)),
    }
    for name, (tensor, shape) in wanted.items():
        if tensor is not None and not same_sizes(tensor.shape, shape):
            raise ArgumentError(
                f"Op {op!r}: argument {name!r} has shape {tuple(tensor.shape)}; with x of shape {tuple(x.shape)} and "
                f"w2 of shape {tuple(w2.shape)} it must be {tuple(shape)}."
            )
        if name[0] == "w" and tensor is not None and tensor.dtype != x.dtype:
            raise ArgumentError(f"Op {op!r}: argument {name!r} has dtype {tensor.dtype}, 'x' has {x.dtype}.")


@register_op
def fused_moe(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> Tensor:
    """Send each token through its experts, gated perceptrons, and add up what they return by weight.

    `y[t] = sum over k of topk_weights[t, k] * expert(x[t])` with `e = topk_ids[t, k]` and `expert(v) = w2[e] @
    gated(w13[e] @ v + w13_bias[e]) + w2_bias[e]`. Both products and the activation are rounded to the dtype of x, as
    models that call them one by one do; the sum is taken in float32 (float64 for float64 x) and rounded once.

    The pairs of token and expert are sorted by expert and laid out in blocks of `tokens * top_k / experts`, each block
    with its own copy of its expert's weights. So native computes at most twice as many rows as there are pairs, plus
    one per expert, and copies the weights of at most `min(pairs, 2 * experts)` experts: nothing depends on values.

    Args:
        x: `[..., hidden]`, floating point.
        w13: Gate and up projections, `[experts, 2 * inter, hidden]`, the dtype of x. Gate comes first; `swigluoai`
            has gate and up in turn.
        w2: Down projections, `[experts, hidden, inter]`, the dtype of x.
        topk_weights: `[..., top_k]`, floating point.
        topk_ids: `[..., top_k]`, int32 or int64. A pair with the expert -1 (of another rank) contributes nothing.
        activation: `silu` and `swigluoai` as `silu_and_mul` and `swigluoai_and_mul` compute; `gelu` and `gelu_tanh` as
            `gelu_and_mul` does.
        w13_bias: `[experts, 2 * inter]`, the dtype of x, or None.
        w2_bias: `[experts, hidden]`, the dtype of x, or None.

    Returns:
        `[..., hidden]`, the dtype of x.

    Raises:
        ArgumentError: Shapes or dtypes do not fit each other, or `activation` is another word.

    Source: Shazeer et al. (2017); Mixtral (silu), GPT-OSS (swigluoai, biases).
    """
    if activation not in _ACTIVATIONS:
        raise ArgumentError(
            f"Op 'fused_moe': activation must be one of {', '.join(map(repr, _ACTIVATIONS))}, got {activation!r}."
        )
    _check_experts(x, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias)
    experts, top_k = w2.shape[0], topk_ids.shape[-1]
    rows, ids = x.reshape(-1, x.shape[-1]), topk_ids.flatten()
    pairs = ids.shape[0]
    order, starts = _expert_starts(ids, experts)
    blocks = blocks_of(starts, pairs, 1 + pairs // experts)
    expert = blocks.segment.clamp_max(experts - 1)
    token = torch.cat((order // top_k, order.new_zeros(1)))[blocks.source]  # padding computes a row that nobody reads
    h = torch.bmm(rows[token], w13[expert].transpose(1, 2))
    if w13_bias is not None:
        h = h + w13_bias[expert].unsqueeze(1)
    h = torch.bmm(_gated(h, activation), w2[expert].transpose(1, 2))
    if w2_bias is not None:
        h = h + w2_bias[expert].unsqueeze(1)
    place = torch.zeros_like(order).scatter(0, order, blocks.place)  # of each pair, in the order of the ids
    each = with_zero_row(h.flatten(0, 1))[place].reshape(*topk_ids.shape, x.shape[-1])
    weights = topk_weights.to(torch.promote_types(x.dtype, torch.float32)).unsqueeze(-1)
    return (widened(each) * weights).sum(-2).to(x.dtype)


def _check_expert_numbers(op: str, topk_ids: Tensor, experts: int) -> None:
    wrong = topk_ids[(topk_ids < -1) | (topk_ids >= experts)]
    if wrong.numel():
        raise ArgumentError(
            f"Op {op!r}: argument 'topk_ids' names expert {int(wrong[0])}; there are {experts} experts, from 0, and -1 "
            "is for a pair that is left out."
        )


@moe_align_block_size.register_value_check
def _check_aligned_values(topk_ids: Tensor, block_size: int, num_experts: int) -> None:
    _check_alignment(topk_ids, block_size, num_experts)
    _check_expert_numbers("moe_align_block_size", topk_ids, num_experts)


@fused_moe.register_value_check
def _check_moe_values(
    x: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: str = "silu",
    w13_bias: Tensor | None = None,
    w2_bias: Tensor | None = None,
) -> None:
    _check_experts(x, w13, w2, topk_weights, topk_ids, w13_bias, w2_bias)
    _check_expert_numbers("fused_moe", topk_ids, w2.shape[0])


@fused_topk.register_input_generator
def _topk_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    logits, most = torch.randn(shape, **options), min(8, shape[-1])
    yield logits, min(2, most), True
    yield logits, most
    yield logits, 1, True, "sigmoid"
    yield logits.round(), most, True  # many are equal


@grouped_topk.register_input_generator
def _grouped_topk_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    logits, experts = torch.randn(shape, **options), shape[-1]
    bias = torch.randn(experts, dtype=torch.float32, device=options["device"]) / 4
    groups = next(groups for groups in (8, 4, 2, 1) if experts % groups == 0)
    best = max(1, groups // 2)
    most = min(8, best * experts // groups)
    yield logits, most, groups, best, True, "sigmoid", bias, 2.5
    yield logits, min(2, most), groups, best
    yield logits, most, groups, groups, False, "sigmoid"
    yield logits, 1, 1, 1, False, "softmax", bias, 16.0
    yield logits.round(), most, groups, best, True  # many are equal


def _some_ids(lead: tuple[int, ...], top_k: int, experts: int, device: Any) -> Tensor:
    """Different experts for each token."""
    return torch.rand(*lead, experts, device=device).argsort(-1)[..., :top_k].to(torch.int32)


@moe_align_block_size.register_input_generator
def _align_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of the ids, so the last dimension is how many each token has; 256 experts at most."""
    experts = min(2 * shape[-1], 256)
    ids = _some_ids(shape[:-1], shape[-1], 2 * shape[-1], device) % experts
    yield ids, 16, experts
    yield ids, 1, experts
    yield torch.where(ids < shape[-1], ids, -1).long(), 5, experts
    yield ids % 2, 64, experts


@fused_moe.register_input_generator
def _moe_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    hidden, experts, inter, top_k = shape[-1], 8, 32, 2
    x = torch.randn(shape, **options)
    w13 = torch.randn(experts, 2 * inter, hidden, **options) / max(1, hidden) ** 0.5
    w2 = torch.randn(experts, hidden, inter, **options) / inter**0.5
    b13, b2 = torch.randn(experts, 2 * inter, **options), torch.randn(experts, hidden, **options)
    ids = _some_ids(shape[:-1], top_k, experts, options["device"])
    weights = torch.rand(*shape[:-1], top_k, device=options["device"])
    yield x, w13, w2, weights, ids
    yield x, w13, w2, weights, torch.where(ids < 3, ids, -1), "gelu"
    yield x, w13, w2, weights[..., :1], ids[..., :1].long(), "gelu_tanh"
    yield x * 4, w13, w2, weights.to(x.dtype), ids, "swigluoai", b13, b2
    yield x, w13, w2, weights, ids * 0 + 5, "silu", b13  # one expert for all
