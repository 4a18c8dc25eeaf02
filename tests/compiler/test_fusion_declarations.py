"""Fused ops that cannot be found by their bodies, and two with one body: one fault per test."""

import os

import pytest
import torch
from compiler_support import run
from fusion_support import X, searched, traced
from torch import Tensor

import irframework as ir
from irframework.compiler import fusable_ops
from irframework.compiler.fusion import fuse
from irframework.compiler.report import Report
from irframework.compiler.shown_calls import shown_calls
from irframework.errors import DuplicateFusionError, InvalidFusionError
from irframework.registry import Transaction, registry


def double(x: Tensor) -> Tensor:
    return torch.tanh(x) + x


def scaled_rows(x: Tensor, weight: Tensor | None) -> Tensor:
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError("the weight must be as long as a row")
    return double(x) if weight is None else double(x) * weight


@pytest.mark.parametrize(
    ("factor", "count"), [(None, 1), (torch.ones(8), 1), (torch.ones(4, 8), 0)], ids=["none", "weight", "no weight"]
)
def test_what_would_be_an_op_with_a_wrong_argument_is_not_found_without_that_argument(fused, factor, count):
    op = fused(scaled_rows)
    op.register_input_generator(
        lambda shape, **options: (torch.ones(shape, **options), torch.ones(shape[-1], **options))
    )
    program = double if factor is None else lambda x, w: double(x) * w
    report = searched(program, X, *(() if factor is None else (factor,)))
    assert report.fusions.get(op.name, 0) == count
    assert count or "arguments that the op does not take" in report.missed_fusions[0].reason


# --- bodies that are no patterns -----------------------------------------------------------------------------------


def writes(x: Tensor, y: Tensor) -> Tensor:
    y.add_(1)  # the mistake
    return torch.tanh(x) * y


def reads_a_value(x: Tensor) -> Tensor:
    return torch.tanh(x) * x.sum().item()  # the mistake


def branches(x: Tensor) -> Tensor:
    if x.sum() > 0:  # the mistake
        return torch.tanh(x)
    return x + 1


def counts(x: Tensor) -> Tensor:
    return torch.tanh(x)[x.nonzero().shape[0] :]  # the mistake


def leaves_torch(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() + 1)  # the mistake


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (writes, "overwrites a tensor"),
        (reads_a_value, "depends on the values"),
        (branches, "depends on the values"),
        (counts, "depends on the values"),
    ],
)
def test_a_body_that_is_no_pattern_is_an_error_with_its_line(fused, body, what):
    op = fused(body)
    with pytest.raises(InvalidFusionError, match=what) as raised:
        searched(double, X)
    assert f"Op '{op.name}' ({op.source})" in str(raised.value)
    assert f"in {body.__name__}: " in str(raised.value)
    assert "# the mistake" in str(raised.value)


def test_a_body_that_overwrites_is_found_by_the_calls_of_a_generator_as_well(fused):
    op = fused(writes)
    op.register_input_generator(lambda shape, **options: (torch.ones(shape, **options), torch.ones(shape, **options)))
    with pytest.raises(InvalidFusionError, match="overwrites a tensor"):
        searched(lambda x, y: torch.tanh(x) * (y + 1), X, X)


def test_a_body_may_work_in_place_on_tensors_of_its_own(fused):
    def double_in_place(x: Tensor) -> Tensor:
        return torch.tanh(x).add_(x)

    op = fused(double_in_place)
    op.register_input_generator(lambda shape, **options: (torch.ones(shape, **options),))
    assert searched(double, X).fusions == {op.name: 1}


def test_a_body_that_cannot_be_traced_is_an_error_with_its_line(fused):
    op = fused(leaves_torch)
    op.register_input_generator(lambda shape, dtype, device: (torch.ones(shape, dtype=dtype),))
    with pytest.raises(InvalidFusionError, match="cannot be traced: ") as raised:
        searched(double, X)
    assert "in leaves_torch: return torch.from_numpy(x.numpy() + 1)  # the mistake" in str(raised.value)


def test_a_body_that_depends_on_data_for_some_arguments_only_is_looked_for_with_the_others(fused):
    def sometimes(x: Tensor, whole: bool = True) -> Tensor:
        return torch.tanh(x) + x if whole else torch.tanh(x) + x.sum().item()

    op = fused(sometimes)
    assert searched(double, X).fusions == {op.name: 1}


def test_the_graph_is_left_alone_when_an_op_is_wrong(fused):
    right, _ = fused(double), fused(writes)
    module = traced(double, X)
    before = str(module.graph)
    with pytest.raises(InvalidFusionError):
        fuse(module.graph, Report())
    assert str(module.graph) == before
    assert right.name not in before


@pytest.mark.parametrize("body", [writes, branches])
def test_an_op_of_a_plugin_is_left_out_with_one_warning(fused, caplog, body):
    wrong, right = fused(body, plugin="acme"), fused(double)
    for _ in range(2):
        assert searched(double, X).fusions == {right.name: 1}
    assert caplog.text.count(f"{wrong.name} of plugin acme is left out of fusion: ") == 1
    assert "# the mistake" in caplog.text


def test_strict_mode_makes_an_error_of_it(fused, configured):
    fused(writes, plugin="acme")
    configured(strict=True)
    with pytest.raises(InvalidFusionError):
        searched(double, X)


def test_the_error_reaches_whoever_compiles(fused):
    fused(writes)
    with pytest.raises(Exception, match="overwrites a tensor that it was given"):
        run(double, X)


def test_a_body_for_which_no_arguments_can_be_guessed_is_no_error(fused, caplog):
    def of_four_dimensions(x: Tensor) -> Tensor:
        return torch.tanh(x.permute(0, 2, 1, 3)) * 2

    op = fused(of_four_dimensions)
    assert searched(double, X).fusions == {}
    assert f"Op {op.name} ({op.source}) is declared with fuse, and no part of a graph can become it" in caplog.text


# --- two ops with one body -----------------------------------------------------------------------------------------


def also_double(value: Tensor) -> Tensor:
    return value + torch.tanh(value)


def test_two_ops_with_one_pattern_are_an_error_that_names_both(fused):
    one, other = fused(double), fused(also_double)
    with pytest.raises(DuplicateFusionError) as raised:
        searched(double, X)
    for op in (one, other):
        assert f"'{op.name}' ({op.source})" in str(raised.value)
    assert __file__.rpartition("/")[2] in str(raised.value)


@pytest.mark.parametrize("where", ["provider", "domain"])
def test_two_ops_whose_dtypes_differ_may_share_a_pattern(fused, where):
    half, single = ir.supports(dtype=torch.bfloat16), ir.supports(dtype=torch.float32)
    if where == "provider":
        fused(double, supports_args=half)
        wanted = fused(also_double, supports_args=single)
    else:
        fused(double, fuse=half)
        wanted = fused(also_double, fuse=single)
    assert searched(double, X).fusions == {wanted.name: 1}


def test_the_same_dtypes_under_other_names_do_not_differ(fused):
    fused(double, supports_args=ir.supports(dtype=torch.float32))
    fused(also_double, supports_args=ir.supports(dtype=torch.float32))
    with pytest.raises(DuplicateFusionError):
        searched(double, X)


@pytest.mark.parametrize("order", [0, 1])
def test_an_op_of_a_plugin_gives_way_to_the_programs(fused, caplog, order):
    bodies = (double, also_double)
    programs = fused(bodies[order]) if order == 0 else None
    plugins = fused(bodies[1 - order], plugin="acme")
    programs = programs or fused(bodies[order])
    assert searched(double, X).fusions == {programs.name: 1}
    assert f"{plugins.name} of plugin acme is left out of fusion" in caplog.text


@pytest.mark.parametrize("order", [0, 1])
def test_an_op_with_the_body_of_a_standard_one_is_an_error(fused, monkeypatch, order):
    monkeypatch.setattr(also_double, "__module__", "irframework.ops.activation")
    for body in (double, also_double) if order else (also_double, double):
        fused(body)
    with pytest.raises(DuplicateFusionError):
        searched(double, X)


def rounds_once(x: Tensor, y: Tensor) -> Tensor:
    return (torch.tanh(x.float()) * y.float()).to(x.dtype)


def rounds_twice(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x.float()).to(x.dtype) * y


def has_another_constant(x: Tensor) -> Tensor:
    return torch.tanh(x) + x * 2


def less_two(x: Tensor) -> Tensor:
    return torch.tanh(x) - x * 2


def less_three(x: Tensor) -> Tensor:
    return torch.tanh(x) - x * 3


def takes_the_constant(x: Tensor, factor: float) -> Tensor:
    return torch.tanh(x) + x * factor


def uses_two(x: Tensor, y: Tensor) -> Tensor:
    return torch.tanh(x) + y


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (rounds_once, rounds_twice),
        (double, has_another_constant),
        (less_two, less_three),
        (has_another_constant, takes_the_constant),
        (double, uses_two),
    ],
)
def test_ops_that_differ_in_anything_have_two_patterns(fused, one, other):
    fused(one)
    fused(other)
    searched(double, X)


def test_parameters_are_known_by_their_place_and_not_by_their_order(fused):
    def swapped(b: Tensor, a: Tensor) -> Tensor:
        return torch.tanh(a) * b

    def plain(a: Tensor, b: Tensor) -> Tensor:
        return torch.tanh(a) * b

    for body in (plain, swapped):
        fused(body).register_input_generator(lambda shape, dtype, device: (torch.ones(shape, dtype=dtype),) * 2)
    with pytest.raises(DuplicateFusionError):
        searched(lambda x, y: torch.tanh(x) * y, X, X + 1)


def test_an_op_that_is_gone_is_no_rival(fused):
    transaction = Transaction("other")
    with registry.registering(transaction):
        gone = ir.register_op(name=f"tfd_gone_{os.getpid()}", fuse=True)(also_double)
    gone.plugin = None
    fusable_ops.skeletons_of(gone, set())
    transaction.roll_back()
    op = fused(double)
    assert searched(double, X).fusions == {op.name: 1}


# --- what an input generator does not show -------------------------------------------------------------------------


def weighted(x: Tensor, weight: Tensor | None = None) -> Tensor:
    bent = torch.tanh(x) + x
    return bent if weight is None else bent * weight


def needs_both(x: Tensor, weight: Tensor | None = None) -> Tensor:
    return torch.tanh(x) * weight


@pytest.mark.parametrize("program", ["without", "with"])
def test_an_optional_tensor_that_a_generator_always_gives_may_be_missing_in_a_graph(fused, program):
    op = fused(weighted)
    op.register_input_generator(lambda shape, dtype, device: (torch.ones(shape), torch.ones(shape[-1:])))
    report = searched(double, X) if program == "without" else searched(lambda x, w: double(x) * w, X, X[0])
    assert report.fusions == {op.name: 1}


def test_an_optional_tensor_that_native_needs_is_not_left_out(fused):
    op = fused(needs_both)
    op.register_input_generator(lambda shape, dtype, device: (torch.ones(shape), torch.ones(shape[-1:])))
    assert len(shown_calls(op)) == 1
    assert [each.fixed for each in fusable_ops.skeletons_of(op, {"aten::tanh", "aten::mul"})] == [{}]
