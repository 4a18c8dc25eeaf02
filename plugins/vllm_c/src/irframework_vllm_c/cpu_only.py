"""Owns the implementations that only the CPU library has kernels for: activations, quantisations, Gemma's norms, and
rotation by whole cosines and sines.

Those for every device, attention and its cache, and fused ops are elsewhere.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import irframework as ir
from irframework.conditions import Supports
from irframework_vllm_c.graphs import COMPILED_WHERE
from irframework_vllm_c.implementations import FLOATS, KERNELS, kernels_load, out_variants

FUNCTIONAL_KERNELS = (
    "gelu_new",
    "quick_gelu",
    "relu2",
    "xielu",
    "mul_and_silu",
    "fatrelu_and_mul",
    "swigluoai_and_mul",
    "gelu_and_mul_sparse",
    "silu_mul",
    "gelu_mul",
    "apply_rotary_pos_emb",
    "tensor_quant_fp8",
    "dynamic_quant_int8",
    "group_quant_fp8",
    "dequant",
    "gemma_rms_norm",
    "fused_add_gemma_rms_norm_functional",
)


def supported() -> bool | ir.Rejected:
    """Whether the CPU kernels load here; the reason when they do not."""
    loaded = kernels_load()
    if loaded is True:
        out_variants(FUNCTIONAL_KERNELS)
    return loaded


# --- activations -----------------------------------------------------------------------------------------------------


def gelu_new(x: Tensor) -> Tensor:
    """See `irframework.ops.gelu_new`; and `gelu_fast`, whose factor is the same number in float32."""
    y: Tensor = KERNELS.gelu_new.default(x)
    return y


def quick_gelu(x: Tensor) -> Tensor:
    """See `irframework.ops.quick_gelu`."""
    y: Tensor = KERNELS.quick_gelu.default(x)
    return y


def relu2(x: Tensor) -> Tensor:
    """See `irframework.ops.relu2`."""
    y: Tensor = KERNELS.relu2.default(x)
    return y


def xielu(x: Tensor, alpha_p: Tensor, alpha_n: Tensor, beta: float = 0.5, epsilon: float = -1e-6) -> Tensor:
    """See `irframework.ops.xielu`."""
    y: Tensor = KERNELS.xielu.default(x, alpha_p, alpha_n, beta, epsilon)
    return y


def mul_and_silu(x: Tensor) -> Tensor:
    """See `irframework.ops.mul_and_silu`."""
    y: Tensor = KERNELS.mul_and_silu.default(x)
    return y


def fatrelu_and_mul(x: Tensor, threshold: float = 0.0) -> Tensor:
    """See `irframework.ops.fatrelu_and_mul`."""
    y: Tensor = KERNELS.fatrelu_and_mul.default(x, threshold)
    return y


def swigluoai_and_mul(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """See `irframework.ops.swigluoai_and_mul`."""
    y: Tensor = KERNELS.swigluoai_and_mul.default(x, alpha, limit)
    return y


def limit_is_positive(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> bool | ir.Rejected:
    """What is not is a mistake, which native explains."""
    return limit > 0 or ir.reject(f"limit is {limit}, needs more than 0")


def gelu_and_mul_sparse(x: Tensor, activation_sparsity: float, approximate: str = "tanh") -> Tensor:
    """See `irframework.ops.gelu_and_mul_sparse`."""
    tanh = approximate == "tanh"
    if activation_sparsity == 0:
        y: Tensor = KERNELS.gelu_and_mul.default(x, tanh)
    else:
        deviations = statistics.NormalDist().inv_cdf(activation_sparsity)
        y = KERNELS.gelu_and_mul_sparse.default(x, deviations, tanh)
    return y


def sparsity_is_a_share(x: Tensor, activation_sparsity: float, approximate: str = "tanh") -> bool | ir.Rejected:
    """What is not is a mistake, which native explains."""
    return 0 <= activation_sparsity < 1 or ir.reject(f"activation_sparsity is {activation_sparsity}, needs 0 to 1")


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See `irframework.ops.silu_mul`."""
    y: Tensor = KERNELS.silu_mul.default(gate, up)
    return y


def gelu_mul(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """See `irframework.ops.gelu_mul`."""
    y: Tensor = KERNELS.gelu_mul.default(gate, up, approximate == "tanh")
    return y


# --- rotation --------------------------------------------------------------------------------------------------------


def apply_rotary_pos_emb(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `irframework.ops.apply_rotary_pos_emb`."""
    y: Tensor = KERNELS.apply_rotary_pos_emb.default(x, cos, sin)
    return y


# --- quantisation ----------------------------------------------------------------------------------------------------


def tensor_quant_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.tensor_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = KERNELS.tensor_quant_fp8.default(x)
    return pair


def dynamic_quant_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.dynamic_quant_int8`."""
    pair: tuple[Tensor, Tensor] = KERNELS.dynamic_quant_int8.default(x)
    return pair


def group_quant_fp8(
    x: Tensor, group_size: int = 128, column_major_scales: bool = False, power_of_two_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.group_quant_fp8`."""
    pair: tuple[Tensor, Tensor] = KERNELS.group_quant_fp8.default(
        x, group_size, column_major_scales, power_of_two_scales
    )
    return pair


def groups_fit(
    x: Tensor, group_size: int = 128, column_major_scales: bool = False, power_of_two_scales: bool = False
) -> bool | ir.Rejected:
    """What does not fit is a mistake, which native explains."""
    if group_size < 1 or x.shape[-1] % group_size:
        return ir.reject(f"group_size is {group_size}, needs to divide the last dimension of x")
    return x.dim() > int(column_major_scales) or ir.reject("column_major_scales needs x of two dimensions")


def dequant(q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, column_major_scales: bool = False) -> Tensor:
    """See `irframework.ops.dequant`."""
    x: Tensor = KERNELS.dequant.default(q, scale, dtype, column_major_scales)
    return x


def scales_fit(
    q: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32, column_major_scales: bool = False
) -> bool | ir.Rejected:
    """One for the tensor, or groups that divide a row. What does not fit is a mistake, which native explains."""
    if dtype not in FLOATS:
        return ir.reject(f"dtype is {dtype}, needs float32, bfloat16 or float16")
    shape, codes = scale.shape, q.shape
    if not column_major_scales and (not shape or (len(shape) == 1 and len(codes) > 1)):
        return not shape or shape[0] == 1 or ir.reject("scale must hold one number")
    if len(shape) != len(codes) or len(codes) < 1 + column_major_scales:
        return ir.reject("scale needs the rank of q")
    groups = shape[-2] if column_major_scales else shape[-1]
    rows = (*shape[:-2], shape[-1]) if column_major_scales else shape[:-1]
    whole = codes[-1] == 0 or (groups > 0 and codes[-1] % groups == 0)
    return (rows == codes[:-1] and whole) or ir.reject("scale does not fit q")


# --- norms -----------------------------------------------------------------------------------------------------------


def gemma_rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """See `irframework.ops.gemma_rms_norm`."""
    y: Tensor = KERNELS.gemma_rms_norm.default(x, weight, epsilon)
    return y


def fused_add_gemma_rms_norm(x: Tensor, x_residual: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_gemma_rms_norm`; overwrites x with the norm and x_residual with the sum."""
    KERNELS.fused_add_gemma_rms_norm.default(x, x_residual, weight, epsilon)
    return x, x_residual


def fused_add_gemma_rms_norm_functional(
    x: Tensor, x_residual: Tensor, weight: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """See `irframework.ops.fused_add_gemma_rms_norm`; overwrites nothing."""
    pair: tuple[Tensor, Tensor] = KERNELS.fused_add_gemma_rms_norm_functional.default(x, x_residual, weight, epsilon)
    return pair


def register(provider: str) -> None:
    """Registers every implementation under `provider`."""

    def add(
        name: str,
        fn: Callable[..., Any],
        conditions: Supports,
        functional: Callable[..., Any] | None = None,
        batch_invariant: bool = True,
        checks_values: bool = False,
    ) -> None:
        """`functional`: what the in-place function `fn` is where nothing may be overwritten."""
        registered = getattr(ir.ops, name).register_impl(
            provider,
            supported={"cpu": supported},
            supports_args=conditions,
            inplace=functional is not None,
            functional=functional,
            batch_invariant=batch_invariant,
            checks_values=checks_values,
            checks_tensors=functional is not None,  # the kernels refuse other shapes, and what overlaps
            compiled_where=COMPILED_WHERE.get(name),
        )
        registered(fn)

    rows = ir.supports(dtype=FLOATS, row_contiguous=("x",))
    # An odd last dimension is left to native, whose error is the op's own.
    halves = rows & ir.supports(multiple_of={"x": 2})
    approximations = ir.supports(one_of={"approximate": ("none", "tanh")})
    weighted = ir.supports(dtype={"x": FLOATS, "weight": FLOATS}, last_dim_of={"weight": "x"})
    pair = ir.supports(
        same_dtype=("x", "x_residual"), same_shape=("x", "x_residual"), row_contiguous=("x", "x_residual")
    )
    numbers = ("alpha_p", "alpha_n")

    add("gelu_new", gelu_new, rows)
    add("gelu_fast", gelu_new, rows)
    add("quick_gelu", quick_gelu, rows)
    add("relu2", relu2, rows)
    add(
        "xielu",
        xielu,
        ir.supports(dtype=dict.fromkeys(("x", *numbers), FLOATS), row_contiguous=("x",), one_element=numbers),
    )
    add("mul_and_silu", mul_and_silu, halves)
    add("fatrelu_and_mul", fatrelu_and_mul, halves)
    add("swigluoai_and_mul", swigluoai_and_mul, halves & limit_is_positive)
    add("gelu_and_mul_sparse", gelu_and_mul_sparse, halves & approximations & sparsity_is_a_share)
    halved = ("gate", "up")
    apart = ir.supports(dtype=FLOATS, same_dtype=halved, same_shape=halved, row_contiguous=halved)
    add("silu_mul", silu_mul, apart)
    add("gelu_mul", gelu_mul, apart & approximations)
    angles = ("cos", "sin")
    heads = ir.supports(
        dtype={"x": FLOATS, "cos": FLOATS}, same_dtype=angles, same_shape=angles, ndim={"x": 4, "cos": 3}
    )
    whole = ir.supports(row_contiguous=("x", *angles), multiple_of={"x": 2})
    add("apply_rotary_pos_emb", apply_rotary_pos_emb, heads & whole)

    # All rows decide about the scale.
    add("tensor_quant_fp8", tensor_quant_fp8, rows, batch_invariant=False)
    add("dynamic_quant_int8", dynamic_quant_int8, rows)
    add("group_quant_fp8", group_quant_fp8, rows & groups_fit)
    codes: dict[str, tuple[torch.dtype, ...]] = {"q": (torch.float8_e4m3fn, torch.int8), "scale": (torch.float32,)}
    scaled = ir.supports(dtype=codes, row_contiguous=("q",), contiguous=("scale",)) & scales_fit
    add("dequant", dequant, scaled, checks_values=True)

    add("gemma_rms_norm", gemma_rms_norm, weighted & ir.supports(row_contiguous=("x",)))
    add(
        "fused_add_gemma_rms_norm",
        fused_add_gemma_rms_norm,
        weighted & pair,
        functional=fused_add_gemma_rms_norm_functional,
    )
