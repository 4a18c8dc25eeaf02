"""Attention of one query for each sequence by the C++ kernel, straight through its torch op, against float64."""

import math
from typing import Any

import pytest
import torch
from irframework_vllm_c import implementations
from torch import Tensor

import irframework as ir

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
OPS = torch.ops.irframework_vllm_c
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 3.0])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": -0.4},
    "window": {"window": 33},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": SINKS},
    "all": {"scale": 0.4, "window": 4, "soft_cap": 2.0, "sinks": SINKS},
}


def integers(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def made(
    lengths: tuple[int, ...],
    kv_heads: int = 2,
    size: int = 16,
    value_size: int = 16,
    block_size: int = 4,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """A call on a paged cache: six heads, blocks in no order, and NaN in every slot that no sequence uses."""
    used = [-(-length // block_size) for length in lengths]
    order = torch.randperm(sum(used) + 2, generator=torch.Generator().manual_seed(0)).tolist()
    table = torch.full((len(lengths), max(used, default=0) + 1), -1, dtype=torch.int32)
    caches = [normal(len(order), block_size, kv_heads, s, dtype=dtype, seed=s) for s in (size, value_size)]
    seen = torch.zeros(len(order), block_size, dtype=torch.bool)
    for sequence, count in enumerate(used):
        table[sequence, :count] = integers(*(order.pop() for _ in range(count)))
        for block in range(count):
            seen[table[sequence, block], : lengths[sequence] - block * block_size] = True
    for cache in caches:
        cache[~seen] = math.nan
    return {
        "query": normal(len(lengths), 6, size, dtype=dtype, seed=7),
        "keys": caches[0],
        "values": caches[1],
        "cu_seqlens_q": torch.arange(len(lengths) + 1, dtype=torch.int32),
        "seq_lens": integers(*lengths),
        "block_table": table,
    }


def rows_of(call: dict[str, Any], name: str, sequence: int) -> Tensor:
    """The keys or values of a sequence, one behind the other."""
    cache, blocks = call[name], call["block_table"][sequence].clamp(min=0).long()
    rows: Tensor = cache[blocks].flatten(0, 1)[: int(call["seq_lens"][sequence])]
    return rows


def attended(call: dict[str, Any], **options: Any) -> Tensor:
    """The kernel's result."""
    given = {"max_seqlen_k": None, "scale": call["query"].shape[-1] ** -0.5, "window": None}
    result: Tensor = OPS.decode_attention(**(given | {"soft_cap": None, "sinks": None} | call | options))
    return result


def by_hand(
    call: dict[str, Any],
    scale: float | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """One sequence and head at a time, in float64."""
    query, heads = call["query"].double(), call["query"].shape[1]
    out = torch.zeros(*query.shape[:2], call["values"].shape[-1], dtype=torch.float64)
    for sequence in range(query.shape[0]):
        key, value = (rows_of(call, name, sequence).double() for name in ("keys", "values"))
        first = 0 if window is None else max(0, key.shape[0] - window)
        for head in range(heads):
            kv_head = head // (heads // key.shape[1])
            scores = key[first:, kv_head] @ query[sequence, head] * (scale or query.shape[-1] ** -0.5)
            if soft_cap is not None:
                scores = soft_cap * torch.tanh(scores / soft_cap)
            if key.shape[0]:
                top = scores.max()
                weights = (scores - top).exp()
                total = weights.sum() + (0.0 if sinks is None else (sinks[head].double() - top).exp())
                out[sequence, head] = weights / total @ value[first:, kv_head]
    return out


def check(got: Tensor, want: Tensor) -> None:
    """In 16-bit types the only rounding is that of the result."""
    wide = got.dtype == torch.float32
    torch.testing.assert_close(
        got.double(), want, atol=2e-6 if wide else 1e-6, rtol=1e-5 if wide else torch.finfo(got.dtype).eps
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_each_option_is_that_of_the_definition(isa: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    call = made((1, 45, 0, 7), dtype=dtype)
    check(attended(call, **options), by_hand(call, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(8, 8), (40, 24), (64, 128), (72, 256), (256, 16)], ids=str)
def test_head_sizes_of_eights_are_taken(isa: str, dtype: torch.dtype, sizes: tuple[int, int]) -> None:
    call = made((1, 45, 7), size=sizes[0], value_size=sizes[1], dtype=dtype)
    check(attended(call), by_hand(call))


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_heads_in_groups_of_any_size_read_their_own_keys(isa: str, kv_heads: int) -> None:
    call = made((5, 33), kv_heads=kv_heads)
    check(attended(call), by_hand(call))


@pytest.mark.parametrize("block_size", [1, 3, 16, 100])
def test_blocks_may_have_any_size(isa: str, block_size: int) -> None:
    call = made((1, 45, 100), block_size=block_size)
    check(attended(call), by_hand(call))


@pytest.mark.parametrize("options", [{}, OPTIONS["all"], {"window": 600}], ids=["plain", "all", "window"])
def test_a_long_sequence_is_put_together_from_its_parts(isa: str, options: dict[str, Any]) -> None:
    call = made((1100, 3, 1024), block_size=16)
    check(attended(call, **options), by_hand(call, **options))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sinks_may_have_another_dtype(isa: str, dtype: torch.dtype) -> None:
    call, sinks = made((9, 2)), torch.stack((SINKS, SINKS), 1).to(dtype)[:, 0]
    check(attended(call, sinks=sinks), by_hand(call, sinks=sinks))


def contiguous(call: dict[str, Any]) -> dict[str, Any]:
    """The same call on keys that lie one behind the other."""
    count = len(call["seq_lens"])
    rows = {
        name: torch.cat([rows_of(call, name, sequence) for sequence in range(count)]) for name in ("keys", "values")
    }
    return call | rows | {"block_table": None}


def test_keys_that_lie_side_by_side_give_the_same_bits(isa: str) -> None:
    call = made((1, 45, 0, 7, 700))
    assert torch.equal(attended(contiguous(call)), attended(call))


def test_without_lengths_each_query_sees_its_own_key(isa: str) -> None:
    call = made((1, 1, 1))
    assert torch.equal(attended(contiguous(call) | {"seq_lens": None}), attended(call))


def test_layouts_with_a_dense_last_dimension_are_taken(isa: str) -> None:
    call = made((6, 45))
    want = attended(call)
    call["query"] = torch.cat((call["query"], call["query"]), -1).transpose(0, 1).contiguous().transpose(0, 1)[..., :16]
    call["keys"], call["values"] = torch.stack((call["keys"], call["values"]), 1).unbind(1)
    call["block_table"] = torch.cat((call["block_table"], call["block_table"]), 1)[:, : call["block_table"].shape[1]]
    assert torch.equal(attended(call), want)


def test_a_result_does_not_depend_on_the_batch_or_the_threads(isa: str) -> None:
    call, threads = made((700, 45, 1300), size=64, value_size=64, block_size=16), torch.get_num_threads()
    alone = [
        attended(call | {"query": call["query"][i : i + 1], "cu_seqlens_q": integers(0, 1)}
                 | {name: call[name][i : i + 1] for name in ("seq_lens", "block_table")})
        for i in range(3)
    ]  # fmt: skip
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert torch.equal(attended(call), torch.cat(alone))
    finally:
        torch.set_num_threads(threads)


def test_a_token_of_no_sequence_and_a_sequence_without_a_query_are_left_out(isa: str) -> None:
    call = made((5, 9, 4))
    want = attended(call)
    got = attended(call | {"cu_seqlens_q": integers(0, 1, 1, 2)})
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[2], torch.zeros_like(got[2]))
    moved = call | {"query": torch.stack((call["query"][0], call["query"][2], call["query"][1]))}
    assert torch.equal(attended(moved | {"cu_seqlens_q": integers(0, 1, 1, 2)})[:2], want[[0, 2]])


NUMBERS: dict[str, tuple[dict[str, Any], str]] = {
    "first offset": ({"cu_seqlens_q": integers(1, 1, 2, 3)}, "cu_seqlens_q must start with 0, it starts with 1"),
    "offsets descend": ({"cu_seqlens_q": integers(0, 1, 0, 1)}, "gives sequence 1 -1; a sequence has one query"),
    "two queries": ({"cu_seqlens_q": integers(0, 1, 3, 3)}, "gives sequence 1 2; a sequence has one query"),
    "far offsets": ({"cu_seqlens_q": integers(0, 2**31 - 1, -(2**31), 3)}, "gives sequence 0 2147483647;"),
    "too few queries": ({"query": normal(2, 6, 16)}, "cu_seqlens_q ends with 3, but there are 2 queries"),
    "negative length": ({"seq_lens": integers(5, -1, 6)}, "seq_lens gives sequence 1 -1"),
    "too long": ({"seq_lens": integers(5, 9, 2**31 - 1)}, "seq_lens gives sequence 2 2147483647; it may have 0 to"),
    "longer than stated": ({"max_seqlen_k": 8}, "seq_lens gives sequence 1 9; it may have 0 to 8 keys"),
    "negative bound": ({"max_seqlen_k": -1}, "max_seqlen_k must not be negative"),
}


@pytest.mark.parametrize(("wrong", "message"), NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("paged", [True, False])
def test_wrong_numbers_are_refused(wrong: dict[str, Any], message: str, paged: bool) -> None:
    call = made((5, 9, 6))
    with pytest.raises(RuntimeError, match=message):
        attended((call if paged else contiguous(call)) | wrong)


@pytest.mark.parametrize("block", [-1, 9, 2**31 - 1])
def test_a_block_that_does_not_exist_is_refused_within_the_sequence_only(block: int) -> None:
    call = made((5, 9, 6))
    want = attended(call)
    call["block_table"][0, 2] = block
    assert torch.equal(attended(call), want)
    call["block_table"][0, 1] = block
    with pytest.raises(RuntimeError, match=f"block_table gives sequence 0 {block}; the cache has 9 blocks"):
        attended(call)


def test_more_keys_than_there_are_are_refused() -> None:
    with pytest.raises(RuntimeError, match="seq_lens adds up to 21 keys, but there are 20"):
        attended(contiguous(made((5, 9, 6))) | {"seq_lens": integers(5, 9, 7)})


def test_without_lengths_there_are_as_many_keys_as_queries() -> None:
    call = contiguous(made((1, 1, 1))) | {"seq_lens": None}
    for change, message in (({"query": normal(4, 6, 16)}, "as many keys"), ({"max_seqlen_k": 1}, "needs seq_lens")):
        with pytest.raises(RuntimeError, match=message):
            attended(call | change)


def test_what_is_refused_writes_nothing() -> None:
    assert implementations.kernels_load() is True  # it declares the overload
    call, out = made((5, 9, 6)), torch.full((3, 6, 16), 7.0)
    call["block_table"][2, 1] = 99
    given = {"max_seqlen_k": None, "scale": 1.0, "window": None, "soft_cap": None, "sinks": None}
    with pytest.raises(RuntimeError, match="block_table gives sequence 2 99"):
        OPS.decode_attention.out(**call, **given, out=out)
    assert (out == 7).all()


def test_no_numbers_get_lost_in_high_and_infinite_scores(isa: str) -> None:
    call = made((40, 40))
    call["query"][0] *= 100  # e to the power of the scores is no float32
    torch.testing.assert_close(attended(call).double(), by_hand(call), atol=1e-3, rtol=1e-3)
    call["keys"][call["block_table"][0, 3].long()] = math.nan
    got = attended(call)
    assert got[0].isnan().all()
    assert not got[1].isnan().any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": normal(3, 5, 16)}, r"query must have shape .* got \[3, 5, 16\]"),
        ({"values": normal(9, 4, 3, 16)}, "keys and values"),
        ({"keys": made((5, 9, 6))["keys"].half()}, "keys must have the dtype of query"),
        ({"query": normal(3, 6, 16).double()}, "query must be float32, bfloat16 or float16"),
        ({"seq_lens": integers(1, 2)}, "seq_lens must hold a number for each sequence"),
        ({"seq_lens": torch.tensor([5, 9, 6])}, "seq_lens must be int32"),
        ({"seq_lens": None}, "block_table needs seq_lens"),
        ({"cu_seqlens_q": integers()}, "cu_seqlens_q must hold one number more than there are sequences"),
        ({"block_table": integers(1, 2, 3)}, r"block_table must be int32, dense, with 2 dimension\(s\)"),
        ({"window": 0}, "window must be at least 1"),
        ({"soft_cap": 0.0}, "soft_cap must be more than 0"),
        ({"sinks": SINKS[:3]}, "sinks must hold a number for each head"),
    ],
)
def test_the_op_says_what_it_does_not_take(change: dict[str, Any], message: str) -> None:
    given = {"window": None, "soft_cap": None, "sinks": None, "max_seqlen_k": None, "scale": 0.25}
    with pytest.raises(RuntimeError, match=message):
        OPS.decode_attention(**(made((5, 9, 6)) | given | change))


def asked(call: dict[str, Any], **change: Any) -> dict[str, Any]:
    """The arguments of `irframework.ops.attention` for a call of the kernel."""
    rest = {name: call[name] for name in ("query", "cu_seqlens_q", "seq_lens", "block_table")}
    caches = {"key_cache": call["keys"], "value_cache": call["values"]}
    return {"key": None, "value": None, "max_seqlen_q": 1} | rest | caches | change


def test_decoding_is_given_to_the_kernel() -> None:
    call = made((5, 9, 6))
    assert ir.ops.attention.dispatch(**asked(call)).provider == "vllm_c"
    got = ir.ops.attention(**asked(call, window=4, sinks=SINKS))
    assert torch.equal(got, attended(call, window=4, sinks=SINKS))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"cu_seqlens_q": integers(0, 1, 1, 4)}, "ends with 4, but there are 3"),
        ({"seq_lens": integers(5, 9, 2000)}, "gives sequence 2 a length of 2000"),
        ({"block_table": torch.full((3, 4), 99, dtype=torch.int32)}, "gives sequence 0 block 99"),
        ({"key": normal(3, 2, 16)}, "give either key and value, or key_cache and value_cache"),
        ({"value": normal(3, 2, 16)}, "give either key and value, or key_cache and value_cache"),
        ({"value_cache": None}, "belong together; one of them is None"),
        ({"cu_seqlens_q": integers()}, "is empty"),
    ],
    ids=str,
)
def test_the_ops_own_words_are_heard(change: dict[str, Any], problem: str) -> None:
    with ir.priority(attention="vllm_c"):
        ir.ops.attention(**asked(made((5, 9, 6))))
        with pytest.raises(ir.errors.ArgumentError, match=problem):
            ir.ops.attention(**asked(made((5, 9, 6)), **change))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"max_seqlen_q": 2}, "max_seqlen_q is 2, needs one of 1"),
        (asked(made((5, 9, 6), size=12)), "its last dimension must be a multiple of 8"),
        (asked(made((5, 9, 6), size=264)), "its last dimension may be at most 256"),
        (asked(made((5, 9, 6), dtype=torch.float64)), "query is float64"),
    ],
    ids=["queries", "odd size", "large size", "dtype"],
)
def test_what_the_kernel_does_not_take_is_declined_with_the_reason(change: dict[str, Any], reason: str) -> None:
    decision = ir.explain("attention", **(asked(made((5, 9, 6))) | change))
    assert decision.provider != "vllm_c"
    assert reason in {c.provider: c.reason for c in decision.candidates}["vllm_c"]


def test_compiled_calls_use_the_kernel_for_any_batch() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda **call: ir.ops.attention(**call), backend="irframework", fullgraph=True, dynamic=True
    )
    with torch.no_grad():
        for lengths in ((5, 9, 6), (3, 40, 7, 1)):
            call = made(lengths)
            assert torch.equal(compiled(**asked(call)), attended(call))
