"""Norms of heads before the rotary embedding by the C++ kernels, straight through their torch ops."""

from typing import Any

import pytest
import torch
from torch import Tensor

import irframework as ir

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = torch.ops.irframework_vllm_c
EPSILON = 1e-5
POSITIONS = torch.tensor([3, 0, 19, 7, 7])


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def cos_sin(rotary_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    angle = torch.arange(20)[:, None] / 100.0 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(dtype)


def normed(x: Tensor, weight: Tensor | None, size: int) -> Tensor:
    result: Tensor = OPS.rms_norm(x.unflatten(-1, (-1, size)), weight, EPSILON).flatten(-2)
    return result


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "rotary_dim"), [(64, 64), (128, 32), (80, 80), (6, 2), (1100, 1040), (256, 0)])
def test_it_is_its_two_parts_bit_for_bit(
    isa: str, is_neox: bool, dtype: torch.dtype, size: int, rotary_dim: int
) -> None:
    query, key = normal(5, 3 * size, dtype=dtype), normal(5, size, dtype=dtype)
    weights, cache = (normal(size, dtype=dtype), normal(size + 1)[1:]), cos_sin(rotary_dim)
    parts = [normed(x, weight, size) for x, weight in zip((query, key), weights, strict=True)]
    want = OPS.rotary_embedding(POSITIONS, *parts, cache, size, is_neox)
    got = OPS.qk_norm_rotary_embedding(POSITIONS, query, key, *weights, cache, size, EPSILON, is_neox)
    assert all(map(torch.equal, got, want))
    alone = OPS.qk_norm_rotary_embedding_query(POSITIONS, query, weights[0], cache, size, EPSILON, is_neox)
    assert torch.equal(alone, want[0])


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weight_dtype", [*DTYPES, None], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_it_rounds_where_native_rounds(
    isa: str, dtype: torch.dtype, weight_dtype: torch.dtype | None, cache_dtype: torch.dtype
) -> None:
    """Squares of small integers sum exactly, so the norm's scale is native's to the bit, and so must all else be."""
    x = torch.randint(-8, 9, (5, 6 * 64), generator=torch.Generator().manual_seed(1)).to(dtype)
    weights = [None if weight_dtype is None else normal(64, dtype=weight_dtype) * factor for factor in (1, 2)]
    args = (POSITIONS, x[:, :256], x[:, 256:], *weights, cos_sin(64, cache_dtype), 64, EPSILON, True)
    got, want = OPS.qk_norm_rotary_embedding(*args), ir.ops.qk_norm_rotary_embedding.native(*args)
    assert all(map(torch.equal, got, want))


def test_heads_apart_and_transposed_are_taken(isa: str) -> None:
    positions, weight = POSITIONS[:3].repeat(2, 1), normal(32)
    query, key = normal(2, 4, 3, 32).transpose(1, 2), normal(2, 2, 3, 32).transpose(1, 2)
    got = OPS.qk_norm_rotary_embedding(positions, query, key, weight, weight, cos_sin(32), 32, EPSILON, True)
    dense = OPS.qk_norm_rotary_embedding(
        positions, *(x.flatten(-2) for x in (query, key)), weight, weight, cos_sin(32), 32, EPSILON, True
    )
    assert all(torch.equal(a.flatten(-2), b) for a, b in zip(got, dense, strict=True))


def test_a_weight_with_steps_is_taken() -> None:
    query, weight = normal(5, 64), normal(32, 2)
    args = (cos_sin(32), 32, EPSILON, True)
    got = OPS.qk_norm_rotary_embedding_query(POSITIONS, query, weight[:, 0], *args)
    assert torch.equal(got, OPS.qk_norm_rotary_embedding_query(POSITIONS, query, weight[:, 0].contiguous(), *args))


def test_many_tokens_agree_with_few(isa: str) -> None:
    positions, query, key, weight = torch.arange(2000) % 20, normal(2000, 9 * 64), normal(2000, 64), normal(64)
    rest = (weight, None, cos_sin(64), 64, EPSILON, True)
    whole = OPS.qk_norm_rotary_embedding(positions, query, key, *rest)
    few = OPS.qk_norm_rotary_embedding(positions[-3:], query[-3:], key[-3:], *rest)
    assert all(torch.equal(a[-3:], b) for a, b in zip(whole, few, strict=True))


def test_no_tokens_give_nothing() -> None:
    query = torch.empty(0, 32)
    got = OPS.qk_norm_rotary_embedding(POSITIONS[:0], query, query, None, None, cos_sin(16), 16, EPSILON, True)
    assert [t.shape for t in got] == [(0, 32), (0, 32)]


# ---- with the writes to the cache ----------------------------------------------------------------------------------

SLOTS = torch.tensor([6, 0, -1, 3, 7])


def call_on_caches(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Queries of 4 heads, keys and values of 2, as parts of one product."""
    query, key, value = normal(5, 8 * 16 + 3, dtype=dtype)[:, 3:].split((64, 32, 32), -1)
    caches = [normal(2, 4, 2, 16, dtype=dtype), normal(2, 4, 2, 16, dtype=dtype) * 2]
    return {
        "positions": POSITIONS,
        "query": query,
        "key": key,
        "value": value,
        "key_cache": caches[0],
        "value_cache": caches[1],
        "slot_mapping": SLOTS,
        "query_weight": normal(16),
        "key_weight": normal(17)[1:].to(dtype),
        "cos_sin_cache": cos_sin(16),
        "head_size": 16,
        "epsilon": EPSILON,
        "is_neox": True,
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_rotated_keys_and_the_values_are_written(isa: str, dtype: torch.dtype) -> None:
    call = call_on_caches(dtype)
    names = ("positions", "query", "key", "query_weight", "key_weight", "cos_sin_cache")
    rotated = OPS.qk_norm_rotary_embedding(*(call[name] for name in names), 16, EPSILON, True)
    want = ir.ops.reshape_and_cache.native(rotated[1], call["value"], call["key_cache"], call["value_cache"], SLOTS)
    got = OPS.qk_norm_rotary_embedding_reshape_and_cache(**call)
    assert all(map(torch.equal, got, rotated))
    assert all(map(torch.equal, (call["key_cache"], call["value_cache"]), want))


def test_a_donated_cache_is_written_in_place() -> None:
    call, op = call_on_caches(), ir.ops.qk_norm_rotary_embedding_reshape_and_cache
    with ir.priority({op.name: "vllm_c"}), torch.no_grad():
        want = op(**call)
        got = op.maybe_inplace(**call | {"positions": POSITIONS.int()})
    assert all(map(torch.equal, got, want))
    assert [t.data_ptr() for t in got[2:]] == [call["key_cache"].data_ptr(), call["value_cache"].data_ptr()]


# ---- refusals, and the ops' own words ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_weight": torch.ones(8)}, r"query_weight must have shape \[16\], that of a head, got \[8\]"),
        ({"key_weight": torch.ones(1, 16)}, "key_weight must have shape"),
        ({"key_weight": torch.ones(16).double()}, "key_weight must be float32, bfloat16 or float16"),
        ({"query": normal(5, 65)}, "query must have shape"),
        ({"positions": POSITIONS + 5}, "position 24 is outside cos_sin_cache, which has 20 rows"),
        ({"slot_mapping": SLOTS + 1}, "slot_mapping holds 8, but the cache has 8 slots"),
        ({"value_cache": normal(2, 4, 2, 8)}, "value must have shape"),
    ],
)
def test_what_the_op_does_not_take_is_refused_before_a_cache_is_written(change: dict[str, Any], message: str) -> None:
    call = call_on_caches() | change
    before = call["key_cache"].clone(), call["value_cache"].clone()
    with pytest.raises(RuntimeError, match=message):
        OPS.qk_norm_rotary_embedding_reshape_and_cache(**call)
    assert all(map(torch.equal, (call["key_cache"], call["value_cache"]), before))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"query_weight": torch.ones(8)}, "'query_weight' must have shape"),
        ({"positions": POSITIONS + 5}, "'positions' holds 24"),
        ({"slot_mapping": SLOTS + 1}, "'slot_mapping' holds 8"),
        ({"key": None}, "'key_weight' is given, but 'key' is None"),
    ],
)
def test_the_ops_own_words_are_heard(change: dict[str, Any], problem: str) -> None:
    call, op = call_on_caches(), ir.ops.qk_norm_rotary_embedding_reshape_and_cache
    if change.get("key", op) is None:
        op = ir.ops.qk_norm_rotary_embedding
        for name in ("value", "key_cache", "value_cache", "slot_mapping"):
            del call[name]
    with ir.priority({op.name: "vllm_c"}):
        assert op.dispatch(**call).provider == "vllm_c"
        op(**call)
        with pytest.raises(ir.errors.ArgumentError, match=problem):
            op(**call | change)


def test_a_query_alone_is_turned_alone() -> None:
    op, query, weight = ir.ops.qk_norm_rotary_embedding, normal(5, 64), normal(16)
    with ir.priority({op.name: "vllm_c"}):
        rest = (cos_sin(16), 16, EPSILON)
        assert op.dispatch(POSITIONS, query, None, weight, None, *rest).provider == "vllm_c"
        got, nothing = op(POSITIONS, query, None, weight, None, *rest)
        assert nothing is None
        assert torch.equal(got, op(POSITIONS, query, query, weight, weight, *rest)[0])
