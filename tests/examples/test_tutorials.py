"""The tutorials, followed word for word by a new user: their files are written, their commands are typed."""

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest
from markdown_blocks import Block, blocks_of, matches

ROOT = Path(__file__).parents[2]
TUTORIALS = {
    "plugin_author": ROOT / "examples/irframework-chunked",
    "platform_author": ROOT / "examples/irframework-standin",
}
by_tutorial = pytest.mark.parametrize("name", TUTORIALS)


def blocks(name: str) -> list[Block]:
    return blocks_of(ROOT / "docs/tutorials" / f"{name}.md")


@by_tutorial
def test_the_files_of_a_tutorial_are_those_of_its_example(name):
    example = TUTORIALS[name]
    shown = {block.caption: block.text for block in blocks(name) if block.caption}
    files = [path for path in example.rglob("*") if path.suffix in (".py", ".toml")]
    assert shown == {str(path.relative_to(example.parent)): path.read_text() for path in files}


@pytest.mark.slow
@by_tutorial
def test_a_tutorial_followed_word_for_word_works(name, tmp_path):
    # The user's environment is this one with a directory in front, so that the example is installed for this test only.
    installed, work = tmp_path / "installed", tmp_path / "work"
    work.mkdir()
    path = f"{sysconfig.get_path('scripts')}{os.pathsep}{os.environ['PATH']}"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("IRFRAMEWORK_", "PYTHON"))}
    environment |= {
        "PATH": path,
        "PYTHONPATH": str(installed),
        "PIP_TARGET": str(installed),
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as --no-build-isolation=0: off
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",  # a compile served from an earlier run's cache has no report to show
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor")),
    }
    for block in blocks(name):
        if block.caption:
            file = work / block.caption
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
        elif block.language == "console":
            _type(block, work, environment)


def _type(block: Block, directory: Path, environment: dict[str, str]) -> None:
    commands: list[tuple[str, list[str]]] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            commands.append((line[2:], []))
        else:
            commands[-1][1].append(line)
    for command, lines in commands:
        run = subprocess.run(
            ["bash", "-c", f"exec 2>&1\n{command}"],
            cwd=directory,
            env=environment,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        expected = "\n".join(lines)
        assert matches(expected, run.stdout), f"$ {command}\n{run.stdout}\n--- expected\n{expected}"
