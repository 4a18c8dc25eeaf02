"""The rotary embeddings: against float64, one pair of elements at a time, and the modules of models that use them."""

from types import SimpleNamespace

import pytest
import torch
from op_checks import DTYPES, check_compiled, check_compiled_gradients, check_derivatives, close, f64
from torch.testing import assert_close

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("natively")

ROWS = 96
PLACED = ("rotary_embedding", "mrope", "dual_chunk_rotary_embedding")


def model_of(name):
    """The module of a family of models in transformers."""
    return pytest.importorskip(f"transformers.models.{name}.modeling_{name}")


def angles(dim, rows=ROWS, base=100.0):
    return torch.outer(torch.arange(rows).double(), base ** (-torch.arange(0, dim, 2).double() / dim))


def cache(dim, dtype=torch.float64, rows=ROWS):
    return torch.cat((angles(dim, rows).cos(), angles(dim, rows).sin()), -1).to(dtype)


def turn(head, cos, sin, neox):
    """One head in float64, one pair at a time."""
    out, half = head.double().clone(), len(cos)
    for pair in range(half):
        first, second = (pair, half + pair) if neox else (2 * pair, 2 * pair + 1)
        a, b, c, s = (float(v) for v in (head[first], head[second], cos[pair], sin[pair]))
        out[first], out[second] = a * c - b * s, b * c + a * s
    return out


def turn_all(x, cos, sin, head_size, neox):
    """All heads of all tokens; one row of angles for a token."""
    if not x.numel():
        return x.double()
    heads = x.double().reshape(len(cos), -1, head_size)
    out = [turn(head, c, s, neox) for token, c, s in zip(heads, cos, sin, strict=True) for head in token]
    return torch.stack(out).reshape(x.shape)


def qk(lead, heads, head_size, dtype=torch.float32, apart=False):
    tail = [(h, head_size) if apart else (h * head_size,) for h in heads]
    return [torch.randn(*lead, *t).to(dtype) for t in tail]


# --- rotary_embedding, as models have it -----------------------------------------------------------------------------


def attention_layout(x, heads):
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def from_attention_layout(x):
    return x.transpose(1, 2).flatten(-2)


def llama_angles(dim, positions, dtype=torch.float32):
    at = angles(dim)[positions]
    return torch.cat((at, at), -1).cos().to(dtype), torch.cat((at, at), -1).sin().to(dtype)


def test_rotary_embedding_is_llamas():
    positions = torch.randint(0, ROWS, (2, 5))
    q, k = qk((2, 5), (4, 2), 8)
    got = ir.ops.rotary_embedding(positions, q, k, cache(8, torch.float32), 8)
    cos, sin = llama_angles(8, positions)
    model = model_of("llama").apply_rotary_pos_emb(attention_layout(q, 4), attention_layout(k, 2), cos, sin)
    assert_close(got, tuple(map(from_attention_layout, model)))


def test_rotary_embedding_of_neighbours_is_gptjs():
    positions = torch.randint(0, ROWS, (2, 5))
    (q,) = qk((2, 5), (4,), 8, apart=True)
    got, none = ir.ops.rotary_embedding(positions, q, None, cache(8, torch.float32), 8, False)
    sin, cos = (f(angles(8)[positions]).float() for f in (torch.sin, torch.cos))
    assert none is None
    assert_close(got, model_of("gptj").apply_rotary_pos_emb(q, sin, cos))


def test_rotary_embedding_of_the_first_half_of_a_head_is_glms():
    positions = torch.randint(0, ROWS, (2, 5))
    q, k = qk((2, 5), (4, 2), 16)
    got = ir.ops.rotary_embedding(positions, q, k, cache(8, torch.float32), 16, False)
    cos, sin = llama_angles(8, positions)
    model = model_of("glm").apply_rotary_pos_emb(attention_layout(q, 4), attention_layout(k, 2), cos, sin)
    assert_close(got, tuple(map(from_attention_layout, model)))


# --- mrope -----------------------------------------------------------------------------------------------------------


def axis_of(frequency, section, interleaved):
    if interleaved:
        axis = frequency % 3
        return axis if axis and frequency < 3 * section[axis] else 0
    return 0 if frequency < section[0] else 1 if frequency < section[0] + section[1] else 2


def exact_mrope(positions, x, table, head_size, section, neox, interleaved):
    half = table.shape[-1] // 2
    places = positions.reshape(3, -1)
    axes = [axis_of(j, section, interleaved) for j in range(half)]
    cos = [[table[places[axis, token], j] for j, axis in enumerate(axes)] for token in range(places.shape[1])]
    sin = [[table[places[axis, token], half + j] for j, axis in enumerate(axes)] for token in range(places.shape[1])]
    return turn_all(x, cos, sin, head_size, neox)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(
    ("section", "interleaved"),
    [([2, 3, 3], False), ([4, 2, 2], True), ([0, 8, 0], False), ([3, 2, 1], True), ([1, 2, 3], False)],
)
def test_mrope_turns_each_frequency_by_its_axis(dtype, neox, section, interleaved):
    positions = torch.randint(0, ROWS, (3, 4))
    q, k = qk((4,), (3, 1), 16, dtype)
    table = cache(2 * sum(section), dtype)
    got = ir.ops.mrope(positions, q, k, table, 16, section, neox, interleaved)
    for out, x in zip(got, (q, k), strict=True):
        close(out, exact_mrope(positions, x, table, 16, section, neox, interleaved), dtype, ulps=3)


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("lead", [(6,), (2, 3), (0,), (2, 0), ()])
def test_mrope_takes_any_leading_dimensions(lead, apart):
    positions = torch.randint(0, ROWS, (3, *lead))
    q, k = qk(lead, (2, 1), 8, apart=apart)
    got = ir.ops.mrope(positions, q, k, cache(8, torch.float32), 8, [2, 1, 1])
    for out, x in zip(got, (q, k), strict=True):
        close(out, exact_mrope(positions, x, cache(8), 8, [2, 1, 1], True, False), torch.float32, ulps=4)


@pytest.mark.parametrize("interleaved", [True, False])
def test_mrope_of_text_is_rotary_embedding(interleaved):
    positions = torch.randint(0, ROWS, (5,))
    q, k = qk((5,), (2, 1), 12)
    table = cache(12, torch.float32)
    got = ir.ops.mrope(positions.expand(3, 5), q, k, table, 12, [2, 2, 2], True, interleaved)
    for one, other in zip(got, ir.ops.rotary_embedding(positions, q, k, table, 12), strict=True):
        assert torch.equal(one, other)


def model_config(section, head_size, partial=1.0):
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": section, "partial_rotary_factor": partial}
    return SimpleNamespace(rope_parameters=rope, max_position_embeddings=ROWS, head_dim=head_size)


@pytest.mark.parametrize(
    ("family", "embedding", "section", "partial", "neox", "interleaved"),
    [
        ("qwen2_vl", "Qwen2VLRotaryEmbedding", [4, 6, 6], 1.0, True, False),
        ("qwen3_vl", "Qwen3VLTextRotaryEmbedding", [6, 5, 5], 1.0, True, True),
        ("glm4v", "Glm4vTextRotaryEmbedding", [2, 3, 3], 0.5, False, False),
    ],
    ids=["qwen2_vl", "qwen3_vl", "glm4v"],
)
def test_mrope_is_that_of_multimodal_models(family, embedding, section, partial, neox, interleaved):
    module = model_of(family)
    positions = torch.randint(0, ROWS, (3, 2, 5))
    q, k = qk((2, 5), (4, 2), 32)
    made = getattr(module, embedding)(model_config(section, 32, partial))
    cos, sin = made(q, positions)
    model = module.apply_rotary_pos_emb(attention_layout(q, 4), attention_layout(k, 2), cos, sin)
    at = torch.outer(torch.arange(ROWS).float(), made.inv_freq)
    table = torch.cat((at.cos(), at.sin()), -1)
    got = ir.ops.mrope(positions, q, k, table, 32, section, neox, interleaved)
    assert_close(got, tuple(map(from_attention_layout, model)))


def test_mrope_without_a_key_returns_none():
    positions = torch.zeros(3, 2, dtype=torch.int32)
    query = torch.randn(2, 8)
    rotated, none = ir.ops.mrope(positions, query, None, cache(8, torch.float32), 8, [2, 1, 1])
    assert none is None
    assert torch.equal(rotated, query)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"positions": torch.ones(3, 2)}, "'positions' must have dtype int32 or int64"),
        ({"positions": torch.ones(2, 2).long()}, r"'positions' must have shape \[3, ...\]"),
        ({"positions": torch.ones(()).long()}, r"'positions' must have shape \[3, ...\]"),
        ({"positions": torch.ones(3, 4).long()}, "'query' has shape"),
        ({"query": torch.ones(2, 15)}, "'query' has shape"),
        ({"query": torch.ones(2, 16).long()}, "'query' must have a floating-point"),
        ({"key": torch.ones(3, 8)}, "'key' has shape"),
        ({"cos_sin_cache": torch.ones(ROWS, 10)}, "'cos_sin_cache' must have shape"),
        ({"mrope_section": [2, 1]}, r"mrope_section=\[2, 1\] must hold three numbers whose sum is.*4"),
        ({"mrope_section": [2, 2, 1]}, "mrope_section"),
        ({"mrope_section": [6, -1, -1]}, "mrope_section"),
        ({"mrope_section": []}, "mrope_section"),
    ],
)
def test_mrope_names_the_argument_that_does_not_fit(change, problem):
    good = {
        "positions": torch.ones(3, 2).long(),
        "query": torch.randn(2, 16),
        "key": torch.randn(2, 8),
        "cos_sin_cache": cache(8, torch.float32),
        "head_size": 8,
        "mrope_section": [2, 1, 1],
    }
    ir.ops.mrope(**good)
    with pytest.raises(errors.ArgumentError, match=problem):
        ir.ops.mrope(**good | change)


# --- dual chunks -----------------------------------------------------------------------------------------------------


def places_of(position, chunk_size, local_size):
    """Where the key and the five queries of a token are rotated to."""
    length = chunk_size - local_size
    inside = position - position // length * length
    succeeding = length + inside
    return inside, (
        inside,
        chunk_size if succeeding > chunk_size else succeeding,
        chunk_size if 2 * length - 1 > chunk_size else 2 * length - 1,
        succeeding,
        chunk_size + inside,
    )


def at_places(x, places, table, head_size, neox):
    half = table.shape[-1] // 2
    return turn_all(x, [table[p, :half] for p in places], [table[p, half:] for p in places], head_size, neox)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize(
    ("chunk_size", "local_size", "dim"), [(12, 4, 8), (12, 4, 6), (16, 0, 8), (9, 8, 8), (1, 0, 8)]
)
def test_dual_chunk_queries_are_rotated_five_times(dtype, neox, apart, chunk_size, local_size, dim):
    positions = torch.tensor([0, 3, 7, 8, 11, 12, 100, 12345])
    q, k = qk((8,), (2, 1), 8, dtype, apart)
    table = cache(dim, dtype)
    queries, key = ir.ops.dual_chunk_rotary_embedding(positions, q, k, table, 8, chunk_size, local_size, neox)
    places = [places_of(p, chunk_size, local_size) for p in positions.tolist()]
    close(key, at_places(k, [place for place, _ in places], table, 8, neox), dtype, ulps=3)
    assert queries.shape == ((8, 10, 8) if apart else (8, 80))
    for variant, out in enumerate(queries.chunk(5, -2 if apart else -1)):
        close(out, at_places(q, [five[variant] for _, five in places], table, 8, neox), dtype, ulps=3)


def scores(chunk_size, local_size, tokens):
    """Products of all queries' variants and all keys, `[variant, query, key]`, of one vector at all places."""
    positions = torch.arange(tokens)
    vector = torch.randn(8, dtype=torch.float64).expand(tokens, 8)
    queries, keys = ir.ops.dual_chunk_rotary_embedding(positions, vector, vector, cache(8), 8, chunk_size, local_size)
    near = torch.outer(torch.ones(ROWS).double(), vector[0]).contiguous()
    turned, _ = ir.ops.rotary_embedding(torch.arange(ROWS), near, None, cache(8), 8)
    return queries.view(tokens, 5, 8).transpose(0, 1) @ keys.T, turned @ vector[0]


def test_products_see_the_distance_in_a_chunk_and_to_the_chunk_before():
    found, by_distance = scores(chunk_size=12, local_size=4, tokens=32)
    for query in range(32):
        for key in range(query + 1):
            chunks = query // 8 - key // 8
            if chunks == 0:
                assert_close(found[0, query, key], by_distance[query - key])
            if chunks == 1 and query % 8 <= 4:  # the nearest tokens, as far as chunk_size reaches
                assert_close(found[1, query, key], by_distance[query - key])
            if chunks == 1:
                assert_close(found[3, query, key], by_distance[query - key])
                assert_close(found[1, query, key], by_distance[min(8 + query % 8, 12) - key % 8])


def test_products_with_far_chunks_depend_on_the_key_alone():
    found, by_distance = scores(chunk_size=12, local_size=4, tokens=32)
    for key in range(8):
        for query in range(16, 32):
            assert_close(found[2, query, key], by_distance[12 - key])


def test_no_distance_is_longer_than_a_chunk_but_in_the_estimates():
    for position in range(200):
        _, five = places_of(position, 12, 4)
        assert max(five[:3]) <= 12 < 12 + 8
        assert max(five[3:]) < 12 + 8
    table = cache(8, torch.float32, rows=20)
    query = torch.randn(200, 8)
    ir.ops.dual_chunk_rotary_embedding(torch.arange(200), query, query, table, 8, 12, 4)


@pytest.mark.parametrize("lead", [(6,), (2, 3), (0,), ()])
def test_dual_chunk_takes_any_leading_dimensions_and_no_key(lead):
    positions = torch.randint(0, 1000, lead)
    (q,) = qk(lead, (2,), 8)
    queries, none = ir.ops.dual_chunk_rotary_embedding(positions, q, None, cache(8, torch.float32), 8, 12, 4)
    assert none is None
    places = [places_of(p, 12, 4)[1][0] for p in positions.flatten().tolist()]
    assert queries.shape == (*lead, 80)
    close(queries[..., :16].contiguous(), at_places(q, places, cache(8), 8, True), torch.float32, ulps=4)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"positions": torch.ones(2)}, "'positions' must have dtype"),
        ({"query": torch.ones(3, 16)}, "'query' has shape"),
        ({"key": torch.ones(2, 7)}, "'key' has shape"),
        ({"cos_sin_cache": torch.ones(19, 8)}, "at least 2 \\* chunk_size - local_size = 20 rows, it has 19"),
        ({"cos_sin_cache": torch.ones(8)}, "'cos_sin_cache' must have shape"),
        ({"local_size": 12}, "local_size=12 must be at least 0 and less than chunk_size=12"),
        ({"local_size": -1}, "local_size=-1"),
        ({"chunk_size": 0, "local_size": 0}, "chunk_size=0"),
    ],
)
def test_dual_chunk_names_the_argument_that_does_not_fit(change, problem):
    good = {
        "positions": torch.ones(2).long(),
        "query": torch.randn(2, 16),
        "key": torch.randn(2, 8),
        "cos_sin_cache": cache(8, torch.float32, rows=20),
        "head_size": 8,
        "chunk_size": 12,
        "local_size": 4,
    }
    ir.ops.dual_chunk_rotary_embedding(**good)
    with pytest.raises(errors.ArgumentError, match=problem):
        ir.ops.dual_chunk_rotary_embedding(**good | change)


# --- angles given directly -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize("dim", [8, 4])
@pytest.mark.parametrize("wide", [True, False])
def test_heads_are_turned_by_the_angles_given(dtype, neox, dim, wide):
    x = torch.randn(2, 3, 4, 8).to(dtype)
    at = torch.randn(2, 3, dim // 2, dtype=torch.float64)
    cos, sin = (t.to(torch.float32 if wide and dtype != torch.float64 else dtype) for t in (at.cos(), at.sin()))
    got = ir.ops.apply_rotary_emb(x, cos, sin, neox)
    exact = turn_all(x, cos.reshape(6, -1), sin.reshape(6, -1), 8, neox)
    close(got, exact, dtype, ulps=3)


@pytest.mark.parametrize("lead", [(3,), (1, 3), (2, 3)])
def test_angles_may_lack_leading_dimensions(lead):
    x, cos, sin = torch.randn(2, 3, 4, 8), torch.randn(*lead, 4), torch.randn(*lead, 4)
    whole = [t.expand(2, 3, 4) for t in (cos, sin)]
    assert torch.equal(ir.ops.apply_rotary_emb(x, cos, sin), ir.ops.apply_rotary_emb(x, *whole))


def test_heads_may_come_before_tokens():
    x, cos, sin = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    got = ir.ops.apply_rotary_emb(x.transpose(1, 2), cos, sin, heads_dim=-3)
    assert torch.equal(got.transpose(1, 2), ir.ops.apply_rotary_emb(x, cos, sin))


def test_angles_given_directly_turn_as_llamas():
    positions = torch.randint(0, ROWS, (2, 5))
    x = torch.randn(2, 4, 5, 8)
    cos, sin = llama_angles(8, positions)
    model, _ = model_of("llama").apply_rotary_pos_emb(x, x, cos, sin)
    assert_close(ir.ops.apply_rotary_emb(x, cos, sin, heads_dim=-3, doubled=True), model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_angles_given_directly_turn_as_those_of_the_qwen2_vision_encoder_bit_for_bit(dtype):
    x = torch.randn(7, 4, 8).to(dtype)
    cos, sin = llama_angles(8, torch.randint(0, ROWS, (7,)))
    model, _ = model_of("qwen2_vl").apply_rotary_pos_emb_vision(x, x, cos, sin)
    assert torch.equal(ir.ops.apply_rotary_emb(x, cos, sin, doubled=True), model)


def test_angles_given_directly_turn_as_gptjs():
    x, at = torch.randn(2, 5, 4, 8), torch.randn(2, 5, 4)
    model = model_of("gptj").apply_rotary_pos_emb(x, at.sin(), at.cos())
    assert_close(ir.ops.apply_rotary_emb(x, at.cos(), at.sin(), False), model)
    both = [t.repeat_interleave(2, -1) for t in (at.cos(), at.sin())]
    assert_close(ir.ops.apply_rotary_emb(x, *both, False, -2, True), model)


def test_angles_given_directly_turn_the_first_half_as_glms():
    x = torch.randn(2, 4, 5, 16)
    cos, sin = llama_angles(8, torch.randint(0, ROWS, (2, 5)))
    model, _ = model_of("glm").apply_rotary_pos_emb(x, x, cos, sin)
    assert_close(ir.ops.apply_rotary_emb(x, cos[..., :4], sin[..., :4], False, -3), model)


@pytest.mark.parametrize("shape", [(0, 4, 8), (2, 0, 4, 8), (2, 3, 0, 8)])
def test_nothing_is_turned_to_nothing(shape):
    x = torch.randn(shape)
    at = torch.randn(*shape[:-2], 4)
    assert ir.ops.apply_rotary_emb(x, at, at).shape == shape


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"x": torch.ones(2, 3, 4, 8).long()}, "'x' must have a floating-point"),
        ({"cos": torch.ones(2, 3, 4).long()}, "'cos' must have a floating-point"),
        ({"sin": torch.ones(2, 3, 4).long()}, "'sin' must have a floating-point"),
        ({"sin": torch.ones(2, 3, 3)}, "'cos' and 'sin' have shapes"),
        ({"x": torch.ones(3, 8)}, "'x' has"),
        ({"x": torch.ones(2, 4, 4, 8)}, "'x' has"),
        ({"x": torch.ones(3, 3, 4, 8)}, "'x' has"),
        ({"x": torch.ones(2, 3, 4, 6)}, "at most half a head"),
        ({"cos": torch.ones(4), "sin": torch.ones(4)}, "'x' has"),
        ({"cos": torch.ones(2, 3, 4, 4), "sin": torch.ones(2, 3, 4, 4)}, "'x' has"),
        ({"heads_dim": 1}, "heads_dim must be -2 or -3.*got 1"),
        ({"heads_dim": -3}, "'x' has"),
        ({"cos": torch.ones(2, 3, 3), "sin": torch.ones(2, 3, 3), "doubled": True}, "come in pairs, but 3"),
    ],
)
def test_apply_rotary_emb_names_the_argument_that_does_not_fit(change, problem):
    good = {"x": torch.randn(2, 3, 4, 8), "cos": torch.randn(2, 3, 4), "sin": torch.randn(2, 3, 4)}
    ir.ops.apply_rotary_emb(**good)
    with pytest.raises(errors.ArgumentError, match=problem):
        ir.ops.apply_rotary_emb(**good | change)


# --- all of them -----------------------------------------------------------------------------------------------------


def with_positions(name, change):
    op = getattr(ir.ops, name)
    arguments = op.named(op.generate_inputs(shape=(4, 64)))
    positions = arguments["positions"].clone()
    positions.view(-1)[-1] = change
    return op, arguments | {"positions": positions}


@pytest.mark.parametrize("name", PLACED)
def test_a_negative_position_is_refused(name):
    op, arguments = with_positions(name, -1)
    for _ in range(3):
        with pytest.raises(errors.ArgumentError, match=f"{name}.*'positions' holds -1; positions are at least 0"):
            op(**arguments)


@pytest.mark.parametrize("name", ["rotary_embedding", "mrope"])
def test_a_position_past_the_cache_is_refused(name):
    op, arguments = with_positions(name, 127)
    op(**arguments)
    op, arguments = with_positions(name, 128)
    for _ in range(3):
        with pytest.raises(errors.ArgumentError, match=f"{name}.*'positions' holds 128.*has 128 rows"):
            op(**arguments)


def derivable():
    positions, axes = torch.tensor([1, 3]), torch.tensor([[1, 3], [0, 2], [5, 5]])
    return {
        "mrope": (axes, f64(2, 12), f64(2, 6), cache(6), 6, [1, 1, 1]),
        "mrope interleaved, neighbours": (axes, f64(2, 8), f64(2, 8), cache(6), 8, [1, 1, 1], False, True),
        "dual_chunk_rotary_embedding": (positions, f64(2, 8), f64(2, 4), cache(4), 4, 6, 2),
        "apply_rotary_emb": (f64(2, 3, 4), f64(2, 2), f64(2, 2)),
        "apply_rotary_emb in pairs": (f64(2, 3, 6), f64(3, 4), f64(3, 4), False, -3, True),
    }


@pytest.mark.parametrize("case", derivable())
def test_first_and_second_derivatives_are_right(case):
    check_derivatives(getattr(ir.ops, case.split()[0]), derivable()[case])


def test_one_graph_serves_all_sizes():
    check_compiled(("mrope", "dual_chunk_rotary_embedding", "apply_rotary_emb"))


def test_gradients_of_a_graph_are_those_of_eager_calls():
    check_compiled_gradients(("mrope", "dual_chunk_rotary_embedding", "apply_rotary_emb"))
