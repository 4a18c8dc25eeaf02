"""What `providers_gpu.py` found, as tables beside the goals, and as a plot. Measures nothing and needs no torch."""

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

GOAL_ROWS = (2048, 8192, 32768)
GOALS = {
    "rms_norm": 1.22,
    "fused_add_rms_norm": 1.10,
    "silu_and_mul": 1.15,
    "rms_norm_static_quant_fp8": 1.45,
    "silu_and_mul_static_quant_fp8": 1.35,
    "rms_norm_dynamic_quant_fp8": 1.45,
    "silu_and_mul_dynamic_quant_fp8": 1.35,
}
LARGEST, LARGEST_GOAL = (32768, 8192), 1.05
SMALL_ROWS, SMALL_GOAL = (1, 16, 64), 1.25
SLOWER_GOAL = 1.03
HOST_GOAL = 1.1
OURS = ("vllm_c", "triton")

Found = dict[str, Any]
Cell = dict[str, Any]


def report(found: Found) -> str:
    """Everything as text."""
    return "\n".join(_lines(found))


def _lines(found: Found) -> Iterator[str]:
    empty = {how: timing["median"] for how, timing in found["empty"].items()}
    yield (
        f"{found['device']}, torch {found['torch']}, bfloat16; a copy moves {found['copy'] / 1e6:.2f} TB/s; "
        f"cache {found['cache_bytes'] >> 20} MiB; an empty kernel takes {empty['cold']:.2f} us"
    )
    yield from _means(found)
    yield from _largest(found)
    yield from _small(found, empty)
    yield from _slower(found)
    yield from _host(found)
    yield from (f"FAILED   {text}" for text in found["failed"])
    if found["not_measured"]:
        yield f"not measured, the time was up: {', '.join(found['not_measured'])}"
    yield f"{len(found['cells'])} points, {found.get('seconds', 0):.0f} s"


def median(cell: Cell, name: str, how: str = "times") -> float | None:
    timing = cell[how].get(name)
    return None if timing is None else timing["median"]


def best(cell: Cell, names: Iterator[str] | tuple[str, ...], how: str = "times") -> float | None:
    taken = [time for name in names if (time := median(cell, name, how)) is not None]
    return min(taken) if taken else None


def others(cell: Cell) -> tuple[str, ...]:
    return tuple(name for name in cell["times"] if name not in OURS)


def names_in(found: Found) -> list[str]:
    return list(dict.fromkeys(name for cell in found["cells"] for name in cell["times"]))


def ops_in(found: Found) -> list[str]:
    return list(dict.fromkeys(cell["op"] for cell in found["cells"]))


def _verdict(value: float, goal: float | None) -> str:
    return "" if goal is None else f"goal {goal:.2f} {'met' if value <= goal else 'MISSED'}"


def _row(op: str, values: dict[str, float | None], names: list[str]) -> str:
    return f"{op:36}" + "".join(
        f"{value:>12.3f}" if (value := values.get(n)) is not None else f"{'-':>12}" for n in names
    )


def _means(found: Found) -> Iterator[str]:
    names = names_in(found)
    yield f"\ntime over floor, geometric mean over rows {', '.join(map(str, GOAL_ROWS))}"
    yield f"{'':36}" + "".join(f"{name:>12}" for name in (*names, "ours, best"))
    for op in ops_in(found):
        cells = [cell for cell in found["cells"] if cell["op"] == op and cell["rows"] in GOAL_ROWS]
        means: dict[str, float | None] = {}
        for name in names:
            shares = [time / cell["floor"] for cell in cells if (time := median(cell, name)) is not None]
            means[name] = statistics.geometric_mean(shares) if shares and len(shares) == len(cells) else None
        ours = [time / cell["floor"] for cell in cells if (time := best(cell, OURS)) is not None]
        if ours:
            means["ours, best"] = statistics.geometric_mean(ours)
            yield f"{_row(op, means, [*names, 'ours, best'])}  {_verdict(means['ours, best'] or 0, GOALS.get(op))}"


def _largest(found: Found) -> Iterator[str]:
    names = names_in(found)
    yield f"\ntime over floor at {LARGEST[0]} x {LARGEST[1]}"
    for cell in found["cells"]:
        if (cell["rows"], cell["columns"]) == LARGEST:
            shares = {n: time / cell["floor"] for n in names if (time := median(cell, n)) is not None}
            ours = best(cell, OURS)
            verdict = "" if ours is None else _verdict(ours / cell["floor"], LARGEST_GOAL)
            yield f"{_row(cell['op'], shares, names)}{'':12}  {verdict}"


def _small(found: Found, empty: dict[str, float]) -> Iterator[str]:
    names = names_in(found)
    rows = ", ".join(map(str, SMALL_ROWS))
    for how, key in (("warm", "warm"), ("cold", "times")):
        yield f"\ntime over an empty kernel's ({empty[how]:.2f} us), cache {how}, largest of rows {rows}"
        for op in ops_in(found):
            cells = [cell for cell in found["cells"] if cell["op"] == op and cell["rows"] in SMALL_ROWS]
            worst = {
                name: max(
                    (time / empty[how] for cell in cells if (time := median(cell, name, key)) is not None), default=None
                )
                for name in names
            }
            ours = [time / empty[how] for cell in cells if (time := best(cell, OURS, key)) is not None]
            if ours:
                worst["ours, best"] = max(ours)
                yield f"{_row(op, worst, [*names, 'ours, best'])}  {_verdict(max(ours), SMALL_GOAL)}"


def _slower(found: Found) -> Iterator[str]:
    yield f"\npoints where the better of {' and '.join(OURS)} takes over {SLOWER_GOAL:.2f} of the best other's time"
    compared = slower = 0
    for cell in found["cells"]:
        ours, theirs = best(cell, OURS), best(cell, others(cell))
        if ours is None or theirs is None:
            continue
        compared += 1
        if ours > SLOWER_GOAL * theirs:
            slower += 1
            who = next(name for name in others(cell) if median(cell, name) == theirs)
            place = f"{cell['op']} {cell['rows']} x {cell['columns']}"
            yield f"{place:52} {ours:9.2f} us, {who} {theirs:9.2f} us: {ours / theirs:.3f}"
    yield f"{slower} of {compared} points"


def _host(found: Found) -> Iterator[str]:
    yield "\nhost time of a call, us: through irframework, the provider's function itself, ratio [10%-90%]"
    for entry in found["host"]:
        through, direct, ratio = entry["through"], entry["direct"], entry["ratio"]
        yield (
            f"{entry['op']:36}{entry['provider']:>10}{entry.get('mode', 'no_grad'):>15}"
            f"{through['median']:9.2f}{direct['median']:9.2f}   "
            f"{ratio['median']:.3f} [{ratio['low']:.3f}-{ratio['high']:.3f}]  {_verdict(ratio['median'], HOST_GOAL)}"
        )


PLOTTED = (0.9, 8.0)
X_TICKS = (1, 64, 1024, 32768)
Y_TICKS = (1, 1.25, 1.5, 2, 3, 5)


def draw(found: Found, path: Path) -> None:
    """Time over floor against the number of rows: a panel per op and number of columns."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    ops, names = ops_in(found), names_in(found)
    columns = sorted({cell["columns"] for cell in found["cells"]})
    figure = Figure(figsize=(3.2 * len(columns), 2.4 * len(ops)), layout="constrained")
    panels = figure.subplots(len(ops), len(columns), squeeze=False, sharex=True, sharey=True)
    for panel_row, op in zip(panels, ops, strict=True):
        for panel, width in zip(panel_row, columns, strict=True):
            cells = [cell for cell in found["cells"] if (cell["op"], cell["columns"]) == (op, width)]
            cells.sort(key=lambda cell: cell["rows"])
            for color, name in enumerate(names):
                line = [
                    (cell["rows"], cell["times"][name]["median"] / cell["floor"])
                    for cell in cells
                    if name in cell["times"]
                ]
                if line:
                    panel.plot(*zip(*line, strict=True), marker=".", linewidth=1, label=name, color=f"C{color}")
            panel.axhline(1.0, color="black", linewidth=0.8, linestyle="dashed")
            panel.set_xscale("log", base=2)
            panel.set_yscale("log")
            # With few rows it is the launch that takes the time, not the bytes: those points leave the panel.
            panel.set_ylim(*PLOTTED)
            panel.set_yticks(Y_TICKS, [f"{tick:g}" for tick in Y_TICKS])
            panel.minorticks_off()
            panel.set_xticks(X_TICKS, [str(tick) for tick in X_TICKS])
            panel.set_title(f"{op}\n{width} columns", fontsize="x-small")
            panel.tick_params(labelsize="x-small")
    panels[0][0].legend(fontsize="xx-small")
    figure.supxlabel("rows")
    figure.supylabel("time over floor")
    # Letters as text, not as outlines, and no date: a file of half the size, and the same for the same numbers.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
