"""Owns which calls our own SYCL kernels take, and whether they run on this machine at all.

A predicate has the signature of its op. How many rows there are is never looked at.
"""

from functools import cache

import torch
from torch import Tensor

import irframework as ir
from irframework_xpu_sycl import route, sycl_kernels
from irframework_xpu_sycl.rotary_shapes import misfit
from irframework_xpu_sycl.sycl_runtime import SyclError

Answer = bool | ir.Rejected

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LEADING = 3  # dimensions of any strides; see `Rows` in csrc/arguments.h

WEIGHT = ir.supports(last_dim_of={"weight": "x"}, contiguous=("weight",))
SUM = ir.supports(same_dtype=("x", "x_residual"), same_shape=("x", "x_residual"))
EVEN = ir.supports(multiple_of={"x": 2})  # an odd last dimension is left to native, whose error is the op's own
ROWS = ir.supports(dtype={"x": FLOATS}, row_contiguous=("x",))
SCALED = ir.supports(dtype={"x": FLOATS, "scale": (torch.float32,)}, row_contiguous=("x",))
NORM = ROWS & WEIGHT & ir.supports(none=("variance_size",))
ADD_NORM = NORM & SUM
GATED = ROWS & EVEN
GELU = ir.supports(one_of={"approximate": ("none", "tanh")})
ROTARY = ir.supports(
    dtype={"positions": (torch.int32, torch.int64), "query": FLOATS, "cos_sin_cache": FLOATS},
    same_dtype=("query", "key"),
    ndim={"cos_sin_cache": 2},
    contiguous=("positions",),
    row_contiguous=("query", "key", "cos_sin_cache"),
)


# ---- this machine ------------------------------------------------------------------------------------------------


def kernels_run() -> Answer:
    """Whether the kernels compile for a device that is here; the reason when not."""
    try:
        sycl_kernels.compiled(torch.float32, _device())
    except (SyclError, ValueError) as error:
        return ir.reject(str(error))
    return True


def _device() -> torch.device:
    if route.runs_on_cpu():
        return torch.device("cpu")
    if getattr(torch.version, "xpu", None) is None:
        raise SyclError(f"torch {torch.__version__} is not built for Intel GPUs (XPU)")
    if not torch.xpu.is_available():
        raise SyclError(f"torch {torch.__version__} sees no Intel GPU")
    return torch.device("xpu", torch.xpu.current_device())


@cache
def _compiles(dtype: torch.dtype, device: torch.device) -> Answer:
    """The kernels of a dtype are compiled when the first call asks; a dtype that fails is refused, not called."""
    try:
        sycl_kernels.compiled(dtype, device)
    except SyclError as error:
        return ir.reject(str(error))
    return True


# ---- calls -------------------------------------------------------------------------------------------------------


def rows_fit(x: Tensor) -> Answer:
    """Rows can be found by the kernels, which are there for this dtype."""
    if x.dim() - 1 > LEADING and not x.is_contiguous():
        return ir.reject(f"x has {x.dim()} dimensions and is not contiguous, needs at most {LEADING + 1} then")
    return _compiles(x.dtype, x.device)


def gelu_fits(x: Tensor, approximate: str = "none") -> Answer:
    """As `rows_fit`."""
    return rows_fit(x)


def scaled_rows_fit(x: Tensor, scale: Tensor) -> Answer:
    """As `rows_fit`; the scale is one number."""
    return rows_fit(x) if scale.numel() == 1 else ir.reject(f"scale has shape {tuple(scale.shape)}, needs one element")


def quant_norm_fits(x: Tensor, weight: Tensor | None, epsilon: float) -> Answer:
    """As `rows_fit`; the weight has one of two dtypes."""
    if weight is not None and weight.dtype not in (x.dtype, torch.float32):
        return ir.reject(f"weight is {weight.dtype}, needs the dtype of x, {x.dtype}, or torch.float32")
    return rows_fit(x)


def norm_fits(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Answer:
    """As `quant_norm_fits`."""
    return quant_norm_fits(x, weight, epsilon)


def scaled_norm_fits(x: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float) -> Answer:
    """As `quant_norm_fits`; the scale is one number."""
    fits = scaled_rows_fit(x, scale)
    return quant_norm_fits(x, weight, epsilon) if fits is True else fits


def quant_add_norm_fits(x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float) -> Answer:
    """As `quant_norm_fits`. What is overwritten is contiguous: the framework sees to it."""
    return quant_norm_fits(x, weight, epsilon)


def add_norm_fits(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Answer:
    """As `quant_norm_fits`. What is overwritten is contiguous: the framework sees to it."""
    return quant_norm_fits(x, weight, epsilon)


def scaled_add_norm_fits(x: Tensor, x_residual: Tensor, weight: Tensor | None, scale: Tensor, epsilon: float) -> Answer:
    """As `scaled_norm_fits`. What is overwritten is contiguous: the framework sees to it."""
    return scaled_norm_fits(x, weight, scale, epsilon)


def heads_fit(
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cos_sin_cache: Tensor,
    head_size: int,
    is_neox: bool = True,
) -> Answer:
    """Ranks and sizes fit each other, and the angles have one of two dtypes."""
    problem = misfit(positions, query, key, cos_sin_cache, head_size)
    if problem is not None:
        return ir.reject(problem)
    if cos_sin_cache.dtype not in (query.dtype, torch.float32):
        return ir.reject(f"cos_sin_cache is {cos_sin_cache.dtype}, needs that of query, {query.dtype}, or float32")
    if positions.dim() > LEADING:
        return ir.reject(f"positions has {positions.dim()} dimensions, needs at most {LEADING}")
    return _compiles(query.dtype, query.device)
