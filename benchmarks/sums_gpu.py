"""Sums and products over two GPUs of one host that share memory, beside what NCCL and kernels after it take.

Run it in the root of the repository, on the machine with the GPUs (one minute):

    python benchmarks/sums_gpu.py --json sums.json
    TRITON_INTERPRET=1 python benchmarks/sums_gpu.py --tiny      # anywhere, over gloo: does it run

Sizes are those of Llama-3-8B on two GPUs, in bfloat16. A sum is of rows of 4096, with a residual and a norm behind it:
`fused` is the one Triton kernel that does all; `nccl` NCCL's sum and the Triton kernel of the norm; `one-shot` torch's
`one_shot_all_reduce_copy` and that kernel. They are timed inside CUDA graphs of many calls. A product is `symm_mem`'s
(`linear_reduce_scatter`, `all_gather_linear`) beside cuBLAS and NCCL one after the other (`nccl`); many calls are
queued behind a kernel that waits. The contestants take turns, and both GPUs meet before each is timed. A time is that
of the slower one; a ratio is that of one turn: median, lowest and highest tenth. It ends after --limit seconds.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from source_tree import make_importable

SIZE, HIDDEN, EPSILON = 2, 4096, 1e-5
ROWS = (1, 16, 64, 512)
TOKENS = (2048, 8192)
SCATTERED = {"o_proj": (2048, 4096), "down_proj": (7168, 4096)}  # what a process has: in, out
GATHERED = {"qkv_proj": (4096, 3072), "gate_up_proj": (4096, 14336)}
ROOM = 8 << 20
CALLS, QUEUED, SETS = 40, 8, 8
WAIT, LONG_WAIT = 2_000_000, 20_000_000  # cycles: 1 ms and 10 ms
MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}  # where others share the host's GPUs

Calls = dict[str, Callable[[int], Any]]  # what is timed, of the number of a call


# --- what a process does ---------------------------------------------------------------------------------------------


class Timer:
    """Times of calls that both processes make."""

    def __init__(self, tiny: bool) -> None:
        import torch

        self.tiny = tiny
        self.torch = torch
        self.meeting = torch.zeros(1) if tiny else torch.zeros(1, device="cuda")
        self.stream = None if tiny else torch.cuda.Stream()

    def captured(self, call: Callable[[int], Any]) -> tuple[Callable[[], Any], int, int]:
        """Many calls as one graph: what runs them, how many they are, and how long to wait for them to be queued."""
        torch = self.torch
        if self.tiny:
            return lambda: call(0), 1, 0
        with torch.cuda.stream(self.stream):
            for number in range(3):
                call(number)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            kept = [call(number) for number in range(CALLS)]
            graph.capture_end()
        return lambda: (graph.replay(), kept)[0], CALLS, WAIT

    def queued(self, call: Callable[[int], Any]) -> tuple[Callable[[], Any], int, int]:
        """As `captured`, without a graph."""
        with self.torch.cuda.stream(self.stream):
            for number in range(3):
                call(number)
            self.torch.cuda.synchronize()
        return lambda: [call(number) for number in range(QUEUED)], QUEUED, LONG_WAIT

    def once(self, run: Callable[[], Any], count: int, wait: int) -> float:
        """Microseconds of one call."""
        torch = self.torch
        if self.tiny:
            torch.distributed.all_reduce(self.meeting)
            begun = time.perf_counter()
            run()
            return (time.perf_counter() - begun) * 1e6
        with torch.cuda.stream(self.stream):
            torch.cuda._sleep(wait)
            torch.distributed.all_reduce(self.meeting)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) * 1e3 / count

    def cell(self, calls: Calls, ready: Callable[..., Any], rounds: int) -> dict[str, list[float]]:
        """Times of all contestants, in turn; the longer one of the two processes."""
        torch = self.torch
        prepared = {name: ready(call) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in calls}
        for number in range(rounds + 2):
            for name, each in prepared.items():
                took = self.once(*each)
                if number > 1:
                    times[name].append(took)
        table = torch.tensor(list(times.values()), device=self.meeting.device)
        torch.distributed.all_reduce(table, torch.distributed.ReduceOp.MAX)
        return dict(zip(times, table.tolist(), strict=True))


def sums(rows: int, name: str, tiny: Any) -> Calls:
    """What adds up rows, adds a residual and norms."""
    import torch
    from irframework_triton_kernels import launch

    import irframework as ir
    from irframework.distributed import symmetric_memory

    options: dict[str, Any] = {} if tiny else {"device": "cuda", "dtype": torch.bfloat16}
    hidden = 64 if tiny else HIDDEN
    xs, residuals = ([torch.randn(rows, hidden, **options) for _ in range(SETS)] for _ in range(2))
    weight = torch.ones(hidden, **options)

    def behind(total: Callable[[Any], Any]) -> Callable[[int], Any]:
        def call(number: int) -> Any:
            x, residual = xs[number % SETS], residuals[number % SETS]
            return launch.fused_add_rms_norm(total(x), residual, weight, EPSILON, None)

        return call

    def fused(number: int) -> Any:
        x, residual = xs[number % SETS], residuals[number % SETS]
        if not tiny:
            return launch.all_reduce_fused_add_rms_norm(x, residual, weight, EPSILON, name)
        return launch.sums.sum_and_norm(tiny, x, residual, weight, *(torch.empty_like(x) for _ in range(2)), EPSILON)

    return {
        "fused": fused,
        "nccl": behind(lambda x: ir.ops.all_reduce.native(x, name)),
        "one-shot": behind(lambda x: symmetric_memory.sum_by_one_shot(x, name)),
    }


def products(kind: str, tokens: int, sizes: tuple[int, int], name: str) -> Calls:
    """A product and what is sent behind or before it."""
    import torch

    import irframework as ir
    from irframework.distributed import symmetric_memory

    scattered = kind == "linear_reduce_scatter"
    options = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(tokens if scattered else tokens // SIZE, sizes[0], **options)
    weight = torch.randn(sizes[1], sizes[0], **options) * sizes[0] ** -0.5
    fused = symmetric_memory.product_and_scatter if scattered else symmetric_memory.gather_and_product
    native = getattr(ir.ops, kind).native
    return {
        "fused": lambda number: fused(x, weight, None, name, SIZE),
        "nccl": lambda number: native(x, weight, None, name, SIZE),
    }


def work(rank: int, options: argparse.Namespace) -> None:
    """What one of the processes does; the first one says what was found."""
    import torch

    from irframework.distributed import enable_symmetric_memory
    from irframework.distributed.shared_memory import bytes_of, laid_out

    distributed, until = torch.distributed, time.perf_counter() + options.limit
    if not options.tiny:
        torch.cuda.set_device(rank)
    place = Path(options.place)
    backend = "gloo" if options.tiny else "nccl"
    distributed.init_process_group(backend, init_method=f"file://{place}/store", rank=rank, world_size=SIZE)
    name, memory = distributed.group.WORLD.group_name, None
    if options.tiny:
        each = bytes_of(SIZE, ROOM)
        whole = torch.from_file(str(place / "memory"), shared=True, size=SIZE * each, dtype=torch.uint8)
        starts = [whole.data_ptr() + each * other for other in range(SIZE)]
        memory = laid_out(starts, rank, ROOM, torch.device("cpu"))
        from irframework_triton_kernels.launch import sums as launched

        launched.PROGRAMS = 2  # one after the other
    else:
        enable_symmetric_memory(one_shot_bytes=ROOM)
    torch.manual_seed(rank)
    timer = Timer(options.tiny)
    cells: list[tuple[str, int, str, Callable[[], Calls], Any]] = []
    for rows in (1, 2) if options.tiny else ROWS:
        cells.append(("sum", rows, "", lambda rows=rows: sums(rows, name, memory), timer.captured))
    for kind, table in (("linear_reduce_scatter", SCATTERED), ("all_gather_linear", GATHERED)):
        for tokens in () if options.tiny else TOKENS:
            for layer, sizes in table.items():
                make = lambda kind=kind, tokens=tokens, sizes=sizes: products(kind, tokens, sizes, name)  # noqa: E731
                cells.append((kind, tokens, layer, make, timer.queued))
    found: dict[str, Any] = {"torch": torch.__version__, "cells": [], "not_measured": 0}
    found["device"] = "cpu" if options.tiny else torch.cuda.get_device_name()
    for kind, count, layer, make, ready in cells:
        late = torch.tensor([time.perf_counter() > until], dtype=torch.int32, device=timer.meeting.device)
        distributed.all_reduce(late)  # all go on, or none
        if late.item():
            found["not_measured"] += 1
            continue
        with torch.no_grad():
            times = timer.cell(make(), ready, 3 if options.tiny else options.rounds)
        found["cells"].append({"kind": kind, "rows": count, "layer": layer, "times": times})
        if rank == 0:
            print(line(found["cells"][-1]), flush=True)
    if rank == 0:
        (place / "found.json").write_text(json.dumps(found, indent=1))
    distributed.barrier()
    os._exit(0)  # nothing waits for threads of a group


def spread(values: list[float]) -> tuple[float, float, float]:
    """Lowest tenth, median, highest tenth."""
    tenths = statistics.quantiles(values, n=10, method="inclusive")
    return tenths[0], statistics.median(values), tenths[-1]


def line(cell: dict[str, Any]) -> str:
    """One point: microseconds of the fused form, and it over each of the others."""
    times = cell["times"]
    low, middle, high = spread(times["fused"])
    words = []
    for name in times.keys() - {"fused"}:
        ratios = [one / other for one, other in zip(times["fused"], times[name], strict=True)]
        words.append("over {}: {:.2f} ({:.2f} to {:.2f})".format(name, *(spread(ratios)[i] for i in (1, 0, 2))))
    title = f"{cell['kind']} {cell['layer']}".strip()
    fused = f"{middle:9.1f} us ({low:.1f} to {high:.1f})"
    return f"{title:<34} {cell['rows']:>5} rows, fused {fused}; " + ", ".join(sorted(words))


# --- what begins them ------------------------------------------------------------------------------------------------


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="small sums in two processes on the CPU")
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--limit", type=float, default=60, help="seconds, after which no further point is measured")
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    options = parser.parse_args()
    make_importable()
    if options.rank is not None:
        work(options.rank, options)
    with tempfile.TemporaryDirectory() as place:
        if options.tiny:
            from irframework.distributed.shared_memory import bytes_of

            Path(place, "memory").write_bytes(bytes(SIZE * bytes_of(SIZE, ROOM)))
        again = [sys.executable, *sys.argv, "--place", place]
        environment = os.environ | MULTICAST
        children = [subprocess.Popen([*again, "--rank", str(rank)], env=environment) for rank in range(SIZE)]
        end = time.monotonic() + options.limit + 60  # GPUs that wait for each other would wait for ever
        try:
            while any(child.poll() is None for child in children) and time.monotonic() < end:
                if any(child.poll() for child in children):
                    break
                time.sleep(0.05)
        finally:
            for child in children:
                child.kill()
        codes = [child.wait() for child in children]
        result = Path(place, "found.json")
        if codes != [0] * SIZE or not result.exists():
            print(f"The processes ended with {codes}.", file=sys.stderr)
            return 1
        text = result.read_text()
    print(f"{json.loads(text)['not_measured']} points not measured")
    if options.json:
        options.json.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
