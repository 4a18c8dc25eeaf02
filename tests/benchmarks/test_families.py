"""What `providers_gpu.py --ops families` calls is what the fused ops mean, and its table says what was found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import irframework as ir

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
import families_gpu  # noqa: E402
import fused_families  # noqa: E402

sys.path.remove(str(BENCHMARKS))
FAMILIES = {family.name: family for family in fused_families.FAMILIES}


def made(name: str, tokens: int = 3) -> tuple[Any, ...]:
    torch.manual_seed(0)
    arguments: tuple[Any, ...] = FAMILIES[name].make(tokens, fused_families.TINY, "cpu")
    return arguments


def flat(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.parts])
def test_the_parts_one_after_the_other_are_the_fused_op(name: str) -> None:
    family = FAMILIES[name]
    kernels = {part: getattr(ir.ops, part).native for part in family.part_ops}
    wanted = flat(getattr(ir.ops, family.op).native(*made(name)))
    got = flat(family.parts(kernels)(*made(name)))
    for mine, right in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.float(), right.float())


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.plain])
@pytest.mark.parametrize("tokens", [3, 300], ids=["decoding", "prompt"])
def test_plain_torch_writes_what_the_op_returns(name: str, tokens: int) -> None:
    family, arguments = FAMILIES[name], made(name, tokens)
    names = list(getattr(ir.ops, family.op).signature.parameters)
    query, key, *caches = getattr(ir.ops, family.op).native(*arguments)
    before = arguments[names.index("key_cache")].clone()
    got = family.plain(*arguments)
    written = [arguments[names.index(cache)] for cache in ("key_cache", "value_cache")]
    for mine, right in zip((*got, *written), (query, key, *caches), strict=True):
        torch.testing.assert_close(mine, right)
    assert not torch.equal(before, written[0])


@pytest.mark.parametrize("name", list(FAMILIES))
def test_the_kernel_for_gpus_takes_every_call(name: str) -> None:
    impls = getattr(ir.ops, FAMILIES[name].op).impls
    if "triton" not in ir.ops.rms_norm.impls:
        pytest.skip("the plugin is not installed")
    for tokens in {1, 300 if 2048 in FAMILIES[name].tokens else 3}:
        assert impls["triton"].accepts(made(name, tokens)) is True


def test_a_cache_that_is_written_to_is_not_among_the_bytes_that_are_read() -> None:
    arguments = made("rotary + cache")
    positions, query, key, value, *_, slots = arguments[:7]
    read = sum(t.numel() * t.element_size() for t in (positions, query, key, value, slots))
    assert FAMILIES["rotary + cache"].moved(arguments) == read


def cell(tokens: int, parts: float | None, inductor: float = 3.0, family: str = "norm") -> dict[str, Any]:
    gains = {"parts": parts, "inductor": inductor}
    times = {name: {"median": 10.0 * gain} for name, gain in gains.items() if gain is not None}
    return {
        "family": family,
        "tokens": tokens,
        "times": {"fused": {"median": 10.0}, **times},
        "gains": {n: {"median": g, "low": g - 0.1, "high": g + 0.1} for n, g in gains.items() if g is not None},
    }


def lines_of(*cells: dict[str, Any], **more: Any) -> list[str]:
    found = {"device": "a GPU", "torch": "2", "cells": list(cells), "failed": [], "not_measured": []}
    return families_gpu.report({**found, **more}).splitlines()


def test_a_gain_is_shown_with_its_spread() -> None:
    line = next(line for line in lines_of(cell(64, 1.5)) if line.startswith("norm"))
    assert line.split() == ["norm", "64", "10.00", "15.00", "30.00", "1.500", "[1.400-1.600]", "3.000", "[2.900-3.100]"]


def test_means_are_geometric_and_tell_decoding_from_prompts() -> None:
    lines = lines_of(cell(1, 1.0), cell(256, 4.0), cell(2048, 2.0), cell(8192, 2.0))
    assert lines[-2].split() == ["norm", "2.000", "2.000", "2.000", "3.000", "3.000", "3.000"]


def test_a_mean_that_lacks_a_point_is_not_shown() -> None:
    assert lines_of(cell(1, 1.0), cell(64, None), cell(2048, 2.0))[-2].split()[1:4] == ["-", "2.000", "-"]


def test_what_failed_and_what_was_not_reached_is_told() -> None:
    lines = lines_of(failed=["parts of norm 1: no"], not_measured=["norm 64"])
    assert "FAILED   parts of norm 1: no" in lines
    assert "not measured, the time was up: norm 64" in lines


@pytest.mark.slow
def test_families_are_measured_and_can_be_reported_on_later(tmp_path: Path) -> None:
    file = tmp_path / "families.json"
    common = [sys.executable, str(BENCHMARKS / "providers_gpu.py"), "--ops", "families", "--device", "cpu"]
    asked = ["--families", "qk_norm_rotary_embedding_reshape_and_cache,silu_mul,mla_attention", "--tiny"]
    quick = ["--no-inductor", "--processes", "0", "--rounds", "2", "--json", str(file)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*common, *asked, *quick], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert [(cell["op"], cell["tokens"], sorted(cell["times"])) for cell in found["cells"]] == [
        ("qk_norm_rotary_embedding_reshape_and_cache", 1, ["fused", "parts"]),
        ("qk_norm_rotary_embedding_reshape_and_cache", 3, ["fused", "parts"]),
        ("silu_mul", 1, ["fused"]),
        ("silu_mul", 3, ["fused"]),
    ]
    assert "left out mla_attention + static fp8 1: LookupError: vllm_c" in done.stdout
    again = subprocess.run([*common, "--from", str(file)], capture_output=True, text=True, env=environment, check=False)
    assert again.stdout.strip()
    assert done.stdout.endswith(again.stdout)
