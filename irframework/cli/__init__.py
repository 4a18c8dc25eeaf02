"""The command line `irframework`: one module per command, the parser in `entry`.

Importing this package costs nothing: torch and transformers are imported by the command that needs them.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; see `irframework.cli.entry.run_command`."""
    from irframework.cli.entry import run_command

    return run_command(argv)
