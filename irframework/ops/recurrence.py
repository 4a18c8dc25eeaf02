"""A linear recurrence along the first dimension, which compiled graphs keep whole.

Owns how states are carried over any number of places in a logarithmic number of rounds, and its derivative, which is
such a recurrence again. It is one torch operator, `irframework_native::recurrence`: written out in a graph, the rounds
are copies of the same few lines, 27 of them where the number of places is symbolic, and compiling those took minutes.
Everything around it is written out and fused as usual. Does not hold ops of the IR.
"""

from typing import Any

import torch
from torch import Tensor

from irframework.ops.whole_operators import seen_through


def recurrence(decay: Tensor, added: Tensor, start: Tensor) -> Tensor:
    """Return h with `h[k] = added[k] + decay[k] * h[k - 1]`, and `h[k] = added[k]` where a new run starts.

    Only products of decays occur, no quotients, and nothing (NaN included) passes a start.

    Args:
        decay: `[places, ...]`, broadcast against `added`.
        added: `[places, ...]`.
        start: `[places]`, bool; true for the first place.
    """
    if seen_through():
        return _in_rounds(decay, added, _broad(start, added))
    whole: Tensor = _whole(decay, added, start)
    return whole


def _broad(start: Tensor, added: Tensor) -> Tensor:
    return start.reshape(-1, *(1,) * (added.dim() - 1))


def _in_rounds(decay: Tensor, added: Tensor, start: Tensor) -> Tensor:
    """Join neighbours, solve for every second place, and fill in the others from those: linear work."""
    count = added.shape[0]
    if count < 2:
        return added.clone()
    half = count // 2
    left, right = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    joined = torch.where(start[right], added[right], torch.addcmul(added[right], decay[right], added[left]))
    odd = _in_rounds(decay[left] * decay[right], joined, start[left] | start[right])
    later = added[2::2]
    even = torch.where(start[2::2], later, torch.addcmul(later, decay[2::2], odd[: later.shape[0]]))
    even = torch.cat((added[:1], even))
    pairs = torch.stack((even[:half], odd), 1).flatten(0, 1)
    return pairs if 2 * half == count else torch.cat((pairs, even[half:]))


@torch.library.custom_op("irframework_native::recurrence", mutates_args=())
def _whole(decay: Tensor, added: Tensor, start: Tensor) -> Tensor:
    return _in_rounds(decay, added, _broad(start, added))


@_whole.register_fake
def _shape(decay: Tensor, added: Tensor, start: Tensor) -> Tensor:
    return torch.empty_like(added, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    decay, _, start = inputs
    ctx.save_for_backward(decay, start, output)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
    """From the last place to the first: what a state is worth, it is worth through the next one as well."""
    decay, start, states = ctx.saved_tensors
    ends = torch.cat((start[1:], start.new_ones(1))).flip(0)
    worth = recurrence(decay.roll(-1, 0).flip(0), gradient.flip(0), ends).flip(0)
    before = torch.where(_broad(start, states), 0.0, states.roll(1, 0))
    into_decay = worth * before
    spread = [dim for dim, size in enumerate(decay.shape) if dim and size == 1]
    return into_decay.sum(spread, keepdim=True) if spread else into_decay, worth, None


_whole.register_autograd(_backward, setup_context=_keep)
