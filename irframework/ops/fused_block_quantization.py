"""Meanings of the fused ops that end in a quantisation with a scale for a block of a row, to float8 or NVFP4.

Each is its parts, one after the other, rounded as they round; how the codes and scales lie is said by attributes, as
in the parts. Does not hold those with one scale for a tensor or for a row (`fused_quantization.py`), nor kernels.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework.declaration import register_op
from irframework.ops.activation import gelu_and_mul, silu_and_mul
from irframework.ops.block_quantization import group_quant_fp8, group_size_for, quant_nvfp4, several_groups, several_of
from irframework.ops.layernorm import fused_add_rms_norm, rms_norm
from irframework.ops.quantization import allow_one_code, check_scale_values

# --- a scale for a group ---------------------------------------------------------------------------------------------


@register_op(fuse=several_groups())
def rms_norm_group_quant_fp8(
    x: Tensor,
    weight: Tensor | None,
    epsilon: float,
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """Norm rows and quantise each group of a row with its own scale.

    `group_quant_fp8(rms_norm(x, weight, epsilon), group_size, column_major_scales, power_of_two_scales)`.

    Args:
        x: Rows, `[..., tokens, hidden]`, or `[hidden]` where scales are not column-major; floating point.
        weight: Scale of the norm, `[hidden]`, or None.
        epsilon: Added to the mean square.
        group_size: Elements of a group; it divides hidden.
        column_major_scales: Return the scales of one group of all tokens side by side.
        power_of_two_scales: Raise scales to powers of two.

    Returns:
        `(q, scale)`: `[..., hidden]` in float8_e4m3fn, and `[..., tokens, groups]`, or `[..., groups, tokens]`, in
        float32.

    Raises:
        ArgumentError: As `rms_norm` and `group_quant_fp8`.
    """
    y = rms_norm.native(x, weight, epsilon)
    pair: tuple[Tensor, Tensor] = group_quant_fp8.native(y, group_size, column_major_scales, power_of_two_scales)
    return pair


@register_op(allow_inplace=True, fuse=several_groups())
def fused_add_rms_norm_group_quant_fp8(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a residual, norm the sum and quantise each group of a row of the norm with its own scale.

    `y, r = fused_add_rms_norm(x, x_residual, weight, epsilon)`, and
    `q, scale = group_quant_fp8(y, group_size, column_major_scales, power_of_two_scales)`.

    Args:
        x: Rows, `[..., tokens, hidden]`, or `[hidden]` where scales are not column-major; floating point. Given away by
            `maybe_inplace`.
        x_residual: Like x. Given away by `maybe_inplace`.
        weight: Scale of the norm, `[hidden]`, or None.
        epsilon: Added to the mean square.
        group_size: Elements of a group; it divides hidden.
        column_major_scales: Return the scales of one group of all tokens side by side.
        power_of_two_scales: Raise scales to powers of two.

    Returns:
        `(q, scale, r)`: the codes, `[..., hidden]` in float8_e4m3fn; their scales, `[..., tokens, groups]`, or
        `[..., groups, tokens]`, in float32; and the sum, like x.

    Raises:
        ArgumentError: As `fused_add_rms_norm` and `group_quant_fp8`.
    """
    y, residual = fused_add_rms_norm.native(x, x_residual, weight, epsilon)
    q, scale = group_quant_fp8.native(y, group_size, column_major_scales, power_of_two_scales)
    return q, scale, residual


@register_op(fuse=several_groups(2))
def silu_and_mul_group_quant_fp8(
    x: Tensor, group_size: int = 128, column_major_scales: bool = False, power_of_two_scales: bool = False
) -> tuple[Tensor, Tensor]:
    """Gate by SiLU and quantise each group of a row with its own scale.

    `group_quant_fp8(silu_and_mul(x), group_size, column_major_scales, power_of_two_scales)`.

    Args:
        x: `[..., tokens, 2 * hidden]`, or `[2 * hidden]` where scales are not column-major; floating point.
        group_size: Elements of a group; it divides hidden.
        column_major_scales: Return the scales of one group of all tokens side by side.
        power_of_two_scales: Raise scales to powers of two.

    Returns:
        `(q, scale)`: `[..., hidden]` in float8_e4m3fn, and `[..., tokens, groups]`, or `[..., groups, tokens]`, in
        float32.

    Raises:
        ArgumentError: As `silu_and_mul` and `group_quant_fp8`.
    """
    y = silu_and_mul.native(x)
    pair: tuple[Tensor, Tensor] = group_quant_fp8.native(y, group_size, column_major_scales, power_of_two_scales)
    return pair


@register_op(fuse=several_groups(2))
def gelu_and_mul_group_quant_fp8(
    x: Tensor,
    approximate: str = "none",
    group_size: int = 128,
    column_major_scales: bool = False,
    power_of_two_scales: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gate by GELU and quantise each group of a row with its own scale.

    `group_quant_fp8(gelu_and_mul(x, approximate), group_size, column_major_scales, power_of_two_scales)`.

    Args:
        x: `[..., tokens, 2 * hidden]`, or `[2 * hidden]` where scales are not column-major; floating point.
        approximate: As for `gelu_and_mul`.
        group_size: Elements of a group; it divides hidden.
        column_major_scales: Return the scales of one group of all tokens side by side.
        power_of_two_scales: Raise scales to powers of two.

    Returns:
        `(q, scale)`: `[..., hidden]` in float8_e4m3fn, and `[..., tokens, groups]`, or `[..., groups, tokens]`, in
        float32.

    Raises:
        ArgumentError: As `gelu_and_mul` and `group_quant_fp8`.
    """
    y = gelu_and_mul.native(x, approximate)
    pair: tuple[Tensor, Tensor] = group_quant_fp8.native(y, group_size, column_major_scales, power_of_two_scales)
    return pair


# --- NVFP4 -----------------------------------------------------------------------------------------------------------


@register_op(fuse=True)
def rms_norm_quant_nvfp4(
    x: Tensor, weight: Tensor | None, global_scale: Tensor, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Norm rows and quantise them to NVFP4: `quant_nvfp4(rms_norm(x, weight, epsilon), global_scale)`.

    Args:
        x: Rows, `[..., hidden]`, floating point; hidden is a multiple of 16.
        weight: Scale of the norm, `[hidden]`, or None.
        global_scale: One float32 number, shape `[]` or `[1]`.
        epsilon: Added to the mean square.

    Returns:
        `(q, scale)`: two codes in a byte, `[..., hidden / 2]` in uint8, and the scales of blocks, `[..., hidden / 16]`
        in float8_e4m3fn.

    Raises:
        ArgumentError: As `rms_norm` and `quant_nvfp4`.
    """
    pair: tuple[Tensor, Tensor] = quant_nvfp4.native(rms_norm.native(x, weight, epsilon), global_scale)
    return pair


@register_op(allow_inplace=True, fuse=True)
def fused_add_rms_norm_quant_nvfp4(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, global_scale: Tensor, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add a residual, norm the sum and quantise the norm to NVFP4.

    `y, r = fused_add_rms_norm(x, x_residual, weight, epsilon); q, scale = quant_nvfp4(y, global_scale)`.

    Args:
        x: Rows, `[..., hidden]`, floating point; hidden is a multiple of 16. Given away by `maybe_inplace`.
        x_residual: Like x. Given away by `maybe_inplace`.
        weight: Scale of the norm, `[hidden]`, or None.
        global_scale: One float32 number, shape `[]` or `[1]`.
        epsilon: Added to the mean square.

    Returns:
        `(q, scale, r)`: two codes in a byte, `[..., hidden / 2]` in uint8; the scales of blocks, `[..., hidden / 16]`
        in float8_e4m3fn; and the sum, like x.

    Raises:
        ArgumentError: As `fused_add_rms_norm` and `quant_nvfp4`.
    """
    y, residual = fused_add_rms_norm.native(x, x_residual, weight, epsilon)
    q, scale = quant_nvfp4.native(y, global_scale)
    return q, scale, residual


@register_op(fuse=True)
def silu_and_mul_quant_nvfp4(x: Tensor, global_scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gate by SiLU and quantise to NVFP4: `quant_nvfp4(silu_and_mul(x), global_scale)`.

    Args:
        x: `[..., 2 * hidden]`, floating point; hidden is a multiple of 16.
        global_scale: One float32 number, shape `[]` or `[1]`.

    Returns:
        `(q, scale)`: two codes in a byte, `[..., hidden / 2]` in uint8, and the scales of blocks, `[..., hidden / 16]`
        in float8_e4m3fn.

    Raises:
        ArgumentError: As `silu_and_mul` and `quant_nvfp4`.
    """
    pair: tuple[Tensor, Tensor] = quant_nvfp4.native(silu_and_mul.native(x), global_scale)
    return pair


# --- inputs ----------------------------------------------------------------------------------------------------------


def _layouts(tokens: bool, hidden: int) -> Iterator[tuple[Any, ...]]:
    """What a caller may ask for: groups, how their scales lie, and whether these are powers of two.

    Several groups to a row, so that definitions show where they are divided, and once one or fewer.
    """
    size = several_of(hidden)
    yield size, False, False
    yield size, False, True
    if tokens:
        yield size, True, False
        yield size, True, True
    yield group_size_for(hidden) if size != group_size_for(hidden) else max(size // 2, 1), False, False


@rms_norm_group_quant_fp8.register_input_generator
def _norm_group_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x, weight, epsilon, *_ = rms_norm.generate_inputs(shape=shape, **options)
    for layout in _layouts(len(shape) > 1, shape[-1]):
        yield x, weight, epsilon, *layout
        yield x * 1e-3, None, 1e-5, *layout
    yield x, weight.float(), epsilon, group_size_for(shape[-1])


@fused_add_rms_norm_group_quant_fp8.register_input_generator
def _add_norm_group_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x, residual, weight, epsilon, *_ = fused_add_rms_norm.generate_inputs(shape=shape, **options)
    for layout in _layouts(len(shape) > 1, shape[-1]):
        yield x, residual, weight, epsilon, *layout
        yield x * 1e-3, residual * 1e-3, None, 1e-5, *layout
    yield x, residual, weight.float(), epsilon, group_size_for(shape[-1])


@silu_and_mul_group_quant_fp8.register_input_generator
def _silu_group_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, **options)
    for layout in _layouts(len(shape) > 1, shape[-1] // 2):
        yield x, *layout


@gelu_and_mul_group_quant_fp8.register_input_generator
def _gelu_group_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, **options)
    for layout in _layouts(len(shape) > 1, shape[-1] // 2):
        yield x, "none", *layout
        yield x, "tanh", *layout


def _global_scales(device: str) -> Iterator[Tensor]:
    yield torch.full((1,), 2.0**-9, device=device)
    yield torch.full((), 1e-3, device=device)


@rms_norm_quant_nvfp4.register_input_generator
def _norm_nvfp4_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    x, weight, epsilon, *_ = rms_norm.generate_inputs(shape=shape, dtype=dtype, device=device)
    for scale in _global_scales(device):
        yield x, weight, scale, epsilon
    yield x, weight.float(), scale, epsilon
    yield x * 1e-3, None, scale, 1e-5


@fused_add_rms_norm_quant_nvfp4.register_input_generator
def _add_norm_nvfp4_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    x, residual, weight, epsilon, *_ = fused_add_rms_norm.generate_inputs(shape=shape, dtype=dtype, device=device)
    for scale in _global_scales(device):
        yield x, residual, weight, scale, epsilon
    yield x, residual, weight.float(), scale, epsilon
    yield x * 1e-3, residual * 1e-3, None, scale, 1e-5


@silu_and_mul_quant_nvfp4.register_input_generator
def _silu_nvfp4_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, dtype=dtype, device=device)
    for scale in _global_scales(device):
        yield x, scale


@rms_norm_quant_nvfp4.register_value_check
def _check_norm_nvfp4_values(global_scale: Tensor) -> None:
    check_scale_values("rms_norm_quant_nvfp4", "global_scale", global_scale)


@fused_add_rms_norm_quant_nvfp4.register_value_check
def _check_add_norm_nvfp4_values(global_scale: Tensor) -> None:
    check_scale_values("fused_add_rms_norm_quant_nvfp4", "global_scale", global_scale)


@silu_and_mul_quant_nvfp4.register_value_check
def _check_silu_nvfp4_values(global_scale: Tensor) -> None:
    check_scale_values("silu_and_mul_quant_nvfp4", "global_scale", global_scale)


for _op in (
    rms_norm_group_quant_fp8,
    fused_add_rms_norm_group_quant_fp8,
    silu_and_mul_group_quant_fp8,
    gelu_and_mul_group_quant_fp8,
    rms_norm_quant_nvfp4,
    fused_add_rms_norm_quant_nvfp4,
    silu_and_mul_quant_nvfp4,
):
    allow_one_code(_op)
