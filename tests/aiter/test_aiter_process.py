"""Runs the tests against the stand-in in a process of their own, where it is what `import aiter` finds."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_the_contract_tests_pass_in_their_own_process():
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "test_aiter_contract.py")],
        cwd=HERE.parents[1],
        env={**os.environ, "PYTHONPATH": str(HERE / "stand_in")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-1000:]
    assert " passed" in run.stdout
