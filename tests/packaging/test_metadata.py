"""What the distributions' metadata promise, and what the files of the repository say about each other."""

import re
from pathlib import Path

import pytest

import irframework

tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read TOML by itself")

ROOT = Path(__file__).parents[2]
PROJECTS = [ROOT, *(path.parent for path in sorted(ROOT.glob("plugins/*/pyproject.toml")))]
by_project = pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)


def metadata(project: Path) -> dict:
    return tomllib.loads((project / "pyproject.toml").read_text())


def test_the_version_is_stated_once_in_two_places_that_agree():
    assert metadata(ROOT)["project"]["version"] == irframework.__version__


@by_project
def test_every_distribution_carries_the_same_licence(project):
    assert metadata(project)["project"]["license"] == "Apache-2.0"
    assert (project / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()


@by_project
def test_torch_is_a_range_in_requirements(project):
    requirements = metadata(project)["project"]["dependencies"]
    assert "torch>=2.11" in requirements


@by_project
def test_torch_is_never_a_build_requirement(project):
    assert not [r for r in metadata(project)["build-system"]["requires"] if r.startswith("torch")]


def test_the_core_depends_on_nothing_else():
    names = {re.match(r"[\w-]+", r).group() for r in metadata(ROOT)["project"]["dependencies"]}
    assert names == {"torch", "pluggy", "importlib-metadata", "pydantic"}


@pytest.mark.parametrize("project", PROJECTS[1:], ids=lambda path: path.name)
def test_every_plugin_is_found_through_the_entry_point_group(project):
    entry_points = metadata(project)["project"]["entry-points"]["irframework.plugins"]
    assert list(entry_points) == [project.name]


def test_torch_is_pinned_in_the_constraints():
    assert re.search(r"^torch==\d+\.\d+\.\d+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def test_every_tool_of_an_extra_is_pinned_in_the_constraints():
    pinned = {
        re.match(r"[\w.-]+", line).group().lower()
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    extras = metadata(ROOT)["project"]["optional-dependencies"].values()
    wanted = {re.match(r"[\w.-]+", r).group().lower() for extra in extras for r in extra}
    assert wanted - pinned == set()
