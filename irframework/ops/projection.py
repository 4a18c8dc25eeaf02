"""Meanings of the projections: linear layers, the embedding of a vocabulary, and logits.

Does not hold kernels, nor what is exchanged between the processes of a tensor-parallel model (`collectives.py`).
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.layernorm import check_floating, widened
from irframework.symbolic import same_sizes


def check_projection(op: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise unless a matrix, and a vector if there is one, fit the rows of x.

    Raises:
        ArgumentError: Names the op, the argument, and what it has.
    """
    check_floating(op, "x", x)
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise ArgumentError(
                f"Op {op!r}: argument {name!r} has dtype {tensor.dtype}, 'x' has {x.dtype}; both need the same."
            )
    if x.dim() == 0:
        raise ArgumentError(f"Op {op!r}: argument 'x' must have at least one dimension, it is a scalar.")
    if weight.dim() != 2 or not same_sizes(weight.shape[1:], x.shape[-1:]):
        raise ArgumentError(
            f"Op {op!r}: argument 'weight' must be a matrix with rows as long as those of 'x', {x.shape[-1]}; it has "
            f"shape {tuple(weight.shape)}."
        )
    if bias is not None and not same_sizes(bias.shape, weight.shape[:1]):
        raise ArgumentError(
            f"Op {op!r}: argument 'bias' must be a vector as long as 'weight' has rows, {weight.shape[0]}; it has "
            f"shape {tuple(bias.shape)}."
        )


@register_op
def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply rows by a matrix, and add a vector: `y = x @ weight.T + bias`.

    Added up as torch does on the device: in float32 for half precision.

    Args:
        x: `[..., in_features]`, floating point.
        weight: `[out_features, in_features]`, the dtype of x.
        bias: `[out_features]`, the dtype of x, or None.

    Returns:
        `[..., out_features]`, the dtype of x.

    Raises:
        ArgumentError: x is not floating point or is a scalar, dtypes differ, or shapes do not fit together.

    Source: the layer of every network; torch's `linear`.
    """
    check_projection("linear", x, weight, bias)
    return F.linear(x, weight, bias)


@register_op
def vocab_parallel_embedding(
    ids: Tensor, weight: Tensor, start: int = 0, end: int | None = None, vocab_size: int | None = None
) -> Tensor:
    """Look up the rows of those ids that this process holds; all other ids give zeros.

    `y = weight[id - start]` where `start <= id < end`, else 0. The sum over the processes of a tensor-parallel model is
    the embedding, each id being held by one. With the defaults it is the embedding of the whole vocabulary.

    Args:
        ids: `[...]`, int32 or int64.
        weight: Rows of this process, `[rows, hidden]`, floating point. Rows from `end - start` on are padding and
            never read.
        start: First id that this process holds.
        end: First id after those that it holds; default: `start + rows`.
        vocab_size: How many ids there are in all processes together; default: not known. It changes no result: ids
            below zero or not less than it are an error where values are checked.

    Returns:
        `[..., hidden]`, the dtype of weight.

    Raises:
        ArgumentError: The ids are not int32 or int64; the weight is no matrix of floating-point numbers, or has no
            rows; the range starts below zero, ends before it starts, or is longer than the weight or the vocabulary.

    Source: Shoeybi et al., "Megatron-LM" (2019).
    """
    if ids.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(
            f"Op 'vocab_parallel_embedding': argument 'ids' must be int32 or int64, it has dtype {ids.dtype}."
        )
    check_floating("vocab_parallel_embedding", "weight", weight)
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ArgumentError(
            "Op 'vocab_parallel_embedding': argument 'weight' must be a matrix with at least one row, it has shape "
            f"{tuple(weight.shape)}."
        )
    rows = weight.shape[0]
    last = start + rows if end is None else end
    if start < 0 or last < start or last - start > rows:
        raise ArgumentError(
            f"Op 'vocab_parallel_embedding': start={start} and end={end} must be a range of ids from 0 on that is not "
            f"longer than 'weight' has rows, {rows}."
        )
    if vocab_size is not None and end is not None and end > vocab_size:
        raise ArgumentError(f"Op 'vocab_parallel_embedding': end={end} is more than vocab_size={vocab_size}.")
    elsewhere = (ids < start) | (ids >= last)
    found = F.embedding((ids - start).masked_fill(elsewhere, 0), weight)
    return found.masked_fill(elsewhere.unsqueeze(-1), 0)


@vocab_parallel_embedding.register_value_check
def _check_ids(
    ids: Tensor, weight: Tensor, start: int = 0, end: int | None = None, vocab_size: int | None = None
) -> None:
    if vocab_size is None or ids.numel() == 0:
        return
    smallest, largest = (int(number) for number in ids.aminmax())
    if smallest < 0 or largest >= vocab_size:
        raise ArgumentError(
            f"Op 'vocab_parallel_embedding': argument 'ids' holds {smallest if smallest < 0 else largest}; ids are "
            f"numbers from 0 to {vocab_size - 1} (vocab_size={vocab_size})."
        )


@register_op
def logits(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    scale: float = 1.0,
    soft_cap: float | None = None,
    org_vocab_size: int | None = None,
) -> Tensor:
    """Score each word of a vocabulary: `y = scale * cap(x @ weight.T + bias)`.

    `cap(v) = soft_cap * tanh(v / soft_cap)`, or v without a cap. The projection is rounded to the dtype of x, as in
    `linear`; cap and scale are computed in float32 (float64 for float64 rows) and rounded once.

    Columns of a padded vocabulary are cut, so that neither softmax, nor argmax, nor sampling needs to know of them.
    Processes that hold a part of the columns each call the op without `org_vocab_size`, gather columns of equal number,
    and cut last.

    Args:
        x: Hidden states, `[..., hidden]`, floating point.
        weight: `[padded_vocab, hidden]`, the dtype of x.
        bias: `[padded_vocab]`, the dtype of x, or None.
        scale: Factor, after the cap.
        soft_cap: Bound of the size before scaling, more than 0, or None for no cap.
        org_vocab_size: How many words there are without padding; default: as many as `weight` has rows.

    Returns:
        `[..., org_vocab_size]`, the dtype of x.

    Raises:
        ArgumentError: x is not floating point or is a scalar, dtypes differ, shapes do not fit together, the cap is not
            more than 0, or the vocabulary is smaller than 1 or larger than the weight.

    Source: the head of every language model; cap as in Gemma 2, scale as in Cohere's Command R.
    """
    check_projection("logits", x, weight, bias)
    if soft_cap is not None and not soft_cap > 0:
        raise ArgumentError(f"Op 'logits': soft_cap must be more than 0, or None; got {soft_cap!r}.")
    if org_vocab_size is not None:
        if not 0 < org_vocab_size <= weight.shape[0]:
            raise ArgumentError(
                f"Op 'logits': org_vocab_size={org_vocab_size} must be between 1 and the rows of 'weight', "
                f"{weight.shape[0]}."
            )
        weight = weight[:org_vocab_size]
        bias = None if bias is None else bias[:org_vocab_size]
    scores = F.linear(x, weight, bias)
    h = widened(scores)
    if soft_cap is not None:
        h = torch.tanh(h / soft_cap) * soft_cap
    return (h * scale).to(x.dtype)


def _matrix(rows: int, columns: int, options: dict[str, Any]) -> Tensor:
    return torch.randn((rows, columns), **options) / math.sqrt(max(columns, 1))


@linear.register_input_generator
def _linear_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, **options)
    yield x, _matrix(24, shape[-1], options), torch.randn(24, **options)
    yield x, _matrix(7, shape[-1], options)


@vocab_parallel_embedding.register_input_generator
def _embedding_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    ids = torch.randint(0, 40, shape[:-1], device=device)
    yield ids, torch.randn((40, shape[-1]), dtype=dtype, device=device)
    part = torch.randn((16, shape[-1]), dtype=dtype, device=device)
    yield ids, part, 8
    yield ids.to(torch.int32), part, 24, 37, 40  # with rows of padding


@logits.register_input_generator
def _logits_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, **options)
    weight = _matrix(40, shape[-1], options)
    yield x, weight
    yield x, weight, torch.randn(40, **options), 0.0625, 2.0, 37
    yield x * 20, weight, None, 1.0, 30.0


for _op in (linear, logits):
    _op.override_tolerance(torch.float32, atol=5e-5, rtol=1e-5)  # long sums, added up in any order
