"""The tables of ops say what the code says: every op and layer, its category and its providers."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from test_settings_page import rows

import irframework as ir
from irframework import layers
from irframework.cli import op_matrix

ROOT = Path(__file__).parents[2]
NO_LAYERS = ("CustomOp", "PluggableLayer", "ParallelLayer", "Group")  # what layers are made of, and divided over


def table() -> list[list[str]]:
    """Category, name, what it was tested against and providers, of each row."""
    return [[cell.strip() for cell in row] for row in rows("../ops.md", "| category |") if row[0] != "---|---|---|---"]


OPS = {name.strip("`"): (category, providers) for category, name, _, providers in table() if "layers." not in name}
LAYERS = {name.strip("`"): (category, providers) for category, name, _, providers in table() if "layers." in name}


def test_every_standard_op_has_its_row():
    assert sorted(OPS) == sorted(ir.ops.__all__)


def test_every_layer_has_its_row():
    public = [name for name in layers.__all__ if inspect.isclass(getattr(layers, name)) and name not in NO_LAYERS]
    modules = [name for name in public if issubclass(getattr(layers, name), torch.nn.Module)]
    assert sorted(LAYERS) == sorted(f"layers.{name}" for name in modules)


@pytest.mark.parametrize("name", OPS)
def test_an_op_stands_in_the_category_of_its_family(name):
    assert OPS[name][0] == op_matrix.family_of(getattr(ir.ops, name))


@pytest.mark.parametrize("name", OPS)
def test_its_providers_are_those_of_the_plugins_that_are_installed_here(name):
    installed = {"native", *(provider for plugin in ir.plugins() for provider in plugin.providers)}
    op = getattr(ir.ops, name)
    shown = [provider for provider in OPS[name][1].split(", ") if provider in installed]
    registered = [provider for provider in op_matrix.providers_of([op]) if provider in installed]
    assert shown == registered, f"docs/ops.md, row of `{name}`: {', '.join(registered)}"


@pytest.mark.parametrize("name", LAYERS)
def test_the_providers_of_a_layer_are_those_of_ops_that_it_calls(name):
    called = re.findall(r"`(\w+)`", LAYERS[name][1])
    source = inspect.getsource(inspect.getmodule(getattr(layers, name.removeprefix("layers."))))
    divided = inspect.getsource(inspect.getmodule(layers.ParallelLayer))
    assert called
    assert [op for op in called if op not in source and op not in divided] == []


def test_what_an_op_was_tested_against_occurs_in_the_tests():
    text = "".join(
        path.read_text() for folder in ("ops", "core", "layers") for path in ROOT.glob(f"tests/{folder}/*.py")
    )
    named = [name for _, _, against, _ in table() for name in re.findall(r"`(?:[\w.]+\.)?(\w+)`", against)]
    assert [name for name in named if not re.search(rf"\b{name}\b|[\"'.]{name}", text)] == []


def test_every_standard_op_is_in_the_reference():
    text = (ROOT / "docs/reference/ops.md").read_text()
    described = re.findall(r"autofunction:: irframework\.ops\.(\w+)\.(\w+)", text)
    expected = {(op.native.__module__.rpartition(".")[2], op.name) for op in map(ir.ops.__getattr__, ir.ops.__all__)}
    assert set(described) == expected
