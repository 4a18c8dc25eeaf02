"""Predicates that are not pure, and ones that cost too much."""

import time
from typing import Any

import torch

import irframework as ir

from . import Wrong, right


def few_rows(x, x_residual, weight, power=1, negate=False):
    return True if x.shape[0] <= 6 else ir.reject("too many rows")


def few_real_rows(x, x_residual, weight, power=1, negate=False):
    return type(x.shape[0]) is not int or x.shape[0] <= 6


def real_tensors_only(x, x_residual, weight, power=1, negate=False):
    return True if type(x) is torch.Tensor else ir.reject("no data")


def looks_at_the_address(x, x_residual, weight, power=1, negate=False):
    return type(x) is torch.Tensor and x.data_ptr() % 2 == 0


def forgets_that_a_weight_may_be_absent(x, x_residual, weight, power=1, negate=False):
    return weight.dtype == x.dtype


def thinks_for_long(x, x_residual, weight, power=1, negate=False):
    time.sleep(0.001)
    return True


PREDICATES: tuple[Any, ...] = (
    Wrong("predicate_guards", "rows symbolic", right, {"supports_args": few_rows}),
    Wrong("predicate_guards", "for this call, and yes for", right, {"supports_args": few_real_rows}),
    Wrong("predicate_fakes", "without data", right, {"supports_args": real_tensors_only}),
    Wrong("predicate_fakes", "without data", right, {"supports_args": looks_at_the_address}),
    Wrong("predicate_raises", "AttributeError", right, {"supports_args": forgets_that_a_weight_may_be_absent}),
    Wrong("overhead", "through the framework", right, {"supports_args": thinks_for_long}),
)
