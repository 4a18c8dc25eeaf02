"""The kernels of the further ops on a CUDA device, at sizes of models: values against float64, codes bit for bit."""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("only_triton"),
]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LENGTHS = (1, 17, 2048, 2561, 14336, 16387)
EPSILON = 1e-5


@pytest.fixture
def only_triton():
    names = [name for name in ir.ops.__all__ if "triton" in getattr(ir.ops, name).impls]
    with ir.priority(dict.fromkeys(names, "triton")):
        yield


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to("cuda", dtype)


def wide(value: object) -> object:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def on_cpu(value: object) -> object:
    return value.cpu() if isinstance(value, Tensor) else value


def assert_near(got: Tensor, exact: Tensor) -> None:
    """Within two roundings of 16-bit dtypes; in float32, within what approximate exponentials and roots cost."""
    info = torch.finfo(got.dtype)
    allowed = (8 if got.dtype == torch.float32 else 2) * info.eps * exact.abs() + 4e-6
    error = (got.double() - exact).abs()
    assert got.shape == exact.shape
    assert (error <= allowed).all(), f"{(error / allowed).max().item():.2f} times what is allowed"


def assert_near_native(name: str, *arguments: object) -> None:
    op = getattr(ir.ops, name)
    got, exact = op(*arguments), op.native(*map(wide, arguments))
    for one, other in zip(*((t,) if isinstance(t, Tensor) else t for t in (got, exact)), strict=True):
        assert_near(one, other)


def alphas() -> tuple[Tensor, Tensor]:
    return torch.full((1,), 0.2, device="cuda"), torch.full((), -1.05, device="cuda")


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_activations_are_near_float64(dtype, length):
    x = 2 * random(5, 2 * length, dtype=dtype)
    for name in ("gelu_new", "gelu_fast", "quick_gelu", "relu2", "mul_and_silu"):
        assert_near_native(name, x)
    for part in (x[:, :length], x[:, length:]):
        assert_near_native("xielu", part, *alphas())
    for more in ((), (1.0, 2.0)):
        assert_near_native("swigluoai_and_mul", x, *more)
    for threshold in (0.0, 0.01, -0.5):
        assert_near_native("fatrelu_and_mul", x, threshold)


CALLS = {
    "gelu_new": lambda: (random(7, 256),),
    "relu2": lambda: (random(7, 256),),
    "xielu": lambda: (random(7, 256), *alphas()),
    "mul_and_silu": lambda: (random(7, 256),),
    "swigluoai_and_mul": lambda: (random(7, 256),),
    "fatrelu_and_mul": lambda: (random(7, 256), 0.01),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CALLS)
def test_compiled_calls_give_what_eager_ones_give(name, dynamic):
    op, arguments = getattr(ir.ops, name), CALLS[name]()
    torch._dynamo.reset()
    if dynamic:
        torch._dynamo.mark_dynamic(arguments[0], 0)
    compiled = torch.compile(lambda *given: op(*given), backend="irframework", fullgraph=True)
    outputs = compiled(*arguments), op(*arguments)
    for got, expected in zip(*((t,) if isinstance(t, Tensor) else t for t in outputs), strict=True):
        assert got.dtype == expected.dtype
        assert torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
