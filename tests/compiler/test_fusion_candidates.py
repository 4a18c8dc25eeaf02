"""Where an op's definition may stand in a graph, and with which arguments. One fault per test."""

import pytest
import torch
from fusion_support import W, X, Y, body_of, calls_of, fused_in, searched, traced
from torch import Tensor, tanh

import irframework as ir
from irframework.compiler import candidates, fusion
from irframework.compiler.definitions import Definitions

B = X.bfloat16()
R = X.flip(0)


def gated(x: Tensor, y: Tensor) -> Tensor:
    return tanh(x) * y


def widened(x, y):
    wide = x.float()
    return tanh(wide) * y, wide


def arguments_of(program, op, *inputs) -> list[list[str]]:
    """The arguments with which an op is found, as they are called in the graph."""
    module = traced(program, *inputs)
    fused_in(module)
    return [[str(argument) for argument in call.args] for call in calls_of(module, op)]


# --- what is not even computed -------------------------------------------------------------------------------------

# Each: a body, a program that has all that it is made of, and the program's inputs.
NEAR = {
    "number": (lambda x, y, factor: tanh(x) * factor - y * factor, lambda x, y: tanh(x) * 2 - y * 3, X, Y),
    "input": (lambda x, y: tanh(x) * y - x, lambda x, y: tanh(x) * y - y.sin(), X, Y),
    "difference": (lambda x, y: tanh(x) - y.sin(), lambda x, y: y.sin() - tanh(x), X, Y),
    "value": (
        lambda x, y: (tanh(x) * 2.0 + y) * (tanh(x) * 2.0),
        lambda x, y: (tanh(x) * 2.0 + y) * (tanh(x) * 3.0),
        X,
        Y,
    ),
    "step": (lambda x, y: tanh(x) * y, lambda x, y: (x.sin() * y, tanh(x)), X, Y),
    "dimension": (
        lambda x, y: tanh(x).sum(-1, keepdim=True) * y,
        lambda x, y: tanh(x).sum(0, keepdim=True) * y,
        X,
        Y,
    ),
    "number of arguments": (
        lambda x, y: torch.cat((tanh(x), y), -1) * 2,
        lambda x, y: torch.cat((tanh(x), y, x), -1) * 2,
        X,
        Y,
    ),
    "tensor for a number": (lambda x, y: tanh(x) * 2.0 - y, lambda x, y: tanh(x) * y.sin() - y, X, Y),
    "number for a tensor": (lambda x, y, w: tanh(x) * w - y, lambda x, y: tanh(x) * 2.0 - y, X, Y),
}


@pytest.fixture
def computed(monkeypatch):
    """The ops whose definitions were computed, with their arguments."""
    calls: set[tuple[str, str]] = set()
    expand = Definitions.expand

    def noting(self, op, arguments, *rest):
        calls.add((op.name, repr(arguments)))
        return expand(self, op, arguments, *rest)

    monkeypatch.setattr(Definitions, "expand", noting)
    return calls


@pytest.mark.parametrize("what", NEAR)
def test_what_cannot_be_an_op_is_not_computed(fused, computed, what):
    body, program, *inputs = NEAR[what]
    op = fused(body_of(body))
    searched(program, *inputs)  # derives it
    computed.clear()
    assert searched(program, *inputs).fusions.get(op.name, 0) == 0
    assert op.name not in {name for name, _ in computed}


def test_the_numbers_of_an_op_are_looked_for_where_its_body_has_them(fused, computed):
    op = fused(body_of(lambda x, count: tanh(x) * count + 7))
    program = lambda x: tanh(x) * 3 + 8  # noqa: E731
    searched(program, X)
    computed.clear()
    searched(program, X)
    assert [name for name, _ in computed].count(op.name) == 1


def test_what_only_native_can_run_is_computed_once(fused, computed):
    op = fused(body_of(lambda x, y: tanh(x) * y + 1))
    op.unregister_impl("k")
    program = lambda x, y: tanh(x.float()) * y.float() + 2  # noqa: E731
    searched(program, B, Y.bfloat16())
    computed.clear()
    searched(program, B, Y.bfloat16())
    assert [name for name, _ in computed].count(op.name) == 1


def test_a_search_that_takes_too_long_is_given_up_and_told(fused, monkeypatch):
    op = fused(gated)
    searched(gated, X, Y)
    monkeypatch.setattr(candidates, "_STEPS", 2)
    report = searched(gated, X, Y)
    assert [miss.reason for miss in report.missed_fusions if miss.op == op.name] == [
        "it fits in too many ways; the search was given up"
    ]


def test_tensors_are_tried_in_so_many_ways(fused, monkeypatch):
    op = fused(gated)
    assert searched(widened, B, Y).fusions == {op.name: 1}
    monkeypatch.setattr(fusion, "_WAYS", 1)
    assert searched(widened, B, Y).fusions == {}


def test_a_value_that_is_used_twice_is_looked_at_once(fused):
    def tower(x: Tensor) -> Tensor:
        for _ in range(12):
            x = tanh(x) * x.sin()
        return x

    op = fused(tower)
    assert searched(tower, X).fusions == {op.name: 1}


def test_an_order_that_does_not_fit_leaves_nothing_behind(fused):
    op = fused(body_of(lambda x, y: x * y - tanh(x)))
    for program in (lambda x, y: x * y - tanh(x), lambda x, y: x * y - tanh(y)):
        assert searched(program, X, Y).fusions == {op.name: 1}


# --- arguments -----------------------------------------------------------------------------------------------------


def test_an_op_is_given_what_its_body_converts(fused):
    op = fused(body_of(lambda x, y: tanh(x.float()) * y))
    assert arguments_of(lambda x, y: tanh(x.float()) * y, op, B, Y) == [["x_1", "y_1"]]


def test_an_op_is_given_what_the_program_converts_for_it(fused):
    op = fused(gated)
    assert arguments_of(widened, op, B, Y) == [["convert_element_type", "y_1"]]


def test_an_op_is_given_a_tensor_in_the_shape_in_which_it_is_read(fused):
    op = fused(body_of(lambda x, w: tanh(x.cumsum(0)) * w))
    assert arguments_of(lambda x, w: tanh(x.view(2, 16).cumsum(0)) * w, op, X, W.repeat(2)) == [["view", "w_1"]]


def test_one_tensor_for_two_parameters_is_given_twice(fused):
    op = fused(body_of(lambda x, y, z: tanh(x) * y - z))
    assert arguments_of(lambda x, y: tanh(x) * y - x, op, X, Y) == [["x_1", "y_1", "x_1"]]


def test_a_number_is_given_as_the_program_has_it(fused):
    op = fused(body_of(lambda x, y, factor: tanh(x) * factor - y * factor))
    assert arguments_of(lambda x, y: tanh(x) * 0.3 - y * 0.3, op, X, Y) == [["x_1", "y_1", "0.3"]]


def test_a_whole_number_is_read_off_constants(fused):
    op = fused(body_of(lambda x, y, count: tanh(x) * count - y))
    assert arguments_of(lambda x, y: tanh(x) * 5 - y, op, X, Y) == [["x_1", "y_1", "5"]]


def in_groups(x: Tensor, count: int) -> Tensor:
    groups = x.unflatten(-1, (-1, count))
    return (groups / groups.amax(-1, keepdim=True)).flatten(-2)


def test_a_whole_number_is_read_off_sizes(fused):
    op = fused(in_groups)
    assert arguments_of(lambda x: in_groups(x, 4), op, X.view(2, 2, 8)) == [["x_1", "4"]]


@pytest.mark.parametrize("mode", ["up", "down"])
def test_words_are_read_off_the_op_to_which_the_body_hands_them(fused, declare, mode):
    def turn(x: Tensor, mode: str, count: int) -> Tensor:
        return x * count if mode == "up" else x * -count

    inner = declare(turn)
    op = fused(body_of(lambda x, y, mode, count: inner(x, mode, count) - y))
    op.register_input_generator(lambda shape, **options: (torch.ones(shape), torch.ones(shape), "up", 2))
    assert arguments_of(lambda x, y: inner(x, mode, 5) - y, op, X, Y) == [["x_1", "y_1", mode, "5"]]


def test_a_whole_number_is_not_read_off_a_constant_that_happens_to_be_the_same(fused):
    op = fused(body_of(lambda x, y, count: tanh(x) * 2.0 * count - y))
    assert arguments_of(lambda x, y: tanh(x) * 2.0 * 5 - y, op, X, Y) == [["x_1", "y_1", "5"]]


def test_a_flag_steers_the_body(fused):
    op = fused(body_of(lambda x, y, whole: tanh(x) * y if whole else tanh(x) - y))
    assert arguments_of(lambda x, y: tanh(x) - y, op, X, Y) == [["x_1", "y_1", "False"]]


def test_a_parameter_that_the_definition_does_not_show_has_its_default(fused):
    def gated_or_not(x: Tensor, y: Tensor, factor: float = 0.5) -> Tensor:
        return tanh(x) * y

    op = fused(gated_or_not)
    assert searched(gated, X, Y).fusions == {op.name: 1}


def test_a_parameter_that_cannot_be_known_forbids_it(fused):
    op = fused(body_of(lambda x, y, factor: tanh(x) * y))
    assert searched(gated, X, Y).fusions.get(op.name, 0) == 0


def test_what_has_another_input_is_no_call_that_the_op_would_refuse(fused):
    def gated_or_more(x: Tensor, y: Tensor, z: Tensor | None = None) -> Tensor:
        return tanh(x) * y if z is None else tanh(x) * y * z - x

    op = fused(gated_or_more)
    assert arguments_of(lambda x, y: tanh(x) * y * x.cos() - y, op, X, Y) == [["x_1", "y_1", "None"]]


# --- several outputs -----------------------------------------------------------------------------------------------


def two_gates(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return tanh(x) * w, tanh(y) * w


def test_each_output_has_a_place_of_its_own(fused):
    op = fused(two_gates)
    assert searched(lambda x, w: tanh(x) * w, X, W).fusions.get(op.name, 0) == 0


def test_an_output_that_shares_nothing_with_the_first_is_the_nearest(fused):
    op = fused(two_gates)

    def program(a, b, c, d, w):
        first = tanh(a) * w, tanh(b) * w
        return *first, tanh(c) * w, tanh(d) * w

    pairs = arguments_of(program, op, X, Y, R, X + Y, W)
    assert sorted(sorted(pair[:2]) for pair in pairs) == [["a_1", "b_1"], ["c_1", "d_1"]]


def test_a_further_output_that_cannot_be_is_not_computed(fused, computed):
    def gate_and_sine(x: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        return tanh(x) * w, y.sin() * w

    op = fused(gate_and_sine)
    program = lambda x, y, w: (tanh(x) * w, y.cos() * w, y.sin())  # noqa: E731
    searched(program, X, Y, W)
    computed.clear()
    searched(program, X, Y, W)
    assert op.name not in {name for name, _ in computed}


def test_further_outputs_are_looked_for_at_so_many_places(fused, monkeypatch):
    op = fused(two_gates)
    assert searched(two_gates, X, Y, W).fusions == {op.name: 1}
    monkeypatch.setattr(candidates, "_NEAR", 0)
    assert searched(two_gates, X, Y, W).fusions == {}


# --- which definitions are looked for ------------------------------------------------------------------------------


def a_first(x: Tensor, y: Tensor) -> Tensor:
    return tanh(x) * y


def b_second(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sin()


@pytest.mark.parametrize("order", [0, 1])
def test_of_two_that_are_as_large_the_name_decides(fused, order):
    ops = {body: fused(body) for body in ((a_first, b_second) if order == 0 else (b_second, a_first))}
    assert searched(lambda x, y: (tanh(x) * y).sin(), X, Y).fusions == {ops[a_first].name: 1}


@pytest.mark.parametrize("order", [0, 1])
def test_the_largest_is_looked_for_first(fused, order):
    def b_larger(x: Tensor, y: Tensor) -> Tensor:
        return (tanh(x) * y).sin()

    ops = {body: fused(body) for body in ((a_first, b_larger) if order == 0 else (b_larger, a_first))}
    assert searched(b_larger, X, Y).fusions == {ops[b_larger].name: 1}


def test_what_divides_tokens_over_processes_is_looked_for_before_what_is_larger(fused):
    def gathers(x: Tensor, y: Tensor) -> Tensor:
        return ir.ops.all_gather(x, "", 1) * y

    def larger(x: Tensor, y: Tensor) -> Tensor:
        return (tanh(x * y) + y).sin()

    ops = {body: fused(body) for body in (gathers, larger)}
    assert searched(lambda x, y: (tanh(gathers(x, y)) + y).sin(), X, Y).fusions == {ops[gathers].name: 1}


def test_an_op_that_only_converts_is_not_looked_for(fused):
    fused(body_of(lambda x: x.bfloat16()))
    assert searched(lambda x, y: tanh(x.bfloat16()) * y, X, B).fusions == {}


def test_a_graph_that_computes_nothing_is_not_worth_a_look(fused):
    fused(gated)
    assert fusion.worth_a_look(traced(gated, X, Y).graph)
    assert not fusion.worth_a_look(traced(lambda x: x.view(32), X).graph)
