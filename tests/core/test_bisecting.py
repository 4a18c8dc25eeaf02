"""The limit on choices of a kernel, in eager calls: numbers, reasons, the log, and what costs nothing without it."""

import json
import os
from pathlib import Path

import pytest
import torch

import irframework as ir
from irframework import bisecting, errors
from irframework.call_site import call_site, site_in_trace
from irframework.registry import registry
from irframework.settings import settings


@pytest.fixture
def bisect(monkeypatch, tmp_path):
    """Set the limit and the log as if the program began now; returns what reads the log."""

    def begin(limit=None, log=True):
        for name, value in (("LIMIT", limit), ("LOG", tmp_path / "log" if log else None)):
            if value is None:
                monkeypatch.delenv(f"IRFRAMEWORK_BISECT_{name}", raising=False)
            else:
                monkeypatch.setenv(f"IRFRAMEWORK_BISECT_{name}", str(value))
        _start_again()
        return lambda: [json.loads(line) for line in Path(tmp_path / "log").read_text().splitlines()]

    yield begin
    monkeypatch.undo()
    _start_again()


def _start_again():
    settings.cache_clear()
    settings()
    bisecting.start_again()
    registry.changed()


@pytest.fixture
def op(declare):
    """Twice x by native, 10 by the provider `ten`, 20 by the provider `twenty`."""
    op = declare()

    @op.register_impl("ten")
    def ten(x, weight=None, epsilon=1e-6):
        return torch.full_like(x, 10)

    @op.register_impl("twenty")
    def twenty(x, weight=None, epsilon=1e-6):
        return torch.full_like(x, 20)

    return op


X = torch.ones(2)


def test_the_first_choices_stand_and_later_ones_are_native(op, bisect):
    bisect(2)
    results = [op(X)[0].item()]
    results += [op(X)[0].item()]
    results += [op(X)[0].item()]
    assert results == [10, 10, 2]


def test_a_call_site_takes_one_number_and_keeps_its_kernel(op, bisect):
    bisect(1)
    results = [op(X)[0].item() for _ in range(3)]
    later = op(X)[0].item()
    assert (results, later) == ([10, 10, 10], 2)


def test_two_calls_on_one_line_are_two_call_sites(op, bisect):
    bisect(1)
    assert (op(X)[0].item(), op(X)[0].item()) == (10, 2)


def test_another_provider_at_the_same_place_takes_a_number_of_its_own(op, bisect):
    log = bisect(1)
    results = []
    for provider in ("ten", "twenty"):
        with ir.priority({op.name: provider}):
            results.append(op(X)[0].item())
    assert results == [10, 2]
    assert [entry["provider"] for entry in log()] == ["ten"]


def test_a_limit_of_nothing_leaves_native(op, bisect):
    bisect(0)
    assert op(X)[0].item() == 2


def test_native_takes_no_number(op, bisect):
    bisect(1)
    with ir.priority({op.name: "native"}):
        op(X)
    assert op(X)[0].item() == 10


def test_without_a_limit_the_log_numbers_everything(op, bisect):
    log = bisect()
    op(X)
    op(X)
    assert [(entry["number"], entry["op"], entry["provider"]) for entry in log()] == [
        (1, op.name, "ten"),
        (2, op.name, "ten"),
    ]


def test_an_entry_says_where_the_call_and_the_kernel_are(op, bisect):
    log = bisect()
    op(X)  # this line
    (entry,) = log()
    assert entry["call_site"].endswith(", in test_an_entry_says_where_the_call_and_the_kernel_are: op(X)  # this line")
    assert entry["call_site"].startswith(f"{__file__}:")
    assert entry["source"] == op.registered["ten"].source
    assert (entry["pid"], entry["plugin"], entry["node"], entry["graph"]) == (os.getpid(), None, None, None)


def test_a_decision_says_that_the_limit_is_used_up(op, bisect):
    bisect(0)
    decision = ir.explain(op, X)
    assert decision.provider == "native"
    assert [(c.provider, c.accepted, c.reason) for c in decision.candidates] == [
        ("ten", True, "IRFRAMEWORK_BISECT_LIMIT=0 is used up"),
        ("twenty", True, "IRFRAMEWORK_BISECT_LIMIT=0 is used up"),
        ("native", True, None),
    ]


def test_asking_takes_no_number(op, bisect):
    bisect(1)
    assert ir.explain(op, X).provider == "ten"
    assert op.dispatch(X).provider == "ten"
    assert op(X)[0].item() == 10


def test_the_next_provider_does_not_step_in_where_the_limit_is_used_up(op, bisect):
    bisect(1)
    results = []
    for providers in ("twenty", "ten,twenty"):  # `twenty` has a number here when `ten` is refused
        with ir.priority({op.name: providers}):
            results.append(op(X)[0].item())
    assert results == [20, 2]


def test_a_number_is_logged_before_the_kernel_runs(declare, bisect):
    op = declare()
    seen = []

    @op.register_impl("crashes")
    def crashes(x, weight=None, epsilon=1e-6):
        seen.extend(log())
        raise MemoryError

    log = bisect()
    with pytest.raises(MemoryError):
        op(X)
    assert [entry["provider"] for entry in seen] == ["crashes"]


def test_calls_through_the_torch_op_are_numbered_at_the_users_line(op, bisect):
    log = bisect(1)
    x = X.clone().requires_grad_()
    first, second = op(x), op(x)  # gradients are needed
    assert (first[0].item(), second[0].item()) == (10, 2)
    assert log()[0]["call_site"].endswith("# gradients are needed")


def test_a_framework_line_is_not_the_users(op, bisect):
    log = bisect()
    filename = os.path.join(os.path.dirname(ir.__file__), "integrations", "patched.py")
    scope = {"op": op, "X": X}
    exec(compile("def patched():\n    return op(X)\n", filename, "exec"), scope)
    scope["patched"]()  # the user's line
    assert log()[0]["call_site"].endswith("# the user's line")


def test_a_node_of_a_graph_that_runs_as_it_is_names_who_called_the_graph(op, bisect):
    log = bisect()
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output((graph.call_function(op.torch_op, (x,)), graph.call_function(op.torch_op, (x,))))
    torch.fx.GraphModule({}, graph)(X)  # calls the graph
    first, second = (entry["call_site"] for entry in log())
    assert first != second
    assert first.startswith("<eval_with_key>")
    assert first.endswith("# calls the graph)")


def test_no_frame_of_the_users_is_said_to_be_unknown(monkeypatch):
    monkeypatch.setattr("irframework.call_site.is_users", lambda filename: False)
    assert call_site().text == "unknown"


def test_the_innermost_line_of_the_users_is_taken_from_a_trace():
    inside = os.path.join(os.path.dirname(torch.__file__), "nn", "modules", "module.py")
    trace = (
        '  File "a.py", line 1, in f\n    g(x)\n  File "b.py", line 22, in g\n    return norm(x)\n'
        f'  File "{inside}", line 3, in call\n    return op(x)\n'
        '  File "<irframework traced_call 0>", line 2, in traced_call\n    return torch_op(x)\n'
    )
    assert site_in_trace(trace) == "b.py:22, in g: return norm(x)"


def test_a_trace_without_code_or_frames():
    assert site_in_trace('File "a.py", line 1, in f\nFile "b.py", line 2') == "b.py:2"
    assert site_in_trace("") == ""


def test_no_dispatcher_is_generated_while_choices_are_numbered(op, bisect):
    bisect(5)
    op(X)
    op(X)
    assert op.generated == {}


def test_a_generated_dispatcher_knows_nothing_of_numbers(op, bisect):
    bisect(log=False)
    op(X)
    op(X)
    (function,) = op.generated.values()
    assert not [name for name in function.__globals__ if "bisect" in name]


def test_the_empty_text_is_no_limit(bisect):
    bisect("", log=False)
    assert not bisecting.active()


@pytest.mark.parametrize("text", ["-1", "many", "1.5"])
def test_a_limit_that_is_no_number_is_an_error(bisect, text):
    with pytest.raises(errors.ConfigError, match=f"IRFRAMEWORK_BISECT_LIMIT='{text}'"):
        bisect(text)


def test_a_log_that_cannot_be_written_is_an_error(op, bisect, tmp_path, monkeypatch):
    bisect()
    monkeypatch.setenv("IRFRAMEWORK_BISECT_LOG", str(tmp_path / "nowhere" / "log"))
    settings.cache_clear()
    with pytest.raises(errors.ConfigError, match=r"IRFRAMEWORK_BISECT_LOG=.*nowhere.*No such file"):
        op(X)


def test_a_forked_child_counts_its_own(op, bisect):
    log = bisect(1)
    op(X)
    child = os.fork()
    if child == 0:
        os._exit(0 if op(X)[0].item() == 10 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert [(entry["number"], entry["pid"]) for entry in log()] == [(1, os.getpid()), (1, child)]


def test_a_number_that_another_thread_took_meanwhile_is_not_given_twice(op, bisect):
    bisect(1)
    impl = op.registered["ten"]
    taken = [bisecting.takes_number(impl), bisecting.takes_number(impl)]
    assert taken == [True, False]
