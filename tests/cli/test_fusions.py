"""What `run`, `explain --fusions` and `doctor` say of fusions."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import irframework as ir
from irframework.cli import main
from irframework.cli.fusions import Fusions, MissRow
from irframework.compiler.report import MissedFusion, Report

Json = Callable[..., tuple[int, Any]]
NORMS = ("rms_norm", "fused_add_rms_norm")
TINY = "random:llama-tiny"


@pytest.fixture(autouse=True)
def no_leftover_compilation() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.fixture
def provider() -> Iterator[tuple[str, ...]]:
    """A provider of both norms; the flags that put it in front."""
    for name in NORMS:
        op = getattr(ir.ops, name)
        op.register_impl("tcf")(op.native)
    yield tuple(f"--ir-op-priority.{name}=tcf" for name in NORMS)
    for name in NORMS:
        getattr(ir.ops, name).unregister_impl("tcf")


def test_equal_misses_are_one_row_with_a_node_and_a_line() -> None:
    reports = [
        Report(fusions={"a": 1, "b": 3}, missed_fusions=[MissedFusion("a", "n", "why", "f.py:1")]),
        Report(fusions={"a": 1}, missed_fusions=[MissedFusion("a", "m", "why"), MissedFusion("a", "m", "other")]),
        None,
    ]
    found = Fusions.of(reports)
    assert found.fused == {"b": 3, "a": 2}
    assert list(found.fused) == ["b", "a"]
    assert found.missed == (MissRow("a", 2, "why", "n", "f.py:1"), MissRow("a", 1, "other", "m", ""))
    assert found.graphs == 2


def test_a_model_in_plain_torch_is_explained(as_json: Json, provider: tuple[str, ...]) -> None:
    code, document = as_json("explain", "--fusions", TINY, *provider)
    assert code == 0
    assert document["state"] == "on (default)"
    assert {name: document["fused"].get(name, 0) for name in NORMS} == {"rms_norm": 1, "fused_add_rms_norm": 4}
    assert document["graphs"] == 1


def test_what_only_native_would_run_is_a_miss_with_a_source_line(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--ir-op-priority.{name}=native" for name in NORMS]
    assert main(["explain", "--fusions", TINY, *flags]) == 0
    out = capsys.readouterr().out
    assert "No part of the graph became a fused op." in out
    for text in ("What nearly did", "rms_norm", "only native would run it", "modeling_llama.py:"):
        assert text in out


def test_in_a_model_that_is_patched_first_only_what_spans_its_layers_is_left(
    as_json: Json, provider: tuple[str, ...]
) -> None:
    document = as_json("explain", "--fusions", TINY, "--patched", *provider)[1]
    assert {name: document["fused"].get(name, 0) for name in NORMS} == {"rms_norm": 0, "fused_add_rms_norm": 2}


def test_an_op_that_is_left_out_on_the_command_line(as_json: Json, provider: tuple[str, ...]) -> None:
    flags = ("--ir-disable-fusions", "fused_add_rms_norm")
    document = as_json("explain", "--fusions", TINY, *provider, *flags)[1]
    assert "fused_add_rms_norm" not in document["fused"]
    assert document["fused"]["rms_norm"] == 5
    assert document["without"] == ["fused_add_rms_norm"]


def test_switched_off_it_says_by_whom(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--model", TINY, "--max-new-tokens", "1", "--no-ir-fusion"]) == 0
    assert "Fusion: off (--ir-fusion)" in capsys.readouterr().out


@pytest.mark.parametrize("argv", [["explain"], ["explain", "rms_norm", "--fusions", TINY]])
def test_explain_wants_an_op_or_a_model(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(argv)
    assert left.value.code == 2


def test_a_model_that_is_not_there_is_an_error(as_json: Json) -> None:
    code, document = as_json("explain", "--fusions", "random:lama-tiny")
    assert (code, document["error"]["type"]) == (1, "ModelNotFoundError")


def test_an_eager_run_says_that_nothing_was_fused(capsys: pytest.CaptureFixture[str], as_json: Json) -> None:
    run = ("run", "--model", TINY, "--max-new-tokens", "1")
    assert main([*run]) == 0
    assert "Fusion: enabled, not run (eager): on (default)" in capsys.readouterr().out
    document = as_json(*run)[1]["fusion"]
    assert (document["state"], document["fused"]) == ("enabled, not run (eager): on (default)", {})


@pytest.mark.slow
def test_a_compiled_run_shows_fusions_and_misses(as_json: Json) -> None:
    document = as_json("run", "--model", TINY, "--max-new-tokens", "2", "--mode", "compile")[1]["fusion"]
    assert document["state"] == "on (default)"
    assert document["graphs"] == 1
    assert all(row["reason"] and row["node"] for row in document["missed"])
