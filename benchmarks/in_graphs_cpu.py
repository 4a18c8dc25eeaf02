"""What kernels of ops that models write out in torch gain inside of compiled graphs on the CPU, where Inductor could
make their code itself: so that finding these ops in plain models does not cost time.

Run `python benchmarks/in_graphs_cpu.py` (about five minutes), `--quick` for a look, `--json` for machines. Each graph
holds the same op eight times, over tensors of its own, and is compiled twice by the backend `irframework`: with the
kernels of irframework-vllm-c, called one by one, and with native, which Inductor makes its own code of. Each line is
one op, shape and dtype, with one thread:

    kernel        time of one op of the graph with kernels, in microseconds: the median of all rounds
    inductor      the same of the other graph
    ratio         inductor divided by kernel, round by round: the median, and the quartiles in brackets. More than 1:
                  the kernel gains. Less: it is better left to Inductor

Gates are as wide as those of models with hidden sizes of 576 and 4096; queries and keys are those of 9 and 3 heads of
64, and of 32 and 8 heads of 128. One row is a step of one sequence; there the ratio is of what calls cost. The
allocator is told to keep large blocks, see `kernels_cpu.py`.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from kernels_cpu import ALLOCATOR, DTYPES, measure
from torch import Tensor

import irframework as ir

if __name__ == "__main__" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
    # glibc reads these before main(), so only a new process sees them.
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})

COPIES = 8
ROWS = (1, 16, 512)
GATES = (1536, 14336)
HEADS = ((9, 3, 64), (32, 8, 128))

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table; times in microseconds, the ratio as (median, lower and upper quartile)."""

    op: str
    dtype: str
    shape: str
    kernel: float
    inductor: float
    ratio: tuple[float, float, float]


def gates(op: str) -> Callable[..., list[Tensor]]:
    function = getattr(ir.ops, op)
    words = ("tanh",) if op == "gelu_mul" else ()
    return lambda pairs: [function(gate, up, *words) for gate, up in pairs]


def rotations(heads: list[tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """As a model needs them for attention: heads before tokens."""
    return [ir.ops.apply_rotary_pos_emb(each, cos, sin).transpose(1, 2) for pair in heads for each in pair]


def cases(rows: int, dtype: torch.dtype) -> list[tuple[str, str, Callable[..., list[Tensor]], tuple[object, ...]]]:
    """Op, shape, what is compiled and its arguments."""
    found: list[tuple[str, str, Callable[..., list[Tensor]], tuple[object, ...]]] = []
    for op in ("silu_mul", "gelu_mul"):
        for width in GATES:
            pairs = [tuple(torch.randn(2, 1, rows, width).to(dtype)) for _ in range(COPIES)]
            found.append((op, f"{rows} x {width}", gates(op), (pairs,)))
    for queries, keys, size in HEADS:
        heads = [tuple(torch.randn(1, rows, n, size).to(dtype) for n in (queries, keys)) for _ in range(COPIES)]
        angles = torch.randn(1, rows, size // 2).repeat(1, 1, 2)
        shape = f"{rows} x ({queries} + {keys}) x {size}"
        found.append(
            ("apply_rotary_pos_emb", shape, rotations, (heads, angles.cos().to(dtype), angles.sin().to(dtype)))
        )
    return found


def compiled(op: str, provider: str, function: Callable[..., list[Tensor]], args: tuple[object, ...]) -> Call:
    options = {"ir_op_priority": {op: [provider]}}
    artefact = torch.compile(lambda *given: function(*given), backend="irframework", dynamic=False, options=options)
    artefact(*args)
    chosen = set(ir.last_report().selected_impls[op].values())
    if chosen != {provider}:
        raise SystemExit(f"error: {op} was to be run by {provider}, not by {', '.join(sorted(chosen))}")
    return lambda: artefact(*args)


def line(
    op: str, dtype: str, shape: str, function: Callable[..., list[Tensor]], args: tuple[object, ...], rounds: int
) -> Line:
    torch._dynamo.reset()
    calls = {name: compiled(op, name, function, args) for name in ("vllm_c", "native")}
    times = measure(calls, rounds, 0.01)
    ratios = [inductor / kernel for kernel, inductor in zip(times["vllm_c"], times["native"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    kernel, inductor = (statistics.median(times[name]) / COPIES * 1e6 for name in ("vllm_c", "native"))
    return Line(op, dtype, shape, kernel, inductor, (middle, low, high))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--dtype", choices=list(DTYPES), nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=15, help="rounds per line")
    parser.add_argument("--quick", action="store_true", help="bfloat16 only, 5 rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args = parser.parse_args()
    if args.quick:
        args.dtype, args.rounds = ["bfloat16"], 5
    torch.set_num_threads(1)
    found = []
    if not args.json:
        print(f"{'op':<20} {'dtype':<9} {'shape':<22} {'kernel':>9} {'inductor':>9}   ratio")
    with torch.inference_mode():
        for dtype in args.dtype:
            for rows in args.rows:
                for op, shape, function, given in cases(rows, DTYPES[dtype]):
                    x = line(op, dtype, shape, function, given, args.rounds)
                    found.append(x)
                    if not args.json:
                        middle, low, high = x.ratio
                        ratio = f"{middle:.2f} ({low:.2f}-{high:.2f})"
                        print(
                            f"{op:<20} {dtype:<9} {shape:<22} {x.kernel:9.1f} {x.inductor:9.1f}   {ratio}", flush=True
                        )
    if args.json:
        print(json.dumps({"torch": torch.__version__, "lines": [asdict(x) for x in found]}, indent=2))


if __name__ == "__main__":
    main()
