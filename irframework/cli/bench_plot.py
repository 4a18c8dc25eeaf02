"""The plot of `irframework bench`: bandwidth as a share of a copy's, per shape and contestant.

Owns how it looks. matplotlib is optional (the `plot` extra); the command asks for it before it measures.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

if TYPE_CHECKING:
    from pathlib import Path

    from irframework.cli.contestants import Benchmark


def draw(found: Benchmark, path: Path) -> None:
    """Draws one panel per dtype and writes the file; its suffix says the format.

    Bars show the median, their whiskers the 10th and 90th percentile.
    """
    dtypes = list(dict.fromkeys(line.dtype for line in found.lines))
    contestants = list(dict.fromkeys(line.contestant for line in found.lines))
    shapes = list(dict.fromkeys(line.shape for line in found.lines))
    # A Figure of its own, not pyplot: no window system is asked for, and no state is left behind.
    figure = Figure(figsize=(max(6.0, 1.2 * len(shapes) + 2), 3.2 * len(dtypes)), layout="constrained")
    panels = figure.subplots(len(dtypes), 1, squeeze=False)
    width = 0.8 / len(contestants)
    for panel, dtype in zip(panels[:, 0], dtypes, strict=True):
        for position, contestant in enumerate(contestants):
            lines = [line for line in found.lines if (line.dtype, line.contestant) == (dtype, contestant)]
            at = [shapes.index(line.shape) - 0.4 + (position + 0.5) * width for line in lines]
            heights = [line.share for line in lines]
            below = [line.share * (1 - line.time.median / line.time.high) for line in lines]
            above = [line.share * (line.time.median / line.time.low - 1) for line in lines]
            panel.bar(at, heights, width, yerr=(below, above), error_kw={"elinewidth": 0.8}, label=contestant)
        panel.axhline(1.0, color="black", linewidth=0.8, linestyle="dashed")
        panel.set_xticks(range(len(shapes)), ["x".join(map(str, shape)) for shape in shapes], rotation=30, ha="right")
        panel.set_ylabel("share of a copy's bandwidth")
        panel.set_title(f"{found.op}, {dtype}, {found.device[1]}")
        panel.legend(fontsize="small")
    figure.savefig(path, dpi=150)
