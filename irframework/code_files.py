"""Digests of files of code, for cache keys.

Owns which files an importable package, a plugin's distribution and a module that is imported inside a function consist
of, and what is known by its version instead. Does not look at functions: see `digest.py`.
"""

import ast
import hashlib
import importlib.util
import os
import secrets
import sys
import sysconfig
import time
from collections.abc import Iterable
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch

from irframework import IMPORTED_AT

_SUFFIXES = frozenset(
    (
        ".py",
        ".so",
        ".pyd",
        ".dll",
        ".dylib",
        ".ptx",
        ".cubin",
        ".fatbin",
        ".hsaco",
        ".spv",
        ".cu",
        ".cuh",
        ".hip",
        ".cl",
    )
)
_VERSIONED = frozenset(("torch", "numpy", "triton", "irframework"))
_STANDARD = tuple(sysconfig.get_paths()[place] + os.sep for place in ("stdlib", "platstdlib"))
_INSTALLED = frozenset(("site-packages", "dist-packages"))

PROCESS = secrets.token_hex(8)  # in a digest: no other process has this key


@cache
def known_by_version(top: str) -> bool:
    """Whether a top-level module is Python's own, torch, or another whose version is in every key anyway."""
    if top in _VERSIONED:
        return True
    file = getattr(sys.modules.get(top), "__file__", None)  # a program may have a module called `test`, too
    is_pythons = file is None or (file.startswith(_STANDARD) and not _INSTALLED & set(Path(file).parts))
    return top in sys.stdlib_module_names and is_pythons


@cache
def versions() -> str:
    """The versions of Python and of what is known by its version."""
    found = [sys.version, torch.__version__, str(torch.version.git_version)]
    for name in sorted(_VERSIONED - {"torch"}):
        found.append(f"{name} {getattr(sys.modules.get(name), '__version__', None) or _installed_version(name)}")
    return "; ".join(found)


def _installed_version(name: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except Exception:  # not installed, or its metadata cannot be read
        return "?"


@cache
def is_installed(top: str) -> bool:
    """Whether a top-level module was put into site-packages by an installer: nobody edits it there."""
    places, files = _places(top)
    return any(_INSTALLED & set(path.parts) for path in (*places, *files))


def _places(top: str) -> tuple[list[Path], list[Path]]:
    """Where the code of a top-level module lies: directories of a package, or else its file. Imports nothing."""
    module: Any = sys.modules.get(top)
    path, file = getattr(module, "__path__", None), getattr(module, "__file__", None)
    if module is None:
        try:
            spec = importlib.util.find_spec(top)
        except (ImportError, ValueError):
            spec = None
        path, file = (spec.submodule_search_locations, spec.origin) if spec is not None else (None, None)
    # An editable install keeps its sources and its binaries in different directories, all of them in __path__.
    places = [Path(place) for place in path or ()]
    return places, [Path(file)] if file and not places else []


def _files_of(top: str) -> list[tuple[str, Path]]:
    places, files = _places(top)
    found = [
        (str(path.relative_to(place)), path)
        for place in places
        for path in place.rglob("*")
        if path.suffix in _SUFFIXES
    ]
    return sorted(found + [(file.name, file) for file in files if file.exists()])


@lru_cache(maxsize=4096)
def content_digest(path: Path, size: int, changed: int) -> bytes:
    """Digest of one file; read again when its size or time is another."""
    return hashlib.sha256(path.read_bytes()).digest()


def digest_files(files: Iterable[tuple[str, Path]]) -> str:
    """Digest of the content of files, each given with the name that it has in the digest.

    A file that changed after this process had imported irframework may not be what the process has loaded: then the
    digest is one that no other process has, so that old code never stands in a cache under the name of the new.
    """
    hasher = hashlib.sha256()
    now = time.time()
    for name, path in files:
        stat = path.stat()
        hasher.update(name.encode() + b"\0" + content_digest(path, stat.st_size, stat.st_mtime_ns))
        if IMPORTED_AT < stat.st_ctime <= now:
            hasher.update(PROCESS.encode())
    return hasher.hexdigest()[:16]


def digest_package(top: str) -> str:
    """Digest of every source file and binary of a top-level module or package."""
    files = _files_of(top)
    return digest_files(files) if files else ""


def digest_plugin(module: str, dist: Any) -> str:
    """Digest of all code of a plugin: its package, modules of it that lie elsewhere, and what its installer listed.

    Args:
        module: The module that its entry point names.
        dist: Its distribution.
    """
    top = module.partition(".")[0]
    places, _ = _places(top)
    loaded = [getattr(each, "__file__", None) for name, each in list(sys.modules.items()) if name.startswith(top + ".")]
    elsewhere = [Path(file) for file in loaded if file and not any(Path(file).is_relative_to(p) for p in places)]
    try:
        listed = [Path(str(file.locate())) for file in dist.files or ()]
    except Exception:  # its metadata cannot be read
        listed = []
    others = {path for path in (*elsewhere, *listed) if path.suffix in _SUFFIXES and path.is_file()}
    return digest_package(top) + digest_files(sorted((path.name, path) for path in others))


@cache
def _digest_installed(top: str) -> str:
    """Digest of an installed package by the sizes and times of its files: there may be thousands."""
    stats = [(name, path.stat()) for name, path in _files_of(top)]
    listing = repr([(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats])
    return hashlib.sha256(listing.encode()).hexdigest()[:16]


def digest_import(top: str) -> str:
    """Digest of a top-level module and of all that it imports, as far as no version stands for it. Imports nothing."""
    todo, digests = [top], {}
    while todo:
        name = todo.pop()
        if name in digests or known_by_version(name):
            continue
        if is_installed(name):
            digests[name] = _digest_installed(name)
        else:
            digests[name] = digest_package(name)
            for _, path in _files_of(name):
                if path.suffix == ".py":
                    todo += _imported_by(path, path.stat().st_mtime_ns)
    return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]


@lru_cache(maxsize=4096)
def _imported_by(path: Path, changed: int) -> tuple[str, ...]:
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return ()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return tuple(sorted(names))


def digest_libraries() -> str:
    """Digest of the operator libraries that were loaded from outside Python packages, by their sizes and times."""
    known = {path for name in list(sys.modules) if "." not in name for path in _roots(name)}
    listing = []
    for library in sorted(torch.ops.loaded_libraries):
        path = Path(library)
        if path.is_file() and not any(path.is_relative_to(root) for root in known):
            stat = path.stat()
            listing.append((path.name, stat.st_size, stat.st_mtime_ns))
    return hashlib.sha256(repr(listing).encode()).hexdigest()[:16]


def _roots(top: str) -> list[Path]:
    return [] if known_by_version(top) and top != "torch" else _places(top)[0]
