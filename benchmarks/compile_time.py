"""What lowering costs at compile time, beside stock Inductor on the same model.

A stack of N IR ops of two distinct signatures (rms_norm and silu_and_mul in turn) is compiled with every cache off.
Compared are the time of all passes of irframework (from the compile's own report) and the time that stock
`torch.compile` takes for the same model written in plain torch. Goals: at most 1 ms of lowering per node, at most 10 %
of stock Inductor's time, and growth no worse than linear. Absolute times depend on the machine: read the ratios.

    python benchmarks/compile_time.py --nodes 10 100 400 --repeats 3
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import irframework as ir
from irframework.ops.activation import silu_and_mul
from irframework.ops.layernorm import rms_norm

WIDTH = 64


def stack(nodes: int, norm: Callable[..., Tensor], gate: Callable[..., Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function over x [rows, WIDTH] and weight [WIDTH] that calls `nodes` ops in a row."""

    def run(x: Tensor, weight: Tensor) -> Tensor:
        for index in range(nodes):
            x = norm(x, weight, 1e-6) if index % 2 == 0 else gate(torch.cat((x, x), dim=-1))
        return x

    return run


def compile_seconds(function: Callable[..., Tensor], backend: str) -> float:
    """Compile from nothing and return the wall time of the first call."""
    torch._dynamo.reset()
    arguments = (torch.randn(8, WIDTH), torch.rand(WIDTH))
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        began = time.perf_counter()
        torch.compile(function, backend=backend)(*arguments)
        return time.perf_counter() - began


def measure(nodes: int, repeats: int, provider: str) -> dict[str, object]:
    """Compile both models `repeats` times in turn."""
    rows = []
    for _ in range(repeats):
        stock = compile_seconds(stack(nodes, rms_norm.native, silu_and_mul.native), "inductor")
        with ir.priority(rms_norm=[provider], silu_and_mul=[provider]):
            ours = compile_seconds(stack(nodes, rms_norm, silu_and_mul), "irframework")
        report = ir.last_report()
        assert report is not None
        lowered = sum(len(found) for found in report.selected_impls.values())
        assert lowered == nodes, f"{lowered} of {nodes} nodes were lowered"
        lowering = report.timings["lower_functional"] + report.timings.get("lower_inplace", 0.0)
        rows.append(
            {
                "stock_s": stock,
                "ours_s": ours,
                "passes_s": sum(report.timings.values()),
                "lowering_ms_per_node": 1e3 * lowering / nodes,
                "share_of_stock": sum(report.timings.values()) / stock,
            }
        )
    result: dict[str, object] = {"nodes": nodes, "provider": provider}
    for key in rows[0]:
        values = [row[key] for row in rows]
        result[key] = {"median": statistics.median(values), "min": min(values), "max": max(values)}
    return result


def main() -> None:
    """Measure and print a table, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[10, 100, 400])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--provider", default="native")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    compile_seconds(stack(2, rms_norm.native, silu_and_mul.native), "inductor")  # start the C++ compiler once
    compile_seconds(stack(2, rms_norm, silu_and_mul), "irframework")
    results = [measure(nodes, options.repeats, options.provider) for nodes in options.nodes]
    if options.json:
        print(json.dumps(results, indent=2))
        return
    print(f"torch {torch.__version__}, provider {options.provider}, median (min-max) of {options.repeats}")
    print(f"{'nodes':>6} {'lowering ms/node':>22} {'passes s':>22} {'stock s':>20} {'passes / stock':>22}")
    for row in results:
        cells = []
        for key, scale in (("lowering_ms_per_node", 1), ("passes_s", 1), ("stock_s", 1), ("share_of_stock", 100)):
            cell = row[key]
            assert isinstance(cell, dict)
            cells.append("{:.3f} ({:.3f}-{:.3f})".format(*(scale * cell[k] for k in ("median", "min", "max"))))
        print(f"{row['nodes']:>6} {cells[0]:>22} {cells[1]:>22} {cells[2]:>20} {cells[3]:>21}%")


if __name__ == "__main__":
    main()
