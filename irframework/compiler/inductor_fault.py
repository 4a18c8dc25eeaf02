"""Repairs one fault of Inductor that makes in-place kernels give wrong values on the CPU.

Owns a correction of `SchedulerNode.recompute_size_and_body` and nothing else. Read in torch 2.11 and 2.13.

When Inductor's C++ backend fuses loops of different shapes, it computes the dependencies of one of them anew, and
forgets that a buffer which an opaque kernel overwrites goes by another name afterwards. A reader of the overwritten
buffer may then run before the kernel. It needs no IR op: a custom op that mutates its argument, in plain torch, is
enough (`tests/compiler/test_inductor_fault.py`). The correction gives the dependencies their names again, as
`SchedulerNode.refresh_dependencies` does.
"""

from __future__ import annotations

import functools
from typing import Any

_CORRECTED = "_irframework_corrected"


def correct() -> None:
    """Correct Inductor's scheduler, once. Graphs in which nothing is overwritten compile as before."""
    from torch._inductor.scheduler import SchedulerNode

    original: Any = getattr(SchedulerNode, "recompute_size_and_body", None)
    if original is None or hasattr(original, _CORRECTED):
        return

    @functools.wraps(original)
    def recompute_size_and_body(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.mutation_renames:
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    setattr(recompute_size_and_body, _CORRECTED, True)
    SchedulerNode.recompute_size_and_body = recompute_size_and_body  # type: ignore[method-assign]
