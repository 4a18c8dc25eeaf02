"""The parser of the command line and the way from an error to an exit code.

Owns which commands exist and what an error looks like. A command is a module with `add_arguments(parser)` and
`run(arguments) -> int`; it is imported only when it is asked for, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence

_COMMANDS = {
    "run": "generate text with a real model, and show which kernel ran each op",
    "doctor": "what is installed here, what works, and why the rest does not",
    "ops": "who implements which op, and who is chosen here",
    "explain": "how one call would be decided, and why",
    "check": "whether implementations keep their op's contract",
    "bench": "how fast everyone who can run an op is here, beside a copy",
    "migrate": "what the CustomOp classes of a file would become, as code to paste",
    "bisect": "find the op, its place and the kernel that make a program fail",
}


def run_command(argv: Sequence[str] | None = None) -> int:
    """Runs `irframework ARGV` and returns the exit code.

    Args:
        argv: arguments after the program's name; None reads `sys.argv`.

    Returns:
        0 when all is well, 1 when something is wrong (an error, a finding of `doctor` or `check`, or none of `bisect`),
        130 after Ctrl-C. Wrong usage leaves through `SystemExit(2)`, as argparse does.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments  # the rest is another program's
    try:
        _check_op_options(own)
        chosen = _parser(arguments[0] if arguments else None).parse_args(arguments)
        if chosen.command is None:
            _parser(None).print_help()
            return 0
        return int(importlib.import_module(f"irframework.cli.{chosen.command}").run(chosen))
    except BrokenPipeError:
        # The reader (head, less) has gone. Python would complain again while it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        return _failed(error, as_json="--json" in own)


def _check_op_options(arguments: Sequence[str]) -> None:
    """Raises `UnknownOpError`, with the closest names, for `--ir-op-priority.<op>` of an op that does not exist."""
    start = "--ir-op-priority."
    for argument in arguments:
        if argument.startswith(start):
            from irframework.registry import find_op

            find_op(argument.removeprefix(start).partition("=")[0])


def _failed(error: Exception, as_json: bool) -> int:
    """Shows a user's mistake in one line; anything else is a bug of ours and keeps its traceback."""
    from irframework.errors import IrError

    cause = getattr(error, "inner_exception", error)  # torch.compile wraps what a pass raises
    if not isinstance(cause, IrError):
        raise error
    if as_json:
        print(json.dumps({"error": {"type": type(cause).__name__, "message": str(cause)}}, indent=2))
    else:
        print(f"error: {cause}", file=sys.stderr)
    return 1


def _parser(asked: str | None) -> argparse.ArgumentParser:
    """The whole parser; only the command that is asked for gets its options."""
    parser = argparse.ArgumentParser(prog="irframework", description="IR ops with kernels chosen by name.")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, allow_abbrev=False)
        if name == asked:
            command.add_argument("--json", action="store_true", help="print one JSON document on stdout")
            importlib.import_module(f"irframework.cli.{name}").add_arguments(command)
    return parser
