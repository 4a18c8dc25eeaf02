"""The example platform with a device of its own: installed as a user would, and tested in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.fakedev, pytest.mark.slow]
EXAMPLE = Path(__file__).parents[2] / "examples" / "irframework-toydev"
Run = Callable[..., str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Installs the example in a directory, and runs programs where it is installed."""
    installed, work = tmp_path_factory.mktemp("installed"), tmp_path_factory.mktemp("work")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("IRFRAMEWORK_", "PYTHON"))}

    def run(*command: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *command],
            cwd=work,
            env=environment | {"PYTHONPATH": str(installed)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-5000:]}\n{done.stderr[-3000:]}"
        return done.stdout

    run(
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-build-isolation",
        "--no-deps",
        "--target",
        str(installed),
        str(EXAMPLE),
    )
    return run


def test_its_own_tests_pass(run: Run) -> None:
    # Conformance of one op here: all of them take half a minute.
    chosen = ("-k", "not test_conformance or silu_and_mul")
    config = ("-c", str(EXAMPLE.parents[1] / "pyproject.toml"), "-p", "no:cacheprovider")
    assert " passed" in run("pytest", "-q", *config, *chosen, str(EXAMPLE / "tests"))


def test_the_command_line_knows_the_device(run: Run) -> None:
    decision = json.loads(run("irframework", "explain", "rms_norm", "--device", "toy", "--json"))
    assert decision["provider"] == "toy_kernels"
    assert "platform" in run("irframework", "doctor")


def test_its_readme_shows_its_files() -> None:
    text = (EXAMPLE / "README.md").read_text()
    for file in EXAMPLE.rglob("*.py"):
        assert f"`{file.relative_to(EXAMPLE)}`" in text or f"`{file.name}`" in text
