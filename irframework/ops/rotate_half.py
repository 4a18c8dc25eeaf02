"""Meaning of the rotary embedding that transformers' models write out: whole cosines and sines, halves of heads turned.

Does not hold the embeddings that look angles up or compute in float32 (`rotary.py`, `multimodal_rotary.py`), nor
kernels.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.layernorm import check_floating
from irframework.symbolic import same_sizes


@register_op(fuse=True)
def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads by angles that are given for every element: `x * cos + rotate_half(x) * sin`.

    `rotate_half` of a head `[a, b]` is `[-b, a]`. Both products and their sum are rounded to the dtype that torch gives
    the product of x and cos, then the sum to the dtype of x: what the models do. (`apply_rotary_emb` and
    `rotary_embedding` compute in float32 and round once.)

    Args:
        x: `[batch, tokens, heads, head_size]`, floating point; head_size is even.
        cos: `[batch, tokens, head_size]` or `[1, tokens, head_size]`, floating point.
        sin: Like cos.

    Returns:
        `[batch, tokens, heads, head_size]`, the dtype of x.

    Raises:
        ArgumentError: An argument is not floating point, or shapes or the dtypes of cos and sin do not fit.

    Source: Su et al., "RoFormer" (2021); as `apply_rotary_pos_emb` of Llama, there with heads before tokens.
    """
    _check(x, cos, sin)
    return _turned(x, cos.unsqueeze(2), sin.unsqueeze(2))


@apply_rotary_pos_emb.register_spelling
def _heads_first(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As models turn queries and keys that attention is to have, `[batch, heads, tokens, head_size]`."""
    _check(x, cos, sin)
    return _turned(x.transpose(1, 2), cos.unsqueeze(1), sin.unsqueeze(1)).transpose(1, 2)


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = heads.shape[-1] // 2
    crossed = torch.cat((-heads[..., half:], heads[..., :half]), dim=-1)
    return (heads * cos + crossed * sin).to(heads.dtype)


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    op = "apply_rotary_pos_emb"
    for name, tensor in (("x", x), ("cos", cos), ("sin", sin)):
        check_floating(op, name, tensor)
    fits = x.dim() == 4 and cos.dim() == 3 and cos.dtype == sin.dtype and same_sizes(cos.shape, sin.shape)
    if fits:
        batch = cos.shape[0]
        repeated = type(batch) is int and batch == 1
        fits = repeated or same_sizes((batch,), x.shape[:1])
        fits = fits and same_sizes(cos.shape[1:], (x.shape[1], x.shape[3])) and x.shape[3] % 2 == 0
    if not fits:
        raise ArgumentError(
            f"Op {op!r}: argument 'x' has shape {tuple(x.shape)}, 'cos' {tuple(cos.shape)} in {cos.dtype} and 'sin' "
            f"{tuple(sin.shape)} in {sin.dtype}. 'x' must be [batch, tokens, heads, head_size] with an even head_size; "
            "'cos' and 'sin' [batch, tokens, head_size] or [1, tokens, head_size], of one dtype."
        )


@apply_rotary_pos_emb.register_input_generator
def _rotate_half_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    """`shape` is that of heads side by side, for one sequence or a batch: heads of 64 where that divides, else one."""
    size = 64 if shape[-1] % 64 == 0 else shape[-1]
    batch, tokens = (1, shape[0]) if len(shape) == 2 else (shape[0], shape[1])
    x = torch.randn((batch, tokens, *shape[2:-1], shape[-1]), dtype=dtype, device=device)
    x = x.reshape(batch, tokens, -1, size) if size and tokens else x.reshape(batch, tokens, 1, size)
    angles = torch.randn(2 * batch, tokens, size, device=device)
    cos, sin = angles.cos(), angles.sin()
    yield x, cos[:1].to(dtype), sin[:1].to(dtype)
    yield x, cos[:1], sin[:1]  # as OLMo 2
    yield torch.cat((x, 2 * x)), cos.to(dtype), sin.to(dtype)  # sequences at positions of their own
