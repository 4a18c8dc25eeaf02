"""Attention in float64 loops, and sequences to try it on: packed, and in a cache of blocks."""

import math

import torch


def by_hand(sequences, *, scale=None, causal=True, window=None, soft_cap=None, sinks=None):
    """One query, head and key at a time, in float64. A sequence is its query, key and value, `[rows, heads, size]`."""
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
        caches.append(torch.full((len(order), block_size, *first.shape[1:]), math.nan, dtype=first.dtype))
    for sequence, (_, key, value) in enumerate(sequences):
        for block in range(used[sequence]):
            table[sequence, block] = number = order.pop()
            for cache, rows in zip(caches, (key, value), strict=True):
                part = rows[block * block_size : (block + 1) * block_size]
                cache[number, : part.shape[0]] = part
    return (*caches, table)
