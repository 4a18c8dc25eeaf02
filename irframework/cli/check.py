"""`irframework check`: whether implementations keep their op's contract.

Owns the command's options and how the results are shown. The trials are `irframework.testing`'s. Exits 1 when a
contract is broken.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from irframework.testing import Checked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("provider", nargs="?", help="only this provider's implementations (default: all but native)")
    parser.add_argument("--op", action="append", default=[], help="only this op; may be given several times")
    parser.add_argument("--device", help="where they are tried (default: the current platform's device)")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 0, 1 when a contract is broken, or an `IrError` that the entry turns into 1."""
    from irframework.cli.tables import progress
    from irframework.registry import find_op
    from irframework.testing import check_contracts

    ops = [find_op(name) for name in dict.fromkeys(arguments.op)] or None
    with progress("checking implementations"):
        results = check_contracts(arguments.provider, ops, arguments.device)
    broken = sum(len(result.violations) for result in results)
    if arguments.json:
        print(json.dumps({"broken": broken, "results": [result.to_dict() for result in results]}, indent=2))
    else:
        _print(results, broken)
    return 1 if broken else 0


def _print(results: list[Checked], broken: int) -> None:
    from irframework.cli.tables import print_table

    columns = ("op", "provider", "plugin", "device", "calls", "contract")
    print_table("Implementations", columns, [_cells(result) for result in results])
    for result in results:
        for violation in result.violations:
            print(f"\n{violation.rule}: {violation}")
    tried = sum(result.calls > 0 for result in results)
    if not tried:
        print("\nNothing could be checked here.")
    elif broken:
        print(f"\nContracts are broken, in {broken} way{'s' * (broken > 1)}.")
    elif tried == 1:
        print("\nThe 1 implementation that runs here keeps its contract.")
    else:
        print(f"\nThe {tried} implementations that run here keep their contracts.")


def _cells(result: Checked) -> tuple[str, ...]:
    verdict = f"not checked: {result.skipped}" if result.skipped else "kept"
    if result.violations:
        verdict = f"broken: {', '.join(dict.fromkeys(violation.rule for violation in result.violations))}"
    plugin = f"{result.plugin} {result.version}" if result.plugin else "-"
    return (result.op, result.provider, plugin, result.device, str(result.calls), verdict)
