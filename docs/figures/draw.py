"""Draws the figures of docs/donation_and_aliasing.md: `python docs/figures/draw.py` writes the SVG files beside it.

Owns the pictures. They stand on a light panel of their own, so that they read in a light and in a dark page.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

X, R, OWN, COPY, PLAIN = "#bfdbfe", "#bbf7d0", "#fde68a", "#fecaca", "#f3f4f6"
INK, FAINT, WARN = "#1f2937", "#6b7280", "#b91c1c"
LEGEND = {X: "the caller's x", R: "the caller's r", OWN: "the graph's own memory", COPY: "a copy"}


@dataclass
class Figure:
    """One picture; positions are the middles of boxes."""

    title: str
    width: int
    height: int
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, text: str, *, size: int = 13, color: str = INK, mono: bool = False,
             anchor: str = "middle", bold: bool = False) -> None:  # fmt: skip
        """Write a line of text."""
        family = "ui-monospace, Menlo, Consolas, monospace" if mono else "system-ui, sans-serif"
        weight = ' font-weight="600"' if bold else ""
        self.parts.append(
            f'<text x="{x}" y="{y + size * 0.35:g}" font-size="{size}" font-family="{family}" fill="{color}" '
            f'text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def box(self, x: float, y: float, text: str, color: str = PLAIN, *, width: int = 150, border: str = INK) -> None:
        """Draw a node; its colour is the memory of its value."""
        self.parts.append(
            f'<rect x="{x - width / 2:g}" y="{y - 15}" width="{width}" height="30" rx="6" fill="{color}" '
            f'stroke="{border}" stroke-width="1.2"/>'
        )
        self.text(x, y, text, mono=True)

    def outline(self, x: float, y: float, width: int, height: int) -> None:
        """Draw a frame around what one call writes."""
        self.parts.append(
            f'<rect x="{x - width / 2:g}" y="{y - height / 2:g}" width="{width}" height="{height}" rx="9" '
            f'fill="{PLAIN}" stroke="{FAINT}"/>'
        )

    def arrow(self, x1: float, y1: float, x2: float, y2: float, color: str = INK, *, dashed: bool = False) -> None:
        """Draw an arrow between two points."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(
            f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{color}" stroke-width="1.4"{dash} '
            f'marker-end="url(#head-{color[1:]})"/>'
        )

    def cell(self, x: float, y: float, color: str, width: int = 26, height: int = 20) -> None:
        """Draw one block of memory."""
        self.parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{color}" stroke="{INK}" '
            'stroke-width="0.8"/>'
        )

    def legend(self, *colors: str) -> None:
        """Say what the colours mean, in the last line."""
        x = 24.0
        for color in colors:
            self.cell(x, self.height - 32, color, 16, 14)
            self.text(x + 23, self.height - 25, LEGEND[color], size=12, anchor="start", color=FAINT)
            x += 46 + 7 * len(LEGEND[color])

    def svg(self) -> str:
        """The file's text."""
        heads = "".join(
            f'<marker id="head-{color[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{color}"/></marker>'
            for color in (INK, WARN, FAINT)
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'role="img">\n<title>{escape(self.title)}</title>\n<defs>{heads}</defs>\n'
            f'<rect width="{self.width}" height="{self.height}" rx="10" fill="#ffffff" stroke="#d1d5db"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


def two_panels(title: str, left: str, right: str, height: int) -> Figure:
    """A figure of a graph before and after."""
    figure = Figure(title, 720, height)
    figure.text(180, 24, left, bold=True)
    figure.text(540, 24, right, bold=True)
    figure.parts.append(f'<line x1="360" y1="16" x2="360" y2="{height - 44}" stroke="#d1d5db"/>')
    return figure


def donate() -> Figure:
    """`maybe_inplace` on two graph inputs: as written to the graph, and with an in-place kernel."""
    f = two_panels("maybe_inplace in the graph", "functionalized", "with an in-place kernel", 320)
    for x, name, color in ((110, "x", X), (250, "r", R)):
        f.box(x, 60, name, color, width=60)
        f.arrow(x, 75, x, 105)
        f.box(x, 120, f"donate({name})", COPY, width=110)
        f.arrow(x, 135, 180 + (x - 180) * 0.4, 169)
    f.box(180, 185, "op(..)", width=140)
    for x, name in ((130, "y"), (230, "r2")):
        f.arrow(180 + (x - 180) * 0.5, 200, x, 229)
        f.box(x, 245, name, OWN, width=70)
    for x, name, color, out in ((470, "x", X, "y"), (610, "r", R, "r2")):
        f.box(x, 60, name, color, width=60)
        f.arrow(x, 75, 540 + (x - 540) * 0.4, 169)
        f.arrow(540 + (x - 540) * 0.5, 200, 540 + (x - 540) * 0.71, 229)
        f.box(540 + (x - 540) * 0.71, 245, f"{out} = {name}", color, width=80)
    f.box(540, 185, "kernel_(x, r, ..)", width=150)
    f.legend(X, R, OWN, COPY)
    return f


def stack() -> Figure:
    """Two layers of a residual stack, with the copies that lowering makes, and without."""
    f = two_panels("A residual stack", "lowered: each kernel on copies", "copies removed", 440)
    for x0, before in ((180, True), (540, False)):
        left, right = x0 - 75, x0 + 75
        f.box(left, 60, "x", X, width=60)
        f.box(right, 60, "r", R, width=60)
        y, source, residual = 60, left, R
        for layer in (1, 2):
            f.arrow(source, y + 15, left, y + 40)
            f.box(left, y + 55, f"h{layer} = x @ m" if layer == 1 else "h2 = y1 @ m", OWN, width=120)
            if before:
                f.arrow(left, y + 70, left, y + 88)
                f.box(left, y + 103, "clone", COPY, width=80)
                f.arrow(right, y + 15, right, y + 88)
                f.box(right, y + 103, "clone", COPY, width=80)
            f.arrow(left, y + (118 if before else 70), left, y + 131)
            f.arrow(right, y + (118 if before else 15), right, y + 131)
            written = COPY if before else OWN
            f.outline(x0, y + 153, 250, 42)
            f.text(x0, y + 153, "kernel_", mono=True, size=12)
            f.box(left, y + 153, f"y{layer}", written, width=80)
            f.box(right, y + 153, f"r{layer}", COPY if before else residual, width=80)
            y += 153
    f.legend(X, R, OWN, COPY)
    return f


def kept() -> Figure:
    """A copy that a later reader keeps, and the graph without that reader."""
    f = two_panels("A copy and its reader", "h is read later", "h is not read later", 330)
    for x, late in ((180, True), (540, False)):
        f.box(x, 60, "h = x * 2", OWN, width=120)
        if late:
            f.arrow(x - 30, 75, x - 60, 110)
            f.box(x - 70, 125, "clone(h)", COPY, width=110)
            f.arrow(x - 70, 140, x - 70, 175)
            f.box(x - 70, 190, "kernel_", COPY, width=110)
            f.arrow(x - 70, 205, x - 70, 240)
            f.box(x - 70, 255, "y", COPY, width=70)
            f.arrow(x + 30, 75, x + 70, 239, WARN)
            f.box(x + 75, 255, "exp(h)", OWN, width=90, border=WARN)
            f.text(x + 92, 150, "the reader", size=12, color=WARN)
            f.text(x + 92, 166, "that keeps it", size=12, color=WARN)
        else:
            f.arrow(x, 75, x, 175)
            f.box(x, 190, "kernel_", OWN, width=110)
            f.arrow(x, 205, x, 240)
            f.box(x, 255, "y = h", OWN, width=80)
    f.legend(OWN, COPY)
    return f


def parts() -> Figure:
    """Rows and columns of one tensor, one part of each donated."""
    f = two_panels("Parts of one tensor", "maybe_inplace(h[:2], ..)", "maybe_inplace(h[:, :4], ..)", 250)
    for row in range(4):
        for column in range(8):
            f.cell(40 + 26 * column, 60 + 20 * row, OWN if row < 2 else PLAIN)
            f.cell(380 + 18 * column, 60 + 20 * row, OWN if column < 4 else PLAIN, 18)
    f.text(270, 80, "donated:", size=12, anchor="start")
    f.text(270, 96, "overwritten", size=12, anchor="start")
    f.text(270, 122, "may be read", size=12, anchor="start", color=FAINT)
    f.text(180, 170, "one piece of memory: no copy", size=12, color=FAINT)
    for row in range(4):
        for column in range(4):
            f.cell(600 + 18 * column, 60 + 20 * row, COPY, 18)
    f.arrow(530, 100, 594, 100)
    f.text(562, 86, "clone", mono=True, size=12)
    f.text(540, 170, "gaps between the rows; an output has none:", size=12, color=FAINT)
    f.text(540, 186, "one copy, and it becomes the output", size=12, color=FAINT)
    f.legend(OWN, COPY)
    return f


def graph_break() -> Figure:
    """A donated argument on its way past a graph."""
    f = Figure("A donated argument after a graph break", 720, 270)
    f.text(200, 24, "first graph", bold=True)
    f.text(560, 24, "second graph", bold=True)
    f.parts.append(f'<line x1="390" y1="40" x2="390" y2="215" stroke="{FAINT}" stroke-dasharray="2 5"/>')
    f.text(390, 30, "graph break", size=12, color=FAINT)
    f.box(70, 80, "x", X, width=60)
    f.arrow(100, 80, 148, 80)
    f.box(210, 80, "clone(x)", COPY, width=120)
    f.arrow(210, 95, 210, 135)
    f.box(210, 150, "kernel_", COPY, width=110)
    f.arrow(265, 150, 478, 150)
    f.box(510, 150, "y", COPY, width=60)
    f.parts.append(f'<path d="M70 95 V200 H600 V166" fill="none" stroke="{WARN}" stroke-width="1.4" '
                   f'stroke-dasharray="5 4" marker-end="url(#head-{WARN[1:]})"/>')  # fmt: skip
    f.text(330, 213, "handed on by the frame, past the graph", size=12, color=WARN)
    f.box(610, 150, "x + 1", width=80, border=WARN)
    f.legend(X, COPY)
    return f


FIGURES = {"donate": donate, "stack": stack, "kept": kept, "parts": parts, "graph_break": graph_break}


def main(folder: Path = Path(__file__).parent) -> None:
    """Write every figure."""
    for name, draw in FIGURES.items():
        (folder / f"{name}.svg").write_text(draw().svg())


if __name__ == "__main__":
    main()
