"""A backend that lowers graphs and runs them without Inductor, and small shorthands."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import irframework as ir


def lowered(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile without Inductor: what `ir.compiler.lower` makes is run as it is."""

    def compiler(inference: bool) -> Callable[..., Any]:
        def run(graph: torch.fx.GraphModule, arguments: list[Any]) -> Callable[..., Any]:
            from functorch.compile import make_boxed_func

            return make_boxed_func(ir.compiler.lower(graph, arguments, inference=inference).forward)

        return run

    ir.compiler.run_pre_grad_stage(module)
    backend = aot_autograd(
        fw_compiler=compiler(False),
        bw_compiler=compiler(False),
        inference_compiler=compiler(True),
        keep_inference_input_mutations=True,
    )
    return backend(module, inputs)


@dataclass
class Kernels:
    """An op `add(x, x_residual, weight) -> (y, r)` and a torch op that overwrites x and x_residual with its result."""

    op: Any
    kernel: Any
    library: torch.library.Library

    def priority(self, *providers: str) -> Any:
        return ir.priority({self.op.name: list(providers)})


def fused_add(x: Tensor, x_residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    r = x + x_residual
    return r * weight, r


def tensors(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape) for shape in shapes]


def run(function: Callable[..., Any], *arguments: Tensor, backend: Any = lowered, **options: Any) -> Any:
    """Compile and run without gradients."""
    with torch.no_grad():
        return torch.compile(function, backend=backend, **options)(*arguments)


def report() -> Any:
    found = ir.last_report()
    assert found is not None
    return found
