"""Launches of the rotary embedding with whole cosines and sines, and its torch op."""

from typing import Any

from torch import Tensor

from irframework_triton_kernels.kernels.rotate_half import rotate_half_kernel
from irframework_triton_kernels.launch.call import launch, new_like, static, tiles_of, torch_op
from irframework_triton_kernels.tiles import Tile, heads_tile


@torch_op()
def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor, tile: Tile | None = None) -> Tensor:
    """Rotate heads into a new tensor.

    Args:
        x: `[batch, tokens, heads, head_size]`, stride 1 in the last dimension.
        cos: `[batch, tokens, head_size]` or `[1, tokens, head_size]`, stride 1 in the last dimension.
        sin: Like cos.
        tile: Another tile than the usual one.
    """
    y = new_like(x)
    batch, tokens, heads, size = x.shape
    if static(heads) == 0 or static(size) == 0:
        return y
    half = size // 2
    tile = tile or heads_tile(half, heads)
    numbers = (
        heads, half, x.stride(0), x.stride(1), x.stride(2), *_strides(cos), *_strides(sin), tile.rows, tile.block,
    )  # fmt: skip
    launch(rotate_half_kernel, batch * tokens * tiles_of(heads, tile.rows), (x, cos, sin, y), tokens, numbers, tile)
    return y


def _strides(angles: Tensor) -> tuple[Any, Any]:
    """Of batch and token; the first is 0 where all sequences have the same angles."""
    return 0 if static(angles.shape[0]) == 1 else angles.stride(0), angles.stride(1)
