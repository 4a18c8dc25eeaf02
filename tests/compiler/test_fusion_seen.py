"""What is seen of fusions: the report, what is kept of it, ops that are left out, and the numbers for bisect."""

import itertools
import json
import os

import pytest
import torch
from compiler_support import lowered, report, run
from torch import Tensor

import irframework as ir
from irframework import bisecting, notices
from irframework.compiler.report import MissedFusion, Report
from irframework.registry import Transaction, registry
from irframework.settings import settings

_numbers = itertools.count()
X = torch.linspace(-2, 2, 32).reshape(4, 8)


def bent(x: Tensor) -> Tensor:
    return torch.tanh(x) + x


def twice_bent(x: Tensor) -> Tensor:
    return bent(bent(x))


@pytest.fixture
def op():
    """A fused op `bent` with provider k; it is gone after the test."""
    transaction = Transaction("acme")
    with registry.registering(transaction):
        op = ir.register_op(name=f"tfs_bent_{os.getpid()}_{next(_numbers)}", fuse=True)(bent)
        op.register_impl("k")(lambda x: x + torch.tanh(x))
    op.plugin = None
    yield op
    transaction.roll_back()


@pytest.fixture
def environment(monkeypatch):
    """Set variables as if the program began now."""

    def begin(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"IRFRAMEWORK_{name}", value)
        start()

    def start():
        settings.cache_clear()
        bisecting.start_again()
        notices._said.clear()
        registry.changed()

    yield begin
    monkeypatch.undo()
    start()


# --- the report ----------------------------------------------------------------------------------------------------


def test_a_miss_names_op_node_reason_and_line(op):
    def program(x):
        t = torch.tanh(x)
        return t + x, t.sum()  # the miss

    run(program, X)
    (miss,) = [each for each in report().missed_fusions if each.op == op.name]
    assert "is also used by" in miss.reason
    assert miss.line.endswith("in program: return t + x, t.sum()  # the miss")
    text = str(report())
    assert text.startswith(report().summary())
    assert f"not fused: {op.name} at {miss.node} ({miss.line}): {miss.reason}" in text


def test_equal_misses_stand_once_in_the_text():
    many = Report(missed_fusions=[MissedFusion("a", f"n{index}", "why") for index in range(3)])
    assert str(many).splitlines()[1:] == ["  not fused: a at n0 and at 2 more: why"]


def test_a_report_as_json_holds_fusions_and_misses(op):
    run(lambda x: (bent(x), torch.tanh(x + 1).sum() + x), X)
    data = json.loads(json.dumps(report().to_dict()))
    assert data["fusions"][op.name] == 1
    assert all(set(miss) == {"op", "node", "reason", "line"} for miss in data["missed_fusions"])


def test_an_op_that_native_took_back_is_a_miss_with_its_line(op):
    op.unregister_impl("k")
    op.register_impl("k")(lambda x: x[:1])
    run(lambda x: bent(x), X)  # taken back
    (miss,) = [each for each in report().missed_fusions if each.op == op.name]
    assert miss.reason.startswith("k cannot be lowered: ")
    assert miss.line.startswith(f"{__file__}:")
    assert op.name not in report().fusions


# --- ops that are left out -----------------------------------------------------------------------------------------


def test_an_op_that_is_left_out_is_not_fused(op, configured):
    configured(disable_fusions=[op.name])
    run(twice_bent, X)
    assert op.name not in report().fusions


def test_the_environment_leaves_ops_out_and_names_what_is_none(op, environment, caplog):
    environment(DISABLE_FUSIONS=f"{op.name},{op.name}s")
    run(twice_bent, X)
    assert op.name not in report().fusions
    assert f"IRFRAMEWORK_DISABLE_FUSIONS names '{op.name}s', which is no fused op" in caplog.text
    assert f"Did you mean '{op.name}'" in caplog.text


def test_leaving_an_op_out_compiles_again(op, configured):
    compiled = torch.compile(twice_bent, backend=lowered)
    with torch.no_grad():
        compiled(X)
        assert report().fusions[op.name] == 2
        configured(disable_fusions=[op.name])
        compiled(X)
        assert op.name not in report().fusions
        configured()
        compiled(X)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_fusion_without_any_fused_op_changes_nothing(configured, monkeypatch):
    from irframework.compiler import fusion

    configured(fusion=True)
    monkeypatch.setattr(fusion, "looked_for", list)
    torch.testing.assert_close(run(twice_bent, X), twice_bent(X))


# --- numbers for bisect --------------------------------------------------------------------------------------------


def numbered(log):
    entries = [json.loads(line) for line in log.read_text().splitlines()]
    return [entry for entry in entries if "number" in entry]


def test_a_fusion_takes_a_number_before_the_kernels_of_its_graph(op, environment, tmp_path):
    environment(BISECT_LOG=str(tmp_path / "log"))
    run(lambda x: bent(x), X)  # fused
    fusion, kernel = numbered(tmp_path / "log")
    assert (fusion["number"], fusion["op"], fusion["provider"], fusion["stage"]) == (1, op.name, "fusion", "fuse")
    assert fusion["source"] == op.source
    assert fusion["graph"] == "0/0"
    assert fusion["call_site"].startswith(f"{__file__}:")
    assert (kernel["number"], kernel["op"], kernel["provider"]) == (2, op.name, "k")
    assert kernel["call_site"] == fusion["call_site"]


@pytest.mark.parametrize(("limit", "fused", "providers"), [(0, 0, []), (1, 1, ["native"]), (3, 2, ["k", "native"])])
def test_only_so_many_fusions_stand(op, environment, limit, fused, providers):
    environment(BISECT_LIMIT=str(limit))
    torch.testing.assert_close(run(twice_bent, X), twice_bent(X))
    assert report().fusions.get(op.name, 0) == fused
    assert list(report().selected_impls.get(op.name, {}).values()) == providers
    assert any(f"IRFRAMEWORK_BISECT_LIMIT={limit} is used up" in miss.reason for miss in report().missed_fusions) is (
        fused < 2
    )
