"""Executes the Python blocks of one Markdown file: `python run_document.py FILE`.

Owns the execution, in a process of its own because examples declare ops. Exit code 1 if a block prints something else
than the text below it; an exception of a block ends the process as it would end a program.
"""

import contextlib
import io
import sys
from pathlib import Path

from markdown_blocks import blocks_of, matches


def main(path: Path) -> int:
    """Execute the file's blocks."""
    namespace = {"__name__": "__main__"}
    printed = ""
    status = 0
    for block in blocks_of(path):
        if block.caption is None and block.language == "python":
            # As many empty lines as stand above: places in messages are those of the Markdown file.
            code = compile("\n" * (block.line - 1) + block.text, str(path), "exec")
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(code, namespace)
            printed = output.getvalue()
        elif block.language == "text" and block.adjoins and not matches(block.text, printed):
            print(f"{path}:{block.line}: expected\n{block.text}\nbut it printed\n{printed}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
