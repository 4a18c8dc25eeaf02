"""`irframework run --compare`: four variants of one model, the same tokens, one process.

Owns the variants, the interleaved measuring and its spread. Plain transformers in eager mode says which tokens are
fed; every variant sees exactly those, so that times and logits are of the same work.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import random
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

# Who does the same work without irframework.
_PAIRS = (("irframework eager", "transformers eager"), ("irframework compiled", "torch.compile"))


@dataclass(frozen=True, slots=True)
class Spread:
    """Median of repeated measurements, and the smallest and largest, or the quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    @classmethod
    def between_quartiles(cls, values: Sequence[float]) -> Spread:
        """The median and the quartiles of at least one value."""
        low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * [*values]
        return cls(median, low, high)

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


@dataclass(frozen=True, slots=True)
class Ratio:
    """How fast one variant was over another one in the same round; above 1 it was faster.

    Attributes:
        variant: Whose rates are divided.
        over: By whose.
        prefill: The median of the ratios, and their quartiles.
        decode: The same; None where only one token was generated.
    """

    variant: str
    over: str
    prefill: Spread
    decode: Spread | None

    def to_dict(self) -> dict[str, Any]:
        """The line as plain JSON types."""
        return {
            "variant": self.variant,
            "over": self.over,
            "prefill": _quartiles(self.prefill),
            "decode": None if self.decode is None else _quartiles(self.decode),
        }


def _quartiles(spread: Spread) -> dict[str, float]:
    return {"median": spread.median, "lower_quartile": spread.low, "upper_quartile": spread.high}


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
    ratios = [_ratio(variant, over, rates) for variant, over in _PAIRS]
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
            "ratios": [ratio.to_dict() for ratio in ratios],
            "decisions": {mode: [row.to_dict() for row in found] for mode, found in rows.items()},
            "patches": patches.to_dict(),
        }
        print(json.dumps(document, indent=2))
        return 0
    print(f"{answer}\n\n{patches}")
    for mode, found in rows.items():
        print_decisions(found, mode)
    _print_comparison(loaded, lines, reference, arguments.repeats)
    _print_ratios(ratios)
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
    """(prefill, decode) rates per variant, one of each round.

    The variants take turns, so that a busy moment hits all of them, in an order of chance: who comes behind another one
    finds its data in the caches.
    """
    rates: dict[str, list[tuple[float, float | None]]] = {name: [] for name in variants}
    chance = random.Random(0)
    with progress(f"measuring, {repeats} rounds"):
        for _ in range(repeats):
            for name in chance.sample(list(variants), len(variants)):
                run = variants[name].generate(prompt, len(reference.tokens), forced=reference.tokens)
                rates[name].append((run.prefill_rate, run.decode_rate))
    return rates


def _ratio(variant: str, over: str, rates: dict[str, list[tuple[float, float | None]]]) -> Ratio:
    rounds = list(zip(rates[variant], rates[over], strict=True))
    decodes = [ours / theirs for (_, ours), (_, theirs) in rounds if ours is not None and theirs is not None]
    return Ratio(
        variant,
        over,
        Spread.between_quartiles([ours / theirs for (ours, _), (theirs, _) in rounds]),
        Spread.between_quartiles(decodes) if decodes else None,
    )


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


def _print_ratios(ratios: Sequence[Ratio]) -> None:
    cells = [(ratio.variant, ratio.over, _as_ratio(ratio.prefill), _as_ratio(ratio.decode)) for ratio in ratios]
    title = "How fast over another one in the same round, median [quartiles]"
    print_table(title, ("variant", "over", "prefill", "decode"), cells)


def _as_ratio(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.median:.3f} [{spread.low:.3f}-{spread.high:.3f}]"
