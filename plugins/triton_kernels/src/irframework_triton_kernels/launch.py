"""Launches the kernels: directly for plain tensors, through `torch.ops.irframework_triton_kernels` for all others.

Owns the arguments and the grid of each launch, and the torch ops. The torch ops are `triton_op`s: whoever traces them
sees the kernels and not a black box, so Inductor plans their memory and launches them itself. A direct launch skips
torch's dispatcher, which costs as much again as Triton's own launcher.

Does not decide which calls the kernels take: `implementations` does. Importing this module imports Triton.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import triton_op, wrap_triton

from irframework_triton_kernels.kernels import (
    GELU,
    GELU_TANH,
    SILU,
    add_rms_norm_kernel,
    gated_kernel,
    rms_norm_kernel,
    rotary_kernel,
)
from irframework_triton_kernels.tiles import elementwise_tile, heads_tile, norm_tile

NAMESPACE = "irframework_triton_kernels"
ACTIVATIONS: dict[str, int] = {"silu": SILU.value, "none": GELU.value, "tanh": GELU_TANH.value}


class Launch(NamedTuple):
    """A kernel's grid (one number, or a symbolic one), arguments and warps."""

    grid: tuple[Any]
    arguments: tuple[Any, ...]
    warps: int


def is_plain(x: Tensor) -> bool:
    """Whether a tensor holds data and nobody traces it."""
    return type(x) is Tensor or type(x) is torch.nn.Parameter


def _rows(x: Tensor) -> Tensor:
    """`[rows, hidden]`; a copy only where the leading dimensions have no common stride."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def _static(length: Any) -> int | None:
    return length if isinstance(length, int) else None


def _tiles(count: Any, size: int) -> Any:
    return count if size == 1 else (count + size - 1) // size


# --- norms --------------------------------------------------------------------------------------------------------


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None, y: Tensor) -> Launch:
    x2, y2 = _rows(x), _rows(y)
    rows, hidden = x2.shape
    tile = norm_tile(_static(hidden))
    arguments = (
        x2, x2 if weight is None else weight, y2, rows, hidden, hidden if variance_size is None else variance_size,
        x2.stride(0), y2.stride(0), epsilon,
        weight is not None, variance_size is not None, tile.rows, tile.block, tile.whole,
    )  # fmt: skip
    return Launch((_tiles(rows, tile.rows),), arguments, tile.warps)


@triton_op(f"{NAMESPACE}::rms_norm", mutates_args=())
def rms_norm_op(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None) -> Tensor:
    """`irframework.ops.rms_norm` as a torch op."""
    y = x.new_empty(x.shape)
    grid, arguments, warps = _rms_norm(x, weight, epsilon, variance_size, y)
    wrap_triton(rms_norm_kernel)[grid](*arguments, num_warps=warps)
    return y


def rms_norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None) -> Tensor:
    """Norm rows, `[..., hidden]` with stride 1 in the last dimension, into a new tensor of the dtype of x."""
    if not is_plain(x):
        traced: Tensor = torch.ops.irframework_triton_kernels.rms_norm.default(x, weight, epsilon, variance_size)
        return traced
    y = x.new_empty(x.shape)
    if y.numel():
        grid, arguments, warps = _rms_norm(x, weight, epsilon, variance_size, y)
        rms_norm_kernel[grid](*arguments, num_warps=warps)
    return y


def _add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None,
    y: Tensor,
    residual: Tensor,
) -> Launch:
    x2, xr2, y2, r2 = _rows(x), _rows(x_residual), _rows(y), _rows(residual)
    rows, hidden = x2.shape
    tile = norm_tile(_static(hidden))
    arguments = (
        x2, xr2, x2 if weight is None else weight, y2, r2, rows, hidden,
        hidden if variance_size is None else variance_size,
        x2.stride(0), xr2.stride(0), y2.stride(0), r2.stride(0), epsilon,
        weight is not None, variance_size is not None, tile.rows, tile.block, tile.whole,
    )  # fmt: skip
    return Launch((_tiles(rows, tile.rows),), arguments, tile.warps)


@triton_op(f"{NAMESPACE}::fused_add_rms_norm", mutates_args=())
def fused_add_rms_norm_op(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None
) -> tuple[Tensor, Tensor]:
    """`irframework.ops.fused_add_rms_norm` as a torch op."""
    y, residual = x.new_empty(x.shape), x.new_empty(x.shape)
    grid, arguments, warps = _add_rms_norm(x, x_residual, weight, epsilon, variance_size, y, residual)
    wrap_triton(add_rms_norm_kernel)[grid](*arguments, num_warps=warps)
    return y, residual


def fused_add_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None
) -> tuple[Tensor, Tensor]:
    """Add and norm rows into new tensors; returns the norm and the sum."""
    if not is_plain(x):
        ops = torch.ops.irframework_triton_kernels
        traced: tuple[Tensor, Tensor] = ops.fused_add_rms_norm.default(x, x_residual, weight, epsilon, variance_size)
        return traced
    y, residual = x.new_empty(x.shape), x.new_empty(x.shape)
    if y.numel():
        grid, arguments, warps = _add_rms_norm(x, x_residual, weight, epsilon, variance_size, y, residual)
        add_rms_norm_kernel[grid](*arguments, num_warps=warps)
    return y, residual


@triton_op(f"{NAMESPACE}::fused_add_rms_norm_", mutates_args=("x", "x_residual"))
def fused_add_rms_norm_inplace_op(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None
) -> None:
    """`fused_add_rms_norm_inplace` as a torch op."""
    _check_overwritten(x, x_residual)
    grid, arguments, warps = _add_rms_norm(x, x_residual, weight, epsilon, variance_size, x, x_residual)
    wrap_triton(add_rms_norm_kernel)[grid](*arguments, num_warps=warps)


def fused_add_rms_norm_inplace(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None
) -> None:
    """Overwrite x with the norm of the sum, and x_residual with the sum.

    Raises:
        ValueError: x or x_residual is not contiguous.
    """
    if not is_plain(x):
        ops = torch.ops.irframework_triton_kernels
        ops.fused_add_rms_norm_.default(x, x_residual, weight, epsilon, variance_size)
        return
    _check_overwritten(x, x_residual)
    if x.numel():
        grid, arguments, warps = _add_rms_norm(x, x_residual, weight, epsilon, variance_size, x, x_residual)
        add_rms_norm_kernel[grid](*arguments, num_warps=warps)


def _check_overwritten(x: Tensor, x_residual: Tensor) -> None:
    # What `_rows` must not copy: the copy would be overwritten instead.
    for name, tensor in (("x", x), ("x_residual", x_residual)):
        if not tensor.is_contiguous():
            raise ValueError(f"fused_add_rms_norm in place: {name} has strides {tensor.stride()}, must be contiguous")


# --- gated activations --------------------------------------------------------------------------------------------


def _gated(x: Tensor, activation: str, y: Tensor) -> Launch:
    x2, y2 = _rows(x), _rows(y)
    rows, length = y2.shape
    tile = elementwise_tile(_static(length))
    arguments = (
        x2, y2, rows, length, x2.stride(0), y2.stride(0), ACTIVATIONS[activation], tile.rows, tile.block,
    )  # fmt: skip
    return Launch((_tiles(rows, tile.rows) * _tiles(length, tile.block),), arguments, tile.warps)


def _halved(x: Tensor) -> Tensor:
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@triton_op(f"{NAMESPACE}::gated", mutates_args=())
def gated_op(x: Tensor, activation: str) -> Tensor:
    """`silu_and_mul` and `gelu_and_mul` as a torch op; `activation` is `silu`, `none` or `tanh`."""
    y = _halved(x)
    grid, arguments, warps = _gated(x, activation, y)
    wrap_triton(gated_kernel)[grid](*arguments, num_warps=warps)
    return y


def gated(x: Tensor, activation: str) -> Tensor:
    """Gate rows, `[..., 2 * hidden]` with stride 1 in the last dimension, into a new tensor.

    Args:
        x: Rows of gate and up, side by side.
        activation: `silu`, or what `gelu_and_mul` calls its approximation: `none` or `tanh`.
    """
    if not is_plain(x):
        traced: Tensor = torch.ops.irframework_triton_kernels.gated.default(x, activation)
        return traced
    y = _halved(x)
    if y.numel():
        grid, arguments, warps = _gated(x, activation, y)
        gated_kernel[grid](*arguments, num_warps=warps)
    return y


# --- rotary embedding ---------------------------------------------------------------------------------------------


def _heads(x: Tensor, positions: Tensor, head_size: int) -> Tensor:
    """`[tokens, heads, head_size]`; a copy only where the leading dimensions have no common stride."""
    apart = x.dim() == positions.dim() + 2
    return x.reshape(positions.numel(), x.shape[-2] if apart else x.shape[-1] // head_size, head_size)


def _rotary(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cache: Tensor,
    head_size: int,
    is_neox: bool,
    query_out: Tensor,
    key_out: Tensor,
) -> Launch:
    q = _heads(query, positions, head_size)
    k = q if key is None else _heads(key, positions, head_size)
    tokens, query_heads, _ = q.shape
    key_heads = 0 if key is None else k.shape[1]
    half = cache.shape[1] // 2
    tile = heads_tile(half, max(query_heads, key_heads))
    rest = head_size - 2 * half
    arguments = (
        positions.reshape(-1), q, k, cache, query_out, key_out, cache.shape[0], query_heads, key_heads, head_size, half,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), cache.stride(0),
        is_neox, key is not None, tile.rows, tile.block, 1 << (rest - 1).bit_length() if rest else 0,
    )  # fmt: skip
    return Launch((tokens * (_tiles(query_heads, tile.rows) + _tiles(key_heads, tile.rows)),), arguments, tile.warps)


@triton_op(f"{NAMESPACE}::rotary_embedding", mutates_args=())
def rotary_embedding_op(
    positions: Tensor, query: Tensor, key: Tensor, cos_sin_cache: Tensor, head_size: int, is_neox: bool
) -> tuple[Tensor, Tensor]:
    """`irframework.ops.rotary_embedding` with a key as a torch op."""
    query_out, key_out = query.new_empty(query.shape), key.new_empty(key.shape)
    grid, arguments, warps = _rotary(positions, query, key, cos_sin_cache, head_size, is_neox, query_out, key_out)
    wrap_triton(rotary_kernel)[grid](*arguments, num_warps=warps)
    return query_out, key_out


@triton_op(f"{NAMESPACE}::rotary_embedding_query", mutates_args=())
def rotary_embedding_query_op(
    positions: Tensor, query: Tensor, cos_sin_cache: Tensor, head_size: int, is_neox: bool
) -> Tensor:
    """`irframework.ops.rotary_embedding` without a key as a torch op."""
    query_out = query.new_empty(query.shape)
    grid, arguments, warps = _rotary(positions, query, None, cos_sin_cache, head_size, is_neox, query_out, query_out)
    wrap_triton(rotary_kernel)[grid](*arguments, num_warps=warps)
    return query_out


def rotary_embedding(
    positions: Tensor, query: Tensor, key: Tensor | None, cos_sin_cache: Tensor, head_size: int, is_neox: bool
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys into new tensors; without a key, the second is an empty tensor `[0]`."""
    if not is_plain(query):
        ops = torch.ops.irframework_triton_kernels
        if key is None:
            alone: Tensor = ops.rotary_embedding_query.default(positions, query, cos_sin_cache, head_size, is_neox)
            return alone, query.new_empty(0)
        traced: tuple[Tensor, Tensor] = ops.rotary_embedding.default(
            positions, query, key, cos_sin_cache, head_size, is_neox
        )
        return traced
    query_out = query.new_empty(query.shape)
    key_out = query.new_empty(0) if key is None else key.new_empty(key.shape)
    if query_out.numel() or key_out.numel():
        grid, arguments, warps = _rotary(
            positions, query, key, cos_sin_cache, head_size, is_neox, query_out, query_out if key is None else key_out
        )
        rotary_kernel[grid](*arguments, num_warps=warps)
    return query_out, key_out
