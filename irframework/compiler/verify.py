"""Checks what the pipeline promises about a lowered graph.

Owns the last pass. Changes nothing; a graph that breaks a rule is an error that names op, node and reason.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from irframework.compiler.aliasing import Aliasing
from irframework.compiler.clones import GRANTED
from irframework.compiler.materialize import KERNEL
from irframework.compiler.report import location
from irframework.errors import VerifyError
from irframework.torch_ops import NAMESPACE, op_of


def verify(graph: Graph) -> None:
    """Check a graph after lowering.

    Raises:
        VerifyError: An IR op is left, the graph is malformed, or a kernel overwrites what belongs to the caller.
    """
    for node in graph.nodes:
        if node.op == "call_function" and getattr(node.target, "namespace", None) == NAMESPACE:
            raise VerifyError(f"{node.target} (node {node.name}) was not lowered: {_why_left(node)}{location(node)}.")
    try:
        graph.lint()
    except Exception as error:
        raise VerifyError(f"The lowered graph is malformed: {error}") from error
    kernels = [node for node in graph.nodes if KERNEL in node.meta]
    if not kernels:
        return
    aliasing = Aliasing(graph)
    for kernel in kernels:
        for written in aliasing.effects[kernel].writes:
            for root in aliasing.roots(written):
                if root.op in ("placeholder", "get_attr") and GRANTED not in root.meta:
                    op, provider = kernel.meta[KERNEL]
                    raise VerifyError(
                        f"Implementation {provider!r} of op {op!r} (node {kernel.name}) would overwrite "
                        f"{written.name}, which is memory of {_what(root)} that nobody gave away{location(kernel)}. "
                        "This is a fault of irframework: please report it with this graph; "
                        "IRFRAMEWORK_DISABLE_PASSES=remove_copies avoids it."
                    )


def _why_left(node: Node) -> str:
    found = op_of(node.target)
    if found is None:
        return (
            "no op of that name is declared in this process; import the module, or install the plugin, that declares it"
        )
    if "val" not in node.meta:
        return "it has no fake value, so nothing could be decided; a pass that makes nodes must give them meta['val']"
    return (
        f"the pass that lowers op {found[0].name!r} did not meet it; a pass that runs after lowering must not bring "
        "in IR ops"
    )


def _what(root: Node) -> str:
    return f"the input {root.name}" if root.op == "placeholder" else f"the constant {root.target}"
