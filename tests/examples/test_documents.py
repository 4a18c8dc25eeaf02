"""The examples of the README and of docs/ do what the text says."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from markdown_blocks import blocks_of, matches

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DOCUMENTS = [
    path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if any(block.language == "python" and block.caption is None for block in blocks_of(path))
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_python_examples_run_and_print_what_they_say(document):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("IRFRAMEWORK_")}
    # The documents show reports of compiles. One that is served from a cache, as in a second run, runs no pass.
    environment |= {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
    run = subprocess.run(
        [sys.executable, HERE / "run_document.py", document.relative_to(ROOT)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]


@pytest.mark.parametrize(
    "words",
    ["no libfast on this machine", "x is float32, needs bfloat16", "supports_args raised"],
    ids=["unsupported", "predicate false", "raises"],
)
def test_each_way_to_decline_a_call_is_shown_by_an_executed_example(words):
    page = ROOT / "docs/how_a_call_is_decided.md"
    shown = [block.text for block in blocks_of(page) if block.language == "text" and block.adjoins]
    assert any(words in text for text in shown)


def test_expected_output_may_leave_things_out():
    assert matches("a ... z\nend", "a b\nc z  \nend\n")


def test_a_line_of_dots_stands_for_no_line_too():
    assert matches("...\na\n...", "a")


def test_expected_output_is_compared_to_the_end():
    assert not matches("a", "a\nb")


def test_blocks_know_their_language_caption_line_and_neighbour(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "text\n\n```python\nx = 1\n```\n\n```text\n1\n```\n\n```{code-block} toml\n:caption: a/b\n\nc\n```\n"
    )
    first, second, third = blocks_of(page)
    assert (first.language, first.text, first.line, first.adjoins) == ("python", "x = 1\n", 4, False)
    assert (second.language, second.adjoins) == ("text", True)
    assert (third.language, third.caption, third.text, third.line) == ("toml", "a/b", "c\n", 14)
