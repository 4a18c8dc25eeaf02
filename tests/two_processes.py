"""Functions run in the processes of one group at the same time.

Owns the start of the processes, their group, and what they return. A process that fails ends the others.
"""

import importlib
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import importlib_metadata
import torch

_SECONDS = 240


def run_in_processes(function: Callable[..., Any], *arguments: Any, backend: str = "gloo", size: int = 2) -> list[Any]:
    """Run `function(rank, *arguments)` of a test module in each process of a group, and return what each returned."""
    plugins = ",".join(entry.name for entry in importlib_metadata.entry_points(group="irframework.plugins"))
    paths = [str(Path(__file__).parent), str(Path(sys.modules[function.__module__].__file__).parent)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("IRFRAMEWORK_")} | {
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "IRFRAMEWORK_DISABLE_PLUGINS": plugins,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
    }
    with tempfile.TemporaryDirectory() as place:
        torch.save(arguments, Path(place, "arguments.pt"))
        module = function.__module__.rpartition(".")[2]
        told = [module, function.__name__, backend, str(size), place]
        begin = [sys.executable, "-c", "import two_processes; two_processes.serve()"]
        children = [
            subprocess.Popen([*begin, *told, str(rank)], env=environment, stderr=subprocess.PIPE, text=True)
            for rank in range(size)
        ]
        _wait(children)
        return [torch.load(Path(place, f"{rank}.pt"), weights_only=False) for rank in range(size)]


def _wait(children: list[Any]) -> None:
    end = time.monotonic() + _SECONDS
    try:
        while any(child.poll() is None for child in children):
            failed = next((child for child in children if child.poll() not in (None, 0)), None)
            if failed is not None or time.monotonic() > end:
                break
            time.sleep(0.02)
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
        said = [child.communicate()[1] for child in children]
    codes = [child.returncode for child in children]
    assert codes == [0] * len(children), f"processes ended with {codes}\n" + "\n".join(said)


def serve() -> None:
    """What a process does: join the group, run the function, keep what it returns."""
    module, name, backend, size, place, rank = sys.argv[1:]
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(int(rank))
    torch.distributed.init_process_group(
        backend, init_method=f"file://{place}/store", rank=int(rank), world_size=int(size)
    )
    try:
        arguments = torch.load(Path(place, "arguments.pt"), weights_only=False)
        torch.save(getattr(importlib.import_module(module), name)(int(rank), *arguments), Path(place, f"{rank}.pt"))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # the other one may be waiting for this one
    torch.distributed.barrier()  # nobody leaves while another one may still talk to it
    os._exit(0)  # gloo's threads may end a process that unwinds: "terminate called without an active exception"
