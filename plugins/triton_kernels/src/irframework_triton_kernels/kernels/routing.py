# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""The choice of the experts of each token, within all experts or within its best groups of them.

What is chosen has the order of native's stable sort: the largest first, of equal ones the lower number. NaN is largest.
"""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.order import after_predecessor

SOFTMAX = tl.constexpr(0)
SIGMOID = tl.constexpr(1)
NAN_KEY = tl.constexpr(0x7FFFFFFF)
TAKEN = tl.constexpr(-0x80000000)  # below the key of every number


@triton.jit
def _keys(h):
    """Float32 numbers as integers of the same order. Both zeros are one, and all NaN."""
    bits = tl.where(h == 0.0, 0.0, h).to(tl.int32, bitcast=True)
    return tl.where(h == h, bits ^ ((bits >> 31) & 0x7FFFFFFF), NAN_KEY)


@triton.jit
def _number_of(key):
    """The number of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _scores(h, scoring: tl.constexpr):
    """The scores of logits, [tile_rows, experts]; absent experts have -inf."""
    if scoring == SOFTMAX:
        h = tl.exp(h - tl.max(h, 1)[:, None])
        return h / tl.sum(h, 1)[:, None]
    else:
        return 1.0 / (1.0 + tl.exp(-h))


@triton.jit
def _open_groups(keys, real, top_groups: tl.constexpr, counted: tl.constexpr):
    """Which groups a token may choose from, [tile_rows, groups]: the best by their `counted` largest, 1 or 2.

    Args:
        keys: [tile_rows, groups, members]; absent ones are `TAKEN`.
        real: [1, groups]: which groups there are.
    """
    best = tl.max(keys, 2)
    if counted == 2:
        first = tl.argmax(keys, 2, tie_break_left=True)
        members = tl.arange(0, keys.shape[2])[None, None, :]
        second = tl.max(tl.where(members == first[:, :, None], TAKEN, keys), 2)
        best = _keys(_number_of(best) + _number_of(second))
    best = tl.where(real, best, TAKEN)
    groups = tl.arange(0, keys.shape[1])[None, :]
    chosen = tl.zeros(best.shape, tl.int1)
    for _ in range(top_groups):
        at = tl.argmax(best, 1, tie_break_left=True)
        taken = groups == at[:, None]
        chosen = chosen | taken
        best = tl.where(taken, TAKEN, best)
    return chosen


@triton.jit(do_not_specialize=["rows"])
def routing_kernel(
    logits,
    bias,
    weights,
    ids,
    rows,
    logits_stride,
    factor,
    groups: tl.constexpr,
    members: tl.constexpr,
    top_k: tl.constexpr,
    top_groups: tl.constexpr,
    counted: tl.constexpr,
    by_logits: tl.constexpr,
    has_bias: tl.constexpr,
    renormalize: tl.constexpr,
    scoring: tl.constexpr,
    tile_rows: tl.constexpr,
    group_block: tl.constexpr,
    member_block: tl.constexpr,
    top_block: tl.constexpr,
    early: tl.constexpr,
):
    """The experts of `tile_rows` tokens and their weights. Experts are `groups` groups of `members` neighbours.

    The largest logits are looked for, or scores plus bias; with `top_groups` of 0 among all experts.
    """
    if early:
        after_predecessor()
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    live = row < rows
    # Groups are padded, so that each is a part of the tile. A place's order is that of the experts.
    place = tl.arange(0, group_block * member_block)[None, :]
    group = place // member_block
    member = place % member_block
    expert = group * members + member
    there = (group < groups) & (member < members)
    h = tl.load(logits + row * logits_stride + expert, mask=live & there, other=float("-inf")).to(tl.float32)
    # Rows behind the last hold zeros: no score of theirs is NaN.
    h = tl.where(live, h, 0.0)
    h = tl.where(there, h, float("-inf"))
    scores = _scores(h, scoring)
    if by_logits:
        choice = h
    else:
        choice = scores
    if has_bias:
        choice += tl.load(bias + expert, mask=there, other=0.0).to(tl.float32)
    keys = tl.where(there, _keys(choice), TAKEN)
    if top_groups:
        real = tl.arange(0, group_block)[None, :] < groups
        apart = tl.reshape(keys, (tile_rows, group_block, member_block))
        chosen = _open_groups(apart, real, top_groups, counted)
        # The experts of other groups count as minus infinity. 0x807FFFFF is its key.
        apart = tl.where((apart == TAKEN) | chosen[:, :, None], apart, -0x7F800001)
        keys = tl.reshape(apart, (tile_rows, group_block * member_block))
    tops = tl.arange(0, top_block)[None, :]
    best = tl.zeros((tile_rows, top_block), tl.float32)
    best_ids = tl.zeros((tile_rows, top_block), tl.int32)
    for top in range(top_k):
        at = tl.argmax(keys, 1, tie_break_left=True)[:, None]
        weight = tl.sum(tl.where(place == at, scores, 0.0), 1)[:, None]
        best = tl.where(tops == top, weight, best)
        best_ids = tl.where(tops == top, (at // member_block) * members + at % member_block, best_ids)
        keys = tl.where(place == at, TAKEN, keys)
    if renormalize:
        best = best / (tl.sum(best, 1)[:, None] + 1e-20)
    best *= tl.cast(factor, tl.float32)
    mask = live & (tops < top_k)
    tl.store(weights + row * top_k + tops, best, mask=mask)
    tl.store(ids + row * top_k + tops, best_ids, mask=mask)
