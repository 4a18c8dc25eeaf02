"""Writes to the paged cache by the C++ kernels, straight through their torch ops."""

from typing import Any

import pytest
import torch
from torch import Tensor

import irframework as ir

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SLOTS = torch.tensor([6, 0, 3])
OPS = torch.ops.irframework_vllm_c


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def merged(dtype: torch.dtype = torch.float32, size: int = 16, value_size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of 5 heads, keys and values of 2, as parts of one product for 3 tokens."""
    widths = (5 * size, 2 * size, 2 * value_size)
    query, key, value = normal(3, sum(widths) + 3, dtype=dtype)[:, 3:].split(widths, -1)
    return query, key, value


def caches(dtype: torch.dtype = torch.float32, size: int = 16, value_size: int = 16) -> tuple[Tensor, Tensor]:
    return normal(2, 4, 2, size, dtype=dtype), normal(2, 4, 2, value_size, dtype=dtype, seed=1)


def angles(rotary_dim: int = 16) -> Tensor:
    turns = torch.arange(8)[:, None] / 100.0 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat((turns.cos(), turns.sin()), -1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(16, 16), (24, 7)])
def test_keys_and_values_are_copied_to_their_slots(isa: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    _, key, value = merged(dtype, *sizes)
    given = caches(dtype, *sizes)
    want = ir.ops.reshape_and_cache.native(key, value, *given, SLOTS)
    OPS.reshape_and_cache(key, value, *given, SLOTS)
    assert all(map(torch.equal, given, want))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_token_with_a_negative_slot_is_left_out(isa: str, dtype: torch.dtype) -> None:
    _, key, value = merged()
    given, slots = caches(), torch.tensor([-1, 2, -(2**31)])
    want = ir.ops.reshape_and_cache.native(key, value, *given, slots)
    around = [torch.cat((torch.full_like(t, 7.0), t, torch.full_like(t, 7.0))) for t in given]
    OPS.reshape_and_cache(key, value, *(t[2:4] for t in around), slots.to(dtype))
    assert all(torch.equal(t[2:4], right) for t, right in zip(around, want, strict=True))
    assert all((t[:2] == 7).all() and (t[4:] == 7).all() for t in around)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("fused", [False, True])
def test_a_slot_behind_the_end_is_refused_before_anything_is_written(fused: bool, dtype: torch.dtype) -> None:
    query, key, value = merged()
    given, slots = caches(), torch.tensor([1, 8, -1], dtype=dtype)
    op, before, behind = OPS.reshape_and_cache, (), ()
    if fused:
        op, before, behind = OPS.rotary_embedding_reshape_and_cache, (torch.arange(3), query), (angles(), 16, True)
    with pytest.raises(RuntimeError, match="slot_mapping holds 8, but the cache has 8 slots"):
        op(*before, key, value, *given, slots, *behind)
    assert all(map(torch.equal, given, caches()))


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("reshape_and_cache", {"slot_mapping": torch.tensor([1, 9, 2])}, "'slot_mapping' holds 9"),
        ("rotary_embedding_reshape_and_cache", {"slot_mapping": torch.tensor([1, 9, 2])}, "'slot_mapping' holds 9"),
        ("rotary_embedding_reshape_and_cache", {"positions": torch.tensor([1, 9, 2])}, "'positions' holds 9"),
    ],
)
def test_the_ops_own_words_are_heard(name: str, change: dict[str, Tensor], problem: str) -> None:
    op, (query, key, value), given = getattr(ir.ops, name), merged(), caches()
    call: dict[str, Any] = {"key": key, "value": value, "slot_mapping": SLOTS}
    call |= dict(zip(("key_cache", "value_cache"), given, strict=True))
    if op is not ir.ops.reshape_and_cache:
        call |= {"positions": torch.arange(3), "query": query, "cos_sin_cache": angles(), "head_size": 16}
    with ir.priority({name: "vllm_c"}):
        op(**call)
        for function in (op, op.maybe_inplace):
            with pytest.raises(ir.errors.ArgumentError, match=f"Op '{name}': argument {problem}"):
                function(**(call | change))
    assert all(map(torch.equal, given, caches()))


def test_heads_apart_with_strides_are_taken(isa: str) -> None:
    _, key, value = (t.unflatten(1, (-1, 16)) for t in merged())
    spread = [torch.cat((t, t), -1)[..., :16] for t in (key, value)]
    given = caches()
    want = ir.ops.reshape_and_cache.native(*spread, *given, SLOTS)
    OPS.reshape_and_cache(*spread, *given, SLOTS)
    assert all(map(torch.equal, given, want))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_neox", [True, False])
def test_the_fused_op_is_its_two_parts(isa: str, dtype: torch.dtype, is_neox: bool) -> None:
    query, key, value = merged(dtype)
    positions, given = torch.tensor([3, 0, 7]), caches(dtype)
    rotated = OPS.rotary_embedding(positions, query, key, angles(), 16, is_neox)
    want = ir.ops.reshape_and_cache.native(rotated[1], value, *given, SLOTS)
    got = OPS.rotary_embedding_reshape_and_cache(
        positions, query, key, value, *given, SLOTS, angles(), 16, is_neox
    )  # fmt: skip
    assert all(map(torch.equal, got, rotated))
    assert all(map(torch.equal, given, want))


def test_many_tokens_are_written_by_several_threads(isa: str) -> None:
    key, value = normal(3000, 4, 64), normal(3000, 4, 64, seed=1)
    given = [torch.zeros(200, 16, 4, 64) for _ in range(2)]
    slots = torch.randperm(3200, generator=torch.Generator().manual_seed(0))[:3000]
    OPS.reshape_and_cache(key, value, *given, slots)
    assert torch.equal(given[0].flatten(0, 1)[slots], key)
    assert torch.equal(given[1].flatten(0, 1)[slots], value)


def test_no_tokens_write_nothing() -> None:
    _, key, value = merged()
    given = caches()
    OPS.reshape_and_cache(key[:0], value[:0], *given, SLOTS[:0])
    assert all(map(torch.equal, given, caches()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slot_mapping": SLOTS[:, None]}, "slot_mapping must be a vector of int32 or int64"),
        ({"slot_mapping": SLOTS.float()}, "slot_mapping must be a vector of int32 or int64"),
        ({"slot_mapping": torch.zeros(6, dtype=torch.int64)[::2]}, "slot_mapping must be contiguous"),
        ({"slot_mapping": SLOTS[:2]}, r"key must have shape .* with 2 tokens"),
        ({"value": normal(3, 31)}, r"value must have shape .* got \[3, 31\] and \[2, 4, 2, 16\]"),
        ({"key": normal(32, 3).t()}, "key must be contiguous in its last dimension"),
        ({"key": normal(3, 32).double()}, "key must be float32, bfloat16 or float16"),
        ({"key_cache": caches()[0].half()}, "key_cache must have the dtype of key"),
        ({"key_cache": normal(2, 2, 4, 2, 16)[:, 0]}, "key_cache must be contiguous"),
        ({"value_cache": normal(4, 2, 2, 16)}, "the same number of blocks, of the same size"),
    ],
)
def test_the_op_says_what_it_does_not_take(change: dict[str, Any], message: str) -> None:
    _, key, value = merged()
    call: dict[str, Any] = {"key": key, "value": value, "slot_mapping": SLOTS}
    call |= dict(zip(("key_cache", "value_cache"), caches(), strict=True)) | change
    with pytest.raises(RuntimeError, match=message):
        OPS.reshape_and_cache(**call)


@pytest.mark.parametrize("name", ["reshape_and_cache", "rotary_embedding_reshape_and_cache"])
def test_a_donated_cache_is_written_in_place_eager_and_compiled(name: str) -> None:
    op = getattr(ir.ops, name)
    _, key, value = merged()
    query, positions = merged()[0], torch.tensor([3, 0, 7])

    def call(key_cache: Tensor, value_cache: Tensor) -> Any:
        if op is ir.ops.reshape_and_cache:
            return op.maybe_inplace(key, value, key_cache, value_cache, SLOTS)
        return op.maybe_inplace(positions, query, key, value, key_cache, value_cache, SLOTS, angles(), 16)

    with ir.priority({name: "vllm_c"}), torch.no_grad():
        want = call(*caches())
        for function in (call, torch.compile(call, backend="irframework", fullgraph=True)):
            given = caches()
            got = function(*given)
            torch.testing.assert_close(got, want)
            assert [t.data_ptr() for t in got[-2:]] == [t.data_ptr() for t in given]


def test_positions_of_32_bits_are_taken_by_the_fused_op() -> None:
    query, key, value = merged()
    op = ir.ops.rotary_embedding_reshape_and_cache
    args = (query, key, value, *caches(), SLOTS, angles(), 16)
    positions = torch.tensor([3, 0, 7])
    assert op.dispatch(positions.int(), *args).provider == "vllm_c"
    with ir.priority({op.name: "vllm_c"}):
        assert all(map(torch.equal, op(positions.int(), *args), op(positions, *args)))
