"""Which calls compiled code on CPUs gives to the kernels unasked."""

from typing import Any

import pytest
import torch
from irframework_vllm_c.graphs import COMPILED_WHERE, MANY
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import irframework as ir
from irframework.dispatch import resolve

WIDTH = 64
OPS = sorted(COMPILED_WHERE)
LEFT = ("silu_and_mul", "silu_mul")  # whatever their sizes


def arguments(name: str, rows: int) -> tuple[Any, ...]:
    x, weight = torch.ones(rows, WIDTH), torch.ones(WIDTH)
    return {
        "rms_norm": (x, weight, 1e-6),
        "gemma_rms_norm": (x, weight, 1e-6),
        "fused_add_rms_norm": (x, x.clone(), weight, 1e-6),
        "fused_add_gemma_rms_norm": (x, x.clone(), weight, 1e-6),
        "silu_and_mul": (x,),
        "gelu_and_mul": (x,),
        "silu_mul": (x, x.clone()),
        "gelu_mul": (x, x.clone()),
        "rotary_embedding": (torch.arange(rows), x, x.clone(), torch.ones(rows, 32), 32),
        "apply_rotary_pos_emb": (x.view(1, rows, 2, 32), torch.ones(1, rows, 32), torch.ones(1, rows, 32)),
    }[name]


def chosen(name: str, args: tuple[Any, ...], mode: str = "inductor") -> str:
    op: ir.IrOp = getattr(ir.ops, name)
    return resolve(op, op.bind(args, {}), mode).provider


@pytest.mark.parametrize("name", OPS)
def test_few_numbers_are_left_to_inductor(name: str) -> None:
    assert chosen(name, arguments(name, MANY // WIDTH - 1)) == "native"


@pytest.mark.parametrize("name", [name for name in OPS if name not in LEFT])
def test_many_numbers_are_given_to_the_kernels(name: str) -> None:
    assert chosen(name, arguments(name, MANY // WIDTH)) == "vllm_c"


@pytest.mark.parametrize("name", OPS)
def test_eager_calls_have_the_kernels_whatever_the_size(name: str) -> None:
    assert chosen(name, arguments(name, 1), "eager") == "vllm_c"


@pytest.mark.parametrize("name", OPS)
def test_the_reason_is_told(name: str) -> None:
    op: ir.IrOp = getattr(ir.ops, name)
    reasons = {c.provider: c.reason for c in resolve(op, op.bind(arguments(name, 1), {}), "inductor").candidates}
    assert reasons["vllm_c"] is not None
    assert "Inductor's own loop " in reasons["vllm_c"]


@pytest.mark.parametrize("name", LEFT)
def test_gates_whose_kernels_gain_nothing_are_always_left_to_inductor(name: str) -> None:
    assert chosen(name, arguments(name, MANY)) == "native"


def test_a_number_of_rows_that_is_not_known_counts_as_large() -> None:
    environment = ShapeEnv()
    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC, DimDynamic.STATIC])
    x: Tensor = FakeTensorMode(shape_env=environment).from_tensor(
        torch.ones(3, WIDTH), source=ConstantSource("x"), symbolic_context=context
    )
    assert chosen("gelu_and_mul", (x,)) == "vllm_c"
    assert not environment.guards


class Layer(torch.nn.Module):
    """A decoder layer without its attention, as models of transformers write it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))
        self.gate, self.up, self.down = (torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def norm(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.down(self.norm(x))
        z = self.norm(y)
        return y + self.down(torch.nn.functional.silu(self.gate(z)) * self.up(z))


def made_by(backend: str, model: torch.nn.Module, x: Tensor) -> str:
    """The code that a backend makes, without the number of the graph."""
    torch._dynamo.reset()
    with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):
        _, (code,) = run_and_get_code(torch.compile(model, backend=backend, dynamic=False), x)
    return code.partition("\n")[2]


def test_a_step_of_a_plain_model_is_the_code_that_stock_compile_makes() -> None:
    model, x = Layer(), torch.ones(1, 1, WIDTH)
    with ir.priority(dict.fromkeys(OPS, "native")):  # another test may have put the passes into stock Inductor
        stock = made_by("inductor", model, x)
    assert made_by("irframework", model, x) == stock


def test_a_prompt_of_a_plain_model_is_not() -> None:
    model, x = Layer(), torch.ones(1, MANY // WIDTH, WIDTH)
    assert "irframework_vllm_c.fused_add_rms_norm" in made_by("irframework", model, x)


@pytest.mark.parametrize("name", ["gelu_and_mul", "silu_and_mul"])
def test_other_devices_than_the_cpu_are_not_asked_about(name: str) -> None:
    assert COMPILED_WHERE[name](torch.ones(3, WIDTH, device="meta")) is True
