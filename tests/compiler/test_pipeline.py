"""Order of the passes, cache keys, other people's passes, and what they must not disturb."""

import pickle

import pytest
import torch
from compiler_support import run, tensors
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass

import irframework as ir
from irframework.compiler import foreign_passes, hooks, pipeline
from irframework.compiler.pipeline import AFTER, PostPass, PreGradPass, PrePass, steps_of
from irframework.settings import settings


class Watcher(CustomGraphPass):
    """A user's own pass."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph):
        self.seen.append([str(node.target) for node in graph.nodes])

    def uuid(self):
        return "watcher"


@pytest.fixture
def disable(monkeypatch):
    def disable(names):
        monkeypatch.setenv("IRFRAMEWORK_DISABLE_PASSES", names)
        settings.cache_clear()

    yield disable
    monkeypatch.undo()
    settings.cache_clear()


def keys():
    return PrePass().uuid(), PostPass().uuid()


def test_keys_are_stable():
    assert keys() == keys()


def test_each_priority_has_a_key_of_its_own(add):
    with add.priority("native"):
        native = keys()
    with add.priority("inp"):
        assert all(a != b for a, b in zip(keys(), native, strict=True))


def test_the_compile_option_is_in_the_key(add):
    option = {add.op.name: ["native"]}
    assert PostPass(option).uuid() != PostPass().uuid()


def test_switching_a_pass_off_changes_the_key(disable):
    before = keys()
    disable("remove_copies")
    assert keys()[1] != before[1]
    assert keys()[0] == before[0]


def test_a_misspelt_pass_is_named_with_the_closest_one(disable, caplog):
    disable("remove_copeis")
    steps_of(AFTER, PostPass().lowering)
    assert "'remove_copeis'" in caplog.text
    assert "'remove_copies'" in caplog.text


def test_eager_calls_do_not_change_the_key(add):
    before = keys()
    add.op(*tensors((4, 8), (4, 8), (8,)))
    assert keys() == before


def test_the_key_is_made_of_the_list_that_runs(monkeypatch):
    lowering = PostPass().lowering
    before = PostPass().uuid()
    names = [step.name for step in steps_of(AFTER, lowering)]
    assert names[-1] == "verify"
    original = steps_of
    monkeypatch.setattr(pipeline, "steps_of", lambda *given: list(reversed(original(*given))))
    assert PostPass().uuid() != before


def test_a_plugins_pass_without_uuid_forbids_caching(monkeypatch):
    monkeypatch.setattr(foreign_passes, "compiler_passes", lambda stage: [("plug", lambda graph: None)])
    assert keys() == (None, None)


def test_plugins_passes_run_at_each_stage(monkeypatch, add):
    seen = {}

    def watch(stage):
        def look(graph):
            seen[stage] = any("irframework" in str(node.target) for node in graph.nodes)

        return [("plug", look)]

    monkeypatch.setattr(foreign_passes, "compiler_passes", watch)
    run(lambda *a: add.op(*a), *tensors((4, 8), (4, 8), (8,)))
    assert seen == {"before_fusion": True, "after_fusion": True, "after_lowering": False}


@pytest.mark.parametrize("kind", [PreGradPass, PrePass, PostPass])
def test_passes_can_be_pickled(kind):
    each = kind()
    assert pickle.loads(pickle.dumps(each)).uuid() == each.uuid()


def test_install_keeps_what_others_put_there_and_is_idempotent():
    mine = Watcher()
    with config.patch(post_grad_custom_post_pass=mine, pre_grad_custom_pass=None, post_grad_custom_pre_pass=None):
        hooks.install()
        hooks.install()
        passes = hooks._as_list(config.post_grad_custom_post_pass)
        assert passes[0] is mine
        assert [type(each) for each in passes[1:]] == [PostPass]


@pytest.mark.parametrize("backend", ["irframework", "inductor"])
def test_users_passes_run_beside_ours(add, backend):
    mine = Watcher()
    with config.patch(post_grad_custom_post_pass=mine, fx_graph_cache=False), add.priority("inp"):
        run(lambda *a: add.op(*a), *(a := tensors((4, 8), (4, 8), (8,))), backend=backend)
        assert hooks._as_list(config.post_grad_custom_post_pass)[0] is mine
    assert len(mine.seen) == 1
    assert a


def test_users_options_replace_our_hooks_and_results_stay_right(add):
    mine = Watcher()
    arguments = tensors((4, 8), (4, 8), (8,))
    for hook in ("post_grad_custom_post_pass", "post_grad_custom_pre_pass"):
        with add.priority("inp"):
            got = run(
                lambda *a: add.op.maybe_inplace(*a),
                *(t.clone() for t in arguments),
                backend="inductor",
                options={hook: mine},
            )
        torch.testing.assert_close(got, add.op.native(*arguments))
        torch._dynamo.reset()


def test_the_backend_option_chooses(add):
    arguments = tensors((4, 8), (4, 8), (8,))
    add.op.register_impl("zero")(lambda x, x_residual, weight: (x * 0, x_residual * 0))
    option = {"ir_op_priority": {add.op.name: ["zero"]}, "fx_graph_cache": False}
    got = run(lambda *a: add.op(*a), *arguments, backend="irframework", options=option)
    assert not got[0].any()


def test_a_mistake_in_the_backend_option_is_found(add):
    with pytest.raises(Exception, match="nobody"):
        run(
            lambda *a: add.op(*a),
            *tensors((4, 8), (4, 8), (8,)),
            backend="irframework",
            options={"ir_op_priority": {add.op.name: ["nobody"]}},
        )


def test_graphs_without_ir_ops_are_left_alone(add):
    hooks.install()
    graph = torch.fx.symbolic_trace(lambda x: (x + 1,)).graph
    before = str(graph), ir.last_report()
    for each in (PreGradPass(), PrePass(), PostPass()):
        each(graph)
    assert (str(graph), ir.last_report()) == before
