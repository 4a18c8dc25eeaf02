"""Whether graphs are fused, who said so, and what has no effect."""

import argparse

import pytest

import irframework as ir
from irframework import fusion_state, notices
from irframework.errors import ConfigError
from irframework.registry import registry
from irframework.settings import layers, settings


@pytest.fixture
def environment(monkeypatch):
    """Set variables as if the program began now."""

    def begin(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"IRFRAMEWORK_{name}", value)
        settings.cache_clear()
        notices._said.clear()

    for name in ("FUSION", "DISABLE_FUSIONS", "DISABLE_PASSES"):
        monkeypatch.delenv(f"IRFRAMEWORK_{name}", raising=False)
    settings.cache_clear()
    yield begin
    monkeypatch.undo()
    settings.cache_clear()


@pytest.fixture
def command_line():
    """Configure from flags."""

    def configure(*flags):
        parser = argparse.ArgumentParser()
        ir.add_cli_args(parser)
        ir.configure(ir.KernelConfig.from_cli_args(parser.parse_args(flags)))

    yield configure
    layers.cli = None
    registry.changed()


def test_it_is_on_by_default(environment):
    assert str(fusion_state.current()) == "on (default)"


def test_environment_command_line_and_configuration_agree_on_one_value(environment, command_line, configured):
    environment(FUSION="0")
    assert str(fusion_state.current()) == "off (IRFRAMEWORK_FUSION)"
    assert ir.current_config().fusion is False
    command_line("--ir-fusion")
    assert str(fusion_state.current()) == "on (--ir-fusion)"
    configured(fusion=False)
    assert str(fusion_state.current()) == "off (KernelConfig(fusion=...))"
    assert ir.current_config().fusion is False


def test_the_highest_place_says_which_ops_are_left_out(environment, command_line, configured):
    environment(DISABLE_FUSIONS=" rms_norm, gelu_and_mul ,")
    assert fusion_state.current().without == ("rms_norm", "gelu_and_mul")
    command_line("--ir-disable-fusions", "rms_norm")
    assert fusion_state.current().without == ("rms_norm",)
    configured(disable_fusions="silu_and_mul")
    assert str(fusion_state.current()) == "on (default), without silu_and_mul (KernelConfig(disable_fusions=...))"
    assert ir.current_config().disable_fusions == ["silu_and_mul"]


def test_a_pass_that_is_switched_off_is_the_effective_value(environment, configured, caplog):
    environment(DISABLE_PASSES="fuse")
    configured(fusion=True)
    assert ir.current_config().fusion is False
    fusion_state.warn()
    assert "KernelConfig(fusion=...), and is off: IRFRAMEWORK_DISABLE_PASSES names fuse" in caplog.text


def test_switching_the_pass_off_contradicts_nobody_who_did_not_ask(environment, caplog):
    environment(DISABLE_PASSES="fuse")
    fusion_state.warn()
    assert not caplog.text


def test_an_unknown_name_is_warned_about_once_with_a_suggestion(environment, caplog):
    environment(DISABLE_FUSIONS="rms_nrom")
    fusion_state.warn()
    fusion_state.warn()
    assert caplog.text.count("IRFRAMEWORK_DISABLE_FUSIONS names 'rms_nrom', which is no fused op") == 1
    assert "Did you mean 'rms_norm'" in caplog.text


def test_fusion_that_is_asked_for_without_any_fused_op_is_said_once(environment, configured, caplog, monkeypatch):
    environment()
    configured(fusion=True)
    monkeypatch.setattr(registry, "ops", {})
    fusion_state.warn()
    fusion_state.warn()
    assert caplog.text.count("asks for fusion, and no op is declared with fuse") == 1


@pytest.mark.parametrize(
    ("value", "problem"),
    [("rms_nrom", "no op 'rms_nrom'.*rms_norm"), ("donated_nothing", "no op"), (3, "expected names"), ([3], "names")],
)
def test_a_mistake_in_the_configuration_is_an_error(value, problem):
    with pytest.raises(ConfigError, match=problem):
        ir.KernelConfig(disable_fusions=value)


def test_an_op_that_nothing_is_fused_into_cannot_be_left_out(declare):
    op = declare()
    with pytest.raises(ConfigError, match=f"{op.name}' is not declared with fuse"):
        ir.KernelConfig(disable_fusions=[op.name])


def test_the_doctor_prints_the_effective_value_and_names_what_is_wrong(environment):
    from irframework.cli import diagnosis

    environment(DISABLE_FUSIONS="rms_nrom,rms_norm")
    shown = dict(diagnosis._environment())
    assert (
        shown["fusion in compiled graphs"] == "on (default), without rms_nrom, rms_norm (IRFRAMEWORK_DISABLE_FUSIONS)"
    )
    (finding,) = [each for each in diagnosis._setting_findings(()) if each.subject == "IRFRAMEWORK_DISABLE_FUSIONS"]
    assert (finding.severity, "Did you mean 'rms_norm'" in finding.text) == ("problem", True)
