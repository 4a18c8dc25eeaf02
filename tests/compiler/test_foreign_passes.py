"""Passes that plugins and programs bring: where they run, their order, names and keys, and what is no pass."""

import json
import pickle
import sys

import pytest
import torch
from compiler_support import lowered, report, run, tensors
from torch._inductor import config

import irframework as ir
from irframework import bisecting
from irframework.compiler import foreign_passes, hooks
from irframework.compiler.foreign_passes import STAGES, in_order, passes_at
from irframework.compiler.pipeline import AFTER, BEFORE, PostPass, PreGradPass, PrePass, steps_of
from irframework.errors import PassError, PluginError, VerifyError
from irframework.settings import settings


class Pass:
    """A pass that notes the graphs that it is given."""

    def __init__(self, name, **attributes):
        self.name = name
        self.targets = []
        vars(self).update(attributes)

    def __call__(self, graph):
        self.targets.append([str(node.target) for node in graph.nodes if node.op == "call_function"])

    def uuid(self):
        return self.name


@pytest.fixture
def plugins(monkeypatch):
    """Let plugins bring passes: `plugins(a={"after_fusion": [...]})`."""

    def bring(**stages):
        found = [(plugin, passes) for plugin, passes in sorted(stages.items())]
        monkeypatch.setattr(
            foreign_passes,
            "compiler_passes",
            lambda stage: [(plugin, each) for plugin, passes in found for each in passes.get(stage, ())],
        )

    return bring


@pytest.fixture
def environment(monkeypatch):
    def set_variables(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"IRFRAMEWORK_{name}", value)
        settings.cache_clear()

    yield set_variables
    monkeypatch.undo()
    settings.cache_clear()


def names(stage="after_fusion", given=()):
    return [each.name for each in in_order(stage, passes_at(stage, given))]


def plain(x):
    return x * 2 + x


# --- where -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [lowered, "irframework", "inductor"], ids=["lowered", "irframework", "inductor"])
def test_passes_of_a_plugin_and_of_the_program_see_plain_torch_graphs_at_each_stage(plugins, backend):
    theirs = {stage: Pass(f"watch_{stage}") for stage in STAGES}
    plugins(plug={stage: [each] for stage, each in theirs.items()})
    mine = Pass("mine")
    hooks.install()
    with ir.compiler.register_pass("after_lowering", mine), config.patch(fx_graph_cache=False):
        run(plain, torch.randn(4), backend=backend)
    assert all(each.targets == [["aten.mul.Tensor", "aten.add.Tensor"]] for each in (*theirs.values(), mine))
    assert {f"plug.watch_{stage}" for stage in STAGES} | {"user.mine", "check_passes"} <= set(report().timings)


def test_fused_ops_are_there_after_fusion_and_not_before(add):
    fused = ir.register_op(name=f"{add.op.name}_fused", fuse=True)(quarter_of_cosine)
    fused.register_impl("k")(fused.native)
    before, after = Pass("before"), Pass("after")
    with ir.compiler.register_pass("before_fusion", before), ir.compiler.register_pass("after_fusion", after):
        run(lambda x, y: torch.cos(x + y) * 0.25, *tensors((4, 8), (4, 8)))
    name = f"irframework.{fused.name}.default"
    assert [name in each.targets[0] for each in (before, after)] == [False, True]


def quarter_of_cosine(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cos(x + y) * 0.25


def quarter_of_sine(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.sin(x + y) * 0.25


def test_what_a_pass_brings_in_before_fusion_is_fused_and_lowered(add):
    fused = ir.register_op(name=f"{add.op.name}_fused", fuse=True)(quarter_of_sine)
    fused.register_impl("k")(lambda x, y: x * 0 + 7)

    def double(graph):  # a product by 4 becomes one by a quarter
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            node.args = (node.args[0], 0.25)

    with ir.compiler.register_pass("before_fusion", double), ir.priority({fused.name: ["k"]}):
        got = run(lambda x, y: torch.sin(x + y) * 4, *tensors((4, 8), (4, 8)))
    assert (report().fusions, got.unique().item()) == ({fused.name: 1}, 7.0)


def test_an_ir_op_that_a_pass_brings_in_after_fusion_is_lowered(scale):
    def use_it(graph):
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor):
            node.target = scale.torch_op

    with ir.compiler.register_pass("after_fusion", use_it):
        got = run(lambda x: x * 3, torch.ones(2))
    assert got.tolist() == [3, 3]
    assert list(report().selected_impls) == [scale.name]


def test_the_option_gives_passes_to_one_compile(scale):
    mine = Pass("mine")
    options = {"ir_passes": {"before_fusion": [mine], "after_lowering": [mine]}, "fx_graph_cache": False}
    run(plain, torch.randn(4), backend="irframework", options=options)
    assert len(mine.targets) == 2
    torch._dynamo.reset()
    run(plain, torch.randn(4), backend="irframework")
    assert len(mine.targets) == 2


def test_lower_takes_the_option_too():
    mine = Pass("mine")
    module = torch.fx.experimental.proxy_tensor.make_fx(plain, tracing_mode="fake")(torch.randn(4))
    ir.compiler.lower(module, ir_passes={"after_fusion": [mine]})
    assert len(mine.targets) == 1


def test_stock_inductor_runs_passes_of_the_program_after_install_only():
    with config.patch(pre_grad_custom_pass=None, post_grad_custom_pre_pass=None, post_grad_custom_post_pass=None):
        mine = Pass("mine")
        with ir.compiler.register_pass("after_fusion", mine):
            run(plain, torch.randn(4), backend="inductor")
            assert mine.targets == []
            torch._dynamo.reset()
            ir.install()
            run(plain, torch.randn(4), backend="inductor")
            assert len(mine.targets) == 1


def test_a_pass_sees_the_backward_too():
    mine = Pass("mine")
    x = torch.randn(4, requires_grad=True)
    with ir.compiler.register_pass("after_fusion", mine):
        torch.compile(lambda x: x.cos() * x, backend=lowered)(x).sum().backward()
    assert len(mine.targets) == 2


def test_the_backward_keeps_the_passes_of_its_forward():
    mine, late = Pass("mine"), Pass("late")
    x = torch.randn(4, requires_grad=True)
    hooks.install()
    with config.patch(fx_graph_cache=False), torch._functorch.config.patch(force_non_lazy_backward_lowering=False):
        with ir.compiler.register_pass("after_fusion", mine):
            y = torch.compile(lambda x: x.cos() * x, backend="irframework")(x)
        with ir.compiler.register_pass("after_fusion", late):
            y.sum().backward()
    assert (len(mine.targets), late.targets) == (2, [])


@pytest.mark.parametrize("given", [("after_fusion",), ("before_lowering",), ("after_fusion", "before_lowering")])
def test_the_older_name_of_a_stage_is_asked_for_too(plugins, given):
    plugins(plug={stage: [Pass("one")] for stage in given})
    assert names() == ["plug.one"]


# --- when registered passes change -----------------------------------------------------------------------------------


def test_a_pass_that_is_registered_later_compiles_again_and_once_per_choice():
    compiles = []

    def backend(module, inputs):
        compiles.append(module)
        return lowered(module, inputs)

    f, mine = torch.compile(plain, backend=backend), Pass("mine")
    with torch.no_grad():
        f(torch.randn(4))
        for _ in range(2):
            handle = ir.compiler.register_pass("after_fusion", mine)
            f(torch.randn(4))
            handle.remove()
            f(torch.randn(4))
    assert (len(compiles), len(mine.targets)) == (2, 1)


def test_a_handle_removes_its_pass_only():
    one, two = Pass("one"), Pass("two")
    with ir.compiler.register_pass("after_fusion", one) as first, ir.compiler.register_pass("after_fusion", two):
        first.remove()
        assert names(given=foreign_passes.registered_passes()) == ["user.two"]
    assert foreign_passes.registered_passes() == ()


# --- the order -------------------------------------------------------------------------------------------------------


def test_unordered_passes_run_by_plugin_then_as_listed_then_the_programs(plugins):
    plugins(zeta={"after_fusion": [Pass("a")]}, beta={"after_fusion": [Pass("z"), Pass("a")]})
    given = (("after_fusion", Pass("mine")), ("before_fusion", Pass("elsewhere")))
    assert names(given=given) == ["beta.z", "beta.a", "zeta.a", "user.mine"]


@pytest.mark.parametrize(
    ("attributes", "order"),
    [
        ({"after": ("own",)}, ["beta.own", "beta.it", "zeta.a"]),
        ({"after": "zeta.a"}, ["beta.own", "zeta.a", "beta.it"]),
        ({"after": ["zeta.a", "own"]}, ["beta.own", "zeta.a", "beta.it"]),
        ({"before": ("own",)}, ["beta.it", "beta.own", "zeta.a"]),
        ({"after": ("user.none?",)}, ["beta.it", "beta.own", "zeta.a"]),
    ],
)
def test_after_and_before_move_a_pass_and_nothing_else(plugins, attributes, order, caplog):
    plugins(beta={"after_fusion": [Pass("it", **attributes), Pass("own")]}, zeta={"after_fusion": [Pass("a")]})
    assert names() == order
    assert caplog.text == ""


def test_a_pass_of_the_program_can_run_ahead_of_a_plugins(plugins):
    plugins(plug={"after_fusion": [Pass("a")]})
    assert names(given=(("after_fusion", Pass("mine", before=("plug.a",))),)) == ["user.mine", "plug.a"]


def test_a_name_that_does_not_exist_is_warned_about_with_the_closest_one(plugins, caplog):
    plugins(plug={"after_fusion": [Pass("it", after=("plug.flod",)), Pass("fold")]})
    assert names() == ["plug.it", "plug.fold"]
    assert "'plug.flod', which is no pass of stage after_fusion. Did you mean 'plug.fold'" in caplog.text
    assert "write 'plug.flod?'" in caplog.text


def test_naming_a_pass_that_is_switched_off_is_no_mistake(plugins, environment, caplog):
    plugins(plug={"after_fusion": [Pass("it", after=("fold",)), Pass("fold")]})
    environment(DISABLE_PASSES="plug.fold")
    assert [step.name for step in steps_of(BEFORE, PrePass().lowering) if step.origin] == ["plug.it"]
    assert caplog.text == ""


def test_passes_that_wait_for_each_other_are_an_error_that_names_them_and_their_owners(plugins):
    plugins(
        a={"after_fusion": [Pass("one", after=("b.two",)), Pass("free")]},
        b={"after_fusion": [Pass("two", after=("a.one",)), Pass("behind", after=("two",))]},
    )
    with pytest.raises(PassError, match=r"a\.one waits for b\.two waits for a\.one") as caught:
        names()
    assert "a.one is of plugin 'a'" in str(caught.value)


def test_switching_one_off_ends_the_waiting(plugins, environment):
    plugins(a={"after_fusion": [Pass("one", after=("two",)), Pass("two", after=("one",))]})
    environment(DISABLE_PASSES="a.one")
    assert [step.name for step in steps_of(BEFORE, PrePass().lowering) if step.origin] == ["a.two"]


def test_a_pass_cannot_run_after_itself(plugins):
    plugins(a={"after_fusion": [Pass("one", after=("one",))]})
    with pytest.raises(PassError, match=r"a\.one waits for a\.one"):
        names()


def test_equal_names_are_numbered(plugins):
    plugins(a={"after_fusion": [Pass("one"), Pass("one")]})
    assert names() == ["a.one", "a.one#2"]


def test_a_function_and_an_object_have_the_names_of_their_definitions():
    class Renamed(Pass):
        pass

    thing = Renamed("x")
    del thing.name
    given = tuple(("after_fusion", each) for each in (plain, thing))
    assert names(given=given) == ["user.plain", "user.Renamed"]


# --- keys ------------------------------------------------------------------------------------------------------------


def keys(given=()):
    return PrePass(None, given).uuid(), PostPass(None, given).uuid()


def test_the_uuid_of_a_registered_pass_is_in_the_key_of_its_stage():
    before = keys()
    with ir.compiler.register_pass("before_fusion", Pass("one")):
        one = keys()
    with ir.compiler.register_pass("before_fusion", Pass("two")):
        two = keys()
    assert len({before[0], one[0], two[0]}) == 3
    assert before[1] == one[1] == two[1]
    assert keys() == before


def test_the_stage_and_the_order_are_in_the_key(plugins):
    found = []
    for stage in ("before_fusion", "after_fusion"):
        found.append(keys(((stage, Pass("one")),))[0])
    for attributes in ({}, {"after": ("two",)}):
        plugins(a={"after_fusion": [Pass("one", **attributes), Pass("two")]})
        found.append(keys()[0])
    assert len(set(found)) == 4


def test_a_pass_without_uuid_or_with_none_forbids_caching():
    assert keys((("after_fusion", lambda graph: None),))[0] is None
    assert keys((("after_lowering", Pass("one", uuid=lambda: None)),))[1] is None


def test_what_is_compiled_with_a_pass_that_has_no_uuid_leaves_no_report(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    options = {"ir_passes": {"after_lowering": [lambda graph: None]}}
    run(lambda x: torch.mm(x, x), torch.ones(2, 2), backend="irframework", options=options)
    assert report().kept_as == ""
    assert not list(tmp_path.glob("irframework/*.json"))


def test_a_uuid_that_fails_names_the_pass_and_its_plugin(plugins):
    plugins(plug={"after_fusion": [Pass("one", uuid=lambda: 1 / 0)]})
    with pytest.raises(PassError, match=r"'plug.one', of plugin 'plug', failed: ZeroDivisionError") as caught:
        keys()
    assert "IRFRAMEWORK_DISABLE_PASSES=plug.one" in str(caught.value)


def test_passes_of_a_compile_can_be_pickled():
    each = PrePass(None, (("after_fusion", Pass("one")),))
    assert pickle.loads(pickle.dumps(each)).uuid() == each.uuid()


# --- switched off, and found -----------------------------------------------------------------------------------------


def test_a_pass_that_is_switched_off_is_asked_for_nothing(plugins, environment):
    plugins(plug={"after_fusion": [Pass("bad", uuid=lambda: 1 / 0, __call__=None)]})
    environment(DISABLE_PASSES="plug.bad")
    assert None not in keys()


@pytest.mark.parametrize("fusion", [True, False])
@pytest.mark.parametrize("stage", [BEFORE, AFTER])
def test_each_step_is_called_and_keyed_with_the_others_switched_off(environment, configured, add, fusion, stage):
    configured(fusion=fusion)
    every = {step.name for at in (BEFORE, AFTER) for step in steps_of(at, PrePass().lowering)}
    for left in (*every, ""):
        environment(DISABLE_PASSES=",".join(every - {left}))
        kind = PrePass if stage == BEFORE else PostPass
        graph = torch.fx.experimental.proxy_tensor.make_fx(plain, tracing_mode="fake")(torch.randn(4)).graph
        kind()(graph, True)
        assert kind().uuid() is not None


@pytest.mark.parametrize("kind", [PreGradPass, PrePass, PostPass])
def test_passes_work_where_nothing_can_be_done(kind, environment, configured):
    configured(fusion=False)
    graph = torch.fx.symbolic_trace(lambda x: (x + 1,)).graph
    kind()(graph)
    assert kind().uuid() is not None


def test_bisect_hears_of_passes_of_the_program_and_can_leave_them_out(tmp_path, environment):
    log = tmp_path / "log"
    environment(BISECT_LOG=str(log))
    bisecting.start_again()
    mine = Pass("mine")
    with ir.compiler.register_pass("before_fusion", mine):
        run(plain, torch.randn(4))
    assert any("user.mine" in json.loads(line).get("passes", ()) for line in log.read_text().splitlines())
    environment(DISABLE_PASSES="user.mine")
    torch._dynamo.reset()
    with ir.compiler.register_pass("before_fusion", mine):
        run(plain, torch.randn(4))
    assert len(mine.targets) == 1


# --- what is no pass -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "graph_pass", "said"),
    [
        ("after_fusoin", plain, "no stage 'after_fusoin'. Did you mean 'after_fusion'"),
        (None, plain, "no stage None"),
        ("after_fusion", Pass, "Pass is a class; give an instance"),
        ("after_fusion", 3, "3 is no compiler pass"),
    ],
)
def test_what_is_no_pass_is_not_registered(stage, graph_pass, said):
    with pytest.raises(PassError, match=said):
        ir.compiler.register_pass(stage, graph_pass)
    assert foreign_passes.registered_passes() == ()


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ([plain], "expected a mapping"),
        ({"after_fusion": plain}, "expected a list of passes for stage 'after_fusion'"),
        ({"after": [plain]}, "no stage 'after'"),
        ({"after_fusion": [Pass]}, "is a class"),
    ],
)
def test_an_option_that_cannot_be_read_is_an_error(option, said):
    with pytest.raises(Exception, match=said):
        run(plain, torch.randn(4), backend="irframework", options={"ir_passes": option})


def test_a_plugin_that_gives_a_class_is_named(plugins):
    plugins(plug={"after_fusion": [Pass]})
    with pytest.raises(PassError, match="irframework_passes of plugin 'plug': Pass is a class"):
        names()


def test_a_plugin_that_gives_no_list_is_named(monkeypatch):
    from irframework.plugins import compiler_passes

    plugins = sys.modules["irframework.plugins"]

    class Plugin:
        name, described = "plug", "plugin 'plug' (plug-dist 1.0)"

    monkeypatch.setattr(plugins, "_active", lambda: [Plugin()])
    monkeypatch.setattr(plugins, "_call_or_name", lambda plugin, hook, stage: 3)
    with pytest.raises(PluginError, match=r"plugin 'plug' \(plug-dist 1.0\) returned 3: no list of passes"):
        compiler_passes("after_fusion")


def test_an_order_that_is_no_list_of_names_is_an_error(plugins):
    plugins(plug={"after_fusion": [Pass("one", after=3)]})
    with pytest.raises(PassError, match="after=3 is no list of names"):
        names()


def test_a_pass_that_returns_another_graph_is_told_that_nobody_looks_at_it():
    def anew(graph):
        return torch.fx.Graph()

    with ir.compiler.register_pass("after_fusion", anew), pytest.raises(Exception, match="changes the graph that it"):
        run(plain, torch.randn(4))


def test_a_pass_may_return_what_it_was_given():
    module = torch.fx.experimental.proxy_tensor.make_fx(plain, tracing_mode="fake")(torch.randn(4))
    ir.compiler.lower(module, ir_passes={"after_fusion": [lambda graph: graph, lambda graph: graph.owning_module]})


def test_an_error_of_the_framework_that_a_pass_raises_names_the_pass(plugins):
    def asks(graph):
        ir.ops.no_such_op  # noqa: B018

    plugins(plug={"after_fusion": [asks]})
    module = torch.fx.experimental.proxy_tensor.make_fx(plain, tracing_mode="fake")(torch.randn(4))
    with pytest.raises(Exception, match=r"Raised in compiler pass 'plug.asks'. It is of plugin 'plug'."):
        ir.compiler.lower(module)


def test_a_pass_that_fails_names_its_plugin(plugins):
    def broken(graph):
        raise ZeroDivisionError("oops")

    plugins(plug={"after_lowering": [broken]})
    module = torch.fx.experimental.proxy_tensor.make_fx(plain, tracing_mode="fake")(torch.randn(4))
    with pytest.raises(VerifyError, match=r"'plug.broken' failed: ZeroDivisionError: oops. It is of plugin 'plug'."):
        ir.compiler.lower(module)
