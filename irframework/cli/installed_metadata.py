"""Duplicate, empty and stale metadata of plugin distributions on `sys.path`.

Python's look-up takes the first directory of a distribution's name, so a left-over one hides a plugin without a word.
Owns the scan of `*.dist-info` and `*.egg-info` directories; it imports nothing of what it finds.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_DIRECTORY = re.compile(r"^(?P<name>.+?)(-(?P<version>\d[^-]*)(-py[\d.]+)?)?\.(dist|egg)-info$")


@dataclass(frozen=True, slots=True)
class Metadata:
    """One metadata directory.

    Attributes:
        name: of the distribution, normalised (lower case, `-`).
        version: from the directory's name, or from the file in it.
        path: the directory.
        empty: it holds no METADATA or PKG-INFO.
        has_plugin: its entry points name a plugin of irframework.
    """

    name: str
    version: str
    path: str
    empty: bool
    has_plugin: bool


def scan(group: str, paths: Iterable[str] | None = None) -> list[Metadata]:
    """All metadata directories, in the order in which Python's look-up meets them.

    Args:
        group: the entry-point group that makes a distribution a plugin.
        paths: directories to look in; default `sys.path`.
    """
    found: list[Metadata] = []
    seen: set[Path] = set()
    for entry in sys.path if paths is None else paths:
        directory = Path(entry or ".")
        if not directory.is_dir() or directory.resolve() in seen:
            continue
        seen.add(directory.resolve())
        for child in sorted(directory.iterdir()):
            match = _DIRECTORY.match(child.name)
            if match is not None:
                found.append(_read(child, match, group))
    return found


def problems(found: Iterable[Metadata]) -> list[str]:
    """What is wrong with the metadata of plugins, one sentence each."""
    by_name: dict[str, list[Metadata]] = defaultdict(list)
    for metadata in found:
        by_name[metadata.name].append(metadata)
    sentences = []
    for name, entries in sorted(by_name.items()):
        first, *rest = entries
        if not (any(entry.has_plugin for entry in entries) or (name.startswith("irframework") and first.empty)):
            continue
        if first.empty:
            sentences.append(
                f"{name}: {first.path} is empty (left over from another installation?)"
                + (f" and hides {rest[0].path}" if rest else "")
                + "; delete it"
            )
        elif rest and not (first.has_plugin and all(entry.version == first.version for entry in rest)):
            what = "declares no plugin" if not first.has_plugin else f"is version {first.version}"
            others = ", ".join(f"{entry.path} ({'empty' if entry.empty else entry.version})" for entry in rest)
            sentences.append(f"{name}: installed more than once: {first.path} {what} and hides {others}; keep one")
    return sentences


def _read(path: Path, match: re.Match[str], group: str) -> Metadata:
    text, entry_points = "", ""
    if path.is_dir():
        for name in ("METADATA", "PKG-INFO"):
            if (path / name).is_file():
                text = (path / name).read_text(encoding="utf-8", errors="replace")
                break
        if (path / "entry_points.txt").is_file():
            entry_points = (path / "entry_points.txt").read_text(encoding="utf-8", errors="replace")
    elif path.is_file():
        text = path.read_text(encoding="utf-8", errors="replace")
    version = match["version"] or _field(text, "Version") or "?"
    name = re.sub(r"[-_.]+", "-", match["name"]).lower()
    return Metadata(name, version, str(path), not text.strip(), f"[{group}]" in entry_points)


def _field(text: str, name: str) -> str | None:
    found = re.search(rf"^{name}:\s*(.+)$", text, re.MULTILINE)
    return None if found is None else found[1].strip()
