"""Epsilons of norms that Dynamo made symbols: `torch.compile(dynamic=True)` does so with floats of modules.

Owns which floats these are, and that the graph is compiled for their values, with a guard: a module with another
epsilon compiles anew. Other floats stay symbols, since they may be another number at each call. Does not look for
norms (`fusion.py`): a float that is added to something of which the root is taken is an epsilon.

Read in torch 2.11 and 2.13: Dynamo's graphs take such a float as a tensor of float64, and read it with `item`, whose
`meta["example_value"]` is a `SymFloat`; `float()` of that adds the guard.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, Node

from irframework import fusion_state

_ADDITIONS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_ROOTS = {torch.rsqrt, torch.sqrt, "rsqrt", "sqrt", "rsqrt_", "sqrt_"}
_POWERS = {operator.pow, torch.pow, "pow"}


def specialize_epsilons(graph: Graph) -> None:
    """Put the values of epsilons into a graph of torch functions that is compiled for inference."""
    symbols = [node for node in graph.nodes if isinstance(node.meta.get("example_value"), torch.SymFloat)]
    if not symbols or torch.is_grad_enabled() or not fusion_state.current().on:
        return
    for node in symbols:
        sums = [user for user in node.users if user.target in _ADDITIONS and any(map(_is_root, user.users))]
        if sums:
            value = float(node.meta["example_value"])
            for user in sums:
                user.replace_input_with(node, value)


def _is_root(node: Node) -> bool:
    power: Any = node.args[1] if node.target in _POWERS and len(node.args) > 1 else None
    return node.target in _ROOTS or power in (0.5, -0.5)
