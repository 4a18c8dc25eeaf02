"""The kernels of the ops that models write out, run by Triton's interpreter on the CPU."""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.interpreter

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
GATES = (("silu_mul", ()), ("gelu_mul", ()), ("gelu_mul", ("tanh",)))


@pytest.fixture
def kernels():
    from irframework_triton_kernels import written_out

    return written_out


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def assert_near(got: Tensor, name: str, *arguments, size: Tensor | None = None) -> None:
    """Within four units of the dtype's precision (the interpreter truncates), of `size` where products are added."""
    wide = [a.double() if isinstance(a, Tensor) else a for a in arguments]
    exact = getattr(ir.ops, name).native(*wide)
    assert got.shape == exact.shape
    assert got.dtype == arguments[0].dtype
    assert got.is_contiguous()
    size = exact.abs() if size is None else size
    assert ((got.double() - exact).abs() <= 4 * torch.finfo(got.dtype).eps * size + 4e-6).all()


# --- gates -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("name", "words"), GATES)
def test_gates_multiply_what_is_another_tensor(kernels, name, words, dtype):
    gate, up = random(5, 130, dtype=dtype), random(5, 130, dtype=dtype, seed=2)
    assert_near(getattr(kernels, name)(gate, up, *words), name, gate, up, *words)


@pytest.mark.parametrize("shape", [(8,), (2, 3, 10), (0, 8), (3, 0), (1, 2100)])
def test_any_shape_is_taken(kernels, shape):
    gate, up = random(*shape), random(*shape, seed=2)
    assert_near(kernels.silu_mul(gate, up), "silu_mul", gate, up)


def test_gate_and_up_have_strides_of_their_own(kernels):
    gate, up = random(2, 5, 100)[:, :, 7:71], random(2, 5, 64, seed=2)[:, :1].expand(2, 5, 64)
    assert_near(kernels.silu_mul(gate, up), "silu_mul", gate, up)
    assert_near(kernels.silu_mul(up, gate), "silu_mul", up, gate)


def test_the_gate_is_rounded_before_it_multiplies(kernels):
    gate, up = torch.linspace(-4, 4, 256).bfloat16(), random(256, dtype=torch.bfloat16)
    product = kernels.silu_mul(gate, torch.ones_like(gate)).float() * up.float()
    truncated = (product.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()
    got = kernels.silu_mul(gate, up)
    assert torch.equal(got, truncated) or torch.equal(got, product.bfloat16())


# --- rotary ----------------------------------------------------------------------------------------------------------


def angles(batch: int, tokens: int, size: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    at = random(batch, tokens, size)  # no two alike, also in the halves
    return at.cos().to(dtype), at.sin().to(dtype)


def assert_turned(got: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    assert_near(
        got, "apply_rotary_pos_emb", x, cos, sin, size=x.double().abs() + x.double().abs().roll(x.shape[-1] // 2, -1)
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("angles_dtype", FLOATS)
def test_heads_are_turned(kernels, dtype, angles_dtype):
    x, (cos, sin) = random(2, 3, 5, 32, dtype=dtype), angles(1, 3, 32, angles_dtype)
    assert_turned(kernels.apply_rotary_pos_emb(x, cos, sin), x, cos, sin)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "shape", [(2, 1, 1, 2), (2, 3, 37, 128), (2, 2, 3, 24), (2, 0, 3, 8), (0, 2, 3, 8), (2, 3, 0, 8)]
)
def test_any_number_of_tokens_heads_and_elements_is_taken(kernels, shape, batch):
    x, (cos, sin) = random(*shape), angles(batch if shape[0] else 0, shape[1], shape[3])
    assert_turned(kernels.apply_rotary_pos_emb(x, cos, sin), x, cos, sin)


def test_heads_of_a_joint_projection_are_read_where_they_are(kernels):
    joint = random(2, 5, 8 * 16)
    for x in (joint[..., :64].unflatten(-1, (4, 16)), joint[..., 64:96].unflatten(-1, (2, 16))):
        cos, sin = angles(1, 5, 16)
        assert_turned(kernels.apply_rotary_pos_emb(x, cos, sin), x, cos, sin)


def test_heads_that_stand_before_the_tokens_are_read_where_they_are(kernels):
    x, (cos, sin) = random(2, 4, 5, 16).transpose(1, 2), angles(2, 5, 16)
    assert_turned(kernels.apply_rotary_pos_emb(x, cos, sin), x, cos, sin)


def test_angles_have_strides_of_their_own(kernels):
    x, (cos, sin) = random(2, 5, 3, 16), angles(5, 2, 16)
    cos, sin = cos.transpose(0, 1), torch.cat((sin, sin), -1)[..., :16].transpose(0, 1)
    assert_turned(kernels.apply_rotary_pos_emb(x, cos, sin), x, cos, sin)
    alone = cos[:1].expand(2, 5, 16)
    assert_turned(kernels.apply_rotary_pos_emb(x, alone, sin), x, alone, sin)


def test_products_are_rounded_before_they_are_added(kernels):
    x = torch.tensor([1.0078125, -1.0], dtype=torch.bfloat16).reshape(1, 1, 1, 2)
    cos = torch.tensor([1.0078125, 1.0], dtype=torch.bfloat16).reshape(1, 1, 2)
    got = kernels.apply_rotary_pos_emb(x, cos, torch.full_like(cos, -1.015625))
    assert got[..., 0].item() == 0.0


@pytest.mark.parametrize(("batch", "tokens"), [(2, 4), (3, 5), (1, 1)])
def test_angles_for_other_tokens_are_an_error(kernels, batch, tokens):
    with pytest.raises(ValueError, match="does not fit x of shape"):
        kernels.apply_rotary_pos_emb(random(2, 5, 3, 16), *angles(batch, tokens, 16))


def test_the_torch_ops_do_what_their_schemas_say(kernels):
    kernels.launches()
    ops, x = torch.ops.irframework_triton_kernels, random(2, 3, 2, 8)
    torch.library.opcheck(ops.gated_apart.default, (x, x + 1, "silu"), test_utils="test_schema")
    torch.library.opcheck(ops.apply_rotary_pos_emb.default, (x, *angles(1, 3, 8)), test_utils="test_schema")
