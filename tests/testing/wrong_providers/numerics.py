"""Wrong results, for some calls only."""

from typing import Any

import torch

from . import Wrong, right


def wrong_in_one_dtype(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    return (y * 1.25 if x.dtype == torch.bfloat16 else y), r


def wrong_for_odd_lengths(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    if x.shape[-1] % 2:
        y[..., -1] = 0
    return y, r


def wrong_for_strided_rows(x, x_residual, weight, power=1, negate=False):
    if x.dim() == 2 and x.stride(0) > x.shape[1] and x.stride(1) == 1:
        x = x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride(), x.storage_offset())
    return right(x, x_residual, weight, power, negate)


def wrong_for_misaligned_weights(x, x_residual, weight, power=1, negate=False):
    if weight is not None and weight.storage_offset() % 2:
        weight = weight.as_strided(weight.shape, weight.stride(), weight.storage_offset() - 1)
    return right(x, x_residual, weight, power, negate)


def forgets_an_absent_weight(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    return (y if weight is not None else torch.zeros_like(y)), r


def forgets_a_number(x, x_residual, weight, power=1, negate=False):
    return right(x, x_residual, weight, 1, negate)


def forgets_a_switch(x, x_residual, weight, power=1, negate=False):
    return right(x, x_residual, weight, power)


def reads_beside_its_rows(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    if x.numel() and x.storage_offset():
        y[..., 0] += 0 * x.as_strided((1,), (1,), x.storage_offset() - 1)
    return y, r


def drops_nan(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    return y.nan_to_num(0.0), r


def clamps_inf(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    return y, r.clamp(-1e30, 1e30)


def divides_by_the_spread_of_a_row(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    spread = (x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)) if x.numel() else x
    return (y * (spread / spread) if x.numel() and x.shape[-1] > 1 else y), r


NUMERICS: tuple[Any, ...] = (
    Wrong("values", "x=bfloat16", wrong_in_one_dtype, also=("special_values",)),
    Wrong("values", "x=float32[3, 33]", wrong_for_odd_lengths),
    Wrong("values", "rows apart", wrong_for_strided_rows),
    Wrong("values", "off by one element", wrong_for_misaligned_weights),
    Wrong("values", "weight=None", forgets_an_absent_weight),
    Wrong("values", "power=2", forgets_a_number),
    Wrong("values", "negate=True", forgets_a_switch),
    Wrong("values", "tensors in a larger storage", reads_beside_its_rows, also=("special_values",)),
    Wrong("special_values", "with NaN", drops_nan),
    Wrong("special_values", "with inf", clamps_inf),
    Wrong("special_values", "with zeros", divides_by_the_spread_of_a_row, also=("values",)),
)
