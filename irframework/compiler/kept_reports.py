"""Reports that lie beside Inductor's cache, so that a graph which comes from it can still say what was decided.

Owns the files: their names, what they hold, how they are written and read, and how many there may be. Does not own the
report (`report.py`), nor what is in Inductor's cache: a report that is missing or cannot be read costs nothing but the
knowledge.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from irframework.compiler.clones import KeptCopy
from irframework.compiler.report import Donation, MissedFusion, Report
from irframework.decision import Decision

logger = logging.getLogger(__name__)

_MAX_BYTES = 1 << 22
_MAX_FILES = 1024
_PLAIN = ("selected_impls", "fusions", "clones_inserted", "clones_removed", "graphs")
_RECORDS: dict[str, Any] = {"missed_fusions": MissedFusion, "donated": Donation, "kept_copies": KeptCopy}
NOT_KEPT = ("timings", "failed", "visiting", "from_cache", "kept_as", "quiet")  # of one process, or about the keeping


def name_of(graph: Graph, keys: Iterable[str | None]) -> str | None:
    """The name under which the report of a compile is kept.

    Args:
        graph: The pre-grad graph, rewritten by us: what a cache hit has in hand, too.
        keys: The cache keys of our passes.

    Returns:
        A digest; None if a pass has no key, so that nothing of it comes from a cache.
    """
    keys = list(keys)
    if None in keys:
        return None
    autocast = [(d, torch.get_autocast_dtype(d)) for d in ("cpu", "cuda") if torch.is_autocast_enabled(d)]
    digest = hashlib.sha256(repr((keys, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)).encode())
    root: Any = graph.owning_module
    graphs = [graph] if root is None else [each.graph for each in root.modules() if isinstance(each, GraphModule)]
    for each in graphs:
        for node in each.nodes:
            target = f"{getattr(node.target, '__module__', '')}.{getattr(node.target, '__qualname__', node.target)}"
            value = _described(node.meta.get("example_value"))
            digest.update(f"{node.op} {node.name} {target} {node.args} {node.kwargs} {value}\n".encode())
    return digest.hexdigest()[:32]


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        strides = value.stride() if value.layout is torch.strided else value.layout
        return f"{value.dtype} {tuple(value.shape)} {strides} {value.device} {value.requires_grad}"
    return f"[{', '.join(map(_described, value))}]" if isinstance(value, (list, tuple)) else type(value).__name__


def _place(name: str) -> Path | None:
    """Where a report lies; None if Inductor caches nothing."""
    from irframework.compiler import hooks

    return hooks.own_folder() / f"{name}.json" if hooks.caches_graphs() else None


def keep(report: Report) -> None:
    """Write a report beside Inductor's cache, in place of an earlier one of the same compile."""
    place = _place(report.kept_as) if report.kept_as else None
    if place is None:
        return
    data: dict[str, Any] = {name: getattr(report, name) for name in _PLAIN}
    data |= {name: [asdict(record) for record in getattr(report, name)] for name in _RECORDS}
    data["decisions"] = {node: decision.to_dict() for node, decision in report.decisions.items()}
    text = json.dumps(data).encode()
    if len(text) > _MAX_BYTES:
        text = json.dumps({**data, "graphs": {}}).encode()
    try:
        if len(text) <= _MAX_BYTES:
            place.parent.mkdir(parents=True, exist_ok=True)
            _write(place, text)
            _make_room(place.parent)
    except OSError as error:  # a full disk, or a directory of somebody else
        logger.debug("The report of a compile was not kept: %s", error)


def _write(place: Path, text: bytes) -> None:
    """Write a file so that other processes see all of it or nothing."""
    handle, temporary = tempfile.mkstemp(dir=place.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(text)
        os.replace(temporary, place)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _make_room(folder: Path) -> None:
    """Take the oldest files away where there are too many."""
    names = [name for name in os.listdir(folder) if name.endswith(".json")]
    if len(names) > _MAX_FILES:
        dated = sorted((_changed(folder / name), name) for name in names)
        for _, name in dated[: len(names) - _MAX_FILES]:
            with contextlib.suppress(OSError):
                os.unlink(folder / name)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:  # another process took it away
        return 0.0


def restore(report: Report) -> bool:
    """Fill the report of a compile that came from the cache with what was decided when its passes ran.

    It stays as it is where nothing was kept, or where what was kept cannot be read.

    Returns:
        Whether it was filled.
    """
    place = _place(report.kept_as) if report.kept_as else None
    if place is None:
        return False
    try:
        data = json.loads(place.read_bytes())
        values = {name: data[name] for name in _PLAIN}
        values |= {name: [record(**each) for each in data[name]] for name, record in _RECORDS.items()}
        values["decisions"] = {node: Decision.from_dict(each) for node, each in data["decisions"].items()}
        report_like = Report(**values)
        report_like.to_dict()
    except FileNotFoundError:
        return False
    except Exception as error:
        logger.debug("The kept report %s cannot be read: %s: %s", place, type(error).__name__, error)
        return False
    for name, value in values.items():
        setattr(report, name, value)
    return True
