"""Times every launch plan of the CUDA kernels of `irframework_vllm_c` over the grid of the goals.

Owns the choice of plans to try, and the table that compares the best with the kernels' own choice
(csrc/cuda/plan.cpp). Run it in the root of the repository, on the GPU, where the plugin's wheel is installed or its
directory is on PYTHONPATH: `python benchmarks/cuda_plans.py --json plans.json`. It ends soon after `--seconds`,
whatever is done by then.

Every call of a kernel is a node of a CUDA graph. Its inputs and outputs are its own as far as two gigabytes go, and a
replay begins with a cache that holds none of them; a time is the median of the replays. Floor: the bytes that must
move, at the bandwidth of a large copy measured in the same run. Where that is less than the time of an empty kernel in
a graph, times are shown over the latter (marked `e`).
"""

import argparse
import ctypes
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from source_tree import make_importable
from torch import Tensor

make_importable()

from irframework_vllm_c import implementations, library  # noqa: E402

ROWS = (1, 16, 64, 256, 1024, 2048, 8192, 32768)
COLUMNS = (2048, 4096, 5120, 8192)
GOAL_ROWS = (2048, 8192, 32768)
POOL_BYTES = 2**31 + 2**28
REPLAYS = 7

Plan = dict[str, int]
K = torch.ops.irframework_vllm_c


@dataclass(frozen=True)
class Kernel:
    """One op: how to call it, what it moves per element of its result, and which plans it has.

    Attributes:
        call: From tensors that begin at a place of the pool, the weight and the scale.
        inputs: Widths of the inputs, in columns; each is rows of bfloat16.
        moved: Bytes per element of the result.
        kind: `rows`, `rows+` (with a scale per row) or `elements`.
    """

    call: Callable[[list[Tensor], Tensor, Tensor], Any]
    inputs: tuple[int, ...]
    moved: float
    kind: str


KERNELS: dict[str, Kernel] = {
    "rms_norm": Kernel(lambda x, w, s: K.rms_norm.default(x[0], w, 1e-6), (1,), 4, "rows"),
    "fused_add_rms_norm": Kernel(lambda x, w, s: K.fused_add_rms_norm.default(x[0], x[1], w, 1e-6), (1, 1), 8, "rows"),
    "silu_and_mul": Kernel(lambda x, w, s: K.silu_and_mul.default(x[0]), (2,), 6, "elements"),
    "rms_norm_static": Kernel(lambda x, w, s: K.rms_norm_static_quant_fp8.default(x[0], w, s, 1e-6), (1,), 3, "rows"),
    "silu_static": Kernel(lambda x, w, s: K.silu_and_mul_static_quant_fp8.default(x[0], s), (2,), 5, "elements"),
    "rms_norm_dynamic": Kernel(lambda x, w, s: K.rms_norm_dynamic_quant_fp8.default(x[0], w, 1e-6), (1,), 3, "rows+"),
    "silu_dynamic": Kernel(lambda x, w, s: K.silu_and_mul_dynamic_quant_fp8.default(x[0]), (2,), 5, "rows+"),
    "fused_add_static": Kernel(
        lambda x, w, s: K.fused_add_rms_norm_static_quant_fp8.default(x[0], x[1], w, s, 1e-6), (1, 1), 7, "rows"
    ),
    "fused_add_dynamic": Kernel(
        lambda x, w, s: K.fused_add_rms_norm_dynamic_quant_fp8.default(x[0], x[1], w, 1e-6), (1, 1), 7, "rows+"
    ),
    "static_quant": Kernel(lambda x, w, s: K.static_quant_fp8.default(x[0], s), (1,), 3, "elements"),
    "dynamic_quant": Kernel(lambda x, w, s: K.dynamic_quant_fp8.default(x[0]), (1,), 3, "rows+"),
}


@dataclass
class Bench:
    """The device's memory for inputs, and what everything is compared with."""

    deadline: float
    memory: Any = field(init=False)
    keeper: torch.cuda.CUDAGraph = field(init=False)
    pool: Tensor = field(init=False)
    unrelated: Tensor = field(init=False)
    scale: Tensor = field(init=False)
    bandwidth: float = 0.0
    empty: float = 0.0
    empty_overlapped: float = 0.0

    def __post_init__(self) -> None:
        """Fill the pool with random numbers, and measure the copy and the empty kernel."""
        self.pool = torch.empty(POOL_BYTES // 2, dtype=torch.bfloat16, device="cuda")
        for part in self.pool.split(2**28):
            part.normal_()
        self.memory = torch.cuda.graph_pool_handle()  # for the outputs of one graph after the other
        self.keeper = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.keeper, pool=self.memory):
            torch.zeros(1, device="cuda")
        self.unrelated = torch.ones(2**26, device="cuda")  # 256 MiB
        self.scale = torch.full((1,), 0.02, device="cuda")
        half = self.pool.numel() // 4
        copies = self.graph(lambda index: self.pool[half : 2 * half].copy_(self.pool[:half]), 4)
        self.bandwidth = 4 * half / self.replayed(copies, 4)
        nothing = ctypes.CDLL(library.load_cuda_kernels()).irframework_vllm_c_launch_nothing
        for overlap in (0, 1):

            def launch(index: int, overlap: int = overlap) -> None:
                if nothing(0, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), overlap):
                    raise RuntimeError("the empty kernel was not launched")

            took = self.replayed(self.graph(launch, 100), 100)
            if overlap:
                self.empty_overlapped = took
            else:
                self.empty = took

    def graph(self, call: Callable[[int], Any], count: int) -> torch.cuda.CUDAGraph:
        """A graph of `count` calls; their outputs live as long as it does."""
        call(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            graph.outputs = [call(index) for index in range(count)]  # type: ignore[attr-defined]
        return graph

    def replayed(self, graph: torch.cuda.CUDAGraph, count: int) -> float:
        """Median time of one of its calls, in seconds."""
        graph.replay()
        times = []
        for _ in range(REPLAYS):
            self.unrelated.sum()  # reads, so that nothing is left to be written back
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e-3 / count)
        return statistics.median(times)

    def time(self, kernel: Kernel, rows: int, columns: int, plan: Plan) -> float:
        """Seconds of one call under a plan."""
        library.use_cuda_plan(**plan)
        try:
            sizes = [rows * columns * width for width in kernel.inputs]
            together = sum(sizes)
            floor = kernel.moved * rows * columns / self.bandwidth
            count = max(6, min(100, int(4e-4 / (floor + 2e-6))))
            places = max(1, min(count, (self.pool.numel() - columns) // together))
            weight = self.pool[-columns:]

            def call(index: int) -> Any:
                at = index % places * together
                inputs = []
                for size, width in zip(sizes, kernel.inputs, strict=True):
                    inputs.append(self.pool[at : at + size].view(rows, columns * width))
                    at += size
                return kernel.call(inputs, weight, self.scale)

            return self.replayed(self.graph(call, count), count)
        finally:
            library.use_cuda_plan()


def plans(kind: str, rows: int, columns: int) -> Iterator[Plan]:
    """The kernels' own choice first, then what else there is."""
    yield {}
    yield {"overlap": 0}
    if kind == "elements":
        for threads, vectors in itertools.product((128, 256, 512), (1, 2, 4)):
            yield {"threads": threads, "vectors": vectors}
        return
    chunks = columns // 8
    for vectors in (1, 2, 4):
        threads = -(-chunks // vectors // 32) * 32
        if threads > 512:
            continue
        held = {"threads": threads, "vectors": vectors, "rows_per_block": 1}
        yield held
        if threads <= 256 and rows >= 1024:
            yield held | {"rows_per_block": 2}
        if rows >= 1024 and vectors > 1:
            per_sm = max(1, 1024 // threads)
            yield held | {"blocks_per_sm": per_sm}
            if kind == "rows":
                yield held | {"blocks_per_sm": per_sm, "ahead": 1}
                yield held | {"blocks_per_sm": max(1, per_sm // 2), "ahead": 1}
        if rows <= 64 and chunks >= 512:
            for cluster in (2, 4):
                split = -(-chunks // vectors // cluster // 32) * 32
                if split > 32:
                    yield held | {"threads": split, "cluster": cluster}


def named(plan: Plan) -> str:
    """A plan in a few letters, e.g. t256v2."""
    return "".join(f"{key[0]}{value}" for key, value in plan.items() if (key, value) != ("rows_per_block", 1)) or "own"


def measure(bench: Bench, names: list[str]) -> list[dict[str, Any]]:
    """Time all plans, goals' rows first, until the time is up."""
    results = []
    cells = sorted(itertools.product(ROWS, COLUMNS), key=lambda cell: (cell[0] not in GOAL_ROWS, cell))
    for name, (rows, columns) in itertools.product(names, cells):
        kernel = KERNELS[name]
        floor = kernel.moved * rows * columns / bench.bandwidth
        for plan in plans(kernel.kind, rows, columns):
            if time.monotonic() > bench.deadline:
                return results
            entry: dict[str, Any] = {"op": name, "rows": rows, "columns": columns, "plan": named(plan), "floor": floor}
            try:
                entry["seconds"] = bench.time(kernel, rows, columns, plan)
            except Exception as error:
                entry["error"] = f"{type(error).__name__}: {error}"[:300]
            results.append(entry)
    return results


def show(bench: Bench, results: list[dict[str, Any]]) -> None:
    """One line per op and number of rows: own choice / best plan for each number of columns; then the goals' means."""
    print(f"copy {bench.bandwidth / 1e12:.2f} TB/s; an empty kernel in a graph {bench.empty * 1e6:.2f} us, ", end="")
    print(f"launched early {bench.empty_overlapped * 1e6:.2f} us")
    cells: dict[tuple[str, int, int], dict[str, float]] = {}
    floors: dict[tuple[str, int, int], float] = {}
    for entry in results:
        key = (entry["op"], entry["rows"], entry["columns"])
        floors[key] = entry["floor"]
        if "seconds" in entry:
            cells.setdefault(key, {})[entry["plan"]] = entry["seconds"]
    for error in {entry["error"] for entry in results if "error" in entry}:
        print("error:", error)
    for name in dict.fromkeys(entry["op"] for entry in results):
        print(f"{name}  (rows: own / best plan, for {', '.join(map(str, COLUMNS))} columns)")
        for rows in ROWS:
            shown = []
            for columns in COLUMNS:
                times = cells.get((name, rows, columns))
                if not times:
                    continue
                floor = floors[name, rows, columns]
                base, mark = (floor, "") if floor > bench.empty else (bench.empty, "e")
                best = min(times, key=lambda plan: times[plan])
                own = times.get("own", math.nan)
                shown.append(f"{own / base:.2f}{mark}/{times[best] / base:.2f} {best}")
            if shown:
                print(f" {rows:>6} " + " | ".join(shown))
        for label, pick in (("own choice", _own), ("without overlap", _alone), ("best plans", _best)):
            ratios = [
                pick(cells[key]) / floors[key] for key in cells if key[0] == name and key[1] in GOAL_ROWS and cells[key]
            ]
            ratios = [ratio for ratio in ratios if not math.isnan(ratio)]
            if ratios:
                print(f"   mean over {len(ratios)} goals, {label}: {statistics.geometric_mean(ratios):.3f}")


def _own(times: dict[str, float]) -> float:
    return times.get("own", math.nan)


def _alone(times: dict[str, float]) -> float:
    return times.get(named({"overlap": 0}), math.nan)


def _best(times: dict[str, float]) -> float:
    return min(times.values())


def main() -> None:
    """Measure, print, and write everything to the file of `--json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every time here")
    parser.add_argument("--seconds", type=float, default=140.0, help="stop measuring after so many (default: 140)")
    parser.add_argument("--ops", default=",".join(list(KERNELS)[:7]), help=f"of {', '.join(KERNELS)}")
    options = parser.parse_args()
    ready = implementations.cuda_kernels_load()
    if ready is not True:
        raise SystemExit(f"error: the CUDA kernels do not run here: {ready}")
    began = time.monotonic()
    bench = Bench(began + options.seconds)
    results = measure(bench, options.ops.split(","))
    if options.json:
        facts = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "bandwidth": bench.bandwidth}
        facts |= {"empty": bench.empty, "empty_overlapped": bench.empty_overlapped}
        options.json.write_text(json.dumps({**facts, "results": results}, indent=1) + "\n")
    show(bench, results)
    print(f"{len(results)} measurements in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
