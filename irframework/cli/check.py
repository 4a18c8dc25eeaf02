"""`irframework check`: whether implementations keep what their op promises.

Owns the command's options and how the results are shown. The rules are asked about by `irframework.testing`, in this
process or, with `--jobs`, in one of its own for each implementation (`check_processes.py`). Exits 1 when one is broken.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from irframework.testing import Conformance

_LONGEST = 86400.0  # a day, in seconds; waiting for a process has a limit of its own, which an infinity breaks


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("provider", nargs="?", help="only this provider's implementations (default: all but native)")
    parser.add_argument("--op", action="append", default=[], help="only this op; may be given several times")
    parser.add_argument("--device", help="where they are tried (default: the current platform's device)")
    parser.add_argument("--rule", action="append", default=[], help="only this rule; may be given several times")
    parser.add_argument(
        "--jobs",
        type=_jobs,
        default=0,
        metavar="N",
        help="check each implementation in a process of its own, N at a time: a crash or a hang is a finding",
    )
    parser.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="S", help="with --jobs: seconds for one implementation (60)"
    )
    parser.add_argument("--note-calls", help=argparse.SUPPRESS)  # the file that a process of --jobs leaves behind
    parser.add_argument("--verbose", action="store_true", help="show every rule, not only those that are broken")


def _jobs(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, 0 for this process alone; not {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _LONGEST:
        raise argparse.ArgumentTypeError(f"must be more than 0 seconds and at most {_LONGEST:.0f}; not {text!r}")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 0, 1 when a rule is broken, or an `IrError` that the entry turns into 1."""
    from irframework.cli.check_processes import check_in_processes
    from irframework.cli.tables import progress
    from irframework.registry import find_op
    from irframework.testing import check_provider

    ops = [find_op(name) for name in dict.fromkeys(arguments.op)] or None
    rules = arguments.rule or None
    with progress("checking implementations"):
        if arguments.jobs > 0:
            results = check_in_processes(
                arguments.provider, ops, arguments.device, rules, arguments.jobs, arguments.timeout
            )
        else:
            results = check_provider(
                arguments.provider, ops, arguments.device, rules=rules, told=_teller(arguments.note_calls)
            )
    broken = sum(len(result.violations) for result in results)
    if arguments.json:
        print(json.dumps({"broken": broken, "results": [result.to_dict() for result in results]}, indent=2))
    else:
        _print(results, broken, arguments.verbose)
    return 1 if broken else 0


def _teller(path: str | None) -> Callable[[str], None]:
    """What writes down each call before it is made, for the process that started this one."""

    def told(call: str) -> None:
        if path is not None:
            Path(path).write_text(call)

    return told


def _print(results: list[Conformance], broken: int, verbose: bool) -> None:
    from irframework.cli.tables import print_table

    columns = ("op", "provider", "plugin", "device", "calls", "rules", "largest error", "us/call", "s", "contract")
    print_table("Implementations", columns, [_cells(result) for result in results])
    for result in results:
        if verbose:
            print(f"\n{result}")
            continue
        for violation in result.violations:
            print(f"\n{violation.rule}: {violation}")
    tried = sum(not result.skipped for result in results)
    if broken:
        print(f"\nContracts are broken, in {broken} way{'s' * (broken > 1)}.")
    elif not tried:
        print("\nNothing could be checked here.")
    elif tried == 1:
        print("\nThe 1 implementation that runs here keeps its contract.")
    else:
        print(f"\nThe {tried} implementations that run here keep their contracts.")


def _cells(result: Conformance) -> tuple[str, ...]:
    verdict = "kept"
    if not result.ok:
        broken = dict.fromkeys(violation.rule for violation in result.violations)
        verdict = f"broken: {', '.join(broken)}"
    elif result.skipped:
        verdict = f"not checked: {result.skipped}"
    plugin = f"{result.plugin} {result.version}" if result.plugin else "-"
    time = "-"
    if result.overhead is not None:
        time = f"{result.overhead.framework_us:.1f} ({result.overhead.direct_us:.1f} itself)"
    passed = sum(rule.status == "passed" for rule in result.rules)
    asked = sum(rule.status != "skipped" for rule in result.rules)
    return (
        result.op,
        result.provider,
        plugin,
        result.device,
        str(result.calls),
        f"{passed}/{asked}",
        _errors(result),
        time,
        f"{result.seconds:.1f}",
        verdict,
    )


def _errors(result: Conformance) -> str:
    """The largest absolute error of the first output, by dtype."""
    first = [each for each in result.accuracy if each.output == 0]
    words = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64"}
    return (
        " ".join(f"{words.get(each.dtype, each.dtype)} {each.max_abs:.0e}/{each.max_ulp:.2g}" for each in first) or "-"
    )
