"""`irframework migrate`: what the `CustomOp` classes of a file would become.

Owns the command's options and the layout of what it prints. Does not own the translation (`migrate_classes.py`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from irframework.cli.migrate_result import Migrated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("file", type=Path, help="a Python file with CustomOp classes; it is read, not imported")
    parser.add_argument(
        "--provider",
        default="custom",
        metavar="NAME",
        help="how providers are called: NAME_cuda, ... (default: custom)",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 0, 1 if something is left to a person, or an `IrError` that the entry turns into 1."""
    from irframework.errors import MigrationError, MissingDependencyError
    from irframework.registry import all_ops

    try:
        from irframework.cli import migrate_classes, migrate_printing, migrate_source
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "libcst":
            raise
        raise MissingDependencyError(
            "irframework migrate needs libcst. Install it with: pip install 'irframework[migrate]'"
        ) from error
    if not arguments.provider.isidentifier() or arguments.provider == "native":
        raise MigrationError(
            f"--provider {arguments.provider!r}: a provider's name is an identifier, and not 'native'."
        )
    source = migrate_source.read_source(_text(arguments.file), str(arguments.file))
    existing = {name: op.schema for name, op in all_ops().items()}
    found = migrate_classes.migrate(source, arguments.provider, existing)
    head = migrate_printing.header(source, [text for each in found for text in each.texts])
    if arguments.json:
        print(
            json.dumps({"file": str(arguments.file), "imports": head, "classes": list(map(_as_json, found))}, indent=2)
        )
    else:
        print(f"# What the CustomOp classes of {arguments.file.name} would become.\n{head}")
        for each in found:
            print(_as_code(each))
    return 1 if any(each.untranslated for each in found) else 0


def _text(file: Path) -> str:
    from irframework.errors import MigrationError

    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MigrationError(f"{file} cannot be read: {error}") from error


def _as_json(found: Migrated) -> dict[str, Any]:
    return {
        "class": found.layer.name,
        "line": found.layer.line,
        "ops": found.ops,
        "implementations": [
            {"op": op, "provider": provider, "predicate": predicate}
            for op, provider, predicate in found.implementations
        ],
        "code": "\n\n".join(found.texts),
        "notes": found.notes,
        "not_translated": [{"line": each.line, "what": each.what} for each in _once(found)],
    }


def _as_code(found: Migrated) -> str:
    parts = []
    if found.ops:
        parts.append(f"op {' and '.join(found.ops)}")
    if found.implementations:
        parts.append("implementations " + ", ".join(dict.fromkeys(p for _, p, _ in found.implementations)))
    lines = [f"\n# --- {found.layer.name}, line {found.layer.line}: {'; '.join(parts) or 'nothing to paste'}"]
    lines += [f"# Note: {note}." for note in found.notes]
    if found.untranslated:
        lines.append("# Not translated:")
        lines += [f"#   line {each.line}: {each.what}" for each in _once(found)]
    return "\n".join(lines) + "\n\n" + "\n\n".join(found.texts)


def _once(found: Migrated) -> list[Any]:
    return sorted(set(found.untranslated), key=lambda each: (each.line, each.what))
