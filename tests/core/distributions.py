"""Plugin distributions made of text, and programs run beside them in a process of their own."""

import json
import os
import subprocess
import sys
import textwrap
from functools import cache
from pathlib import Path
from typing import Any

import importlib_metadata

RMS_NORM = """
@ir.hookimpl
def irframework_register_impls():
    @ir.ops.rms_norm.register_impl("{provider}")
    def rms_norm(x, weight, epsilon, variance_size=None):
        return x * 0 + {value}
"""
HEADER = "IRFRAMEWORK_API = 1\nimport irframework as ir\n"


def write_distribution(
    root: Path, name: str, body: str, *, version: str = "1.0", header: str = HEADER, entry: str | None = None
) -> None:
    """Write a module and the metadata of a distribution with one entry point, as an installer would."""
    module = name.replace("-", "_")
    (root / f"{module}.py").write_text(header + textwrap.dedent(body))
    metadata = root / f"{module}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(f"[irframework.plugins]\n{entry or f'{name} = {module}'}\n")


@cache
def installed_plugins() -> str:
    """The plugins of this environment, as a list for IRFRAMEWORK_DISABLE_PLUGINS."""
    return ",".join(entry.name for entry in importlib_metadata.entry_points(group="irframework.plugins"))


def run_python(code: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the distributions under `path` installed, and none of this environment's."""
    places = [str(path)] if path is not None else []
    if os.environ.get("PYTHONPATH"):
        places.append(os.environ["PYTHONPATH"])
    variables = {name: value for name, value in os.environ.items() if not name.startswith("IRFRAMEWORK_")}
    variables |= {"PYTHONPATH": os.pathsep.join(places), "IRFRAMEWORK_DISABLE_PLUGINS": installed_plugins()}
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=variables | environment,
        timeout=300,
    )


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    """Return what a program printed as JSON in its last line."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])
