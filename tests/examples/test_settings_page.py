"""The reference says what the code says: variables, fields, flags, commands, errors and hooks."""

import argparse
import inspect
import re
from pathlib import Path

import irframework as ir
from irframework import errors, hookspecs
from irframework.settings import PREFIX, VARIABLES

REFERENCE = Path(__file__).parents[2] / "docs/reference"


def rows(page: str, heading: str) -> list[list[str]]:
    """Cells of the table under a heading that contains these words."""
    found, inside = [], False
    for line in (REFERENCE / page).read_text().splitlines():
        if line.startswith("| ") and heading in line:
            inside = True
        elif inside and line.startswith("| "):
            found.append([cell.strip() for cell in line.strip("|").split(" | ")])
        elif inside and not line.startswith("|"):
            break
    assert found
    return found


def test_every_environment_variable_has_its_row_with_its_meaning():
    shown = [(name.strip("`"), meaning) for name, _, meaning in rows("settings.md", "variable")]
    assert shown == [(PREFIX + variable.name, variable.meaning) for variable in VARIABLES]


def test_every_field_of_the_configuration_has_its_row_with_its_default():
    shown = {name.strip("`"): default.strip("`") for name, default, _ in rows("settings.md", "KernelConfig")}
    assert shown == {name: repr(field.default) for name, field in ir.KernelConfig.model_fields.items()}


def test_every_flag_is_shown():
    parser = argparse.ArgumentParser(add_help=False)
    ir.add_cli_args(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    flags = {re.sub(r"(--ir-op-priority\.).*", r"\1<op>", flag) for flag in flags}
    shown = re.findall(r"--[\w.<>-]+", " ".join(row[0] for row in rows("settings.md", "| flag")))
    assert set(shown) == flags


def test_every_command_is_shown_with_what_its_help_says():
    from irframework.cli.entry import _COMMANDS

    assert {name.strip("`"): text for name, text in rows("command_line.md", "command")} == _COMMANDS


def test_every_error_class_has_a_docstring_for_the_reference():
    classes = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, errors.IrError)]
    assert [c.__name__ for c in classes if not (c.__doc__ or "").strip()] == []


def test_every_hook_is_in_the_reference():
    shown = set(re.findall(r"irframework_\w+", (REFERENCE / "hooks.md").read_text()))
    assert {name for name in vars(hookspecs) if name.startswith("irframework_")} <= shown


def test_every_public_name_is_in_the_reference():
    text = "".join(path.read_text() for path in REFERENCE.glob("*.md"))
    assert [name for name in ir.__all__ if not re.search(rf"\b{name}\b", text)] == []
