"""Meanings of the causal convolutions in front of state-space models, whole sequences and single steps.

A batch of sequences is given in one of two forms, here as in `state_space.py`: packed, `x [tokens, ...]` with
`query_start_loc [sequences + 1]`, where sequence `s` is the tokens from `query_start_loc[s]` up to `query_start_loc[s +
1]`; or padded, `x [batch, length, ...]` without `query_start_loc`. Does not hold kernels.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.blocked_segments import (
    check_initial,
    check_start_values,
    check_starts,
    chosen_initial,
    segments_of,
    with_zero_row,
)
from irframework.ops.layernorm import check_floating, widened
from irframework.ops.packed_sequences import cut
from irframework.ops.state_slots import check_slot_numbers, check_slots, some_slots, taken_slots, with_slots
from irframework.symbolic import same_sizes

_ACTIVATIONS = ("none", "silu")


def _check_weights(op: str, x: Tensor, dim: int, weight: Tensor, bias: Tensor | None, activation: str) -> None:
    check_floating(op, "x", x)
    check_floating(op, "weight", weight)
    if activation not in _ACTIVATIONS:
        raise ArgumentError(f"Op {op!r}: activation must be 'none' or 'silu', got {activation!r}.")
    if weight.dim() != 2 or not same_sizes(weight.shape[:1], (dim,)) or weight.shape[1] < 1:
        raise ArgumentError(
            f"Op {op!r}: argument 'weight' must be [dim, width] with dim={dim}, it has shape {tuple(weight.shape)}."
        )
    if bias is not None:
        check_floating(op, "bias", bias)
        if not same_sizes(bias.shape, (dim,)):
            raise ArgumentError(
                f"Op {op!r}: argument 'bias' must be [dim] with dim={dim}, it has shape {tuple(bias.shape)}."
            )


def _check_state_dtype(op: str, name: str, state: Tensor | None, x: Tensor) -> None:
    if state is not None and state.dtype != x.dtype:
        raise ArgumentError(f"Op {op!r}: argument {name!r} has dtype {state.dtype}, 'x' has {x.dtype}; both need one.")


def _weighted(taps: list[Tensor], weight: Tensor, bias: Tensor | None, activation: str, wide: torch.dtype) -> Tensor:
    """Add up the taps, oldest first, in a wide dtype."""
    total = taps[0].to(wide) * weight[:, 0].to(wide)
    for place, tap in enumerate(taps[1:], 1):
        total = total + tap.to(wide) * weight[:, place].to(wide)
    if bias is not None:
        total = total + bias.to(wide)
    return F.silu(total) if activation == "silu" else total


def _convolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    query_start_loc: Tensor | None,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the convolution in a wide dtype, zero for tokens of no sequence, and the last inputs of each sequence."""
    past = weight.shape[1] - 1
    wide = torch.promote_types(x.dtype, torch.float32)
    if query_start_loc is None:
        left = x.new_zeros((x.shape[0], past, x.shape[2])) if initial is None else initial.transpose(1, 2)
        rows, length = torch.cat((left, x), 1), x.shape[1]
        taps = [rows.narrow(1, place, length) for place in range(past + 1)]
        return _weighted(taps, weight, bias, activation, wide), rows.narrow(1, length, past).transpose(1, 2)
    tokens, sequences = x.shape[0], query_start_loc.shape[0] - 1
    starts = query_start_loc.to(torch.int64).clamp(0, tokens)
    states = x.new_zeros((sequences, x.shape[1], past)) if initial is None else initial
    rows = with_zero_row(torch.cat((x, states.transpose(1, 2).flatten(0, 1))))  # tokens, what was before them, nothing

    def input_at(sequence: Tensor, position: Tensor) -> Tensor:
        """Which row holds a sequence's input; positions before its first token are in its state."""
        before = tokens + sequence * past + (past + position)
        return torch.where(position >= 0, starts[sequence] + position, before)

    sequence, inside = segments_of(starts, tokens)
    position = torch.arange(tokens, device=x.device) - starts[sequence]
    behind = rows.shape[0] - 1
    taps = [
        rows[torch.where(inside, input_at(sequence, position - shift), behind).clamp(0, behind)]
        for shift in range(past, -1, -1)
    ]
    y = torch.where(inside.unsqueeze(1), _weighted(taps, weight, bias, activation, wide), 0.0)
    each = torch.arange(sequences, device=x.device).unsqueeze(1)
    last = starts.diff().unsqueeze(1) - past + torch.arange(past, device=x.device)
    return y, rows[input_at(each, last).clamp(0, behind)].transpose(1, 2)


def _check_sequences(
    op: str,
    x: Tensor,
    dim: int,
    weight: Tensor,
    query_start_loc: Tensor | None,
    initial_states: Tensor | None,
    has_initial_state: Tensor | None,
) -> None:
    check_starts(op, x, query_start_loc, 1)
    sequences = x.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1
    check_initial(op, initial_states, has_initial_state, (sequences, dim, weight.shape[1] - 1))
    _check_state_dtype(op, "initial_states", initial_states, x)


@register_op
def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    initial_states: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    activation: str = "none",
) -> tuple[Tensor, Tensor]:
    """Convolve each channel of each sequence with a filter that sees the present and the past.

    `y[t, d] = activation(bias[d] + sum over k of weight[d, k] * x[t - (width - 1) + k, d])` within a sequence; inputs
    before its first token are its initial state, or zero. Computed in float32 (float64 for float64 x) and rounded once.

    Args:
        x: Packed `[tokens, dim]` or padded `[batch, length, dim]`, floating point. Packed tokens that are in no
            sequence, i.e. behind the last one, give rows of zeros.
        weight: Filters, `[dim, width]`, floating point; the last entry meets the present token.
        bias: `[dim]`, floating point, or None.
        query_start_loc: Where sequences start, and where the last one ends, `[sequences + 1]`, int32 or int64,
            ascending from 0; None for a padded batch.
        initial_states: The `width - 1` inputs before each sequence, oldest first, `[sequences, dim, width - 1]` in the
            dtype of x, or None.
        has_initial_state: `[sequences]`, bool: which initial states count; the others are zeros. None: all.
        activation: `none` or `silu`.

    Returns:
        `(y, states)`: `y` like x, and the last `width - 1` inputs of each sequence (its initial state included, where
        the sequence is shorter), `[sequences, dim, width - 1]` in the dtype of x.

    Raises:
        ArgumentError: Shapes or dtypes do not fit each other; `activation` is another word; `query_start_loc` does not
            ascend from 0 to at most the number of tokens.

    Source: Gu and Dao, "Mamba" (2023); the `conv1d` of its blocks.
    """
    op = "causal_conv1d"
    _check_weights(op, x, x.shape[-1] if x.dim() else 0, weight, bias, activation)
    _check_sequences(op, x, x.shape[-1], weight, query_start_loc, initial_states, has_initial_state)
    initial = chosen_initial(initial_states, has_initial_state)
    y, states = _convolved(x, weight, bias, activation, query_start_loc, initial)
    return y.to(x.dtype), states.contiguous()


@register_op
def short_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    initial_states: Tensor | None = None,
    has_initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gate, convolve causally, gate again: `y = c * causal_conv1d(b * v)`, where `x = [b, c, v]` on the last dimension.

    `b * v` is rounded to the dtype of x, since that is what a state keeps; the rest is computed in float32 (float64 for
    float64 x) and rounded once. A decode step is a batch of sequences of one token with their states.

    Args:
        x: The projected tokens, packed `[tokens, 3 * dim]` or padded `[batch, length, 3 * dim]`, floating point.
        weight: Filters, `[dim, width]`, floating point.
        bias: `[dim]`, floating point, or None.
        query_start_loc: As for `causal_conv1d`.
        initial_states: The products `b * v` before each sequence, `[sequences, dim, width - 1]` in the dtype of x.
        has_initial_state: As for `causal_conv1d`.

    Returns:
        `(y, states)`: `[..., dim]` in the dtype of x; and the last `width - 1` products of each sequence.

    Raises:
        ArgumentError: As `causal_conv1d`; or the last dimension of x is not three times that of the weight.

    Source: the short convolution of LFM2 (Liquid AI, 2025).
    """
    op = "short_conv"
    if x.dim() == 0 or x.shape[-1] % 3:
        raise ArgumentError(
            f"Op {op!r}: the last dimension of argument 'x' holds b, c and v side by side and must be a multiple of 3, "
            f"x has shape {tuple(x.shape)}."
        )
    dim = x.shape[-1] // 3
    _check_weights(op, x, dim, weight, bias, "none")
    _check_sequences(op, x, dim, weight, query_start_loc, initial_states, has_initial_state)
    b, c, v = x.split(dim, -1)
    initial = chosen_initial(initial_states, has_initial_state)
    y, states = _convolved(b * v, weight, bias, "none", query_start_loc, initial)
    return (widened(c) * y).to(x.dtype), states.contiguous()


@register_op(activations=("x", "conv_state"), allow_inplace=True)
def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    conv_state_indices: Tensor | None = None,
    activation: str = "none",
) -> tuple[Tensor, Tensor]:
    """Convolve one token of each sequence, and move it into the sequence's state.

    The new state of a sequence is the old one without its oldest input, and x behind it; with `w = width` and `s =
    [state, x]`: `y[d] = activation(bias[d] + sum over k of weight[d, k] * s[d, len(s) - w + k])`. Computed in float32
    (float64 for float64 x) and rounded once. The functional form copies all states; `maybe_inplace` need not.

    Args:
        x: One token of each sequence, `[batch, dim]`, floating point. Given away by `maybe_inplace`.
        conv_state: The inputs before, oldest first, `[slots, dim, length]` with a length of at least `width - 1`, in
            the dtype of x. Given away by `maybe_inplace`.
        weight: Filters, `[dim, width]`, floating point; the last entry meets the present token.
        bias: `[dim]`, floating point, or None.
        conv_state_indices: The slot of each sequence, `[batch]`, int32 or int64, each slot at most once; -1 for rows
            that only fill up a batch: they give zeros and touch no state. None: row `i` has slot `i`.
        activation: `none` or `silu`.

    Returns:
        `(y, state)`: `[batch, dim]`, and all states, `[slots, dim, length]`, both in the dtype of x.

    Raises:
        ArgumentError: Shapes or dtypes do not fit each other; `activation` is another word; a slot does not exist or is
            named twice.

    Source: Gu and Dao, "Mamba" (2023).
    """
    op = "causal_conv1d_update"
    if x.dim() != 2:
        raise ArgumentError(f"Op {op!r}: argument 'x' must be [batch, dim], it has shape {tuple(x.shape)}.")
    _check_weights(op, x, x.shape[1], weight, bias, activation)
    _check_state_dtype(op, "conv_state", conv_state, x)
    width = weight.shape[1]
    fits = conv_state.dim() == 3 and same_sizes(conv_state.shape[1:2], x.shape[1:]) and conv_state.shape[2] >= width - 1
    if not fits:
        raise ArgumentError(
            f"Op {op!r}: argument 'conv_state' must be [slots, dim, length] with dim={x.shape[1]} and a length of at "
            f"least width - 1 = {width - 1}, it has shape {tuple(conv_state.shape)}."
        )
    check_slots(op, x, "conv_state", conv_state, "conv_state_indices", conv_state_indices)
    seen = torch.cat((taken_slots(conv_state, conv_state_indices), x.unsqueeze(-1)), -1)
    taps = list(seen[..., seen.shape[-1] - width :].unbind(-1))
    y = _weighted(taps, weight, bias, activation, torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
    if conv_state_indices is not None:
        y = torch.where(conv_state_indices.unsqueeze(-1) >= 0, y, 0.0)
    return y, with_slots(conv_state, conv_state_indices, seen[..., 1:])


@causal_conv1d.register_value_check
def _check_conv_values(x: Tensor, query_start_loc: Tensor | None) -> None:
    check_start_values("causal_conv1d", x, query_start_loc, 1)


@short_conv.register_value_check
def _check_short_conv_values(x: Tensor, query_start_loc: Tensor | None) -> None:
    check_start_values("short_conv", x, query_start_loc, 1)


@causal_conv1d_update.register_value_check
def _check_update_values(conv_state: Tensor, conv_state_indices: Tensor | None) -> None:
    check_slot_numbers("causal_conv1d_update", "conv_state_indices", conv_state_indices, conv_state)


@causal_conv1d.register_input_generator
def _causal_conv1d_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of x: a packed batch of up to three sequences for two dimensions, a padded one for three."""
    x, dim = torch.randn(shape, **options), shape[-1]
    weight, bias = torch.randn(dim, 4, **options) / 2, torch.randn(dim, **options)
    starts = cut(shape[0], options["device"])[0] if len(shape) == 2 else None
    sequences = shape[0] if starts is None else starts.shape[0] - 1
    states = torch.randn(sequences, dim, 3, **options)
    yield x, weight, bias, starts, None, None, "silu"
    yield x, weight, None, starts, states
    yield x, weight, bias, starts, states, torch.arange(sequences, device=options["device"]) % 2 == 1, "silu"
    yield x, weight[:, :1], bias, starts
    if starts is not None and starts.shape[0] > 1:  # tokens behind the last sequence, and a sequence without tokens
        yield x, weight, bias, torch.cat((starts[:-1], starts[-2:-1])), states


@short_conv.register_input_generator
def _short_conv_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of x, its last dimension rounded down to a multiple of 3."""
    dim = shape[-1] // 3
    for _, weight, bias, starts, *states in _causal_conv1d_inputs((*shape[:-1], dim), **options):
        yield torch.randn(*shape[:-1], 3 * dim, **options), weight, bias, starts, *states[:2]


@causal_conv1d_update.register_input_generator
def _update_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    batch, dim = shape[0], shape[-1]
    x, weight, bias = (torch.randn(size, **options) for size in (shape, (dim, 4), (dim,)))
    states, slots = torch.randn(batch + 3, dim, 3, **options), some_slots(batch, options["device"])
    yield x, states, weight, bias, slots, "silu"
    yield x, states[:batch], weight
    yield x, torch.randn(batch, dim, 5, **options), weight, bias
    yield x, states, weight, bias, torch.where(slots % 2 == 0, slots, -1)
    yield x, states.contiguous(), weight[:, :2], None, slots.long(), "silu"
