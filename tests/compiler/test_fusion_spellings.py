"""Further spellings of fused ops, and those that compute something else: one fault per test."""

import functools

import pytest
import torch
from fusion_support import X, searched, traced
from torch import Tensor

import irframework as ir
from irframework.compiler import fusable_ops
from irframework.compiler.fusion import fuse
from irframework.compiler.report import Report
from irframework.compiler.spelling_check import wrong_spelling
from irframework.errors import InvalidOpError, SignatureError, SpellingError
from irframework.registry import Transaction, registry


def double(x: Tensor) -> Tensor:
    return torch.tanh(x) + x


def by_exponentials(x: Tensor) -> Tensor:
    e = torch.exp(2 * x)
    return (e - 1) / (e + 1) + x


@pytest.fixture
def spelt(fused):
    """`double` with a second spelling."""
    op = fused(double)
    assert op.register_spelling(by_exponentials) is by_exponentials
    return op


@pytest.mark.parametrize("program", [double, by_exponentials])
def test_a_graph_is_searched_for_every_spelling(spelt, program):
    assert searched(program, X).fusions == {spelt.name: 1}


def test_what_is_fused_is_the_op_with_its_own_outputs(spelt):
    module = traced(by_exponentials, X)
    fuse(module.graph, Report())
    (node,) = [node for node in module.graph.nodes if node.target is spelt.torch_op]
    assert node.meta["val"].shape == X.shape
    torch.testing.assert_close(module(X), double(X))


def test_a_number_is_a_wildcard_in_every_spelling(fused):
    def scaled(x: Tensor, factor: float) -> Tensor:
        return torch.tanh(x) * factor

    def divided(x: Tensor, factor: float) -> Tensor:
        e = torch.exp(-2 * x)
        return factor * ((1 - e) / (1 + e))

    op = fused(scaled)
    op.register_spelling(divided)
    assert searched(lambda x: divided(x, 0.3), X).fusions == {op.name: 1}
    assert searched(lambda x: divided(x, 7.0), X).fusions == {op.name: 1}


def wrong(x: Tensor) -> Tensor:
    return torch.tanh(x) + x * 1.25


def another_dtype(x: Tensor) -> Tensor:
    return (torch.tanh(x) + x).double()


def another_shape(x: Tensor) -> Tensor:
    return double(x)[None]


def two_outputs(x: Tensor) -> tuple[Tensor, Tensor]:
    return double(x), x


def writes_and_returns(x: Tensor) -> Tensor:
    result = double(x)
    x.zero_()
    return result


def fails(x: Tensor) -> Tensor:
    raise ValueError("not today")


@pytest.mark.parametrize(
    ("spelling", "problem"),
    [
        (wrong, "output 0 differs by up to [0-9.]+ "),
        (another_dtype, "it returns float64.*and the op float32"),
        (another_shape, r"it returns float32\[1, "),
        (two_outputs, "it returns float32.*, float32.* and the op float32"),
        (fails, "raises ValueError: not today"),
    ],
)
def test_a_wrong_spelling_is_an_error_of_its_own(fused, spelling, problem):
    op = fused(double)
    op.register_spelling(spelling)
    with pytest.raises(SpellingError, match=problem) as raised:
        searched(double, X)
    line = spelling.__code__.co_firstlineno
    assert f"test_fusion_spellings.py:{line} of op '{op.name}' ({op.source})" in str(raised.value)


def test_the_largest_difference_is_told(fused):
    op = fused(double)
    op.register_input_generator(lambda shape, dtype, device: (torch.full(shape, -4.0, dtype=dtype),))
    op.register_spelling(wrong)
    with pytest.raises(SpellingError, match="differs by up to 1 "):
        searched(double, X)


def test_a_spelling_that_is_right_in_float32_only_is_wrong(fused):
    def precise(x: Tensor) -> Tensor:
        return torch.exp(x.float()).square().square().square().to(x.dtype)

    def rounding(x: Tensor) -> Tensor:
        return torch.exp(x).square().square().square()

    op = fused(precise)
    op.register_spelling(rounding)
    with pytest.raises(SpellingError, match="for bfloat16 arguments"):
        searched(double, X)


@pytest.mark.parametrize("spelling", [wrong, writes_and_returns])
def test_a_wrong_spelling_of_a_plugin_leaves_the_op_as_it_was(fused, caplog, spelling):
    op = fused(double)
    with registry.registering(Transaction("acme")):
        op.register_spelling(spelling)
    assert searched(double, X).fusions == {op.name: 1}
    assert f"{op.name}:spelling of plugin acme is left out of fusion: " in caplog.text


def test_a_wrong_spelling_of_the_programs_for_a_plugins_op_is_an_error(fused):
    op = fused(double, plugin="acme")
    op.register_spelling(wrong)
    with pytest.raises(SpellingError):
        searched(double, X)


@pytest.mark.parametrize("name", [name for name in ir.ops.__all__ if getattr(ir.ops, name).spellings])
def test_every_spelling_of_a_standard_op_computes_the_op(name):
    op = getattr(ir.ops, name)
    assert [wrong_spelling(op, spelling) for spelling in op.spellings] == [None] * len(op.spellings)


def bent(x: Tensor) -> Tensor:
    return torch.tanh(x)


def test_kernels_of_ops_inside_a_spelling_are_not_looked_at(fused, declare):
    inner = declare(bent)
    inner.register_impl("coarse")(lambda x: (torch.tanh(x) * 8).round() / 8)

    def with_an_op(x: Tensor) -> Tensor:
        return inner(x) + x

    op = fused(double)
    op.register_spelling(with_an_op)
    with ir.priority({inner.name: ["coarse"]}):
        assert searched(double, X).fusions == {op.name: 1}


def test_a_spelling_has_the_ops_signature(fused):
    op = fused(double)
    with pytest.raises(SignatureError, match="The spelling"):
        op.register_spelling(lambda y: y)


def test_only_fused_ops_have_spellings(declare):
    op = declare()
    with pytest.raises(InvalidOpError, match="not declared with fuse"):
        op.register_spelling(op.native)


def test_a_spelling_that_is_no_function_is_an_error(fused):
    with pytest.raises(InvalidOpError, match="expects a function"):
        fused(double).register_spelling(3)


def test_a_spelling_of_a_plugin_that_fails_is_taken_back(fused):
    op = fused(double)
    transaction = Transaction("late")
    with registry.registering(transaction):
        op.register_spelling(by_exponentials)
    transaction.roll_back()
    assert op.spellings == ()


def test_a_spelling_is_in_the_digest_of_the_op(fused):
    from irframework.digest import digest_of_op

    op = fused(double)
    before = digest_of_op(op)
    op.register_spelling(by_exponentials)
    assert digest_of_op(op) != before


def test_a_spelling_is_derived_again_with_the_op(spelt):
    first = fusable_ops.skeletons_of(spelt, set())
    assert fusable_ops.skeletons_of(spelt, set()) is first
    spelt.register_spelling(functools.wraps(double)(lambda x: x + torch.sinh(x) / torch.cosh(x)))
    assert len(fusable_ops.skeletons_of(spelt, set())) == len(first) + 1
