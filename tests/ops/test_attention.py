"""Attention over packed sequences, contiguous and paged: against float64 loops over sequences, queries and keys."""

import math

import pytest
import torch

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("natively")


@pytest.fixture
def natively():
    torch.manual_seed(0)
    with ir.priority(dict.fromkeys(ir.ops.__all__, "native")):
        yield


def by_hand(sequences, *, scale=None, causal=True, window=None, soft_cap=None, sinks=None):
    """One query, one head, one key at a time, in float64: a list of `(query, key, value)`, each `[rows, heads, size]`."""
    outs = []
    for query, key, value in sequences:
        query, key, value = query.double(), key.double(), value.double()
        out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=torch.float64)
        group = query.shape[1] // key.shape[1]
        for row in range(query.shape[0]):
            place = key.shape[0] - query.shape[0] + row
            for head in range(query.shape[1]):
                total = 0.0 if sinks is None else math.exp(float(sinks[head]))
                for column in range(key.shape[0]):
                    if causal and column > place:
                        continue
                    if window is not None and abs(place - column) >= window:
                        continue
                    score = float(query[row, head] @ key[column, head // group])
                    score *= query.shape[-1] ** -0.5 if scale is None else scale
                    if soft_cap is not None:
                        score = soft_cap * math.tanh(score / soft_cap)
                    total += math.exp(score)
                    out[row, head] += math.exp(score) * value[column, head // group]
                if total:
                    out[row, head] /= total
        outs.append(out)
    return torch.cat(outs)


def offsets(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def made(lengths, key_lengths=None, heads=4, kv_heads=2, size=8, value_size=None, dtype=torch.float64):
    """Sequences, one tuple each."""
    return [
        (
            torch.randn(rows, heads, size).to(dtype),
            torch.randn(keys, kv_heads, size).to(dtype),
            torch.randn(keys, kv_heads, value_size or size).to(dtype),
        )
        for rows, keys in zip(lengths, key_lengths or lengths, strict=True)
    ]


def packed(sequences):
    return tuple(torch.cat(parts) for parts in zip(*sequences, strict=True))


def paged(sequences, block_size, spare=2):
    """The same keys and values in blocks that lie in no order; what no sequence uses is NaN, table entries are -1."""
    used = [-(-key.shape[0] // block_size) for _, key, _ in sequences]
    order = torch.randperm(sum(used) + spare).tolist()
    table = torch.full((len(used), max(used) + 1), -1, dtype=torch.int32)
    caches = []
    for index in (1, 2):
        first = sequences[0][index]
        caches.append(torch.full((len(order), block_size, *first.shape[1:]), 0.0, dtype=first.dtype))
    for sequence, (_, key, value) in enumerate(sequences):
        for block in range(used[sequence]):
            table[sequence, block] = number = order.pop()
            for cache, rows in zip(caches, (key, value), strict=True):
                part = rows[block * block_size : (block + 1) * block_size]
                cache[number, : part.shape[0]] = part
    return (*caches, table)


OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.2},
    "bidirectional": {"causal": False},
    "window": {"window": 3},
    "bidirectional window": {"causal": False, "window": 2},
    "soft cap": {"soft_cap": 1.5},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "all": {"scale": 0.4, "window": 4, "soft_cap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
def test_each_sequence_attends_to_itself(options, heads):
    sequences = made((5, 1, 0, 7), heads=heads[0], kv_heads=heads[1])
    got = ir.ops.attention(*packed(sequences), offsets((5, 1, 0, 7)), 7, **options)
    torch.testing.assert_close(got, by_hand(sequences, **options))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("rows", [(1, 1, 1), (3, 1, 6), (2, 0, 4)])
def test_queries_stand_at_the_end_of_their_keys(options, rows):
    lengths = (3, 11, 6)
    sequences = made(rows, lengths)
    seen = torch.tensor(lengths, dtype=torch.int32)
    expected = by_hand(sequences, **options)
    query, key, value = packed(sequences)
    got = ir.ops.attention(query, key, value, offsets(rows), max(rows), seen, 11, **options)
    torch.testing.assert_close(got, expected)
    key_cache, value_cache, table = paged(sequences, 4)
    cached = (key_cache, value_cache, table)
    for bound in (11, 12, 200, None):
        got = ir.ops.attention(query, None, None, offsets(rows), max(rows), seen, bound, *cached, **options)
        torch.testing.assert_close(got, expected)
