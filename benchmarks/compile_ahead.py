"""Compiles what a GPU benchmark needs in several processes at once, so that measuring does not wait for compilers.

Each process runs the program itself with `--part I/N`, calls its part once and ends; what it compiled stays in a cache
directory of this run. What Inductor tuned meanwhile is thrown away, since the processes shared one GPU: it tunes again
when the kernel is called alone.
"""

import atexit
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def use_own_cache() -> None:
    """Let this process and those it starts share a cache directory that nobody else uses. Call it before torch is
    imported; a directory that the environment names is used as it is."""
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        directory = tempfile.mkdtemp(prefix="irframework_bench_")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # the processes are the parallel part
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "triton"))


def compile_ahead(parts: int, limit: float) -> str:
    """Run this program's parts and wait.

    Args:
        parts: How many processes.
        limit: Seconds after which those that still run are ended. What they did not compile is compiled later.

    Returns:
        What happened, in one line.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as logs:
        running: list[subprocess.Popen[bytes]] = []
        for index in range(parts):
            with Path(logs, str(index)).open("wb") as log:
                command = [sys.executable, *sys.argv, "--part", f"{index}/{parts}"]
                running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))
        ended = []
        for process in running:
            try:
                process.wait(max(0.1, limit - (time.perf_counter() - start)))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                ended.append(process)
        failed = [index for index, process in enumerate(running) if process.returncode and process not in ended]
        last = Path(logs, str(failed[0])).read_text(errors="replace").strip().splitlines()[-1:] if failed else []
    for tuned in Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.best_config"):
        tuned.unlink(missing_ok=True)
    what = f"compiled ahead in {parts} processes, {time.perf_counter() - start:.0f} s"
    if ended:
        what += f"; {len(ended)} ended at their limit"
    return what + (f"; {len(failed)} failed, e.g.: {last[0] if last else ''}" if failed else "")


def my_share(part: str, total: int) -> range:
    """Which of `total` pieces of work belong to the process that was started with `--part I/N`."""
    index, parts = (int(number) for number in part.split("/"))
    return range(index, total, parts)
