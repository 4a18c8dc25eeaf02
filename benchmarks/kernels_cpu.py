"""How fast the CPU kernels of irframework-vllm-c are, as ratios to what torch offers, measured in one process.

Run `python benchmarks/kernels_cpu.py` (a few minutes), `--quick` for a look, `--json` for machines, `--op` for others
than rms_norm (`--op quantising` for those that end in fp8 codes with a scale of a tensor or a row, `--op further` for
those that only the CPU library has, `--op fused` for the fused ones of these: groups of 128 or, in rows of 576, of 64;
GELU by tanh; heads of that size, rotated, normed before or not, with a quarter as many keys, written to a cache or not:
there plain torch writes in place, too; heads alone are of 128 or, in rows of 576, of 64). What kernels gain inside of a
compiled graph is measured by `in_graphs_cpu.py`. Each line is one shape, dtype and number of threads:

    ours        time of one call of the kernel through its torch op, in microseconds: the least of all rounds
    op          the same for torch's own function (F.rms_norm; F.silu or F.gelu, and a product where there is a gate),
                then the quantisation as its definition says, where the op ends in one; "-" where torch has no such
                function
    native      the same for the op's definition, run eagerly
    inductor    the same for the definition under torch.compile, called as a user calls it
    best/ours   the fastest of the three divided by ours, and in brackets the quartiles of that ratio over the rounds.
                The goal is at least 0.95 everywhere, and more than 1 for bfloat16 that is quantised; the further ops
                are to be faster than native in bfloat16
    op/ours     torch's own function divided by ours. The goal for rms_norm in bfloat16 is at least 3 from 64 rows on

Noise of a machine only ever adds time, so the least of many rounds is what is compared. All contestants of a line take
turns within each round, in an order that rotates; with one thread the clock is that thread's processor time, which does
not count other programs. The allocator is told to keep large blocks (MALLOC_MMAP_THRESHOLD_): page faults of fresh
memory would otherwise cost more than any kernel here.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(4 << 30),
    "MALLOC_TOP_PAD_": str(1 << 28),
}

if __name__ == "__main__" and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
    # glibc reads these before main(), so only a new process sees them.
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from fused_families import plain_norm_rotary_and_cache, plain_rotary_and_cache  # noqa: E402
from irframework_vllm_c import cpu_only, fused, implementations, library  # noqa: E402
from torch import Tensor  # noqa: E402

import irframework as ir  # noqa: E402

ROWS = (1, 64, 1024, 4096)
WIDTHS = (576, 4096, 8192)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
EPSILON = 1e-6
CONTESTANTS = ("ours", "op", "native", "inductor")
PLAIN = ("rms_norm", "fused_add_rms_norm", "silu_and_mul", "gelu_and_mul")
QUANTISING = tuple(
    f"{before}{kind}_quant_fp8"
    for before in ("", "rms_norm_", "fused_add_rms_norm_", "silu_and_mul_")
    for kind in ("static", "dynamic")
)

# What the op takes besides x, where that is of the width that is measured, or of twice as many columns where there is a
# gate. Numbers that decide nothing about speed are the ops' defaults.
ELEMENTS = ("gelu_new", "gelu_fast", "quick_gelu", "relu2", "xielu")
GATED = ("mul_and_silu", "fatrelu_and_mul", "swigluoai_and_mul", "gelu_and_mul_sparse")
BLOCKS = ("tensor_quant_fp8", "dynamic_quant_int8", "group_quant_fp8", "dequant")
GEMMA = ("gemma_rms_norm", "fused_add_gemma_rms_norm")
WRITTEN_OUT = ("silu_mul", "gelu_mul", "apply_rotary_pos_emb")
FURTHER = (*ELEMENTS, *GATED, *BLOCKS, *GEMMA, *WRITTEN_OUT)
FUSED = (
    "rms_norm_group_quant_fp8",
    "fused_add_rms_norm_group_quant_fp8",
    "silu_and_mul_group_quant_fp8",
    "gelu_and_mul_static_quant_fp8",
    "gelu_and_mul_dynamic_quant_fp8",
    "gelu_and_mul_group_quant_fp8",
    "rotary_embedding_reshape_and_cache",
    "qk_norm_rotary_embedding",
    "qk_norm_rotary_embedding_reshape_and_cache",
)
IN_PLACE: dict[str, Callable[..., object]] = {
    "rotary_embedding_reshape_and_cache": plain_rotary_and_cache,
    "qk_norm_rotary_embedding_reshape_and_cache": plain_norm_rotary_and_cache,
}

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the table; times in microseconds, ratios as (of the least times, lower and upper quartile)."""

    op: str
    threads: int
    dtype: str
    rows: int
    width: int
    times: dict[str, float]
    best_to_ours: tuple[float, float, float]
    op_to_ours: tuple[float, float, float] | None


def torch_silu_and_mul(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]) * x[..., half:]


def torch_gelu_and_mul(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return F.gelu(x[..., :half]) * x[..., half:]


def calls_of(op: str, rows: int, width: int, dtype: torch.dtype, compiled: dict[str, Call]) -> dict[str, Call]:
    """What takes part for one shape: a call without arguments by contestant."""
    kernels = torch.ops.irframework_vllm_c
    definition: Callable[..., object] = getattr(ir.ops, op).native
    x = torch.randn(rows, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    if op == "rms_norm":
        return {
            "ours": lambda: kernels.rms_norm.default(x, weight, EPSILON),
            "op": lambda: F.rms_norm(x, (width,), weight, EPSILON),
            "native": lambda: definition(x, weight, EPSILON),
            "inductor": lambda: compiled[op](x, weight, EPSILON),
        }
    if op == "fused_add_rms_norm":
        # In place on zeros with a weight of ones: the values stay bounded however often it runs.
        residual, ones = torch.zeros_like(x), torch.ones_like(weight)
        target = torch.zeros_like(x)
        return {
            "ours": lambda: kernels.fused_add_rms_norm.default(target, residual, ones, EPSILON),
            "op": lambda: F.rms_norm(x + residual, (width,), weight, EPSILON),
            "native": lambda: definition(x, residual, weight, EPSILON),
            "inductor": lambda: compiled[op](x, residual, weight, EPSILON),
        }
    wide = torch.randn(rows, 2 * width).to(dtype)
    function = {"silu_and_mul": torch_silu_and_mul, "gelu_and_mul": torch_gelu_and_mul}[op]
    ours = {
        "silu_and_mul": lambda: kernels.silu_and_mul.default(wide),
        "gelu_and_mul": lambda: kernels.gelu_and_mul.default(wide, False),
    }[op]
    return {
        "ours": ours,
        "op": lambda: function(wide),
        "native": lambda: definition(wide),
        "inductor": lambda: compiled[op](wide),
    }


def quantising_calls_of(
    op: str, rows: int, width: int, dtype: torch.dtype, compiled: dict[str, Call]
) -> dict[str, Call]:
    """As `calls_of`, for an op that ends in codes."""
    before, kind, *_ = op.replace("dynamic", "/dynamic").replace("static", "/static").split("/") + [""]
    kernel = getattr(torch.ops.irframework_vllm_c, op).default
    definition: Callable[..., object] = getattr(ir.ops, op).native
    weight, scale = torch.randn(width).to(dtype), torch.full((1,), 0.02)
    x = torch.randn(rows, 2 * width if before == "silu_and_mul_" else width).to(dtype)
    ending: tuple[object, ...] = (scale,) if kind.startswith("static") else ()
    quantise = ir.ops.static_quant_fp8.native if ending else ir.ops.dynamic_quant_fp8.native
    args = ours = {
        "": (x, *ending),
        "rms_norm_": (x, weight, *ending, EPSILON),
        "fused_add_rms_norm_": (x, x, weight, *ending, EPSILON),
        "silu_and_mul_": (x, *ending),
    }[before]
    functions: dict[str, Callable[[], Tensor]] = {
        "rms_norm_": lambda: F.rms_norm(x, (width,), weight, EPSILON),
        "fused_add_rms_norm_": lambda: F.rms_norm(x + x, (width,), weight, EPSILON),
        "silu_and_mul_": lambda: torch_silu_and_mul(x),
    }
    if before == "fused_add_rms_norm_":
        # In place: adding zeros keeps the values bounded however often it runs.
        ours = (torch.zeros_like(x), x.clone(), *args[2:])
        args = (x, x.clone(), *args[2:])
    calls: dict[str, Call] = {"ours": lambda: kernel(*ours)}
    if before:
        calls["op"] = lambda: quantise(functions[before](), *ending)
    return calls | {"native": lambda: definition(*args), "inductor": lambda: compiled[op](*args)}


def further_calls_of(op: str, rows: int, width: int, dtype: torch.dtype, compiled: dict[str, Call]) -> dict[str, Call]:
    """As `calls_of`, for the ops that only the CPU library has."""
    definition: Callable[..., object] = getattr(ir.ops, op).native
    function = getattr(cpu_only, {"gelu_fast": "gelu_new"}.get(op, op))
    x, weight = (torch.randn(size).to(dtype) for size in ((rows, 2 * width if op in GATED else width), (width,)))
    args: tuple[object, ...] = (x,)
    if op == "xielu":
        args = (x, torch.tensor([0.2]), torch.tensor([-1.05]))
    elif op == "gelu_and_mul_sparse":
        args = (x, 0.95)
    elif op in ("silu_mul", "gelu_mul"):
        args = (x, x.flip(0))
    elif op == "apply_rotary_pos_emb":
        heads = x.view(1, rows, -1, 128 if width % 128 == 0 else 64)
        args = (heads, *torch.randn(2, 1, rows, heads.shape[-1]).to(dtype))
    elif op == "dequant":
        args = (*ir.ops.group_quant_fp8.native(x), dtype)
    elif op == "gemma_rms_norm":
        args = (x, weight, EPSILON)
    elif op == "fused_add_gemma_rms_norm":
        # In place on zeros with a weight of zeros: the values stay bounded however often it runs.
        zeros = (torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(weight), EPSILON)
        args = (x, x.clone(), weight, EPSILON)
        return {
            "ours": lambda: function(*zeros),
            "native": lambda: definition(*args),
            "inductor": lambda: compiled[op](*args),
        }
    own: dict[str, Callable[[], object]] = {
        "gelu_new": lambda: F.gelu(x, approximate="tanh"),
        "gelu_fast": lambda: F.gelu(x, approximate="tanh"),
        "mul_and_silu": lambda: x[..., :width] * F.silu(x[..., width:]),
        "silu_mul": lambda: F.silu(x) * args[1],
        "gelu_mul": lambda: F.gelu(x) * args[1],
    }
    calls: dict[str, Call] = {"ours": lambda: function(*args)}
    if op in own:
        calls["op"] = own[op]
    return calls | {"native": lambda: definition(*args), "inductor": lambda: compiled[op](*args)}


def definition_of(op: str) -> Callable[..., object]:
    """The op in plain torch: its native form, but for writes to a cache, of which that would make another."""
    native: Callable[..., object] = getattr(ir.ops, op).native
    return IN_PLACE.get(op, native)


def fused_calls_of(op: str, rows: int, width: int, dtype: torch.dtype, compiled: dict[str, Call]) -> dict[str, Call]:
    """As `calls_of`, for the fused ops that only the CPU library has; torch has no function of its own for them."""
    weight, scale = torch.randn(width).to(dtype), torch.full((1,), 0.02)
    x = torch.randn(rows, 2 * width if "_and_mul_" in op else width).to(dtype)
    size = 128 if width % 128 == 0 else 64
    groups = (size,) if "_group_" in op else ()
    args: tuple[object, ...] = (x, weight, EPSILON)
    if op.startswith("fused_add"):
        args = (x, x.flip(0), weight, EPSILON)
    elif "_and_mul_" in op:
        args = (x, *([scale] if "static" in op else []), *(["tanh"] if op.startswith("gelu") else []))
    elif "rotary" in op:
        head, keys = torch.randn(size).to(dtype), x[:, : width // (4 * size) * size].contiguous()
        cache = torch.randn(rows, 1, keys.shape[-1] // size, size).to(dtype)
        written = (keys, cache, cache.clone(), torch.randperm(rows)) if op.endswith("cache") else ()
        normed = ((head, head), (EPSILON,)) if op.startswith("qk_norm") else ((), ())
        table = torch.randn(rows, size).to(dtype)
        args = (torch.arange(rows), x, keys, *written, *normed[0], table, size, *normed[1], True)
    module = fused if hasattr(fused, op) else implementations
    function = getattr(module, f"{op}_functional" if op.startswith("fused_add") else op)
    definition = definition_of(op)
    return {
        "ours": lambda: function(*args, *groups),
        "native": lambda: definition(*args, *groups),
        "inductor": lambda: compiled[op](*args, *groups),
    }


def seconds_per_call(call: Call, repeats: int) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def measure(calls: dict[str, Call], rounds: int, round_seconds: float) -> dict[str, list[float]]:
    """Seconds per call in each round, by contestant; the contestants take turns and the order rotates."""
    repeats = {}
    for name, call in calls.items():
        call()
        repeats[name] = max(1, int(round_seconds / max(seconds_per_call(call, 2), 1e-7)))
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(seconds_per_call(calls[name], repeats[name]))
    return times


def ratio(theirs: list[list[float]], ours: list[float]) -> tuple[float, float, float]:
    """The fastest of the others over ours: of the least times, and the quartiles over rounds."""
    rounds = [min(others) / own for *others, own in zip(*theirs, ours, strict=True)]
    low, _, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return min(map(min, theirs)) / min(ours), low, high


def lines(args: argparse.Namespace, op: str) -> list[Line]:
    """Measures everything that was asked for about an op, printing each line when it is known."""
    found = []
    kinds = ((QUANTISING, quantising_calls_of), (FURTHER, further_calls_of), (FUSED, fused_calls_of))
    calls_for = next((calls for ops, calls in kinds if op in ops), calls_of)
    for threads in args.threads:
        torch.set_num_threads(threads)
        for dtype in args.dtype:
            for rows in args.rows:
                for width in args.width:
                    # One artefact per shape and number of threads: what Inductor does best.
                    torch._dynamo.reset()
                    artefacts: dict[str, Call] = {op: torch.compile(definition_of(op), dynamic=False)}
                    times = measure(calls_for(op, rows, width, DTYPES[dtype], artefacts), args.rounds, args.seconds)
                    line = Line(
                        op,
                        threads,
                        dtype,
                        rows,
                        width,
                        {name: min(values) * 1e6 for name, values in times.items()},
                        ratio([values for name, values in times.items() if name != "ours"], times["ours"]),
                        ratio([times["op"]], times["ours"]) if "op" in times else None,
                    )
                    found.append(line)
                    if not args.json:
                        print(text_of(line), flush=True)
    return found


def text_of(line: Line) -> str:
    def shown(values: tuple[float, float, float] | None) -> str:
        return f"{values[0]:6.2f} ({values[1]:.2f}-{values[2]:.2f})" if values else f"{'-':>6}"

    times = " ".join(f"{line.times[name]:10.1f}" if name in line.times else f"{'-':>10}" for name in CONTESTANTS)
    shape = f"{line.rows:>5} x {line.width:<5}"
    return (
        f"{line.threads:>7} {line.dtype:>9} {shape} {times}   {shown(line.best_to_ours):<22} {shown(line.op_to_ours)}"
    )


def misses(found: list[Line]) -> list[str]:
    """The lines that miss a goal, in words."""
    found_slow = []
    for x in found:
        goal = 1.0 if x.op in (*QUANTISING, *FUSED) and x.dtype == "bfloat16" else 0.95
        where = f"{x.op}, {x.threads} thread(s), {x.dtype}, {x.rows} x {x.width}"
        if x.best_to_ours[0] < goal:
            found_slow.append(f"{where}: best/ours is {x.best_to_ours[0]:.2f}, goal {goal}")
        if x.op == "rms_norm" and x.dtype == "bfloat16" and x.rows >= 64 and x.op_to_ours and x.op_to_ours[0] < 3:
            found_slow.append(f"{where}: op/ours is {x.op_to_ours[0]:.2f}, goal 3")
        native = x.times["native"] / x.times["ours"]
        if x.op in FURTHER and x.dtype == "bfloat16" and native <= 1:
            found_slow.append(f"{where}: native/ours is {native:.2f}, goal more than 1")
    return found_slow


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    groups = {"quantising": QUANTISING, "further": FURTHER, "fused": FUSED}
    ops = (*PLAIN, *QUANTISING, *FURTHER, *FUSED, *groups)
    parser.add_argument(
        "--op",
        choices=ops,
        nargs="+",
        default=["rms_norm"],
        help="quantising: all that end in codes; further: those that only the CPU has; fused: of these the fused ones",
    )
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--width", type=int, nargs="+", default=WIDTHS)
    parser.add_argument("--dtype", choices=list(DTYPES), nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15, help="rounds per line")
    parser.add_argument(
        "--seconds", type=float, default=0.01, help="seconds per contestant and round, at least one call"
    )
    parser.add_argument("--quick", action="store_true", help="rows 64 and 1024, width 4096, 5 rounds")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.width, args.rounds = (64, 1024), (4096,), 5
    isa = library.instruction_set()
    found: list[Line] = []
    for op in (name for given in args.op for name in groups.get(given, (given,))):
        if not args.json:
            head = " ".join(f"{n:>10}" for n in CONTESTANTS)
            print(f"{op}, torch {torch.__version__}, kernels for {isa}, times in us")
            print(f"threads     dtype  rows x width {head}   best/ours{'':<14}op/ours")
        with torch.inference_mode():
            found += lines(args, op)
    if args.json:
        report = {"torch": torch.__version__, "isa": isa, "lines": [asdict(x) for x in found], "misses": misses(found)}
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(misses(found)) or "All goals met.")


if __name__ == "__main__":
    main()
