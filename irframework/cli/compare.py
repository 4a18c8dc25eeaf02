"""`irframework run --compare`: four variants of one model, the same tokens, one process.

Owns the variants, the interleaved measuring and its spread. Plain transformers in eager mode says which tokens are
fed; every variant sees exactly those, so that times and logits are of the same work.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from irframework.cli.generation import Generation, Generator
from irframework.cli.run import decision_rows, make_generator, print_decisions, warn_if_untouched
from irframework.cli.tables import print_table, progress
from irframework.integrations.model_source import LoadedModel
from irframework.integrations.transformers import apply


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, smallest and largest of repeated measurements."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.1f} [{self.low:.1f}-{self.high:.1f}]"


@dataclass(frozen=True, slots=True)
class Measured:
    """One variant's line of the comparison; rates are tokens per second."""

    variant: str
    prefill: Spread
    decode: Spread | None
    first_call_seconds: float
    largest_logit_difference: float
    same_tokens: bool

    def to_dict(self) -> dict[str, Any]:
        """The line as plain JSON types."""
        return {
            "variant": self.variant,
            "prefill_tokens_per_second": _spread(self.prefill),
            "decode_tokens_per_second": None if self.decode is None else _spread(self.decode),
            "first_call_seconds": self.first_call_seconds,
            "largest_logit_difference": self.largest_logit_difference,
            "same_tokens": self.same_tokens,
        }


def _spread(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "low": spread.low, "high": spread.high}


def run_comparison(loaded: LoadedModel, arguments: argparse.Namespace) -> int:
    """Measures the four variants and prints the table, or one JSON document."""
    prompt = loaded.encode(arguments.prompt)
    length = prompt.shape[1] + arguments.max_new_tokens
    with progress("putting IR ops into a copy of the model"):
        # A copy: both are needed at once, since repeats are interleaved.
        patched = copy.deepcopy(loaded.model)
        patches = apply(patched)
    warn_if_untouched(patches)
    variants = {
        "transformers eager": make_generator(loaded.model, "eager", length, ""),
        "irframework eager": make_generator(patched, "eager", length, ""),
        "torch.compile": make_generator(loaded.model, "compile", length, "inductor"),
        "irframework compiled": make_generator(patched, "compile", length, "irframework"),
    }
    with progress("generating the tokens that all variants are fed"):
        # Past the answer's end too: a short answer is too few steps to measure.
        reference = next(iter(variants.values())).generate(prompt, arguments.max_new_tokens, keep_logits=True)
    checks, first_calls = _first_calls(variants, prompt, reference)
    rows = {"eager": decision_rows(patched, prompt, "eager"), "compile": decision_rows(patched, prompt, "compile")}
    rates = _measure(variants, prompt, reference, arguments.repeats)
    lines = [
        Measured(
            name,
            Spread.of([prefill for prefill, _ in rates[name]]),
            Spread.of(decodes) if (decodes := [rate for _, rate in rates[name] if rate is not None]) else None,
            first_calls[name],
            _difference(checks[name], reference),
            checks[name].tokens == reference.tokens,
        )
        for name in variants
    ]
    answer = loaded.decode(list(itertools.takewhile(lambda token: token not in loaded.stop, reference.tokens)))
    if arguments.json:
        document = {
            "model": loaded.name,
            "dtype": str(loaded.dtype).removeprefix("torch."),
            "device": str(loaded.device),
            "threads": torch.get_num_threads(),
            "prompt": arguments.prompt,
            "prompt_tokens": reference.prompt_tokens,
            "answer": answer,
            "tokens": list(reference.tokens),
            "repeats": arguments.repeats,
            "variants": [line.to_dict() for line in lines],
            "decisions": {mode: [row.to_dict() for row in found] for mode, found in rows.items()},
            "patches": patches.to_dict(),
        }
        print(json.dumps(document, indent=2))
        return 0
    print(f"{answer}\n\n{patches}")
    for mode, found in rows.items():
        print_decisions(found, mode)
    _print_comparison(loaded, lines, reference, arguments.repeats)
    return 0


def _first_calls(
    variants: dict[str, Generator], prompt: torch.Tensor, reference: Generation
) -> tuple[dict[str, Generation], dict[str, float]]:
    """Compiles what has to be compiled, and gets every variant's logits."""
    checks: dict[str, Generation] = {}
    seconds: dict[str, float] = {}
    for name, generator in variants.items():
        with progress(f"first call of {name}"):
            start = time.perf_counter()
            checks[name] = generator.generate(prompt, len(reference.tokens), forced=reference.tokens, keep_logits=True)
            seconds[name] = time.perf_counter() - start
    return checks, seconds


def _measure(
    variants: dict[str, Generator], prompt: torch.Tensor, reference: Generation, repeats: int
) -> dict[str, list[tuple[float, float | None]]]:
    """(prefill, decode) rates per variant; the variants take turns, so that a busy moment hits all of them."""
    rates: dict[str, list[tuple[float, float | None]]] = {name: [] for name in variants}
    with progress(f"measuring, {repeats} rounds"):
        for _ in range(repeats):
            for name, generator in variants.items():
                run = generator.generate(prompt, len(reference.tokens), forced=reference.tokens)
                rates[name].append((run.prefill_rate, run.decode_rate))
    return rates


def _difference(check: Generation, reference: Generation) -> float:
    if check.logits is None or reference.logits is None:
        return 0.0
    return float((check.logits - reference.logits).abs().max())


def _print_comparison(loaded: LoadedModel, lines: list[Measured], reference: Generation, repeats: int) -> None:
    dtype = str(loaded.dtype).removeprefix("torch.")
    title = (
        f"Tokens per second, median [low-high] of {repeats}: {loaded.name}, {dtype}, {loaded.device}, "
        f"{torch.get_num_threads()} threads, {reference.prompt_tokens} prompt tokens, {len(reference.tokens)} generated"
    )
    cells = [
        (
            line.variant,
            str(line.prefill),
            "-" if line.decode is None else str(line.decode),
            f"{line.first_call_seconds:.1f}",
            f"{line.largest_logit_difference:.3g}",
            "yes" if line.same_tokens else "no",
        )
        for line in lines
    ]
    columns = ("variant", "prefill", "decode", "first call, s", "largest logit difference", "same tokens")
    print_table(title, columns, cells)
