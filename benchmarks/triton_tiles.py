"""Which tiles are best for the Triton kernels on a GPU: every sensible choice, timed at every point of the grid.

Run it in the root of the repository, on the machine with the GPU:

    python benchmarks/triton_tiles.py --json tiles.json
    python benchmarks/triton_tiles.py --ops rms_norm --columns 5120 --verbose
    python benchmarks/triton_tiles.py --from tiles.json                       # anywhere, later

It ends after --limit seconds in any case; what was not measured by then is counted. Times are taken inside CUDA graphs,
every call with arguments of its own, the cache cold (`irframework/cli/benchmarking.py`). A tile is written as elements
of a row, `w` warps, and where they are not as usual `x` rows, `loop` (the row is read again), `res` programs per
multiprocessor that stay, and `early` (loaded before the kernel in front of it has ended). `usual` is what the launch
chooses by itself.

A row must be summed in the same order whatever is beside it, so a tile may depend on the length of a row only: beside
the best tile for each point, the table says which is best for all rows of a length, and what the usual one costs.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from compile_ahead import compile_ahead, my_share, use_own_cache
from source_tree import make_importable

ROWS = (2048, 8192, 32768, 1, 16, 64, 256, 1024)
COLUMNS = (2048, 4096, 5120, 8192)
# An op's name, its function in `launch`, what comes behind its arguments, and its kind: elementwise, or as in `tiles`.
OPS: dict[str, tuple[str, tuple[Any, ...], str]] = {
    "rms_norm": ("rms_norm", (), "norm"),
    "fused_add_rms_norm in place": ("fused_add_rms_norm_inplace", (), "add_norm"),
    "silu_and_mul": ("gated", ("silu",), "elements"),
    "rms_norm_static_quant_fp8": ("rms_norm_static_quant_fp8", (), "norm"),
    "silu_and_mul_static_quant_fp8": ("silu_and_mul_static_quant_fp8", (), "elements"),
    "rms_norm_dynamic_quant_fp8": ("rms_norm_dynamic_quant_fp8", (), "norm"),
    "silu_and_mul_dynamic_quant_fp8": ("silu_and_mul_dynamic_quant_fp8", (), "gated_codes"),
    "fused_add_rms_norm": ("fused_add_rms_norm", (), "add_norm"),
    "fused_add_rms_norm_static_quant_fp8": ("fused_add_rms_norm_static_quant_fp8", (), "add_norm"),
    "static_quant_fp8": ("static_quant_fp8", (), "elements"),
    "dynamic_quant_fp8": ("dynamic_quant_fp8", (), "codes"),
    "quant_nvfp4": ("quant_nvfp4", (), "elements"),
    "silu_and_mul_quant_nvfp4": ("gated_quant_nvfp4", ("silu",), "elements"),
    "rms_norm_quant_nvfp4": ("rms_norm_quant_nvfp4", (), "norm"),
    "fused_add_rms_norm_quant_nvfp4": ("fused_add_rms_norm_quant_nvfp4", (), "add_norm"),
}
LOOPS = ((1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16))  # elements of a row at a time, and warps
LARGE = 2048  # rows from which on the floor counts; below, an empty kernel


def tiles_for(kind: str, columns: int) -> dict[str, Any]:
    """All tiles that are worth a try, and None, as `usual`, for the one that the launch chooses."""
    from irframework_triton_kernels import tiles as choice

    make, power_of_two = choice.Tile, choice.power_of_two
    if kind == "elements":
        sizes = itertools.product((256, 512, 1024, 2048, 4096), (2, 4, 8))
        tiles = [make(1, block, True, warps) for block, warps in sizes if 4 <= block // (32 * warps) <= 32]
        tiles = [*tiles, *(replace(tile, early=True) for tile in tiles)]
    else:
        usual = choice.row_tile(columns, getattr(choice, kind.upper()))
        block = power_of_two(columns)
        parts = [(block, 0)]
        if block != columns:
            parts.append((block // 2, power_of_two(columns - block // 2)))
        tiles = [
            make(1, first, True, warps, second)
            for (first, second), warps in itertools.product(parts, (4, 8, 16, 32))
            if first // (32 * warps) in (8, 16, 32) and (not second or second >= 64 * warps)
        ]
        loops = [make(1, first, False, warps) for first, warps in LOOPS if first < columns]
        stay = [replace(usual, resident=programs) for programs in (1, 2, 3, 4)]
        tiles = [*tiles, *(replace(tile, early=True) for tile in (*tiles, usual)), *loops, *stay]
    return {"usual": None, **{label(tile): tile for tile in tiles}}


def label(tile: Any) -> str:
    """A tile in a few characters."""
    words = [f"{tile.block}+{tile.tail}" if tile.tail else str(tile.block), f"w{tile.warps}"]
    words += [f"x{tile.rows}"] * (tile.rows > 1) + ["loop"] * (not tile.whole)
    words += [f"res{tile.resident}"] * (tile.resident > 0) + ["early"] * tile.early
    return " ".join(words)


def arguments_of(name: str, rows: int, columns: int, device: str) -> tuple[Any, ...]:
    import torch

    import irframework as ir

    op = name.split()[0]
    shape = (rows, columns * (2 if op.startswith("silu_and_mul") else 1))
    made: tuple[Any, ...] = getattr(ir.ops, op).generate_inputs(shape=shape, dtype=torch.bfloat16, device=device)
    return made


def moved(name: str, arguments: tuple[Any, ...]) -> int:
    import irframework as ir
    from irframework.cli.benchmarking import moved_bytes

    return moved_bytes(arguments, getattr(ir.ops, name.split()[0]).native(*arguments))


def launcher(name: str, tile: Any) -> Callable[..., Any]:
    """The op's launch with a tile."""
    from irframework_triton_kernels import launch

    function, more, _ = OPS[name]
    call = getattr(launch, function)
    return lambda *given: call(*given, *more, tile=tile)


def points(options: argparse.Namespace) -> list[tuple[str, int, int]]:
    return [(name, rows, columns) for name in options.ops for columns in options.columns for rows in options.rows]


def compile_part(options: argparse.Namespace) -> None:
    """Call everything of this process's share once."""
    work = [
        (name, columns, tile)
        for name, columns in itertools.product(options.ops, options.columns)
        for tile in tiles_for(OPS[name][2], columns).values()
    ]
    for index in my_share(options.part, len(work)):
        name, columns, tile = work[index]
        arguments = arguments_of(name, 4, columns, options.device)
        try:
            launcher(name, tile)(*arguments)
        except Exception as error:
            print(f"{name} {columns} {tile and label(tile)}: {type(error).__name__}: {error}")


def measure(options: argparse.Namespace, found: dict[str, Any], until: float) -> None:
    """Fill `found` with what was measured before the clock shows `until`."""
    from irframework.cli.benchmarking import GraphClock, clock_for, copy_bandwidth, race

    clock = clock_for(options.device)
    found["copy"] = copy_bandwidth(options.device, clock)
    found["empty"] = clock.empty_kernel().median if isinstance(clock, GraphClock) else 0.0
    for name, rows, columns in points(options):
        if time.perf_counter() > until:
            found["not_measured"] += 1
            continue
        bytes_moved = moved(name, arguments_of(name, rows, columns, "meta"))
        sets = [arguments_of(name, rows, columns, options.device) for _ in range(clock.sets_for(bytes_moved))]
        cell: dict[str, Any] = {"op": name, "rows": rows, "columns": columns, "floor": bytes_moved / found["copy"]}
        tiles = tiles_for(OPS[name][2], columns)
        raced = race(((words, launcher(name, tile), sets) for words, tile in tiles.items()), clock, options.rounds)
        cell["times"] = {words: raced.timing(words).median for words in raced.times}
        for words, error in raced.failed.items():
            first = str(error).splitlines()[0][:150] if str(error) else ""
            found["failed"].append(f"{name} {rows}x{columns} {words}: {type(error).__name__}: {first}")
        found["cells"].append(cell)
        if options.verbose:
            best = sorted(cell["times"].items(), key=lambda item: item[1])[:4]
            print(f"{name:36}{rows:>6}x{columns:<5}", *(f"{w}: {t:.2f};" for w, t in best), flush=True)
        del sets
        clock.synchronize()


def report(found: dict[str, Any]) -> str:
    """The tables: best and usual tile of each point, and the best for all rows of a length."""
    lines = [f"{found['device']}, torch {found['torch']}, bf16, copy {found['copy'] / 1e6:.2f} TB/s, "
             f"empty kernel {found['empty']:.2f} us"]  # fmt: skip
    cells = [cell for cell in found["cells"] if "usual" in cell["times"]]
    for name in dict.fromkeys(cell["op"] for cell in cells):
        own = [cell for cell in cells if cell["op"] == name]
        lines += ["", f"{name}: microseconds of the usual tile (times floor, or empty kernel) and of the best"]
        for columns in sorted({cell["columns"] for cell in own}):
            of_length = sorted((cell for cell in own if cell["columns"] == columns), key=lambda cell: cell["rows"])
            for cell in of_length:
                least = cell["floor"] if cell["rows"] >= LARGE else found["empty"] or math.nan
                usual = cell["times"]["usual"]
                words, best = min(cell["times"].items(), key=lambda item: item[1])
                lines.append(
                    f"{cell['rows']:>8}x{columns:<6}{usual:9.2f} ({usual / least:.2f}) {best:9.2f} "
                    f"({best / least:.2f}) usual/best {usual / best:.3f}  {words}"
                )
            lines.append("    all rows: " + "; ".join(_for_all_rows(of_length)))
        large = [cell for cell in own if cell["rows"] >= LARGE]
        if large:
            usual = statistics.geometric_mean(cell["times"]["usual"] / cell["floor"] for cell in large)
            best = statistics.geometric_mean(min(cell["times"].values()) / cell["floor"] for cell in large)
            lines.append(f"    geometric mean over floor, {LARGE} rows on: usual {usual:.3f}, best of each {best:.3f}")
    lines += ["", *found["failed"][:10]]
    if len(found["failed"]) > 10:
        lines.append(f"and {len(found['failed']) - 10} more failed")
    return "\n".join([*lines, f"{found['not_measured']} points not measured; {found['seconds']:.0f} s"])


def _for_all_rows(cells: list[dict[str, Any]]) -> list[str]:
    """The tiles with the least loss against the best of each point, and the usual one's."""
    common = set.intersection(*(set(cell["times"]) for cell in cells))
    least = [min(cell["times"].values()) for cell in cells]
    loss = {
        words: statistics.geometric_mean(cell["times"][words] / low for cell, low in zip(cells, least, strict=True))
        for words in common
    }
    ranked = sorted(loss, key=loss.__getitem__)[:3]
    return [f"{words} {loss[words]:.3f}" for words in dict.fromkeys((*ranked, "usual"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: tuple(int(part) for part in text.split(","))  # noqa: E731
    parser.add_argument("--rows", type=numbers, default=ROWS)
    parser.add_argument("--columns", type=numbers, default=COLUMNS)
    parser.add_argument("--ops", type=lambda text: tuple(text.split(",")), default=tuple(OPS))
    parser.add_argument("--device", default="cuda", help="cpu, with TRITON_INTERPRET=1: only to try this program")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--processes", type=int, default=14, help="that compile ahead; 0: none")
    parser.add_argument("--limit", type=float, default=140, help="seconds, after which no further point is measured")
    parser.add_argument("--verbose", action="store_true", help="a line per point")
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    parser.add_argument("--from", type=Path, dest="read", help="measure nothing; report on this file")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    start = time.perf_counter()
    if options.read:
        found = json.loads(options.read.read_text())
    else:
        use_own_cache()
        make_importable()
        import torch

        if options.part:
            compile_part(options)
            return 0
        device = torch.cuda.get_device_name(options.device) if options.device != "cpu" else "cpu"
        found = {"torch": torch.__version__, "device": device, "cells": [], "failed": [], "not_measured": 0}
        found["tiles"] = {
            f"{name} {columns}": {
                words: tile and asdict(tile) for words, tile in tiles_for(OPS[name][2], columns).items()
            }
            for name, columns in itertools.product(options.ops, options.columns)
        }
        if options.processes:
            print(compile_ahead(options.processes, options.limit * 0.4), flush=True)
        measure(options, found, start + options.limit)
        found["seconds"] = time.perf_counter() - start
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    print(report(found))
    return 0 if found["cells"] else 1


if __name__ == "__main__":
    sys.exit(main())
