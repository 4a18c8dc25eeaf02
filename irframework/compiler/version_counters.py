"""Tells autograd which inputs a compiled graph overwrites.

Owns one call at the head of a lowered graph. An older autograd graph that saved a donated input must fail at its
backward, compiled as in eager mode, instead of computing with what the kernels left there. The call is part of the
graph, so every pipeline and every cached artefact makes it. Does not decide what is overwritten: `clones.py` did.
"""

from __future__ import annotations

from torch.fx import Graph

from irframework.compiler.aliasing import Aliasing
from irframework.compiler.clones import GRANTED
from irframework.compiler.materialize import KERNEL
from irframework.torch_ops import define_overwritten


def count_overwriting(graph: Graph) -> None:
    """Let a graph raise the version counters of the donated inputs that its kernels write to; twice changes nothing."""
    inputs = list(graph.find_nodes(op="placeholder"))
    if not any(GRANTED in node.meta for node in inputs):
        return
    overwritten = define_overwritten()
    if any(graph.find_nodes(op="call_function", target=overwritten)):
        return
    aliasing = Aliasing(graph)
    written = [
        node
        for node in inputs
        if GRANTED in node.meta and any(KERNEL in access.node.meta for access in aliasing.writes(node))
    ]
    if not written:
        return
    with graph.inserting_after(inputs[-1]):  # before any reader: for a scheduler it is one more write to the inputs
        call = graph.call_function(overwritten, (written,))
    call.meta["val"] = None
