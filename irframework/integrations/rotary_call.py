"""The rotary embedding inside Hugging Face attention: the op behind `apply_rotary_pos_emb`'s signature.

Attention forwards call the module-level function `apply_rotary_pos_emb(q, k, cos, sin)`. Patching that function would
change every model in the process, so one class's forward is copied with the call pointed at another name, which this
module adds to the modelling module. Owns that rewriting and the mapping onto `ops.rotary_embedding`.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from irframework import ops

CALLED_NAME = "apply_rotary_pos_emb"


class _Calls(threading.local):
    count = 0


_calls = _Calls()


def calls_so_far() -> int:
    """How often this thread has gone through the op's stand-in in eager mode."""
    return _calls.count


def apply_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1, *, is_neox: bool = True
) -> tuple[Tensor, Tensor]:
    """`apply_rotary_pos_emb` through `ops.rotary_embedding`.

    Args:
        q: [batch, heads, tokens, head_dim] (`unsqueeze_dim` 1) or [batch, tokens, heads, head_dim] (2).
        k: the same with the key heads.
        cos: [batch or 1, tokens, rotary_dim], both halves equal (neox) or pairs equal (interleaved).
        sin: like `cos`.
        unsqueeze_dim: where the heads' axis is.
        is_neox: halves (True) or interleaved pairs.

    Returns:
        q and k rotated, in the shapes they came in.
    """
    if not torch.compiler.is_compiling():
        _calls.count += 1
    if unsqueeze_dim == 1:
        q, k = q.transpose(1, 2), k.transpose(1, 2)
    batch, tokens, _, head_dim = q.shape
    half = cos.shape[-1] // 2
    if is_neox:
        table = torch.cat((cos[..., :half], sin[..., :half]), dim=-1)
    else:
        table = torch.cat((cos[..., ::2], sin[..., ::2]), dim=-1)
    # The table has one row per token already, so a token's position in it is its number.
    rows = table.shape[0] * tokens
    positions = torch.arange(rows, device=q.device).view(-1, tokens)
    if positions.shape[0] != batch:  # every sequence is at the same positions
        positions = positions.repeat(batch, 1)
    q, k = ops.rotary_embedding(positions, q, k, table.view(rows, -1), head_dim, is_neox)
    if unsqueeze_dim == 1:
        return q.transpose(1, 2), k.transpose(1, 2)
    return q, k


def apply_rotary_interleaved(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    """`apply_rotary` for models that rotate neighbouring pairs."""
    return apply_rotary(q, k, cos, sin, unsqueeze_dim, is_neox=False)


def original_rotary(forward: Callable[..., Any]) -> Callable[..., Any] | None:
    """The `apply_rotary_pos_emb` that `forward` calls, or None when it calls none."""
    inner = _innermost(forward)
    if inner is None:
        return None
    found: Callable[..., Any] | None = inner.__globals__.get(CALLED_NAME)
    return found


@functools.cache
def with_ir_rotary(forward: Callable[..., Any], is_neox: bool) -> Callable[..., Any]:
    """`forward` as it is, decorators included, except that its rotary call goes to the op.

    Raises:
        TypeError: `forward` does not call `apply_rotary_pos_emb`, or a decorator around it hides it.
    """
    inner = _innermost(forward)
    if inner is None:
        raise TypeError(f"forward does not call {CALLED_NAME}")
    function = apply_rotary if is_neox else apply_rotary_interleaved
    # A name of our own beside theirs, not a copy of the module's globals: later changes to the module stay visible,
    # and Dynamo finds the name where it looks for it.
    name = f"_irframework_{function.__name__}"
    setattr(sys.modules[inner.__module__], name, function)
    code = inner.__code__
    renamed = tuple(name if n == CALLED_NAME else n for n in code.co_names)
    copied = types.FunctionType(
        code.replace(co_names=renamed), inner.__globals__, inner.__name__, inner.__defaults__, inner.__closure__
    )
    copied.__kwdefaults__ = inner.__kwdefaults__
    functools.update_wrapper(copied, inner)
    del copied.__dict__["__wrapped__"]  # update_wrapper's mark; it would lead back to the original
    return _rewrapped(forward, inner, copied)


def _innermost(forward: Callable[..., Any]) -> types.FunctionType | None:
    """The plain function behind decorators, if it calls the rotary function by its global name."""
    while hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    if not isinstance(forward, types.FunctionType) or CALLED_NAME not in forward.__code__.co_names:
        return None
    if forward.__globals__ is not getattr(sys.modules.get(forward.__module__), "__dict__", None):
        return None
    return forward


def _rewrapped(outer: Any, inner: types.FunctionType, copied: types.FunctionType) -> Callable[..., Any]:
    """The decorators of `outer` around `copied`: each wrapper copied with a cell that holds the new function."""
    if outer is inner:
        return copied
    wrapped = outer.__wrapped__
    new = _rewrapped(wrapped, inner, copied)
    cells = tuple(
        types.CellType(new) if _content(cell) is wrapped else cell for cell in getattr(outer, "__closure__", None) or ()
    )
    if not any(_content(cell) is new for cell in cells):
        raise TypeError(f"the decorator {getattr(outer, '__qualname__', outer)} hides the function that it wraps")
    clone = types.FunctionType(outer.__code__, outer.__globals__, outer.__name__, outer.__defaults__, cells)
    clone.__kwdefaults__ = outer.__kwdefaults__
    functools.update_wrapper(clone, new)
    return clone


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return None
