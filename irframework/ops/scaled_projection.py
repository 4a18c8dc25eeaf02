"""Meaning of the matrix product of codes in 8-bit floating point, with scales for tensors, or for rows and columns.

Does not hold products of other numbers (`projection.py`), what is done with a product (`fused_projection.py`), how
codes are made (`quantization.py`), nor kernels.

Private torch API, read in 2.11 and 2.13: `torch._scaled_mm`, which is the only product of such codes that torch has.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError
from irframework.ops.quantization import FP8, check_scale_values, fp8_codes
from irframework.symbolic import same_sizes, starts_at_multiple

_RESULTS = (torch.bfloat16, torch.float16, torch.float32)
_WHOLE = 16  # torch's kernels on GPUs take rows of so many codes, and so many rows of the weight, or a multiple


def check_scaled_projection(
    op: str, x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> None:
    """Raise unless the arguments are matrices of codes and scales that fit each other.

    Raises:
        ArgumentError: Names the op, the argument, and what it has.
    """
    for name, tensor in (("x", x), ("weight", weight)):
        if tensor.dtype != FP8 or tensor.dim() != 2:
            raise ArgumentError(
                f"Op {op!r}: argument {name!r} must be a matrix of float8_e4m3fn, it has dtype {tensor.dtype} and "
                f"shape {tuple(tensor.shape)}."
            )
    if not same_sizes(weight.shape[1:], x.shape[1:]):
        raise ArgumentError(
            f"Op {op!r}: argument 'weight' must have rows as long as those of 'x', {x.shape[1]}; it has shape "
            f"{tuple(weight.shape)}."
        )
    for name, scale in (("x_scale", x_scale), ("weight_scale", weight_scale)):
        if scale.dtype != torch.float32:
            raise ArgumentError(f"Op {op!r}: argument {name!r} must have dtype float32, it has {scale.dtype}.")
    one_each = x_scale.numel() == 1 and weight_scale.numel() == 1
    by_row = same_sizes(x_scale.shape, (x.shape[0], 1)) and same_sizes(weight_scale.shape, (1, weight.shape[0]))
    if not one_each and not by_row:
        raise ArgumentError(
            f"Op {op!r}: arguments 'x_scale' and 'weight_scale' must hold one number each, or be [{x.shape[0]}, 1] and "
            f"[1, {weight.shape[0]}], one for each row of 'x' and of 'weight'; they have shapes {tuple(x_scale.shape)} "
            f"and {tuple(weight_scale.shape)}."
        )
    if dtype not in _RESULTS:
        raise ArgumentError(f"Op {op!r}: dtype must be bfloat16, float16 or float32, got {dtype}.")


@register_op(activations=("x",))
def scaled_linear(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulation: bool = True,
) -> Tensor:
    """Multiply rows of codes by a matrix of codes: `y = (x * x_scale) @ (weight * weight_scale.T).T`.

    It is `torch._scaled_mm(x, weight.t(), x_scale, weight_scale, out_dtype=dtype, use_fast_accum=fast_accumulation)`:
    added up in float32 and rounded to dtype once. On the CPU torch takes all that is described here, but nothing empty.
    On GPUs it takes rows of a multiple of 16 codes, and of the weight a multiple of 16 rows. What torch has no product
    for, and what wants gradients, is computed from the numbers that the codes and scales stand for, in float32. Devices
    on which torch multiplies no such codes, and dtypes that it does not round to there, are torch's own errors.

    Args:
        x: Codes, `[rows, in_features]`, float8_e4m3fn.
        weight: Codes, `[out_features, in_features]`, float8_e4m3fn.
        x_scale: float32: one number, or `[rows, 1]`, one for each row of x.
        weight_scale: float32: one number, or `[1, out_features]`, one for each row of weight. Both scales are of the
            same kind.
        dtype: Of the result: bfloat16, float16 or float32.
        fast_accumulation: Sums may be kept with fewer digits than float32 has, as the matrix units of NVIDIA's Hopper
            do where nothing is added to them in between. Other devices add up in float32 anyway.

    Returns:
        `[rows, out_features]` in dtype.

    Raises:
        ArgumentError: x or weight is no matrix of float8_e4m3fn, a scale is not float32, shapes do not fit together,
            dtype is another, or a scale is zero or not finite.

    Source: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), E4M3; torch's `_scaled_mm`.
    """
    check_scaled_projection("scaled_linear", x, weight, x_scale, weight_scale, dtype)
    x_scale, weight_scale = (each if each.dim() <= 2 else each.reshape(()) for each in (x_scale, weight_scale))
    if not _torch_multiplies(x, weight, x_scale, weight_scale):
        rows = x.to(torch.float32) * x_scale
        columns = weight.to(torch.float32).t() * weight_scale
        return (rows @ columns).to(dtype)
    return torch._scaled_mm(
        _as_multiplied(x),
        _as_multiplied(weight).t(),
        _begun_with(x_scale),
        _begun_with(weight_scale),
        out_dtype=dtype,
        use_fast_accum=fast_accumulation,
    )


def _torch_multiplies(x: Tensor, weight: Tensor, *scales: Tensor) -> bool:
    """Whether torch has a product for these.

    It has none that is differentiable, and on CPUs none without rows; of empty rows it returns memory as it finds it.
    """
    if torch.is_grad_enabled() and any(each.requires_grad for each in (x, weight, *scales)):
        return False
    if _is_zero(weight.shape[1]):
        return False
    if x.device.type == "cpu":
        return not _is_zero(x.shape[0])
    return weight.shape[0] % _WHOLE == 0 and weight.shape[1] % _WHOLE == 0


def _is_zero(size: int | torch.SymInt) -> bool:
    return isinstance(size, int) and size == 0  # symbolic ones are taken for others


def _as_multiplied(codes: Tensor) -> Tensor:
    """The codes as torch's products ask for them: rows side by side, each beginning at a multiple of 16 bytes."""
    row, within = codes.stride()
    fits = within == 1 and row >= codes.shape[1] and row % _WHOLE == 0 and starts_at_multiple(codes, _WHOLE)
    return codes if fits else codes.clone(memory_format=torch.contiguous_format)


def _begun_with(scale: Tensor) -> Tensor:
    """A scale as torch's products ask for it: contiguous, and beginning at a multiple of 16 bytes."""
    fits = scale.is_contiguous() and starts_at_multiple(scale, _WHOLE)
    return scale if fits else scale.clone(memory_format=torch.contiguous_format)


def scaled_products(
    shape: tuple[int, ...], device: Any, out_features: int = 32
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Codes and scales worth testing, of rows of a multiple of 16: one scale each, and one for each row and column."""
    length = -(-shape[-1] // _WHOLE) * _WHOLE
    x, weight = (torch.randn(size, device=device) for size in ((*shape[:-1], length), (out_features, length)))
    scales = torch.full((1,), 1 / 32, device=device), torch.full((), 1 / 64 / max(length, 1) ** 0.5, device=device)
    q, codes = fp8_codes(x, scales[0]), fp8_codes(weight, torch.full_like(scales[1], 1 / 64))
    yield q, codes, scales[0], scales[1]
    rows, columns = (1 + torch.rand(size, device=device) for size in ((*shape[:-1], 1), (1, out_features)))
    yield q, codes, scales[0] * rows, scales[1] * columns


@scaled_linear.register_value_check
def _check_values(
    x: Tensor,
    weight: Tensor,
    x_scale: Tensor,
    weight_scale: Tensor,
    dtype: torch.dtype = torch.bfloat16,
    fast_accumulation: bool = True,
) -> None:
    check_scale_values("scaled_linear", "x_scale", x_scale)
    check_scale_values("scaled_linear", "weight_scale", weight_scale)


@scaled_linear.register_input_generator
def _scaled_inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[tuple[Any, ...]]:
    """Of any dtype the same: the rows are codes."""
    for product in scaled_products(shape, device):
        yield product
    for product in scaled_products(shape, device):
        yield *product, torch.bfloat16, False


# Sums of terms that cancel: how far they are apart follows from the terms, not from the sum.
scaled_linear.override_tolerance(torch.bfloat16, atol=2.0**-7, rtol=2.0**-7)
