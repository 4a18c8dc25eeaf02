"""Latent attention of one query for each sequence on a GPU: the Triton kernel by tile, beside native and a copy.

Run it in the root of the repository, on the machine with the GPU (three minutes):

    python benchmarks/latent_attention_gpu.py --json latent.json
    TRITON_INTERPRET=1 python benchmarks/latent_attention_gpu.py --device cpu --tiny    # anywhere: does it run

Sizes are those of DeepSeek-V3 in the latent space: rows of 512 + 64 elements in bfloat16, with 128 heads, or 16 as on
one of eight GPUs. `copy` is what copying as many bytes as the rows have would take. `native` is the op's own function;
`usual` the kernel with the tile that it has; `64x32 w8 s2` and so on, tiles of heads and keys, with warps and stages,
and the shares that follow; `codes` the kernel with a scale for its result; `usual, codes` the result quantised by a
kernel of its own. Times are taken inside CUDA graphs, the cache cold, in one run (`irframework/cli/benchmarking.py`).
It ends after --limit seconds.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from source_tree import make_importable

POINTS = ((1, 1024), (1, 8192), (16, 4096), (64, 1024), (64, 4096), (256, 1024))  # sequences, keys of each
HEADS = (128, 16)
RANK, ROPE, BLOCK = 512, 64, 64
# Heads, keys, warps and stages: the best of 60 on an H200, and what comes near.
TILES = ((16, 32, 4, 2), (16, 64, 8, 2), (32, 32, 4, 2), (32, 64, 8, 2), (64, 32, 8, 3), (64, 64, 8, 1), (64, 64, 8, 2))


def arguments_of(sequences: int, context: int, heads: int, device: str, dtype: Any) -> tuple[Any, ...]:
    """Arguments of the kernel; the blocks of each sequence lie in no order."""
    import torch

    width = -(-context // BLOCK)
    table = torch.randperm(sequences * width).view(sequences, width).to(device, torch.int32)
    options = {"device": device, "dtype": dtype}
    query = torch.randn(sequences, heads, RANK, **options)
    rope = torch.randn(sequences, heads, ROPE, **options)
    cache = torch.randn(sequences * width, BLOCK, RANK + ROPE, **options)
    offsets = torch.arange(sequences + 1, dtype=torch.int32, device=device)
    lengths = torch.full((sequences,), context, dtype=torch.int32, device=device)
    return query, rope, cache, offsets, lengths, table, torch.full((1,), 0.01, device=device)


def contestants(context: int, tiny: bool, heads: int = max(HEADS)) -> dict[str, Callable[..., Any]]:
    """What is timed, each a function of `arguments_of`."""
    from irframework_triton_kernels import launch
    from irframework_triton_kernels.tiles import Tile

    import irframework as ir

    scale = (RANK + ROPE) ** -0.5

    def native(q: Any, r: Any, cache: Any, offsets: Any, lengths: Any, table: Any, code: Any) -> Any:
        return ir.ops.mla_attention.native(
            q, r, None, offsets, 1, scale, seq_lens=lengths, max_seqlen_k=context, latent_cache=cache, block_table=table
        )

    def kernel(tile: Any = None, codes: bool = False, behind: bool = False) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            *tensors, code = given
            y = launch.decode_latent_attention(*tensors, context, scale, code if codes else None, tile=tile)
            return launch.static_quant_fp8(y, code) if behind else y

        return call

    calls = {"native": native, "usual": kernel(), "codes": kernel(codes=True), "usual, codes": kernel(behind=True)}
    for rows, keys, warps, stages in TILES[:1] if tiny else (tile for tile in TILES if tile[0] <= heads):
        calls[f"{rows}x{keys} w{warps} s{stages}"] = kernel(Tile(rows, keys, False, warps, stages=stages))
    return calls


def measure(options: argparse.Namespace, found: dict[str, Any], until: float) -> None:
    """Fill `found` with what was measured before the clock shows `until`."""
    import torch

    from irframework.cli.benchmarking import clock_for, copy_bandwidth, race

    clock = clock_for(options.device)
    found["copy"] = copy_bandwidth(options.device, clock)
    dtype = torch.float32 if options.tiny else torch.bfloat16
    for heads, (sequences, context) in itertools.product((2,) if options.tiny else HEADS, options.points):
        if time.perf_counter() > until:
            found["not_measured"] += 1
            continue
        moved = sequences * context * (RANK + ROPE) * dtype.itemsize
        sets = [arguments_of(sequences, context, heads, options.device, dtype) for _ in range(clock.sets_for(moved))]
        cell: dict[str, Any] = {"heads": heads, "sequences": sequences, "context": context}
        cell["floor"] = 2 * moved / found["copy"]  # a copy reads and writes
        calls = contestants(context, options.tiny, heads)
        raced = race(((name, call, sets) for name, call in calls.items()), clock, options.rounds)
        cell["times"] = {name: raced.timing(name).to_dict() for name in raced.times}
        for name, error in raced.failed.items():
            found["failed"].append(f"{heads} {sequences}x{context} {name}: {type(error).__name__}: {error}"[:200])
        found["cells"].append(cell)
        print(line(cell), flush=True)
        del sets
        clock.synchronize()


def line(cell: dict[str, Any]) -> str:
    """One point: microseconds, over those of the usual tile."""
    times = {name: each["median"] for name, each in cell["times"].items()}
    usual = times.get("usual", float("nan"))
    words = [f"{name} {value / usual:.2f}" for name, value in times.items() if name != "usual"]
    return (
        f"{cell['heads']:>4} heads {cell['sequences']:>4} x {cell['context']:<5} usual {usual:9.1f} us, copy "
        f"{cell['floor'] / usual:.2f}; " + ", ".join(words)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cpu, with TRITON_INTERPRET=1: only to try this program")
    parser.add_argument("--tiny", action="store_true", help="one small point in float32")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--limit", type=float, default=240, help="seconds, after which no further point is measured")
    parser.add_argument("--json", type=Path, help="write everything that was measured")
    options = parser.parse_args()
    options.points = ((2, 20),) if options.tiny else POINTS
    until = time.perf_counter() + options.limit
    make_importable()
    import torch

    device = torch.cuda.get_device_name(options.device) if options.device != "cpu" else "cpu"
    found: dict[str, Any] = {"torch": torch.__version__, "device": device, "cells": [], "failed": [], "not_measured": 0}
    print(f"{device}, torch {torch.__version__}; times over those of the usual tile")
    measure(options, found, until)
    print(*found["failed"], f"{found['not_measured']} points not measured", sep="\n")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))
    return int(bool(found["failed"]))


if __name__ == "__main__":
    raise SystemExit(main())
