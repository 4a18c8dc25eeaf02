"""`irframework bench`: how fast everyone who can run an op is here, beside a copy.

Owns the command's options and the table. Measuring is `benchmarking.py`, who takes part `contestants.py`, the plot
`bench_plot.py`. Exits 1 when a contestant that takes a call failed at it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from typing import TYPE_CHECKING

from irframework.cli.dtype_names import DTYPE_NAMES, dtype_called
from irframework.cli.explain import shape

if TYPE_CHECKING:
    from irframework.cli.benchmarking import Timing
    from irframework.cli.contestants import Benchmark, Line

_SHAPES = ((1, 4096), (64, 4096), (2048, 4096))
_PICTURES = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("op", help="name of the op, e.g. rms_norm")
    parser.add_argument(
        "--provider",
        type=_names,
        action="extend",
        default=[],
        metavar="NAME,...",
        help="only these; inductor is the compiled native (default: all that are supported, and inductor)",
    )
    parser.add_argument(
        "--shapes",
        type=_shapes,
        default=_SHAPES,
        metavar="1x4096,...",
        help="of the op's first tensor (default: 1x4096,64x4096,2048x4096)",
    )
    parser.add_argument("--dtypes", type=_dtypes, default=("bfloat16",), metavar="bf16,...", help="default: bfloat16")
    parser.add_argument("--device", help="a torch device (default: the current platform's)")
    parser.add_argument("--rounds", type=_rounds, default=15, metavar="N", help="measurements of each (default: 15)")
    parser.add_argument("--plot", type=_picture, metavar="FILE.png", help="also draw it; needs the extra 'plot'")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _shapes(text: str) -> tuple[tuple[int, ...], ...]:
    return tuple(shape(part) for part in text.split(","))


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(_names(text))
    for name in names:
        if name not in DTYPE_NAMES:
            raise argparse.ArgumentTypeError(f"{name!r} is no dtype; choose from {', '.join(DTYPE_NAMES)}")
    return names


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be at least 2, since one measurement has no spread; not {text!r}")
    return int(text)


def _picture(text: str) -> Path:
    path = Path(text)
    if path.suffix not in _PICTURES:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {', '.join(_PICTURES)}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {str(path.parent)!r}")
    return path


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 0, 1 when a contestant failed, or an `IrError` that the entry turns into 1."""
    from irframework.cli.benchmarking import freed_memory_is_kept
    from irframework.cli.contestants import measure
    from irframework.cli.tables import progress
    from irframework.platform import usable_device
    from irframework.registry import find_op

    op = find_op(arguments.op)
    if arguments.plot is not None:
        _check_plotting()
    dtypes = [dtype_called(name) for name in arguments.dtypes]
    device = usable_device(arguments.device)
    with progress(f"measuring {op.name} on {device}"), freed_memory_is_kept():
        found = measure(op, arguments.shapes, dtypes, device, arguments.provider, arguments.rounds)
    if arguments.plot is not None:
        from irframework.cli.bench_plot import draw
        from irframework.errors import ArgumentError

        try:
            draw(found, arguments.plot)
        except OSError as error:
            raise ArgumentError(f"--plot: {str(arguments.plot)!r} cannot be written: {error.strerror}.") from error
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        _print(found)
    return 1 if any(entry.failed for entry in found.left_out) else 0


def _check_plotting() -> None:
    """Raises before anything is measured in vain."""
    from irframework.errors import MissingDependencyError

    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError("--plot needs matplotlib. Install it with: pip install 'irframework[plot]'")


def _print(found: Benchmark) -> None:
    from irframework.cli.tables import print_table

    device, name = found.device
    title = (
        f"{found.op} on {device} ({name}), timed {found.how}, cache cold; median [10%-90%]; "
        f"a copy moves {found.copy / 1e3:.1f} GB/s"
    )
    columns = ("shape", "dtype", "provider", "us", "GB/s", "of copy", "host, us", "host, called itself, us")
    print_table(title, columns, [_cells(line) for line in found.lines])
    measured = {(line.shape, line.dtype) for line in found.lines}
    calls = len(measured | {(entry.shape, entry.dtype) for entry in found.left_out})
    groups: dict[tuple[bool, str, str], list[str]] = {}
    for entry in found.left_out:
        call = f"{'x'.join(map(str, entry.shape))} {entry.dtype}"
        groups.setdefault((entry.failed, entry.contestant, entry.reason), []).append(call)
    for (failed, contestant, reason), where in groups.items():
        at = "" if len(where) == calls else f" at {', '.join(where)}"
        print(f"{'failed' if failed else 'left out'}: {contestant}{at}: {reason}")


def _cells(line: Line) -> tuple[str, ...]:
    return (
        "x".join(map(str, line.shape)),
        line.dtype,
        line.contestant,
        _shown(line.time),
        f"{line.moved / line.time.median / 1e3:.1f}",
        f"{line.share:.2f}",
        _shown(line.host),
        _shown(line.direct),
    )


def _shown(timing: Timing | None) -> str:
    return "-" if timing is None else f"{timing.median:.2f} [{timing.low:.2f}-{timing.high:.2f}]"
