"""The kernels that write to the paged cache, run by Triton's interpreter on the CPU."""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.interpreter

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def kernels():
    from irframework_triton_kernels import implementations

    return implementations


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def merged(dtype: torch.dtype = torch.float32, size: int = 16, value_size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of 5 heads, keys and values of 2, as parts of one product for 3 tokens."""
    widths = (5 * size, 2 * size, 2 * value_size)
    query, key, value = random(3, sum(widths) + 3, dtype=dtype)[:, 3:].split(widths, -1)
    return query, key, value


def caches(dtype: torch.dtype = torch.float32, size: int = 16, value_size: int = 16) -> tuple[Tensor, Tensor]:
    return random(2, 4, 2, size, dtype=dtype), random(2, 4, 2, value_size, dtype=dtype, seed=2)


SLOTS = torch.tensor([6, 0, 3])
POSITIONS = torch.tensor([3, 0, 7])


def angles(rotary_dim: int = 16) -> Tensor:
    turns = torch.outer(torch.arange(8), 10.0 ** -torch.arange(rotary_dim // 2))
    return torch.cat((turns.cos(), turns.sin()), -1)


def same(got: tuple[Tensor, ...], want: tuple[Tensor, ...], atol: float = 1e-6) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=atol, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sizes", [(16, 16), (24, 7)])
def test_keys_and_values_are_copied_to_their_slots_bit_for_bit(kernels, dtype, sizes):
    _, key, value = merged(dtype, *sizes)
    given = caches(dtype, *sizes)
    want = ir.ops.reshape_and_cache.native(key, value, *given, SLOTS)
    got = kernels.reshape_and_cache(key, value, *given, SLOTS)
    assert all(map(torch.equal, got, want))
    assert all(one is other for one, other in zip(got, given, strict=True))


@pytest.mark.parametrize("slots", [[-1, 2, -7], [8, 2, 2**31 - 1]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_slot_that_the_cache_does_not_have_is_not_written(kernels, slots, dtype):
    query, key, value = merged()
    slots = torch.tensor(slots, dtype=dtype)
    given = caches()
    want = ir.ops.reshape_and_cache.native(key, value, *given, slots)
    around = [torch.cat((torch.full_like(t, 7.0), t, torch.full_like(t, 7.0))) for t in given]
    inside = [t[2:4] for t in around]
    got = kernels.reshape_and_cache(key, value, *inside, slots)
    assert all(map(torch.equal, got, want))
    turned = kernels.rotary_embedding_reshape_and_cache(
        POSITIONS, query, key, value, *inside, slots, angles(), 16
    )  # fmt: skip
    same(turned, ir.ops.rotary_embedding_reshape_and_cache.native(
        POSITIONS, query, key, value, *given, slots, angles(), 16
    ))  # fmt: skip
    assert all((t[:2] == 7).all() and (t[4:] == 7).all() for t in around)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rotary_dim", [16, 10])
def test_the_fused_kernel_rotates_and_writes_parts_of_one_product(kernels, dtype, is_neox, rotary_dim):
    query, key, value = merged(dtype)
    given = caches(dtype)
    args = (POSITIONS, query, key, value, *given, SLOTS, angles(rotary_dim), 16, is_neox)
    want = ir.ops.rotary_embedding_reshape_and_cache.native(*args)
    before = query.clone(), key.clone()
    got = kernels.rotary_embedding_reshape_and_cache(*args)
    same(got, want)
    assert torch.equal(got[2].flatten(0, 1)[SLOTS].flatten(1), got[1])  # what is written is what is returned
    assert got[2] is given[0]
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])


def normed(args, dtype, weights=True, size=16):
    """The arguments of the op with norms, for those of the op without."""
    *given, cos_sin, head_size, is_neox = args
    scales = [random(size, dtype=dtype, seed=seed) if weights else None for seed in (5, 6)]
    return *given, *scales, cos_sin, head_size, 1e-5, is_neox


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16, None])
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rotary_dim", [16, 10])
def test_heads_are_normed_before_they_are_rotated_and_written(dtype, is_neox, rotary_dim, weights):
    from irframework_triton_kernels import normed_rotary

    query, key, value = merged(dtype)
    given = caches(dtype)
    args = normed(
        (POSITIONS, query, key, value, *given, SLOTS, angles(rotary_dim), 16, is_neox), weights, weights is not None
    )
    want = ir.ops.qk_norm_rotary_embedding_reshape_and_cache.native(*args)
    got = normed_rotary.qk_norm_rotary_embedding_reshape_and_cache(*args)
    # Both parts of a sum may be rounded otherwise: the interpreter cuts bfloat16 off.
    same(got, want, 1e-5 if {dtype, weights} <= {torch.float32, None} else 0.15)
    assert torch.equal(got[2].flatten(0, 1)[SLOTS].flatten(1), got[1])
    assert got[2] is given[0]


@pytest.mark.parametrize("sizes", [(1, 1, 128, 128), (40, 37, 128, 128), (3, 2, 24, 20), (5, 1, 256, 64)])
@pytest.mark.parametrize("has_key", [True, False])
def test_heads_of_any_number_and_size_are_normed_and_rotated(sizes, has_key):
    from irframework_triton_kernels import normed_rotary

    heads, kv_heads, size, rotary_dim = sizes
    query, key = random(2, 1, heads, size), random(2, 1, kv_heads * size) if has_key else None
    weights = random(size, seed=3), random(size, seed=4) if has_key else None
    args = (torch.tensor([[3], [7]]), query, key, *weights, angles(rotary_dim), size, 1e-5)
    got = normed_rotary.qk_norm_rotary_embedding(*args)
    want = ir.ops.qk_norm_rotary_embedding.native(*args)
    same(got[: 1 + has_key], want[: 1 + has_key])


def test_heads_apart_with_strides_are_taken(kernels):
    query, key, value = (t.unflatten(1, (-1, 16)) for t in merged())
    spread = [torch.cat((t, t), -1)[..., :16] for t in (query, key, value)]
    args = (*spread, *caches(), SLOTS, angles(), 16)
    want = ir.ops.rotary_embedding_reshape_and_cache.native(POSITIONS, *args)
    same(kernels.rotary_embedding_reshape_and_cache(POSITIONS, *args), want)
    args = (*spread[1:], *caches(), SLOTS)
    assert all(map(torch.equal, kernels.reshape_and_cache(*args), ir.ops.reshape_and_cache.native(*args)))


def test_more_heads_than_a_tile_holds_are_written(kernels):
    query, key, value = random(1, 40, 128), random(1, 37, 128), random(1, 37, 256)
    given = random(1, 2, 37, 128), random(1, 2, 37, 256)
    args = (torch.tensor([1]), query, key, value, *given, torch.tensor([1]), angles(128), 128)
    same(kernels.rotary_embedding_reshape_and_cache(*args), ir.ops.rotary_embedding_reshape_and_cache.native(*args))


def test_a_position_outside_the_angles_gives_nan_for_its_token_only(kernels):
    query, key, value = merged()
    args = (torch.tensor([1, 8, -1]), query, key, value, *caches(), SLOTS, angles(), 16)
    q, k, key_cache, value_cache = kernels.rotary_embedding_reshape_and_cache(*args)
    for rotated in (q, k, key_cache.flatten(0, 1)[SLOTS].flatten(1)):
        assert rotated.isnan().all(-1).tolist() == [False, True, True]
    assert not value_cache.isnan().any()


def test_no_tokens_write_nothing(kernels):
    query, key, value = (t[:0] for t in merged())
    given = caches()
    got = kernels.rotary_embedding_reshape_and_cache(
        POSITIONS[:0], query, key, value, *given, SLOTS[:0], angles(), 16
    )  # fmt: skip
    assert got[0].shape == query.shape
    assert all(map(torch.equal, got[2:], caches()))
    kernels.reshape_and_cache(key, value, *given, SLOTS[:0])
    assert all(map(torch.equal, given, caches()))


def test_as_many_slots_as_tokens_are_needed(kernels):
    _, key, value = merged()
    with pytest.raises(ValueError, match=r"key has shape \(3, 32\), does not fit one of shape \(2,\)"):
        kernels.reshape_and_cache(key, value, *caches(), SLOTS[:2])


def test_a_cache_in_parts_is_not_overwritten(kernels):
    _, key, value = merged()
    given = random(2, 2, 4, 2, 16).unbind(1)
    with pytest.raises(ValueError, match="key_cache has strides"):
        kernels.reshape_and_cache(key, value, *given, SLOTS)


def test_the_torch_ops_do_what_their_schemas_say(kernels):
    query, key, value = merged()
    kernels.reshape_and_cache(key, value, *caches(), SLOTS)
    ops = torch.ops.irframework_triton_kernels
    args = (key, value, *caches(), SLOTS)
    torch.library.opcheck(ops.reshape_and_cache_.default, args, test_utils="test_schema")
    args = (POSITIONS, query, *args, angles(), 16, True)
    torch.library.opcheck(ops.rotary_embedding_reshape_and_cache_.default, args, test_utils="test_schema")
    op = ops.qk_norm_rotary_embedding_reshape_and_cache_.default
    torch.library.opcheck(op, normed(args, torch.float32), test_utils="test_schema")
