"""Programs as graphs, which are searched for fused ops by themselves: no compiler, no Inductor."""

import itertools
import os
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import select_decomp_table
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

import irframework as ir
from irframework.compiler.fusion import fuse
from irframework.compiler.report import Report, last_report

_numbers = itertools.count()
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


class Family:
    """Two ops, `half` and `shift`, and a fused op for one behind the other; provider `k` takes the fused op."""

    def __init__(self, provider: bool = True, supports_args=None, fuse=True) -> None:
        tag = f"{os.getpid()}_{next(_numbers)}"

        @ir.register_op(name=f"half_{tag}")
        def half(x: Tensor, factor: float = 0.5) -> Tensor:
            return x * factor

        @ir.register_op(name=f"shift_{tag}")
        def shift(x: Tensor, by: Tensor) -> Tensor:
            return x + by

        @ir.register_op(name=f"half_shift_{tag}", fuse=fuse)
        def half_shift(x: Tensor, factor: float, by: Tensor) -> Tensor:
            return shift(half(x, factor), by)

        @ir.register_op(name=f"add_half_shift_{tag}", fuse=True)
        def add_half_shift(x: Tensor, x_residual: Tensor, factor: float, by: Tensor) -> tuple[Tensor, Tensor]:
            total = x + x_residual
            return shift(half(total, factor), by), total

        self.half, self.shift, self.half_shift, self.add_half_shift = half, shift, half_shift, add_half_shift
        if provider:
            half_shift.register_impl("k", supports_args=supports_args)(half_shift.native)
            add_half_shift.register_impl("k")(add_half_shift.native)

    def fused(self, program, *inputs) -> Report:
        """Lower a program through the passes, compare it with eager, and return the report."""
        wanted_ops = [op for op in (self.half_shift, self.add_half_shift) if "k" in op.impls]
        with torch.no_grad(), ir.priority({op.name: ["k"] for op in wanted_ops}):
            got = ir.compiler.lower(traced(program, *inputs), inference=True)(*copies(inputs))
        with torch.no_grad():
            wanted = program(*copies(inputs))
        torch.testing.assert_close(got, wanted)
        report = last_report()
        assert report is not None
        return report

    def counts(self, report: Report) -> tuple[int, int]:
        return report.fusions.get(self.half_shift.name, 0), report.fusions.get(self.add_half_shift.name, 0)
