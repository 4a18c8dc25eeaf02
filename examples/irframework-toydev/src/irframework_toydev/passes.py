"""A pass of the platform over graphs that still hold IR ops.

After lowering, kernels overwrite what the graph made: a pass there must not put one tensor in the place of another.
"""

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node


class DropUnitFactors:
    """Drops multiplications of floating-point tensors by the number 1. A pass may rewrite the graph in place."""

    name = "drop_unit_factors"
    dropped = 0

    def __call__(self, graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            x, factor = node.args
            one = isinstance(factor, (int, float)) and factor == 1 and x.meta["val"].is_floating_point()
            if one and all(map(_computes, node.users)):
                node.replace_all_uses_with(x)
                graph.erase_node(node)
                type(self).dropped += 1

    def uuid(self) -> str:
        """Part of the compile cache's key: another answer whenever the pass would do something else."""
        return "drop_unit_factors 1"


def _computes(reader: Node) -> bool:
    """Whether a node makes a tensor of its own. What a graph returns must not become memory of its input."""
    target = reader.target
    return isinstance(target, OpOverload) and all(result.alias_info is None for result in target._schema.returns)
