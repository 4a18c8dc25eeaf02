"""The rotary kernel, run by Triton's interpreter on the CPU."""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.interpreter


@pytest.fixture
def rotary():
    from irframework_triton_kernels.implementations import rotary_embedding

    return rotary_embedding


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 1)).to(dtype)


def cache_of(positions: int, rotary_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    angles = torch.outer(torch.arange(positions), 10.0 ** -torch.arange(rotary_dim // 2))
    return torch.cat((angles.cos(), angles.sin()), -1).to(dtype)


def assert_rotated(got: Tensor, positions, x, cache, head_size, is_neox) -> None:
    """One rounding of the result; the products it is the difference of are as large as the inputs."""
    exact, _ = ir.ops.rotary_embedding.native(positions, x.double(), None, cache.double(), head_size, is_neox)
    assert got.shape == x.shape
    allowed = torch.finfo(x.dtype).eps * exact.abs() + 1e-6
    assert ((got.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_queries_and_keys_are_rotated_by_their_own_head_counts(rotary, dtype, is_neox):
    positions, cache = torch.tensor([3, 0, 7, 7]), cache_of(8, 32)
    query, key = random(4, 5 * 32, dtype=dtype), random(4, 2 * 32, dtype=dtype)
    q, k = rotary(positions, query, key, cache, 32, is_neox)
    assert_rotated(q, positions, query, cache, 32, is_neox)
    assert_rotated(k, positions, key, cache, 32, is_neox)


@pytest.mark.parametrize("is_neox", [True, False])
def test_elements_behind_the_rotated_ones_are_copied(rotary, is_neox):
    positions, cache, query = torch.tensor([1, 5]), cache_of(8, 12), random(2, 3, 40)
    q, _ = rotary(positions, query, None, cache, 40, is_neox)
    assert_rotated(q, positions, query, cache, 40, is_neox)
    assert torch.equal(q[..., 12:], query[..., 12:])


def test_without_a_key_the_second_result_is_empty(rotary):
    _, k = rotary(torch.tensor([1]), random(1, 32), None, cache_of(4, 16), 16)
    assert k.shape == (0,)


@pytest.mark.parametrize("positions", [torch.tensor(2), torch.tensor([[1, 2, 3], [0, 4, 5]], dtype=torch.int32)])
@pytest.mark.parametrize("apart", [True, False])
def test_positions_of_any_rank_and_width_are_taken(rotary, positions, apart):
    cache, query = cache_of(8, 16), random(*positions.shape, 3, 16)
    query = query if apart else query.flatten(-2)
    q, _ = rotary(positions, query, None, cache, 16)
    assert_rotated(q, positions, query, cache, 16, True)


def test_slices_of_a_joint_projection_are_rotated(rotary):
    positions, cache, joint = torch.tensor([1, 5]), cache_of(8, 16), random(2, 6 * 16)
    query, key = joint[:, : 4 * 16], joint[:, 4 * 16 : 5 * 16]
    q, k = rotary(positions, query, key, cache, 16)
    assert_rotated(q, positions, query, cache, 16, True)
    assert_rotated(k, positions, key, cache, 16, True)


def test_more_heads_than_a_tile_holds_are_rotated(rotary):
    positions, cache, query = torch.tensor([1]), cache_of(8, 128), random(1, 37, 128)
    q, _ = rotary(positions, query, query[:, :19], cache, 128)
    assert_rotated(q, positions, query, cache, 128, True)


def test_a_half_precision_cache_is_read_as_it_is(rotary):
    positions, cache, query = torch.tensor([1, 2]), cache_of(8, 16, torch.float16), random(2, 16)
    q, _ = rotary(positions, query, None, cache, 16)
    assert_rotated(q, positions, query, cache, 16, True)


@pytest.mark.parametrize("position", [-1, 8, 2**40])
def test_a_position_outside_the_cache_gives_nan_for_its_token_only(rotary, position):
    q, _ = rotary(torch.tensor([1, position]), random(2, 16), None, cache_of(8, 16), 16)
    assert q.isnan().all(-1).tolist() == [False, True]


def test_no_tokens_give_empty_results(rotary):
    q, k = rotary(torch.empty(0, dtype=torch.int64), random(0, 32), random(0, 16), cache_of(8, 16), 16)
    assert q.shape == (0, 32)
    assert k.shape == (0, 16)


def test_as_many_positions_as_tokens_are_needed(rotary):
    with pytest.raises(ValueError, match=r"key has shape \(3, 16\), positions have shape \(2,\)"):
        rotary(torch.tensor([1, 2]), random(2, 16), random(3, 16), cache_of(8, 16), 16)


def test_the_torch_ops_do_what_their_schemas_say(rotary):
    rotary(torch.tensor([1]), random(1, 16), None, cache_of(8, 16), 16)
    ops, positions = torch.ops.irframework_triton_kernels, torch.tensor([1, 2])
    pair = (positions, random(2, 32), random(2, 16), cache_of(8, 16), 16, True)
    torch.library.opcheck(ops.rotary_embedding.default, pair, test_utils="test_schema")
    alone = (positions, random(2, 32), cache_of(8, 16), 16, False)
    torch.library.opcheck(ops.rotary_embedding_query.default, alone, test_utils="test_schema")
