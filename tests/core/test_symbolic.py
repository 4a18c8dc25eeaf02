"""Predicates under symbolic shapes, and what is known of symbolic places."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import irframework as ir
from irframework import errors
from irframework.dispatch import resolve
from irframework.symbolic import starts_at_multiple


def symbolic(env, *sizes):
    """A fake tensor whose first size is a symbol."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    mode = FakeTensorMode(shape_env=env)
    dynamic = [DimDynamic.DYNAMIC, *(DimDynamic.STATIC for _ in sizes[1:])]
    context = StatelessSymbolicContext(dynamic_sizes=dynamic)
    return mode.from_tensor(torch.ones(sizes), source=ConstantSource("x"), symbolic_context=context)


def decide(op, x):
    return resolve(op, op.bind((x,)), mode="inductor").provider


def test_predicate_may_look_at_everything_but_the_batch(declare):
    op, env = declare(), ShapeEnv()
    conditions = ir.supports(
        dtype=torch.float32, ndim=2, contiguous=("x",), row_contiguous=("x",), multiple_of={"x": 8}, max_last_dim=64
    )
    op.register_impl("p", supports_args=conditions & (lambda x, weight=None, epsilon=1e-6: x.shape[1] == 16))(
        lambda x, weight=None, epsilon=1e-6: x
    )
    assert decide(op, symbolic(env, 5, 16)) == "p"
    assert decide(op, symbolic(env, 5, 12)) == "native"
    assert not env.guards


@pytest.mark.parametrize(
    "look",
    [
        lambda x: x.shape[0] == 5,
        lambda x: x.shape[0] % 4 == 0,
        lambda x: x.numel() > 100,
        lambda x: int(x.shape[0]) > 0,
        lambda x: x.shape[0] > 8,
    ],
)
def test_predicate_that_looks_at_the_batch_is_an_error_that_names_it(declare, look):
    op = declare()
    op.register_impl("curious", supports_args=lambda x, weight=None, epsilon=1e-6: bool(look(x)))(
        lambda x, weight=None, epsilon=1e-6: x
    )
    with pytest.raises(errors.PredicateGuardError, match=rf"'curious' of op '{op.name}'.*batch size"):
        decide(op, symbolic(ShapeEnv(), 5, 16))


def test_condition_that_looks_at_the_batch_is_an_error_too(declare):
    op = declare()
    op.register_impl("curious", supports_args=ir.supports(max_last_dim=8))(lambda x, weight=None, epsilon=1e-6: x)
    with pytest.raises(errors.PredicateGuardError, match="curious"):
        decide(op, symbolic(ShapeEnv(), 5))


def test_what_compiled_code_is_asked_for_must_not_look_at_a_symbolic_batch(declare):
    op = declare()
    op.register_impl("curious", compiled_where=lambda x: x.shape[0] > 4)(lambda x, weight=None, epsilon=1e-6: x)
    with pytest.raises(errors.PredicateGuardError, match=r"compiled_where of .*'curious'"):
        decide(op, symbolic(ShapeEnv(), 5, 16))


@pytest.mark.skipif(not hasattr(ShapeEnv, "error_on_new_guards"), reason="torch 2.11 cannot freeze a shape environment")
def test_frozen_shape_environment_is_not_taken_for_a_rejection(declare):
    op, env = declare(), ShapeEnv()
    op.register_impl("curious", supports_args=lambda x, weight=None, epsilon=1e-6: x.shape[0] > 8)(
        lambda x, weight=None, epsilon=1e-6: x
    )
    x = symbolic(env, 5, 16)
    with env.error_on_new_guards(), pytest.raises(errors.PredicateGuardError, match="curious"):
        decide(op, x)


def test_where_a_tensor_starts():
    x = torch.zeros(64, dtype=torch.bfloat16)
    assert [starts_at_multiple(x[start:], 16) for start in (0, 4, 8, 12, 16)] == [True, False, True, False, True]
    assert starts_at_multiple(x[4:], 8)


def test_dynamo_does_not_know_where_a_tensor_starts():
    seen = []

    def look(x):
        seen.append(starts_at_multiple(x, 16))
        return x + 1

    torch.compile(look, backend="eager", fullgraph=True)(torch.zeros(64))
    assert seen == [False]


def test_only_a_run_can_tell_where_a_tensor_starts():
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env):
        x = torch.empty(64).narrow(0, env.create_unbacked_symint(), 4)
        assert not starts_at_multiple(x, 16)
    assert not env.guards
