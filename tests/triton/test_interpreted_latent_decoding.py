"""The kernel of latent attention of one query per sequence, run by Triton's interpreter on the CPU."""

import pytest
import torch
from torch import Tensor

import irframework as ir

pytest.importorskip("triton", reason="triton is not installed")
pytestmark = [pytest.mark.interpreter, pytest.mark.usefixtures("matrices_of_bfloat16")]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def kernels():
    from irframework_triton_kernels import latent_decoding

    return latent_decoding


def call(
    lengths: tuple[int, ...],
    heads: int = 4,
    sizes: tuple[int, int] = (32, 16),
    dtype: torch.dtype = torch.float32,
    block_size: int = 16,
    up: tuple[int, int] | None = None,
    **more: object,
) -> dict[str, object]:
    """A sequence of each length; its blocks lie anywhere, and what no sequence uses is NaN.

    Args:
        sizes: Elements of a row that are keys and values, and those that are turned.
        up: Elements of queries and of results outside of the latent space; None: they are in it.
    """
    generator = torch.Generator().manual_seed(sum(lengths) + heads)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    rank, rope = sizes
    width = max(1, *(-(-length // block_size) for length in lengths))
    blocks = torch.randperm(len(lengths) * width + 1, generator=generator)[: len(lengths) * width]
    table = blocks.view(len(lengths), width).to(torch.int32)
    cache = torch.full((len(blocks) + 1, block_size, rank + rope), torch.nan, dtype=dtype)
    for row, length in zip(table, lengths, strict=True):
        for place in range(length):
            cache[int(row[place // block_size]), place % block_size] = random(rank + rope)
        row[-(-length // block_size) :] = -7
    nope, value = up or (rank, None)
    return {
        "query_nope": random(len(lengths), heads, nope),
        "query_rope": random(len(lengths), heads, rope),
        "latent": None,
        "cu_seqlens_q": torch.arange(len(lengths) + 1, dtype=torch.int32),
        "max_seqlen_q": 1,
        "scale": (nope + rope) ** -0.5,
        "key_up": None if up is None else random(heads, nope, rank) / rank**0.5,
        "value_up": None if value is None else random(heads, rank, value) / rank**0.5,
        "seq_lens": torch.tensor(lengths, dtype=torch.int32),
        "latent_cache": cache,
        "block_table": table,
        **more,
    }


def assert_near(kernels, given: dict[str, object]) -> Tensor:
    """Within roundings of the queries, of the weights and of the result."""
    exact = ir.ops.mla_attention.native(
        **{k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in given.items()}
    )
    got = kernels.mla_attention(**given)
    assert got.shape == exact.shape
    assert got.dtype == given["query_nope"].dtype
    eps = max(torch.finfo(got.dtype).eps, 1e-6)
    assert (got.double() - exact).abs().max() <= 6 * eps
    return got


def bits(q: Tensor) -> Tensor:
    assert q.dtype == torch.float8_e4m3fn
    return q.view(torch.uint8)


@pytest.mark.parametrize("up", [None, (6, 5)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_queries_attend_to_the_rows_of_their_sequences(kernels, dtype, up):
    assert_near(kernels, call((5, 40, 1), dtype=dtype, up=up))


@pytest.mark.parametrize(
    ("heads", "sizes", "block_size"),
    [(1, (16, 16), 16), (6, (24, 10), 5), (18, (8, 2), 16), (3, (3, 5), 4), (2, (512, 64), 64)],
)
def test_any_number_of_heads_and_size_of_rows_and_blocks_is_taken(kernels, heads, sizes, block_size):
    assert_near(kernels, call((9, 33), heads, sizes, block_size=block_size))


def test_scores_are_scaled_and_the_last_query_sees_all_rows(kernels):
    assert_near(kernels, call((3, 37), scale=0.7, causal=False))


@pytest.fixture
def launched(monkeypatch):
    """The tile and the number of programs of each launch; as on a device with the multiprocessors it is called with."""
    from irframework_triton_kernels.launch import latent

    seen, launch = [], latent.launch

    def keep(kernel, programs, tensors, count, numbers, tile):
        seen.append((tile, programs))
        launch(kernel, programs, tensors, count, numbers, tile)

    def having(processors):
        monkeypatch.setattr(latent, "multiprocessors", lambda device: processors)
        return seen

    monkeypatch.setattr(latent, "launch", keep)
    return having


@pytest.mark.parametrize(("processors", "shares"), [(2, 1), (3, 2), (132, 3)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_long_sequences_are_shared_out_to_idle_multiprocessors(kernels, launched, dtype, processors, shares):
    seen = launched(processors)
    assert_near(kernels, call((700, 3, 256), 2, dtype=dtype))
    assert [programs for _, programs in seen] == ([3] if shares == 1 else [3 * shares, 6])


@pytest.mark.parametrize("processors", [1, 40])
@pytest.mark.parametrize("lengths", [(600,), (40, 1, 600, 0, 17)])
@pytest.mark.parametrize(("rows", "keys"), [(16, 32), (32, 64), (64, 64)])
def test_programs_of_any_number_of_heads_give_the_same_result(
    kernels, launched, monkeypatch, rows, keys, lengths, processors
):
    from irframework_triton_kernels.launch import latent
    from irframework_triton_kernels.tiles import Tile

    tile, seen = Tile(rows, keys, False, 8, stages=1), launched(processors)
    monkeypatch.setattr(latent, "latent_tile", lambda *sizes: tile)
    assert_near(kernels, call(lengths, 20, (24, 8), torch.float16))  # 20 heads are not a number of tiles
    parts = len(lengths) * -(-20 // rows)
    assert seen[0] == (tile, parts * max(1, min(3, latent.latent_programs(tile, processors) // parts)))


@pytest.mark.parametrize(("processors", "rows"), [(1, 64), (12, 32), (24, 16)])
def test_few_sequences_have_programs_of_fewer_heads(kernels, launched, processors, rows):
    seen = launched(processors)
    assert_near(kernels, call((600, 600), 40, (24, 8), torch.bfloat16))
    assert seen[0][0].rows == rows


@pytest.mark.parametrize("up", [None, (6, 5)])
def test_tokens_without_rows_or_without_a_sequence_give_zeros(kernels, up):
    given = call((5, 0, 4, 6), up=up)
    assert (assert_near(kernels, given)[1] == 0).all()
    given["cu_seqlens_q"] = torch.tensor([0, 1, 1, 2, 2], dtype=torch.int32)  # two tokens belong to no sequence
    got = assert_near(kernels, given)
    assert (got[2:] == 0).all()
    assert (got[:2] != 0).any(-1).all()
    none = {**given, **{name: given[name][:0] for name in ("query_nope", "query_rope")}}
    none["cu_seqlens_q"] = torch.zeros(5, dtype=torch.int32)
    assert kernels.mla_attention(**none).shape == (0, *got.shape[1:])
    q, scale = kernels.mla_attention_group_quant_fp8(**none, group_size=4)
    assert (q.shape, scale.shape) == ((0, got[0].numel()), (0, got[0].numel() // 4))


def test_parts_of_tensors_are_read(kernels):
    given = call((5, 20))
    for name in ("query_nope", "query_rope", "latent_cache"):
        given[name] = torch.cat((given[name], given[name]), -1)[..., : given[name].shape[-1]]
    assert_near(kernels, given)


@pytest.mark.parametrize(
    ("name", "number"), [("block_table", 99), ("block_table", -1), ("seq_lens", 2**31 - 1), ("seq_lens", -4)]
)
def test_what_does_not_exist_is_not_read(kernels, name, number):
    given = call((5, 20))
    given[name] = torch.full_like(given[name], number)
    cache = given["latent_cache"]
    given["latent_cache"] = torch.cat((torch.full_like(cache, torch.nan), cache))[len(cache) :]
    got = kernels.mla_attention(**given)
    # A length beyond the table ends with it: what is read there are slots that no token was written to.
    assert got.isnan().any() if number > 1000 else (got == 0).all()


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("seq_lens", "cu_seqlens_q has 3 entries, does not fit 1 sequences"),
        ("block_table", "cu_seqlens_q has 3 entries, does not fit 1 sequences"),
        ("query_rope", "query_rope has 1 tokens, query_nope has 2"),
    ],
)
def test_as_many_of_everything_as_there_are_sequences_are_needed(kernels, name, why):
    given = call((5, 20))
    with pytest.raises(ValueError, match=why):
        kernels.mla_attention(**{**given, name: given[name][:1]})


@pytest.mark.parametrize("up", [None, (6, 5)])
@pytest.mark.parametrize(("lengths", "dtypes"), [((5, 40, 1), FLOATS), ((700, 3), FLOATS[:1])])
def test_with_an_output_scale_it_stores_the_codes_of_its_result(kernels, lengths, dtypes, up):
    for dtype in dtypes:
        given = call(lengths, dtype=dtype, up=up)
        for scale in (torch.tensor([0.004]), torch.tensor(0.3)):
            got = kernels.mla_attention(**given, output_scale=scale)
            want = ir.ops.static_quant_fp8.native(kernels.mla_attention(**given), scale)
            assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize("up", [None, (6, 5)])
@pytest.mark.parametrize("dtype", FLOATS)
def test_groups_of_its_result_are_quantised_over_heads(kernels, dtype, up):
    given = call((5, 40, 1), dtype=dtype, up=up)
    y = kernels.mla_attention(**given).flatten(-2)
    for layout in ((y.shape[-1] // 2, False, False), (4, True, True)):
        got = kernels.mla_attention_group_quant_fp8(**given, **dict(zip(LAYOUT, layout, strict=True)))
        want = ir.ops.group_quant_fp8.native(y, *layout)
        assert torch.equal(bits(got[0]), bits(want[0]))
        assert torch.equal(got[1], want[1])


LAYOUT = ("group_size", "column_major_scales", "power_of_two_scales")


def test_the_torch_op_does_what_its_schema_says(kernels):
    kernels.launches()
    given = call((5, 20))
    names = ("query_nope", "query_rope", "latent_cache", "cu_seqlens_q", "seq_lens", "block_table")
    args = (*(given[name] for name in names), None, 0.3, None)
    op = torch.ops.irframework_triton_kernels.decode_latent_attention.default
    torch.library.opcheck(op, args, test_utils="test_schema")


@pytest.mark.parametrize("name", ["mla_attention", "mla_attention_group_quant_fp8"])
def test_generated_calls_of_one_query_for_each_sequence_are_taken_and_near_native(kernels, name):
    ir.load_plugins()
    op, taken = getattr(ir.ops, name), 0
    for shape in ((5, 34), (37, 256), (0, 64)):
        for args in op.input_generator(shape=shape, dtype=torch.float32, device="cpu"):
            given = op.bind(args)
            if op.impls["triton"].supports_args(*given) is not True:
                continue
            taken += 1
            pairs = (getattr(kernels, name)(*given), op.native(*given))
            for got, want in zip(*((t,) if isinstance(t, Tensor) else t for t in pairs), strict=True):
                assert (got.shape, got.dtype) == (want.shape, want.dtype)
                loose = (
                    {"rtol": 0.126, "atol": 2**-4} if got.dtype == torch.float8_e4m3fn else {"rtol": 1e-4, "atol": 1e-5}
                )
                torch.testing.assert_close(got.float(), want.float(), **loose)
    assert taken >= 5
