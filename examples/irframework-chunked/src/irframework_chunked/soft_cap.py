"""Declares the op `soft_cap`."""

import torch
from torch import Tensor

import irframework as ir


@ir.register_op(allow_inplace=True)
def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Squeeze scores into (-cap, cap): `cap * tanh(x / cap)`.

    Args:
        x: Scores of any shape, floating point. Given away by `maybe_inplace`.
        cap: The bound, positive.

    Returns:
        The shape and dtype of x.

    Source: attention and output scores of Gemma 2.
    """
    return torch.tanh(x / cap) * cap


@soft_cap.register_input_generator
def _random_scores(shape, dtype, device):
    return torch.randn(shape, dtype=dtype, device=device) * 50, 30.0
