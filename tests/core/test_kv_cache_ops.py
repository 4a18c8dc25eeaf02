"""Writes to the paged cache: natively, against loops over tokens in plain Python, and bad arguments."""

import pytest
import torch

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("seeded", "natively")

NAMES = (
    "reshape_and_cache", "rotary_embedding_reshape_and_cache", "qk_norm_rotary_embedding_reshape_and_cache",
)  # fmt: skip
FUSED = NAMES[1:]
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def natively():
    with ir.priority(dict.fromkeys(NAMES, "native")):
        yield


def written(x, cache, slots):
    """The cache after the write, one token after the other."""
    out, (_, block_size, heads, size) = cache.clone(), cache.shape
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            out[slot // block_size, slot % block_size] = x[token].reshape(heads, size)
    return out


def state(dtype=torch.float32, key_size=6, value_size=6, heads=2):
    """Keys, values, caches of 3 blocks of 4, and slots for 5 tokens."""
    key, value = torch.randn(5, heads, key_size), torch.randn(5, heads, value_size)
    caches = torch.randn(3, 4, heads, key_size), torch.randn(3, 4, heads, value_size)
    return (*(t.to(dtype) for t in (key, value, *caches)), torch.tensor([7, 0, 11, 3, 8]))


def angles(rotary_dim=4, dtype=torch.float32):
    return torch.randn(9, rotary_dim).to(dtype)


def fused_arguments(dtype=torch.float32, **sizes):
    key, *rest = state(dtype, **sizes)
    query = torch.randn(5, 2 * key.shape[1], key.shape[2]).to(dtype)
    return torch.tensor([4, 8, 0, 1, 1]), query, key, *rest, angles(dtype=dtype), key.shape[2]


def normed_arguments(dtype=torch.float32):
    *args, table, head_size = fused_arguments(dtype)
    return *args, *(torch.randn(head_size).to(dtype) for _ in range(2)), table, head_size, 1e-6


def call_of(name):
    return {NAMES[0]: state, NAMES[1]: fused_arguments, NAMES[2]: normed_arguments}[name]()


def changed(name, **values):
    """The usual call of an op with other arguments."""
    op = getattr(ir.ops, name)
    return tuple({**op.named(op.bind(call_of(name))), **values}.values())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value_size", [6, 3])
def test_each_token_is_written_to_its_slot_bit_for_bit(dtype, value_size):
    key, value, key_cache, value_cache, slots = state(dtype, value_size=value_size)
    got = ir.ops.reshape_and_cache(key, value, key_cache, value_cache, slots)
    assert torch.equal(got[0], written(key, key_cache, slots))
    assert torch.equal(got[1], written(value, value_cache, slots))


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_a_token_with_a_negative_slot_is_left_out(slot_dtype):
    key, value, *caches, _ = state()
    slots = torch.tensor([-1, 5, -7, -1, 2], dtype=slot_dtype)
    got = ir.ops.reshape_and_cache(key, value, *caches, slots)
    assert torch.equal(got[0], written(key, caches[0], slots))
    assert torch.equal(got[1], written(value, caches[1], slots))


def test_heads_may_lie_side_by_side_and_rows_in_longer_ones():
    key, value, *rest = state()
    merged = torch.cat((torch.randn(5, 7), key.flatten(1), value.flatten(1)), 1)
    want = ir.ops.reshape_and_cache(key, value, *rest)
    got = ir.ops.reshape_and_cache(merged[:, 7:19], merged[:, 19:], *rest)
    assert all(map(torch.equal, got, want))


def test_caches_of_the_caller_are_unchanged():
    args = state()
    before = [t.clone() for t in args]
    got = ir.ops.reshape_and_cache(*args)
    assert all(map(torch.equal, args, before))
    assert not torch.equal(got[0], args[2])


def test_no_tokens_change_nothing():
    key, value, *caches, slots = state()
    got = ir.ops.reshape_and_cache(key[:0], value[:0], *caches, slots[:0])
    assert all(map(torch.equal, got, caches))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [True, False])
def test_the_fused_op_is_its_two_parts_bit_for_bit(dtype, is_neox):
    positions, query, key, value, *caches, slots, cache, head_size = fused_arguments(dtype)
    got = ir.ops.rotary_embedding_reshape_and_cache(
        positions, query, key, value, *caches, slots, cache, head_size, is_neox
    )
    rotated = ir.ops.rotary_embedding.native(positions, query, key, cache, head_size, is_neox)
    want = (*rotated, written(rotated[1], caches[0], slots), written(value, caches[1], slots))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox", [True, False])
def test_the_op_with_norms_is_its_two_parts_bit_for_bit(dtype, is_neox):
    positions, query, key, value, *caches, slots, q_weight, k_weight, table, size, epsilon = normed_arguments(dtype)
    got = ir.ops.qk_norm_rotary_embedding_reshape_and_cache(
        positions, query, key, value, *caches, slots, q_weight, k_weight, table, size, epsilon, is_neox
    )
    rotated = ir.ops.qk_norm_rotary_embedding.native(
        positions, query, key, q_weight, k_weight, table, size, epsilon, is_neox
    )
    want = (*rotated, written(rotated[1], caches[0], slots), written(value, caches[1], slots))
    assert all(map(torch.equal, got, want))


def test_the_fused_op_is_exact_against_complex_numbers():
    positions, query, key, value, *caches, slots, cache, head_size = fused_arguments(torch.float64)
    got = ir.ops.rotary_embedding_reshape_and_cache(
        positions, query, key, value, *caches, slots, cache, head_size, False
    )
    for result, heads in zip(got[:2], (query, key), strict=True):
        for token, position in enumerate(positions.tolist()):
            turn = torch.complex(*cache[position].chunk(2))
            turned = torch.view_as_real(torch.view_as_complex(heads[token, :, :4].unflatten(-1, (2, 2))) * turn)
            want = torch.cat((turned.flatten(-2), heads[token, :, 4:]), -1)
            torch.testing.assert_close(result[token], want, atol=1e-14, rtol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_a_gradient_reaches_what_was_written_and_what_was_not_overwritten(name):
    op = getattr(ir.ops, name)
    args = [a.double().requires_grad_() if torch.is_tensor(a) and a.is_floating_point() else a for a in call_of(name)]
    named = op.named(op.bind(tuple(args)))
    out = op(*args)[-1]
    grads = torch.autograd.grad(out.sum(), [named["value"], named["value_cache"]])
    assert torch.equal(grads[0], torch.ones_like(grads[0]))
    kept = written(torch.zeros_like(named["value"]), torch.ones_like(named["value_cache"]), named["slot_mapping"])
    assert torch.equal(grads[1], kept.double())


BAD = {
    "slots_of_floats": ("slot_mapping", lambda t: t.float(), "argument 'slot_mapping' must be a vector of int32 or"),
    "slots_in_a_matrix": ("slot_mapping", lambda t: t[None], "argument 'slot_mapping' must be a vector of int32 or"),
    "too_few_slots": ("slot_mapping", lambda t: t[1:], "argument 'key' has shape .* with 4 slots"),
    "keys_of_integers": ("key", lambda t: t.int(), "argument 'key' must have a floating-point dtype"),
    "another_head_size": ("key", lambda t: t[..., :4], "argument 'key' has shape"),
    "another_dtype": ("value", lambda t: t.double(), "argument 'value_cache' must have dtype torch.float64"),
    "fewer_heads": ("value", lambda t: t[:, :1], "argument 'value' has shape"),
    "a_flat_cache": ("key_cache", lambda t: t.flatten(1), "argument 'key_cache' must have dtype .* and shape"),
    "fewer_blocks": ("value_cache", lambda t: t[1:], "argument 'value_cache' has shape .* same number of blocks"),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fault", BAD)
def test_arguments_that_do_not_fit_are_refused(name, fault):
    argument, spoil, message = BAD[fault]
    if name != NAMES[0] and argument == "key":  # the rotary embedding is asked first
        message = "argument 'key'"
    op = getattr(ir.ops, name)
    value = op.named(op.bind(call_of(name)))[argument]
    with pytest.raises(errors.ArgumentError, match=message):
        op(*changed(name, **{argument: spoil(value)}))


@pytest.mark.parametrize("name", FUSED)
def test_positions_in_a_matrix_are_refused_by_the_fused_ops(name):
    positions = torch.zeros(5, 1, dtype=torch.int64)
    with pytest.raises(errors.ArgumentError, match=f"{name}.*argument 'positions' must be a vector"):
        getattr(ir.ops, name)(*changed(name, positions=positions))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_a_slot_behind_the_end_of_the_cache_is_refused_before_anything_is_written(name, slot_dtype):
    slots = torch.tensor([7, 0, 12, 3, -8], dtype=slot_dtype)
    args = changed(name, slot_mapping=slots)
    before = [a.clone() if torch.is_tensor(a) else a for a in args]
    with pytest.raises(errors.ArgumentError, match=f"{name}.*'slot_mapping' holds 12, but the cache has 12 slots"):
        getattr(ir.ops, name).maybe_inplace(*args)
    assert all(torch.equal(a, b) for a, b in zip(args, before, strict=True) if torch.is_tensor(a))


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("position", [-1, 9])
def test_a_position_without_angles_is_refused_by_the_fused_ops(name, position):
    args = changed(name, positions=torch.tensor([0, 1, position, 2, 3]))
    with pytest.raises(errors.ArgumentError, match=f"{name}.*'positions' holds {position}"):
        getattr(ir.ops, name)(*args)


@pytest.mark.parametrize("name", NAMES)
def test_native_leaves_out_slots_that_the_cache_does_not_have(name):
    """Compiled, nobody checks values."""
    op = getattr(ir.ops, name)
    given = op.named(op.bind(call_of(name)))
    slots = torch.tensor([7, 0, 12, 3, -8])
    got = op.native(**{**given, "slot_mapping": slots})
    want = op.native(**{**given, "slot_mapping": torch.where(slots == 12, -1, slots)})
    assert all(map(torch.equal, got, want))
