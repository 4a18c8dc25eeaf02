"""The kernels of attention of one query per sequence, run by Triton's interpreter on the CPU."""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = pytest.mark.interpreter

FLOATS = (torch.float32, torch.float16)  # the interpreter multiplies the bits of bfloat16 matrices as integers


@pytest.fixture
def kernels():
    from irframework_triton_kernels import decoding

    return decoding


def call(
    lengths: tuple[int, ...],
    heads: tuple[int, int] = (4, 2),
    sizes: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    **more: object,
) -> dict[str, object]:
    """A sequence of each length; its blocks lie anywhere, and what no sequence uses is NaN."""
    generator = torch.Generator().manual_seed(sum(lengths) + heads[0])
    width = max(1, *(-(-length // block_size) for length in lengths))
    blocks = torch.randperm(len(lengths) * width + 1, generator=generator)[: len(lengths) * width]
    table = blocks.view(len(lengths), width).to(torch.int32)
    caches = [torch.full((len(blocks) + 1, block_size, heads[1], size), torch.nan, dtype=dtype) for size in sizes]
    for row, length in zip(table, lengths, strict=True):
        for place in range(length):
            for cache, size in zip(caches, sizes, strict=True):
                block = int(row[place // block_size])
                cache[block, place % block_size] = torch.randn(heads[1], size, generator=generator).to(dtype)
        row[-(-length // block_size) :] = -7
    return {
        "query": torch.randn(len(lengths), heads[0], sizes[0], generator=generator).to(dtype),
        "key": None,
        "value": None,
        "cu_seqlens_q": torch.arange(len(lengths) + 1, dtype=torch.int32),
        "max_seqlen_q": 1,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "key_cache": caches[0],
        "value_cache": caches[1],
        "block_table": table,
        **more,
    }


def assert_near(kernels, given: dict[str, object]) -> Tensor:
    """Within roundings of the weights and of the result."""
    exact = ir.ops.attention.native(
        **{k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}
    )
    got = kernels.attention(**given)
    assert got.shape == exact.shape
    assert got.dtype == given["query"].dtype
    eps = max(torch.finfo(got.dtype).eps, 1e-6)
    assert (got.double() - exact).abs().max() <= 6 * eps
    return got


@pytest.mark.parametrize("dtype", FLOATS)
def test_queries_attend_to_the_keys_of_their_sequences(kernels, dtype):
    assert_near(kernels, call((5, 40, 1), dtype=dtype))


@pytest.mark.parametrize(
    ("heads", "sizes", "block_size"),
    [((1, 1), (16, 16), 16), ((6, 2), (24, 40), 5), ((18, 1), (8, 8), 16), ((3, 3), (3, 5), 4)],
)
def test_any_number_and_size_of_heads_and_blocks_is_taken(kernels, heads, sizes, block_size):
    assert_near(kernels, call((9, 33), heads, sizes, block_size=block_size))


@pytest.mark.parametrize(
    "more",
    [
        {"scale": 0.7},
        {"window": 7},
        {"window": 1},
        {"window": 70},
        {"soft_cap": 0.9},
        {"sinks": torch.tensor([-1.0, 0.5, 3.0, 200.0])},
        {"sinks": torch.zeros(4), "soft_cap": 20, "window": 20, "scale": 2, "causal": False},
    ],
)
def test_scores_are_scaled_capped_and_shared_with_sinks(kernels, more):
    assert_near(kernels, call((3, 37), **more))


@pytest.mark.parametrize("more", [{}, {"sinks": torch.tensor([0.0, 2.0])}, {"window": 300}])
def test_long_sequences_are_shared_out_to_programs(kernels, more):
    given = call((700, 3, 256), (2, 1), **more)
    whole = assert_near(kernels, given)
    for row in range(3):  # the same bits alone, where there are fewer shares
        width = -(-int(given["seq_lens"][row]) // 16)
        alone = {
            **given,
            "query": given["query"][row : row + 1],
            "cu_seqlens_q": torch.tensor([0, 1], dtype=torch.int32),
            "seq_lens": given["seq_lens"][row : row + 1],
            "block_table": given["block_table"][row : row + 1, :width],
        }
        assert torch.equal(kernels.attention(**alone)[0], whole[row])


def test_a_sequence_longer_than_all_least_shares_is_shared_out_evenly(kernels, monkeypatch):
    from irframework_triton_kernels.launch import decoding

    monkeypatch.setattr(decoding, "MOST_SHARES", 2)
    assert_near(kernels, call((1100, 130), (1, 1)))


def test_tokens_without_keys_or_without_a_sequence_give_zeros(kernels):
    given = call((5, 0, 4, 6))
    assert (assert_near(kernels, given)[1] == 0).all()
    given["cu_seqlens_q"] = torch.tensor(
        [0, 1, 1, 2, 2], dtype=torch.int32
    )  # sequences without a query; two tokens belong to none
    got = assert_near(kernels, given)
    assert (got[2:] == 0).all()
    assert (got[:2] != 0).any(-1).all()
    none = {**given, "query": given["query"][:0], "cu_seqlens_q": torch.zeros(5, dtype=torch.int32)}
    assert kernels.attention(**none).shape == (0, 4, 16)


def test_parts_of_tensors_are_read(kernels):
    given = call((5, 20))
    for name in ("query", "key_cache", "value_cache"):
        given[name] = torch.cat((given[name], given[name]), -1)[..., : given[name].shape[-1]]
    assert_near(kernels, given)


@pytest.mark.parametrize(
    ("name", "number"), [("block_table", 99), ("block_table", -1), ("seq_lens", 2**31 - 1), ("seq_lens", -4)]
)
def test_what_does_not_exist_is_not_read(kernels, name, number):
    given = call((5, 20))
    given[name] = torch.full_like(given[name], number)
    around = [torch.cat((torch.full_like(given[n], torch.nan), given[n])) for n in ("key_cache", "value_cache")]
    given["key_cache"], given["value_cache"] = (t[t.shape[0] // 2 :] for t in around)
    got = kernels.attention(**given)
    # A length beyond the table ends with it: what is read there are slots that no token was written to.
    assert got.isnan().any() if number > 1000 else (got == 0).all()


def test_as_many_lengths_as_sequences_are_needed(kernels):
    given = call((5, 20))
    with pytest.raises(ValueError, match="cu_seqlens_q has 3 entries, does not fit 1 sequences"):
        kernels.attention(**{**given, "seq_lens": given["seq_lens"][:1]})


def test_the_torch_op_does_what_its_schema_says(kernels):
    kernels.launches()
    given = call((5, 20))
    names = ("query", "key_cache", "value_cache", "cu_seqlens_q", "seq_lens", "block_table")
    args = (*(given[name] for name in names), None, 0.3, None, None, None, None)
    op = torch.ops.irframework_triton_kernels.decode_attention.default
    torch.library.opcheck(op, args, test_utils="test_schema")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("lengths", [(5, 40, 1), (700, 3)])
def test_with_an_output_scale_it_stores_the_codes_of_its_result(kernels, dtype, lengths):
    given = call(lengths, dtype=dtype)
    for scale in (torch.tensor([0.004]), torch.tensor(0.3)):
        got = kernels.attention(**given, output_scale=scale)
        want = ir.ops.static_quant_fp8.native(kernels.attention(**given), scale)
        assert got.dtype == torch.float8_e4m3fn
        assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
