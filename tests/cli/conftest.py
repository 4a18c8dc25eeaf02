"""Running the command line in this process or in one of its own, and plugins made for one test."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import irframework as ir
from irframework.cli import main
from irframework.settings import layers


@pytest.fixture(autouse=True)
def command_line_priorities() -> Any:
    """What a command line configures must not reach the next test."""
    yield
    if layers.cli is not None:
        layers.cli = None
        ir.configure(ir.KernelConfig())


@pytest.fixture
def as_json(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    """Run a command with --json: (exit code, document)."""

    def call(*argv: str) -> tuple[int, Any]:
        capsys.readouterr()
        code = main([*argv, "--json"])
        return code, json.loads(capsys.readouterr().out)

    return call


@pytest.fixture
def process(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command in a process of its own that also sees the distributions in tmp_path."""

    def call(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
        return subprocess.run(
            [sys.executable, "-m", "irframework", *argv],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path, **environment},
            timeout=300,
            check=False,
        )

    return call


@pytest.fixture
def distribution(tmp_path: Path) -> Callable[..., Path]:
    """Write a distribution with a plugin into tmp_path; returns its metadata directory."""

    def write(name: str, body: str, version: str = "1.0") -> Path:
        module = name.replace("-", "_")
        head = "import irframework as ir\nIRFRAMEWORK_API = 1\n"
        (tmp_path / f"{module}.py").write_text(head + textwrap.dedent(body))
        metadata = tmp_path / f"{module}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (metadata / "entry_points.txt").write_text(f"[irframework.plugins]\n{name} = {module}\n")
        return metadata

    return write
