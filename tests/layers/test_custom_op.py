"""Classes of the older kind: which method runs, which class is built, what the rules of `custom_ops` say."""

import copy
import os
import pickle
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from torch import Tensor, nn

import irframework as ir
from irframework.errors import (
    ConfigError,
    DuplicateLayerError,
    InvalidLayerError,
    MissingForwardError,
    ReplacementError,
)
from irframework.layers import CustomOp, PluggableLayer, custom_op, disabled_custom_ops, enabled_custom_ops
from irframework.registry import Transaction, registry

ONES = torch.ones(2)


@pytest.fixture(autouse=True)
def on_a_cpu(on_platform):
    """Also where there is a GPU, unless a test says otherwise."""
    on_platform("cpu")


class Norm(CustomOp):
    """Each method says its name."""

    def forward_native(self, x):
        return "native"

    def forward_cpu(self, x):
        return "cpu"

    def forward_cuda(self, x):
        return "cuda"

    def forward_hip(self, x):
        return "hip"

    def forward_xpu(self, x):
        return "xpu"

    def forward_tpu(self, x):
        return "tpu"

    def forward_oot(self, x):
        return "oot"


class Scale(CustomOp):
    """A layer with a weight; on a CPU it counts how often its kernel ran."""

    def __init__(self, factor=2.0, **options):
        super().__init__(**options)
        self.weight = nn.Parameter(torch.full((2,), factor), requires_grad=False)
        self.ran = 0

    def forward_native(self, x):
        return x * self.weight

    def forward_cpu(self, x):
        return x * self.weight + 1


def registered(base=Norm, name="test_norm"):
    return CustomOp.register(name)(type("OwnNorm", (base,), {}))


# --- which method -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "method"),
    [("cpu", "cpu"), ("cuda", "cuda"), ("rocm", "hip"), ("xpu", "xpu"), ("tpu", "tpu"), ("npu", "oot")],
)
def test_each_platform_runs_its_method(platform, method, on_platform):
    on_platform(platform)
    assert Norm()(ONES) == method


def with_only(*names):
    return type("Partial", (CustomOp,), {f"forward_{n}": getattr(Norm, f"forward_{n}") for n in names})


def test_hip_falls_back_to_cuda(on_platform):
    on_platform("rocm")
    assert with_only("native", "cuda")()(ONES) == "cuda"


@pytest.mark.parametrize("platform", ["cpu", "cuda", "rocm", "xpu", "tpu", "npu"])
def test_everything_else_falls_back_to_native(platform, on_platform):
    on_platform(platform)
    assert with_only("native")()(ONES) == "native"


def test_a_layer_without_any_method_says_what_to_write():
    with pytest.raises(MissingForwardError, match=r"Partial.*forward_cpu.*'cpu'.*forward_native"):
        with_only("cuda")()(ONES)
    with pytest.raises(NotImplementedError):
        with_only("cuda")()(ONES)


def test_the_method_is_chosen_when_the_layer_is_built(configured):
    layer = Norm()
    configured(custom_ops="none")
    assert (layer(ONES), Norm()(ONES)) == ("cpu", "native")


def test_a_method_that_the_class_sets_itself_runs():
    class Sets(Norm):
        def __init__(self):
            super().__init__()
            self._forward_method = self.forward_xpu

    assert Sets()(ONES) == "xpu"


def test_an_older_dispatch_forward_without_arguments_is_called():
    class Older(Norm):
        def dispatch_forward(self):
            return self.forward_tpu

    assert Older()(ONES) == "tpu"


def test_hooks_of_a_module_run():
    layer, seen = Norm(), []
    layer.register_forward_pre_hook(lambda module, args: seen.append("before"))
    layer.register_forward_hook(lambda module, args, result: seen.append(result))
    layer(ONES)
    assert seen == ["before", "cpu"]


def test_a_copied_layer_runs_its_own_weight():
    layer = Scale()
    other = copy.deepcopy(layer)
    other.weight.mul_(5)
    assert layer(ONES).tolist() == [3, 3]
    assert other(ONES).tolist() == [11, 11]


def test_a_layer_can_be_pickled():
    assert pickle.loads(pickle.dumps(Scale(4.0)))(ONES).tolist() == [5, 5]


# --- rules --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "on"),
    [
        ([], True),
        (["all"], True),
        (["none"], False),
        (["none", "+test_norm"], True),
        (["all", "-test_norm"], False),
        (["-test_norm"], False),
        (["+test_norm"], True),
        (["none", "+gelu_and_mul"], False),
        (["all", "-gelu_and_mul"], True),
        ("none,+test_norm", True),
        (" all , -test_norm ", False),
        ("none", False),
    ],
)
def test_rules_switch_a_layer_on_or_off(rules, on, configured):
    layer = registered()
    configured(custom_ops=rules)
    assert layer.enabled() is on
    assert layer()(ONES) == ("cpu" if on else "native")


@pytest.mark.parametrize("rules", [["all", "none"], "none,all", ["all", "all"]])
def test_exactly_one_base_mode(rules):
    with pytest.raises(ConfigError, match="exactly one"):
        ir.KernelConfig(custom_ops=rules)


def test_a_name_on_and_off_is_a_contradiction():
    with pytest.raises(ConfigError, match=r"'\+rms_norm' and '-rms_norm'"):
        ir.KernelConfig(custom_ops="+rms_norm,-rms_norm")


@pytest.mark.parametrize(
    ("rule", "advice"),
    [("rms_norm", "'+rms_norm' or '-rms_norm'"), ("+all", "'all'"), ("+", "no rule"), ("a b", "no rule"), (3, "rules")],
)
def test_what_is_no_rule_is_an_error(rule, advice):
    with pytest.raises(ConfigError, match="custom_ops") as caught:
        ir.KernelConfig(custom_ops=[rule])
    assert advice in str(caught.value)


def test_an_unknown_name_is_named_once_with_a_suggestion(configured, caplog):
    registered()
    configured(custom_ops="none,+test_nrom")
    Norm(), Norm()
    assert len([r for r in caplog.records if "+test_nrom" in r.getMessage()]) == 1
    assert "Did you mean 'test_norm'" in caplog.text


def test_the_environment_gives_rules(environment):
    environment(CUSTOM_OPS="none")
    assert Norm()(ONES) == "native"


def test_a_fault_in_the_environment_names_the_variable(environment):
    environment(CUSTOM_OPS="none,all")
    with pytest.raises(ConfigError, match="IRFRAMEWORK_CUSTOM_OPS"):
        Norm()


def test_the_configuration_stands_above_the_environment(environment, configured):
    environment(CUSTOM_OPS="none")
    configured(custom_ops="all")
    assert Norm()(ONES) == "cpu"
    assert ir.current_config().custom_ops == ["all"]


def test_the_command_line_gives_rules():
    import argparse

    parser = argparse.ArgumentParser()
    ir.add_cli_args(parser)
    read = ir.KernelConfig.from_cli_args(parser.parse_args(["--ir-custom-ops=-rms_norm,all"]))
    assert read.custom_ops == ["-rms_norm", "all"]


def test_enforce_enable_runs_the_platforms_method_in_spite_of_the_rules(configured):
    configured(custom_ops="none")
    assert Scale()(ONES).tolist() == [2, 2]
    assert Scale(enforce_enable=True)(ONES).tolist() == [3, 3]


def test_counters_count_layers_that_are_on_and_off(configured):
    layer = registered()
    layer(), layer()
    configured(custom_ops="none")
    layer()
    assert (enabled_custom_ops["test_norm"], disabled_custom_ops["test_norm"]) == (2, 1)


def test_a_class_that_is_not_registered_follows_the_base(configured):
    configured(custom_ops="none")
    Norm()
    assert disabled_custom_ops["Norm"] == 1


def test_compile_native_compiles_a_layer_that_is_off(configured, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda fn, **options: compiled.append(options) or fn)
    configured(custom_ops="none")
    assert Scale(compile_native=True)(ONES).tolist() == [2, 2]
    assert compiled == [{"dynamic": None}]


# --- under torch.compile ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("backend", "expected"), [("inductor", 2), ("irframework", 2), ("aot_eager", 3), ("eager", 3)])
def test_without_rules_inductor_gets_native_code_and_others_the_platforms(backend, expected):
    torch._dynamo.reset()
    layer = Scale()
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    assert compiled(ONES).tolist() == [expected, expected]
    assert layer(ONES).tolist() == [3, 3]


@pytest.mark.parametrize(("rules", "expected"), [("all", 3), ("none", 2)])
def test_a_rule_holds_in_compiled_code(rules, expected, configured):
    torch._dynamo.reset()
    configured(custom_ops=rules)
    assert torch.compile(Scale(), fullgraph=True)(ONES).tolist() == [expected, expected]


def test_enforce_enable_holds_in_compiled_code():
    torch._dynamo.reset()
    assert torch.compile(Scale(enforce_enable=True), fullgraph=True)(ONES).tolist() == [3, 3]


# --- replacement --------------------------------------------------------------------------------------------------


class Original(Scale):
    pass


class Other(Original):
    def forward_cpu(self, x):
        return "other"


@pytest.mark.parametrize(
    "register",
    [
        lambda: Original.register_oot(Other),
        lambda: Original.register_oot()(Other),
        lambda: CustomOp.register_oot(name="Original")(Other),
        lambda: CustomOp.register_oot(_decorated_op_cls=Other, name="Original"),
        lambda: Original.register_oot(_decorated_op_cls=Other),
    ],
    ids=["bare", "parentheses", "name", "plain call", "plain call on the original"],
)
def test_every_form_of_register_oot_replaces_the_class_at_construction(register):
    assert register() is Other
    built = Original(7.0)
    assert type(built) is Other
    assert built.weight.tolist() == [7, 7]  # the replacement's __init__ ran
    assert built(ONES) == "other"


def test_building_the_replacement_itself_builds_it():
    Original.register_oot(Other)
    assert type(Other()) is Other


def test_a_subclass_of_the_original_is_not_replaced():
    Original.register_oot(Other)
    assert type(type("Further", (Original,), {})()).__name__ == "Further"


def test_a_replacement_that_does_not_subclass_the_original_is_refused():
    with pytest.raises(ReplacementError, match=r"Norm .*cannot replace 'Original'.*class Norm\(Original\)"):
        Original.register_oot(Norm)
    with pytest.raises(ReplacementError, match="does not subclass"):
        CustomOp.register_oot(name="Original")(Norm)
    assert registry.replacements == {}


def test_what_is_no_layer_is_refused():
    with pytest.raises(InvalidLayerError, match="must subclass CustomOp or PluggableLayer"):
        CustomOp.register("test_linear")(nn.Linear)
    with pytest.raises(InvalidLayerError, match="decorates a class"):
        Original.register_oot(lambda x: x)
    with pytest.raises(InvalidLayerError, match="needs a name"):
        CustomOp.register(Norm)


def test_register_oot_on_the_base_must_say_what_it_replaces():
    with pytest.raises(ReplacementError, match="not told what to replace"):
        CustomOp.register_oot(Other)


def test_a_second_replacement_is_refused_and_both_are_named():
    Original.register_oot(Other)
    with pytest.raises(DuplicateLayerError, match=r"Other .*test_custom_op.py:\d+.*Second"):
        Original.register_oot(type("Second", (Original,), {}))


def test_a_second_layer_of_a_name_is_refused():
    registered()
    with pytest.raises(DuplicateLayerError, match="'test_norm' is registered as a layer already"):
        CustomOp.register("test_norm")(Scale)


def test_a_class_of_the_same_name_elsewhere_is_not_replaced_and_that_is_said(caplog):
    Original.register_oot(Other)
    namesake = type("Original", (Scale,), {})
    assert type(namesake()) is namesake
    assert "does not subclass it" in caplog.text


def test_rules_for_the_original_count_for_its_replacement(configured):
    CustomOp.register("test_original")(Original)
    try:
        Original.register_oot(Other)
        configured(custom_ops="all,-test_original")
        assert Original()(ONES).tolist() == [2, 2]
    finally:
        del Original.name


def test_what_a_plugin_registered_goes_when_it_fails():
    def load():
        with registry.registering(Transaction("broken")):
            Original.register_oot(Other)
            CustomOp.register("test_broken")(Scale)
            raise RuntimeError("the plugin fails")

    with pytest.raises(RuntimeError, match="the plugin fails"):
        load()
    assert type(Original()) is Original
    assert "test_broken" not in registry.layers
    assert not hasattr(Scale, "name")


def test_a_method_put_on_the_class_runs(monkeypatch, on_platform):
    on_platform("npu")
    monkeypatch.setattr(Original, "forward_oot", lambda self, x: "patched", raising=False)
    assert Original()(ONES) == "patched"


def test_a_pluggable_layer_is_replaced_as_a_whole():
    @PluggableLayer.register("test_attention")
    class Attention(PluggableLayer):
        def __init__(self, size):
            super().__init__()
            self.inner = nn.Linear(size, size)

        def forward(self, x):
            return self.inner(x)

    @PluggableLayer.register_oot(name="Attention")
    class Mine(Attention):
        def __init__(self, size):
            super().__init__(size)
            self.inner = nn.Identity()

    assert type(Attention(2)) is Mine
    assert torch.equal(Attention(2)(ONES), ONES)
    assert registry.layers["test_attention"] is Attention


# --- one registry, old names --------------------------------------------------------------------------------------


def test_there_is_one_registry():
    assert ir.compat.CustomOp.registry is ir.registry
    assert ir.compat.op_registry is CustomOp.op_registry is ir.registry.layers
    assert ir.compat.op_registry_oot is PluggableLayer.op_registry_oot is ir.registry.replacements


def test_a_replacement_is_found_by_class_and_by_name():
    Original.register_oot(Other)
    assert ir.compat.maybe_get_oot_by_class(Original) is ir.compat.get_oot_class_by_name("Original") is Other
    assert ir.compat.maybe_get_oot_by_class(Norm) is Norm


OLD_PLUGIN = """
    import warnings
    from irframework.compat import answer_old_imports
    answer_old_imports()
    import torch
    from torch import nn
    from vllm.model_executor.custom_op import CustomOp, op_registry

    @CustomOp.register("rms_norm")
    class RMSNorm(CustomOp):
        def __init__(self, size, eps=1e-6):
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

        def forward_native(self, x, residual=None):
            return torch.rms_norm(x, x.shape[-1:], self.weight, self.eps)

        def forward_cuda(self, x, residual=None):
            raise RuntimeError("no GPU here")

    @CustomOp.register_oot(name="RMSNorm")
    class VendorRMSNorm(RMSNorm):
        def forward_cpu(self, x, residual=None):
            return super().forward_native(x) + 1

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layers = [RMSNorm(4), RMSNorm(4)]
    assert [type(each) for each in layers] == [VendorRMSNorm] * 2
    assert torch.allclose(layers[0](torch.ones(1, 4)), torch.full((1, 4), 2.0))
    print(len(caught), caught[0].category.__name__, sorted(op_registry))
"""


def test_an_unmodified_old_plugin_runs_with_one_deprecation_warning():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(OLD_PLUGIN)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "IRFRAMEWORK_PLATFORM": "cpu"},
    )
    assert done.stdout == "1 DeprecationWarning ['rms_norm']\n", done.stderr


def test_the_deprecation_names_the_class_and_the_command(monkeypatch):
    monkeypatch.setattr(custom_op, "_warned", False)
    with pytest.warns(DeprecationWarning, match=r"Norm.*irframework migrate") as caught:
        Norm(), Norm()
    assert len(caught) == 1


def test_old_imports_are_not_answered_where_the_package_is_installed():
    with pytest.raises(ir.errors.MigrationError, match="is imported already"):
        ir.compat.answer_old_imports("torch.custom_op")
    with pytest.raises(ir.errors.MigrationError, match="is installed"):
        ir.compat.answer_old_imports("this.custom_op")


# --- through an op ------------------------------------------------------------------------------------------------


@pytest.fixture
def scale_op(declare):
    """An op with a kernel of provider `fast`, whose result shows that it ran."""

    def body(x: Tensor, weight: Tensor, factor: float = 1.0) -> Tensor:
        return x * weight * factor

    op = declare(body)
    op.register_impl("fast")(lambda x, weight, factor=1.0: x * weight * factor + 1)
    return op


@pytest.fixture
def layer_class(scale_op):
    class Through(CustomOp):
        ir_op = scale_op

        def __init__(self, **options):
            super().__init__(**options)
            self.register_buffer("weight", torch.full((2,), 2.0))
            self.factor = 3.0

        def forward_cpu(self, x):
            return "the older way"

        def forward_native(self, x):
            return "the older native"

    return Through


def test_a_layer_with_an_op_dispatches_through_it_with_its_attributes(layer_class):
    assert layer_class()(ONES).tolist() == [7, 7]


def test_priorities_hold_for_a_layer_with_an_op(layer_class, scale_op):
    layer = layer_class()
    with ir.priority({scale_op.name: "native"}):
        assert layer(ONES).tolist() == [6, 6]


def test_a_layer_with_an_op_explains_its_call(layer_class, scale_op):
    layer = layer_class()
    assert ir.explain(layer, ONES).provider == layer.explain(ONES).provider == "fast"
    assert layer.explain(ONES).op is scale_op or layer.explain(ONES).op == scale_op.name


def test_a_layer_of_the_older_kind_says_what_it_runs_instead_of_explaining():
    with pytest.raises(InvalidLayerError, match=r"does not dispatch through an op: it runs Scale.forward_cpu"):
        ir.explain(Scale(), ONES)


def test_a_layer_with_an_op_is_no_older_kind(layer_class, monkeypatch):
    monkeypatch.setattr(custom_op, "_warned", False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer_class()


@pytest.mark.parametrize("backend", ["inductor", "irframework"])
def test_a_compiled_layer_with_an_op_runs_the_kernel(layer_class, backend):
    torch._dynamo.reset()
    assert torch.compile(layer_class(), backend=backend, fullgraph=True)(ONES).tolist() == [7, 7]


@pytest.mark.parametrize(
    ("rules", "provider"),
    [
        ([], "fast"),
        (["all"], "fast"),
        (["none"], "native"),
        (["none", "+{op}"], "fast"),
        (["all", "-{op}"], "native"),
        (["-{op}"], "native"),
        (["none", "+test_through"], "fast"),
        (["all", "-test_through"], "native"),
        (["none", "+gelu_and_mul"], "native"),
    ],
)
def test_rules_are_priorities_of_the_op_and_the_layer_decides_as_the_op(
    rules, provider, layer_class, scale_op, configured
):
    CustomOp.register("test_through")(layer_class)
    configured(custom_ops=[rule.format(op=scale_op.name) for rule in rules])
    layer = layer_class()
    assert layer.explain(ONES).provider == scale_op.explain(ONES, layer.weight, 3.0).provider == provider
    assert layer(ONES).tolist() == scale_op(ONES, layer.weight, 3.0).tolist()
    assert layer_class.enabled() is (provider == "fast")


def test_a_rule_shows_as_the_origin_of_the_priority(scale_op, configured):
    configured(custom_ops=f"-{scale_op.name}")
    assert scale_op.explain(ONES, ONES).candidates[0].origin == "custom_ops"


def test_a_priority_stands_above_a_rule(scale_op, environment, configured):
    environment(CUSTOM_OPS="none")
    configured(ir_op_priority={scale_op.name: "fast"})
    assert scale_op.explain(ONES, ONES).provider == "fast"


def test_an_op_that_one_configuration_switches_off_and_asks_for_is_an_error(scale_op):
    with pytest.raises(ConfigError, match=rf"switches '{scale_op.name}' off.*asks for 'fast'"):
        ir.KernelConfig(custom_ops=f"-{scale_op.name}", ir_op_priority={scale_op.name: "fast,native"})


def test_layers_and_ops_of_one_model_decide_alike_and_nothing_is_registered_twice(layer_class, scale_op):
    before = dict(scale_op.impls)
    layers = [layer_class() for _ in range(3)]
    assert scale_op.impls == before
    with ir.priority({scale_op.name: "native"}):
        chosen = {layer.explain(ONES).provider for layer in layers} | {scale_op.explain(ONES, ONES).provider}
    assert chosen == {"native"}


@pytest.mark.parametrize("provider", ["cpu", "cuda", "npu"])
def test_a_provider_with_a_platforms_name_is_one_like_any_other(provider, declare):
    op = declare()
    op.register_impl(provider)(lambda x, weight=None, epsilon=1e-6: x * 100)
    op.register_impl("zz_last")(lambda x, weight=None, epsilon=1e-6: x * 200)

    class Layer(CustomOp):
        ir_op = op

    assert Layer()(ONES).tolist() == [100, 100]
    with ir.priority({op.name: "zz_last"}):
        assert Layer()(ONES).tolist() == [200, 200]


def test_a_method_of_a_class_below_the_op_wins(layer_class):
    class Vendor(layer_class):
        def forward_cpu(self, x):
            return "vendor"

    layer_class.register_oot(Vendor)
    assert layer_class()(ONES) == "vendor"


def test_a_method_put_on_the_class_with_the_op_wins(layer_class, on_platform):
    on_platform("npu")
    assert layer_class()(ONES).tolist() == [7, 7]
    layer_class.forward_oot = lambda self, x: "patched"
    assert layer_class()(ONES) == "patched"


def test_a_class_that_is_off_and_wins_over_the_op_runs_the_op(layer_class, configured):
    class Vendor(layer_class):
        def forward_cpu(self, x):
            return "vendor"

    configured(custom_ops="none")
    assert Vendor()(ONES).tolist() == [6, 6]


def test_forward_native_of_a_class_with_an_op_is_the_ops_function(scale_op):
    class Bare(CustomOp):
        ir_op = scale_op

        def ir_args(self, x):
            return x, ONES, 5.0

    assert Bare().forward_native(ONES).tolist() == [5, 5]
    assert Bare()(ONES).tolist() == [6, 6]


def test_a_class_with_several_ops_chooses_in_ir_call(declare, scale_op):
    plain = declare()

    class Several(CustomOp):
        ir_op = (plain, scale_op)

        def ir_call(self, x, weight=None):
            return (plain, (x,)) if weight is None else (scale_op, (x, weight))

    assert Several()(ONES).tolist() == [2, 2]
    assert Several().explain(ONES, ONES).provider == "fast"
    with pytest.raises(InvalidLayerError, match="write ir_call"):
        type("Silent", (CustomOp,), {"ir_op": (plain, scale_op)})()(ONES)


def test_hooks_run_for_a_layer_with_an_op(layer_class):
    layer, seen = layer_class(), []
    layer.register_forward_hook(lambda module, args, result: seen.append(result.tolist()))
    layer(ONES)
    assert seen == [[7, 7]]


@pytest.mark.parametrize("arguments", [(ONES, ONES), (ONES, ONES, 2.0, 3.0)])
def test_arguments_that_could_mean_two_things_are_an_error(layer_class, arguments):
    with pytest.raises(InvalidLayerError, match=r"Write ir_args\(self, ...\)"):
        layer_class()(*arguments)


def test_a_missing_argument_is_an_error(scale_op):
    with pytest.raises(InvalidLayerError, match=r"'weight'.*neither the call nor the layer"):
        type("Poor", (CustomOp,), {"ir_op": scale_op})()(ONES)


def test_ir_op_must_be_an_op():
    with pytest.raises(InvalidLayerError, match="ir_op must be an op"):
        type("Wrong", (CustomOp,), {"ir_op": "rms_norm"})
