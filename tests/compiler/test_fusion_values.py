"""Which expressions are one value, whatever the words, and which are not. One case per rule."""

import pytest
import torch
from fusion_support import W, X, Y, body_of, fused_in, searched, traced
from torch import Tensor, tanh
from torch.fx.experimental.proxy_tensor import make_fx

from irframework.compiler.call_arguments import number, rows_apart

_aten, _prims = torch.ops.aten, torch.ops.prims
B, D = X.bfloat16(), Y.bfloat16()
N = torch.arange(32).reshape(4, 8)


def halves(x: Tensor) -> Tensor:
    return torch.cat((-x[..., 4:], x[..., :4]), -1)


# Each: what an op is declared with, what a program computes, and the program's inputs.
SAME = {
    "sum": (lambda x, y: tanh(x) + y, lambda x, y: y + tanh(x), X, Y),
    "sum with what comes later": (lambda x, y: tanh(x) + y, lambda x, y: tanh(x) + y.sin(), X, Y),
    "product": (lambda x, y: tanh(x) * y, lambda x, y: y * tanh(x), X, Y),
    "maximum": (lambda x, y: tanh(x).maximum(y), lambda x, y: y.maximum(tanh(x)), X, Y),
    "minimum": (lambda x, y: tanh(x).minimum(y), lambda x, y: y.minimum(tanh(x)), X, Y),
    "equality": (lambda x, y: tanh(x) == y, lambda x, y: y == tanh(x), X, Y),
    "inequality": (lambda x, y: tanh(x) != y, lambda x, y: y != tanh(x), X, Y),
    "copy": (lambda x, y: tanh(x) * y, lambda x, y: tanh(x).clone() * y, X, Y),
    "reshape": (lambda x, w: tanh(x) * w, lambda x, w: tanh(x).view(2, 2, 8) * w, X, W),
    "dimension of one": (lambda x, w: tanh(x) * w, lambda x, w: tanh(x).unsqueeze(0) * w, X, W),
    "reshape before a reduction": (
        lambda x: tanh(x) - tanh(x).mean(-1, keepdim=True),
        lambda x: tanh(x).view(2, 2, 8) - tanh(x).view(2, 2, 8).mean(-1, keepdim=True),
        X,
    ),
    "reshape before halves": (
        lambda x: tanh(x) * halves(tanh(x)),
        lambda x: tanh(x).view(2, 2, 8) * halves(tanh(x).view(2, 2, 8)),
        X,
    ),
    "reshape of the input": (lambda x, w: tanh(x) * w, lambda x, w: tanh(x.view(2, 2, 8)) * w, X, W),
    "reshape before steps of elements": (
        lambda x, w: tanh(x).sin() * w,
        lambda x, w: tanh(x).view(32).sin().view(4, 8) * w,
        X,
        W,
    ),
    "reshape before groups of a row": (
        lambda x: tanh(x).unflatten(-1, (-1, 4)) / tanh(x).unflatten(-1, (-1, 4)).amax(-1, keepdim=True),
        lambda x: tanh(x).view(4, 2, 4) / tanh(x).view(4, 2, 4).amax(-1, keepdim=True),
        X.view(2, 2, 8),
    ),
    "bits of reshaped groups": (
        lambda x: tanh(x).unflatten(-1, (-1, 4)).amax(-1, keepdim=True).view(torch.int32) + 1,
        lambda x: tanh(x).view(4, 2, 4).amax(-1, keepdim=True).view(torch.int32) + 1,
        X.view(2, 2, 8),
    ),
    "neighbours in a reshaped row": (
        lambda x: tanh(x).unflatten(-1, (-1, 2))[..., 0] - tanh(x).unflatten(-1, (-1, 2))[..., -1],
        lambda x: tanh(x).view(4, 4, 2)[..., 0] - tanh(x).view(4, 4, 2)[..., 1],
        X.view(2, 2, 8),
    ),
    "conversion to its own dtype": (
        lambda x, y: tanh(x) * y,
        lambda x, y: _prims.convert_element_type(tanh(x), torch.float32) * y,
        X,
        Y,
    ),
    "conversion before what rounds nothing": (
        lambda x, y: tanh(x).abs().float() * y,
        lambda x, y: tanh(x).float().abs() * y,
        B,
        Y,
    ),
    "largest of a row": (
        lambda x, y: tanh(x).amax(-1, keepdim=True).float() * y,
        lambda x, y: tanh(x).float().amax(-1, keepdim=True) * y,
        B,
        Y,
    ),
    "whole slice": (lambda x, y: tanh(x) * y, lambda x, y: _aten.slice.Tensor(tanh(x), 1, 0, 8) * y, X, Y),
    "slice from the end": (lambda x, y: tanh(x[..., 4:]) * y, lambda x, y: tanh(x[..., -4:8]) * y, X, Y[:, :4]),
    "slice beyond the end": (
        lambda x, y: tanh(x[..., 4:8]) * y,
        lambda x, y: tanh(_aten.slice.Tensor(x, 1, 4, 2**63 - 1)) * y,
        X,
        Y[:, :4],
    ),
    "split": (
        lambda x: tanh(x[..., : x.shape[-1] // 2]) * x[..., x.shape[-1] // 2 :],
        lambda x: tanh(x.chunk(2, -1)[0]) * x.split([4, 4], -1)[1],
        X,
    ),
    "expansion to its own shape": (lambda x, y: tanh(x) * y, lambda x, y: _aten.expand(tanh(x), [4, 8]) * y, X, Y),
    "product with one": (lambda x, y: tanh(x) * y, lambda x, y: (tanh(x) * 1.0) * y, X, Y),
    "square": (lambda x, y: tanh(x).pow(2) * y, lambda x, y: tanh(x) * tanh(x) * y, X, Y),
    "dimension from the start": (
        lambda x: tanh(x) - tanh(x).sum(-1, keepdim=True),
        lambda x: tanh(x) - tanh(x).sum(1, keepdim=True),
        X,
    ),
    "tensor full of a number": (
        lambda x, y: tanh(x) * 3.0 - y,
        lambda x, y: tanh(x) * _aten.full([4, 8], 3.0) - y,
        X,
        Y,
    ),
    "one number with a dimension": (
        lambda x, s: tanh(x) * (s + 1).sin(),
        lambda x, s: tanh(x) * (s + 1).view(()).sin().view(1),
        X,
        W[:1],
    ),
    "whole number": (lambda x, y: tanh(x) * 2.0 - y, lambda x, y: tanh(x) * 2 - y, X, Y),
    "number that is none": (lambda x, y: tanh(x) + float("nan") * y, lambda x, y: tanh(x) + float("nan") * y, X, Y),
}

OTHER = {
    "difference": (lambda x, y: tanh(x) - y, lambda x, y: y - tanh(x), X, Y),
    "quotient": (lambda x, y: tanh(x) / y, lambda x, y: y / tanh(x), X, Y),
    "reshape that cuts rows": (
        lambda x: tanh(x).mean(-1, keepdim=True),
        lambda x: tanh(x).view(8, 4).mean(-1, keepdim=True),
        X,
    ),
    "reshape that cuts columns": (
        lambda x: tanh(x) - tanh(x).mean(0, keepdim=True),
        lambda x: tanh(x).view(2, 2, 8) - tanh(x).view(2, 2, 8).mean(0, keepdim=True),
        X,
    ),
    "rounding": (
        lambda x, y: tanh(x).bfloat16().float() * y,
        lambda x, y: tanh(x) * y,
        X,
        Y,
    ),
    "no rounding": (
        lambda x, y: tanh(x) * y,
        lambda x, y: tanh(x).bfloat16().float() * y,
        X,
        Y,
    ),
    "conversion of whole numbers": (
        lambda x, y: (x + x).abs().float() * tanh(y),
        lambda x, y: (x + x).float().abs() * tanh(y),
        torch.tensor([[-64, 5]], dtype=torch.int8),
        torch.tensor([[1.0, 2.0]]),
    ),
    "conversion to whole numbers": (
        lambda x, y: (-tanh(x)).to(torch.uint8) + y,
        lambda x, y: -tanh(x).to(torch.uint8) + y,
        B,
        N.to(torch.uint8),
    ),
    "other half": (lambda x, y: tanh(x[..., :4]) * y, lambda x, y: tanh(x[..., 4:]) * y, X, Y[:, :4]),
    "half of the rows": (lambda x, y: tanh(x[:2]) * y, lambda x, y: tanh(x[2:]) * y, X, Y[:2]),
    "every third column": (lambda x, y: tanh(x[..., :4:2]) * y, lambda x, y: tanh(x[..., :4:3]) * y, X, Y[:, :2]),
    "whole number times one": (
        lambda x, y: (x * 1.0).eq(y) * tanh(y),
        lambda x, y: x.eq(y) * tanh(y),
        N + 2**24,
        N + 2**24,
    ),
    "sum without its dimension": (
        lambda x, y: tanh(x).sum(0) * y,
        lambda x, y: tanh(x).sum(-1) * y,
        X[:, :4],
        Y[:, :4],
    ),
    "other output": (
        lambda x, y: torch.var_mean(tanh(x), -1, keepdim=True)[0] * y,
        lambda x, y: torch.var_mean(tanh(x), -1, keepdim=True)[1] * y,
        X,
        Y,
    ),
    "negative zero": (lambda x, y: tanh(x) / 0.0 + y, lambda x, y: tanh(x) / -0.0 + y, X, Y),
    "large whole number": (lambda x, y: (x + (2**53 + 1)) * y.abs(), lambda x, y: (x + 2**53) * y.abs(), N, N),
    "narrower result": (lambda x, y: (tanh(x) * y).bfloat16(), lambda x, y: tanh(x) * y, X, Y),
    "other constant": (lambda x, y: tanh(x) * 2.0 - y, lambda x, y: tanh(x) * 2.5 - y, X, Y),
    "tensor full of a narrow number": (
        lambda x, y: tanh(x) * 0.1 - y,
        lambda x, y: tanh(x) * _aten.full([4, 8], 0.1, dtype=torch.bfloat16) - y,
        X,
        Y,
    ),
    "tensor full of a number that it rounds": (
        lambda x, y: tanh(x) * 0.1 - y,
        lambda x, y: tanh(x) * _aten.full([4, 8], 0.1, dtype=torch.bfloat16) - y,
        B,
        D,
    ),
    "rounding to the other dtype": (
        lambda x, y: tanh(x).bfloat16().float() * y,
        lambda x, y: tanh(x).half().float() * y,
        X,
        Y,
    ),
    "sum of the other dtype": (
        lambda x: tanh(x) - tanh(x).sum(-1, keepdim=True),
        lambda x: tanh(x) - tanh(x).sum(-1, keepdim=True, dtype=torch.float64),
        X,
    ),
}


def found(fused, body, program, *inputs) -> int:
    op = fused(body_of(body))
    return searched(program, *inputs).fusions.get(op.name, 0)


@pytest.mark.parametrize("what", SAME)
def test_the_same_value_is_known_in_other_words(fused, what):
    assert found(fused, *SAME[what]) == 1


@pytest.mark.parametrize("what", OTHER)
def test_another_value_is_another(fused, what):
    assert found(fused, *OTHER[what]) == 0


@pytest.mark.parametrize("bounds", [{"min": -0.5, "max": 0.5}, {"max": 0.5}], ids=str)
def test_bounds_are_known_in_a_graph_that_is_not_decomposed(fused, bounds):
    op = fused(body_of(lambda x, y: tanh(x).clamp(**bounds) * y))
    module = make_fx(lambda x, y: tanh(x).clamp(**bounds) * y, tracing_mode="fake")(X, Y)
    assert "clamp.default" in str(module.graph)
    assert fused_in(module).fusions == {op.name: 1}


def test_two_draws_are_two_values(fused):
    op = fused(body_of(lambda x, y: tanh(x + y) * x))
    module = traced(lambda y: tanh(torch.rand_like(y) + y) * torch.rand_like(y), Y)
    assert fused_in(module).fusions.get(op.name, 0) == 0


@pytest.mark.parametrize(
    ("own", "shape", "apart"),
    [
        ((2, 3, 256), (6, 4, 64), (2, 3, 4, 64)),
        ((2, 3, 4, 64), (6, 256), (2, 3, 256)),
        ((2, 3, 16, 16), (6, 128, 2), (2, 3, 128, 2)),
        ((2, 3, 256), (6, 256), (2, 3, 256)),
        ((2, 3, 4), (4, 6), (4, 6)),
        ((number(torch.inf), 8), (number(torch.inf), 2, 4), (number(torch.inf), 2, 4)),
        ((4, number(torch.inf)), (2, 2, 4), (4, number(torch.inf))),
        ((), (1, 1), ()),
        ((0, 8), (0, 2, 4), (0, 2, 4)),
    ],
    ids=str,
)
def test_rows_stand_apart_as_far_behind_as_their_shape_needs(own, shape, apart):
    assert rows_apart(own, shape) == apart
