"""The platform's own compiler, in the place of Inductor, which has no code generator for this device."""

from collections.abc import Callable, Sequence
from typing import Any

from functorch.compile import make_boxed_func
from torch.fx import GraphModule, Interpreter

programs: list["Program"] = []


class Program(Interpreter):
    """A list of launches for the device. A real compiler generates code for it here.

    Attributes:
        listing: The launches, in their order.
    """

    def __init__(self, gm: GraphModule) -> None:
        super().__init__(gm)
        self.listing = [str(node.target) for node in gm.graph.nodes if node.op == "call_function"]


def compile_graph(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """`gm` holds torch ops and kernels only: irframework has lowered its ops."""
    program = Program(gm)
    programs.append(program)
    return make_boxed_func(program.run)
