"""Checks that are the same for every op: exactness to roundings, derivatives, and compiled calls.

Owns how results are compared and compiled. Does not own what an op means: its own tests do.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close

import irframework as ir

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def close(got: Tensor, exact: Tensor, dtype: torch.dtype, ulps: float = 2.0) -> None:
    """Compare with an exact result: relative to the row's size, within some roundings of the dtype."""
    assert got.dtype == dtype
    assert got.shape == exact.shape
    if got.numel():
        scale = exact.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        assert ((got.double() - exact).abs() / scale).max() <= ulps * torch.finfo(dtype).eps


def f64(*shape: int) -> Tensor:
    """Random numbers that want a gradient."""
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def check_derivatives(op: Any, arguments: Sequence[Any]) -> None:
    """First and second derivatives against finite differences."""
    assert gradcheck(op, arguments)
    assert gradgradcheck(op, arguments, fast_mode=True)


def _lowered(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """Compile without Inductor: what `ir.compiler.lower` makes is run as it is."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def run(graph: torch.fx.GraphModule, arguments: list[Any]) -> Callable[..., Any]:
        return make_boxed_func(ir.compiler.lower(graph, arguments).forward)

    return aot_autograd(fw_compiler=run)(module, inputs)


def check_compiled(names: Sequence[str]) -> None:
    """One graph with all calls of some ops' input generators serves any number of rows, and gives what eager gives."""
    few, more = (_all_calls(names, rows) for rows in (5, 9))
    inputs, others = _tensors(few), _tensors(more)
    everything = _in_one_function(few)
    torch._dynamo.reset()
    function = torch.compile(everything, backend=_lowered, fullgraph=True)
    for tensor, other in zip(inputs, others, strict=True):
        for dimension in range(tensor.dim()):
            if tensor.shape[dimension] != other.shape[dimension]:
                torch._dynamo.mark_dynamic(tensor, dimension)
    with torch.no_grad():
        assert_close(function(*inputs), everything(*inputs))
        with torch._dynamo.config.patch(error_on_recompile=True):
            assert_close(function(*others), everything(*others))


def check_compiled_gradients(names: Sequence[str]) -> None:
    """Gradients of the usual calls of some ops through a graph are those of eager mode."""
    calls = [(name, getattr(ir.ops, name).generate_inputs(shape=(3, 16), dtype=torch.float64)) for name in names]
    tensors = [t.requires_grad_() if t.is_floating_point() else t for t in _tensors(calls)]

    everything = _in_one_function(calls)

    def total(*tensors: Tensor) -> Tensor:
        parts = [p for made in everything(*tensors) for p in (made if isinstance(made, tuple) else (made,))]
        return torch.stack([part.sin().sum() for part in parts]).sum()

    torch._dynamo.reset()
    wanted = [t for t in tensors if t.requires_grad]
    compiled = torch.compile(total, backend=_lowered, fullgraph=True)
    assert_close(torch.autograd.grad(compiled(*tensors), wanted), torch.autograd.grad(total(*tensors), wanted))


def _in_one_function(calls: Sequence[tuple[str, tuple[Any, ...]]]) -> Callable[..., list[Any]]:
    """A function of all tensors that makes all calls; it holds the other arguments only."""
    held = [
        (getattr(ir.ops, name), [Tensor if isinstance(a, Tensor) else a for a in arguments])
        for name, arguments in calls
    ]

    def everything(*tensors: Tensor) -> list[Any]:
        rest = list(reversed(tensors))
        return [op(*(rest.pop() if a is Tensor else a for a in arguments)) for op, arguments in held]

    return everything


def _all_calls(names: Sequence[str], rows: int) -> list[tuple[str, tuple[Any, ...]]]:
    torch.manual_seed(rows)
    calls = []
    for name in names:
        made = getattr(ir.ops, name).input_generator(shape=(rows, 64), dtype=torch.float32, device="cpu")
        calls += [(name, arguments) for arguments in ([made] if isinstance(made, tuple) else made)]
    return calls


def _tensors(calls: Sequence[tuple[str, tuple[Any, ...]]]) -> list[Tensor]:
    return [argument for _, arguments in calls for argument in arguments if isinstance(argument, Tensor)]
