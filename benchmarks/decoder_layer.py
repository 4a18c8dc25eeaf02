"""A decoder of Llama-3-8B's shape: what everything beside the matrix products and attention costs.

    python benchmarks/decoder_layer.py --json decoder.json                   # on the machine with the GPU, two minutes
    python benchmarks/decoder_layer.py --cases decode1,decode64 --kinds bf16
    python benchmarks/decoder_layer.py --device cpu --tiny                   # anywhere: does it run

Eight layers with random weights: hidden 4096, intermediate 14336, 32 query and 8 key heads of 128. `decode1` and
`decode64` add one token to 1 and 64 sequences of 1024; `prefill2048` and `prefill8192` read one prompt. Kinds: `bf16`;
`fp8` with the scales of activations known before; `fp8_dynamic` with one scale per token, found in the row. In fp8 the
four matrix products go through torch._scaled_mm.

One model, five ways, each in a CUDA graph (by the wall clock on a CPU); they take turns, so that a change of the clocks
hits all of them:

    floor      its matrix products and its attention alone, on the same memory
    eager      plain torch: the ops' definitions
    compile    stock torch.compile of that
    ir         the same model calling IR ops, eager
    ir+compile the same, compiled with backend="irframework"

`fusion.py` adds two, whose fused ops the compiler finds, and one for comparison:

    raised     the plain torch model of `compile`, compiled with backend="irframework"
    parts      a model that calls one IR op for each thing that is done, compiled with backend="irframework"
    moves      in place of each fused op, one kernel of stock Inductor that moves its bytes and computes nothing

Shown are time over floor, ir and ir+compile over compile (the goals: at most 1), with the 10th and 90th percentile over
the rounds, and at last the relative errors of compile, ir and ir+compile to eager on the same input. A layer is
compiled, not the whole model: its eight calls share what was compiled, and between two layers there is nothing to fuse,
since a layer begins by adding the one before to the residual. `--compile model` compiles all eight at once. `--pdl ir`
compiles ir+compile with Inductor's setting `triton.enable_pdl`, `--pdl both` compile, too: kernels are then loaded
while the one in front of them still runs.

The model is in `decoder_model.py`. What does the work is the same in all of them, and none copies what need not be.
"""

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from compile_ahead import compile_ahead, my_share, use_own_cache
from source_tree import make_importable

use_own_cache()
make_importable()

import torch  # noqa: E402
import torch._inductor.config  # noqa: E402
from decoder_model import (  # noqa: E402
    CASES,
    KINDS,
    TINY,
    Case,
    Layer,
    Model,
    Shape,
    in_blocks,
    make_floor,
    make_layer,
    make_model,
)
from decoder_ops import ir_ops, moving_ops, native_ops, part_ops  # noqa: E402
from torch import Tensor  # noqa: E402

import irframework as ir  # noqa: E402
from irframework.cli.benchmarking import Timing  # noqa: E402

VARIANTS = ("floor", "eager", "compile", "ir", "ir+compile")
BY_DEFINITION = ("raised", "parts")
FURTHER = (*BY_DEFINITION, "moves")
WRONG = ("floor", "moves")  # whose results nobody looks at
LARGEST_ERROR = 0.02  # or twice that of stock torch.compile, which in fp8 rounds to other codes, too


# --- the variants ----------------------------------------------------------------------------------------------------


def variants_of(model: Model, options: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    """Functions of (x, residual), which may overwrite both; `floor` takes them and looks at neither."""
    native, with_ir, parts = (
        make_layer(model.shape, model.case, model.kind, ops) for ops in (native_ops(), ir_ops(), part_ops())
    )
    blocks = tuple(in_blocks(weights, model.shape) for weights in model.layers)

    def whole(layer: Callable[..., tuple[Tensor, ...]], layers: tuple[Layer, ...]) -> Callable[..., Any]:
        def run(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
            caches: list[Tensor] = []
            for weights in layers:
                x, residual, *cache = layer(x, residual, weights, model.step)
                caches += cache
            return x, residual, *caches

        return run

    def compiled(layer: Callable[..., Any], layers: tuple[Layer, ...], backend: str) -> Callable[..., Any]:
        build = partial(torch.compile, backend=backend, dynamic=False, fullgraph=True)
        return build(whole(layer, layers)) if options.compile == "model" else whole(build(layer), layers)

    floor = make_floor(model)
    variants = {
        "floor": lambda x, residual: floor(),
        "eager": whole(native, model.layers),
        "compile": compiled(native, model.layers, "inductor"),
        "ir": whole(with_ir, blocks),
        "ir+compile": compiled(with_ir, blocks, "irframework"),
        "raised": compiled(native, model.layers, "irframework"),
        "parts": compiled(parts, blocks, "irframework"),
        "moves": whole(make_layer(model.shape, model.case, model.kind, moving_ops()), model.layers),
    }
    return {name: variants[name] for name in options.variants}


def as_delivered() -> AbstractContextManager[Any]:
    """Inductor without anyone's passes: those of irframework, once installed, stay for what is compiled later."""
    hooks = ("pre_grad_custom_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass")
    settings: dict[str, Any] = dict.fromkeys(hooks)
    if hasattr(torch._inductor.config, "pre_grad_pass_timing"):  # torch 2.13
        settings["pre_grad_pass_timing"] = "default"
    patched: AbstractContextManager[Any] = torch._inductor.config.patch(settings)
    return patched


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


def early_launches(name: str, pdl: str) -> AbstractContextManager[Any]:
    """Inductor's setting for a variant while it is compiled."""
    ours = ("ir+compile", *BY_DEFINITION)
    asked = {"none": (), "ir": ours, "both": ("compile", *ours)}[pdl]
    patched: AbstractContextManager[Any] = torch._inductor.config.patch({"triton.enable_pdl": name in asked})
    return patched


def check(model: Model, runs: dict[str, Callable[..., Any]], pdl: str) -> dict[str, float]:
    """Relative error of each variant to eager, on the same input; compiles what has to be compiled.

    What is compared: the model's outputs, and what it wrote to the last layer's cache. A variant that fails is taken
    out of `runs`.
    """
    errors: dict[str, float] = {}

    def results_of(run: Callable[..., Any]) -> list[Tensor]:
        for weights in model.layers:  # what one variant wrote must not do for the next
            for cache in (weights.keys, weights.values):
                cache[model.step.slots] = float("nan")
        x, residual, *caches = run(model.x.clone(), model.residual.clone())
        written = [cache.view(-1, model.shape.key)[model.step.slots] for cache in caches[-2:]]
        return [result.clone() for result in (x, residual, *written)]

    wanted = results_of(runs["eager"])
    for name in list(runs):
        try:
            with as_delivered() if name in ("compile", "moves") else nullcontext(), early_launches(name, pdl):
                if name in ("eager", *WRONG):
                    runs[name](model.x.clone(), model.residual.clone())
                    continue
                got = results_of(runs[name])
            errors[name] = max(relative_error(mine, right) for mine, right in zip(got, wanted, strict=True))
        except Exception as error:
            first = str(error).splitlines()[0][:300] if str(error) else ""
            print(f"FAILED   {name} {model.case.name} {model.kind}: {type(error).__name__}: {first}", flush=True)
            del runs[name]
    return errors


def replayed(model: Model, run: Callable[..., Any]) -> tuple[Callable[[], float], Any]:
    """A function that runs a variant once and returns its microseconds, and what must stay alive meanwhile."""
    x, residual = model.x.clone(), model.residual.clone()
    if model.x.device.type != "cuda":

        def by_clock() -> float:
            start = time.perf_counter()
            run(x, residual)
            return (time.perf_counter() - start) * 1e6

        return by_clock, None
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        run(x, residual)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream):
        results = run(x, residual)

    def by_event() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    return by_event, (graph, results, x, residual)


def measure(model: Model, runs: dict[str, Callable[..., Any]], options: argparse.Namespace) -> dict[str, list[float]]:
    """Microseconds per variant and round; the variants take turns."""
    ready = {}
    for name, run in runs.items():
        try:
            ready[name] = replayed(model, run)
        except Exception as error:
            first = str(error).splitlines()[0][:300] if str(error) else ""
            print(f"FAILED   {name} {model.case.name} {model.kind}: {type(error).__name__}: {first}", flush=True)
    once = sum(timed() for timed, _ in ready.values())
    rounds = max(5, min(options.rounds, int(options.seconds * 1e6 / once)))
    times: dict[str, list[float]] = {name: [] for name in ready}
    order, names = random.Random(0), list(ready)
    for index in range(rounds + 1):
        order.shuffle(names)  # who comes after a slow one finds the device cool, and its clocks high
        for name in names:
            took = ready[name][0]()
            if index:  # the first round warms up
                times[name].append(took)
    return times


def judged(variants: tuple[str, ...]) -> tuple[str, ...]:
    """Those that are compared with stock torch.compile."""
    return tuple(name for name in variants if name not in ("eager", "compile", *WRONG))


# --- results ---------------------------------------------------------------------------------------------------------


def summary(model: Model, times: dict[str, list[float]], errors: dict[str, float]) -> dict[str, Any]:
    def ratio(name: str, to: str) -> dict[str, float] | None:
        if name not in times or to not in times:
            return None
        return Timing.of([mine / other for mine, other in zip(times[name], times[to], strict=True)]).to_dict()

    return {
        "case": model.case.name,
        "kind": model.kind,
        "microseconds": {name: Timing.of(values).to_dict() for name, values in times.items()},
        "over_floor": {name: ratio(name, "floor") for name in times if name != "floor"},
        "over_compile": {name: ratio(name, "compile") for name in judged(tuple(times))},
        "relative_error": errors,
        "rounds": len(next(iter(times.values()))),
    }


def run_one(shape: Shape, case: Case, kind: str, options: argparse.Namespace) -> dict[str, Any]:
    torch._dynamo.reset()
    model = make_model(shape, case, kind, options.device)
    runs = variants_of(model, options)
    errors = check(model, runs, options.pdl)
    return summary(model, measure(model, runs, options), errors)


def providers(device: str) -> str:
    """Who runs the ops of the model, for people."""
    names = ("fused_add_rms_norm", "linear_silu_and_mul", "rotary_embedding_reshape_and_cache", "dynamic_quant_fp8")
    chosen = {}
    for name in names:
        op = getattr(ir.ops, name)
        sample = op.generate_inputs(shape=(4, 4096), dtype=torch.bfloat16, device=device)
        chosen[name] = op.dispatch(*sample).provider
    return ", ".join(f"{name} {provider}" for name, provider in chosen.items())


def line_of(found: dict[str, Any], variants: tuple[str, ...]) -> str:
    def over(name: str) -> str:
        value = found["over_floor"].get(name)
        return f"{value['median']:11.3f}" if value else f"{'-':>11}"

    def beside(name: str) -> str:
        value = found["over_compile"].get(name)
        return f"{value['median']:.3f} [{value['low']:.3f}-{value['high']:.3f}]" if value else "-"

    floor = found["microseconds"].get("floor", {}).get("median", float("nan"))
    right = ("compile", *judged(variants))
    errors = " ".join(f"{found['relative_error'].get(name, float('nan')):.4f}" for name in right)
    wrong = "" if is_right(found) else "  TOO FAR OFF"
    cells = "".join(over(name) for name in variants[1:])
    ratios = "".join(f"{beside(name):>22}" for name in judged(variants))
    return f"{found['case']:12}{found['kind']:12}{floor:11.1f}{cells}  {ratios}  {errors}{wrong}"


def is_right(found: dict[str, Any]) -> bool:
    errors = found["relative_error"]
    allowed = max(LARGEST_ERROR, 2 * errors.get("compile", 0.0))
    return all(error <= allowed for name, error in errors.items() if name != "compile")


def report_goals(results: list[dict[str, Any]], variants: tuple[str, ...]) -> None:
    print("\nnot slower than stock torch.compile (median over rounds at most 1)")
    for name in judged(variants):
        ratios = [f["over_compile"][name]["median"] for f in results if f["over_compile"].get(name)]
        if ratios:
            met = sum(ratio <= 1.0 for ratio in ratios)
            mean = statistics.geometric_mean(ratios)
            print(f"{name:12} {met} of {len(ratios)} met, geometric mean {mean:.3f}, largest {max(ratios):.3f}")


def main(variants: tuple[str, ...] = VARIANTS) -> int:
    """Measure, print and keep; `floor`, `eager` and `compile` are among the variants."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", type=lambda text: text.split(","), default=names, help=", ".join(names))
    parser.add_argument("--kinds", type=lambda text: text.split(","), default=list(KINDS), help=", ".join(KINDS))
    parser.add_argument("--compile", choices=("layer", "model"), default="layer", help="what one compiled graph holds")
    parser.add_argument("--pdl", choices=("none", "ir", "both"), default="none", help="who is compiled to launch early")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="two small layers, short prompts: only to try this program")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=1.5, help="of measuring per line, at least five rounds")
    parser.add_argument("--limit", type=float, default=150, help="seconds, after which no further case is begun")
    parser.add_argument("--processes", type=int, help="that compile ahead; default: one per case and kind on a GPU")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--part", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.variants = variants
    start = time.perf_counter()
    shape = TINY if options.tiny else Shape()
    cases = [
        c if not options.tiny else replace(c, tokens=max(1, c.tokens // 64)) for c in CASES if c.name in options.cases
    ]
    work = [(case, kind) for kind in options.kinds for case in cases]
    results: list[dict[str, Any]] = []
    with torch.inference_mode():
        if options.part:
            for index in my_share(options.part, len(work)):
                model = make_model(shape, *work[index], options.device)
                check(model, variants_of(model, options), options.pdl)
            return 0
        processes = options.processes if options.processes is not None else len(work) * (options.device != "cpu")
        name = torch.cuda.get_device_name() if options.device == "cuda" else options.device
        print(f"{name}, torch {torch.__version__}, {shape}, a {options.compile} compiled at once, pdl {options.pdl}")
        print(f"providers: {providers(options.device)}", flush=True)
        if processes:
            print(compile_ahead(min(processes, os.cpu_count() or 1), options.limit * 0.5), flush=True)
        columns = "".join(f"{variant:>11}" for variant in variants[1:])
        beside = "".join(f"{variant + ' / compile':>22}" for variant in judged(variants))
        print(f"{'case':12}{'kind':12}{'floor, us':>11}{columns}  {beside}")
        for case, kind in work:
            if time.perf_counter() - start > options.limit:
                print(f"{case.name:12}{kind:12}not measured, the time was up")
                continue
            try:
                results.append(run_one(shape, case, kind, options))
                print(line_of(results[-1], variants), flush=True)
            except Exception as error:  # one that fails must not take the others with it
                print(f"FAILED   {case.name} {kind}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    report_goals(results, variants)
    print(f"{time.perf_counter() - start:.0f} s")
    if options.json:
        options.json.write_text(json.dumps({"torch": torch.__version__, "device": name, "results": results}, indent=1))
    complete = all(set(found["microseconds"]) == set(variants) for found in results)
    return 0 if complete and all(map(is_right, results)) and len(results) == len(work) else 1


if __name__ == "__main__":
    sys.exit(main())
