"""Symbolic sizes: one compile serves all of them, and nothing of ours adds a guard."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiler_support import lowered
from standard_calls import (
    CALLS,
    HIDDEN,
    OPS,
    all_calls,
    all_calls_and_providers,
    available,
    copies,
    expected,
    fake_providers,
    prefer,
    same,
)
from torch import Tensor
from torch._dynamo.decorators import mark_unbacked

import irframework as ir
from irframework.errors import ImplementationContractError, PredicateGuardError

BOTH = pytest.mark.parametrize("backend", ["irframework", "inductor"])


@pytest.fixture(autouse=True, scope="module")
def _fakes() -> Iterator[None]:
    with fake_providers():
        yield


class Counting:
    def __init__(self) -> None:
        self.compiles = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.compiles += 1
        return lowered(module, inputs)


def marked(call: Any, arguments: tuple[Any, ...], mark: Any) -> tuple[Any, ...]:
    for position, dimension in call.batch.items():
        if arguments[position] is not None:
            mark(arguments[position], dimension)
    return arguments


@all_calls_and_providers()
def test_one_compile_serves_every_batch_size(call, provider):
    counting = Counting()
    function = torch.compile(lambda *a: call.form(*a), backend=counting, fullgraph=True)
    with torch.no_grad(), prefer(available(provider)):
        for rows in (17, 2, 5):
            arguments = call.arguments(rows)
            same(function(*marked(call, copies(arguments), torch._dynamo.mark_dynamic)), expected(call, arguments))
        assert counting.compiles == 1
        for rows in (1, 0):  # torch compiles again for each of these two
            arguments = call.arguments(rows)
            same(function(*copies(arguments)), expected(call, arguments))
    assert counting.compiles == 3


@all_calls_and_providers()
def test_one_compile_serves_sizes_that_only_a_run_can_tell(call, provider):
    counting = Counting()
    function = torch.compile(lambda *a: call.form(*a), backend=counting, fullgraph=True)
    with torch.no_grad(), prefer(available(provider)):
        for rows in (17, 1, 4):
            arguments = call.arguments(rows)
            same(function(*marked(call, copies(arguments), mark_unbacked)), expected(call, arguments))
        assert counting.compiles == 1
        arguments = call.arguments(0)
        same(function(*marked(call, copies(arguments), mark_unbacked)), expected(call, arguments))
    # a tensor without rows has other strides, which torch itself compiles anew where rows are not the first dimension
    assert counting.compiles == (1 if call.batch[0] == 0 else 2)


@pytest.mark.parametrize("provider", ["native", "vllm_c"])
@pytest.mark.parametrize("name", OPS)
def test_every_size_may_be_symbolic(name, provider):
    call = CALLS[name]
    counting = Counting()
    function = torch.compile(lambda *a: call.form(*a), backend=counting, dynamic=True)
    arguments, others = call.arguments(5), call.arguments(9)
    with torch.no_grad(), prefer(available(provider)):
        same(function(*copies(arguments)), expected(call, arguments))
        once = counting.compiles  # torch traces twice where a float is an argument
        same(function(*copies(others)), expected(call, others))
    assert counting.compiles == once


def everything(x: Tensor, r: Tensor, w: Tensor, positions: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
    """All standard ops in one graph, chained so that each needs the one before."""
    y, r = ir.ops.fused_add_rms_norm.maybe_inplace(x * 1, r * 1, w, 1e-6)
    y = torch.cat((ir.ops.silu_and_mul(y), ir.ops.gelu_and_mul(y)), -1)
    y = ir.ops.rms_norm(x=y, weight=w, epsilon=1e-6)
    q, k = ir.ops.rotary_embedding(positions, y, r, cache, 16)
    return y, r, q, k


def everything_for(rows: int) -> tuple[Tensor, ...]:
    torch.manual_seed(rows)
    x, r = torch.randn(rows, HIDDEN), torch.randn(rows, HIDDEN)
    return x, r, torch.ones(HIDDEN), torch.arange(rows) % 8, torch.randn(8, 8)


@BOTH
@pytest.mark.parametrize("how", ["dynamic", "mark", "maybe_mark", "automatic"])
def test_inductor_compiles_no_size_again(backend, how):
    mark = {"mark": torch._dynamo.mark_dynamic, "maybe_mark": torch._dynamo.maybe_mark_dynamic}.get(how)
    function = torch.compile(everything, backend=backend, dynamic=True if how == "dynamic" else None, fullgraph=True)

    def check(rows: int) -> None:
        arguments = everything_for(rows)
        want = everything(*arguments)
        for argument in (0, 1, 3):
            if mark is not None:
                mark(arguments[argument], 0)
        same(function(*arguments), want)

    with torch.no_grad():
        check(17)
        if how == "automatic":  # torch learns from the second size which dimension changes
            check(11)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for rows in (2, 33, 11):
                check(rows)


def layout(tensor: Tensor) -> Any:
    """Inductor itself gives tensors without elements other strides than eager torch does."""
    return tensor.shape, tensor.dtype, tensor.stride() if tensor.numel() else None


@BOTH
def test_no_rows_after_some(backend):
    function = torch.compile(everything, backend=backend, dynamic=True)
    with torch.no_grad():
        for rows in (4, 0, 1, 4):
            arguments = everything_for(rows)
            got, want = function(*arguments), everything(*arguments)
            same(got, want)
            assert [layout(t) for t in got] == [layout(t) for t in want]


def test_some_rows_after_none():
    counting = Counting()
    function = torch.compile(everything, backend=counting)
    with torch.no_grad():
        for rows in (0, 4, 9, 0):
            arguments = everything_for(rows)
            same(function(*arguments), everything(*arguments))


@BOTH
def test_batch_padded_to_a_multiple_is_right(backend):
    def padded(x: Tensor, w: Tensor) -> Tensor:
        rows = x.shape[0]
        x = torch.nn.functional.pad(x, (0, 0, 0, -rows % 4))
        y, _ = ir.ops.fused_add_rms_norm.maybe_inplace(x * 2, x + 1, w, 1e-6)
        return y[:rows]

    function = torch.compile(padded, backend=backend, dynamic=True)
    with torch.no_grad():
        for rows in (8, 9, 12, 15):
            x, w = torch.randn(rows, HIDDEN), torch.randn(HIDDEN)
            same(function(x, w), padded(x, w))


@all_calls()
def test_outputs_keep_the_symbol_of_the_batch(call):
    """The shape functions turn no symbol into a number."""
    found: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        nodes = [n for n in module.graph.nodes if getattr(n.target, "namespace", "") == "irframework"]
        (node,) = nodes
        values = node.meta["example_value"]
        found.extend(values if isinstance(values, tuple) else (values,))
        found.append(node.args[0].meta["example_value"].shape[call.batch[0]])
        return module.forward

    arguments = call.arguments(17)
    with torch.no_grad():
        torch.compile(lambda *a: call.form(*a), backend=backend)(*marked(call, arguments, torch._dynamo.mark_dynamic))
    *outputs, rows = found
    assert isinstance(rows, torch.SymInt)
    for output in outputs:
        if output.dim() > 1:  # the missing key is [0]
            assert output.shape[call.batch[0]].node.expr == rows.node.expr


def test_two_dimensions_may_be_symbolic():
    call = CALLS["rotary_embedding-3d"]
    counting = Counting()
    function = torch.compile(lambda *a: call.form(*a), backend=counting)
    with torch.no_grad():
        for batch, rows in ((3, 17), (5, 4), (2, 9)):
            torch.manual_seed(rows)
            positions = torch.arange(batch * rows).view(batch, rows) % 8
            query, key = torch.randn(batch, rows, 32), torch.randn(batch, rows, 16)
            for tensor in (positions, query, key):
                torch._dynamo.mark_dynamic(tensor, 0)
                torch._dynamo.mark_dynamic(tensor, 1)
            arguments = (positions, query, key, torch.randn(8, 8), 16)
            same(function(*arguments), expected(call, arguments))
    assert counting.compiles == 1


def test_rows_that_a_mask_selects():
    def selected(x: Tensor, mask: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        rows = x[mask]
        return ir.ops.fused_add_rms_norm(ir.ops.rms_norm(rows, w, 1e-6), (x + 1)[mask], w, 1e-6)

    counting = Counting()
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        function = torch.compile(selected, backend=counting, fullgraph=True)
        x, w = torch.randn(9, HIDDEN), torch.randn(HIDDEN)
        for mask in (x[:, 0] > 0, x[:, 0] > 9, x[:, 0] > -9, x[:, 1] == x[3, 1]):
            same(function(x, mask, w), selected(x, mask, w))
    assert counting.compiles == 1


def test_number_arguments_may_be_symbolic():
    def function(x: Tensor, w: Tensor, q: Tensor, positions: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        y = ir.ops.rms_norm(x, w, 1e-6, variance_size=x.shape[-1] // 2)
        return (y, *ir.ops.rotary_embedding(positions, q, None, cache, head_size=q.shape[-1]))

    compiled = torch.compile(function, backend=lowered, dynamic=True)
    with torch.no_grad():
        for rows, hidden in ((3, 32), (5, 64)):
            arguments = torch.randn(rows, hidden), torch.ones(hidden), torch.randn(rows, 16), torch.arange(rows)
            cache = torch.randn(8, 8)
            same(compiled(*arguments, cache), function(*arguments, cache))


def test_a_modules_epsilon_is_read_anew():
    class Norm(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.epsilon = 1e-6

        def forward(self, x: Tensor) -> Tensor:
            return ir.ops.rms_norm(x, None, self.epsilon)

    norm = Norm()
    function = torch.compile(norm, backend=lowered, dynamic=True)
    x = torch.randn(3, HIDDEN)
    with torch.no_grad():
        for epsilon in (1e-6, 0.5, 2.0):
            norm.epsilon = epsilon
            same(function(x), norm(x))


@BOTH
def test_gradients_at_every_batch_size(backend):
    function = torch.compile(everything, backend=backend, dynamic=True)
    for rows in (6, 3, 10):
        arguments = everything_for(rows)
        inputs = [a.requires_grad_() for a in arguments[:3]]
        want = torch.autograd.grad(sum(t.sin().sum() for t in everything(*arguments)), inputs)
        got = torch.autograd.grad(sum(t.sin().sum() for t in function(*arguments)), inputs)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


# --- what looks at a size is named -----------------------------------------------------------------------------------


def compiled_with(op: Any, provider: str, x: Tensor, backend: Any = lowered) -> Any:
    torch._dynamo.mark_dynamic(x, 0)
    function = torch.compile(lambda x: op(x), backend=backend)
    with ir.priority({op.name: [provider]}), torch.no_grad():
        return function(x), function


def test_a_predicate_that_looks_at_the_batch_is_named(scale):
    scale.register_impl("curious", supports_args=lambda x, factor=2.0: x.shape[0] > 4)(lambda x, factor=2.0: x * factor)
    with pytest.raises(Exception, match=r"'curious' of op .* looked at a size .*mark_static") as caught:
        compiled_with(scale, "curious", torch.ones(6, 8))
    assert PredicateGuardError.__name__ in str(caught.value)


def test_conditions_hold_for_sizes_that_are_computed(add):
    """Comparing computed sizes makes torch note that there are elements, which is no guard on the batch."""
    both = ("x", "x_residual")
    stated = ir.supports(row_contiguous=both, same_shape=both, last_dim_of={"weight": "x"})
    add.op.register_impl("p", supports_args=stated)(lambda x, x_residual, weight: add.op.native(x, x_residual, weight))
    counting = Counting()
    function = torch.compile(
        lambda x, w: add.op(x.reshape(-1, 4), torch.sin(x.reshape(-1, 4)), w[:4]), backend=counting, dynamic=True
    )
    with add.priority("p"), torch.no_grad():
        for columns in (6, 10, 40):
            sums, _ = function(torch.zeros(8, columns).t(), torch.ones(16))
            same(sums, torch.zeros(2 * columns, 4))
    assert counting.compiles == 1


def test_a_predicate_may_look_at_a_number_that_is_symbolic(declare):
    def native(x: Tensor, size: int) -> Tensor:
        return x[..., :size] * 1

    op = declare(native)
    op.register_impl("p", supports_args=lambda x, size: size < 100)(lambda x, size: x[..., :size] + 0)
    counting = Counting()
    function = torch.compile(lambda x, size: op(x, size), backend=counting, dynamic=True)
    with ir.priority({op.name: ["p"]}), torch.no_grad():
        assert function(torch.ones(3, 8), 4).shape == (3, 4)


def test_an_implementation_that_looks_at_the_batch_is_named_and_right(scale, caplog):
    @scale.register_impl("branching")
    def branching(x, factor=2.0):
        return x * factor if x.shape[0] > 4 else x * factor * 1

    with caplog.at_level(logging.WARNING, "irframework"):
        _, function = compiled_with(scale, "branching", torch.ones(6, 8))
    (message,) = [r.getMessage() for r in caplog.records if "branching" in r.getMessage()]
    assert "> 4" in message or "4 <" in message
    assert "supports_args" in message
    with ir.priority({scale.name: ["branching"]}), torch.no_grad():
        same(function(torch.ones(3, 8)), torch.full((3, 8), 2.0))


def test_an_implementation_that_looks_where_no_guard_counts_is_an_error(scale):
    @scale.register_impl("branching")
    def branching(x, factor=2.0):
        return x * factor if x.shape[0] > 4 else x * 3

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scale(x)

    rows = torch.export.Dim("rows", min=2, max=100)
    program = torch.export.export(Model(), (torch.ones(6, 8),), dynamic_shapes={"x": {0: rows}})
    with pytest.raises(ImplementationContractError, match=r"'branching' .*nothing would compile again"):
        ir.compiler.lower(program.graph_module, ir_op_priority={scale.name: ["branching"]})


def test_an_implementation_whose_sizes_are_spelt_otherwise_is_taken(scale):
    @scale.register_impl("flat")
    def flat(x, factor=2.0):
        return (x.reshape(x.shape[0] // 2, -1) * factor).reshape(x.shape)

    counting = Counting()
    function = torch.compile(lambda x: scale(x), backend=counting, dynamic=True)
    with ir.priority({scale.name: ["flat"]}), torch.no_grad():
        same(function(torch.ones(6, 8)), torch.full((6, 8), 2.0))
        once = counting.compiles  # torch traces twice where a float is an argument
        for rows in (10, 40):
            same(function(torch.ones(rows, 8)), torch.full((rows, 8), 2.0))
    assert counting.compiles == once


def test_sizes_that_are_spelt_otherwise_are_no_other_layout_and_add_no_guard(declare, caplog):
    def native(x: Tensor, group: int) -> Tensor:
        return (x.unflatten(-1, (x.shape[-1] // group, group)) * 2.0).flatten(-2)

    op = declare(native)

    @op.register_impl("whole")
    def whole(x, group):
        assert x.shape[-1] // group != 0  # `group` is a symbol in the op's own body, and a number here
        return x * 2.0

    function = torch.compile(lambda x, group: op(x, group), backend=lowered, dynamic=True)
    with ir.priority({op.name: ["whole"]}), torch.no_grad(), caplog.at_level(logging.WARNING, "irframework"):
        for rows, columns in ((5, 64), (3, 96)):
            same(function(torch.ones(rows, columns), 32), torch.full((rows, columns), 2.0))
    assert ir.last_report().selected_impls == {op.name: {op.name: "whole"}}
    assert not caplog.records


def test_an_implementation_with_another_size_is_refused_also_when_it_is_symbolic(scale):
    scale.register_impl("short")(lambda x, factor=2.0: x[1:] * factor)
    with pytest.raises(Exception, match=r"'short' of op .* returns .* as output 0") as caught:
        compiled_with(scale, "short", torch.ones(6, 8))
    assert ImplementationContractError.__name__ in str(caught.value)
