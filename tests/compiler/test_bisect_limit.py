"""The limit on choices of a kernel, in compiled graphs: numbers, reasons, and that nothing comes from a cache."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiler_support import Kernels, report, run, tensors
from torch import Tensor

from irframework import bisecting
from irframework.compiler.pipeline import PostPass, PrePass
from irframework.registry import registry
from irframework.settings import settings


@pytest.fixture
def bisect(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Callable[[], list[Any]]]]:
    """Set the limit as if the program began now; returns what reads the numbered choices."""

    def begin(limit: int | None) -> Callable[[], list[Any]]:
        log = tmp_path / "log"
        monkeypatch.setenv("IRFRAMEWORK_BISECT_LOG", str(log))
        if limit is not None:
            monkeypatch.setenv("IRFRAMEWORK_BISECT_LIMIT", str(limit))
        _start_again()
        return lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []

    yield begin
    monkeypatch.undo()
    _start_again()


def _start_again() -> None:
    settings.cache_clear()
    bisecting.start_again()
    registry.changed()


def _numbered(log: list[Any]) -> list[Any]:
    return [entry for entry in log if "number" in entry]


@pytest.fixture
def triple(scale: Any) -> Any:
    """The op `scale` with a provider that multiplies by three."""

    @scale.register_impl("three")
    def three(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * 3

    return scale


@pytest.mark.parametrize(("limit", "expected"), [(0, 8), (1, 12), (2, 18), (3, 27), (9, 27)])
def test_the_first_nodes_keep_their_kernels(triple: Any, bisect: Any, limit: int, expected: float) -> None:
    bisect(limit)
    result = run(lambda x: triple(triple(triple(x))), torch.ones(2))
    assert result[0].item() == expected


def test_report_decisions_and_log_agree(triple: Any, bisect: Any) -> None:
    log = bisect(1)
    run(lambda x: triple(triple(x)), torch.ones(2))
    first, second = report().decisions
    assert report().selected_impls == {triple.name: {first: "three", second: "native"}}
    assert report().decisions[first].provider == "three"
    refused, chosen = report().decisions[second].candidates
    assert (refused.provider, refused.reason) == ("three", "IRFRAMEWORK_BISECT_LIMIT=1 is used up")
    assert (chosen.provider, chosen.reason) == ("native", None)
    assert [(entry["number"], entry["node"]) for entry in _numbered(log())] == [(1, first)]


def test_an_entry_names_graph_pass_and_line(triple: Any, bisect: Any) -> None:
    log = bisect(None)
    run(lambda x: triple(x), torch.ones(2))  # this line
    (entry,) = _numbered(log())
    assert (entry["op"], entry["provider"], entry["stage"]) == (triple.name, "three", "lower_functional")
    assert entry["graph"] == "0/0"
    assert entry["call_site"].startswith(f"{__file__}:")
    assert entry["call_site"].endswith("# this line")


def test_in_place_kernels_are_numbered_when_they_are_lowered(add: Kernels, triple: Any, bisect: Any) -> None:
    log = bisect(None)
    x, r, w = tensors((4, 8), (4, 8), (8,))
    run(lambda x, r, w: triple(add.op(x, r, w)[0]), x, r, w)
    assert [(entry["op"], entry["stage"]) for entry in _numbered(log())] == [
        (triple.name, "lower_functional"),
        (add.op.name, "lower_inplace"),
    ]


def test_an_in_place_kernel_beyond_the_limit_becomes_native(add: Kernels, bisect: Any) -> None:
    bisect(0)
    x, r, w = tensors((4, 8), (4, 8), (8,))
    expected = add.op.native(x, r, w)
    result = run(lambda x, r, w: add.op.maybe_inplace(x, r, w), x.clone(), r.clone(), w)
    torch.testing.assert_close(result, expected)
    assert set(report().selected_impls[add.op.name].values()) == {"native"}


def test_ops_inside_an_implementation_follow_it(triple: Any, declare: Any, bisect: Any) -> None:
    outer = declare()

    @outer.register_impl("with_inner")
    def with_inner(x: Tensor, weight: Tensor | None = None, epsilon: float = 1e-6) -> Tensor:
        return triple(x)

    log = bisect(None)
    run(lambda x: triple(outer(x)), torch.ones(2))
    assert [entry["op"] for entry in _numbered(log())] == [outer.name, triple.name, triple.name]


def test_the_passes_that_can_be_switched_off_are_logged(add: Kernels, bisect: Any) -> None:
    log = bisect(None)
    run(lambda x, r, w: add.op(x, r, w), *tensors((4, 8), (4, 8), (8,)))
    names = [name for entry in log() for name in entry.get("passes", ())]
    assert [name for name in names if name in ("lower_functional", "lower_inplace", "remove_copies", "verify")] == [
        "lower_functional",
        "lower_inplace",
        "remove_copies",
        "verify",
    ]
    assert "settle_donations" not in names


@pytest.mark.parametrize("limit", [None, 0, 3])
def test_nothing_may_be_cached_while_choices_are_numbered(bisect: Any, limit: int | None) -> None:
    assert all(stage().uuid() is not None for stage in (PrePass, PostPass))
    bisect(limit)
    assert all(stage().uuid() is None for stage in (PrePass, PostPass))


PROGRAM = """
import torch
import irframework as ir

@ir.register_op(name="tbl_scale")
def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 2

@scale.register_impl("three")
def three(x):
    return x * 3

with torch.no_grad():
    result = torch.compile(lambda x: scale(scale(x) + 1) + 1, backend="irframework")(torch.ones(4))
print(result[0].item(), ir.last_report().from_cache)
"""


@pytest.mark.slow
def test_no_process_with_a_limit_takes_from_or_gives_to_a_cache(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)

    def process(**variables: str) -> list[str]:
        known = {name: value for name, value in os.environ.items() if not name.startswith("IRFRAMEWORK_BISECT")}
        environment = {**known, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"), **variables}
        done = subprocess.run(
            [sys.executable, program], env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout.split()

    assert process(IRFRAMEWORK_BISECT_LIMIT="1") == ["9.0", "False"]
    assert process() == ["13.0", "False"]  # nothing of the limited run was kept
    assert process() == ["13.0", "True"]
    assert process(IRFRAMEWORK_BISECT_LIMIT="0") == ["7.0", "False"]
