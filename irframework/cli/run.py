"""`irframework run`: a real model answers a prompt with IR ops in it, and the tables say which kernel ran each op.

Owns the command's options, the order of its steps and what is printed. Measuring the four variants side by side is
`compare.py`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from irframework.cli.dtype_names import DTYPE_NAMES, dtype_called

if TYPE_CHECKING:
    from irframework.cli.decisions import DecisionRow
    from irframework.cli.fusions import Fusions
    from irframework.cli.generation import Generation, Generator
    from irframework.integrations.model_source import LoadedModel
    from irframework.integrations.patch_report import PatchReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options, one `--ir-op-priority.<op>` per op included."""
    from irframework.config import add_cli_args

    parser.add_argument(
        "--model",
        default="smollm2",
        help="smollm2 (packaged), a directory, a .gguf file, or random:NAME (random weights, e.g. random:qwen3-tiny)",
    )
    parser.add_argument("--prompt", type=_text, default="What is the capital of France?")
    parser.add_argument("--max-new-tokens", type=_positive, default=32, metavar="N")
    parser.add_argument("--dtype", choices=[name for name in DTYPE_NAMES if not name.endswith("64")], default="float32")
    parser.add_argument("--device", default="cpu", help="a torch device (default: cpu)")
    parser.add_argument("--mode", choices=("eager", "compile"), default="eager")
    parser.add_argument(
        "--compare",
        action="store_true",
        help="also measure plain transformers, eager and compiled, on the same tokens in this process",
    )
    parser.add_argument("--repeats", type=_positive, default=5, metavar="N", help="measured runs with --compare")
    parser.add_argument("--seed", type=_seed, default=0, help="of the weights of random:NAME")
    add_cli_args(parser)


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"must be from 0 to 2**63 - 1, not {value}")
    return value


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is no text in the encoding of this terminal") from None
    return text


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 0, or an `IrError` that the entry turns into 1."""
    from irframework.cli.tables import progress
    from irframework.config import KernelConfig, configure
    from irframework.integrations.model_source import load_model
    from irframework.integrations.transformers import apply

    configure(KernelConfig.from_cli_args(arguments))
    with progress(f"loading {arguments.model}"):
        loaded = load_model(
            arguments.model, dtype=dtype_called(arguments.dtype), device=arguments.device, seed=arguments.seed
        )
    if arguments.compare:
        from irframework.cli.compare import run_comparison

        return run_comparison(loaded, arguments)
    with progress("putting IR ops into the model"):
        patches = apply(loaded.model)
    warn_if_untouched(patches)
    prompt = loaded.encode(arguments.prompt)
    generator = make_generator(loaded.model, arguments.mode, prompt.shape[1] + arguments.max_new_tokens, "irframework")
    with progress("compiling" if arguments.mode == "compile" else "warming up"):
        generator.generate(prompt, min(2, arguments.max_new_tokens), stop=())
    rows = decision_rows(loaded.model, prompt, arguments.mode)
    on_token = None if arguments.json else answer_printer(loaded)
    generation = generator.generate(prompt, arguments.max_new_tokens, stop=loaded.stop, on_token=on_token)
    if arguments.json:
        print(json.dumps(_document(arguments, loaded, patches, generation, rows), indent=2))
    else:
        print()
        _print_tables(arguments, loaded, patches, generation, rows)
    return 0


def warn_if_untouched(patches: PatchReport) -> None:
    """Says on stderr that a run shows nothing of irframework, where no module could be replaced."""
    if not patches.replaced:
        why = f", e.g. {patches.skipped[0].name}: {patches.skipped[0].reason}" if patches.skipped else ""
        print(f"warning: no module of this {patches.model} could be replaced by an IR op{why}", file=sys.stderr)


def make_generator(model: Any, mode: str, length: int, backend: str) -> Generator:
    """A generator over the model, eager or compiled.

    Args:
        model: the Hugging Face module.
        mode: `eager` or `compile`.
        length: tokens of prompt and answer; a compiled model's static cache is as long.
        backend: of torch.compile.
    """
    import torch

    from irframework.cli.generation import Generator

    if mode == "eager":
        return Generator(model, model)
    # Two graphs, prefill and decode, each for its own shapes; positions and the cache are tensors, so that no token
    # compiles anew.
    return Generator(model, torch.compile(model, backend=backend, dynamic=False), static_length=length)


def decision_rows(model: Any, prompt: Any, mode: str) -> list[DecisionRow]:
    """Who runs each op of one forward pass over the prompt (eager), or of the last compiled graph (compile)."""
    import torch

    from irframework.cli import decisions

    if mode == "compile":
        from irframework.compiler.report import last_report

        return decisions.rows_of_report(last_report(), prompt.device.type)
    with torch.inference_mode(), decisions.CallRecorder() as recorder:
        model(input_ids=prompt[:, -1:], use_cache=False)
    return decisions.counted(recorder.decisions)


def from_cache() -> bool:
    """Whether the last compiled graph came from a cache: what its report says was decided when its passes ran."""
    from irframework.compiler.report import last_report

    report = last_report()
    return report is not None and report.from_cache


def fusions_of_run(mode: str) -> Fusions | None:
    """What was fused in the last compiled graph; None in eager mode."""
    from irframework.cli.fusions import Fusions
    from irframework.compiler.report import last_report

    return Fusions.of([last_report()]) if mode == "compile" else None


def answer_printer(loaded: LoadedModel) -> Callable[[int], None]:
    """A callback that prints each token's text as it comes."""
    tokens: list[int] = []
    shown = 0

    def on_token(token: int) -> None:
        nonlocal shown
        tokens.append(token)
        text = loaded.decode(tokens)
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return  # half a character; the next token completes it
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = len(text)

    return on_token


def _print_tables(
    arguments: argparse.Namespace,
    loaded: LoadedModel,
    patches: PatchReport,
    generation: Generation,
    rows: list[DecisionRow],
) -> None:
    from irframework.cli.fusions import print_fusions
    from irframework.cli.tables import print_table

    print(f"\n{patches}")
    print_decisions(rows, arguments.mode)
    print_fusions(arguments.mode, fusions_of_run(arguments.mode))
    speeds = [
        ("prefill", generation.prompt_tokens, f"{generation.prefill_seconds:.3f}", f"{generation.prefill_rate:.1f}"),
        (
            "decode",
            len(generation.tokens) - 1,
            f"{generation.decode_seconds:.3f}",
            "-" if generation.decode_rate is None else f"{generation.decode_rate:.1f}",
        ),
    ]
    title = f"Speed: {arguments.mode}, {str(loaded.dtype).removeprefix('torch.')}, {loaded.device}"
    print_table(title, ("phase", "tokens", "seconds", "tokens/s"), speeds)


def print_decisions(rows: list[DecisionRow], mode: str) -> None:
    """The table op, nodes or calls, provider, why not the others."""
    from irframework.cli.decisions import cells_and_notes
    from irframework.cli.tables import print_table

    what = "nodes" if mode == "compile" else "calls"
    cached = ", decided when it was compiled: it comes from the cache" if mode == "compile" and from_cache() else ""
    title = "Who ran each op " + (f"(the decode graph{cached})" if mode == "compile" else "(one token)")
    if rows:
        cells, notes = cells_and_notes(rows)
        print_table(title, ("op", what, "provider", "why not the others"), cells)
        print("\n".join(notes))
    else:
        why = "no report was kept with it" if cached else "no op was met"
        print(f"\n{title}: nothing to show, since {why}")


def _document(
    arguments: argparse.Namespace,
    loaded: LoadedModel,
    patches: PatchReport,
    generation: Generation,
    rows: list[DecisionRow],
) -> dict[str, Any]:
    from irframework.cli.fusions import document

    return {
        "model": loaded.name,
        "mode": arguments.mode,
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "device": str(loaded.device),
        "prompt": arguments.prompt,
        "answer": loaded.decode(generation.tokens),
        "tokens": list(generation.tokens),
        "prompt_tokens": generation.prompt_tokens,
        "prefill_tokens_per_second": generation.prefill_rate,
        "decode_tokens_per_second": generation.decode_rate,
        "decisions": [row.to_dict() for row in rows],
        "from_cache": arguments.mode == "compile" and from_cache(),
        "fusion": document(arguments.mode, fusions_of_run(arguments.mode)),
        "patches": patches.to_dict(),
    }
