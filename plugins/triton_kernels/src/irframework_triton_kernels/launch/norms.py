"""Launches of the norms, and their torch ops."""

from torch import Tensor

from irframework_triton_kernels.kernels.codes import DYNAMIC, STATIC, VALUES
from irframework_triton_kernels.kernels.norms import AROUND_ONE, add_rms_norm_kernel, rms_norm_kernel
from irframework_triton_kernels.launch.call import (
    FP8,
    as_codes,
    as_float,
    check_overwritten,
    launch,
    new_codes,
    new_like,
    new_scales,
    rows_of,
    static,
    tiles_of,
    torch_op,
)
from irframework_triton_kernels.tiles import ADD_NORM, NORM, Tile, row_tile


def _norm(
    x: Tensor,
    weight: Tensor | None,
    y: Tensor,
    epsilon: float,
    variance_size: int | None = None,
    codes: int = VALUES.value,
    scale: Tensor | None = None,
    tile: Tile | None = None,
    around_one: bool = False,
) -> None:
    """Norm the rows of x into y. A weight around one says how far the scale is from one."""
    x2 = rows_of(x)
    rows, hidden = x2.shape
    if static(hidden) == 0:
        return
    tile = tile or row_tile(static(hidden), NORM)
    tensors = (x2, x2 if weight is None else weight, y, x2 if scale is None else scale)
    numbers = (
        hidden, hidden if variance_size is None else variance_size, x2.stride(0), as_float(epsilon),
        AROUND_ONE.value if around_one else weight is not None, variance_size is not None,
        codes, codes != 0 and y.dtype is FP8, tile.rows, tile.block, tile.tail, tile.whole, tile.resident,
    )  # fmt: skip
    launch(rms_norm_kernel, tiles_of(rows, tile.rows), tensors, rows, numbers, tile)


def _add_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    y: Tensor,
    residual: Tensor,
    epsilon: float,
    variance_size: int | None = None,
    codes: int = VALUES.value,
    scale: Tensor | None = None,
    tile: Tile | None = None,
    around_one: bool = False,
) -> None:
    """Add the rows of x and x_residual into residual, and norm them into y; these may be x_residual and x."""
    x2, xr2 = rows_of(x), rows_of(x_residual)
    rows, hidden = x2.shape
    if static(hidden) == 0:
        return
    tile = tile or row_tile(static(hidden), ADD_NORM)
    tensors = (x2, xr2, x2 if weight is None else weight, y, residual, x2 if scale is None else scale)
    numbers = (
        hidden, hidden if variance_size is None else variance_size, x2.stride(0), xr2.stride(0), as_float(epsilon),
        AROUND_ONE.value if around_one else weight is not None, variance_size is not None,
        codes, codes != 0 and y.dtype is FP8, tile.rows, tile.block, tile.tail, tile.whole, tile.resident,
    )  # fmt: skip
    launch(add_rms_norm_kernel, tiles_of(rows, tile.rows), tensors, rows, numbers, tile)


@torch_op()
def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None, tile: Tile | None = None
) -> Tensor:
    """Norm rows, `[..., hidden]` with stride 1 in the last dimension, into a new tensor of the dtype of x."""
    y = new_like(x)
    _norm(x, weight, y, epsilon, variance_size, tile=tile)
    return y


@torch_op()
def gemma_rms_norm(x: Tensor, weight: Tensor, epsilon: float, tile: Tile | None = None) -> Tensor:
    """Norm rows with a weight around one into a new tensor."""
    y = new_like(x)
    _norm(x, weight, y, epsilon, tile=tile, around_one=True)
    return y


@torch_op()
def rms_norm_static_quant_fp8(
    x: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float, tile: Tile | None = None
) -> Tensor:
    """Norm rows into codes under a scale, one float32 number."""
    q = new_codes(x)
    _norm(x, weight, q, epsilon, codes=STATIC.value, scale=scale, tile=tile)
    return as_codes(q)


@torch_op()
def rms_norm_dynamic_quant_fp8(
    x: Tensor, weight: Tensor | None, epsilon: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Norm rows into codes, each row under a scale of its own; returns the codes and the scales."""
    q, scales = new_codes(x), new_scales(x)
    _norm(x, weight, q, epsilon, codes=DYNAMIC.value, scale=scales, tile=tile)
    return as_codes(q), scales


# --- with a residual, into new memory -----------------------------------------------------------------------------


@torch_op()
def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None,
    tile: Tile | None = None,
) -> tuple[Tensor, Tensor]:
    """Add and norm rows into new tensors; returns the norm and the sum."""
    y, residual = new_like(x), new_like(x)
    _add_norm(x, x_residual, weight, y, residual, epsilon, variance_size, tile=tile)
    return y, residual


@torch_op()
def fused_add_gemma_rms_norm(
    x: Tensor, x_residual: Tensor, weight: Tensor, epsilon: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Add and norm rows with a weight around one into new tensors; returns the norm and the sum."""
    y, residual = new_like(x), new_like(x)
    _add_norm(x, x_residual, weight, y, residual, epsilon, tile=tile, around_one=True)
    return y, residual


@torch_op()
def fused_add_rms_norm_static_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Add and norm rows into codes under a scale; returns the codes and the sum."""
    q, residual = new_codes(x), new_like(x)
    _add_norm(x, x_residual, weight, q, residual, epsilon, codes=STATIC.value, scale=scale, tile=tile)
    return as_codes(q), residual


@torch_op()
def fused_add_rms_norm_dynamic_quant_fp8(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Add and norm rows into codes, each row under a scale of its own; returns the codes, the scales and the sum."""
    q, scales, residual = new_codes(x), new_scales(x), new_like(x)
    _add_norm(x, x_residual, weight, q, residual, epsilon, codes=DYNAMIC.value, scale=scales, tile=tile)
    return as_codes(q), scales, residual


# --- with a residual, in place ------------------------------------------------------------------------------------


@torch_op("fused_add_rms_norm_", mutates=("x", "x_residual"))
def fused_add_rms_norm_inplace(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None,
    tile: Tile | None = None,
) -> None:
    """Overwrite x with the norm of the sum, and x_residual with the sum.

    Raises:
        ValueError: x or x_residual is not contiguous.
    """
    check_overwritten(x=x, x_residual=x_residual)
    _add_norm(x, x_residual, weight, x, x_residual, epsilon, variance_size, tile=tile)


@torch_op("fused_add_gemma_rms_norm_", mutates=("x", "x_residual"))
def fused_add_gemma_rms_norm_inplace(
    x: Tensor, x_residual: Tensor, weight: Tensor, epsilon: float, tile: Tile | None = None
) -> None:
    """Overwrite x with the norm of the sum, with a weight around one, and x_residual with the sum.

    Raises:
        ValueError: x or x_residual is not contiguous.
    """
    check_overwritten(x=x, x_residual=x_residual)
    _add_norm(x, x_residual, weight, x, x_residual, epsilon, tile=tile, around_one=True)


@torch_op("fused_add_rms_norm_static_quant_fp8_", mutates=("x_residual",))
def fused_add_rms_norm_static_quant_fp8_inplace(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float, tile: Tile | None = None
) -> Tensor:
    """Overwrite x_residual with the sum; returns codes of its norm under a scale.

    Raises:
        ValueError: x_residual is not contiguous.
    """
    check_overwritten(x_residual=x_residual)
    q = new_codes(x)
    _add_norm(x, x_residual, weight, q, x_residual, epsilon, codes=STATIC.value, scale=scale, tile=tile)
    return as_codes(q)


@torch_op("fused_add_rms_norm_dynamic_quant_fp8_", mutates=("x_residual",))
def fused_add_rms_norm_dynamic_quant_fp8_inplace(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, tile: Tile | None = None
) -> tuple[Tensor, Tensor]:
    """Overwrite x_residual with the sum; returns codes of its norm, each row under a scale of its own, and the scales.

    Raises:
        ValueError: x_residual is not contiguous.
    """
    check_overwritten(x_residual=x_residual)
    q, scales = new_codes(x), new_scales(x)
    _add_norm(x, x_residual, weight, q, x_residual, epsilon, codes=DYNAMIC.value, scale=scales, tile=tile)
    return as_codes(q), scales
