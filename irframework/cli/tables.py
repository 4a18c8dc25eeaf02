"""Tables and progress lines of the command line: rich where a person looks at a terminal, plain text otherwise.

Owns how things look. rich is optional (the `cli` extra); without it, and in pipes and logs, the same words come as
plain lines. Progress goes to stderr, results to stdout.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Prints a titled table on stdout.

    Args:
        title: a line above the table.
        columns: headings.
        rows: one sequence of cells per line; cells are shown by `str`.
    """
    cells = [[str(cell) for cell in row] for row in rows]
    if _is_seen(sys.stdout):
        _print_rich(title, columns, cells)
    else:
        print(plain_table(title, columns, cells))


def plain_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The table as aligned text; the last column is as wide as it needs."""
    lines = [list(columns), *[list(row) for row in rows]]
    widths = [max((len(line[i]) for line in lines), default=0) for i in range(len(columns))]
    shown = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    rule = "  ".join("-" * width for width in widths)
    if len(rule) > 200:
        rule = rule[:200]
    return "\n".join([f"\n{title}", shown[0], rule, *shown[1:]])


def print_groups(columns: Sequence[str], groups: Mapping[str, Sequence[Sequence[str]]]) -> None:
    """Prints one table in groups, without lines between the columns, so that it stays narrow.

    Args:
        columns: headings.
        groups: rows of cells by the heading of their group.
    """
    if _is_seen(sys.stdout):
        _print_rich_groups(columns, groups)
        return
    heading, rule, *lines = plain_table("", columns, [row for rows in groups.values() for row in rows]).splitlines()[2:]
    print(f"{heading}\n{rule}")
    for group, rows in groups.items():
        print("\n".join([f"\n{group}:", *lines[: len(rows)]]))
        del lines[: len(rows)]


@contextmanager
def progress(what: str) -> Iterator[None]:
    """Says on stderr that `what` is going on, and how long it took."""
    start = time.perf_counter()
    if _is_seen(sys.stderr):
        from rich.console import Console

        console = Console(stderr=True)
        with console.status(f"{what} ..."):
            yield
        console.print(f"[dim]{what}: {time.perf_counter() - start:.1f} s[/dim]", highlight=False)
        return
    print(f"{what} ...", file=sys.stderr, flush=True)
    yield
    print(f"{what}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """Shows on stderr that `what` is going on, where a person looks; leaves nothing behind."""
    if _is_seen(sys.stderr):
        from rich.console import Console

        with Console(stderr=True).status(f"{what} ..."):
            yield
    else:
        yield


def _is_seen(stream: object) -> bool:
    is_terminal = getattr(stream, "isatty", None)
    return bool(is_terminal is not None and is_terminal()) and importlib.util.find_spec("rich") is not None


def _print_rich_groups(columns: Sequence[str], groups: Mapping[str, Sequence[Sequence[str]]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"chosen": "bold green", "x": "red", "-": "dim"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True)
    for group, rows in groups.items():
        table.add_row()
        table.add_row(Text(group, style="bold cyan"))
        for row in rows:
            table.add_row(*(Text(cell, style=styles.get(cell, "")) for cell in row))
    Console().print(table)


def _print_rich(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))  # Text: a reason may hold brackets, which are markup to rich
    console = Console()
    console.print()
    console.print(table)
