"""Environment variables."""

import logging

import pytest

from irframework import errors
from irframework.settings import VARIABLES, settings


@pytest.fixture
def read(monkeypatch):
    def read(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"IRFRAMEWORK_{name}", value)
        settings.cache_clear()
        return settings()

    level = logging.getLogger("irframework").level
    yield read
    monkeypatch.undo()
    settings.cache_clear()
    logging.getLogger("irframework").setLevel(level)


@pytest.mark.parametrize("text", ["", "0", "false", "False", "no", "off", " 0 "])
def test_off_is_read(read, text):
    assert read(STRICT=text).strict is False
    assert read(FUSION=text).fusion is False


@pytest.mark.parametrize("text", ["1", "true", "TRUE", "yes", "on"])
def test_on_is_read(read, text):
    assert read(BATCH_INVARIANT=text).batch_invariant is True


@pytest.mark.parametrize(
    ("name", "text"), [("STRICT", "2"), ("FUSION", "maybe"), ("LOGGING_LEVEL", "LOUD"), ("BATCH_INVARIANT", "x")]
)
def test_value_that_cannot_be_read_is_an_error_that_names_the_variable(read, name, text):
    with pytest.raises(errors.ConfigError, match=f"IRFRAMEWORK_{name}='{text}'"):
        read(**{name: text})


def test_lists_are_split_at_commas(read):
    found = read(PLUGINS=" a, b ,", DISABLE_PLUGINS="c", DISABLE_PASSES="x,y")
    assert (found.plugins, found.disable_plugins, found.disable_passes) == (("a", "b"), ("c",), ("x", "y"))


def test_no_allow_list_differs_from_an_empty_one(read, monkeypatch):
    monkeypatch.delenv("IRFRAMEWORK_PLUGINS", raising=False)
    assert read().plugins is None
    assert read(PLUGINS="").plugins == ()


def test_misspelt_variable_is_warned_about(read, caplog):
    read(OP_PRIORITIES="rms_norm=a")
    assert "Did you mean IRFRAMEWORK_OP_PRIORITY?" in caplog.text


def test_variable_of_a_plugin_is_not_warned_about(read, caplog):
    read(ACME_KERNELS_TRACE="1")
    assert "ACME" not in caplog.text


def test_level_is_set_on_our_logger_only(read):
    root = logging.getLogger().level
    read(LOGGING_LEVEL=" info ")
    assert logging.getLogger("irframework").level == logging.INFO
    assert logging.getLogger().level == root


def test_every_variable_is_a_setting_with_a_meaning():
    assert {variable.name.lower() for variable in VARIABLES} == set(settings().__dataclass_fields__)
    assert all(variable.meaning for variable in VARIABLES)


def test_root_logger_has_no_handler_of_ours():
    assert not [h for h in logging.getLogger().handlers if "irframework" in type(h).__module__]
