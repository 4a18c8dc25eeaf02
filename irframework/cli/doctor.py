"""`irframework doctor`: what is installed here, what works, and why the rest does not.

Owns how a diagnosis is shown. Exits 1 when it holds a problem.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from irframework.cli.diagnosis import DecisionNow, Diagnosis


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command has no options but `--json`."""


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 0 when all is well, 1 when something is wrong."""
    from irframework.cli.diagnosis import diagnose

    diagnosis = diagnose()
    if arguments.json:
        print(json.dumps(diagnosis.to_dict(), indent=2))
    else:
        _print(diagnosis)
    return 0 if diagnosis.healthy else 1


def _print(diagnosis: Diagnosis) -> None:
    from irframework.cli.tables import print_table

    print_table("Environment", ("what", "value"), diagnosis.environment)
    plugins = [
        (info.name, f"{info.dist} {info.version}", info.status, ", ".join(info.providers) or "-", info.reason or "-")
        for info in diagnosis.plugins
    ]
    print_table("Plugins", ("plugin", "distribution", "status", "providers", "reason"), plugins)
    providers = [
        (
            impl.provider,
            impl.op.name,
            "yes" if impl.supported else "no",
            "any" if impl.device_types is None else ", ".join(impl.device_types),
            impl.unsupported_reason or "-",
        )
        for impl in sorted(diagnosis.implementations, key=lambda impl: (impl.provider, impl.op.name))
        if impl.provider != "native"
    ]
    print_table("Implementations", ("provider", "op", "supported", "devices", "why not"), providers)
    rows = [_cells(now) for now in diagnosis.decisions]
    columns = ("op", "mode", "provider", "asked in this order", "why not the others")
    print_table("How a usual call (8x4096, float32) would be decided now", columns, rows)
    for severity, title in (("problem", "Problems"), ("note", "Notes")):
        found = [finding for finding in diagnosis.findings if finding.severity == severity]
        if found:
            print(f"\n{title}")
            for finding in found:
                print(f"  {finding.subject}: {finding.text}")
    print("\nNo problems found." if diagnosis.healthy else "\nSomething is wrong: see the problems above.")


def _cells(now: DecisionNow) -> tuple[str, ...]:
    order = ", ".join(f"{provider} ({origin})" for provider, origin in now.priority)
    why = "; ".join(f"{provider}: {reason}" for provider, reason in now.others)
    return (now.op, now.mode, now.provider, order, why or "-")
