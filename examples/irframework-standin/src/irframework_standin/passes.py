"""A pass of the platform over graphs that still hold IR ops."""

from collections import Counter
from typing import ClassVar

from torch.fx import Graph


class CountOps:
    """Counts IR ops. A pass is called with each graph, and may rewrite it in place."""

    name = "count_ops"
    seen: ClassVar[Counter[str]] = Counter()

    def __call__(self, graph: Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function" and getattr(node.target, "namespace", "") == "irframework":
                self.seen[node.target._opname] += 1

    def uuid(self) -> str:
        """Part of the compile cache's key: another answer whenever the pass would do something else."""
        return "count_ops 1"
