"""Functions run in the processes of one group at the same time.

Owns the start of the processes, their group, and what they return. A process that fails ends the others, and none of
them outlives the one that waits for it, or its time: a GPU may wait for another one for ever.
"""

import ctypes
import importlib
import os
import signal
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
_DIE_WITH_PARENT = 1  # Linux: PR_SET_PDEATHSIG
# A fault in NVLink's multicast reaches all who share the GPUs of a host, and nothing here needs it.
_WITHOUT_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def run_in_processes(
    function: Callable[..., Any],
    *arguments: Any,
    backend: str = "gloo",
    size: int = 2,
    seconds: float = _SECONDS,
) -> list[Any]:
    """Run `function(rank, *arguments)` of a test module in each process of a group, and return what each returned."""
    plugins = ",".join(entry.name for entry in importlib_metadata.entry_points(group="irframework.plugins"))
    paths = [str(Path(__file__).parent), str(Path(sys.modules[function.__module__].__file__).parent)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("IRFRAMEWORK_")} | {
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "IRFRAMEWORK_DISABLE_PLUGINS": plugins,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        **_WITHOUT_MULTICAST,
    }
    with tempfile.TemporaryDirectory() as place:
        torch.save(arguments, Path(place, "arguments.pt"))
        module = function.__module__.rpartition(".")[2]
        told = [module, function.__name__, backend, str(size), place]
        begin = [sys.executable, "-c", "import two_processes; two_processes.serve()"]
        children, said = [], [Path(place, f"{rank}.txt") for rank in range(size)]
        for rank in range(size):
            with said[rank].open("w") as errors:  # a pipe that nobody reads yet would fill
                children.append(subprocess.Popen([*begin, *told, str(rank)], env=environment, stderr=errors))
        _wait(children, said, seconds)
        return [torch.load(Path(place, f"{rank}.pt"), weights_only=False) for rank in range(size)]


def _wait(children: list[Any], said: list[Path], seconds: float) -> None:
    end = time.monotonic() + seconds
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
        codes = [child.wait() for child in children]
    late = f", killed after {seconds} s" if time.monotonic() > end else ""
    texts = "\n".join(path.read_text(errors="replace")[-20000:] for path in said)
    assert codes == [0] * len(children), f"processes ended with {codes}{late}\n{texts}"


def serve() -> None:
    """What a process does: join the group, run the function, keep what it returns."""
    module, name, backend, size, place, rank = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
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
