"""Configurations of programs."""

import argparse
import copy
import pickle

import pytest
import torch

import irframework as ir
from irframework import errors
from irframework.platform import Platform, add_platform
from irframework.registry import Transaction, registry
from irframework.settings import effective, layers


@pytest.fixture
def op(declare):
    op = declare()
    for value, name in ((10.0, "a"), (11.0, "b")):
        op.register_impl(name)(constant(value))
    return op


def constant(value):
    def fn(x, weight=None, epsilon=1e-6):
        return torch.full_like(x, value)

    return fn


@pytest.mark.parametrize("value", ["b,a", ["b", "a"], ("b", "a"), " b , a "])
def test_lists_and_comma_strings_configure_the_same(op, value):
    assert ir.KernelConfig(ir_op_priority={op.name: value}).ir_op_priority == {op.name: ["b", "a"]}
    assert getattr(ir.IrOpPriorityConfig(**{op.name: value}), op.name) == ["b", "a"]


def test_whole_priority_may_be_a_string_or_a_config_object(op):
    expected = {op.name: ["b"]}
    assert ir.KernelConfig(ir_op_priority=f"{op.name}=b").ir_op_priority == expected
    assert ir.KernelConfig(ir_op_priority=ir.IrOpPriorityConfig(**{op.name: "b"})).ir_op_priority == expected


def test_defaults():
    config = ir.KernelConfig()
    assert config.model_dump() == {
        "ir_op_priority": {},
        "fusion": True,
        "autotune": False,
        "strict": False,
        "batch_invariant": False,
        "custom_ops": [],
        "disable_fusions": [],
        "sequence_parallel": 0,
    }


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"ir_op_priority": {"rms_nrom": ["native"]}}, "rms_nrom.*'rms_norm'"),
        ({"ir_op_priority": {"rms_norm": ["typo"]}}, "typo.*native"),
        ({"ir_op_priority": {"rms_norm": ["native", "native"]}}, "twice"),
        ({"ir_op_priority": {"rms_norm": []}}, "rms_norm"),
        ({"ir_op_priority": {"rms_norm": None}}, "rms_norm"),
        ({"ir_op_priority": 3}, "mapping"),
        ({"ir_op_priority": "rms_norm"}, "rms_norm"),
        ({"fusion": "perhaps"}, "fusion"),
        ({"batch_invarient": True}, "batch_invarient"),
    ],
)
def test_mistake_is_a_config_error_that_names_it(values, problem):
    with pytest.raises(errors.ConfigError, match=problem):
        ir.KernelConfig(**values)


@pytest.mark.parametrize("value", ["", [], "a,a", 3, None])
def test_mistake_in_a_priority_config_names_the_op(value):
    with pytest.raises(errors.ConfigError, match="rms_norm"):
        ir.IrOpPriorityConfig(rms_norm=value)


def test_configurations_are_frozen():
    with pytest.raises(ValueError, match="frozen"):
        ir.KernelConfig().fusion = False


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
def test_copies_of_a_configuration_are_equal(op, clone):
    for config in (ir.KernelConfig(ir_op_priority={op.name: "b"}, fusion=False), ir.IrOpPriorityConfig(rms_norm="a")):
        assert clone(config) == config


@pytest.mark.parametrize("form", ["one", "many"])
def test_command_line_names_providers(op, form):
    parser = argparse.ArgumentParser()
    ir.add_cli_args(parser)
    given = [f"--ir-op-priority.{op.name}=b,a"] if form == "one" else [f"--ir-op-priority={op.name}=b,a"]
    config = ir.KernelConfig.from_cli_args(parser.parse_args(given))
    assert config.ir_op_priority == {op.name: ["b", "a"]}
    assert config.model_fields_set == {"ir_op_priority"}


def test_switches_of_the_command_line_are_set_only_when_given():
    parser = argparse.ArgumentParser()
    ir.add_cli_args(parser)
    config = ir.KernelConfig.from_cli_args(parser.parse_args(["--no-ir-fusion", "--ir-batch-invariant"]))
    assert (config.fusion, config.batch_invariant, config.strict) == (False, True, False)
    assert "strict" not in config.model_fields_set


def test_command_line_of_another_programs_parser_is_left_alone():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    ir.add_cli_args(parser)
    namespace = parser.parse_args(["--model", "m"])
    assert namespace.model == "m"
    assert ir.KernelConfig.from_cli_args(namespace).model_fields_set == set()
    assert "--ir-op-priority" in parser.format_help()


@pytest.mark.parametrize("given", [["--ir-op-priority.rms_norm=typo"], ["--ir-op-priority=rms_nrom=native"]])
def test_mistake_on_the_command_line_is_a_config_error(given):
    parser = argparse.ArgumentParser()
    ir.add_cli_args(parser)
    with pytest.raises(errors.IrError, match=r"typo|rms_nrom"):
        ir.KernelConfig.from_cli_args(parser.parse_args(given))


def test_configured_priority_counts_until_it_is_taken_back(op, configured):
    configured(ir_op_priority={op.name: "b"})
    for _ in range(3):
        assert op(torch.ones(1)).item() == 11
    configured()
    assert op(torch.ones(1)).item() == 10


def test_configuration_counts_in_every_thread(op, configured):
    import threading

    configured(ir_op_priority={op.name: "b"})
    seen = []
    thread = threading.Thread(target=lambda: seen.append(op(torch.ones(1)).item()))
    thread.start()
    thread.join()
    assert seen == [11]


def test_configuration_from_code_stands_above_the_command_line(op, configured):
    parser = argparse.ArgumentParser()
    ir.add_cli_args(parser)
    try:
        ir.configure(
            ir.KernelConfig.from_cli_args(parser.parse_args([f"--ir-op-priority.{op.name}=b", "--no-ir-fusion"]))
        )
        assert op(torch.ones(1)).item() == 11
        assert effective("fusion") is False
        configured(ir_op_priority={op.name: "a"}, fusion=True)
        assert op(torch.ones(1)).item() == 10
        assert effective("fusion") is True
        assert ir.current_config().ir_op_priority == {op.name: ["a", "b"]}
    finally:
        layers.cli = None
        registry.changed()


def test_current_config_shows_what_is_in_force(op, configured):
    assert ir.current_config() == ir.KernelConfig()
    configured(ir_op_priority={op.name: "b"}, fusion=False, autotune=True, batch_invariant=True)
    shown = ir.current_config()
    assert shown.ir_op_priority == {op.name: ["b"]}
    assert (shown.fusion, shown.autotune, shown.batch_invariant) == (False, True, True)


@pytest.mark.parametrize("wrong", [None, {"fusion": False}, 3])
def test_configure_takes_a_kernel_config_only(wrong):
    with pytest.raises(errors.ConfigError, match="KernelConfig"):
        ir.configure(wrong)


@pytest.fixture
def platform():
    transaction = Transaction("test")

    def make(hook):
        kind = type("P", (Platform,), {"name": "testconfig", "device_types": ("cpu",), "check_and_update_config": hook})
        kind.is_available = lambda self: True
        with registry.registering(transaction):
            add_platform("test", kind())

    yield make
    transaction.roll_back()


def test_platform_may_change_the_configuration(configured, platform):
    platform(lambda self, config: config.model_copy(update={"fusion": False}))
    configured()
    assert effective("fusion") is False


def test_platform_that_refuses_a_configuration_is_named(platform):
    def refuse(self, config):
        raise RuntimeError("no fusion here")

    platform(refuse)
    with pytest.raises(errors.ConfigError, match=r"testconfig.*no fusion here"):
        ir.configure(ir.KernelConfig())


def test_platform_that_returns_no_configuration_is_named(platform):
    platform(lambda self, config: None)
    with pytest.raises(errors.ConfigError, match=r"testconfig.*KernelConfig"):
        ir.configure(ir.KernelConfig(fusion=False))
    assert effective("fusion") is True


def test_configuration_of_a_priority_no_longer_possible_is_a_clear_error(op, configured):
    configured(ir_op_priority={op.name: "b"})
    op.unregister_impl("b")
    with pytest.raises(errors.UnknownProviderError, match=r"config.*'b'"):
        op(torch.ones(1))
