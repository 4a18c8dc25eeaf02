"""Programs as graphs, which are searched for fused ops by themselves: no compiler, no Inductor."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

from irframework.compiler.fusion import fuse
from irframework.compiler.report import Report

X = torch.linspace(-2, 2, 32).reshape(4, 8)
Y = torch.linspace(1, 3, 32).reshape(4, 8).flip(0)
W = torch.linspace(0.5, 2, 8)


def traced(program: Any, *inputs: Any) -> GraphModule:
    """The graph as AOT autograd makes it for inference: decomposed, and without what nobody reads."""
    with torch.no_grad():
        module = make_fx(program, tracing_mode="fake", decomposition_table=select_decomp_table())(*inputs)
    module.graph.eliminate_dead_code()
    return module


def fused_in(module: GraphModule) -> Report:
    """Search a graph, and see that it is still one."""
    report = Report()
    with torch.no_grad():
        fuse(module.graph, report)
    module.graph.lint()
    module.recompile()
    return report


def searched(program: Any, *inputs: Any) -> Report:
    """Search the graph of a program for fused ops, and see that it still computes the same."""
    module = traced(program, *inputs)
    report = fused_in(module)
    with torch.no_grad():
        torch.testing.assert_close(module(*copies(inputs)), program(*copies(inputs)), equal_nan=True)
    return report


def copies(values: Any) -> list[Any]:
    return [value.clone() if isinstance(value, Tensor) else value for value in values]


def calls_of(module: GraphModule, op: Any) -> list[Node]:
    """The nodes of a graph that call an op."""
    return [node for node in module.graph.nodes if node.target is op.torch_op]


_KINDS = {"factor": float, "other": float, "count": int, "mode": str, "whole": bool}


def body_of(function: Any, outputs: int = 1) -> Any:
    """A function without annotations as the body of an op: all but the parameters with these names are tensors."""
    kinds: dict[str, Any] = {name: _KINDS.get(name, Tensor) for name in signature(function).parameters}
    function.__name__ = "body"
    function.__annotations__ = {**kinds, "return": Tensor if outputs == 1 else tuple[(Tensor,) * outputs]}
    return function
