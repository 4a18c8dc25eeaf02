"""Launches of the activations that nothing is fused to, and their torch ops."""

from torch import Tensor

from irframework_triton_kernels.kernels.activations import (
    FATRELU,
    GELU_FAST,
    GELU_NEW,
    MUL_SILU,
    QUICK_GELU,
    RELU2,
    SWIGLUOAI,
    XIELU,
    activation_kernel,
)
from irframework_triton_kernels.launch.call import as_float, launch, new_like, rows_of, static, tiles_of, torch_op
from irframework_triton_kernels.tiles import Tile, elementwise_tile, pairs_tile

OF_ONE: dict[str, int] = {
    "gelu_new": GELU_NEW.value,
    "gelu_fast": GELU_FAST.value,
    "quick_gelu": QUICK_GELU.value,
    "relu2": RELU2.value,
}
GATES: dict[str, int] = {
    "mul_and_silu": MUL_SILU.value,
    "fatrelu_and_mul": FATRELU.value,
    "swigluoai_and_mul": SWIGLUOAI.value,
}


def _activate(
    x: Tensor,
    y: Tensor,
    activation: int,
    first: float = 0.0,
    second: float = 0.0,
    alphas: tuple[Tensor, Tensor] | None = None,
    tile: Tile | None = None,
) -> None:
    x2 = rows_of(x)
    rows, length = x2.shape[0], y.shape[-1]
    if static(length) == 0:
        return
    if tile is None and activation == SWIGLUOAI.value:
        tile = pairs_tile(static(length))
    tile = tile or elementwise_tile(static(length), activation >= MUL_SILU.value, False)
    numbers = (
        length, x2.stride(0), as_float(first), as_float(second), activation, tile.rows, tile.block,
    )  # fmt: skip
    tiles = tiles_of(rows, tile.rows) * tiles_of(length, tile.block)
    launch(activation_kernel, tiles, (x2, y, *(alphas or (x2, x2))), rows, numbers, tile)


@torch_op()
def activated(x: Tensor, activation: str, tile: Tile | None = None) -> Tensor:
    """Activate each element into a new tensor; `activation` is the op's name."""
    y = new_like(x)
    _activate(x, y, OF_ONE[activation], tile=tile)
    return y


@torch_op()
def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float, epsilon: float, tile: Tile | None = None) -> Tensor:
    """Activate each element by xIELU into a new tensor; the alphas are one number each."""
    y = new_like(x)
    _activate(x, y, XIELU.value, beta, epsilon, (alpha_p, alpha_n), tile)
    return y


@torch_op()
def gated_by(x: Tensor, activation: str, first: float, second: float, tile: Tile | None = None) -> Tensor:
    """Gate rows, `[..., 2 * hidden]`, into a new tensor; `activation` is the op's name, the numbers are the op's."""
    y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
    _activate(x, y, GATES[activation], first, second, tile=tile)
    return y
