"""Right once, wrong again: not deterministic, not batch invariant, not safe in threads or on streams, not traceable."""

import itertools
import time
from typing import Any

import torch

import irframework as ir

from . import Wrong, right

_calls = itertools.count()


def not_deterministic(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    return y * (1 + 1e-6 * (next(_calls) % 2)), r


def depends_on_the_batch(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    return (y * (1 + 1e-6) if x.shape[0] > 8 else y), r


class Scratch:
    memory: Any = torch.empty(0)


def shares_its_scratch(x, x_residual, weight, power=1, negate=False):
    if type(x) is not torch.Tensor:
        return right(x, x_residual, weight, power, negate)
    y, r = right(x, x_residual, weight, power, negate)
    Scratch.memory = y
    time.sleep(1e-4)
    return Scratch.memory.clone() if Scratch.memory.shape == y.shape else y, r


def hides_a_write_from_the_compiler(x, x_residual, weight, power=1, negate=False):
    State.calls.add_(1)
    return right(x, x_residual, weight, power, negate)


class State:
    calls = torch.zeros(1)


library = torch.library.Library("wrong_providers", "DEF")
library.define("mutates(Tensor x) -> Tensor")
library.impl("mutates", lambda x: x.add_(1).sub(1), "CompositeExplicitAutograd")
torch.library.register_fake("wrong_providers::mutates", torch.empty_like, lib=library)
library.define("twice(Tensor x) -> Tensor")
library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
torch.library.register_fake("wrong_providers::twice", torch.empty_like, lib=library)
ir.define_out_variant(library, "twice")
library.impl("twice.out", lambda x, out: out.zero_() and None, "CompositeExplicitAutograd")


def has_an_op_with_a_wrong_schema(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    torch.ops.wrong_providers.mutates(r.clone())
    return y, r


def has_a_wrong_out_overload(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    return y, torch.ops.wrong_providers.twice(r) / 2


# --- on CUDA ------------------------------------------------------------------------------------------------------


def waits_for_the_device(x, x_residual, weight, power=1, negate=False):
    y, r = right(x, x_residual, weight, power, negate)
    if type(x) is torch.Tensor:
        torch.cuda.synchronize()
    return y, r


def uses_the_default_stream(x, x_residual, weight, power=1, negate=False):
    if type(x) is not torch.Tensor or torch.cuda.is_current_stream_capturing():
        return right(x, x_residual, weight, power, negate)
    with torch.cuda.stream(torch.cuda.default_stream()):
        return right(x, x_residual, weight, power, negate)


REPETITION: tuple[Any, ...] = (
    Wrong("deterministic", "for the same call", not_deterministic, also=("opcheck",)),
    Wrong("batch_invariant", "of the 300 rows", depends_on_the_batch, {"batch_invariant": True}),
    Wrong("threads", "when 4 threads call it at once", shares_its_scratch),
    Wrong("opcheck", "wrong_providers.mutates", has_an_op_with_a_wrong_schema),
    Wrong("out_overload", "wrong_providers.twice", has_a_wrong_out_overload),
    Wrong("compiled", "writes to a tensor that the implementation closes over", hides_a_write_from_the_compiler),
    Wrong("graph_capture", "in a CUDA graph", waits_for_the_device, cuda=True),
    Wrong("streams", "on a busy stream", uses_the_default_stream, also=("threads",), cuda=True),
)
