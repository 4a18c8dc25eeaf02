"""The kernels' `.out` overloads: the same answers in given memory, refusals, and that compiled code uses them."""

from collections.abc import Callable

import pytest
import torch
from irframework_vllm_c import implementations
from torch import Tensor
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

import irframework as ir

KERNELS = torch.ops.irframework_vllm_c
X = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))
WEIGHT = torch.linspace(0.5, 1.5, 64)
CACHE = torch.randn(10, 16, generator=torch.Generator().manual_seed(1))
SCALE = torch.full((1,), 0.02)

ARGUMENTS: dict[str, Callable[[torch.dtype], tuple[object, ...]]] = {
    "rms_norm": lambda dtype: (X.to(dtype), WEIGHT.to(dtype), 1e-6),
    "silu_and_mul": lambda dtype: (X.to(dtype),),
    "gelu_and_mul": lambda dtype: (X.to(dtype), True),
    "rotary_embedding": lambda dtype: (torch.arange(6), X.to(dtype), X[:, :16].to(dtype), CACHE, 16, True),
    "rotary_embedding_query": lambda dtype: (torch.arange(6), X.to(dtype), CACHE, 16, False),
    "decode_attention": lambda dtype: (
        *(t.to(dtype) for t in (X.unflatten(1, (4, 16)), X.unflatten(1, (2, 32))[..., :16], X.unflatten(1, (2, 32)))),
        *(torch.arange(7, dtype=torch.int32), torch.ones(6, dtype=torch.int32), None, None, 0.25, None, None, None),
    ),
    "fused_add_rms_norm_functional": lambda dtype: (X.to(dtype), X.flip(0).to(dtype), WEIGHT.to(dtype), 1e-6),
    "fused_add_rms_norm_static_quant_fp8_functional": lambda dtype: (
        *(X.to(dtype), X.flip(0).to(dtype), WEIGHT.to(dtype), SCALE, 1e-6),
    ),
    "fused_add_rms_norm_dynamic_quant_fp8_functional": lambda dtype: (
        *(X.to(dtype), X.flip(0).to(dtype), WEIGHT.to(dtype), 1e-6),
    ),
    "static_quant_fp8": lambda dtype: (X.to(dtype), SCALE),
    "dynamic_quant_fp8": lambda dtype: (X.to(dtype),),
    "rms_norm_static_quant_fp8": lambda dtype: (X.to(dtype), WEIGHT.to(dtype), SCALE, 1e-6),
    "rms_norm_dynamic_quant_fp8": lambda dtype: (X.to(dtype), WEIGHT.to(dtype), 1e-6),
    "silu_and_mul_static_quant_fp8": lambda dtype: (X.to(dtype), SCALE),
    "silu_and_mul_dynamic_quant_fp8": lambda dtype: (X.to(dtype),),
}


def test_every_functional_kernel_is_tested_here() -> None:
    assert set(ARGUMENTS) == set(implementations.FUNCTIONAL_KERNELS)


@pytest.fixture(autouse=True)
def _loaded() -> None:
    assert implementations.kernels_load() is True


def outputs_like(result: Tensor | tuple[Tensor, ...]) -> dict[str, Tensor]:
    if isinstance(result, Tensor):
        return {"out": torch.full_like(result, float("nan"))}
    return {f"out{index}": torch.full_like(each, float("nan")) for index, each in enumerate(result)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_result_is_in_the_given_memory_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    args = ARGUMENTS[name](dtype)
    want = getattr(KERNELS, name).default(*args)
    given = outputs_like(want)
    getattr(KERNELS, name).out(*args, **given)
    for output, right in zip(given.values(), (want,) if isinstance(want, Tensor) else want, strict=True):
        assert torch.equal(output.view(torch.uint8), right.view(torch.uint8))


@pytest.mark.parametrize(
    "wrong",
    [lambda y: y[:-1], lambda y: y.double(), lambda y: y.new_empty((*y.shape, 2))[..., 0]],
    ids=["shape", "dtype", "layout"],
)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_memory_that_does_not_fit_is_refused(name: str, wrong: Callable[[Tensor], Tensor]) -> None:
    args = ARGUMENTS[name](torch.float32)
    given = outputs_like(getattr(KERNELS, name).default(*args))
    last = list(given)[-1]
    given[last] = wrong(given[last])
    with pytest.raises(RuntimeError, match=f"{name}: {last} must be contiguous"):
        getattr(KERNELS, name).out(*args, **given)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_code_writes_to_planned_memory(dynamic: bool) -> None:
    def block(x: Tensor, key: Tensor, weight: Tensor, positions: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        y = ir.ops.rms_norm(x, weight, 1e-6)
        gated = torch.cat((ir.ops.silu_and_mul(y), ir.ops.gelu_and_mul(y, "tanh")), dim=-1)
        codes = (ir.ops.static_quant_fp8(y, scale), *ir.ops.rms_norm_dynamic_quant_fp8(x, weight, 1e-6))
        return *ir.ops.rotary_embedding(positions, gated, key, CACHE, 16), *(each.float() for each in codes)

    args = (X, X[:, :16].contiguous(), WEIGHT, torch.arange(6), SCALE)
    torch._dynamo.reset()
    quantising = ("static_quant_fp8", "rms_norm_dynamic_quant_fp8")
    names = ("rms_norm", "silu_and_mul", "gelu_and_mul", "rotary_embedding", *quantising)
    with torch.no_grad(), config.patch(fx_graph_cache=False), ir.priority(dict.fromkeys(names, "vllm_c")):
        got, code = run_and_get_code(torch.compile(block, backend="irframework", dynamic=dynamic), *args)
        torch.testing.assert_close(got, block(*args))
    for name in names:
        assert f"irframework_vllm_c.{name}.out(" in code[0]
