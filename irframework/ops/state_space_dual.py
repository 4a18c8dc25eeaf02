"""Meaning of Mamba-2's scan over sequences. Does not hold kernels."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.blocked_segments import (
    carry_states,
    check_initial,
    check_start_values,
    check_starts,
    chosen_initial,
    starts_of,
    whole_blocks_of,
)
from irframework.ops.packed_sequences import cut, heads_of
from irframework.ops.state_space import (
    check_shapes,
    finished,
    groups_of,
    in_sequences,
    last_size,
    multi_head,
    scan_outputs,
    some_rates,
    time_steps,
)

_LARGEST_CHUNK = 64  # the products within a chunk cost its length per token


def _check_chunk_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    query_start_loc: Tensor | None,
    initial_states: Tensor | None,
    has_initial_state: Tensor | None,
) -> tuple[Any, ...]:
    """Raise unless a scan's arguments fit each other; return the shape of the states."""
    op = "mamba2_chunk_scan"
    check_starts(op, x, query_start_loc, 2)
    if chunk_size < 1:
        raise ArgumentError(f"Op {op!r}: chunk_size={chunk_size} must be at least 1.")
    (heads, headdim), state = x.shape[-2:], last_size(op, "b", b, x.dim())
    groups_of(op, b, heads)
    check_shapes(op, x, multi_head(x, dt, a, b, c, d, z, dt_bias))
    shape = (x.shape[0] if query_start_loc is None else query_start_loc.shape[0] - 1, heads, headdim, state)
    check_initial(op, initial_states, has_initial_state, shape)
    return shape


@register_op
def mamba2_chunk_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    query_start_loc: Tensor | None = None,
    initial_states: Tensor | None = None,
    has_initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the state space of Mamba-2 over sequences: one decay per head, and a state of `headdim x state`.

    With `s = softplus(dt + dt_bias)` (or without softplus), for head `i` of group `g`: `h[t, i] = exp(s[t, i] * a[i]) *
    h[t - 1, i] + s[t, i] * outer(x[t, i], b[t, g])`, and `y[t, i] = (h[t, i] @ c[t, g] + d[i] * x[t, i]) * silu(z[t,
    i])`. Computed in float32 (float64 for float64 x) and rounded once. Limits on `s` are the caller's: clamp before,
    and call without bias and softplus.

    Native computes chunks of at most 64 tokens as masked matrix products (the state space dual), carries the states
    between chunks in a logarithmic number of steps, and adds what they contribute.

    Args:
        x: Packed `[tokens, heads, headdim]` or padded `[batch, length, heads, headdim]`, floating point. Packed tokens
            behind the last sequence give zeros.
        dt: Time steps, `[..., heads]` with the leading dimensions of x.
        a: `[heads]`; negative in models.
        b: `[..., groups, state]` with the leading dimensions of x; the groups divide the heads.
        c: Like b.
        chunk_size: How many tokens an implementation may take at once. It does not change the result.
        d: `[heads]`, or None.
        z: Gate, like x, or None.
        dt_bias: `[heads]`, or None.
        dt_softplus: Pass the time steps through softplus.
        query_start_loc: As for `causal_conv1d`.
        initial_states: `[sequences, heads, headdim, state]`, or None for zeros.
        has_initial_state: `[sequences]`, bool: which initial states count; the others are zeros. None: all.

    Returns:
        `(y, states)`: `y` like x; and the state behind each sequence, `[sequences, heads, headdim, state]` in the dtype
        of the initial states, without them in float32 (float64 for float64 x).

    Raises:
        ArgumentError: Shapes or dtypes do not fit each other; `chunk_size` is less than 1; `query_start_loc` does not
            ascend from 0 to at most the number of tokens.

    Source: Dao and Gu, "Transformers are SSMs" (2024), section 6.
    """
    _check_chunk_scan(x, dt, a, b, c, chunk_size, d, z, dt_bias, query_start_loc, initial_states, has_initial_state)
    (heads, headdim), (groups, state) = x.shape[-2:], b.shape[-2:]
    starts = starts_of(x, query_start_loc)
    wide = torch.promote_types(x.dtype, torch.float32)
    steps = time_steps(dt, dt_bias, dt_softplus, wide).reshape(-1, heads)
    blocks = whole_blocks_of(starts, steps.shape[0], min(chunk_size, _LARGEST_CHUNK))
    by_group = (groups, heads // groups)
    rates = blocks.lay(steps * a.to(wide)).transpose(1, 2).unflatten(1, by_group)  # [blocks, groups, heads, size]
    inputs = blocks.lay(x.to(wide).reshape(-1, heads, headdim) * steps.unsqueeze(-1))
    inputs = inputs.transpose(1, 2).unflatten(1, by_group)  # [blocks, groups, heads, size, headdim]
    keys, queries = (blocks.lay(t.to(wide).reshape(-1, groups, state)).transpose(1, 2) for t in (b, c))
    decays = _decays_within(rates)
    y = ((queries @ keys.transpose(2, 3)).unsqueeze(2) * decays) @ inputs
    added = (inputs * decays[..., -1, :].unsqueeze(-1)).transpose(3, 4) @ keys.unsqueeze(2)
    initial = chosen_initial(initial_states, has_initial_state)
    before, final = carry_states(
        blocks,
        torch.exp(rates.sum(-1)).flatten(1, 2)[..., None, None],
        added.flatten(1, 2),
        None if initial is None else initial.to(wide),
    )
    carried = queries.unsqueeze(2) @ before.unflatten(1, by_group).transpose(3, 4)
    y = y + carried * torch.exp(rates.cumsum(-1)).unsqueeze(-1)
    y = blocks.collect(y.flatten(1, 2).transpose(1, 2)).reshape(x.shape)
    y = finished(y, x, None if d is None else d.unsqueeze(-1), z)
    return in_sequences(y, blocks, query_start_loc), final.to(wide if initial_states is None else initial_states.dtype)


@mamba2_chunk_scan.register_fake
def _chunk_scan_shape(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    chunk_size: int,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    query_start_loc: Tensor | None = None,
    initial_states: Tensor | None = None,
    has_initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    shape = _check_chunk_scan(
        x, dt, a, b, c, chunk_size, d, z, dt_bias, query_start_loc, initial_states, has_initial_state
    )
    return scan_outputs(x, initial_states, shape)


def _decays_within(rates: Tensor) -> Tensor:
    """Return `exp(rates[j + 1] + ... + rates[i])` for all `i >= j` of the last dimension, and 0 for `i < j`.

    The sums are added up anew for each `j`: differences of one running sum cancel where rates are large.
    """
    size = rates.shape[-1]
    index = torch.arange(size, device=rates.device)
    later = index.unsqueeze(1) - index
    sums = torch.where(later > 0, rates.unsqueeze(-1), 0.0).cumsum(-2)
    return torch.where(later >= 0, sums.exp(), 0.0)


@mamba2_chunk_scan.register_value_check
def _check_chunk_scan_values(x: Tensor, query_start_loc: Tensor | None) -> None:
    check_start_values("mamba2_chunk_scan", x, query_start_loc, 2)


@mamba2_chunk_scan.register_input_generator
def _chunk_scan_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of x; of two dimensions, the second is cut into heads."""
    shape = heads_of(shape) if len(shape) == 2 else shape
    heads, state = shape[-2], 16
    x, z = (torch.randn(shape, **options) for _ in range(2))
    dt = torch.randn(shape[:-1], **options)
    groups = 2 if heads % 2 == 0 else 1
    b, c = (torch.randn(*shape[:-2], groups, state, **options) / 2 for _ in range(2))
    a, d, bias = some_rates(heads, **options), torch.randn(heads, **options), torch.randn(heads, **options) - 2
    starts = cut(shape[0], options["device"])[0] if len(shape) == 3 else None
    sequences = shape[0] if starts is None else starts.shape[0] - 1
    initial = torch.randn(sequences, *shape[-2:], state, dtype=a.dtype, device=options["device"])
    yield x, dt, a, b, c, 256, d, z, bias, True, starts
    yield x, dt.abs() / 8, a, b[..., :1, :], c[..., :1, :], 2, None, None, None, False, starts, initial
    has = torch.arange(sequences, device=options["device"]) % 2 == 1
    yield x, dt, a, b, c, 3, d, None, bias, True, starts, initial.to(x.dtype), has
    if starts is not None and starts.shape[0] > 1:  # tokens behind the last sequence, and a sequence without tokens
        yield x, dt, a, b, c, 64, d, z, bias, True, torch.cat((starts[:-1], starts[-2:-1])), initial
