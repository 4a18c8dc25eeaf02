"""Lowering: one trace per distinct call, the contract of implementations, nested ops."""

from collections import Counter

import pytest
import torch
from compiler_support import lowered, report, run, tensors
from torch import Tensor

import irframework as ir
from irframework.errors import ImplementationContractError, LoweringError


def cause(error, kind):
    while error is not None and not isinstance(error, kind):
        error = error.__cause__ or getattr(error, "inner_exception", None)
    assert error is not None, f"no {kind.__name__}"
    return str(error)


def failing(kind, function, *arguments, **options):
    with pytest.raises(Exception) as caught:
        run(function, *arguments, **options)
    return cause(caught.value, kind)


ARGUMENTS = ((4, 8), (4, 8), (8,))


def counting(op, inplace=False):
    traces = Counter()

    @op.register_impl("counted", inplace=inplace)
    def counted(x, factor=2.0):
        traces[factor] += 1
        return x * factor

    return traces


def test_equal_calls_are_traced_once(scale):
    traces = counting(scale)

    def f(x):
        for _ in range(64):
            x = scale(x)
        return x

    run(f, torch.randn(4, 8))
    assert traces == {2.0: 1}


def test_another_number_is_traced_again(scale):
    traces = counting(scale)
    got = run(lambda x: scale(scale(x, 3.0), 2.0), torch.ones(4, 8))
    assert traces == {3.0: 1, 2.0: 1}
    assert got[0, 0] == 6


@pytest.mark.parametrize(
    "other", [torch.randn(8, 4).t(), torch.randn(4, 8).double(), torch.randn(8, 8), torch.randn(4, 16)[:, :8]]
)
def test_another_layout_dtype_or_shape_is_traced_again(scale, other):
    traces = counting(scale)
    run(lambda x, y: (scale(x), scale(y)), torch.randn(4, 8), other)
    assert traces == {2.0: 2}


def test_copies_of_one_trace_share_no_memory(scale):
    @scale.register_impl("wide")
    def wide(x, factor=2.0):
        return torch.cat((x, x), -1)[..., : x.shape[-1]] * factor

    def f(x):
        return scale(x), scale(x + 1), scale(x + 2)

    got = run(f, torch.ones(2, 4))
    assert [t[0, 0].item() for t in got] == [2, 4, 6]


def test_symbolic_sizes_stay_symbolic(add):
    compiled = []

    def backend(module, inputs):
        from compiler_support import lowered

        compiled.append(module)
        return lowered(module, inputs)

    f = torch.compile(lambda x, r, w: add.op(x * 2, r, w), backend=backend, dynamic=True)
    with torch.no_grad(), add.priority("inp"):
        for rows in (3, 5, 9):
            x, r, w = tensors((rows, 8), (rows, 8), (8,))
            torch.testing.assert_close(f(x, r, w), add.op.native(x * 2, r, w))
    assert len(compiled) == 1


def test_a_constant_of_an_implementation_is_carried_into_the_graph(scale):
    table = torch.arange(8.0)

    @scale.register_impl("table")
    def with_table(x, factor=2.0):
        return x * table + torch.tensor(1.0)

    def f(x):
        return scale(x) + scale(x)

    torch.testing.assert_close(run(f, torch.ones(4, 8)), (torch.ones(4, 8) * table + 1) * 2)


@pytest.mark.parametrize("provider", ["native", "inp"])
def test_users_of_the_whole_tuple_are_rewritten(add, provider):
    class Model(torch.nn.Module):
        def forward(self, x, r, w):
            whole = add.op.torch_op(x, r, w)
            return whole + whole, {"whole": whole}

    arguments = tensors(*ARGUMENTS)
    with add.priority(provider):
        twice, named = ir.compiler.lower(torch.fx.symbolic_trace(Model()), arguments)(*arguments)
    want = add.op.native(*arguments)
    torch.testing.assert_close((twice, named["whole"]), (want + want, want))


def test_nested_ops_are_lowered_and_reported(add, scale):
    @scale.register_impl("nest")
    def nest(x, factor=2.0):
        return add.op(x, x, torch.ones_like(x[0]))[1]

    with add.priority("inp"):
        got = run(lambda x: scale(x), torch.ones(4, 8))
    assert got[0, 0] == 2
    assert set(report().selected_impls[add.op.name].values()) == {"inp"}
    assert set(report().selected_impls[scale.name].values()) == {"nest"}


def test_ops_that_call_each_other_without_end_are_an_error(scale):
    other = ir.register_op(name=f"{scale.name}_other")(scale.native)
    scale.register_impl("a")(lambda x, factor=2.0: other(x, factor))
    other.register_impl("b")(lambda x, factor=2.0: scale(x, factor))
    message = failing(LoweringError, lambda x: scale(x), torch.ones(4))
    assert "without end" in message
    assert scale.name in message


def test_an_undeclared_write_is_named(scale):
    @scale.register_impl("liar")
    def liar(x, factor=2.0):
        return x.mul_(factor)

    message = failing(ImplementationContractError, lambda x: scale(x), torch.ones(4))
    assert "'liar'" in message
    assert "overwrites its argument 'x'" in message


@pytest.mark.parametrize("change", [lambda x: x.t_(), lambda x: x.set_(torch.zeros(4, 8))], ids=["t_", "set_"])
def test_an_argument_that_is_given_another_layout_or_memory_is_named(scale, change):
    @scale.register_impl("liar")
    def liar(x, factor=2.0):
        result = x * factor
        change(x)
        return result

    with ir.priority({scale.name: ["liar"]}):
        message = failing(ImplementationContractError, lambda x: scale(x), torch.ones(4, 8))
    assert "overwrites its argument 'x'" in message


def test_a_write_to_what_is_no_activation_is_named(add):
    @add.op.register_impl("greedy", inplace=True)
    def greedy(x, x_residual, weight):
        weight.add_(1)
        return x + x_residual, x - x_residual

    with add.priority("greedy"):
        message = failing(ImplementationContractError, lambda *a: add.op(*a), *tensors(*ARGUMENTS))
    assert "'weight'" in message


def test_a_write_to_a_closed_over_tensor_is_named(add, scale):
    workspace = torch.zeros(4, 8)

    @scale.register_impl("workspace")
    def with_workspace(x, factor=2.0):
        add.kernel(workspace, workspace, x[0])
        return x * factor

    message = _any_failure(lambda x: scale(x), torch.ones(4, 8))
    assert "'workspace'" in message
    assert not workspace.any()


def _any_failure(function, *arguments):
    with pytest.raises(Exception) as caught:
        run(function, *arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda x, factor=2.0: x.double(), "float64"),
        (lambda x, factor=2.0: x.sum(-1), "[4]"),
        (lambda x, factor=2.0: (x * factor, x), "a tuple of 2"),
        (lambda x, factor=2.0: 3, "int"),
    ],
)
def test_a_wrong_result_is_named(scale, wrong, what):
    scale.register_impl("wrong")(wrong)
    message = _any_failure(lambda x: scale(x), torch.ones(4, 8))
    assert what in message
    assert "'wrong'" in message


def test_a_wrong_layout_is_repaired_and_named_once(scale, caplog):
    @scale.register_impl("columns")
    def columns(x, factor=2.0):
        return (x * factor).t().contiguous().t()

    with caplog.at_level("WARNING", logger="irframework"):
        got = run(lambda x: scale(scale(x)), torch.ones(4, 8))
    assert got.stride() == (8, 1)
    assert [r.message.count("strides (1, 4)") for r in caplog.records] == [1]


def test_the_stride_of_a_dimension_of_one_element_costs_no_copy(scale, caplog):
    scale.register_impl("odd")(lambda x, factor=2.0: (x * factor).as_strided(x.shape, (8, 5, 1)))
    with caplog.at_level("WARNING", logger="irframework"):
        got = run(lambda x: scale(x), torch.ones(4, 1, 8))
    assert got.shape == (4, 1, 8)
    assert report().clones_inserted == 0
    assert not caplog.records


def test_an_output_that_is_an_input_becomes_a_tensor_of_its_own(scale):
    scale.register_impl("same")(lambda x, factor=2.0: x)
    x = torch.ones(4, 8)
    got = run(lambda x: scale(x), x)
    assert got.data_ptr() != x.data_ptr()


def test_outputs_that_share_memory_are_taken_apart(add):
    @add.op.register_impl("both")
    def both(x, x_residual, weight):
        r = x + x_residual
        return r, r

    with add.priority("both"):
        y, r = run(lambda *a: add.op(*a), *tensors(*ARGUMENTS))
    assert y.data_ptr() != r.data_ptr()


def test_in_place_implementations_get_contiguous_activations(add):
    seen = []

    @add.op.register_impl("strict", inplace=True)
    def strict(x, x_residual, weight):
        seen.append((x.is_contiguous(), x_residual.is_contiguous()))
        add.kernel(x, x_residual, weight)
        return x, x_residual

    x, r, w = torch.randn(8, 4).t(), torch.randn(4, 16)[:, :8], torch.randn(8)
    with add.priority("strict"):
        got = run(lambda *a: add.op(*a), x, r, w)
    torch.testing.assert_close(got, add.op.native(x, r, w))
    assert seen == [(True, True)]


def test_decisions_are_in_the_report(add):
    add.op.register_impl("never", supports_args=lambda x, x_residual, weight: ir.reject("needs luck"))(add.op.native)
    with add.priority("never", "inp"):
        run(lambda *a: add.op(*a), *tensors(*ARGUMENTS))
    (decision,) = report().decisions.values()
    assert decision.provider == "inp"
    assert decision.candidates[0].reason == "needs luck"


def _counts(x, state):
    state.add_(1)
    return x * 2


def _copies(x, state):
    state.copy_(x)
    return x * 2


def _writes_a_row(x, state):
    state[1] = x[0]
    return x * 2


def _writes_out(x, state):
    return torch.mul(x, 2, out=state).clone()


@pytest.mark.parametrize("body", [_counts, _copies, _writes_a_row, _writes_out])
def test_a_torch_op_that_writes_to_a_closed_over_tensor_is_named_and_not_run(scale, body):
    state = torch.zeros(4, 8)
    scale.register_impl("stateful")(lambda x, factor=2.0: body(x, state))
    message = failing(ImplementationContractError, lambda x: scale(x), torch.ones(4, 8))
    assert "'stateful'" in message
    assert "writes to a tensor that the implementation closes over" in message
    assert not state.any()


def test_a_tensor_that_an_implementation_makes_itself_may_be_written(scale):
    @scale.register_impl("own")
    def own(x, factor=2.0):
        y = torch.tensor([1.0, 2.0]).repeat(4)
        y[0] = factor
        return (y * 0 + x).mul_(factor)

    assert (run(lambda x: scale(x), torch.ones(4, 8)) == 2).all()


def test_an_output_that_begins_inside_its_storage_is_repaired_and_named_once(scale, caplog):
    @scale.register_impl("tail")
    def tail(x, factor=2.0):
        return torch.cat((x, x * factor))[x.shape[0] :]

    with caplog.at_level("WARNING", logger="irframework"):
        got = run(lambda x: scale(scale(x)), torch.ones(4, 8))
    assert got.storage_offset() == 0
    assert (got == 4).all()
    messages = [r.message for r in caplog.records]
    assert len(messages) == 1
    assert "'tail'" in messages[0]
    assert "at offset 32 of its storage" in messages[0]


def test_an_op_whose_own_function_returns_a_part_promises_a_tensor_of_its_own():
    def tail(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x * 2))[x.shape[0] :]

    op = ir.register_op(name="tc_tail")(tail)

    def below(x):
        return op(x).as_strided((2, 8), (8, 1), 0)

    assert (run(below, torch.ones(4, 8)) == 2).all()


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (lambda x, x_residual, weight: (x + x_residual,) * 2, "returns output 1 in the memory of output 0"),
        (lambda x, x_residual, weight: (x + x_residual, x), "returns output 1 in the memory of an argument"),
    ],
)
def test_an_output_in_memory_that_is_not_its_own_is_named_once(add, caplog, wrong, what):
    add.op.register_impl("sharing")(wrong)
    with add.priority("sharing"), caplog.at_level("WARNING", logger="irframework"):
        for _ in range(2):
            run(lambda *a: add.op(*a), *tensors(*ARGUMENTS))
    messages = [r.message for r in caplog.records]
    assert len(messages) == 1
    assert "'sharing'" in messages[0]
    assert what in messages[0]


def test_memory_that_an_in_place_implementation_was_given_may_begin_anywhere(add, caplog):
    x, r = tensors((2, 4, 8), (2, 4, 8))
    expected = add.op.native(x[1], r[1], torch.ones(8))
    with add.priority("inp"), caplog.at_level("WARNING", logger="irframework"):
        got = run(lambda x, r, w: add.op.maybe_inplace(x[1], r[1], w), x, r, torch.ones(8))
    torch.testing.assert_close(got, expected)
    assert got[0].data_ptr() == x[1].data_ptr()
    assert not caplog.records


@pytest.fixture
def pick(declare):
    """An op that takes a list of tensors and a list of numbers, and returns a list."""

    def native(x: Tensor, others: list[Tensor], sizes: list[int]) -> list[Tensor]:
        return [(x + other).reshape(sizes) for other in others]

    return declare(native, allow_inplace=True)


@pytest.mark.parametrize("backend", [lowered, "irframework"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_what_stands_in_a_list_is_an_argument_like_others(pick, dynamic, backend):
    def f(x, y):
        return pick(x, [y, x * 2, y], [x.shape[0] * 2, 4])

    compiled = torch.compile(f, backend=backend, dynamic=dynamic)
    for rows in (4, 6):
        x, y = tensors((rows, 8), (rows, 8))
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, y), f(x, y))


def test_a_write_to_an_item_of_a_list_is_named(pick):
    @pick.register_impl("greedy", inplace=True)
    def greedy(x, others, sizes):
        others[1].add_(x)
        return pick.native(x, others, sizes)

    with ir.priority({pick.name: ["greedy"]}):
        message = failing(
            ImplementationContractError, lambda x, y: pick.maybe_inplace(x, [x * 1, y], [8]), *tensors((8,), (8,))
        )
    assert "overwrites its argument 'others'" in message
