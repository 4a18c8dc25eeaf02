"""What the search for fused ops costs, counted and not timed: equal layers cost what one does, and no trace is full."""

import pytest
import torch
from fusion_support import W, X, body_of, fused_in, searched, traced
from torch import Tensor, tanh
from torch._subclasses.fake_tensor import FakeTensorMode

import irframework as ir
from irframework.compiler import definitions, fusion
from irframework.compiler.definitions import Definitions, known_by_spelling
from irframework.compiler.recording import BeyondError, recorded
from irframework.compiler.skeletons import samples_of
from irframework.compiler.steps import Expansion
from irframework.compiler.tracing import trace
from irframework.compiler.values import ValueTable
from irframework.registry import registry


class Counts:
    """How often definitions are traced, and computed as values of a graph."""

    def __init__(self, monkeypatch) -> None:
        self.traces = self.computed = 0
        looked_for = fusion.looked_for  # other tests of the process may have declared ops that fit as well
        monkeypatch.setattr(fusion, "looked_for", lambda: [op for op in looked_for() if op.name.startswith("tfd_")])
        trace_one, compute = Definitions._trace, fusion._Fusion._compute
        monkeypatch.setattr(Definitions, "_trace", lambda *given: self._traced() or trace_one(*given))
        monkeypatch.setattr(fusion._Fusion, "_compute", lambda *given: self._counted() or compute(*given))

    def _traced(self) -> None:
        self.traces += 1

    def _counted(self) -> None:
        self.computed += 1

    def of(self, program) -> tuple[int, int]:
        """Both for one search, by a process that knows the skeletons and else nothing."""
        for _ in range(2):  # the first choice of a kernel loads plugins, which have ops as well
            fused_in(traced(program, X, W))
        definitions._kept.clear()
        self.traces = self.computed = 0
        fused_in(traced(program, X, W))
        return self.traces, self.computed


@pytest.fixture
def counts(monkeypatch) -> Counts:
    return Counts(monkeypatch)


def gated(x: Tensor, y: Tensor) -> Tensor:
    return tanh(x) * y


def layers(number: int, step):
    def program(x, w):
        for _ in range(number):
            x = step(x, w).sin()
        return x

    return program


def test_equal_layers_are_traced_once(fused, counts):
    fused(gated)
    one, many = (counts.of(layers(number, gated)) for number in (2, 12))
    assert 0 < many[0] == one[0] < 6


def test_a_layer_more_costs_what_the_one_before_did(fused, counts):
    fused(gated)
    few, more, many = (counts.of(layers(number, gated))[1] for number in (2, 4, 8))
    assert 0 < more - few <= 4
    assert many - more == 2 * (more - few)


def test_a_call_of_an_op_is_not_looked_for_in_others(fused, counts):
    op = fused(gated)
    assert counts.of(layers(4, lambda x, w: op(x, w.expand(4, 8))))[1] == 0


def test_both_orders_of_two_equal_factors_are_one(fused, counts):
    fused(body_of(lambda x, w: tanh(x * x) * w))
    assert counts.of(layers(1, lambda x, w: tanh(x * x).abs() * w))[1] == 0
    assert counts.of(layers(1, lambda x, w: tanh(x * x) * w))[1] == 1


# --- a definition that is written down as it runs is that of a full trace ------------------------------------------


def _is_random(graph) -> bool:
    """Whether two traces have values of their own: of what may be random each call is another."""
    targets = (node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload))
    return any(torch.Tag.nondeterministic_seeded in target.tags for target in targets)


def _bodies():
    for op in registry.ops.values():
        if not op.fuse or not (getattr(op.native, "__module__", "") or "").startswith("irframework."):
            continue
        natives = [] if known_by_spelling(op) else [op.registered["native"]]
        yield from ((op, body) for body in (*natives, *op.spellings))


def _values(expansion: Expansion, table: ValueTable, arguments):
    given = [
        table.leaf(("argument", index), value) if isinstance(value, Tensor) else value
        for index, value in enumerate(arguments)
    ]
    return table.outputs(expansion, given)


def test_what_is_recorded_of_a_definition_is_what_a_full_trace_has():
    compared = 0
    for op, body in _bodies():
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            arguments = list(samples_of(op, mode, []))[-1]
        graph, places, is_tuple = recorded(lambda *given, body=body: body.apply(given), list(arguments), mode)
        graph.eliminate_dead_code()
        if _is_random(graph):
            continue
        full = trace(lambda *given, body=body: body.apply(given), list(arguments), mode)
        full.module.graph.eliminate_dead_code()
        table = ValueTable(Definitions().expand)
        quick = _values(Expansion(graph, places, is_tuple, None), table, arguments)
        assert quick == _values(Expansion(full.module.graph, full.dynamic, full.is_tuple, full), table, arguments), op
        compared += 1
    assert compared > 30


def test_sizes_that_are_symbols_are_recorded_as_a_full_trace_has_them():
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    op = ir.ops.rms_norm_group_quant_fp8
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x = mode.from_tensor(torch.empty(6, 256), symbolic_context=context)
    arguments = op.bind((x, mode.from_tensor(torch.empty(256)), 0.5, 128))
    body = op.registered["native"]
    graph, places, is_tuple = recorded(lambda *given: body.apply(given), list(arguments), mode)
    full = trace(lambda *given: body.apply(given), list(arguments), mode)
    full.module.graph.eliminate_dead_code()
    table = ValueTable(Definitions().expand)
    quick = _values(Expansion(graph, places, is_tuple, None), table, arguments)
    assert quick == _values(Expansion(full.module.graph, full.dynamic, full.is_tuple, full), table, arguments)


def _writes(x: Tensor) -> Tensor:
    return x.clone().add_(1)


def _closes_over(x: Tensor) -> Tensor:
    return x + W


def _depends(x: Tensor) -> Tensor:
    return x * x.sum().item()


@pytest.mark.parametrize("body", [_writes, _closes_over, _depends], ids=["write", "tensor of its own", "data"])
def test_what_only_a_full_trace_can_follow_is_left_to_it(body):
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with pytest.raises(BeyondError):
        recorded(body, [mode.from_tensor(X)], mode)


def test_a_body_that_writes_to_what_it_made_is_still_found(fused):
    def body(x: Tensor, y: Tensor) -> Tensor:
        return x.tanh().mul_(y)

    op = fused(body)
    assert searched(gated, X, W.expand(4, 8).contiguous()).fusions == {op.name: 1}
