"""Plugin distributions made of text, and programs run beside them in a process of their own."""

import atexit
import json
import os
import subprocess
import sys
import tempfile
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


def _variables(path: Path | None, environment: dict[str, str]) -> dict[str, str]:
    places = [str(path)] if path is not None else []
    if os.environ.get("PYTHONPATH"):
        places.append(os.environ["PYTHONPATH"])
    kept = {name: value for name, value in os.environ.items() if not name.startswith("IRFRAMEWORK_")}
    mine = {"PYTHONPATH": os.pathsep.join(places), "IRFRAMEWORK_DISABLE_PLUGINS": installed_plugins()}
    return kept | mine | environment


_SERVER = """
import importlib, json, os, sys, traceback
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no pool of workers that a fork would leave behind
for name in sys.argv[1:]:
    importlib.import_module(name)
for line in sys.stdin:
    job = json.loads(line)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    for number, name in ((1, job["stdout"]), (2, job["stderr"])):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.clear()
    os.environ.update(job["variables"])
    sys.path[:0] = [job["path"]] if job["path"] else []
    code = 0
    try:
        exec(compile(job["code"], "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else error.code is not None
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))
"""


@cache
def _server(imports: tuple[str, ...]) -> subprocess.Popen[str]:
    """A process that has imported torch, and nothing of ours, and forks for every program: saves seconds each."""
    command = [sys.executable, "-c", _SERVER, *imports]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(server.communicate)  # closes its input, so that it ends
    return server


def run_python(
    code: str, path: Path | None = None, imports: tuple[str, ...] = ("torch",), **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program with the distributions under `path` installed, and none of this environment's."""
    server = _server(imports)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        job = {
            "code": textwrap.dedent(code),
            "path": str(path or ""),
            "variables": _variables(path, environment),
            "stdout": str(out),
            "stderr": str(err),
        }
        print(json.dumps(job), file=server.stdin, flush=True)
        status = int(server.stdout.readline())
        return subprocess.CompletedProcess(code, status, out.read_text(), err.read_text())


def run_fresh_python(code: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Like `run_python`, in a process that starts from nothing."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env=_variables(path, environment),
        timeout=300,
    )


def answer(done: subprocess.CompletedProcess[str]) -> Any:
    """Return what a program printed as JSON in its last line."""
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])
