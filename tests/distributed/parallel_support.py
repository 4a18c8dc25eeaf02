"""Tensor-parallel programs over IR ops, groups without processes, and what the passes make of a program.

Owns the programs of these tests and how a compiled graph is looked at. What a program computes is said by the tests
that have processes.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import irframework as ir

HIDDEN, WIDTH, EPSILON = 16, 24, 1e-5
_COLLECTIVES = {
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "irframework_distributed::own_rows": "own_rows",
}


@contextmanager
def group_without_processes(size: int, rank: int = 0) -> Iterator[str]:
    """A group whose collectives give shapes and no values; yields its name."""
    import torch.testing._internal.distributed.fake_pg as fake

    torch.distributed.init_process_group("fake", store=fake.FakeStore(), rank=rank, world_size=size)
    try:
        yield torch.distributed.group.WORLD.group_name
    finally:
        torch.distributed.destroy_process_group()


@dataclass(frozen=True)
class Weights:
    """What one process holds of a layer, and its two norms."""

    norms: tuple[Tensor, Tensor]
    mixer: tuple[Tensor, Tensor]
    dense: tuple[Tensor, Tensor]
    bias: Tensor | None = None


def weights(layers: int, size: int, rank: int, *, bias: bool = False, seed: int = 0) -> list[Weights]:
    """The part of a process of random weights, which are the same for all groups that share a seed."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    found = []
    for _ in range(layers):
        norms = (1 + random(HIDDEN), 1 + random(HIDDEN))
        pairs = [(random(WIDTH, HIDDEN), random(HIDDEN, WIDTH)) for _ in range(2)]
        mixer, dense = ((up.chunk(size)[rank], down.chunk(size, 1)[rank].contiguous()) for up, down in pairs)
        offset = random(HIDDEN)
        found.append(Weights(norms, mixer, dense, offset if bias and rank == 0 else None))
    return found


def part(x: Tensor, pair: tuple[Tensor, Tensor], name: str, bias: Tensor | None = None) -> Tensor:
    """A divided layer: columns, something that works on numbers, rows, and the sum over the processes."""
    return ir.ops.all_reduce(ir.ops.linear(ir.ops.linear(x, pair[0]).tanh(), pair[1], bias), name)


def stage(
    x: Tensor, residual: Tensor | None, layers: list[Weights], name: str, last: bool = True, donate: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """The layers of a decoder, or of a stage of its pipeline: x is still to be added to the residual.

    Without a residual it is the first stage, and x a sum over the processes, as an embedding gives it.
    """
    if residual is None:
        x = ir.ops.all_reduce(x, name)
    for layer in layers:
        x, residual = added(x, residual, layer.norms[0], donate)
        x = part(x, layer.mixer, name, layer.bias)
        x, residual = added(x, residual, layer.norms[1], donate)
        x = part(x, layer.dense, name)
    return added(x, residual, layers[0].norms[0])[0] if last else (x, residual)


def added(x: Tensor, residual: Tensor | None, weight: Tensor, donate: bool = False) -> tuple[Tensor, Tensor]:
    if residual is None:
        return ir.ops.rms_norm(x, weight, EPSILON), x
    op = ir.ops.fused_add_rms_norm
    return (op.maybe_inplace if donate else op)(x, residual, weight, EPSILON)


@dataclass
class Made:
    """What became of a program."""

    counts: Counter
    report: Any
    graph: torch.fx.Graph
    result: Any


def made_of(function: Callable[..., Any], *arguments: Any, grad: bool = False, **options: Any) -> Made:
    """Compile a program without Inductor, run it, and count its collectives."""
    graphs = []

    def compiler(inference: bool) -> Callable[..., Any]:
        def run(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
            from functorch.compile import make_boxed_func

            done = ir.compiler.lower(graph, inputs, inference=inference)
            graphs.append(done.graph)
            return make_boxed_func(done.forward)

        return run

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        ir.compiler.run_pre_grad_stage(module)
        compile_it = aot_autograd(
            fw_compiler=compiler(False),
            bw_compiler=compiler(False),
            inference_compiler=compiler(True),
            keep_inference_input_mutations=True,
        )
        return compile_it(module, inputs)

    torch._dynamo.reset()
    with torch.set_grad_enabled(grad):
        result = torch.compile(function, backend=backend, fullgraph=True, **options)(*arguments)
    return Made(counted(graphs[0]), ir.last_report(), graphs[0], result)


def counted(graph: torch.fx.Graph) -> Counter:
    """How many collectives of each kind a graph has."""
    names = [node.target._schema.name for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return Counter(_COLLECTIVES[name] for name in names if name in _COLLECTIVES)
