"""`irframework check`."""

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch

import irframework as ir
from irframework.cli import main

Json = Callable[..., tuple[int, Any]]


@pytest.fixture
def op(declare: Callable[..., ir.IrOp]) -> ir.IrOp:
    """An op with one provider that keeps its contract and one that overwrites its argument."""
    op = declare()

    @op.register_input_generator
    def inputs(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[Any, ...]:
        if shape not in ((5, 34), (1, 64), (16, 64)) or dtype is not torch.float32:
            raise ValueError("few calls show enough")
        return (torch.randn(shape, device=device),)

    op.register_impl("honest")(lambda x, weight=None, epsilon=1e-6: x * 2)
    op.register_impl("liar")(lambda x, weight=None, epsilon=1e-6: x.mul_(2).clone())
    return op


def test_all_is_well(as_json: Json, op: ir.IrOp) -> None:
    code, document = as_json("check", "honest", "--op", op.name, "--device", "cpu")
    assert code == 0
    assert document["broken"] == 0
    (result,) = document["results"]
    assert (result["op"], result["provider"], result["device"]) == (op.name, "honest", "cpu")
    assert result["calls"] > 10
    assert (result["ok"], result["skipped"]) == (True, None)
    assert {rule["rule"]: rule["status"] for rule in result["rules"]}["values"] == "passed"


def test_a_broken_contract_is_an_exit_code_and_names_who_and_where(as_json: Json, op: ir.IrOp) -> None:
    code, document = as_json("check", "--op", op.name, "--rule", "writes")
    assert code == 1
    assert [(r["provider"], r["ok"]) for r in document["results"]] == [("honest", True), ("liar", False)]
    (writes,) = (rule for rule in document["results"][1]["rules"] if rule["rule"] == "writes")
    (violation,) = writes["violations"]
    assert violation["rule"] == "writes"
    assert "'liar'" in violation["what"]
    assert "tests/cli/test_check.py:" in violation["what"]
    assert "x=float32[5, 34]" in violation["inputs"]


def test_people_are_shown_the_same(op: ir.IrOp, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--op", op.name, "--rule", "writes"]) == 1
    out = capsys.readouterr().out
    assert "broken: writes" in out
    assert "kept" in out
    assert "writes: Implementation 'liar' of op" in out
    assert "Register it with inplace=True" in out
    assert "Contracts are broken, in 1 way." in out
    assert main(["check", "honest", "--op", op.name, "--rule", "writes"]) == 0
    assert "1 implementation that runs here keeps its contract" in capsys.readouterr().out


def test_native_can_be_asked_for(as_json: Json, op: ir.IrOp) -> None:
    code, document = as_json("check", "native", "--op", op.name, "--rule", "values")
    assert (code, [r["provider"] for r in document["results"]]) == (0, ["native"])


def test_where_nothing_runs_nothing_is_broken(op: ir.IrOp, capsys: pytest.CaptureFixture[str]) -> None:
    op.register_impl("absent", supported=lambda: 1 / 0)(lambda x, weight=None, epsilon=1e-6: x)
    assert main(["check", "absent", "--op", op.name]) == 0
    out = capsys.readouterr().out
    assert "not checked: supported() raised ZeroDivisionError" in out
    assert "Nothing could be checked here." in out


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        (("nobody",), "UnknownProviderError"),
        (("--op", "rms_nrom"), "UnknownOpError"),
        (("--device", "xyz"), "DeviceUnavailableError"),
    ],
)
def test_a_wrong_name_is_an_error(as_json: Json, arguments: tuple[str, ...], kind: str) -> None:
    code, document = as_json("check", *arguments)
    assert (code, document["error"]["type"]) == (1, kind)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--jobs", "-3"),
        ("--jobs", "two"),
        ("--timeout", "0"),
        ("--timeout", "nan"),
        ("--timeout", "inf"),
        ("--timeout", "soon"),
    ],
)
def test_wrong_usage_is_told_before_anything_runs(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["check", "native", *arguments])
    assert left.value.code == 2
    assert f"not {arguments[1]!r}" in capsys.readouterr().err


def test_a_plugin_that_lies_is_named_with_its_version(
    distribution: Callable[..., Any], process: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    distribution(
        "acme-kernels",
        """
        @ir.hookimpl
        def irframework_register_impls():
            @ir.ops.silu_and_mul.register_impl("acme")
            def silu_and_mul(x):
                gate, up = x.chunk(2, dim=-1)
                return gate.sigmoid_() * gate * up
        """,
        version="3.1",
    )
    done = process("check", "acme", "--rule", "writes")
    assert done.returncode == 1
    assert "plugin acme-kernels 3.1" in done.stdout
    assert "acme_kernels.py:" in done.stdout
    assert "overwrites its argument 'x'" in done.stdout


def test_a_crash_and_a_hang_are_findings_about_the_implementation_alone(
    distribution: Callable[..., Any], process: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    distribution(
        "acme-faults",
        """
        import os, time

        @ir.hookimpl
        def irframework_register_impls():
            @ir.ops.silu_and_mul.register_impl("acme")
            def silu_and_mul(x):
                os.abort()

            @ir.ops.gelu_and_mul.register_impl("acme")
            def gelu_and_mul(x, approximate="none"):
                time.sleep(600)

            @ir.ops.static_quant_fp8.register_impl("acme")
            def static_quant_fp8(x, scale):
                return ir.ops.static_quant_fp8.native(x, scale)
        """,
    )

    def ends(ops: tuple[str, ...], timeout: str) -> dict[str, Any]:
        chosen = [word for op in ops for word in ("--op", op)]
        asked = ("check", "acme", "--rule", "ends", "--jobs", "3", "--timeout", timeout, "--json", *chosen)
        done = process(*asked)
        assert done.returncode == 1
        return {result["op"]: result["rules"][-1] for result in json.loads(done.stdout)["results"]}

    found = ends(("silu_and_mul", "static_quant_fp8"), "120") | ends(("gelu_and_mul",), "2")
    assert {rule["rule"] for rule in found.values()} == {"ends"}
    assert {op: rule["status"] for op, rule in found.items()} == {
        "silu_and_mul": "failed",
        "gelu_and_mul": "failed",
        "static_quant_fp8": "passed",
    }
    (crash,) = found["silu_and_mul"]["violations"]
    assert "ends the process (signal 6): Fatal Python error: Aborted" in crash["what"]
    assert "silu_and_mul(x=float32[5, 34]" in crash["inputs"]
    assert "does not come back within 2 s" in found["gelu_and_mul"]["violations"][0]["what"]
