"""The ops of a mixture of experts against loops in float64, and the routers and experts of transformers' models."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import irframework as ir
from irframework import errors

pytestmark = pytest.mark.usefixtures("natively")

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def chosen_by_hand(choice, count):
    """The places of the largest numbers of a list; of equal ones the first."""
    return sorted(range(len(choice)), key=lambda place: (-choice[place], place))[:count]


def scores_of(row, scoring):
    row = row.double()
    return (row.softmax(0) if scoring == "softmax" else row.sigmoid()).tolist()


def routed_by_hand(logits, count, renormalize, scoring, bias=None, groups=1, best=1, factor=1.0):
    weights, ids = [], []
    for row in logits.reshape(-1, logits.shape[-1]):
        scores = scores_of(row, scoring)
        choice = [s + b for s, b in zip(scores, [0.0] * len(scores) if bias is None else bias.tolist(), strict=True)]
        size = len(choice) // groups
        parts = [sorted(choice[g * size : (g + 1) * size], reverse=True) for g in range(groups)]
        kept = chosen_by_hand([sum(p[: 1 if bias is None else 2]) for p in parts], best)
        chosen = chosen_by_hand([c if i // size in kept else -torch.inf for i, c in enumerate(choice)], count)
        total = sum(scores[i] for i in chosen) if renormalize else 1.0
        weights.append([scores[i] / total * factor for i in chosen])
        ids.append(chosen)
    shape = (*logits.shape[:-1], count)
    return torch.tensor(weights, dtype=torch.float64).reshape(shape), torch.tensor(ids).reshape(shape)


def same_routing(got, wanted):
    assert got[0].dtype == torch.float32
    assert got[1].dtype == torch.int32
    assert torch.equal(got[1].long(), wanted[1])
    torch.testing.assert_close(got[0].double(), wanted[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("count", [1, 3, 7])
def test_fused_topk_is_that_of_a_loop(dtype, scoring, renormalize, count):
    logits = torch.randn(2, 5, 7).to(dtype)
    same_routing(
        ir.ops.fused_topk(logits, count, renormalize, scoring), routed_by_hand(logits, count, renormalize, scoring)
    )


def test_of_equal_logits_the_first_expert_is_chosen():
    logits = torch.tensor([[1.0, 3, 3, 0, 3], [0, 0, 0, 0, 0]])
    assert ir.ops.fused_topk(logits, 3)[1].tolist() == [[1, 2, 4], [0, 1, 2]]
    assert ir.ops.grouped_topk(logits, 3, 1, 1)[1].tolist() == [[1, 2, 4], [0, 1, 2]]


def test_of_equal_groups_the_first_is_chosen():
    logits = torch.tensor([[0.0, 1, 0, 1, 1, 0]])
    assert ir.ops.grouped_topk(logits, 2, 3, 2)[1].tolist() == [[1, 3]]


def test_weights_that_are_all_zero_stay_zero():
    logits = torch.full((1, 4), -200.0)
    assert ir.ops.fused_topk(logits, 2, True, "sigmoid")[0].tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("groups", "best"), [(1, 1), (4, 2), (4, 4), (12, 3)])
def test_grouped_topk_is_that_of_a_loop(dtype, scoring, biased, groups, best):
    logits = torch.randn(6, 12).to(dtype)
    bias = torch.randn(12) - 1.0 if biased else None  # most choices are negative
    got = ir.ops.grouped_topk(logits, 3, groups, best, biased, scoring, bias, 2.5)
    same_routing(got, routed_by_hand(logits, 3, biased, scoring, bias, groups, best, 2.5))


def hidden_for(module):
    """Rows for a router of transformers, whose weights become random."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.randn_like(tensor) / 4)
    return torch.randn(9, module.hidden_dim)


def in_order(weights, ids):
    """Transformers leaves the order of the chosen open in places."""
    order = ids.sort(-1).indices
    return weights.gather(-1, order), ids.gather(-1, order).long()


def same_as_model(got, weights, ids):
    got, wanted = in_order(*got), in_order(weights, ids)
    assert torch.equal(got[1], wanted[1])
    torch.testing.assert_close(got[0], wanted[0].float())


@torch.no_grad()
def test_fused_topk_is_mixtrals():
    model = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    router = model.MixtralTopKRouter(model.MixtralConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=3))
    logits, weights, ids = router(hidden_for(router))
    same_as_model(ir.ops.fused_topk(logits, 3, True), weights, ids)


@torch.no_grad()
@pytest.mark.parametrize("renormalize", [True, False])
def test_fused_topk_is_qwen2s(renormalize):
    model = pytest.importorskip("transformers.models.qwen2_moe.modeling_qwen2_moe")
    config = model.Qwen2MoeConfig(hidden_size=16, num_experts=8, num_experts_per_tok=3, norm_topk_prob=renormalize)
    router = model.Qwen2MoeTopKRouter(config)
    logits, weights, ids = router(hidden_for(router))
    same_as_model(ir.ops.fused_topk(logits, 3, renormalize), weights, ids)


@torch.no_grad()
def test_fused_topk_renormalised_is_gpt_oss():
    model = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    router = model.GptOssTopKRouter(model.GptOssConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=3))
    logits, weights, ids = router(hidden_for(router))
    same_as_model(ir.ops.fused_topk(logits, 3, True), weights, ids)


@torch.no_grad()
@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_grouped_topk_is_deepseek_v2s(method):
    model = pytest.importorskip("transformers.models.deepseek_v2.modeling_deepseek_v2")
    config = model.DeepseekV2Config(
        hidden_size=16,
        num_attention_heads=4,
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        topk_method=method,
        routed_scaling_factor=1.5,
    )
    router = model.DeepseekV2TopkRouter(config)
    logits, weights, ids = router(hidden_for(router))
    groups = (4, 2) if method == "group_limited_greedy" else (1, 1)
    same_as_model(ir.ops.grouped_topk(logits, 3, *groups, renormalize=False, scaling_factor=1.5), weights, ids)


@torch.no_grad()
def test_grouped_topk_is_deepseek_v3s():
    model = pytest.importorskip("transformers.models.deepseek_v3.modeling_deepseek_v3")
    config = model.DeepseekV3Config(
        hidden_size=16, n_routed_experts=16, num_experts_per_tok=4, n_group=4, topk_group=2, routed_scaling_factor=2.5
    )
    router = model.DeepseekV3TopkRouter(config)
    hidden = hidden_for(router)
    bias = router.e_score_correction_bias.copy_(torch.rand(16))  # so that no choice is negative, see the docstring
    logits, weights, ids = router(hidden)
    same_as_model(ir.ops.grouped_topk(logits, 4, 4, 2, True, "sigmoid", bias, 2.5), weights, ids)


# --- blocks ----------------------------------------------------------------------------------------------------------


def aligned_by_hand(ids, size, experts):
    flat = ids.flatten().tolist()
    blocks = (len(flat) + experts * (size - 1)) // size
    padded, owners = [], []
    for expert in range(experts):
        mine = [pair for pair, e in enumerate(flat) if e == expert]
        while mine:
            padded += (mine[:size] + [len(flat)] * size)[:size]
            owners.append(expert)
            mine = mine[size:]
    used = len(padded)
    padded += [len(flat)] * (blocks * size - used)
    return padded, owners + [-1] * (blocks - len(owners)), [used]


@pytest.mark.parametrize("size", [1, 2, 5, 64])
@pytest.mark.parametrize("shape", [(7, 2), (1, 1), (0, 2), (2, 3, 2)])
@pytest.mark.parametrize("experts", [1, 3, 9])
def test_moe_align_block_size_is_that_of_a_loop(size, shape, experts):
    ids = torch.randint(-1, experts, shape)
    got = ir.ops.moe_align_block_size(ids, size, experts)
    assert all(part.dtype == torch.int32 for part in got)
    assert [part.tolist() for part in got] == list(aligned_by_hand(ids, size, experts))


# --- experts ---------------------------------------------------------------------------------------------------------


def gated_by_hand(h, activation):
    if activation == "swigluoai":
        gate, up = h[0::2].clamp(max=7), h[1::2].clamp(-7, 7)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    gate, up = h[: len(h) // 2], h[len(h) // 2 :]
    if activation == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def experts_by_hand(x, w13, w2, weights, ids, activation, b13=None, b2=None):
    x, w13, w2, weights = (t.double() for t in (x, w13, w2, weights))
    y = torch.zeros_like(x)
    for token, place in itertools.product(range(x.shape[0]), range(ids.shape[1])):
        expert = int(ids[token, place])
        if expert >= 0:
            h = w13[expert] @ x[token] + (0 if b13 is None else b13[expert].double())
            h = w2[expert] @ gated_by_hand(h, activation) + (0 if b2 is None else b2[expert].double())
            y[token] += weights[token, place] * h
    return y


def moe_call(dtype=torch.float32, tokens=11, experts=5, hidden=12, inter=7, top_k=2, bias=False):
    x = torch.randn(tokens, hidden, dtype=dtype)
    w13, w2 = torch.randn(experts, 2 * inter, hidden) / 4, torch.randn(experts, hidden, inter) / 3
    weights, ids = torch.rand(tokens, top_k), torch.randint(-1, experts, (tokens, top_k))
    biases = (torch.randn(experts, 2 * inter).to(dtype), torch.randn(experts, hidden).to(dtype)) if bias else ()
    return (x, w13.to(dtype), w2.to(dtype), weights, ids), biases


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swigluoai"])
@pytest.mark.parametrize("bias", [True, False])
def test_fused_moe_is_that_of_a_loop(dtype, activation, bias):
    call, biases = moe_call(dtype, bias=bias)
    got, exact = ir.ops.fused_moe(*call, activation, *biases), experts_by_hand(*call, activation, *biases)
    assert got.dtype == dtype
    assert (got.double() - exact).abs().max() <= 8 * torch.finfo(dtype).eps * exact.abs().max()


@pytest.mark.parametrize("tokens", [0, 1, 2, 40])
@pytest.mark.parametrize("experts", [1, 2, 30])
@pytest.mark.parametrize("top_k", [1, 3])
def test_fused_moe_takes_any_number_of_tokens_and_experts(tokens, experts, top_k):
    call, _ = moe_call(torch.float64, tokens, experts, top_k=top_k)
    torch.testing.assert_close(ir.ops.fused_moe(*call), experts_by_hand(*call, "silu"))


@pytest.mark.parametrize("expert", [-1, 0, 4])
def test_all_tokens_may_go_to_one_expert(expert):
    call, _ = moe_call(torch.float64)
    call[-1].fill_(expert)
    torch.testing.assert_close(ir.ops.fused_moe(*call), experts_by_hand(*call, "silu"))


def test_processes_that_have_some_experts_each_add_up_to_all():
    (x, w13, w2, weights, ids), _ = moe_call(torch.float64)
    local = [torch.where((ids >= low) & (ids < high), ids - low, -1) for low, high in ((0, 2), (2, 5))]
    parts = [
        ir.ops.fused_moe(x, w13[low:high], w2[low:high], weights, own)
        for own, (low, high) in zip(local, ((0, 2), (2, 5)), strict=True)
    ]
    torch.testing.assert_close(sum(parts), ir.ops.fused_moe(x, w13, w2, weights, ids))


def test_nan_in_one_token_stays_there():
    call, _ = moe_call(torch.float64)
    call[0][3] = torch.nan
    call[-1].clamp_(0)
    assert ir.ops.fused_moe(*call).isnan().any(-1).nonzero().tolist() == [[3]]


@torch.no_grad()
def test_fused_moe_is_mixtrals():
    model = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    (x, w13, w2, weights, ids), _ = moe_call()
    module = model.MixtralExperts(model.MixtralConfig(hidden_size=12, intermediate_size=7, num_local_experts=5))
    module.gate_up_proj.copy_(w13)
    module.down_proj.copy_(w2)
    got = ir.ops.fused_moe(x, w13, w2, weights, ids.clamp(0))
    torch.testing.assert_close(got, module(x, ids.clamp(0), weights))


@torch.no_grad()
def test_fused_moe_is_gpt_oss():
    model = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    (x, w13, w2, weights, ids), (b13, b2) = moe_call(bias=True)
    module = model.GptOssExperts(model.GptOssConfig(hidden_size=12, intermediate_size=7, num_local_experts=5))
    module.gate_up_proj.copy_(w13.transpose(1, 2))
    module.down_proj.copy_(w2.transpose(1, 2))
    module.gate_up_proj_bias.copy_(b13)
    module.down_proj_bias.copy_(b2)
    got = ir.ops.fused_moe(x * 5, w13, w2, weights, ids.clamp(0), "swigluoai", b13, b2)
    torch.testing.assert_close(got, module(x * 5, ids.clamp(0), weights))


def test_derivatives_of_the_experts_are_right():
    (x, w13, w2, weights, ids), biases = moe_call(torch.float64, 3, 2, 4, 3, bias=True)
    tensors = [t.double().requires_grad_() for t in (x, w13, w2, weights, *biases)]

    def experts(x, w13, w2, weights, *biases):
        return ir.ops.fused_moe(x, w13, w2, weights, ids, "silu", *biases)

    assert torch.autograd.gradcheck(experts, tensors)
    assert torch.autograd.gradgradcheck(experts, tensors, fast_mode=True)


@pytest.mark.parametrize("name", ["fused_topk", "grouped_topk"])
def test_derivatives_of_the_weights_are_right(name):
    logits = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    args = (2, True) if name == "fused_topk" else (2, 3, 2)
    reference = logits.softmax(-1).gather(-1, getattr(ir.ops, name)(logits, *args)[1].long())
    reference = reference / reference.sum(-1, keepdim=True)
    wanted = torch.autograd.grad(reference.sin().sum(), logits)
    got = torch.autograd.grad(getattr(ir.ops, name)(logits, *args)[0].sin().sum(), logits)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)  # the weights are float32


@pytest.mark.parametrize("name", ["fused_topk", "grouped_topk", "moe_align_block_size", "fused_moe"])
def test_vmap_is_a_loop(name):
    op = getattr(ir.ops, name)
    batches = [op.generate_inputs(shape=(4, 8)) for _ in range(3)]
    where = tuple(0 if isinstance(a, torch.Tensor) else None for a in batches[0])
    stacked = [torch.stack(a) if isinstance(a[0], torch.Tensor) else a[0] for a in zip(*batches, strict=True)]
    got, loop = torch.vmap(op, in_dims=where)(*stacked), [op(*b) for b in batches]
    for part, parts in zip(*((got,), (loop,)) if name == "fused_moe" else (got, zip(*loop, strict=True)), strict=True):
        torch.testing.assert_close(part, torch.stack(list(parts)))


# --- mistakes --------------------------------------------------------------------------------------------------------


LOGITS = torch.randn(2, 6)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (lambda: ir.ops.fused_topk(LOGITS.long(), 2), "'router_logits' must have a floating-point"),
        (lambda: ir.ops.fused_topk(torch.tensor(1.0), 1), "scalar"),
        (lambda: ir.ops.fused_topk(LOGITS, 0), "top_k=0"),
        (lambda: ir.ops.fused_topk(LOGITS, 7), "top_k=7 .* 6"),
        (lambda: ir.ops.fused_topk(LOGITS, 2, scoring="relu"), "scoring .* 'relu'"),
        (lambda: ir.ops.grouped_topk(LOGITS, 2, 4, 1), "num_groups=4"),
        (lambda: ir.ops.grouped_topk(LOGITS, 2, 0, 1), "num_groups=0"),
        (lambda: ir.ops.grouped_topk(LOGITS, 2, 3, 4), "top_groups=4"),
        (lambda: ir.ops.grouped_topk(LOGITS, 3, 3, 1), "top_k=3 .* 2 experts"),
        (lambda: ir.ops.grouped_topk(LOGITS, 1, 3, 1, correction_bias=torch.ones(5)), "'correction_bias'"),
        (lambda: ir.ops.grouped_topk(LOGITS, 1, 3, 1, correction_bias=torch.ones(6).int()), "'correction_bias'"),
        (lambda: ir.ops.moe_align_block_size(LOGITS, 2, 6), "'topk_ids' must have dtype"),
        (lambda: ir.ops.moe_align_block_size(LOGITS.long(), 0, 6), "block_size=0"),
        (lambda: ir.ops.moe_align_block_size(LOGITS.long(), 2, 0), "num_experts=0"),
        (lambda: ir.ops.moe_align_block_size(torch.tensor([[0, 6]]), 2, 6), "expert 6; there are 6"),
        (lambda: ir.ops.moe_align_block_size(torch.tensor([[0, -2]]), 2, 6), "expert -2"),
    ],
)
def test_routing_names_the_argument_that_does_not_fit(call, problem):
    with pytest.raises(errors.ArgumentError, match=problem):
        call()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"x": torch.ones(11, 12).long()}, "'x' must have a floating-point"),
        ({"x": torch.ones(11, 13)}, "'w13' has shape"),
        ({"x": torch.ones(10, 12)}, "'topk_ids' has shape"),
        ({"w13": torch.ones(5, 13, 12)}, "'w13' has shape"),
        ({"w13": torch.ones(5, 12)}, "must be"),
        ({"w13": torch.ones(5, 14, 12).half()}, "'w13' has dtype torch.float16"),
        ({"w2": torch.ones(6, 12, 7)}, "'w13' has shape"),
        ({"topk_weights": torch.ones(11, 3)}, "'topk_weights' has shape"),
        ({"topk_weights": torch.ones(11, 2).int()}, "'topk_weights' must have a floating-point"),
        ({"topk_ids": torch.ones(11, 2)}, "'topk_ids' must have dtype"),
        ({"topk_ids": torch.ones(11, dtype=torch.int32)}, "'topk_ids' has shape"),
        ({"topk_ids": torch.full((11, 2), 5)}, "expert 5; there are 5"),
        ({"activation": "relu"}, "activation .* 'relu'"),
        ({"w13_bias": torch.ones(5, 7)}, "'w13_bias' has shape"),
        ({"w2_bias": torch.ones(5, 12).double()}, "'w2_bias' has dtype"),
        ({"w13": torch.ones(0, 14, 12), "w2": torch.ones(0, 12, 7)}, "no experts"),
    ],
)
def test_fused_moe_names_the_argument_that_does_not_fit(change, problem):
    (x, w13, w2, weights, ids), _ = moe_call()
    good = {"x": x, "w13": w13, "w2": w2, "topk_weights": weights, "topk_ids": ids}
    ir.ops.fused_moe(**good)
    with pytest.raises(errors.ArgumentError, match=problem):
        ir.ops.fused_moe(**good | change)


def test_native_reads_and_writes_nothing_outside_for_experts_that_do_not_exist():
    (x, w13, w2, weights, ids), _ = moe_call(torch.float64)
    wrong = torch.where(ids == 2, 99, torch.where(ids == 3, -7, ids))
    left_out = torch.where((ids == 2) | (ids == 3), -1, ids)
    got = ir.ops.fused_moe.native(x, w13, w2, weights, wrong)
    torch.testing.assert_close(got, ir.ops.fused_moe(x, w13, w2, weights, left_out))
