"""Runs the interpreted tests in a process of their own, so that a plain `pytest` runs them too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")
ROOT = Path(__file__).parents[2]


def test_the_interpreted_tests_pass_in_their_own_process():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "interpreter", "-p", "no:cacheprovider", "tests/triton"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout, run.stdout[-2000:]
