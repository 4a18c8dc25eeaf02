"""`irframework bisect -- CMD`: which op, at which place, with whose kernel, makes a command fail.

Owns the command's options and what is printed. The search is `bisection.py`.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from irframework.bisecting import Choice
    from irframework.cli.bisection import Command, Finding, Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options; all after `--` is the command that fails."""
    parser.usage = "irframework bisect [--log FILE] [--timeout S] [--json] -- CMD [ARG ...]"
    parser.add_argument("--log", type=Path, metavar="FILE", help="keep the numbered choices of the failing run here")
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="a run that takes longer is ended and has failed")
    parser.add_argument("cmd", nargs="+", metavar="CMD", help="the command and its arguments, after --")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be more than 0 seconds, not {text}")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 0 if the culprit was found, 1 if not, 2 if CMD cannot be started or the log not written."""
    from irframework.cli.bisection import Command, search

    progress = _Progress()
    command = Command(arguments.cmd, arguments.timeout, announce=progress.begin, tell=progress.end)
    before = signal.signal(signal.SIGTERM, _leave)
    try:
        if arguments.log is not None:
            arguments.log.write_text("")  # better now than after the search
        finding = search(command)
    except OSError as error:
        print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)
        progress.close()
    if arguments.log is not None:
        _write_log(arguments.log, command)
    if arguments.json:
        runs = [run.to_dict() for run in command.runs]
        print(json.dumps({"command": arguments.cmd, **finding.to_dict(), "runs": runs}, indent=2))
    else:
        _print(finding, shlex.join(arguments.cmd))
    return 0 if finding.found else 1


def _leave(*_: object) -> None:
    raise SystemExit(128 + signal.SIGTERM)  # past the `finally` that ends the child


class _Progress:
    """A line on stderr for each run, with a spinner while it goes on where a person looks."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._what = ""

    def begin(self, what: str) -> None:
        from irframework.cli.tables import spinner

        self._what = what
        self._stack.enter_context(spinner(what))

    def end(self, run: Run) -> None:
        self.close()
        print(f"{self._what}: {run.outcome}, {run.count} chosen, {run.seconds:.1f} s", file=sys.stderr, flush=True)

    def close(self) -> None:
        self._stack.close()


def _write_log(path: Path, command: Command) -> None:
    from dataclasses import asdict

    watched = max(command.runs, key=lambda run: (run.count, run.failed))
    lines = [
        json.dumps({"process": process, **asdict(choice)})
        for process, choices in enumerate(watched.processes)
        for choice in choices
    ]
    path.write_text("".join(f"{line}\n" for line in lines))


def _print(finding: Finding, command: str) -> None:
    if finding.tail:
        print("\nThe end of its output when it fails:\n" + "\n".join(f"  | {line}" for line in finding.tail))
    print(f"\n{finding.text}")
    for choice in finding.culprits:
        print()
        for name, value in _facts(choice):
            print(f"  {name:<12}{value}")
    if finding.reproduce:
        print("\nTo see it again:")
        for environment, outcome in finding.reproduce.items():
            print(f"  {environment} {command}   # {outcome}")
    if finding.avoid is not None:
        print("\nTo do without it:")
        print(f"  {finding.avoid}{_proof(finding.avoided)}")
        kernels = dict.fromkeys(choice.op for choice in finding.culprits if not choice.is_fusion)
        if kernels:
            ops = ", ".join(f'{op}="native"' for op in kernels)
            print(f"  with ir.priority({ops}): ...")


def _proof(avoided: bool | None) -> str:
    if avoided is None:
        return ""
    if avoided:
        return "   # succeeds"
    return "   # still fails: the program's own priorities stand above it, or there is another fault (search again)"


def _facts(choice: Choice) -> list[tuple[str, Any]]:
    plugin = f"{choice.plugin} {choice.version}" if choice.plugin else "none (the program registered it)"
    if choice.is_fusion:
        return [
            ("fused op", choice.op),
            ("call site", choice.call_site),
            ("declared", choice.source + (f", plugin {plugin}" if choice.plugin else "")),
            ("node", f"{choice.node} of graph {choice.graph or '?'}"),
        ]
    facts = [
        ("op", choice.op),
        ("call site", choice.call_site),
        ("provider", choice.provider),
        ("plugin", plugin),
        ("registered", choice.source),
    ]
    if choice.node is not None:
        facts.append(("node", f"{choice.node} of graph {choice.graph or '?'}, lowered by {choice.stage}"))
    return facts
