"""Fusion of what a decoder does before its attention: norms of heads, rotation, writes to the cache.

A provider `k` overwrites the caches, as kernels do.
"""

import pytest
import torch
from compiler_support import lowered

import irframework as ir
from irframework.compiler.report import last_report

pytestmark = pytest.mark.usefixtures("seeded")
TOKENS, HEADS, KV_HEADS, SIZE = 5, 4, 2, 8
CACHED = "rotary_embedding_reshape_and_cache"
NORMED = "qk_norm_rotary_embedding"
NORMED_CACHED = "qk_norm_rotary_embedding_reshape_and_cache"
ROTARY = "rotary_embedding"
FUSED = (CACHED, NORMED, NORMED_CACHED, ROTARY)
NATIVELY = {name: ["native"] for name in ir.ops.__all__}


@pytest.fixture(scope="module", autouse=True)
def _provider():
    library = torch.library.Library("tc_rotary", "DEF")
    library.define("write_(Tensor k, Tensor v, Tensor(a!) kc, Tensor(b!) vc, Tensor slots) -> ()")

    def write(k, v, kc, vc, slots):
        for cache, new in zip((kc, vc), ir.ops.reshape_and_cache.native(k, v, kc, vc, slots), strict=True):
            cache.copy_(new)

    library.impl("write_", write, "CompositeExplicitAutograd")
    torch.library.register_fake("tc_rotary::write_", lambda *args: None, lib=library)

    def overwriting(rotate):
        def implementation(positions, query, key, value, key_cache, value_cache, slot_mapping, *rest):
            query, key = rotate(positions, query, key, *rest)
            torch.ops.tc_rotary.write_(key, value, key_cache, value_cache, slot_mapping)
            return query, key, key_cache, value_cache

        return implementation

    plain, normed = ir.ops.rotary_embedding.native, ir.ops.qk_norm_rotary_embedding.native

    @ir.ops.rotary_embedding_reshape_and_cache.register_impl("k", inplace=True)
    def k(
        positions, query, key, value, key_cache, value_cache, slot_mapping, cos_sin_cache, head_size, is_neox=True
    ):  # fmt: skip
        return overwriting(plain)(
            positions, query, key, value, key_cache, value_cache, slot_mapping, cos_sin_cache, head_size, is_neox
        )

    @ir.ops.rotary_embedding.register_impl("k")
    def k_rotary(positions, query, key, cos_sin_cache, head_size, is_neox=True):
        return plain(positions, query, key, cos_sin_cache, head_size, is_neox)

    @ir.ops.qk_norm_rotary_embedding.register_impl("k")
    def k_normed(positions, query, key, query_weight, key_weight, cos_sin_cache, head_size, epsilon, is_neox=True):
        return normed(positions, query, key, query_weight, key_weight, cos_sin_cache, head_size, epsilon, is_neox)

    @ir.ops.qk_norm_rotary_embedding_reshape_and_cache.register_impl("k", inplace=True)
    def k_normed_cached(
        positions, query, key, value, key_cache, value_cache, slot_mapping, query_weight, key_weight, cos_sin_cache,
        head_size, epsilon, is_neox=True,
    ):  # fmt: skip
        return overwriting(normed)(
            positions, query, key, value, key_cache, value_cache, slot_mapping, query_weight, key_weight,
            cos_sin_cache, head_size, epsilon, is_neox,
        )  # fmt: skip

    yield
    for name in FUSED:
        getattr(ir.ops, name).unregister_impl("k")
    library._destroy()


class State:
    """Arguments of one layer."""

    def __init__(self, dtype=torch.float32, rotary=SIZE) -> None:
        self.positions = torch.randint(0, 16, (TOKENS,))
        self.qkv = torch.randn(TOKENS, (HEADS + 2 * KV_HEADS) * SIZE).to(dtype)
        self.caches = tuple(torch.randn(4, 4, KV_HEADS, SIZE).to(dtype) for _ in range(2))
        self.slots = torch.tensor([7, 0, -1, 3, 12])
        self.table = torch.randn(16, rotary).to(dtype)
        self.weights = tuple(torch.randn(SIZE).to(dtype) for _ in range(2))

    def parts(self, qkv):
        return qkv.split([HEADS * SIZE, KV_HEADS * SIZE, KV_HEADS * SIZE], -1)


def fused(program, *inputs):
    """Lower a program, compare it with eager, and return what was fused and the report."""
    torch._dynamo.reset()
    copies = [tensor.clone() for tensor in inputs]
    with torch.no_grad(), ir.priority(NATIVELY | {name: ["k"] for name in FUSED}):
        got = torch.compile(program, backend=lowered, fullgraph=True)(*copies)
    with torch.no_grad(), ir.priority(NATIVELY):
        wanted = program(*(tensor.clone() for tensor in inputs))
    torch.testing.assert_close(got, wanted, atol=0, rtol=0)
    report = last_report()
    assert report is not None
    return {name: report.fusions[name] for name in FUSED if name in report.fusions}, report


def heads(x):
    return x.unflatten(-1, (-1, SIZE))


def write(state, q, k, v, key_cache, value_cache, inplace=False, **options):
    """The two ops, one after the other."""
    q, k = ir.ops.rotary_embedding(state.positions, q, k, state.table, SIZE, **options)
    op = ir.ops.reshape_and_cache.maybe_inplace if inplace else ir.ops.reshape_and_cache
    return q, k, *op(k, v, key_cache, value_cache, state.slots)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1), (1, 3, 0, 2)])
def test_rotation_and_write_are_one_op_in_whatever_order_they_are_returned(order):
    state = State()

    def program(qkv, key_cache, value_cache):
        results = write(state, *state.parts(qkv), key_cache, value_cache)
        return tuple(results[index] for index in order)

    assert fused(program, state.qkv, *state.caches)[0] == {CACHED: 1}


@pytest.mark.parametrize("apart", [(1, 1, 1), (0, 1, 1), (1, 0, 0), (0, 0, 1)])
def test_heads_may_be_apart_or_side_by_side(apart):
    state = State()

    def program(qkv, key_cache, value_cache):
        parts = [heads(x) if own else x for x, own in zip(state.parts(qkv), apart, strict=True)]
        return write(state, *parts, key_cache, value_cache)

    assert fused(program, state.qkv, *state.caches)[0] == {CACHED: 1}


@pytest.mark.parametrize(
    ("dtype", "rotary", "options"),
    [
        (torch.float32, SIZE, {}),
        (torch.bfloat16, 4, {}),
        (torch.bfloat16, SIZE, {"is_neox": False}),
        (torch.float16, 4, {"is_neox": False}),
    ],
)
def test_every_kind_of_rotation_and_dtype_is_matched(dtype, rotary, options):
    state = State(dtype, rotary)

    def program(qkv, key_cache, value_cache):
        return write(state, *state.parts(qkv), key_cache, value_cache, **options)

    assert fused(program, state.qkv, *state.caches)[0] == {CACHED: 1}


def test_keys_that_nobody_else_reads_are_written_all_the_same():
    state = State()

    def program(qkv, key_cache, value_cache):
        q, _, *caches = write(state, *state.parts(qkv), key_cache, value_cache)
        return q, *caches

    assert fused(program, state.qkv, *state.caches)[0] == {CACHED: 1}


def test_caches_that_were_given_away_are_overwritten_by_the_fused_op_too():
    state = State()

    def program(qkv, key_cache, value_cache):
        return write(state, *state.parts(qkv), key_cache, value_cache, inplace=True)

    found, report = fused(program, state.qkv, *state.caches)
    assert found == {CACHED: 1}
    assert len(report.donated) == 2
    assert not report.kept_copies


def test_caches_that_were_not_given_away_are_copied_once_each():
    state = State()

    def program(qkv, key_cache, value_cache):
        return write(state, *state.parts(qkv), key_cache, value_cache)

    _, report = fused(program, state.qkv, *state.caches)
    assert [copy.op for copy in report.kept_copies] == [CACHED, CACHED]


@pytest.mark.parametrize("inplace", [False, True])
def test_norms_rotation_and_write_are_one_op(inplace):
    state = State()

    def program(qkv, key_cache, value_cache, *weights):
        q, k, v = state.parts(qkv)
        q, k = (ir.ops.rms_norm(heads(x), w, 1e-5).flatten(-2) for x, w in zip((q, k), weights, strict=True))
        return write(state, q, k, v, key_cache, value_cache, inplace)

    found, report = fused(program, state.qkv, *state.caches, *state.weights)
    assert found == {NORMED_CACHED: 1}
    assert not inplace or not report.kept_copies


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"),
    [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.bfloat16, torch.bfloat16)]
    + [(torch.float16, torch.bfloat16)],
)
def test_norms_and_rotation_are_one_op(dtype, weight_dtype):
    state = State(dtype)

    def program(qkv, *weights):
        q, k, _ = state.parts(qkv)
        q, k = (ir.ops.rms_norm(heads(x), w, 1e-5) for x, w in zip((q, k), weights, strict=True))
        return ir.ops.rotary_embedding(state.positions, q, k, state.table, SIZE)

    found, _ = fused(program, state.qkv, *(weight.to(weight_dtype) for weight in state.weights))
    assert found == {NORMED: 1}


def test_norms_with_different_epsilons_are_not_one_op():
    state = State()

    def program(qkv, *weights):
        q, k, _ = state.parts(qkv)
        q, k = (ir.ops.rms_norm(heads(x), w, e) for x, w, e in zip((q, k), weights, (1e-5, 1e-6), strict=True))
        return ir.ops.rotary_embedding(state.positions, q, k, state.table, SIZE)

    assert fused(program, state.qkv, *state.weights)[0] == {}


def test_each_layer_gets_its_own_queries_keys_and_values():
    state = State()

    def program(qkv, *caches):
        results = []
        for layer in range(3):
            q, k, *written = write(state, *state.parts(qkv), *caches[2 * layer : 2 * layer + 2], inplace=True)
            results += written
            qkv = torch.cat((q.sin(), k.cos(), written[1].flatten()[: TOKENS * KV_HEADS * SIZE].view(TOKENS, -1)), -1)
        return qkv, *results

    found, report = fused(program, state.qkv, *(torch.randn(4, 4, KV_HEADS, SIZE) for _ in range(6)))
    assert found == {CACHED: 3}
    assert not report.kept_copies


def test_a_cache_that_is_read_before_it_is_written_keeps_what_was_read():
    state = State()

    def program(qkv, key_cache, value_cache):
        q, k, v = state.parts(qkv)
        q, k = ir.ops.rotary_embedding(state.positions, q, k, state.table, SIZE)
        before = key_cache.sum() + q.sum()
        return q, before, *ir.ops.reshape_and_cache.maybe_inplace(k, v, key_cache, value_cache, state.slots)

    fused(program, state.qkv, *state.caches)


# --- written out in torch, and what looks like it ---------------------------------------------------------------------


def rotated(x, cos, sin):
    """Heads `[tokens, heads, size]`, angles `[tokens, half]`."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def by_hand(state, rotate):
    """Queries and keys that are turned by a function of heads, positions and table."""

    def program(qkv, positions, table):
        q, k, _ = (heads(x) for x in state.parts(qkv))
        return rotate(q, positions, table), rotate(k, positions, table)

    return fused(program, state.qkv, state.positions, state.table)[0]


def angles(positions, table):
    return table[positions].chunk(2, -1)


def test_a_rotation_that_is_written_out_is_matched():
    assert by_hand(State(), lambda x, at, table: rotated(x, *angles(at, table))) == {ROTARY: 1}


def _swapped(x, at, table):
    cos, sin = (each[:, None] for each in angles(at, table))
    a, b = x.chunk(2, -1)
    return torch.cat((b * cos + a * sin, a * cos - b * sin), -1)


def _back(x, at, table):
    cos, sin = angles(at, table)
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((a * cos + b * sin, b * cos - a * sin), -1)


def _mixed(x, at, table):
    cos, sin = (each[:, None] for each in angles(at, table))
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, a * cos + b * sin), -1)


def _over_heads(x, at, table):
    return rotated(x.transpose(1, 2).contiguous(), *(each[:, : x.shape[1] // 2] for each in angles(at, table)))


def _per_head(x, at, table):
    cos, sin = table[at[: x.shape[1]]].chunk(2, -1)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _one_angle(x, at, table):
    cos, sin = (each[:, None, :1] for each in angles(at, table))
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


NEAR_MISSES = {
    "halves are swapped": _swapped,
    "it turns the other way": _back,
    "halves are mixed up": _mixed,
    "heads are turned instead of their elements": _over_heads,
    "cosines and sines are exchanged": lambda x, at, table: rotated(x, *reversed(angles(at, table))),
    "angles belong to heads": _per_head,
    "one angle for all elements": _one_angle,
    "one position for all tokens": lambda x, at, table: rotated(x, *angles(at[:1], table)),
    "sines of another table": lambda x, at, table: rotated(x, angles(at, table)[0], angles(at, table * 2)[1]),
    "sines of other positions": lambda x, at, table: rotated(x, angles(at, table)[0], angles(at - 1, table)[1]),
    "the table lies on its side": lambda x, at, table: rotated(x, *table.t()[:, at].t().chunk(2, -1)),
    "angles are rounded": lambda x, at, table: rotated(x, *(each.half().float() for each in angles(at, table))),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_what_only_looks_like_a_rotation_stays(name):
    found = by_hand(State(), NEAR_MISSES[name])
    assert ROTARY not in found


def test_keys_that_are_turned_by_other_positions_are_not_part_of_it():
    state = State()

    def program(qkv, positions, table):
        q, k, _ = (heads(x) for x in state.parts(qkv))
        return rotated(q, *angles(positions, table)), rotated(k, *angles(positions - 1, table))

    assert fused(program, state.qkv, state.positions, state.table)[0] == {}
