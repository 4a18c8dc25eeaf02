"""Meanings of the selective state spaces: Mamba's scan, and the decode step of Mamba and Mamba-2.

Owns also what it shares with Mamba-2's scan, which is in `state_space_dual.py`. Batches are packed or padded, see
`causal_convolution.py`. Does not hold kernels.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.blocked_segments import (
    Blocks,
    carry_states,
    check_initial,
    check_start_values,
    check_starts,
    chosen_initial,
    starts_of,
    whole_blocks_of,
)
from irframework.ops.layernorm import check_floating
from irframework.ops.packed_sequences import cut
from irframework.ops.state_slots import check_slot_numbers, check_slots, some_slots, taken_slots, with_slots
from irframework.symbolic import same_sizes

_SCAN_BLOCK = 8  # steps written out one by one: memory for the states of one token in 8


def check_shapes(op: str, x: Tensor, wanted: dict[str, tuple[Tensor | None, tuple[Any, ...]]]) -> None:
    """Raise unless x and the others are floating point, and the others have their shapes."""
    check_floating(op, "x", x)
    for name, (tensor, shape) in wanted.items():
        if tensor is None:
            continue
        check_floating(op, name, tensor)
        if not same_sizes(tensor.shape, shape):
            raise ArgumentError(
                f"Op {op!r}: argument {name!r} has shape {tuple(tensor.shape)}; with x of shape {tuple(x.shape)} it "
                f"must be {tuple(shape)}."
            )


def last_size(op: str, name: str, tensor: Tensor, dims: int) -> Any:
    """Return the last size of a tensor that must have a number of dimensions."""
    if tensor.dim() != dims:
        raise ArgumentError(
            f"Op {op!r}: argument {name!r} must have {dims} dimensions, it has shape {tuple(tensor.shape)}."
        )
    return tensor.shape[-1]


def time_steps(dt: Tensor, dt_bias: Tensor | None, dt_softplus: bool, wide: torch.dtype) -> Tensor:
    """Return the time steps with their bias, through softplus where asked for, in a wide dtype."""
    dt = dt.to(wide)
    if dt_bias is not None:
        dt = dt + dt_bias.to(wide)
    return F.softplus(dt) if dt_softplus else dt


def finished(y: Tensor, x: Tensor, d: Tensor | None, z: Tensor | None) -> Tensor:
    """Add the skip connection, apply the gate, and round to the dtype of x."""
    if d is not None:
        y = y + x.to(y.dtype) * d.to(y.dtype)
    if z is not None:
        y = y * F.silu(z.to(y.dtype))
    return y.to(x.dtype)


def in_sequences(y: Tensor, blocks: Blocks, query_start_loc: Tensor | None) -> Tensor:
    """Give zeros to packed tokens that are in no sequence."""
    return y if query_start_loc is None else torch.where(blocks.inside.reshape(-1, *(1,) * (y.dim() - 1)), y, 0.0)


def _check_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    query_start_loc: Tensor | None,
    initial_states: Tensor | None,
    has_initial_state: Tensor | None,
) -> tuple[Any, ...]:
    """Raise unless a scan's arguments fit each other; return the shape of the states."""
    op = "selective_scan"
    check_starts(op, x, query_start_loc, 1)
    dim, state = x.shape[-1], last_size(op, "a", a, 2)
    per_token: tuple[Any, ...] = (*x.shape[:-1], state)
    wanted = {"dt": (dt, x.shape), "a": (a, (dim, state)), "b": (b, per_token), "c": (c, per_token), "d": (d, (dim,))}
    check_shapes(op, x, {**wanted, "z": (z, x.shape), "dt_bias": (dt_bias, (dim,))})
    shape = (x.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1, dim, state)
    check_initial(op, initial_states, has_initial_state, shape)
    return shape


@register_op
def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    query_start_loc: Tensor | None = None,
    initial_states: Tensor | None = None,
    has_initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the selective state space of Mamba over sequences.

    With `s = softplus(dt + dt_bias)` (or without softplus), for channel `i` and state element `n`: `h[t, i, n] =
    exp(s[t, i] * a[i, n]) * h[t - 1, i, n] + s[t, i] * b[t, n] * x[t, i]`, and `y[t, i] = (sum over n of c[t, n] *
    h[t, i, n] + d[i] * x[t, i]) * silu(z[t, i])`. Computed in float32 (float64 for float64 x) and rounded once.

    Native writes 8 steps out for all blocks of 8 tokens at once, carries the states between blocks in a logarithmic
    number of steps, and takes the 8 steps again with the states known: twice the work of a loop, and memory for the
    states of one token in 8. All factors are products of the model's own decays, so nothing is divided or overflows.

    Args:
        x: Packed `[tokens, dim]` or padded `[batch, length, dim]`, floating point. Packed tokens behind the last
            sequence give zeros.
        dt: Time steps, like x.
        a: `[dim, state]`; negative in models.
        b: `[tokens, state]` or `[batch, length, state]`.
        c: Like b.
        d: `[dim]`, or None.
        z: Gate, like x, or None.
        dt_bias: `[dim]`, or None.
        dt_softplus: Pass the time steps through softplus.
        query_start_loc: As for `causal_conv1d`.
        initial_states: `[sequences, dim, state]`, or None for zeros.
        has_initial_state: `[sequences]`, bool: which initial states count; the others are zeros. None: all.

    Returns:
        `(y, states)`: `y` like x; and the state behind each sequence, `[sequences, dim, state]` in the dtype of the
        initial states, without them in float32 (float64 for float64 x).

    Raises:
        ArgumentError: Shapes or dtypes do not fit each other; `query_start_loc` does not ascend from 0 to at most the
            number of tokens.

    Source: Gu and Dao, "Mamba" (2023), algorithm 2.
    """
    _check_scan(x, dt, a, b, c, d, z, dt_bias, query_start_loc, initial_states, has_initial_state)
    (dim, state), starts = a.shape, starts_of(x, query_start_loc)
    wide = torch.promote_types(x.dtype, torch.float32)
    steps = time_steps(dt, dt_bias, dt_softplus, wide).reshape(-1, dim)
    blocks = whole_blocks_of(starts, steps.shape[0], _SCAN_BLOCK)
    laid, matrix = blocks.lay(steps), a.to(wide)
    inputs = blocks.lay(steps * x.to(wide).reshape(-1, dim))
    rates, added = laid.unsqueeze(-1).unbind(1), inputs.unsqueeze(-1).unbind(1)  # of each step, [blocks, dim, 1]
    keys, queries = (blocks.lay(t.to(wide).reshape(-1, 1, state)).unbind(1) for t in (b, c))  # [blocks, 1, state]
    h = added[0] * keys[0]
    for place in range(1, _SCAN_BLOCK):
        h = torch.exp(rates[place] * matrix) * h + added[place] * keys[place]
    initial = chosen_initial(initial_states, has_initial_state)
    whole = torch.exp(laid.sum(1).unsqueeze(-1) * matrix)
    h, final = carry_states(blocks, whole, h, None if initial is None else initial.to(wide))
    outputs = []
    for place in range(_SCAN_BLOCK):
        h = torch.exp(rates[place] * matrix) * h + added[place] * keys[place]
        outputs.append((h * queries[place]).sum(-1))
    y = blocks.collect(torch.stack(outputs, 1))
    y = finished(y.reshape(x.shape), x, d, z)
    return in_sequences(y, blocks, query_start_loc), final.to(wide if initial_states is None else initial_states.dtype)


@selective_scan.register_fake
def _scan_shape(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    query_start_loc: Tensor | None = None,
    initial_states: Tensor | None = None,
    has_initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    shape = _check_scan(x, dt, a, b, c, d, z, dt_bias, query_start_loc, initial_states, has_initial_state)
    return scan_outputs(x, initial_states, shape)


def scan_outputs(x: Tensor, initial_states: Tensor | None, shape: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Return what a scan returns, without values."""
    dtype = torch.promote_types(x.dtype, torch.float32) if initial_states is None else initial_states.dtype
    return x.new_empty(x.shape), x.new_empty(shape, dtype=dtype)


def groups_of(op: str, b: Tensor, heads: Any) -> Any:
    """Return the number of groups of b, which must divide the heads."""
    groups = b.shape[-2]
    if groups < 1 or heads % groups:
        raise ArgumentError(f"Op {op!r}: the {groups} groups of argument 'b' must divide the {heads} heads of 'x'.")
    return groups


def multi_head(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, z: Tensor | None, dt_bias: Tensor | None
) -> dict[str, tuple[Tensor | None, tuple[Any, ...]]]:
    """Return the arguments that Mamba-2's ops share, with the shapes they must have."""
    heads = x.shape[-2]
    per_token = (*x.shape[:-2], *b.shape[-2:])
    wanted: dict[str, tuple[Tensor | None, tuple[Any, ...]]] = {"dt": (dt, x.shape[:-1]), "a": (a, (heads,))}
    wanted |= {"b": (b, per_token), "c": (c, per_token), "d": (d, (heads,)), "z": (z, x.shape)}
    return {**wanted, "dt_bias": (dt_bias, (heads,))}


@register_op(activations=("x", "state"), allow_inplace=True)
def selective_state_update(
    x: Tensor,
    state: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Take one step of `selective_scan`, or of `mamba2_chunk_scan`, for each sequence of a batch.

    The formulas are those of the two ops with one token per sequence: Mamba's for x of two dimensions, Mamba-2's for
    three. Computed in float32 (float64 for float64 x) and rounded once; the output is computed from the state before
    that is rounded. The functional form copies all states; `maybe_inplace` need not.

    Args:
        x: One token of each sequence, `[batch, dim]` or `[batch, heads, headdim]`, floating point. Given away by
            `maybe_inplace`.
        state: `[slots, dim, state]` or `[slots, heads, headdim, state]`, floating point. Given away by
            `maybe_inplace`.
        dt: Time steps, `[batch, dim]` or `[batch, heads]`.
        a: `[dim, state]` or `[heads]`.
        b: `[batch, state]` or `[batch, groups, state]`; the groups divide the heads.
        c: Like b.
        d: `[dim]` or `[heads]`, or None.
        z: Gate, like x, or None.
        dt_bias: `[dim]` or `[heads]`, or None.
        dt_softplus: Pass the time steps through softplus.
        state_indices: The slot of each sequence, `[batch]`, int32 or int64, each slot at most once; -1 for rows that
            only fill up a batch: they give zeros and touch no state. None: row `i` has slot `i`.

    Returns:
        `(y, state)`: `y` like x, and all states, in their shape and dtype.

    Raises:
        ArgumentError: Shapes or dtypes do not fit each other; a slot does not exist or is named twice.

    Source: Gu and Dao, "Mamba" (2023); Dao and Gu, "Transformers are SSMs" (2024).
    """
    op = "selective_state_update"
    if x.dim() not in (2, 3):
        raise ArgumentError(
            f"Op {op!r}: argument 'x' must be [batch, dim] or [batch, heads, headdim], it has shape {tuple(x.shape)}."
        )
    size = last_size(op, "state", state, x.dim() + 1)
    wanted: dict[str, tuple[Tensor | None, tuple[Any, ...]]]
    if x.dim() == 2:
        batch, dim = x.shape
        wanted = {"dt": (dt, x.shape), "a": (a, (dim, size)), "b": (b, (batch, size)), "c": (c, (batch, size))}
        wanted |= {"d": (d, (dim,)), "z": (z, x.shape), "dt_bias": (dt_bias, (dim,))}
    else:
        last_size(op, "b", b, 3)
        wanted = multi_head(x, dt, a, b, c, d, z, dt_bias)
        wanted["b"] = (b, (x.shape[0], groups_of(op, b, x.shape[1]), size))
    wanted["state"] = (state, (state.shape[0], *x.shape[1:], size))
    check_shapes(op, x, wanted)
    check_slots(op, x, "state", state, "state_indices", state_indices)
    wide = torch.promote_types(x.dtype, torch.float32)
    h = taken_slots(state, state_indices).to(wide)
    steps, inputs = time_steps(dt, dt_bias, dt_softplus, wide), x.to(wide)
    keys, queries = b.to(wide).unsqueeze(-2), c.to(wide).unsqueeze(-2)
    if x.dim() == 2:
        decay, inputs = torch.exp(steps.unsqueeze(-1) * a.to(wide)), inputs * steps
    else:
        decay, inputs = torch.exp(steps * a.to(wide))[..., None, None], inputs * steps.unsqueeze(-1)
        each = x.shape[1] // b.shape[1]
        keys, queries = (t.unsqueeze(2).expand(-1, -1, each, -1, -1).flatten(1, 2) for t in (keys, queries))
    h = h * decay + inputs.unsqueeze(-1) * keys
    y = (h * queries).sum(-1)
    y = finished(y, x, d.unsqueeze(-1) if d is not None and x.dim() == 3 else d, z)
    if state_indices is not None:
        y = torch.where((state_indices >= 0).reshape(-1, *(1,) * (x.dim() - 1)), y, 0.0)
    return y, with_slots(state, state_indices, h)


@selective_scan.register_value_check
def _check_scan_values(x: Tensor, query_start_loc: Tensor | None) -> None:
    check_start_values("selective_scan", x, query_start_loc, 1)


@selective_state_update.register_value_check
def _check_step_values(state: Tensor, state_indices: Tensor | None) -> None:
    check_slot_numbers("selective_state_update", "state_indices", state_indices, state)


def some_rates(*shape: int, **options: Any) -> Tensor:
    """Negative rates as models have them, in float32 (float64 for float64)."""
    wide = torch.promote_types(options["dtype"], torch.float32)
    return -torch.rand(shape, dtype=wide, device=options["device"]) * 4 - 0.1


@selective_scan.register_input_generator
def _selective_scan_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of x: a packed batch of up to three sequences for two dimensions, a padded one for three."""
    dim, state = shape[-1], 16
    x, dt, z = (torch.randn(shape, **options) for _ in range(3))
    b, c = (torch.randn(*shape[:-1], state, **options) for _ in range(2))
    a, d, bias = some_rates(dim, state, **options), torch.randn(dim, **options), torch.randn(dim, **options) - 2
    starts = cut(shape[0], options["device"])[0] if len(shape) == 2 else None
    sequences = shape[0] if starts is None else starts.shape[0] - 1
    initial = torch.randn(sequences, dim, state, dtype=a.dtype, device=options["device"])
    yield x, dt, a, b, c, d, z, bias, True, starts
    yield x, dt.abs() / 8, a, b, c, None, None, None, False, starts, initial
    has = torch.arange(sequences, device=options["device"]) % 2 == 1
    yield x, dt, a[:, :1], b[..., :1], c[..., :1], d, None, bias, True, starts, initial[..., :1].to(x.dtype), has
    if starts is not None and starts.shape[0] > 1:  # tokens behind the last sequence, and a sequence without tokens
        yield x, dt, a, b, c, d, z, bias, True, torch.cat((starts[:-1], starts[-2:-1])), initial


@selective_state_update.register_input_generator
def _step_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of x: of two dimensions for Mamba, of three for Mamba-2."""
    batch, heads, size = shape[0], shape[1], 16
    x, z, dt = torch.randn(shape, **options), torch.randn(shape, **options), torch.randn(shape[:2], **options)
    groups = () if len(shape) == 2 else (2 if heads % 2 == 0 else 1,)
    b, c = (torch.randn(batch, *groups, size, **options) for _ in range(2))
    a = some_rates(heads, size, **options) if len(shape) == 2 else some_rates(heads, **options)
    d, bias = torch.randn(heads, **options), torch.randn(heads, **options) - 2
    states = torch.randn(batch + 3, *shape[1:], size, dtype=a.dtype, device=options["device"])
    slots = some_slots(batch, options["device"])
    yield x, states, dt, a, b, c, d, z, bias, True, slots
    yield x, states[:batch], dt.abs() / 8, a, b, c
    yield x, states.to(x.dtype), dt, a, b, c, d, None, bias, True, torch.where(slots % 2 == 0, slots, -1)
    yield x, states, dt, a, b, c, None, z, None, True, slots.long()
