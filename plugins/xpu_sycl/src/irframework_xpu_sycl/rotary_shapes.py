"""Owns how the shapes of a rotary embedding must fit each other. Does not look at how many tokens there are."""

from torch import Tensor


def misfit(positions: Tensor, query: Tensor, key: Tensor | None, cos_sin_cache: Tensor, head_size: int) -> str | None:
    """Return what does not fit in a call of `irframework.ops.rotary_embedding`, or None."""
    rotary_dim = cos_sin_cache.shape[-1]
    if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
        return f"rotates {rotary_dim} elements of a head of {head_size}, needs an even number of at most that"
    for name, x in (("query", query), ("key", key)):
        if x is None:
            continue
        apart = x.dim() == positions.dim() + 2
        if not apart and x.dim() != positions.dim() + 1:
            return f"{name} has {x.dim()} dimensions, does not fit positions with {positions.dim()}"
        if x.shape[-1] != head_size if apart else x.shape[-1] % head_size:
            return f"{name} has a last dimension of {x.shape[-1]}, does not fit head_size={head_size}"
    return None


def heads_of(x: Tensor, positions: Tensor, head_size: int) -> int:
    """Return how many heads a query or key that fits has."""
    heads: int = x.shape[-2] if x.dim() == positions.dim() + 2 else x.shape[-1] // head_size
    return heads
