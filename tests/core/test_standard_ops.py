"""The standard ops: numerics against float64 written out by hand, gradients, shapes, and bad arguments."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck, gradgradcheck

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("seeded", "natively")

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
SHAPES = ((1, 1), (3, 3), (2, 3, 96), (5, 33), (0, 64), (4, 0, 8), (7,))
EPSILON = 1e-5


@pytest.fixture
def natively():
    with ir.priority(dict.fromkeys(ir.ops.__all__, "native")):
        yield


def close(got, exact, dtype, ulps=2.0):
    """Compare with an exact result: relative to the row's size, within some roundings of the dtype."""
    assert got.dtype == dtype
    assert got.shape == exact.shape
    if got.numel():
        scale = exact.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        assert ((got.double() - exact).abs() / scale).max() <= ulps * torch.finfo(dtype).eps


def exact_norm(x, weight, epsilon, size=None):
    rows = x.double().reshape(-1, x.shape[-1])
    out = torch.empty_like(rows)
    for index, row in enumerate(rows):
        part = row[:size]
        out[index] = row / math.sqrt(sum(float(v) ** 2 for v in part) / len(part) + epsilon) if len(part) else row
    return (out if weight is None else out * weight.double()).reshape(x.shape)


# --- norms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_is_exact_to_a_rounding(dtype, shape, weighted):
    x = torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1]).to(dtype) if weighted else None
    close(
        ir.ops.rms_norm(x, weight, EPSILON),
        exact_norm(x, weight, EPSILON),
        dtype,
        ulps=8 if dtype == torch.float64 else 3,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rms_norm_is_torchs(dtype):
    x, weight = torch.randn(4, 32, dtype=dtype), torch.randn(32, dtype=dtype)
    torch.testing.assert_close(ir.ops.rms_norm(x, weight, EPSILON), F.rms_norm(x, (32,), weight, EPSILON))


def test_rms_norm_in_half_precision_rounds_as_llama_does():
    x, weight = torch.randn(4, 32).bfloat16(), torch.randn(32).bfloat16()
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPSILON)
    assert torch.equal(ir.ops.rms_norm(x, weight, EPSILON), weight * h.to(torch.bfloat16))


def test_rms_norm_with_a_float32_weight_is_gemmas():
    x, weight = torch.randn(4, 32).bfloat16(), torch.randn(32).bfloat16()
    h = x.float()
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPSILON)
    expected = (h * (1.0 + weight.float())).to(torch.bfloat16)
    assert torch.equal(ir.ops.rms_norm(x, weight.float() + 1, EPSILON), expected)


@pytest.mark.parametrize("size", [1, 5, 16])
def test_variance_size_takes_the_mean_over_the_start_of_a_row(size):
    x, weight = torch.randn(3, 16), torch.randn(16)
    close(ir.ops.rms_norm(x, weight, EPSILON, size), exact_norm(x, weight, EPSILON, size), torch.float32, ulps=4)


def test_variance_size_of_the_whole_row_is_none():
    x = torch.randn(3, 16)
    assert torch.equal(ir.ops.rms_norm(x, None, EPSILON, 16), ir.ops.rms_norm(x, None, EPSILON))


@pytest.mark.parametrize("size", [0, -1, 17])
@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm"])
def test_variance_size_outside_the_row_is_an_error(name, size):
    x = torch.randn(3, 16)
    args = (x, None, EPSILON) if name == "rms_norm" else (x, x, None, EPSILON)
    with pytest.raises(errors.ArgumentError, match=f"{name}.*variance_size={size}.*16"):
        getattr(ir.ops, name)(*args, variance_size=size)


def test_large_values_in_half_precision_do_not_overflow():
    x = torch.full((2, 64), 60000.0).half()
    assert torch.equal(ir.ops.rms_norm(x, None, EPSILON), torch.ones(2, 64).half())


def test_rows_of_zeros_stay_zero():
    assert torch.equal(ir.ops.rms_norm(torch.zeros(2, 8), None, EPSILON), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_fused_add_rms_norm_is_the_sum_and_its_norm_bit_for_bit(dtype, shape):
    x, r, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.randn(shape[-1]).to(dtype)
    for form in (ir.ops.fused_add_rms_norm, ir.ops.fused_add_rms_norm.maybe_inplace):
        y, total = form(x, r, weight, EPSILON)
        assert torch.equal(total, x + r)
        assert torch.equal(y, ir.ops.rms_norm(x + r, weight, EPSILON))


def test_mixed_dtypes_of_weight_and_rows_choose_a_provider_that_takes_them():
    def fused(x, x_residual, weight, epsilon, variance_size=None):
        raise AssertionError("this kernel would misread a float32 weight")

    op = ir.ops.fused_add_rms_norm
    op.register_impl("needs_same_dtype", supports_args=ir.supports(same_dtype=("x", "x_residual", "weight")))(fused)
    try:
        x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64)
        with ir.priority(fused_add_rms_norm="needs_same_dtype,native"):
            for _ in range(3):
                got = op(x, x, weight, EPSILON)
                assert all(map(torch.equal, got, op.native(x, x, weight, EPSILON)))
    finally:
        op.unregister_impl("needs_same_dtype")


# --- gated activations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 2), (3, 6), (2, 3, 96), (0, 64), (8,)])
def test_silu_and_mul_is_exact_to_roundings(dtype, shape):
    x = torch.randn(shape).to(dtype)
    gate, up = x.double().chunk(2, -1)
    exact = gate / (1 + torch.exp(-gate)) * up
    close(ir.ops.silu_and_mul(x), exact, dtype, ulps=3)
    half = shape[-1] // 2
    assert torch.equal(ir.ops.silu_and_mul(x), F.silu(x[..., :half]) * x[..., half:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_and_mul_is_exact_to_roundings(dtype, approximate):
    x = torch.randn(5, 66).to(dtype)
    gate, up = x.double().chunk(2, -1)
    if approximate == "none":
        exact = gate * 0.5 * (1 + torch.erf(gate / math.sqrt(2))) * up
    else:
        exact = gate * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    close(ir.ops.gelu_and_mul(x, approximate), exact, dtype, ulps=4)
    assert torch.equal(ir.ops.gelu_and_mul(x, approximate), F.gelu(x[:, :33], approximate=approximate) * x[:, 33:])


def test_gelu_and_mul_knows_two_approximations():
    assert torch.equal(ir.ops.gelu_and_mul(torch.ones(2)), ir.ops.gelu_and_mul(torch.ones(2), "none"))
    with pytest.raises(errors.ArgumentError, match="'none' or 'tanh', got 'quick'"):
        ir.ops.gelu_and_mul(torch.ones(2), "quick")


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_and_mul"])
@pytest.mark.parametrize("shape", [(3, 5), (1,), ()])
def test_odd_rows_cannot_be_halved(name, shape):
    with pytest.raises(errors.ArgumentError, match=f"{name}.*even"):
        getattr(ir.ops, name)(torch.randn(shape))


# --- rotary embedding ------------------------------------------------------------------------------------------------


def cache_for(rotary_dim, dtype=torch.float64, length=32):
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


def exact_rotary(positions, x, cache, head_size, neox):
    """Turn every pair of elements of every head by its angle, one at a time."""
    if not x.numel():
        return x.double()
    heads = x.double().reshape(positions.numel(), -1, head_size).clone()
    half = cache.shape[-1] // 2
    for token, position in enumerate(positions.reshape(-1).tolist()):
        for head in heads[token]:
            before = head.clone()
            for pair in range(half):
                cos, sin = float(cache[position, pair]), float(cache[position, half + pair])
                first, second = (pair, half + pair) if neox else (2 * pair, 2 * pair + 1)
                head[first] = before[first] * cos - before[second] * sin
                head[second] = before[second] * cos + before[first] * sin
    return heads.reshape(x.shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("cache_dtype", [torch.float32, None])
def test_rotary_embedding_turns_pairs_by_their_angle(dtype, neox, rotary_dim, cache_dtype):
    positions = torch.tensor([0, 5, 31])
    query, key = torch.randn(3, 4 * 8).to(dtype), torch.randn(3, 2 * 8).to(dtype)
    cache = cache_for(rotary_dim, cache_dtype or dtype)
    got = ir.ops.rotary_embedding(positions, query, key, cache, 8, neox)
    for out, x in zip(got, (query, key), strict=True):
        close(out, exact_rotary(positions, x, cache, 8, neox), dtype, ulps=3)


@pytest.mark.parametrize("lead", [(6,), (2, 3), (0,), (2, 1, 3), ()])
@pytest.mark.parametrize("split", [True, False])
def test_rotary_embedding_takes_any_leading_dimensions(lead, split):
    positions = torch.randint(0, 32, lead)
    tail = (4, 8) if split else (32,)
    query = torch.randn(*lead, *tail)
    cache = cache_for(8, torch.float32)
    got, _ = ir.ops.rotary_embedding(positions, query, None, cache, 8)
    close(got, exact_rotary(positions, query, cache, 8, True), torch.float32, ulps=4)


def test_rotary_embedding_without_a_key_returns_none_and_torch_sees_an_empty_second():
    query = torch.randn(2, 8)
    got = ir.ops.rotary_embedding(torch.tensor([1, 2]), query, None, cache_for(8, torch.float32), 8)
    assert got[1] is None
    fake = ir.ops.rotary_embedding.torch_op(
        torch.empty(2, device="meta", dtype=torch.int64), query.to("meta"), None, torch.empty(32, 8, device="meta"), 8
    )
    assert [t.shape for t in fake] == [got[0].shape, (0,)]


def test_rotary_embedding_keeps_the_length_of_a_pair():
    query = torch.randn(3, 8, dtype=torch.float64)
    got, _ = ir.ops.rotary_embedding(torch.tensor([3, 7, 30]), query, None, cache_for(8), 8)
    pairs = [t.view(3, 2, 4).norm(dim=1) for t in (query, got)]
    torch.testing.assert_close(*pairs)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rotary_embedding_takes_both_integer_widths(dtype):
    query = torch.randn(2, 8)
    positions = torch.tensor([1, 2], dtype=dtype)
    got, _ = ir.ops.rotary_embedding(positions, query, None, cache_for(8, torch.float32), 8)
    close(got, exact_rotary(positions, query, cache_for(8, torch.float32), 8, True), torch.float32, ulps=4)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"positions": torch.ones(2)}, "'positions' must have"),
        ({"positions": torch.ones(2, dtype=torch.bool)}, "'positions' must have"),
        ({"positions": torch.ones(2, dtype=torch.int16)}, "'positions' must have"),
        ({"positions": torch.ones(3, dtype=torch.int64)}, "'query'"),
        ({"query": torch.ones(2, 16).long()}, "'query' must have a floating-point"),
        ({"query": torch.ones(2, 15)}, "'query'"),
        ({"query": torch.ones(2, 2, 7)}, "'query'"),
        ({"key": torch.ones(3, 8)}, "'key'"),
        ({"key": torch.ones(2, 8).long()}, "'key' must have a floating-point"),
        ({"cos_sin_cache": torch.ones(32, 7)}, "'cos_sin_cache'"),
        ({"cos_sin_cache": torch.ones(32, 10)}, "'cos_sin_cache'"),
        ({"cos_sin_cache": torch.ones(8)}, "'cos_sin_cache'"),
        ({"cos_sin_cache": torch.ones(())}, "'cos_sin_cache'"),
        ({"cos_sin_cache": torch.ones(32, 8).long()}, "'cos_sin_cache'"),
        ({"head_size": 0}, "head_size"),
        ({"head_size": -8}, "head_size"),
    ],
)
def test_rotary_embedding_names_the_argument_that_does_not_fit(change, problem):
    good = {
        "positions": torch.tensor([1, 2]),
        "query": torch.randn(2, 16),
        "key": torch.randn(2, 8),
        "cos_sin_cache": torch.randn(32, 8),
        "head_size": 8,
    }
    ir.ops.rotary_embedding(**good)
    with pytest.raises(errors.ArgumentError, match=problem):
        ir.ops.rotary_embedding(**good | change)


# --- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm", "silu_and_mul", "gelu_and_mul"])
def test_rows_that_are_not_floating_point_are_refused(name, dtype):
    x = torch.ones(2, 4, dtype=dtype)
    args = {"rms_norm": (x, None, EPSILON), "fused_add_rms_norm": (x, x, None, EPSILON)}.get(name, (x,))
    with pytest.raises(errors.ArgumentError, match=f"{name}.*'x' must have a floating-point dtype"):
        getattr(ir.ops, name)(*args)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ((torch.ones(()), None, EPSILON), "scalar"),
        ((torch.ones(2), torch.ones(2).long(), EPSILON), "'weight' must have a floating-point"),
    ],
)
def test_rms_norm_names_the_argument_that_does_not_fit(args, problem):
    with pytest.raises(errors.ArgumentError, match=problem):
        ir.ops.rms_norm(*args)


@pytest.mark.parametrize(
    ("residual", "problem"),
    [(torch.ones(2, 4).half(), "'x_residual' has dtype torch.float16"), (torch.ones(1, 4), "'x_residual' has shape")],
)
def test_fused_add_rms_norm_needs_equal_operands(residual, problem):
    with pytest.raises(errors.ArgumentError, match=problem):
        ir.ops.fused_add_rms_norm(torch.ones(2, 4), residual, None, EPSILON)


def f64(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def differentiable():
    positions = torch.tensor([1, 3])
    return {
        "rms_norm": (f64(2, 6), f64(6), EPSILON),
        "rms_norm without weight": (f64(2, 6), None, EPSILON),
        "rms_norm of a part": (f64(2, 6), f64(6), EPSILON, 4),
        "fused_add_rms_norm": (f64(2, 6), f64(2, 6), f64(6), EPSILON),
        "silu_and_mul": (f64(2, 6),),
        "gelu_and_mul": (f64(2, 6),),
        "gelu_and_mul tanh": (f64(2, 6), "tanh"),
        "rotary_embedding": (positions, f64(2, 8), f64(2, 4), cache_for(4), 4),
        "rotary_embedding interleaved, partial": (positions, f64(2, 12), f64(2, 6), cache_for(4), 6, False),
    }


@pytest.mark.parametrize("case", differentiable())
def test_first_and_second_derivatives_are_right(case):
    op, args = getattr(ir.ops, case.split()[0]), differentiable()[case]
    assert gradcheck(op, args)
    assert gradgradcheck(op, args)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own rules use it
@pytest.mark.parametrize("case", differentiable())
def test_forward_mode_agrees_with_reverse_mode(case):
    op, args = getattr(ir.ops, case.split()[0]), differentiable()[case]
    where = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.requires_grad]

    def f(*tensors):
        full = list(args)
        for index, tensor in zip(where, tensors, strict=True):
            full[index] = tensor
        out = op(*full)
        return torch.cat([o.flatten() for o in out]) if isinstance(out, tuple) else out.flatten()

    tensors = tuple(args[i].detach() for i in where)
    forward = torch.func.jacfwd(f, argnums=tuple(range(len(tensors))))(*tensors)
    backward = torch.func.jacrev(f, argnums=tuple(range(len(tensors))))(*tensors)
    for a, b in zip(forward, backward, strict=True):
        torch.testing.assert_close(a, b)


OPS = (
    "rms_norm",
    "fused_add_rms_norm",
    "silu_and_mul",
    "gelu_and_mul",
    "rotary_embedding",
    "static_quant_fp8",
    "dynamic_quant_fp8",
    "fused_add_rms_norm_dynamic_quant_fp8",
)


def cases(dtype=torch.float32, shape=(4, 64)):
    return {name: getattr(ir.ops, name).generate_inputs(shape=shape, dtype=dtype) for name in OPS}


def in_place():
    return [name for name in OPS if getattr(ir.ops, name).allow_inplace]


LAYOUTS = {
    "contiguous": lambda t: t,
    "rows of a wider matrix": lambda t: torch.cat((t, t), -1)[..., : t.shape[-1]],
    "transposed": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda t: t[:1].expand_as(t),
    "every second row": lambda t: torch.stack((t, t), 1)[:, 0],
}


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layout_changes_nothing_and_fake_outputs_agree_with_real_ones(name, layout, dtype):
    from torch._subclasses.fake_tensor import FakeTensorMode

    op, args = getattr(ir.ops, name), cases(dtype)[name]
    args = tuple(
        LAYOUTS[layout](a) if isinstance(a, torch.Tensor) and a.dim() == 2 and a.shape[0] == 4 else a for a in args
    )
    plain = tuple(a.contiguous() if isinstance(a, torch.Tensor) else a for a in args)
    with FakeTensorMode() as mode:
        fakes = op(*(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args))
    got, expected = op(*args), op(*plain)
    flat = [t if isinstance(t, tuple) else (t,) for t in (got, expected, fakes)]
    for real, wanted, fake in zip(*flat, strict=True):
        torch.testing.assert_close(real, wanted)  # torch adds up a strided row in another order
        assert real.is_contiguous()
        assert (fake.shape, fake.dtype, fake.stride(), fake.device) == (
            real.shape,
            real.dtype,
            real.stride(),
            real.device,
        )


@pytest.mark.parametrize("name", cases())
def test_meta_tensors_give_shapes(name):
    op = getattr(ir.ops, name)
    args = cases()[name]
    meta = op(*(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args))
    real = op(*args)
    for m, r in zip(*(t if isinstance(t, tuple) else (t,) for t in (meta, real)), strict=True):
        assert (m.shape, m.dtype, m.device.type) == (r.shape, r.dtype, "meta")


@pytest.mark.parametrize("name", cases())
def test_symbolic_batch_stays_symbolic_without_guards(name):
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    op, args = getattr(ir.ops, name), cases()[name]
    env = ShapeEnv()
    with FakeTensorMode(shape_env=env) as mode:
        fakes = []
        for index, a in enumerate(args):
            if isinstance(a, torch.Tensor):
                rows = 1 if name == "mrope" and a.shape == (3, 4) else 0 if a.shape[0] == 4 else None
                sizes = [DimDynamic.DYNAMIC if d == rows else DimDynamic.STATIC for d in range(a.dim())]
                a = mode.from_tensor(
                    a,
                    source=ConstantSource(f"arg{index}"),
                    symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes),
                )
            fakes.append(a)
        out = op.torch_op(*fakes)
    first = out[0] if isinstance(out, tuple) else out
    assert isinstance(first.shape[0], torch.SymInt)
    texts = {str(guard.expr) for guard in env.guards}
    assert not [text for text in texts if not text.startswith("Eq(s")], texts  # equal batches only


@pytest.mark.parametrize(
    ("name", "overload"), [*((name, "default") for name in cases()), *((name, "maybe_inplace") for name in in_place())]
)
def test_torch_checks_of_the_operator_pass(name, overload):
    op = getattr(ir.ops, name)
    target = op.torch_op if overload == "default" else op.maybe_inplace.torch_op
    summed = "quant" not in name  # opcheck adds up the outputs for a loss, which torch cannot with float8
    args = tuple(
        a.requires_grad_(summed) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in cases()[name]
    )
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(isinstance(a, torch.Tensor) and a.is_floating_point() and a.dtype.itemsize == 1 for a in args):
        checks.remove("test_schema")  # it compares the arguments before and after, which torch cannot with float8
    torch.library.opcheck(target, args, test_utils=checks)


@pytest.mark.parametrize("name", cases())
@pytest.mark.parametrize("tracing_mode", ["real", "fake", "symbolic"])
def test_make_fx_records_one_node(name, tracing_mode):
    from torch.fx.experimental.proxy_tensor import make_fx

    op, args = getattr(ir.ops, name), cases()[name]
    tensors = [a for a in args if isinstance(a, torch.Tensor)]

    def f(*given):
        rest = iter(given)
        return op(*(next(rest) if isinstance(a, torch.Tensor) else a for a in args))

    traced = make_fx(f, tracing_mode=tracing_mode)(*tensors)
    assert next(n.target for n in traced.graph.nodes if n.op == "call_function") is op.torch_op
    got, expected = traced(*tensors), f(*tensors)
    for a, b in zip(*(t if isinstance(t, tuple) else (t,) for t in (got, expected)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", cases())
def test_vmap_is_a_loop(name):
    op = getattr(ir.ops, name)
    batches = [cases()[name] for _ in range(3)]
    where = tuple(0 if isinstance(a, torch.Tensor) else None for a in batches[0])
    stacked = [torch.stack(a) if isinstance(a[0], torch.Tensor) else a[0] for a in zip(*batches, strict=True)]
    for _ in range(3):
        got = torch.vmap(op, in_dims=where)(*stacked)
        expected = [op(*b) for b in batches]
        if not isinstance(got, tuple):
            got, expected = (got,), [(e,) for e in expected]
        for index, out in enumerate(got):
            torch.testing.assert_close(out, torch.stack([e[index] for e in expected]))


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = ir.ops.rms_norm
        self.fused = ir.ops.fused_add_rms_norm.maybe_inplace
        self.weight = torch.nn.Parameter(torch.rand(8))

    def forward(self, x):
        y = self.norm(x, self.weight, EPSILON)
        return self.fused(y, x * 1, self.weight, EPSILON)[0]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_module_that_holds_ops_can_be_copied(clone):
    layer = Layer()
    other = clone(layer)
    x = torch.randn(2, 8)
    assert other.norm is ir.ops.rms_norm
    assert torch.equal(other(x), layer(x))


def test_functional_call_and_its_gradient():
    layer, x = Layer(), torch.randn(2, 8)
    weights = {"weight": torch.rand(8)}

    def loss(weights):
        return torch.func.functional_call(layer, weights, (x,)).pow(2).sum()

    (expected,) = torch.autograd.grad(
        torch.func.functional_call(layer, {"weight": weights["weight"].requires_grad_()}, (x,)).pow(2).sum(),
        weights["weight"],
    )
    torch.testing.assert_close(torch.func.grad(loss)({"weight": weights["weight"].detach()})["weight"], expected)


def test_graph_module_with_ops_can_be_pickled():
    graph = torch.fx.symbolic_trace(Layer())
    x = torch.randn(2, 8)
    assert torch.equal(pickle.loads(pickle.dumps(graph))(x), graph(x))


def test_reloading_the_module_of_an_op_changes_nothing():
    import importlib

    import irframework.ops.layernorm as module

    before, x = ir.ops.rms_norm, torch.randn(2, 8)
    expected = before(x, None, EPSILON)
    importlib.reload(module)
    assert ir.ops.rms_norm is module.rms_norm is before
    for call in (before, before.torch_op):
        assert torch.equal(call(x, None, EPSILON), expected)
    assert before.native is module.rms_norm.native


@pytest.mark.parametrize("weight", [torch.ones(2), torch.ones(1), torch.ones(2, 4), torch.tensor(1.0)])
def test_weight_that_is_not_as_long_as_a_row_is_refused(weight):
    with pytest.raises(errors.ArgumentError, match="argument 'weight' must be a vector as long as a row"):
        ir.ops.rms_norm(torch.ones(2, 4), weight, 1e-6)
