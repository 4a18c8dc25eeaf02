"""How many choices of a kernel stand: what `irframework bisect` turns to find the one that makes a program fail.

Owns the numbers of the choices of this process, the limit on them (`IRFRAMEWORK_BISECT_LIMIT`) and their log
(`IRFRAMEWORK_BISECT_LOG`). Does not decide (`dispatch.py` asks here before it takes an implementation) and does not
search (`cli/bisection.py`).

A choice is an implementation other than native: of one node of a compiled graph, or of all eager calls of one op at one
place of the program; or a fusion: a part of a graph becomes one op, whoever runs that. It takes the next number just
before it runs, is lowered or is fused, so that what crashes is in the log.
The first N choices of a process stand; after that everything new is native, and a place that has a number keeps its
implementation. A program that does the same each time so takes the same numbers up to the limit, whatever follows.
"""

import json
import os
import threading
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from irframework.call_site import call_site
from irframework.errors import ConfigError
from irframework.fusion_state import PASS
from irframework.settings import PREFIX, settings

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp

LIMIT, LOG = f"{PREFIX}BISECT_LIMIT", f"{PREFIX}BISECT_LOG"
FUSION = "fusion"  # the provider of a choice that is none


@dataclass(frozen=True, slots=True)
class Choice:
    """One numbered choice, as the log holds it.

    Attributes:
        number: From 1, in this process.
        op: The op.
        provider: Whose implementation it is; `fusion` where a part of a graph was made the op.
        plugin: The plugin that registered it, or None.
        version: The plugin's version, or None.
        source: `file:line` of the implementation; for a fusion, of the op.
        call_site: `FILE:LINE, in NAME: CODE` of the user's line.
        node: The node of a compiled graph (for a fusion, the one that computed its output); None for eager calls.
        graph: Dynamo's number of the graph (as `TORCH_LOGS` shows it); None for eager calls.
        stage: The pass that lowered it; None for eager calls.
    """

    number: int
    op: str
    provider: str
    plugin: str | None
    version: str | None
    source: str
    call_site: str
    node: str | None = None
    graph: str | None = None
    stage: str | None = None

    @property
    def is_fusion(self) -> bool:
        """Whether it is a fusion, and no implementation."""
        return self.provider == FUSION and self.stage == PASS


@dataclass(frozen=True, slots=True)
class Lowered:
    """The place of a choice in a compiled graph."""

    call_site: str
    node: str
    graph: str
    stage: str


class _Numbers:
    """What this process has numbered so far."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.used = 0
        self.eager: set[tuple[str, str, tuple[str, int, int]]] = set()
        self.passes: set[str] = set()


_numbers = _Numbers()


def start_again() -> None:
    """Forget all numbers: a forked child counts its own, and so does each test."""
    global _numbers
    _numbers = _Numbers()


os.register_at_fork(after_in_child=start_again)


def active() -> bool:
    """Whether choices are numbered. Eager calls then take the way with all checks, and nothing comes from a cache."""
    found = settings()
    return found.bisect_limit is not None or found.bisect_log is not None


def why_refused(op: str, provider: str, mode: str) -> str | None:
    """Why an implementation that could run a call may not be chosen for it now, or None. Takes no number.

    Args:
        op: The op.
        provider: Not native.
        mode: `eager`: a place that has a number keeps its implementation. `inductor`: each node needs a number.
    """
    limit = settings().bisect_limit
    if limit is None or _numbers.used < limit:
        return None
    if mode == "eager" and (op, provider, call_site().key) in _numbers.eager:
        return None
    return used_up()


def used_up() -> str:
    """What is said where a choice gets no number."""
    return f"{LIMIT}={settings().bisect_limit} is used up"


def takes_number(impl: "IrOpImpl", lowered: Lowered | None = None) -> bool:
    """Number a choice that is about to run.

    Args:
        impl: The implementation.
        lowered: Its place in a compiled graph; None for an eager call, whose place is the user's line that runs now.

    Returns:
        False if another thread took the last number since the choice was made: then it does not stand.
    """
    if impl.provider == "native" or not active():
        return True
    site = call_site() if lowered is None else None
    limit = settings().bisect_limit
    with _numbers.lock:
        if site is not None and (impl.op.name, impl.provider, site.key) in _numbers.eager:
            return True
        if limit is not None and _numbers.used >= limit:
            return False
        _numbers.used += 1
        if site is not None:
            _numbers.eager.add((impl.op.name, impl.provider, site.key))
        place = {"call_site": site.text if site is not None else ""} if lowered is None else asdict(lowered)
        who = (impl.op.name, impl.provider, impl.plugin, _version(impl.plugin), impl.source)
        _log(asdict(Choice(_numbers.used, *who, **place)))
    return True


def takes_fusion(op: "IrOp", place: Lowered) -> bool:
    """Number a part of a graph that is about to be made one op.

    Args:
        op: The op.
        place: The node that computes its output.

    Returns:
        False if the numbers are used up: then the graph stays as it is.
    """
    limit = settings().bisect_limit
    with _numbers.lock:
        if limit is not None and _numbers.used >= limit:
            return False
        _numbers.used += 1
        _log(asdict(Choice(_numbers.used, op.name, FUSION, op.plugin, _version(op.plugin), op.source, **asdict(place))))
    return True


def _version(plugin: str | None) -> str | None:
    from irframework.plugins import version_of

    return version_of(plugin) if plugin else None


def met_passes(names: list[str]) -> None:
    """Log the passes of a pipeline that runs, so that a fault of one of them can be found by leaving it out."""
    if settings().bisect_log is None:
        return
    with _numbers.lock:
        new = [name for name in names if name not in _numbers.passes]
        if new:
            _numbers.passes.update(new)
            _log({"passes": new})


def _log(entry: dict[str, Any]) -> None:
    """Append one line in one write: processes share the file, and the next thing that this one does may be a crash.

    Raises:
        ConfigError: The file cannot be written.
    """
    path = settings().bisect_log
    if path is None:
        return
    line = json.dumps({"pid": os.getpid(), **entry}) + "\n"
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(file, line.encode())
        finally:
            os.close(file)
    except OSError as error:
        raise ConfigError(f"Environment variable {LOG}={path!r}: {error.strerror or error}.") from error
