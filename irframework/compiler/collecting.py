"""When Python looks for garbage in cycles while a graph is searched.

Owns that switch and nothing else.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Let Python not look for cycles of garbage meanwhile; as mypy and other compilers do.

    A search makes many small objects that live until its end. After each few hundred of them Python would walk over
    those that there are, and at times over all that the process holds, for nothing. What is in no cycle is freed at
    once, as ever. The switch is one for the process: what other threads leave in cycles meanwhile is collected later,
    which is all that they see of it. Where it is off already, it stays so.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
