"""Causal convolutions and state spaces against loops in float64, and the mixers of transformers' models."""

import itertools

import pytest
import torch
from torch.testing import assert_close

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("natively")

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
STARTS = ([0, 5], [0, 1, 2, 3], [0, 0, 40, 40, 41, 110], [0, 3, 9])  # a batch may be longer than its last sequence
LENGTHS = (1, 2, 15, 16, 17, 64, 65, 200)
OPS = ("causal_conv1d", "short_conv", "causal_conv1d_update")
SCANS = ("selective_scan", "mamba2_chunk_scan", "selective_state_update")


def within(got, exact, dtype, ulps):
    assert got.dtype == dtype
    assert got.shape == exact.shape
    if got.numel():
        assert (got.double() - exact).abs().max() <= ulps * torch.finfo(dtype).eps * exact.abs().max().clamp_min(1e-30)


def sequences(starts):
    return [range(*pair) for pair in itertools.pairwise(starts)]


def gate(z):
    return z * torch.sigmoid(z)


# --- convolutions ----------------------------------------------------------------------------------------------------


def convolved_by_hand(x, weight, bias, starts, states, has, silu):
    """All tokens in float64, one by one; and what each sequence has behind it."""
    x, weight, width = x.double(), weight.double(), weight.shape[1]
    y, after = torch.zeros_like(x), []
    for number, tokens in enumerate(sequences(starts)):
        past = torch.zeros(x.shape[1], width - 1, dtype=torch.float64)
        if states is not None and (has is None or has[number]):
            past = states[number].double()
        for token in tokens:
            seen = torch.cat((past, x[token].unsqueeze(1)), 1)
            total = (seen * weight).sum(1) + (0 if bias is None else bias.double())
            y[token] = gate(total) if silu else total
            past = seen[:, 1:]
        after.append(past)
    return y, torch.stack(after)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize(("initial", "activation"), [("none", "silu"), ("all", "none"), ("some", "silu")])
def test_causal_conv1d_is_that_of_a_loop(dtype, starts, width, initial, activation):
    x, count = torch.randn(starts[-1] + 2, 6).to(dtype), len(starts) - 1
    weight, bias = torch.randn(6, width).to(dtype), torch.randn(6).to(dtype) if activation == "silu" else None
    states = None if initial == "none" else torch.randn(count, 6, width - 1).to(dtype)
    has = torch.arange(count) % 2 == 0 if initial == "some" else None
    got = ir.ops.causal_conv1d(x, weight, bias, torch.tensor(starts, dtype=torch.int32), states, has, activation)
    exact = convolved_by_hand(x, weight, bias, starts, states, has, activation == "silu")
    within(got[0], exact[0], dtype, 4)
    assert torch.equal(got[1].double(), exact[1])


@pytest.mark.parametrize("name", ["causal_conv1d", "short_conv"])
@pytest.mark.parametrize("length", [0, 1, 3, 9])
def test_a_padded_batch_of_convolutions_is_a_packed_one(name, length):
    x, weight, states = torch.randn(3, length, 6), torch.randn(6, 4), torch.randn(3, 6, 3)
    if name == "short_conv":
        weight, states = weight[:2], states[:, :2]
    has, starts = torch.tensor([True, False, True]), torch.arange(4) * length
    got = getattr(ir.ops, name)(x, weight, None, None, states, has)
    packed = getattr(ir.ops, name)(x.flatten(0, 1), weight, None, starts, states, has)
    assert_close(got, (packed[0].unflatten(0, (3, length)), packed[1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("starts", STARTS)
def test_short_conv_is_that_of_a_loop(dtype, starts):
    x, weight = torch.randn(starts[-1] + 1, 15).to(dtype), torch.randn(5, 3).to(dtype)
    bias, states = torch.randn(5).to(dtype), torch.randn(len(starts) - 1, 5, 2).to(dtype)
    b, c, v = x.chunk(3, -1)
    y, after = convolved_by_hand(b * v, weight, bias, starts, states, None, False)
    got = ir.ops.short_conv(x, weight, bias, torch.tensor(starts), states)
    within(got[0], y * c.double(), dtype, 4)
    assert torch.equal(got[1].double(), after)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [3, 4, 7])
@pytest.mark.parametrize("slots", [None, [4, 0, 2], [4, -1, 2], [-1, -1, -1]])
def test_causal_conv1d_update_is_one_step(dtype, length, slots):
    x, weight, bias = torch.randn(3, 6).to(dtype), torch.randn(6, 4).to(dtype), torch.randn(6).to(dtype)
    state = torch.randn(3 if slots is None else 5, 6, length).to(dtype)
    y, after = torch.zeros(3, 6, dtype=torch.float64), state.double().clone()
    for row, slot in enumerate(range(3) if slots is None else slots):
        if slot >= 0:
            after[slot] = torch.cat((after[slot, :, 1:], x[row].double().unsqueeze(1)), 1)
            last = torch.cat((state[slot].double(), x[row].double().unsqueeze(1)), 1)[:, -4:]
            y[row] = gate((last * weight.double()).sum(1) + bias.double())
    indices = None if slots is None else torch.tensor(slots, dtype=torch.int32)
    got = ir.ops.causal_conv1d_update(x, state, weight, bias, indices, "silu")
    within(got[0], y, dtype, 4)
    assert torch.equal(got[1].double(), after)


def test_steps_of_a_convolution_are_the_whole():
    x, weight, bias = torch.randn(2, 7, 6), torch.randn(6, 4), torch.randn(6)
    state, outputs = torch.zeros(2, 6, 3), []
    for token in range(7):
        y, state = ir.ops.causal_conv1d_update.maybe_inplace(x[:, token].clone(), state, weight, bias)
        outputs.append(y)
    assert_close((torch.stack(outputs, 1), state), ir.ops.causal_conv1d(x, weight, bias))


# --- scans -----------------------------------------------------------------------------------------------------------


def scanned_by_hand(x, dt, a, b, c, d, z, bias, softplus, starts, states, has):
    """One decay for each element (a of two dimensions) or for each head; in float64, token by token."""
    x, dt, a, b, c = (t.double() for t in (x, dt, a, b, c))
    dt = dt if bias is None else dt + bias.double()
    dt = dt.exp().log1p() if softplus else dt
    y, after = torch.zeros_like(x), []
    for number, tokens in enumerate(sequences(starts)):
        h = torch.zeros(*x.shape[1:], b.shape[-1], dtype=torch.float64)
        if states is not None and (has is None or has[number]):
            h = states[number].double()
        for token in tokens:
            if a.dim() == 2:
                decay = torch.exp(dt[token].unsqueeze(1) * a)
                h = h * decay + torch.outer(dt[token] * x[token], b[token])
                y[token] = h @ c[token]
            else:
                for head in range(x.shape[1]):
                    group = head * b.shape[1] // x.shape[1]
                    step = dt[token, head]
                    h[head] = h[head] * torch.exp(step * a[head]) + step * torch.outer(x[token, head], b[token, group])
                    y[token, head] = h[head] @ c[token, group]
            if d is not None:
                y[token] += (d.double() if a.dim() == 2 else d.double().unsqueeze(1)) * x[token]
            if z is not None:
                y[token] *= gate(z[token].double())
        after.append(h)
    return y, torch.stack(after)


def scan_call(name, tokens, dtype=torch.float32, state=5, strength=3.0):
    """x, dt, a, b, c, d, z and the bias of the time steps."""
    shape = (tokens, 6) if name == "selective_scan" else (tokens, 4, 3)
    x, z, dt = torch.randn(shape), torch.randn(shape), torch.randn(shape[:2])
    b, c = (torch.randn(tokens, *(() if name == "selective_scan" else (2,)), state) for _ in range(2))
    a = -torch.rand((6, state) if name == "selective_scan" else (4,)) * strength
    d, bias = torch.randn(shape[1]), torch.randn(shape[1])
    return [t.to(dtype) for t in (x, dt, a, b, c, d, z, bias)]


def scan(name, x, dt, a, b, c, *rest, chunk=64):
    sizes = () if name == "selective_scan" else (chunk,)
    return getattr(ir.ops, name)(x, dt, a, b, c, *sizes, *rest)


def state_for(x, b, count):
    return torch.randn(count, *x.shape[1:], b.shape[-1])


@pytest.mark.parametrize("name", SCANS[:2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("starts", STARTS)
def test_a_scan_is_that_of_a_loop(name, dtype, starts):
    x, dt, a, b, c, d, z, bias = scan_call(name, starts[-1] + 2, dtype)
    got = scan(name, x, dt, a, b, c, d, z, bias, True, torch.tensor(starts, dtype=torch.int32))
    exact = scanned_by_hand(x, dt, a, b, c, d, z, bias, True, starts, None, None)
    within(got[0], exact[0], dtype, 4)
    within(got[1], exact[1], torch.promote_types(dtype, torch.float32), 8)


@pytest.mark.parametrize("name", SCANS[:2])
@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("some", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_scan_goes_on_from_initial_states(name, starts, some, dtype):
    x, dt, a, b, c, *_ = scan_call(name, starts[-1], torch.float64)
    states, has = state_for(x, b, len(starts) - 1).to(dtype), torch.arange(len(starts) - 1) % 2 == 0 if some else None
    got = scan(name, x, dt, a, b, c, None, None, None, True, torch.tensor(starts), states, has)
    exact = scanned_by_hand(x, dt, a, b, c, None, None, None, True, starts, states, has)
    within(got[0], exact[0], torch.float64, 32)
    within(got[1], exact[1], dtype, 32 if dtype == torch.float64 else 1)


@pytest.mark.parametrize("name", SCANS[:2])
@pytest.mark.parametrize("length", LENGTHS)
def test_a_padded_batch_of_any_length_is_two_loops(name, length):
    x, dt, a, b, c, d, z, bias = scan_call(name, 2 * length, torch.float64)
    exact = scanned_by_hand(x, dt, a, b, c, d, z, bias, True, [0, length, 2 * length], None, None)
    padded = [t.unflatten(0, (2, length)) for t in (x, dt, b, c, z)]
    y, states = scan(name, *padded[:2], a, *padded[2:4], d, padded[4], bias, True)
    within(y.flatten(0, 1), exact[0], torch.float64, 32)
    within(states, exact[1], torch.float64, 32)


@pytest.mark.parametrize("name", SCANS[:2])
def test_a_batch_without_tokens_keeps_its_states(name):
    x, dt, a, b, c, *_ = scan_call(name, 0)
    states = state_for(x, b, 2)
    got = scan(name, x, dt, a, b, c, None, None, None, True, torch.tensor([0, 0, 0]), states)
    assert got[0].shape == x.shape
    assert torch.equal(got[1], states)


@pytest.mark.parametrize("chunk", [1, 2, 3, 17, 64, 256, 1000])
def test_the_size_of_chunks_changes_nothing(chunk):
    call = scan_call("mamba2_chunk_scan", 130, torch.float64)
    got = scan("mamba2_chunk_scan", *call, True, torch.tensor([0, 70, 130]), chunk=chunk)
    assert_close(got, scan("mamba2_chunk_scan", *call, True, torch.tensor([0, 70, 130]), chunk=16))


@pytest.mark.parametrize("name", SCANS[:2])
@pytest.mark.parametrize("strength", [0.003, 1.0, 300.0])
def test_a_long_scan_in_float32_is_as_exact_as_a_loop(name, strength):
    """Weak decays add up over all tokens; strong ones, taken apart into quotients, would overflow."""
    call = scan_call(name, 1000, strength=strength)
    got = scan(name, *call, True, torch.tensor([0, 1000]))
    exact = scanned_by_hand(*call, True, [0, 1000], None, None)
    within(got[0], exact[0], torch.float32, 16)
    within(got[1], exact[1], torch.float32, 16)


@pytest.mark.parametrize("name", SCANS[:2])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_sequence(name, bad):
    call = scan_call(name, 90)
    call[0][45] = bad
    y, states = scan(name, *call, True, torch.tensor([0, 40, 50, 90]))
    assert y[:40].isfinite().all()
    assert y[50:].isfinite().all()
    assert [bool(state.isfinite().all()) for state in states] == [True, False, True]


@pytest.mark.parametrize("name", SCANS[:2])
def test_a_sequence_does_not_depend_on_its_neighbours(name):
    call = scan_call(name, 100, torch.float64)
    y, states = scan(name, *call, True, torch.tensor([0, 37, 81, 100]))
    alone = [t if t.shape[0] != 100 else t[37:81] for t in call]
    assert_close(scan(name, *alone, True, torch.tensor([0, 44])), (y[37:81], states[1:2]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", SCANS[:2])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [None, [6, 0, 3], [-1, 2, -1]])
def test_selective_state_update_is_one_step_of_either_scan(name, dtype, slots):
    x, dt, a, b, c, d, z, bias = scan_call(name, 3, dtype)
    state = state_for(x, b, 3 if slots is None else 7)
    rows = range(3) if slots is None else slots
    y, after = torch.zeros(x.shape, dtype=torch.float64), state.double().clone()
    for row, slot in enumerate(rows):
        if slot >= 0:
            one = [t[row : row + 1] for t in (x, dt, b, c, z)]
            exact = scanned_by_hand(*one[:2], a, *one[2:4], d, one[4], bias, True, [0, 1], state[slot : slot + 1], None)
            y[row], after[slot] = exact[0][0], exact[1][0]
    indices = None if slots is None else torch.tensor(slots)
    got = ir.ops.selective_state_update(x, state, dt, a, b, c, d, z, bias, True, indices)
    within(got[0], y, dtype, 8)
    within(got[1], after, torch.float32, 8)


@pytest.mark.parametrize("name", SCANS[:2])
def test_steps_of_a_scan_are_the_whole(name):
    x, dt, a, b, c, d, z, bias = scan_call(name, 20, torch.float64)
    state, outputs = torch.zeros(1, *x.shape[1:], 5, dtype=torch.float64), []
    for token in range(20):
        now = [t[token : token + 1] for t in (x, dt, b, c, z)]
        y, state = ir.ops.selective_state_update.maybe_inplace(
            now[0].clone(), state, now[1], a, *now[2:4], d, now[4], bias, True
        )
        outputs.append(y)
    assert_close((torch.cat(outputs), state), scan(name, x, dt, a, b, c, d, z, bias, True, torch.tensor([0, 20])))


# --- transformers ----------------------------------------------------------------------------------------------------


@torch.no_grad()
def randomised(module):
    for parameter in module.parameters():
        parameter.copy_(torch.randn_like(parameter) / 4)
    return module.eval()


@torch.no_grad()
def test_mambas_mixer():
    model = pytest.importorskip("transformers.models.mamba.modeling_mamba")
    config = model.MambaConfig(hidden_size=8, intermediate_size=12, state_size=5, conv_kernel=4, num_hidden_layers=1)
    mixer, x = randomised(model.MambaMixer(config, 0)), torch.randn(2, 21, 8)
    hidden, z = mixer.in_proj(x).chunk(2, -1)
    hidden, _ = ir.ops.causal_conv1d(hidden, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, activation="silu")
    dt, b, c = mixer.x_proj(hidden).split([mixer.time_step_rank, 5, 5], -1)
    y, _ = ir.ops.selective_scan(
        hidden, dt @ mixer.dt_proj.weight.T, -mixer.A_log.exp(), b, c, mixer.D, z, mixer.dt_proj.bias, True
    )
    assert_close(mixer.out_proj(y), mixer(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_mamba_2s_mixer():
    model = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    config = model.Mamba2Config(
        hidden_size=8, expand=2, num_heads=4, head_dim=4, n_groups=2, state_size=5, chunk_size=8, num_hidden_layers=1
    )
    mixer, x = randomised(model.Mamba2Mixer(config, 0)), torch.randn(2, 21, 8)
    z, hidden, dt = mixer.in_proj(x).split([16, mixer.conv_dim, 4], -1)
    hidden, _ = ir.ops.causal_conv1d(hidden, mixer.conv1d.weight.squeeze(1), mixer.conv1d.bias, activation="silu")
    hidden, b, c = hidden.split([16, 10, 10], -1)
    split = [t.unflatten(-1, (parts, -1)) for t, parts in ((hidden, 4), (b, 2), (c, 2))]
    y, _ = ir.ops.mamba2_chunk_scan(split[0], dt, -mixer.A_log.exp(), *split[1:], 8, mixer.D, None, mixer.dt_bias, True)
    assert_close(mixer.out_proj(mixer.norm(y.flatten(2), z)), mixer(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("bias", [True, False])
def test_lfm2s_short_convolution(bias):
    model = pytest.importorskip("transformers.models.lfm2.modeling_lfm2")
    config = model.Lfm2Config(hidden_size=8, num_hidden_layers=1, layer_types=["conv"], conv_L_cache=3, conv_bias=bias)
    module, x = randomised(model.Lfm2ShortConv(config, 0)), torch.randn(2, 9, 8)
    y, _ = ir.ops.short_conv(module.in_proj(x), module.conv.weight.squeeze(1), module.conv.bias)
    assert_close(module.out_proj(y), module(x))


# --- gradients, transforms -------------------------------------------------------------------------------------------


def differentiable(name):
    """A call of few elements, with initial states and two sequences."""
    starts = torch.tensor([0, 2, 5])
    x, weight, bias = (torch.randn(s, dtype=torch.float64) for s in ((5, 6), (6, 3), (6,)))
    if name == "causal_conv1d":
        return x, weight, bias, starts, torch.randn(2, 6, 2, dtype=torch.float64), None, "silu"
    if name == "short_conv":
        return x, weight[:2], bias[:2], starts, torch.randn(2, 2, 2, dtype=torch.float64)
    slots = torch.tensor([3, -1, 0, 5, 1])
    if name == "causal_conv1d_update":
        return x, torch.randn(6, 6, 3, dtype=torch.float64), weight, bias, slots, "silu"
    form = "mamba2_chunk_scan" if name == "mamba2_chunk_scan" else "selective_scan"
    x, dt, a, b, c, d, z, bias = scan_call(form, 5, torch.float64, state=2)
    if name == "selective_state_update":
        return x, state_for(x, b, 6).double(), dt, a, b, c, d, z, bias, True, slots
    sizes = () if name == "selective_scan" else (2,)
    return x, dt, a, b, c, *sizes, d, z, bias, True, starts, state_for(x, b, 2).double()


@pytest.mark.parametrize("name", OPS + SCANS)
def test_first_and_second_derivatives_are_right(name):
    args = [
        a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in differentiable(name)
    ]
    assert torch.autograd.gradcheck(getattr(ir.ops, name), args, fast_mode=name in SCANS)
    assert torch.autograd.gradgradcheck(getattr(ir.ops, name), args, fast_mode=True)


@pytest.mark.parametrize("name", OPS + SCANS)
def test_vmap_is_a_loop(name):
    batches = [differentiable(name) for _ in range(3)]
    where = tuple(0 if isinstance(a, torch.Tensor) else None for a in batches[0])
    stacked = [torch.stack(a) if isinstance(a[0], torch.Tensor) else a[0] for a in zip(*batches, strict=True)]
    got = torch.vmap(getattr(ir.ops, name), in_dims=where)(*stacked)
    loop = [getattr(ir.ops, name)(*batch) for batch in batches]
    for part, parts in zip(got, zip(*loop, strict=True), strict=True):
        assert_close(part, torch.stack(parts))


# --- mistakes --------------------------------------------------------------------------------------------------------


def good(name):
    """A call by names."""
    op = getattr(ir.ops, name)
    return op.named(op.bind(differentiable(name)))


MISTAKES = [
    *(
        (name, {"query_start_loc": torch.tensor(values)}, problem)
        for name in ("causal_conv1d", "short_conv", "selective_scan", "mamba2_chunk_scan")
        for values, problem in (
            ([0, 4, 3], "must ascend"),
            ([1, 2, 5], "start with 0"),
            ([0, 2, 6], "ends with 6"),
            ([0.0, 2, 5], "'query_start_loc' must be a vector"),
            ([[0, 2, 5]], "'query_start_loc' must be a vector"),
            ([0, 5], "'initial_states' must be floating point of shape"),
        )
    ),
    *((name, {"query_start_loc": None}, "without 'query_start_loc'") for name in ("causal_conv1d", "selective_scan")),
    *((name, {"x": torch.ones(5)}, "'x'") for name in OPS + SCANS),
    *((name, {"x": torch.ones(5, 6).long()}, "floating-point") for name in ("causal_conv1d", "selective_scan")),
    ("causal_conv1d", {"weight": torch.ones(5, 3)}, "'weight' must be"),
    ("causal_conv1d", {"weight": torch.ones(6, 0)}, "'weight' must be"),
    ("causal_conv1d", {"weight": torch.ones(6, 3).int()}, "'weight' must have a floating-point"),
    ("causal_conv1d", {"bias": torch.ones(5)}, "'bias' must be"),
    ("causal_conv1d", {"activation": "relu"}, "'relu'"),
    ("causal_conv1d", {"initial_states": torch.ones(2, 6, 2)}, "'initial_states' has dtype"),
    ("causal_conv1d", {"has_initial_state": torch.ones(2)}, "'has_initial_state' must be bool"),
    ("causal_conv1d", {"initial_states": None, "has_initial_state": torch.ones(2) > 0}, "says nothing without"),
    ("short_conv", {"x": torch.ones(5, 7)}, "multiple of 3"),
    ("causal_conv1d_update", {"conv_state": torch.ones(6, 6, 1).double()}, "'conv_state' must be"),
    ("causal_conv1d_update", {"conv_state": torch.ones(6, 6, 3)}, "'conv_state' has dtype"),
    ("causal_conv1d_update", {"conv_state_indices": None}, "one slot per row"),
    ("causal_conv1d_update", {"conv_state_indices": torch.ones(5)}, "'conv_state_indices' must be int32"),
    ("causal_conv1d_update", {"conv_state_indices": torch.arange(4)}, "'conv_state_indices' must be int32"),
    ("causal_conv1d_update", {"conv_state_indices": torch.tensor([0, 1, 2, 3, 6])}, "slot 6 in row 4"),
    ("causal_conv1d_update", {"conv_state_indices": torch.tensor([0, 1, 2, 3, -2])}, "slot -2"),
    ("causal_conv1d_update", {"conv_state_indices": torch.tensor([0, 1, 2, 1, -1])}, "slot 1 again in row 3"),
    ("selective_state_update", {"state_indices": torch.tensor([0, 1, 2, 1, -1])}, "slot 1 again in row 3"),
    ("selective_state_update", {"state_indices": torch.tensor([0, 1, 2, 3, 6])}, "slot 6 in row 4"),
    ("selective_state_update", {"state": torch.ones(6, 5, 2)}, "'state' has shape"),
    ("selective_state_update", {"b": torch.ones(5, 3)}, "'b' has shape"),
    ("selective_scan", {"a": torch.ones(5, 2)}, "'a' has shape"),
    ("selective_scan", {"a": torch.ones(6)}, "'a' must have 2 dimensions"),
    ("selective_scan", {"c": torch.ones(5, 3)}, "'c' has shape"),
    ("selective_scan", {"dt": torch.ones(5, 6).int()}, "'dt' must have a floating-point"),
    ("mamba2_chunk_scan", {"chunk_size": 0}, "chunk_size=0"),
    ("mamba2_chunk_scan", {"b": torch.ones(5, 3, 2)}, "3 groups .* 4 heads"),
    ("mamba2_chunk_scan", {"dt": torch.ones(5, 3)}, "'dt' has shape"),
    ("mamba2_chunk_scan", {"z": torch.ones(5, 4, 2)}, "'z' has shape"),
    ("mamba2_chunk_scan", {"d": torch.ones(4, 3)}, "'d' has shape"),
]


@pytest.mark.parametrize(("name", "change", "problem"), MISTAKES)
def test_the_argument_that_does_not_fit_is_named(name, change, problem):
    call = good(name)
    getattr(ir.ops, name)(**call)
    with pytest.raises(errors.ArgumentError, match=f"{name}.*{problem}"):
        getattr(ir.ops, name)(**call | change)


@pytest.mark.parametrize("name", ["causal_conv1d", "short_conv", "selective_scan", "mamba2_chunk_scan"])
@pytest.mark.parametrize("values", [[0, 4, 3], [3, -9, 99], [99, 98, 97], [-5, -4, -3], [5, 0, 5]])
def test_native_stays_inside_its_tensors_for_wrong_offsets(name, values):
    call = good(name) | {"query_start_loc": torch.tensor(values)}
    outputs = getattr(ir.ops, name).native(**call)
    assert outputs[0].shape[0] == 5


@pytest.mark.parametrize("name", ["causal_conv1d_update", "selective_state_update"])
def test_native_leaves_the_states_alone_for_slots_that_do_not_exist(name):
    key = "conv_state_indices" if name == "causal_conv1d_update" else "state_indices"
    call = good(name) | {key: torch.tensor([99, -1, 6, -7, 2])}
    wanted = good(name) | {key: torch.tensor([-1, -1, -1, -1, 2])}
    wanted = {k: call[k] if isinstance(call[k], torch.Tensor) and k != key else v for k, v in wanted.items()}
    assert_close(getattr(ir.ops, name).native(**call)[1], getattr(ir.ops, name)(**wanted)[1])
