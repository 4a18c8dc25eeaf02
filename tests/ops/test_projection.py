"""Linear layers, the embedding of a vocabulary and logits: against float64, and the parts of a vocabulary's owners."""

import pytest
import torch
import torch.nn.functional as F
from op_checks import DTYPES, check_compiled, check_compiled_gradients, check_derivatives, close, f64

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("natively")

NAMES = ("linear", "vocab_parallel_embedding", "logits")
SHAPES = ((1, 1), (3, 33), (2, 3, 96), (0, 64), (4, 0, 8), (7,))


def exact_linear(x, weight, bias=None):
    y = (x.double().unsqueeze(-2) * weight.double()).sum(-1)
    return y if bias is None else y + bias.double()


# --- linear ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [True, False])
def test_linear_is_exact_to_roundings(shape, dtype, biased):
    x, weight = torch.randn(shape).to(dtype), torch.randn(5, shape[-1]).to(dtype)
    bias = torch.randn(5).to(dtype) if biased else None
    close(ir.ops.linear(x, weight, bias), exact_linear(x, weight, bias), dtype, ulps=32)
    torch.testing.assert_close(ir.ops.linear(x, weight, bias), F.linear(x, weight, bias))


@pytest.mark.parametrize("name", ["linear", "logits"])
@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"x": torch.ones(2, 4).long()}, "'x' must have a floating-point"),
        ({"x": torch.ones(())}, "scalar"),
        ({"x": torch.ones(2, 5)}, "'weight' must be a matrix with rows as long as those of 'x', 5"),
        ({"weight": torch.ones(6, 4).half()}, "'weight' has dtype torch.float16"),
        ({"weight": torch.ones(4)}, "'weight' must be a matrix"),
        ({"weight": torch.ones(2, 6, 4)}, "'weight' must be a matrix"),
        ({"bias": torch.ones(6).half()}, "'bias' has dtype torch.float16"),
        ({"bias": torch.ones(5)}, "'bias' must be a vector as long as 'weight' has rows, 6"),
        ({"bias": torch.ones(6, 1)}, "'bias' must be a vector"),
    ],
)
def test_projections_name_the_argument_that_does_not_fit(name, wrong, problem):
    good = {"x": torch.ones(2, 4), "weight": torch.ones(6, 4), "bias": torch.ones(6)}
    getattr(ir.ops, name)(**good)
    with pytest.raises(errors.ArgumentError, match=f"{name}.*{problem}"):
        getattr(ir.ops, name)(**good | wrong)


# --- vocabulary ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("lead", [(7,), (2, 3), (0,), ()])
def test_the_embedding_of_a_whole_vocabulary_is_torchs(dtype, ids_dtype, lead):
    ids, weight = torch.randint(0, 11, lead, dtype=ids_dtype), torch.randn(11, 6).to(dtype)
    assert torch.equal(ir.ops.vocab_parallel_embedding(ids, weight), F.embedding(ids, weight))


@pytest.mark.parametrize("padding", [0, 3])
def test_the_parts_of_a_vocabulary_sum_up_to_the_whole(padding):
    table, ids = torch.randn(12, 6), torch.arange(12).view(3, 4)
    rows = torch.full((padding, 6), float("nan"))  # padding is never read
    parts = [
        ir.ops.vocab_parallel_embedding(ids, torch.cat((table[start:end], rows)), start, end)
        for start, end in ((0, 5), (5, 10), (10, 12))
    ]
    assert torch.equal(sum(parts), table[ids])


def test_ids_of_others_give_zeros_whatever_the_weight_holds():
    weight = torch.full((4, 3), float("nan"))
    ids = torch.tensor([3, 8, -1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    assert torch.equal(ir.ops.vocab_parallel_embedding(ids, weight, 4), torch.zeros(5, 3))


def test_a_process_may_hold_padding_only():
    got = ir.ops.vocab_parallel_embedding(torch.tensor([0, 9]), torch.ones(4, 3), 10, 10)
    assert torch.equal(got, torch.zeros(2, 3))


def test_only_rows_that_were_looked_up_have_a_gradient():
    weight = torch.randn(4, 3, requires_grad=True)
    ir.ops.vocab_parallel_embedding(torch.tensor([5, 5, 0, 9]), weight, 4).sum().backward()
    assert weight.grad.tolist() == [[0] * 3, [2] * 3, [0] * 3, [0] * 3]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"ids": torch.ones(2)}, "'ids' must be int32 or int64"),
        ({"ids": torch.ones(2, dtype=torch.int16)}, "'ids' must be int32 or int64"),
        ({"weight": torch.ones(4, 3).long()}, "'weight' must have a floating-point"),
        ({"weight": torch.ones(4)}, "'weight' must be a matrix"),
        ({"weight": torch.ones(0, 3)}, "'weight' must be a matrix with at least one row"),
        ({"start": -1}, "start=-1"),
        ({"start": 5, "end": 4}, "start=5 and end=4"),
        ({"start": 2, "end": 7}, "start=2 and end=7 .*not longer than 'weight' has rows, 4"),
        ({"end": 4, "vocab_size": 3}, "end=4 is more than vocab_size=3"),
    ],
)
def test_the_embedding_names_the_argument_that_does_not_fit(wrong, problem):
    good = {"ids": torch.tensor([1, 2]), "weight": torch.ones(4, 3)}
    with pytest.raises(errors.ArgumentError, match=problem):
        ir.ops.vocab_parallel_embedding(**good | wrong)


@pytest.mark.parametrize("wrong", [-1, 12, 2**40])
def test_ids_outside_a_vocabulary_of_known_size_are_an_error(wrong):
    ids, weight = torch.tensor([3, wrong, 11]), torch.ones(4, 3)
    with pytest.raises(errors.ArgumentError, match=rf"'ids' holds {wrong}; .*0 to 11"):
        ir.ops.vocab_parallel_embedding(ids, weight, 0, 4, 12)


def test_ids_within_a_vocabulary_of_known_size_are_none():
    weight = torch.ones(4, 3)
    assert ir.ops.vocab_parallel_embedding(torch.tensor([0, 11]), weight, 0, 4, 12).sum() == 3
    assert ir.ops.vocab_parallel_embedding(torch.tensor([], dtype=torch.int64), weight, 0, 4, 12).shape == (0, 3)


# --- logits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("scale", "soft_cap"), [(1.0, None), (0.25, None), (1.0, 2.0), (-3.0, 0.5)])
def test_logits_are_exact_to_roundings(shape, dtype, scale, soft_cap):
    x, weight, bias = torch.randn(shape).to(dtype), torch.randn(6, shape[-1]).to(dtype), torch.randn(6).to(dtype)
    exact = exact_linear(x, weight, bias)
    if soft_cap is not None:
        exact = soft_cap * torch.tanh(exact / soft_cap)
    got = ir.ops.logits(x, weight, bias, scale, soft_cap)
    close(got, exact * scale, dtype, ulps=64 if soft_cap is None else 256)  # a small cap makes the projection's large


def test_logits_without_numbers_are_the_linear_layer():
    x, weight, bias = torch.randn(3, 8).bfloat16(), torch.randn(5, 8).bfloat16(), torch.randn(5).bfloat16()
    assert torch.equal(ir.ops.logits(x, weight, bias), ir.ops.linear(x, weight, bias))


def test_cap_and_scale_are_rounded_once_and_in_this_order():
    x, weight = torch.randn(64, 8).bfloat16() * 8, torch.randn(5, 8).bfloat16()
    scores = ir.ops.linear(x, weight).double()
    exact = (0.3 * 30 * torch.tanh(scores / 30)).bfloat16()
    assert (ir.ops.logits(x, weight, None, 0.3, 30.0) == exact).float().mean() > 0.99


def test_the_cap_bounds_the_scores():
    x, weight = torch.randn(16, 8) * 1e4, torch.randn(32, 8)
    assert ir.ops.logits(x, weight, None, 1.0, 30.0).abs().max() == 30


def test_columns_of_padding_are_cut_and_never_read():
    x, weight, bias = torch.randn(3, 8), torch.randn(6, 8), torch.randn(6)
    whole = ir.ops.logits(x, weight, bias, 0.5, 3.0)
    weight[4:] = bias[4:] = float("nan")
    got = ir.ops.logits(x, weight, bias, 0.5, 3.0, 4)
    assert got.shape == (3, 4)
    torch.testing.assert_close(got, whole[:, :4])


def test_gathered_parts_are_the_whole_when_they_are_cut_last():
    x, weight = torch.randn(3, 8), torch.randn(12, 8)
    parts = [ir.ops.logits(x, part, None, 0.5, 3.0) for part in weight.chunk(3)]
    torch.testing.assert_close(torch.cat(parts, -1)[:, :10], ir.ops.logits(x, weight, None, 0.5, 3.0, 10))


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"soft_cap": 0.0}, "soft_cap must be more than 0"),
        ({"soft_cap": -1.0}, "soft_cap must be more than 0"),
        ({"soft_cap": float("nan")}, "soft_cap must be more than 0"),
        ({"org_vocab_size": 0}, "org_vocab_size=0 must be between 1 and .* 6"),
        ({"org_vocab_size": 7}, "org_vocab_size=7 must be between 1 and .* 6"),
    ],
)
def test_logits_name_the_number_that_does_not_fit(wrong, problem):
    with pytest.raises(errors.ArgumentError, match=problem):
        ir.ops.logits(torch.ones(2, 4), torch.ones(6, 4), **wrong)


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("linear", lambda: (f64(2, 4), f64(3, 4), f64(3))),
        ("vocab_parallel_embedding", lambda: (torch.tensor([1, 3, 4, 4]), f64(3, 2), 3)),
        ("logits", lambda: (f64(2, 4), f64(4, 4), f64(4), 0.5, 2.0, 3)),
    ],
)
def test_first_and_second_derivatives_are_right(name, make):
    check_derivatives(getattr(ir.ops, name), make())


def test_one_graph_serves_any_number_of_tokens():
    check_compiled(NAMES)


def test_gradients_through_a_graph_are_those_of_eager_mode():
    check_compiled_gradients(NAMES)
