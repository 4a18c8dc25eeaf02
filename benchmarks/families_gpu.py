"""What fusing gains, family by family: its parts one after the other, and stock torch.compile, over the fused kernel.

    python benchmarks/providers_gpu.py --ops families --json families.json       # on the machine with the GPU
    python benchmarks/providers_gpu.py --ops families --from families.json       # anywhere, later
    python benchmarks/providers_gpu.py --ops families --device cpu --tiny        # anywhere: does it run

The provider is `triton` on a GPU, `vllm_c` on a CPU, or that of --provider: for the fused op and for its parts
(`fused_families.py`). All three are timed inside CUDA graphs, every call with arguments of its own, the cache cold;
they take turns, and a gain is the median over the rounds of the ratio of two that ran one after the other, between the
10th and 90th percentile. What the provider does not take is left out on a CPU, and a failure on a GPU.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from compile_ahead import my_share

Call = Callable[..., Any]
Found = dict[str, Any]
OTHERS = ("parts", "inductor")


def points(options: argparse.Namespace) -> list[tuple[Any, int]]:
    """A family and a number of tokens each, those of a family one after the other."""
    from fused_families import FAMILIES

    chosen = [family for family in FAMILIES if not options.families or family.op in options.families]
    grid = [(family, tokens) for family in chosen for tokens in family.tokens]
    if options.tiny:
        grid = [(family, tokens) for family in chosen for tokens in (1, 3)]
    return grid


def sizes_of(options: argparse.Namespace) -> Any:
    from fused_families import TINY, Sizes

    return TINY if options.tiny else Sizes()


def contestants(family: Any, arguments: tuple[Any, ...], options: argparse.Namespace) -> Iterator[tuple[str, Call]]:
    """The kernel, its parts and stock torch.compile, each called with the op's arguments.

    Raises:
        LookupError: The provider does not take the call.
    """
    import torch

    import irframework as ir
    from irframework.dispatch import why_never

    provider = options.provider or ("vllm_c" if options.device == "cpu" else "triton")

    def kernel(name: str) -> Call:
        impl = getattr(ir.ops, name).impls.get(provider)
        why = "is not registered" if impl is None else why_never(impl, options.device)
        if impl is None or why is not None:
            raise LookupError(f"{provider} {name}: {why}")
        fn: Call = impl.functional or impl.fn
        return fn

    impl = getattr(ir.ops, family.op).impls.get(provider)
    takes = True if impl is None else impl.accepts(arguments)
    if takes is not True:
        raise LookupError(f"{provider} {family.op}: {takes}")
    yield "fused", kernel(family.op)
    if family.parts is not None:
        yield "parts", family.parts({name: kernel(name) for name in family.part_ops})
    if not options.no_inductor:
        torch._dynamo.reset()  # each shape is compiled anew: no limit on how many
        yield "inductor", torch.compile(family.stock(), dynamic=False)


def compile_part(options: argparse.Namespace) -> None:
    """Call everything of this process's share once."""
    import torch

    grid = points(options)
    with torch.no_grad():
        for index in my_share(options.part, len(grid)):
            family, tokens = grid[index]
            try:
                arguments = family.make(tokens, sizes_of(options), options.device)
                for _, call in contestants(family, arguments, options):
                    call(*arguments)
            except Exception as error:
                print(f"{family.name} at {tokens}: {type(error).__name__}: {error}")


def measure(options: argparse.Namespace, found: Found, until: float) -> None:
    """Fill `found` with what was measured before the clock shows `until`."""
    from irframework.cli.benchmarking import clock_for

    clock = clock_for(options.device)
    for family, tokens in points(options):
        if time.perf_counter() > until:
            found["not_measured"].append(f"{family.name} {tokens}")
            continue
        try:
            cell = measured(family, tokens, clock, options)
        except Exception as error:
            if not isinstance(error, LookupError) or options.device != "cpu":
                found["failed"].append(f"{family.name} {tokens}: {_words(error)}")
            print(f"left out {family.name} {tokens}: {_words(error)}", flush=True)
            continue
        found["failed"] += cell.pop("failed")
        found["cells"].append(cell)
        if options.verbose:
            print(_line(cell), flush=True)
        clock.synchronize()


def measured(family: Any, tokens: int, clock: Any, options: argparse.Namespace) -> Found:
    """One family at one number of tokens: times, gains, and what failed."""
    from irframework.cli.benchmarking import Timing, race

    one = family.make(tokens, sizes_of(options), options.device)
    more = range(1, clock.sets_for(family.moved(one)))
    sets = [one, *(family.make(tokens, sizes_of(options), options.device) for _ in more)]
    raced = race(((name, call, sets) for name, call in contestants(family, one, options)), clock, options.rounds)
    failed = [f"{name} of {family.name} {tokens}: {_words(error)}" for name, error in raced.failed.items()]
    times = raced.times
    cell: Found = {"family": family.name, "op": family.op, "tokens": tokens, "sets": len(sets), "failed": failed}
    cell["times"] = {name: raced.timing(name).to_dict() for name in times}
    cell["gains"] = {
        name: Timing.of([theirs / ours for theirs, ours in zip(times[name], times["fused"], strict=True)]).to_dict()
        for name in OTHERS
        if name in times and "fused" in times
    }
    return cell


def _words(error: Exception) -> str:
    first = str(error).splitlines()[0][:200] if str(error) else ""
    return f"{type(error).__name__}: {first}"


# --- results --------------------------------------------------------------------------------------------------------


def report(found: Found) -> str:
    """Everything as text."""
    return "\n".join(_lines(found))


def _lines(found: Found) -> Iterator[str]:
    yield f"{found['device']}, torch {found['torch']}; microseconds, and their time over the fused kernel's [10%-90%]"
    yield f"{'':34}{'tokens':>8}{'fused':>10}{'parts':>10}{'inductor':>10}  {'parts / fused':22}{'inductor / fused':22}"
    yield from map(_line, found["cells"])
    yield "\ngeometric means of the gains: over up to 256 tokens (decoding), over more (prompts), over all"
    yield f"{'':34}{'parts':>10}{'':20}{'inductor':>10}"
    for name in dict.fromkeys(cell["family"] for cell in found["cells"]):
        cells = [cell for cell in found["cells"] if cell["family"] == name]
        yield f"{name:34}" + "".join("".join(f"{mean:>10}" for mean in _means(cells, other)) for other in OTHERS)
    yield from (f"FAILED   {text}" for text in found["failed"])
    if found["not_measured"]:
        yield f"not measured, the time was up: {', '.join(found['not_measured'])}"
    yield f"{len(found['cells'])} points, {found.get('seconds', 0):.0f} s"


def _line(cell: Found) -> str:
    times = "".join(
        f"{cell['times'][name]['median']:>10.2f}" if name in cell["times"] else f"{'-':>10}"
        for name in ("fused", *OTHERS)
    )
    gains = [cell["gains"].get(name) for name in OTHERS]
    shown = [f"{g['median']:.3f} [{g['low']:.3f}-{g['high']:.3f}]" if g else "-" for g in gains]
    return f"{cell['family']:34}{cell['tokens']:>8}{times}  {shown[0]:22}{shown[1]}"


def _means(cells: list[Found], other: str) -> list[str]:
    """Of decoding, of prompts and of all; a dash where a point is missing."""
    shown = []
    for chosen in (
        [cell for cell in cells if cell["tokens"] <= 256],
        [cell for cell in cells if cell["tokens"] > 256],
        cells,
    ):
        gains = [cell["gains"][other]["median"] for cell in chosen if other in cell["gains"]]
        whole = gains and len(gains) == len(chosen)
        shown.append(f"{statistics.geometric_mean(gains):.3f}" if whole else "-")
    return shown
