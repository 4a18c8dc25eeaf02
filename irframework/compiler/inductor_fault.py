"""Repairs two faults of Inductor by which kernels that overwrite their arguments run at the wrong time.

Owns a correction of `SchedulerNode.recompute_size_and_body`, one of `GraphLowering.run_node`, and nothing else. Neither
fault needs an IR op: a custom op that mutates its argument, in plain torch, is enough
(`tests/compiler/test_inductor_fault.py`).

Too late: when Inductor's C++ backend fuses loops of different shapes, it computes the dependencies of one of them anew,
and forgets that a buffer which an opaque kernel overwrites goes by another name afterwards. A reader of the overwritten
buffer may then run before the kernel. The correction gives the dependencies their names again, as
`SchedulerNode.refresh_dependencies` does.

Too early: Inductor puts a pointwise computation off until its value is needed. Before a buffer is overwritten it
computes what was put off, but it registers an opaque kernel first, so the kernel runs before these readers. In graphs
for inference, torch hides that: it moves readers behind the kernel, which then gets a copy. IR ops are lowered after
that. The correction computes what was put off before the kernel is registered.

Private torch API, read in 2.11 and 2.13: the two methods, `SchedulerNode.mutation_renames`, `.set_read_writes` and
`.read_writes`, `GraphLowering.env` and `.name_to_users`, and `get_name` and `realize` of Inductor's values.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Node

_CORRECTED = "_irframework_corrected"


def correct() -> None:
    """Correct Inductor, once. Graphs in which nothing is overwritten compile as before."""
    from torch._inductor.graph import GraphLowering
    from torch._inductor.scheduler import SchedulerNode

    _replace(SchedulerNode, "recompute_size_and_body", _renaming)
    _replace(GraphLowering, "run_node", _reading_first)


def _replace(owner: Any, name: str, corrected: Any) -> None:
    original = getattr(owner, name, None)
    if original is None or hasattr(original, _CORRECTED):
        return
    replacement = corrected(original)
    setattr(replacement, _CORRECTED, True)
    setattr(owner, name, replacement)


def _renaming(original: Any) -> Any:
    @functools.wraps(original)
    def recompute_size_and_body(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.mutation_renames:
            self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    return recompute_size_and_body


def _reading_first(original: Any) -> Any:
    @functools.wraps(original)
    def run_node(self: Any, n: Node) -> Any:
        for argument in _overwritten(n):
            name = _buffer_of(self.env.get(argument))
            for reader in self.name_to_users.get(name, ()):
                reader.realize()
        return original(self, n)

    return run_node


def _overwritten(node: Node) -> Iterator[Node]:
    """What an opaque kernel writes to. torch's own in-place operators are no opaque kernels."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in ("aten", "prims", "inductor"):
        return
    for index, argument in enumerate(target._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = node.args[index] if index < len(node.args) else node.kwargs.get(argument.name)
            yield from (v for v in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(v, Node))


def _buffer_of(value: Any) -> str | None:
    """The name of the buffer that a value lies in; None if it was not computed yet."""
    try:
        return str(value.get_name())
    except Exception:  # each kind of value that is not in memory says so in its own way
        return None
