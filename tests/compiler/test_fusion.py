"""Fusion by definition: what becomes a fused op, what must not, and the reasons. One case per rule."""

import pytest
import torch
from fusion_support import Family
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import irframework as ir
from irframework.compiler.fusion import fuse
from irframework.compiler.report import Report

pytestmark = pytest.mark.usefixtures("seeded")


def inputs(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(shape or (4, 8)), torch.randn(8)


def test_a_write_behind_all_of_a_chain_forbids_nothing(family):
    def program(x, b, cache):
        y = family.shift(family.half(x), b)
        cache.copy_(y)
        return y

    assert family.counts(family.fused(program, *inputs(), torch.zeros(4, 8))) == (1, 0)


def test_chains_on_both_sides_of_a_write_are_found(family):
    def program(x, b):
        before = family.shift(family.half(x), b)
        x.add_(1)
        return before, family.shift(family.half(x), b)

    graph = make_fx(program, tracing_mode="fake")(*inputs()).graph
    report = Report()
    with ir.priority({family.half_shift.name: ["k"]}):
        fuse(graph, report)
    assert family.counts(report) == (2, 0)


@pytest.mark.parametrize("factor", [0.5, 0.25, 9.999999747378752e-06])
def test_a_number_is_a_wildcard(family, factor):
    report = family.fused(lambda x, b: family.shift(family.half(x, factor), b), *inputs())
    assert family.counts(report) == (1, 0)
    assert list(report.selected_impls[family.half_shift.name].values()) == ["k"]


def test_defaults_and_keywords_are_other_spellings(family):
    report = family.fused(lambda x, b: family.shift(by=b, x=family.half(x)), *inputs())
    assert family.counts(report) == (1, 0)


@pytest.mark.parametrize("shape", [(4, 8), (-1, 8), (2, 2, 8)])
def test_a_reshape_in_between_is_moved_behind(family, shape):
    report = family.fused(lambda x, b: family.shift(family.half(x).reshape(shape), b), *inputs())
    assert family.counts(report) == (1, 0)


def test_a_reshape_that_cuts_rows_is_not_moved(family):
    report = family.fused(lambda x, b: family.shift(family.half(x).reshape(2, 4, 4), b[:4]), *inputs())
    assert family.counts(report) == (0, 0)


@pytest.mark.parametrize("swapped", [False, True])
def test_the_largest_fits_whichever_way_an_addition_is_written(family, swapped):
    def program(x, r, b):
        total = r + x if swapped else x + r
        return family.shift(family.half(total), b), total

    report = family.fused(program, torch.randn(4, 8), *inputs())
    assert family.counts(report) == (0, 1)


def test_an_output_that_nobody_reads_is_computed_anyway(family):
    report = family.fused(lambda x, r, b: family.shift(family.half(x + r), b), torch.randn(4, 8), *inputs())
    assert family.counts(report) == (0, 1)


def test_an_intermediate_with_another_reader_stays(family):
    def program(x, b):
        h = family.half(x)
        return family.shift(h, b), h.sum()

    report = family.fused(program, *inputs())
    assert family.counts(report) == (0, 0)
    assert any("also used" in miss.reason for miss in report.missed_fusions)


def test_equal_values_in_two_nodes_are_one_value(family):
    def program(x, r, b):
        return family.shift(family.half(x + r), b), x + r

    report = family.fused(program, torch.randn(4, 8), *inputs())
    assert family.counts(report) == (0, 1)


def test_an_input_that_depends_on_an_output_forbids_it(family):
    def program(x, r, b):
        total = x + r
        return family.shift(family.half(total), total.mean(0)), total

    report = family.fused(program, torch.randn(4, 8), *inputs())
    assert family.counts(report) == (1, 0)


def test_two_in_a_row_are_two(family):
    def program(x, b):
        for _ in range(3):
            x = family.shift(family.half(x), b)
        return x

    assert family.counts(family.fused(program, *inputs())) == (3, 0)


def test_only_native_is_no_reason_to_fuse():
    family = Family(provider=False)
    report = family.fused(lambda x, b: family.shift(family.half(x), b), *inputs())
    assert family.counts(report) == (0, 0)
    assert [m.op for m in report.missed_fusions if "only native" in m.reason] == [family.half_shift.name]


def test_a_provider_that_declines_is_heard():
    family = Family(supports_args=lambda x, factor, by: ir.reject("wants bf16"))
    report = family.fused(lambda x, b: family.shift(family.half(x), b), *inputs())
    assert family.counts(report) == (0, 0)
    assert any("wants bf16" in miss.reason for miss in report.missed_fusions)


def test_kernels_get_nothing_outside_of_the_declared_domain():
    family = Family(fuse=ir.supports(ndim={"by": 1}))
    report = family.fused(lambda x, b: family.shift(family.half(x), b[None]), *inputs())
    assert family.counts(report) == (0, 0)
    assert any("domain" in miss.reason for miss in report.missed_fusions)


def test_another_layout_than_the_ops_is_not_replaced(family):
    def program(x, b):
        return family.shift(family.half(x), b).t().sin()

    assert family.counts(family.fused(program, *inputs())) == (1, 0)


def test_it_can_be_switched_off(family, configured):
    configured(fusion=False)
    report = family.fused(lambda x, b: family.shift(family.half(x), b), *inputs())
    assert family.counts(report) == (0, 0)


def test_a_fused_op_written_by_hand_is_left_alone(family):
    report = family.fused(lambda x, b: family.half_shift(x, 0.5, b), *inputs())
    assert family.counts(report) == (0, 0)
    assert list(report.selected_impls[family.half_shift.name].values()) == ["k"]


def test_a_fused_op_inside_a_larger_one_is_known_by_its_definition(family):
    report = family.fused(lambda x, r, b: family.half_shift(x + r, 0.5, b), torch.randn(4, 8), *inputs())
    assert family.counts(report) == (0, 1)


def test_a_kernel_that_cannot_be_lowered_gives_back_what_was_there(declare, caplog):
    family = Family(provider=False)

    @family.half_shift.register_impl("k")
    def broken(x, factor, by):
        return x[:1] * factor + by

    report = family.fused(lambda x, b: family.shift(family.half(x), b), *inputs())
    assert list(report.selected_impls[family.half_shift.name].values()) == ["native"]
    assert any("cannot be lowered" in miss.reason for miss in report.missed_fusions)
    assert not report.fusions
