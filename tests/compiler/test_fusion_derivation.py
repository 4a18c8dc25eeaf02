"""For which graphs an op's definition is derived, of which calls, and when anew. One fault per test."""

import os

import pytest
import torch
from fusion_support import W, X, Y, body_of, calls_of, fused_in, searched, traced
from torch import Tensor, tanh

import irframework as ir
from irframework.compiler import definitions, fusable_ops
from irframework.compiler.skeletons import derive
from irframework.registry import Transaction, registry

CODES = torch.float8_e4m3fn


def gated(x: Tensor, y: Tensor) -> Tensor:
    return tanh(x) * y


def pairs(shape, **options):
    """Generates calls of two tensors."""
    return torch.ones(shape, **options), torch.ones(shape, **options)


@pytest.fixture
def derived(monkeypatch):
    """The names of the ops that are derived."""
    names: list[str] = []
    derive = fusable_ops.derive
    monkeypatch.setattr(fusable_ops, "derive", lambda op, *rest: names.append(op.name) or derive(op, *rest))
    return names


# --- for which graphs ----------------------------------------------------------------------------------------------


def test_a_definition_is_derived_once_for_graphs_that_could_hold_it(fused, derived):
    op = fused(gated)
    op.register_input_generator(pairs)
    searched(lambda x, y: x.sin() * y, X, Y)
    assert op.name not in derived
    searched(gated, X, Y)
    searched(gated, X, Y)
    assert derived.count(op.name) == 1


def test_an_op_that_a_body_calls_must_be_there(fused, declare, derived):
    inner = declare(body_of(lambda x: x * 2))
    op = fused(body_of(lambda x, y: inner(x) * y))
    op.register_input_generator(pairs)
    searched(gated, X, Y)
    assert op.name not in derived


def test_codes_must_be_there(fused, derived):
    op = fused(body_of(lambda x, y: (tanh(x) * y).to(CODES)))
    op.register_input_generator(pairs)
    searched(gated, X, Y)
    assert op.name not in derived
    module = traced(lambda x, y: (tanh(x) * y).to(CODES), X, Y)
    assert fused_in(module).fusions == {op.name: 1}


@pytest.mark.parametrize(
    "body",
    [lambda x, y: torch.nn.functional.hardsigmoid(x) * y, lambda x, y: tanh(x).pow(2) * y],
    ids=["decomposed", "square"],
)
def test_what_graphs_spell_otherwise_need_not_be_there(fused, body):
    op = fused(body_of(body))
    op.register_input_generator(pairs)
    assert searched(body, X, Y).fusions == {op.name: 1}


def test_a_body_may_work_in_place_on_what_it_made(fused):
    op = fused(body_of(lambda x, y: tanh(x).mul_(y)))
    op.register_input_generator(pairs)
    assert searched(gated, X, Y).fusions == {op.name: 1}


def test_an_op_stands_for_what_it_is_made_of(fused):
    inner = fused(gated)
    inner.register_fake(body_of(lambda x, y: torch.empty_like(x)))
    inner.register_spelling(body_of(lambda x, y: y * tanh(x)))
    op = fused(body_of(lambda x, y: gated(x, y).sin() if x.dim() > 9 else inner(x, y).sin()))
    op.register_input_generator(pairs)
    assert searched(lambda x, y: inner(x, y).sin(), X, Y).fusions == {op.name: 1}


def test_an_op_that_is_one_is_not_what_it_is_made_of(fused, declare):
    one = declare(gated)
    op = fused(body_of(lambda x, y: (tanh(x) * y).sin()))
    assert op.name not in searched(lambda x, w: one(x.view(2, 2, 8), w).sin(), X, W).fusions


def test_an_op_with_a_shape_function_and_spellings_is_not_looked_into(fused):
    traced_with: list[Tensor] = []

    def long_gate(x: Tensor, y: Tensor) -> Tensor:
        traced_with.extend(each for each in (x, y) if type(each) is not Tensor)
        return tanh(x) * y

    op = fused(long_gate)
    op.register_input_generator(pairs)
    op.register_fake(body_of(lambda x, y: torch.empty_like(x)))
    op.register_spelling(body_of(lambda x, y: y * tanh(x)))
    assert searched(lambda x, y: op(x, y.sin()) + tanh(x) * y, X, Y).fusions == {op.name: 1}
    assert not traced_with


def test_an_op_that_is_not_declared_so_is_not_looked_for(fused):
    op = fused(gated, fuse=False)
    assert op.name not in searched(gated, X, Y).fusions


def test_a_training_graph_is_left_as_it_is(family):
    module = traced(lambda x, b: family.shift(family.half(x), b), X, Y[0])
    with ir.priority({family.half_shift.name: ["k"]}):
        ir.compiler.lower(module, inference=False)
    assert ir.last_report().fusions == {}


# --- of which calls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["with", "without"])
def test_an_optional_tensor_may_be_there_or_not(fused, given):
    def gated_twice(x: Tensor, y: Tensor, z: Tensor | None = None) -> Tensor:
        gate = tanh(x) * y
        return gate if z is None else gate * z

    op = fused(gated_twice)
    module = traced(gated if given == "without" else lambda x, y: tanh(x) * y * y.sin(), X, Y)
    assert fused_in(module).fusions == {op.name: 1}
    (call,) = calls_of(module, op)
    assert [str(argument) for argument in call.args[2:]] == (["sin"] if given == "with" else ["None"])


@pytest.mark.parametrize("whole", [True, False])
def test_a_flag_may_be_set_or_not(fused, whole):
    def gated_or_turned(x: Tensor, y: Tensor, whole: bool) -> Tensor:
        return tanh(x) * y if whole else tanh(x) - y

    op = fused(gated_or_turned)
    assert searched(lambda x, y: gated_or_turned(x, y, whole), X, Y).fusions == {op.name: 1}


def test_a_guess_that_native_refuses_is_no_error_in_the_log(fused, caplog):
    op = fused(body_of(lambda x, y: tanh(x[..., :4]) * y))
    derive(op)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_definition_that_is_too_long_is_not_looked_for(fused, monkeypatch):
    op = fused(gated)
    monkeypatch.setattr(definitions, "_LARGEST", 4)
    assert op.name not in searched(gated, X, Y).fusions


# --- when anew -----------------------------------------------------------------------------------------------------


@pytest.fixture
def declared_again():
    """Declares an op under a name that another one had before."""
    transactions: list[Transaction] = []

    def declare(native):
        for earlier in transactions:
            earlier.roll_back()
        transactions[:] = [Transaction("acme")]
        with registry.registering(transactions[0]):
            op = ir.register_op(name=f"tfd_again_{os.getpid()}", fuse=True)(native)
            op.register_impl("k")(native)
        op.plugin = None
        return op

    yield declare
    transactions[0].roll_back()


def test_an_op_that_is_declared_again_is_derived_again(declared_again):
    op = declared_again(gated)
    assert searched(gated, X, Y).fusions == {op.name: 1}
    op = declared_again(body_of(lambda x, y: x.sin() * y))
    assert searched(lambda x, y: (tanh(x) * y, x.sin() * y), X, Y).fusions == {op.name: 1}
