"""Reads the fenced blocks of a Markdown file.

Owns what a block of the README and of docs/ means to the tests:

* `python` without a caption is executed, in order, all blocks of a file in one namespace. A `text` block directly
  after it is what it prints; `...` stands for anything.
* A block with a caption (`:caption: directory/file`) is a file that the reader writes.
* `console`: lines that start with `$ ` are commands that the reader types, the lines below are what they print, with
  `...` as above.

Does not execute anything.
"""

import re
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^(?P<ticks>`{3,})(?P<info>.*)$")
_DIRECTIVE = re.compile(r"^\{code-block\}\s*(\w+)$")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block.

    Attributes:
        language: `python`, `text`, `console`, ...
        caption: The file it stands for, or None.
        text: Its content.
        line: Number of its first line of content, from 1.
        adjoins: Whether nothing but blank lines stands between it and the block before.
    """

    language: str
    caption: str | None
    text: str
    line: int
    adjoins: bool


def blocks_of(path: Path) -> list[Block]:
    """Return the fenced blocks of a file in order."""
    found: list[Block] = []
    lines = path.read_text().splitlines()
    number, prose_between = 0, True
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        number += 1
        if fence is None:
            prose_between = prose_between or bool(lines[number - 1].strip())
            continue
        info = fence["info"].strip()
        directive = _DIRECTIVE.match(info)
        language, caption = directive.group(1) if directive else info, None
        start = number
        while lines[number].rstrip() != fence["ticks"]:
            number += 1
        content = lines[start:number]
        number += 1
        while directive and content and content[0].startswith(":"):
            option, _, value = content.pop(0)[1:].partition(":")
            caption = value.strip() if option == "caption" else caption
            start += 1
        while directive and content and not content[0].strip():
            content.pop(0)
            start += 1
        found.append(Block(language, caption, "\n".join(content) + "\n", start + 1, not prose_between))
        prose_between = False
    return found


def matches(expected: str, printed: str) -> bool:
    """Whether a text is what was expected. How many blanks stand together does not count: tables fit their content.

    Args:
        expected: `...` in a line stands for anything, over lines too; a line `...` for any number of lines or none.
        printed: What came out.
    """
    pattern = "".join(
        r"(?:.*\n)?" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + r"\n"
        for line in _trimmed(expected)
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in _trimmed(printed)), re.DOTALL) is not None


def _trimmed(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.strip().splitlines()]
