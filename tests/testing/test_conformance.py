"""The kit for those who use it: the docs' table, the tests for pytest, names that do not exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import irframework as ir
from irframework import contract, errors
from irframework.testing import check_impl
from irframework.testing.samples import DTYPES, dtypes_of

DOCS = Path(__file__).parents[2] / "docs/conformance.md"
PLUGIN = """
import torch
import irframework as ir
import irframework.testing

@ir.register_op
def half(x: torch.Tensor) -> torch.Tensor:
    return x / 2

@half.register_input_generator
def inputs(shape, dtype, device):
    if shape not in ((5, 34), (16, 64)) or dtype is not torch.float32:
        raise ValueError("not tried")
    return (torch.randn(shape, device=device),)

half.register_impl("good")(lambda x: x * 0.5)
half.register_impl("bad")(lambda x: x * 0.6)
test_good = irframework.testing.conformance_tests("good", ["half"], "cpu")
test_bad = irframework.testing.conformance_tests("bad", ["half"], "cpu")
"""


def run_pytest(*arguments: str, cwd: Path) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False).stdout


def test_the_docs_show_every_rule_with_its_promise():
    shown = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", DOCS.read_text(), re.MULTILINE))
    assert shown == contract.RULES


def test_one_line_in_a_plugins_tests_is_a_test_for_each_op_and_rule(tmp_path):
    (tmp_path / "test_plugin.py").write_text(PLUGIN)
    out = run_pytest("test_plugin.py", cwd=tmp_path)
    assert "PASSED test_plugin.py::test_good[half-values]" in out
    assert "SKIPPED" in out
    assert "needs a CUDA device, it was tried on cpu" in out
    assert re.search(r"^FAILED test_plugin.py::test_bad\[half-values\]", out, re.MULTILINE)
    assert len(re.findall(r"^FAILED", out, re.MULTILINE)) == 2, out  # values and special_values
    assert "Implementation 'bad' of op 'half'" in out


def test_a_provider_is_tested_by_an_option_of_pytest(tmp_path):
    arguments = ("--pyargs", "irframework.testing.conformance", "--ir-device=cpu", "--ir-op=silu_and_mul")
    out = run_pytest(*arguments, "--ir-provider=native", "-k", "fakes", cwd=tmp_path)
    assert "test_conformance[native-silu_and_mul-predicate_fakes]" in out
    assert "1 passed" in out
    assert "--ir-provider=NAME" in run_pytest("--pyargs", "irframework.testing.conformance", cwd=tmp_path)


def test_a_rule_that_does_not_exist_is_an_error_with_the_closest():
    with pytest.raises(errors.ArgumentError, match="Did you mean 'values'"):
        check_impl(ir.ops.silu_and_mul, "native", "cpu", rules=["valuse"])


def test_a_provider_without_that_op_is_an_error():
    with pytest.raises(errors.UnknownProviderError, match="'silu_and_mul'"):
        check_impl("silu_and_mul", "nobody")


def test_calls_that_hold_no_numbers_of_a_dtype_are_made_once():
    assert dtypes_of(ir.ops.moe_align_block_size) == DTYPES[:1]
    assert dtypes_of(ir.ops.relu2) == DTYPES


def test_a_native_body_that_fails_is_told_as_a_finding():
    @ir.register_op
    def kit_narrow(x: torch.Tensor) -> torch.Tensor:
        if not x.is_contiguous():
            raise RuntimeError("no kernel found")
        return x + 1

    kit_narrow.register_input_generator(lambda shape, **options: (torch.randn(shape, **options),))
    kit_narrow.register_impl("plain")(lambda x: x + 1)
    found = {result.rule: result for result in check_impl(kit_narrow, "plain", device="cpu", rules=["raises"]).rules}
    assert found["raises"].status == "failed"
    assert "native raises RuntimeError: no kernel found" in found["raises"].violations[0].what
