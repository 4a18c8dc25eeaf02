"""Outputs that are None whenever an argument is."""

import pytest
import torch
from torch import Tensor

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("seeded")


def both(query: Tensor, key: Tensor | None, factor: float = 2.0) -> tuple[Tensor, Tensor | None]:
    return query * factor, None if key is None else key * factor


@pytest.fixture
def op(declare):
    return declare(both, activations=("query", "key"), allow_inplace=True, optional_outputs={1: "key"})


def with_empty(query, key, factor=2.0):
    return query * factor, query.new_empty(0) if key is None else key * factor


def test_an_output_is_none_when_its_argument_is(op):
    x = torch.randn(3)
    for _ in range(3):  # first call, dispatcher generated, dispatcher used
        y, nothing = op(x, None)
        assert nothing is None
        assert torch.equal(y, x * 2)
        assert torch.equal(op(x, x)[1], x * 2)


@pytest.mark.parametrize("fn", [both, with_empty])
def test_an_implementation_returns_none_or_an_empty_tensor(op, fn):
    op.register_impl("p")(fn)
    with ir.priority({op.name: ["p"]}):
        for _ in range(3):
            assert op(torch.randn(3), None)[1] is None
        assert op(torch.randn(3), torch.ones(2))[1].tolist() == [2, 2]


def test_maybe_inplace_knows_it_too(op):
    assert op.maybe_inplace(torch.randn(3), None)[1] is None


@pytest.mark.parametrize("backend", ["aot_eager", "irframework"])
def test_so_it_is_compiled(op, backend):
    op.register_impl("p")(with_empty)
    x = torch.randn(3)
    with ir.priority({op.name: ["p"]}):
        compiled = torch.compile(lambda q, k: op(q, k), backend=backend, fullgraph=True)
        assert compiled(x, None)[1] is None
        assert torch.equal(compiled(x, x + 1)[1], (x + 1) * 2)


def test_a_gradient_flows_beside_nothing(op):
    x = torch.randn(3, requires_grad=True)
    y, nothing = op(x, None)
    y.sum().backward()
    assert nothing is None
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_none_in_place_of_a_tensor_that_was_due_is_a_broken_contract(op):
    op.register_impl("p")(lambda query, key, factor=2.0: (query * factor, None))
    with ir.priority({op.name: ["p"]}), pytest.raises(errors.ImplementationContractError, match="'p'"):
        op(torch.randn(3), torch.randn(3))


def test_an_optional_result_must_say_when(declare):
    with pytest.raises(errors.InvalidOpError, match=r"optional_outputs=\{1: \"parameter\"\}"):
        declare(both)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({1: "kye"}, "Did you mean 'key'"),
        ({1: "factor"}, "no parameter annotated"),
        ({0: "key", 1: "key"}, "output 0 may be None"),
        ({"1": "key"}, "must map outputs to parameters"),
        (["key"], "must map outputs to parameters"),
    ],
)
def test_a_wrong_declaration_is_refused(declare, given, words):
    with pytest.raises(errors.InvalidOpError, match=words):
        declare(both, optional_outputs=given)


def test_something_must_be_returned(declare):
    def nothing(x: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        return x, x

    with pytest.raises(errors.InvalidOpError, match="at least one output"):
        declare(nothing, optional_outputs={0: "x", 1: "x"})
