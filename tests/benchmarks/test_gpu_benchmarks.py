"""The programs for a GPU start on a CPU, too: whether they run, and what their tables say. Nothing is timed."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / program), "--device", "cpu", *arguments]
    # One thread: with more, tiny tensors cost waiting for each other.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment, check=False)


@pytest.mark.slow
def test_the_decoder_runs_all_five_ways_and_they_agree(tmp_path: Path) -> None:
    file = tmp_path / "decoder.json"
    done = run(
        "decoder_layer.py", "--tiny", "--cases", "decode64", "--kinds", "fp8_dynamic", "--seconds", "0.01",
        "--json", str(file),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = json.loads(file.read_text())["results"]
    assert set(found["microseconds"]) == {"floor", "eager", "compile", "ir", "ir+compile"}
    # Kernels round where the definitions round: the codes are the same, and so is all that follows.
    assert max(found["relative_error"]["ir"], found["relative_error"]["ir+compile"]) < 0.02


@pytest.mark.slow
def test_the_grid_is_measured_and_can_be_reported_on_later(tmp_path: Path) -> None:
    file = tmp_path / "providers.json"
    grid = ("--rows", "1,3", "--columns", "64", "--ops", "rms_norm,silu_and_mul_dynamic_quant_fp8")
    done = run(
        "providers_gpu.py", *grid, "--no-inductor", "--processes", "0", "--rounds", "2", "--json", str(file)
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert [(cell["op"], cell["rows"]) for cell in found["cells"]] == [
        ("rms_norm", 1),
        ("silu_and_mul_dynamic_quant_fp8", 1),
        ("rms_norm", 3),
        ("silu_and_mul_dynamic_quant_fp8", 3),
    ]
    assert set(found["cells"][0]["times"]) == {"vllm_c", "F.rms_norm"}
    again = run("providers_gpu.py", "--from", str(file))
    assert again.returncode == 0
    assert again.stdout.strip()
    assert done.stdout.endswith(again.stdout)


def cell(rows: int, columns: int, **times: float) -> dict[str, Any]:
    timed = {name.replace("_rms", ".rms"): {"median": value} for name, value in times.items()}
    return {"op": "rms_norm", "rows": rows, "columns": columns, "floor": 10.0, "times": timed, "warm": timed}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import providers_tables

    return providers_tables


def lines_of(tables: Any, cells: list[dict[str, Any]], **more: Any) -> list[str]:
    empty = {"cold": {"median": 2.0}, "warm": {"median": 1.0}}
    found = {"device": "a GPU", "torch": "2", "copy": 4e6, "cache_bytes": 1 << 20, "empty": empty, "cells": cells}
    text: str = tables.report({**found, "host": [], "failed": [], "not_measured": [], **more})
    return text.splitlines()


def line_after(lines: list[str], title: str, steps: int = 1) -> str:
    return lines[next(i for i, line in enumerate(lines) if line.startswith(title)) + steps]


def test_the_mean_is_of_the_better_provider_at_each_point(tables: Any) -> None:
    cells = [cell(2048, 4096, vllm_c=11.0, triton=20.0), cell(8192, 4096, vllm_c=20.0, triton=12.0)]
    line = line_after(lines_of(tables, cells), "time over floor, geometric mean", 2)
    assert line.split() == ["rms_norm", "1.483", "1.549", "1.149", "goal", "1.22", "met"]
    line = line_after(lines_of(tables, [cell(2048, 64, vllm_c=12.3)]), "time over floor, geometric mean", 2)
    assert line.endswith("goal 1.22 MISSED")


def test_a_mean_over_fewer_points_than_the_others_is_not_shown(tables: Any) -> None:
    cells = [cell(2048, 4096, vllm_c=10.0, inductor=11.0), cell(8192, 4096, vllm_c=10.0)]
    line = line_after(lines_of(tables, cells), "time over floor, geometric mean", 2)
    assert line.split()[1:3] == ["1.000", "-"]


def test_small_rows_are_compared_with_an_empty_kernel(tables: Any) -> None:
    lines = lines_of(tables, [cell(1, 4096, vllm_c=1.2), cell(64, 4096, vllm_c=1.3), cell(256, 4096, vllm_c=9.0)])
    assert line_after(lines, "time over an empty kernel's (1.00 us), cache warm").split()[-3:] == [
        "goal",
        "1.25",
        "MISSED",
    ]
    assert line_after(lines, "time over an empty kernel's (2.00 us), cache cold").split()[-3:] == [
        "goal",
        "1.25",
        "met",
    ]


def test_the_largest_point_has_a_goal_of_its_own(tables: Any) -> None:
    lines = lines_of(tables, [cell(32768, 8192, vllm_c=11.0, triton=10.4)])
    assert line_after(lines, "time over floor at 32768 x 8192").endswith("goal 1.05 met")


def test_points_where_another_is_faster_are_listed(tables: Any) -> None:
    cells = [cell(1, 64, vllm_c=10.3, inductor=10.0), cell(1, 128, vllm_c=10.4, inductor=10.0, liger=11.0)]
    lines = lines_of(tables, cells)
    line = line_after(lines, "points where")
    assert "rms_norm 1 x 128" in line
    assert line.endswith("inductor     10.00 us: 1.040")
    assert "1 of 2 points" in lines


def test_failures_and_what_the_time_did_not_reach_are_told(tables: Any) -> None:
    lines = lines_of(tables, [], failed=["triton rms_norm 1x64: no"], not_measured=["rms_norm 1x128"])
    assert "FAILED   triton rms_norm 1x64: no" in lines
    assert "not measured, the time was up: rms_norm 1x128" in lines


def test_processes_share_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from compile_ahead import my_share

    shares = [list(my_share(f"{part}/3", 8)) for part in range(3)]
    assert sorted(itertools.chain(*shares)) == list(range(8))
