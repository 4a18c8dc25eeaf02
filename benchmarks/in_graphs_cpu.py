"""What kernels gain inside of compiled graphs on the CPU, where Inductor could make their code itself: so that finding
ops in models that write them out in torch does not cost time.

Run `python benchmarks/in_graphs_cpu.py` (about ten minutes), `--quick` for a look, `--json` for machines. Each graph is
eight steps: a product that makes what the op reads, the op, a product that reads what it returns. Between products
Inductor has one loop where the op stands, as it has in a model. The products are small, 16 on the other side, so that
little else is measured. A graph is compiled twice by the backend `irframework`: with the kernels of
irframework-vllm-c, called one by one, and with native, which Inductor makes its own code of. Each line is one op, shape
and dtype, with one thread:

    kernel        time of one step of the graph with kernels, in microseconds: the median of all rounds
    inductor      the same of the other graph
    gained        inductor less kernel, round by round: the median, and the quartiles in brackets. More than 0: the
                  kernel gains. Less: it is better left to Inductor
    ratio         inductor divided by kernel, likewise

Widths are those of models with hidden sizes of 576 and 4096; queries and keys are those of 9 and 3 heads of 64, and of
32 and 8 heads of 128. Norms of heads stand in front of a rotation, which is Inductor's in both graphs and joins its own
norms. One row is a step of one sequence; there the difference is what a call costs. The allocator is told to keep large
blocks, see `kernels_cpu.py`.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
from kernels_cpu import ALLOCATOR, DTYPES, EPSILON, measure
from torch import Tensor

import irframework as ir

if __name__ == "__main__" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
    # glibc reads these before main(), so only a new process sees them.
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})

STEPS = 8
SIDE = 16  # the other dimension of the products
ROWS = (1, 4, 16, 64, 512)
WIDTHS = (576, 4096)
GATES = (1536, 14336)
HEADS = ((9, 3, 64), (32, 8, 128))

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table; times in microseconds, the last two as (median, lower and upper quartile)."""

    op: str
    dtype: str
    shape: str
    kernel: float
    inductor: float
    gained: tuple[float, float, float]
    ratio: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class Case:
    """A step of a graph.

    Attributes:
        op: Whose kernel is asked for.
        shape: What the op works on, in words.
        made: Widths of the products in front of the op.
        read: Width of the product behind it.
        step: The op: from what stays from step to step (a residual), and what the products in front made, to what stays
            and what the product behind reads.
        others: Ops in the step that are Inductor's in both graphs.
    """

    op: str
    shape: str
    made: tuple[int, ...]
    read: int
    step: Callable[..., tuple[Tensor, Tensor]]
    others: tuple[str, ...] = ()


def norms(rows: int, width: int, dtype: torch.dtype) -> list[Case]:
    weight = torch.rand(width).to(dtype)

    def norm(stays: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return stays, ir.ops.rms_norm(x, weight, EPSILON)

    def sum_and_norm(stays: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y, stays = ir.ops.fused_add_rms_norm(x, stays, weight, EPSILON)
        return stays, y

    shape = f"{rows} x {width}"
    return [
        Case("rms_norm", shape, (width,), width, norm),
        Case("fused_add_rms_norm", shape, (width,), width, sum_and_norm),
    ]


def gates(rows: int, width: int) -> list[Case]:
    shape, both, two = f"{rows} x {width}", (2 * width,), (width, width)
    return [
        Case("silu_and_mul", shape, both, width, lambda stays, x: (stays, ir.ops.silu_and_mul(x))),
        Case("gelu_and_mul", shape, both, width, lambda stays, x: (stays, ir.ops.gelu_and_mul(x, "tanh"))),
        Case("silu_mul", shape, two, width, lambda stays, gate, up: (stays, ir.ops.silu_mul(gate, up))),
        Case("gelu_mul", shape, two, width, lambda stays, gate, up: (stays, ir.ops.gelu_mul(gate, up, "tanh"))),
    ]


def heads(rows: int, queries: int, keys: int, size: int, dtype: torch.dtype) -> list[Case]:
    angles = torch.randn(1, rows, size // 2).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weight = torch.rand(size).to(dtype)
    positions, table = torch.arange(rows), torch.randn(2048, size).to(dtype)
    width = (queries + keys) * size

    def by_head(*parts: Tensor) -> list[Tensor]:
        return [part.view(1, rows, -1, size) for part in parts]

    def joined(parts: list[Tensor]) -> Tensor:
        """As a model needs them for attention: heads before tokens."""
        return torch.cat([part.transpose(1, 2).reshape(rows, -1) for part in parts], -1)

    def rotated(stays: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        return stays, joined([ir.ops.apply_rotary_pos_emb(each, cos, sin) for each in by_head(*parts)])

    def both(stays: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        found = [ir.ops.rms_norm(each, weight, EPSILON) for each in by_head(*parts)]
        return stays, joined([ir.ops.apply_rotary_pos_emb(each, cos, sin) for each in found])

    def by_position(stays: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        return stays, joined(by_head(*ir.ops.rotary_embedding(positions, *parts, table, size)))

    shape, made, width = (
        f"{rows} x ({queries} + {keys}) x {size}",
        (queries * size, keys * size),
        (queries + keys) * size,
    )
    return [
        Case("rms_norm", shape, made, width, both, ("apply_rotary_pos_emb",)),
        Case("apply_rotary_pos_emb", shape, made, width, rotated),
        Case("rotary_embedding", shape, made, width, by_position),
    ]


def cases(rows: int, dtype: torch.dtype) -> list[Case]:
    found = [case for width in WIDTHS for case in norms(rows, width, dtype)]
    found += [case for width in GATES for case in gates(rows, width)]
    return found + [case for each in HEADS for case in heads(rows, *each, dtype)]


def compiled(case: Case, provider: str, inputs: list[Tensor], products: list[list[Tensor]], stays: Tensor) -> Call:
    def steps(inputs: list[Tensor], products: list[list[Tensor]], stays: Tensor) -> tuple[list[Tensor], Tensor]:
        found = []
        for x, (*front, behind) in zip(inputs, products, strict=True):
            stays, y = case.step(stays, *(x @ each for each in front))
            found.append(y @ behind)
        return found, stays

    options = {"ir_op_priority": {case.op: [provider]} | {op: ["native"] for op in case.others}}
    artefact = torch.compile(steps, backend="irframework", dynamic=False, options=options)
    artefact(inputs, products, stays)
    chosen = set(ir.last_report().selected_impls[case.op].values())
    if chosen != {provider}:
        raise SystemExit(f"error: {case.op} was to be run by {provider}, not by {', '.join(sorted(chosen))}")
    return lambda: artefact(inputs, products, stays)


def line(case: Case, rows: int, dtype: str, rounds: int) -> Line:
    torch._dynamo.reset()
    made = {"dtype": DTYPES[dtype]}
    inputs = [torch.randn(rows, SIDE).to(**made) for _ in range(STEPS)]
    stays = torch.randn(rows, case.read).to(**made)
    sizes = [*((SIDE, width) for width in case.made), (case.read, SIDE)]
    products = [[(torch.randn(size) / size[0] ** 0.5).to(**made) for size in sizes] for _ in range(STEPS)]
    calls = {name: compiled(case, name, inputs, products, stays) for name in ("vllm_c", "native")}
    times = measure(calls, rounds, 0.01)
    pairs = list(zip(times["vllm_c"], times["native"], strict=True))
    kernel, inductor = (statistics.median(times[name]) / STEPS * 1e6 for name in ("vllm_c", "native"))
    gained = spread([(theirs - ours) / STEPS * 1e6 for ours, theirs in pairs])
    return Line(case.op, dtype, case.shape, kernel, inductor, gained, spread([theirs / ours for ours, theirs in pairs]))


def spread(values: list[float]) -> tuple[float, float, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return middle, low, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--op", nargs="+", help="only these ops")
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
        print(f"{'op':<20} {'dtype':<9} {'shape':<22} {'kernel':>9} {'inductor':>9}   {'gained':<22} ratio")
    with torch.inference_mode():
        for dtype in args.dtype:
            for rows in args.rows:
                for case in cases(rows, DTYPES[dtype]):
                    if args.op and case.op not in args.op:
                        continue
                    x = line(case, rows, dtype, args.rounds)
                    found.append(x)
                    if not args.json:
                        gained = "{:.1f} ({:.1f} to {:.1f})".format(*x.gained)
                        ratio = "{:.2f} ({:.2f}-{:.2f})".format(*x.ratio)
                        head = f"{x.op:<20} {x.dtype:<9} {x.shape:<22}"
                        print(f"{head} {x.kernel:9.1f} {x.inductor:9.1f}   {gained:<22} {ratio}", flush=True)
    if args.json:
        print(json.dumps({"torch": torch.__version__, "lines": [asdict(x) for x in found]}, indent=2))


if __name__ == "__main__":
    main()
