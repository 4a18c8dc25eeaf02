"""The figures of docs/ are what their script draws."""

import runpy
from pathlib import Path

import pytest

FIGURES = Path(__file__).parents[2] / "docs/figures"


@pytest.mark.parametrize("figure", sorted(FIGURES.glob("*.svg")), ids=lambda path: path.stem)
def test_a_figure_is_what_its_script_draws(figure, tmp_path):
    runpy.run_path(str(FIGURES / "draw.py"))["main"](tmp_path)
    assert (tmp_path / figure.name).read_text() == figure.read_text()
