"""Wrong outputs, whatever their values: layout, dtype, memory, and what is overwritten."""

from typing import Any

import torch

import irframework as ir

from . import Wrong, right, right_in_place


def one_output(x, x_residual, weight, power=1, negate=False):
    return right(x, x_residual, weight, power, negate)[0]


def wrong_dtype(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    return y.float(), r


def wrong_strides(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    return y.transpose(0, -1).contiguous().transpose(0, -1), r


def part_of_a_larger_tensor(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    return torch.cat((r, y))[y.shape[0] :], r


def aliases_an_input(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    return y, r if x_residual.any() else x


def aliases_outputs(x, x_residual, weight, power=1, negate=False):
    both = torch.stack(right(x, x_residual, weight, power, negate))
    return both[0], both[1]


class Kept:
    result: Any = None


def returns_the_same_memory_again(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    if type(x) is not torch.Tensor:
        return y, r
    if Kept.result is None or Kept.result.shape != y.shape or Kept.result.dtype != y.dtype:
        Kept.result = torch.empty_like(y)
    return Kept.result.copy_(y), r


def writes_an_input(x, x_residual, weight, power=1, negate=False):
    result = right(x, x_residual, weight, power, negate)
    x.copy_(result[0]) if x.is_contiguous() else None
    return result


def writes_the_weight_in_place(x, x_residual, weight, power=1, negate=False):
    result = right_in_place(x, x_residual, weight, power, negate)
    if weight is not None:
        weight.add_(1)
    return result


def writes_beside(x, x_residual, weight, power=1, negate=False):
    result = right(x, x_residual, weight, power, negate)
    if x.storage_offset():
        x.as_strided((1,), (1,), x.storage_offset() - 1).fill_(7)
    return result


def _overlap(*tensors):
    known = [tensor.untyped_storage()._cdata for tensor in tensors if tensor is not None]
    return len(set(known)) < len(known)


def takes_what_overlaps(x, x_residual, weight, power=1, negate=False):
    if x.shape != x_residual.shape or _overlap(x, weight) or _overlap(x_residual, weight):
        raise ValueError("refused")
    return right_in_place(x, x_residual, weight, power, negate)


def takes_a_weight_that_overlaps(x, x_residual, weight, power=1, negate=False):
    if x.shape != x_residual.shape or _overlap(x, x_residual) or _overlap(x, weight):
        raise ValueError("refused")
    return right_in_place(x, x_residual, weight, power, negate)


def takes_other_shapes(x, x_residual, weight, power=1, negate=False):
    if _overlap(x, x_residual, weight):
        raise ValueError("refused")
    residual = x_residual if x.shape == x_residual.shape else x_residual[:1].expand_as(x).contiguous()
    return right_in_place(x, residual, weight, power, negate)


def refuses_too_late(x, x_residual, weight, power=1, negate=False):
    kept = x.clone()
    x.add_(x_residual) if x.shape == x_residual.shape else x.zero_()
    if x.shape != x_residual.shape or _overlap(x, x_residual, weight):
        raise ValueError("refused")
    return right_in_place(x.copy_(kept), x_residual, weight, power, negate)


def not_in_place(x, x_residual, weight, power=1, negate=False):
    return right(x, x_residual, weight, power, negate)


def mishandles_zero_tokens(x, x_residual, weight, power=1, negate=False):
    if x.shape[0] == 0 and type(x) is torch.Tensor:
        raise RuntimeError("invalid configuration argument")
    return right(x, x_residual, weight, power, negate)


def says_yes_and_raises(x, x_residual, weight, power=1, negate=False):
    return right(x.view(-1, x.shape[-1]), x_residual.view(-1, x.shape[-1]), weight, power, negate)[0].view(x.shape), (
        x + x_residual
    )


def fake_differs(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    return (y if type(x) is torch.Tensor else y.double()), r


_LOOKING = {
    "inplace": True,
    "checks_tensors": True,
    "supports_args": ir.supports(same_shape=("x", "x_residual")),
}

OUTPUTS: tuple[Any, ...] = (
    Wrong("count", "returns one tensor", one_output),
    Wrong("output", "returns float32[", wrong_dtype),
    Wrong("strides", "with strides", wrong_strides),
    Wrong("offset", "as a part of a larger tensor", part_of_a_larger_tensor),
    Wrong("sharing", "in the memory of output 0", aliases_outputs, also=("offset",)),
    Wrong("sharing", "what an earlier call returned", returns_the_same_memory_again, also=("threads", "fake")),
    Wrong("writes", "overwrites its argument 'x'", writes_an_input),
    Wrong("writes", "'weight', which is no activation", writes_the_weight_in_place, {"inplace": True}),
    Wrong(
        "writes",
        "overwrites its argument 'x'. Register",
        right_in_place,
        {"inplace": True, "functional": right_in_place},
        also=("sharing", "raises", "strides"),
    ),
    Wrong("writes", "beside its argument 'x'", writes_beside),
    Wrong("in_place", "neither overwrites nor returns", not_in_place, {"inplace": True}),
    Wrong("checks_tensors", "takes 'x_residual' in memory of 'x'", takes_what_overlaps, _LOOKING),
    Wrong("checks_tensors", "takes 'weight' in memory of 'x_residual'", takes_a_weight_that_overlaps, _LOOKING),
    Wrong("checks_tensors", "takes 'x' and 'x_residual' of different shapes", takes_other_shapes, _LOOKING),
    Wrong("checks_tensors", "after it has written to 'x'", refuses_too_late, _LOOKING),
    Wrong("raises", "x=float32[0, 64]", mishandles_zero_tokens),
    Wrong("raises", "padded sequences", says_yes_and_raises, also=("fake",)),
    Wrong("fake", "returns float64", fake_differs),
)
