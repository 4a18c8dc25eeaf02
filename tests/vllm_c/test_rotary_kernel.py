"""rotary_embedding of the C++ kernels, straight through its torch ops."""

import pytest
import torch
from reference import exact_rotary
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
STYLES = {"neox": True, "gptj": False}


def rotary(positions: Tensor, query: Tensor, key: Tensor | None, cache: Tensor, head_size: int, is_neox: bool):
    ops = torch.ops.irframework_vllm_c
    if key is None:
        return ops.rotary_embedding_query.default(positions, query, cache, head_size, is_neox), None
    return ops.rotary_embedding.default(positions, query, key, cache, head_size, is_neox)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def cos_sin(max_position: int, rotary_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    angle = torch.arange(max_position)[:, None] / 100.0 ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(dtype)


def check_rounded_once(
    style: str, dtype: torch.dtype, cache_dtype: torch.dtype, head_size: int, rotary_dim: int
) -> None:
    positions = torch.tensor([3, 0, 19, 7, 7])
    query, key = normal(5, 3 * head_size, dtype=dtype), normal(5, 1 * head_size, dtype=dtype)
    cache = cos_sin(20, rotary_dim, cache_dtype)
    for got, x in zip(rotary(positions, query, key, cache, head_size, STYLES[style]), (query, key), strict=True):
        expected = exact_rotary(positions, x, cache, head_size, STYLES[style], torch.float32).to(dtype)
        assert torch.equal(got, expected)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_size", "rotary_dim"), [(64, 64), (128, 32), (80, 80), (6, 2), (1100, 1040), (256, 0)])
def test_rotary_is_float32_rounded_once(
    isa: str, style: str, dtype: torch.dtype, head_size: int, rotary_dim: int
) -> None:
    check_rounded_once(style, dtype, torch.float32, head_size, rotary_dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cache_dtype", DTYPES, ids=str)
def test_rotary_reads_a_cache_of_any_dtype(isa: str, cache_dtype: torch.dtype, dtype: torch.dtype) -> None:
    check_rounded_once("neox", dtype, cache_dtype, 80, 80)


@pytest.mark.parametrize("style", STYLES)
def test_rotary_takes_heads_apart_and_transposed(isa: str, style: str) -> None:
    """[batch, heads, tokens, head_size] seen through a transpose, as attention modules hold it."""
    positions = torch.tensor([[0, 1, 2], [5, 6, 7]])
    query, key = normal(2, 4, 3, 32).transpose(1, 2), normal(2, 2, 3, 32).transpose(1, 2)
    cache = cos_sin(8, 32)
    for got, x in zip(rotary(positions, query, key, cache, 32, STYLES[style]), (query, key), strict=True):
        assert torch.equal(got, exact_rotary(positions, x, cache, 32, STYLES[style], torch.float32))
        assert got.is_contiguous()


def test_rotary_takes_one_token_without_leading_dimensions() -> None:
    positions, query, cache = torch.tensor(2), normal(2 * 16), cos_sin(3, 16)
    got, _ = rotary(positions, query, None, cache, 16, True)
    assert torch.equal(got, exact_rotary(positions, query, cache, 16, True, torch.float32))


def test_rotary_reads_slices_of_a_merged_projection(isa: str) -> None:
    merged = normal(6, (4 + 2 + 2) * 16)
    query, key = merged[:, : 4 * 16], merged[:, 4 * 16 : 6 * 16]
    positions, cache = torch.arange(6), cos_sin(6, 16)
    for got, x in zip(rotary(positions, query, key, cache, 16, True), (query, key), strict=True):
        assert torch.equal(got, exact_rotary(positions, x, cache, 16, True, torch.float32))


def test_rotary_without_a_key_turns_the_query_alone() -> None:
    positions, query, cache = torch.arange(4), normal(4, 2, 8), cos_sin(4, 8)
    alone, missing = rotary(positions, query, None, cache, 8, True)
    assert missing is None
    assert torch.equal(alone, rotary(positions, query, query, cache, 8, True)[0])


def test_rotary_of_no_tokens_is_empty() -> None:
    query = torch.empty(0, 32)
    assert rotary(torch.empty(0, dtype=torch.int64), query, query, cos_sin(4, 16), 16, True)[1].shape == (0, 32)


def test_rotary_of_many_tokens_agrees_with_few(isa: str) -> None:
    positions, query, cache = torch.arange(2000) % 50, normal(2000, 9 * 64), cos_sin(50, 64)
    whole, _ = rotary(positions, query, None, cache, 64, True)
    assert torch.equal(whole[-3:], rotary(positions[-3:], query[-3:], None, cache, 64, True)[0])


@pytest.mark.parametrize("bad", [-1, 4, 2**40])
def test_rotary_refuses_positions_outside_the_cache(bad: int) -> None:
    with pytest.raises(RuntimeError, match=f"position {bad} is outside cos_sin_cache, which has 4 rows"):
        rotary(torch.tensor([0, bad]), normal(2, 16), None, cos_sin(4, 16), 16, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": torch.arange(2, dtype=torch.int32)}, "positions must be int64"),
        ({"positions": torch.arange(4)[::2]}, "positions must be contiguous"),
        ({"positions": torch.tensor(1)}, r"leading dimensions of positions \[\] .* got \[2, 32\]"),
        ({"positions": torch.arange(3)}, r"leading dimensions of positions \[3\] .* got \[2, 32\]"),
        ({"query": normal(2, 33)}, "query must have shape"),
        ({"key": normal(3, 16)}, "key must have shape"),
        ({"key": normal(2, 16, dtype=torch.float16)}, "key must have the dtype of query"),
        ({"query": normal(64, 2).t()}, "query must be contiguous in its last dimension"),
        ({"cache": cos_sin(4, 18)}, r"rotary_dim .* must be even and at most head_size"),
        ({"cache": torch.ones(4, 7)}, r"rotary_dim .* must be even"),
        ({"cache": torch.ones(4)}, r"must have shape \[max_position, rotary_dim\], got \[4\]"),
        ({"cache": cos_sin(4, 16, torch.float64)}, "cos_sin_cache must be float32, bfloat16 or float16"),
        ({"head_size": 0}, "at most head_size"),
    ],
)
def test_rotary_says_what_it_does_not_take(change: dict[str, object], message: str) -> None:
    call = {"positions": torch.arange(2), "query": normal(2, 32), "key": normal(2, 16), "cache": cos_sin(4, 16)}
    call |= {"head_size": 16, "is_neox": True} | change
    with pytest.raises(RuntimeError, match=message):
        rotary(**call)
