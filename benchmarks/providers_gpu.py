"""How fast the kernels are on a GPU: time over the floor, beside Inductor, F.rms_norm and liger-kernel.

Run it in the root of the repository, on the machine with the GPU:

    python benchmarks/providers_gpu.py --json providers.json [--liger liger_kernel-0.8.5-py3-none-any.whl]
    python benchmarks/providers_gpu.py --ops rms_norm --rows 2048 --columns 4096 --verbose
    python benchmarks/providers_gpu.py --ops fused --json fused.json                   # the other fused quantisations
    python benchmarks/providers_gpu.py --ops families --json families.json             # what each fused family gains
    python benchmarks/providers_gpu.py --ops silu_mul,gelu_mul,apply_rotary_pos_emb    # what plain models write out
    python benchmarks/providers_gpu.py --from providers.json --plot providers.svg      # anywhere, later

The whole grid takes about three minutes on 16 cores and ends after --limit seconds in any case; what was not measured
by then is listed. Of this repository nothing needs to be installed (see `source_tree`); kernels that are compiled
(`vllm_c`) take part where their wheel is installed.

How times are taken is said in `irframework/cli/benchmarking.py`: inside CUDA graphs, every call with arguments of its
own, the cache cold. Providers are called directly, without the framework. `inductor` is stock torch.compile of the op's
definition, compiled for each shape alone. `unfused` is the two kernels of `triton` that a fused quantisation stands
for, one after the other. The floor is the bytes that must move (arguments read once, results written once) at the
bandwidth of a large copy measured in the same run. The goals are printed beside what was found.
"""

import argparse
import json
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import families_gpu
from compile_ahead import compile_ahead, my_share, use_own_cache
from providers_tables import draw, report
from source_tree import make_importable

ROWS = (2048, 8192, 32768, 1, 16, 64, 256, 1024)  # those that most goals are about come first
COLUMNS = (2048, 4096, 5120, 8192)
OPS = (
    "rms_norm",
    "fused_add_rms_norm",
    "silu_and_mul",
    "rms_norm_static_quant_fp8",
    "silu_and_mul_static_quant_fp8",
    "rms_norm_dynamic_quant_fp8",
    "silu_and_mul_dynamic_quant_fp8",
    "fused_add_rms_norm_static_quant_fp8",
)
FUSED_OPS = (
    "rms_norm_group_quant_fp8",
    "fused_add_rms_norm_group_quant_fp8",
    "silu_and_mul_group_quant_fp8",
    "gelu_and_mul_group_quant_fp8",
    "fused_add_rms_norm_dynamic_quant_fp8",
    "gelu_and_mul_static_quant_fp8",
    "gelu_and_mul_dynamic_quant_fp8",
    "rms_norm_quant_nvfp4",
    "fused_add_rms_norm_quant_nvfp4",
    "silu_and_mul_quant_nvfp4",
)
FIRST_PARTS = ("fused_add_rms_norm", "rms_norm", "silu_and_mul", "gelu_and_mul")
OURS = ("vllm_c", "triton")
SMALL = 64  # rows where ours are measured with a warm cache as well
Call = Callable[..., Any]


@dataclass(frozen=True)
class Point:
    """One place of the grid."""

    op: str
    rows: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """Of the op's first tensor; gate and up lie side by side."""
        return self.rows, self.columns * (2 if "_and_mul" in self.op else 1)


def points(options: argparse.Namespace) -> list[Point]:
    return [Point(op, rows, columns) for rows in options.rows for op in options.ops for columns in options.columns]


def arguments_of(point: Point, device: str) -> tuple[Any, ...]:
    import torch

    import irframework as ir

    op = getattr(ir.ops, point.op)
    made: tuple[Any, ...] = op.generate_inputs(shape=point.shape, dtype=torch.bfloat16, device=device)
    return made


def unfused(name: str, device: str, sample: tuple[Any, ...]) -> Call | None:
    """The two kernels that a fused quantisation stands for, of the provider that has both."""
    import irframework as ir
    from irframework.dispatch import why_never

    first = next((part for part in FIRST_PARTS if name.startswith(f"{part}_") and "quant" in name), None)
    if first is None:
        return None
    names = list(getattr(ir.ops, name).signature.parameters)
    impls = [getattr(ir.ops, part).impls.get("triton") for part in (first, name.removeprefix(f"{first}_"))]
    if any(impl is None or why_never(impl, device) is not None for impl in impls):
        return None
    impls = [impl.functional or impl for impl in impls]
    wanted = [[p for p in impl.op.signature.parameters if p in names] for impl in impls]
    places = [[names.index(p) for p in part if i == 0 or p != "x"] for i, part in enumerate(wanted)]

    def call(*arguments: Any) -> Any:
        y = impls[0].fn(*(arguments[place] for place in places[0]))
        y, total = y if isinstance(y, tuple) else (y, None)
        return impls[1].fn(y, *(arguments[place] for place in places[1])), total

    return call


def contestants(point: Point, options: argparse.Namespace) -> Iterator[tuple[str, Call]]:
    """Who takes part, each called with the op's arguments in order."""
    import torch
    import torch.nn.functional as F

    import irframework as ir
    from irframework.dispatch import why_never

    op = getattr(ir.ops, point.op)
    sample = arguments_of(Point(point.op, 1, point.columns), options.device)
    for name in OURS:
        impl = op.impls.get(name)
        if impl is not None and why_never(impl, options.device) is None and impl.accepts(sample) is True:
            yield name, impl.fn
    both = unfused(point.op, options.device, sample)
    if both is not None:
        yield "unfused", both
    if not options.no_inductor:
        torch._dynamo.reset()  # each shape is compiled anew: no limit on how many
        yield "inductor", torch.compile(op.native, dynamic=False)
    if point.op == "rms_norm":
        yield "F.rms_norm", lambda x, weight, epsilon, _: F.rms_norm(x, weight.shape, weight, epsilon)
    if options.liger:
        import liger_kernel.ops as liger

        if point.op == "rms_norm":
            function = liger.LigerRMSNormFunction.apply
            yield "liger", lambda x, weight, epsilon, _: function(x, weight, epsilon, 0.0, "llama", False)
        elif point.op == "fused_add_rms_norm":
            add = liger.LigerFusedAddRMSNormFunction.apply
            yield "liger", lambda x, residual, weight, epsilon, _: add(x, residual, weight, epsilon, 0.0, "llama")
        elif point.op == "silu_and_mul":
            yield "liger", liger.LigerFusedGateUpSiLUMulFunction.apply


def compile_part(options: argparse.Namespace) -> None:
    """Call everything of this process's share once."""
    import torch

    grid = points(options)
    with torch.no_grad():
        for index in my_share(options.part, len(grid)):
            for name, call in contestants(grid[index], options):
                try:
                    call(*arguments_of(grid[index], options.device))
                except Exception as error:
                    print(f"{name} at {grid[index]}: {type(error).__name__}: {error}")


def measure_grid(options: argparse.Namespace, found: dict[str, Any], until: float) -> None:
    """Fill `found` with what was measured before the clock shows `until`."""
    import irframework as ir
    from irframework.cli.benchmarking import GraphClock, clock_for, copy_bandwidth, moved_bytes, race

    clock = clock_for(options.device)
    found["copy"] = copy_bandwidth(options.device, clock)
    found["cache_bytes"] = clock.cache
    empty = (
        clock.empty_kernel if isinstance(clock, GraphClock) else lambda cold: clock.time(lambda: None, [()], 3, cold)
    )
    found["empty"] = {how: empty(cold=how == "cold").to_dict() for how in ("cold", "warm")}
    measure_host(options, found, clock)
    for point in points(options):
        if time.perf_counter() > until:
            found["not_measured"].append(f"{point.op} {point.rows}x{point.columns}")
            continue
        bare = arguments_of(point, "meta")
        moved = moved_bytes(bare, getattr(ir.ops, point.op).native(*bare))
        sets = [arguments_of(point, options.device) for _ in range(clock.sets_for(moved))]
        cell: dict[str, Any] = {"op": point.op, "rows": point.rows, "columns": point.columns}
        cell["floor"] = moved / found["copy"]
        all_of_them = [(name, call, sets) for name, call in contestants(point, options)]
        ours = [entry for entry in all_of_them if entry[0] in OURS and point.rows <= SMALL]
        for part, entries, cold in (("times", all_of_them, True), ("warm", ours, False)):
            raced = race(entries, clock, options.rounds, cold)
            cell[part] = {name: raced.timing(name).to_dict() for name in raced.times}
            for name, error in raced.failed.items():
                first = str(error).splitlines()[0][:200] if str(error) else ""
                found["failed"].append(
                    f"{name} {point.op} {point.rows}x{point.columns}: {type(error).__name__}: {first}"
                )
        found["cells"].append(cell)
        if options.verbose:
            times = "  ".join(
                f"{n} {t['median']:.2f} ({t['median'] / cell['floor']:.2f})" for n, t in cell["times"].items()
            )
            print(f"{point.op:36}{point.rows:>6}x{point.columns:<5} floor {cell['floor']:8.2f}  {times}", flush=True)
        del sets
        clock.synchronize()


def measure_host(options: argparse.Namespace, found: dict[str, Any], clock: Any) -> None:
    """Host time of a call through irframework, and of the provider's function called directly."""
    import torch

    import irframework as ir
    from irframework.cli.benchmarking import Timing, host_times
    from irframework.dispatch import why_never

    for name in options.ops:
        op = getattr(ir.ops, name)
        arguments = arguments_of(Point(name, 16, 4096), options.device)
        form = op.maybe_inplace if op.allow_inplace else op
        for provider in OURS:
            impl = op.impls.get(provider)
            if impl is None or why_never(impl, options.device) or impl.accepts(arguments) is not True:
                continue
            for mode in ("no_grad", "inference_mode"):
                try:
                    with getattr(torch, mode)(), ir.priority({name: [provider]}):
                        # Activations are made in the mode, weights outside, as models do it.
                        given = tuple(
                            value.clone() if parameter in op.activations and isinstance(value, torch.Tensor) else value
                            for parameter, value in zip(op.signature.parameters, arguments, strict=False)
                        )
                        times = host_times({"through": form, "direct": impl.fn}, given, clock, rounds=40)
                except Exception as error:
                    found["failed"].append(f"host time of {provider} {name}: {type(error).__name__}: {error}")
                    continue
                ratios = [through / direct for through, direct in zip(times["through"], times["direct"], strict=True)]
                entry = {key: Timing.of(values).to_dict() for key, values in (*times.items(), ("ratio", ratios))}
                found["host"].append({"op": name, "provider": provider, "mode": mode, **entry})


def find_liger(wheel: Path | None) -> bool:
    """Whether liger-kernel can be imported, if need be out of its wheel."""
    if wheel is not None and wheel.exists():
        target = mkdtemp(prefix="liger_")  # unpacked: Triton reads the sources of kernels
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(target)
        sys.path.append(target)
    try:
        import liger_kernel.ops  # noqa: F401
    except Exception as error:
        print(f"liger-kernel does not take part: {type(error).__name__}: {error}")
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: tuple(int(part) for part in text.split(","))  # noqa: E731
    parser.add_argument("--rows", type=numbers, default=ROWS)
    parser.add_argument("--columns", type=numbers, default=COLUMNS)
    ops = lambda text: FUSED_OPS if text == "fused" else tuple(text.split(","))  # noqa: E731
    parser.add_argument("--ops", type=ops, default=OPS, help="their names, or: fused, or: families")
    parser.add_argument("--families", type=lambda text: text.split(","), help="with families: only those of these ops")
    parser.add_argument("--provider", help="with families: whose kernels; default: triton, on a CPU vllm_c")
    parser.add_argument("--tiny", action="store_true", help="with families: two small points each")
    parser.add_argument("--device", default="cuda", help="cpu: only to try this program")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--liger", type=Path, help="its wheel, where it is not installed")
    parser.add_argument("--no-inductor", action="store_true")
    parser.add_argument("--processes", type=int, default=14, help="that compile ahead; 0: none")
    parser.add_argument("--limit", type=float, default=200, help="seconds, after which no further point is measured")
    parser.add_argument("--verbose", action="store_true", help="a line per point")
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    parser.add_argument("--from", type=Path, dest="read", help="measure nothing; report on this file")
    parser.add_argument("--plot", type=Path, help="draw time over floor; needs matplotlib")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    start = time.perf_counter()
    families = options.ops == ("families",)
    if options.read:
        found = json.loads(options.read.read_text())
    else:
        use_own_cache()
        make_importable()
        options.liger = not families and find_liger(options.liger)
        import torch

        if options.part:
            (families_gpu.compile_part if families else compile_part)(options)
            return 0
        device = torch.cuda.get_device_name(options.device) if options.device != "cpu" else "cpu"
        found = {"torch": torch.__version__, "device": device}
        found |= {"cells": [], "host": [], "failed": [], "not_measured": []}
        if options.processes:
            print(compile_ahead(options.processes, options.limit * 0.45), flush=True)
        (families_gpu.measure if families else measure_grid)(options, found, start + options.limit)
        found["seconds"] = time.perf_counter() - start
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    print(families_gpu.report(found) if families else report(found))
    if options.plot:
        draw(found, options.plot)
    return 1 if found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
