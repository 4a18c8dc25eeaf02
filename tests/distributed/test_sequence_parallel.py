"""Sequence parallelism: what becomes of a graph. Groups have no processes here; `test_two_processes.py` has values."""

import pytest
import torch
from parallel_support import (
    EPSILON,
    HIDDEN,
    added,
    group_without_processes,
    made_of,
    part,
    stage,
    weights,
)

import irframework as ir
from irframework.compiler.pipeline import PrePass
from irframework.distributed.sequence_parallel import plan
from irframework.settings import settings

LAYERS = 2


def x_of(tokens, *lead):
    return torch.randn(*lead, tokens, HIDDEN)


def decoder(name, size, tokens=64, layers=LAYERS):
    held = weights(layers, size, 0)
    return made_of(lambda x: stage(x, None, held, name), x_of(tokens))


def reasons(made):
    return [miss.reason for miss in made.report.missed_fusions if miss.op == "sequence_parallel"]


@pytest.mark.parametrize(("size", "layers"), [(2, 4), (8, 1)])
def test_every_sum_becomes_a_reduce_scatter_and_every_norm_is_followed_by_one_gather(divided, size, layers):
    divided()
    with group_without_processes(size) as name:
        made = decoder(name, size, layers=layers)
    sums = 2 * layers + 1
    assert made.counts == {"reduce_scatter": sums, "all_gather": sums}
    assert made.report.fusions == {"sequence_parallel": sums}
    assert made.result.shape == (64, HIDDEN)


def test_norms_and_the_residual_have_the_rows_of_one_process(divided):
    divided()
    with group_without_processes(2) as name:
        made = decoder(name, 2)
    roots = made.graph.find_nodes(op="call_function", target=torch.ops.aten.rsqrt.default)
    assert [tuple(node.meta["val"].shape) for node in roots] == [(32, 1)] * (2 * LAYERS + 1)


def test_it_is_off_by_default(configured):
    configured(fusion=False)
    with group_without_processes(2) as name:
        assert decoder(name, 2).counts == {"all_reduce": 2 * LAYERS + 1}


def test_the_pass_can_be_left_out(divided, monkeypatch):
    divided()
    monkeypatch.setenv("IRFRAMEWORK_DISABLE_PASSES", "sequence_parallel")
    settings.cache_clear()
    try:
        with group_without_processes(2) as name:
            assert decoder(name, 2).counts == {"all_reduce": 2 * LAYERS + 1}
    finally:
        monkeypatch.undo()
        settings.cache_clear()


@pytest.mark.parametrize("tokens", [1, 3, 7, 65])
def test_tokens_that_the_group_cannot_divide_are_left_alone_and_it_is_said(divided, tokens):
    divided()
    with group_without_processes(2) as name:
        made = decoder(name, 2, tokens)
    assert made.counts == {"all_reduce": 2 * LAYERS + 1}
    assert f"{tokens} tokens are not known to be a multiple of the group's size, 2" in reasons(made)


@pytest.mark.parametrize(("tokens", "divides"), [(62, False), (64, True)])
def test_fewer_tokens_than_asked_for_are_left_alone(divided, tokens, divides):
    divided(64)
    with group_without_processes(2) as name:
        made = decoder(name, 2, tokens)
    assert ("reduce_scatter" in made.counts) == divides
    assert ("62 tokens are not known to be at least 64" in reasons(made)) == (not divides)


def test_a_middle_stage_of_a_pipeline_cuts_its_residual_and_gathers_it_at_the_end(divided):
    divided()
    with group_without_processes(2) as name:
        layers = weights(LAYERS, 2, 0)
        made = made_of(lambda x, r: stage(x, r, layers, name, last=False), x_of(64), x_of(64))
    inner = 2 * LAYERS - 1  # the last sum is handed on as it is
    assert made.counts == {"reduce_scatter": inner, "all_gather": inner + 1, "own_rows": 1, "all_reduce": 1}


def test_a_last_stage_of_a_pipeline_ends_with_the_norm(divided):
    divided()
    with group_without_processes(2) as name:
        layers = weights(LAYERS, 2, 0)
        made = made_of(lambda x, r: stage(x, r, layers, name), x_of(64), x_of(64))
    assert made.counts == {"reduce_scatter": 2 * LAYERS, "all_gather": 2 * LAYERS, "own_rows": 1}


def test_layers_with_norms_on_both_sides_are_divided(divided):
    divided()
    layers = weights(LAYERS, 2, 0)

    def sandwiches(x, name):
        residual = ir.ops.all_reduce(x, name)
        for layer in layers:
            for norm, pair in zip(layer.norms, (layer.mixer, layer.dense), strict=True):
                y = part(ir.ops.rms_norm(residual, norm, EPSILON), pair, name)
                residual = residual + ir.ops.gemma_rms_norm(y, norm, EPSILON)
        return ir.ops.rms_norm(residual, norm, EPSILON)

    with group_without_processes(2) as name:
        made = made_of(lambda x: sandwiches(x, name), x_of(64))
    assert made.counts == {"reduce_scatter": 2 * LAYERS + 1, "all_gather": 2 * LAYERS + 1}


def test_a_chain_whose_residual_is_read_whole_in_every_layer_is_left_as_a_whole(divided):
    divided()
    layers = weights(LAYERS, 2, 0)

    def looked_at(x, name):
        x, residual = ir.ops.all_reduce(x, name), None
        for layer in layers:
            x, residual = added(x, residual, layer.norms[0])
            x = part(x, layer.mixer, name) + residual.amax(0)
        return added(x, residual, layer.norms[1])[0]

    with group_without_processes(2) as name:
        made = made_of(lambda x: looked_at(x, name), x_of(64))
    assert made.counts == {"all_reduce": LAYERS + 1}
    said = f"would have to be gathered for {LAYERS + 1} sums over processes; at most {LAYERS + 2} are worth it"
    assert any(said in reason for reason in reasons(made))


def test_one_norm_whose_sum_is_returned_too_is_not_worth_it(divided):
    divided()
    weight = torch.ones(HIDDEN)
    with group_without_processes(2) as name:
        made = made_of(lambda x, r: added(ir.ops.all_reduce(x, name), r, weight), x_of(64), x_of(64))
    assert made.counts == {"all_reduce": 1}
    assert reasons(made) == [
        "2 values, getitem first, would have to be gathered for 1 sums over processes; at most 1 are worth it"
    ]


def test_a_sum_without_a_norm_behind_it_is_left_and_nothing_is_said(divided):
    divided()
    weight = torch.randn(HIDDEN, HIDDEN)
    with group_without_processes(2) as name:
        made = made_of(lambda x: ir.ops.linear(ir.ops.all_reduce(x, name) + 1, weight), x_of(64))
    assert made.counts == {"all_reduce": 1}
    assert reasons(made) == []


@pytest.mark.parametrize("reduction", ["max", "product"])
def test_other_reductions_are_left(divided, reduction):
    divided()
    weight = torch.ones(HIDDEN)
    with group_without_processes(2) as name:
        made = made_of(lambda x: ir.ops.rms_norm(ir.ops.all_reduce(x, name, reduction), weight, EPSILON), x_of(64))
    assert made.counts == {"all_reduce": 1}


def test_two_groups_have_chains_of_their_own(divided):
    divided()
    weight = torch.ones(HIDDEN)
    with group_without_processes(4) as name:
        halves = torch.distributed.new_group([0, 1]).group_name

        def both(x):
            one = ir.ops.rms_norm(ir.ops.all_reduce(x, name), weight, EPSILON)
            return ir.ops.rms_norm(ir.ops.all_reduce(x + 1, halves) + one, weight, EPSILON)

        made = made_of(both, x_of(64))
    scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
    assert [node.args[2] for node in made.graph.find_nodes(op="call_function", target=scatter)] == [4, 2]
    assert made.counts == {"reduce_scatter": 2, "all_gather": 2, "own_rows": 1}


def test_batches_of_sequences_are_divided_by_rows(divided):
    divided()
    layers = weights(2, 2, 0)
    with group_without_processes(2) as name:
        made = made_of(lambda x: stage(x, None, layers, name), x_of(7, 2))
    assert made.counts == {"reduce_scatter": 5, "all_gather": 5}
    assert made.result.shape == (2, 7, HIDDEN)


def test_programs_in_plain_torch_are_divided_as_well(divided):
    divided()
    layers = weights(LAYERS, 2, 0)
    from torch.distributed._functional_collectives import all_reduce

    def norm(x, weight):
        h = x.float()
        return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPSILON)).to(x.dtype) * weight

    def plain(x, group):
        x = all_reduce(x, "sum", group)
        for layer in layers:
            for weight, (up, down) in zip(layer.norms, (layer.mixer, layer.dense), strict=True):
                y = torch.nn.functional.linear(norm(x, weight), up).tanh()
                x = x + all_reduce(torch.nn.functional.linear(y, down), "sum", group)
        return norm(x, layers[0].norms[0])

    with group_without_processes(2):
        made = made_of(lambda x: plain(x, torch.distributed.group.WORLD), x_of(6, 4))
    assert made.counts == {"reduce_scatter": 2 * LAYERS + 1, "all_gather": 2 * LAYERS + 1}


def test_codes_are_gathered_as_bytes(divided):
    divided()
    weight, scale = torch.ones(HIDDEN), torch.ones(1)

    def quantised(x, name):
        q = ir.ops.static_quant_fp8(ir.ops.rms_norm(ir.ops.all_reduce(x, name), weight, EPSILON), scale)
        return q.float().sum(0)

    with group_without_processes(2) as name:
        made = made_of(lambda x: quantised(x, name), x_of(64))
    assert made.counts == {"reduce_scatter": 1, "all_gather": 1}
    (gather,) = made.graph.find_nodes(
        op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default
    )
    assert gather.meta["val"].dtype == torch.uint8


def test_a_training_graph_is_left(divided):
    divided()
    weight = torch.ones(HIDDEN, requires_grad=True)
    with group_without_processes(2) as name:
        made = made_of(
            lambda x: ir.ops.rms_norm(ir.ops.all_reduce(x, name), weight, EPSILON).sum(0), x_of(64), grad=True
        )
    assert made.counts == {"all_reduce": 1}


@pytest.mark.parametrize("known", [False, True])
def test_an_unknown_number_of_tokens_must_be_known_to_be_divisible(divided, known):
    divided()
    layers = weights(2, 2, 0)
    x = x_of(64)
    torch._dynamo.mark_dynamic(x, 0)

    def program(x, name):
        if known:
            torch._check(x.shape[0] % 2 == 0)
        return stage(x, None, layers, name)

    with group_without_processes(2) as name:
        made = made_of(lambda x: program(x, name), x)
    assert made.counts == ({"reduce_scatter": 5, "all_gather": 5} if known else {"all_reduce": 5})
    assert made.result.shape == (64, HIDDEN)
    assert known or any("tokens are not known to be a multiple" in reason for reason in reasons(made))


# --- all processes decide alike ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 8])
def test_all_ranks_make_the_same_plan(size):
    digests = set()
    for rank in {0, 1, size - 1}:
        with group_without_processes(size, rank) as name:
            layers = weights(2, size, rank, bias=True)  # the first process has a bias, the others have none
            graph = traced(lambda x, layers=layers, name=name: stage(x, None, layers, name), x_of(64))
            made = plan(graph, 1)
            assert sum(len(chain.sums) for chain in made.chains) == 5
            digests.add(made.digest())
    assert len(digests) == 1


def traced(function, x):
    """A program as the pass sees it."""
    graphs = []

    def keep(module, inputs):
        graphs.append(module.graph)
        return module.forward

    from torch._dynamo.backends.common import aot_autograd

    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(x)
    return graphs[0]


def test_a_plan_of_another_number_of_tokens_has_another_digest():
    with group_without_processes(2) as name:
        layers = weights(1, 2, 0)
        plans = [plan(traced(lambda x: stage(x, None, layers, name), x_of(tokens)), 1) for tokens in (64, 32)]
    assert plans[0].digest() != plans[1].digest()


def test_the_size_of_the_group_is_in_the_cache_key(divided):
    divided()
    keys = set()
    for size in (2, 4):
        with group_without_processes(size):
            keys.add(PrePass().uuid())
    assert len(keys) == 2


def test_another_setting_compiles_again(divided):
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    with group_without_processes(2) as name:
        weight = torch.ones(HIDDEN)
        program = torch.compile(lambda x: ir.ops.rms_norm(ir.ops.all_reduce(x, name), weight, EPSILON), backend=counter)
        for tokens in (64, 64, 128):
            divided(tokens)
            program(x_of(64))
    assert counter.frame_count == 2
