"""The example decoder, compiled, beside the transformers model of the same config and weights under stock compile.

A small dense model (hidden size 576, 8 layers, 9 heads, 3 of keys) with random weights, on the CPU: a prompt, and a
step of one token behind it. transformers, with SDPA, runs the prompt without a cache, and the step with a static cache
of the same size as the example's, as it is meant to be compiled. Both give logits of the last token only. They take
turns; the ratio is the median over the rounds, with 10th and 90th percentile. Goal: at most 1.0. Whether the logits
agree is checked first. Absolute times depend on the machine.

    python benchmarks/example_decoder.py --dtypes float32 bfloat16 --seconds 4 --json out.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import irframework as ir

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "decoder"))
from tiny_decoder import Decoder, Sequences

Run = Callable[[], Tensor]


def config_of(layers: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=8192,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
    )


def theirs(model: Any, ids: Tensor, prompt: int, capacity: int) -> tuple[Run, Run]:
    """Functions that run the prompt, and one token behind it."""
    cache = StaticCache(config=model.config, max_cache_len=capacity)
    model(input_ids=ids[None, :prompt], past_key_values=cache)
    compiled = torch.compile(model, fullgraph=True)
    positions = torch.tensor([[prompt]])

    def first() -> Tensor:
        logits: Tensor = compiled(input_ids=ids[None, :prompt], use_cache=False, logits_to_keep=1).logits[0]
        return logits

    def step() -> Tensor:
        for layer in cache.layers:  # back to where the prompt ended
            layer.cumulative_length.fill_(prompt)
        result = compiled(input_ids=ids[None, prompt:], position_ids=positions, past_key_values=cache)
        logits: Tensor = result.logits[0]
        return logits

    return first, step


def ours(model: Decoder, ids: Tensor, prompt: int, capacity: int) -> tuple[Run, Run]:
    """The same, with the caches of the example."""
    sequences = Sequences(1, capacity)
    compiled = torch.compile(model, backend="irframework", fullgraph=True)
    states = model.new_states(sequences)

    def call(part: Tensor, begin: int) -> Tensor:
        nonlocal states
        sequences.lengths = [begin]
        step = sequences.take([len(part)])
        logits, states = compiled(part, step, states, torch.tensor([len(part) - 1]))
        return logits

    return lambda: call(ids[:prompt], 0), lambda: call(ids[prompt:], prompt)


def in_turns(runs: dict[str, Run], seconds: float) -> dict[str, list[float]]:
    """Times of each, of rounds that alternate."""
    for run in runs.values():
        for _ in range(3):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[next(iter(runs))]) < 10:
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - began)
    return times


def measure(layers: int, dtype: torch.dtype, prompt: int, seconds: float) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    reference = LlamaForCausalLM(config_of(layers)).eval().to(dtype)
    model = Decoder(reference.config).to(dtype)
    model.load(reference.state_dict())
    ids = torch.randint(reference.config.vocab_size, (prompt + 1,))
    capacity = prompt + 64
    them, us = theirs(reference, ids, prompt, capacity), ours(model, ids, prompt, capacity)
    rows = []
    for index, case in enumerate((f"prompt of {prompt}", f"token behind {prompt}")):
        expected, found = them[index]().float(), us[index]().float()
        error = float((found - expected).norm() / expected.norm())
        assert error < (1e-4 if dtype == torch.float32 else 0.03), f"{case}: logits differ by {error:.2g}"
        times = in_turns({"transformers": them[index], "example": us[index]}, seconds)
        ratios = [a / b for a, b in zip(times["example"], times["transformers"], strict=True)]
        tenths = statistics.quantiles(ratios, n=10)
        report = ir.last_report()
        rows.append(
            {
                "case": case,
                "dtype": str(dtype).removeprefix("torch."),
                "transformers_ms": 1e3 * statistics.median(times["transformers"]),
                "example_ms": 1e3 * statistics.median(times["example"]),
                "ratio": statistics.median(ratios),
                "ratio_p10": tenths[0],
                "ratio_p90": tenths[-1],
                "rounds": len(ratios),
                "error": error,
                "providers": sorted({p for found in report.selected_impls.values() for p in found.values()})
                if report
                else [],
            }
        )
    return rows


def main() -> None:
    """Measure and print a table, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=192)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each case")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    print("| case | dtype | transformers, ms | example, ms | example / transformers | relative error |")
    print("|---|---|---|---|---|---|")
    with torch.no_grad():
        for dtype in options.dtypes:
            for row in measure(options.layers, getattr(torch, dtype), options.prompt, options.seconds):
                rows.append(row)
                spread = f"{row['ratio']:.3f} ({row['ratio_p10']:.3f}-{row['ratio_p90']:.3f})"
                times = f"{row['transformers_ms']:.1f} | {row['example_ms']:.1f}"
                print(f"| {row['case']} | {row['dtype']} | {times} | {spread} | {row['error']:.1g} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
