"""Which line of the user's code a call or a graph's node comes from.

Owns which frames are not the user's (those of this framework, of torch, and of generated dispatchers), and how a line
is written: `FILE:LINE, in NAME: CODE`. Does not own what is said about the line.

Private Python API used here: `sys._getframe`.
"""

import linecache
import os
import re
import sys
from dataclasses import dataclass
from functools import cache, lru_cache
from types import CodeType, FrameType
from typing import Any

_GRAPH = "<eval_with_key>"  # the name that torch.fx gives to the code of a graph


@dataclass(frozen=True, slots=True)
class CallSite:
    """A place in a running program.

    Attributes:
        key: What tells it from others: file, line, and which call on the line.
        text: `FILE:LINE, in NAME: CODE`.
    """

    key: tuple[str, int, int]
    text: str


@cache
def _not_users() -> tuple[str, ...]:
    """How the names of files begin whose code is not the user's."""
    import torch  # here: the command line reads logs without it

    packages = (os.path.dirname(os.path.abspath(path)) + os.sep for path in (__file__, torch.__file__))
    return ("<irframework ", "<frozen ", *packages)


@lru_cache(maxsize=4096)
def is_users(filename: str) -> bool:
    """Whether code of this file was written by the user, as far as its name tells."""
    return not filename.startswith(_not_users())


def call_site() -> CallSite:
    """The innermost line of the user's code that runs now, in this thread."""
    frame = _users_frame(sys._getframe(1))
    if frame is None:
        return CallSite(("", 0, 0), "unknown")
    key = (frame.f_code.co_filename, frame.f_lineno, frame.f_lasti)
    text = _line_of(frame)
    if key[0].startswith(_GRAPH):  # which node of a graph that runs as it is; the user knows who called the graph
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename.startswith(_GRAPH):
            caller = _users_frame(caller.f_back)
        caller = _users_frame(caller)
        text += f" (called from {_line_of(caller)})" if caller is not None else ""
    return CallSite(key, text)


def _users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _line_of(frame: FrameType) -> str:
    return line_text(frame.f_code, frame.f_lineno, frame.f_globals)


def line_text(function: CodeType, line: int, scope: dict[str, Any] | None = None) -> str:
    """`FILE:LINE, in NAME: CODE` of a line of a function.

    Args:
        function: The function's code.
        line: The line's number in its file.
        scope: The function's globals: a module that was loaded from elsewhere than a file knows its source by them.
    """
    code = linecache.getline(function.co_filename, line, scope).strip()
    return f"{function.co_filename}:{line}, in {function.co_name}" + (f": {code}" if code else "")


def site_in_trace(trace: str) -> str:
    """`FILE:LINE, in NAME: CODE` of the innermost frame of the user's code in a stack trace that torch keeps as text.

    Args:
        trace: Pairs of lines, `File "FILE", line LINE, in NAME` and the code; innermost last.

    Returns:
        The last frame that is the user's; if there is none, the last frame; empty if there are no frames.
    """
    frames: list[tuple[str, str]] = []
    lines = [line.strip() for line in trace.splitlines()]
    for line, code in zip(lines, [*lines, ""][1:], strict=True):
        match = re.fullmatch(r'File "(.+)", line (\d+)(?:, in (.+))?', line)
        if match is not None:
            name = f", in {match[3]}" if match[3] else ""
            shown = f": {code}" if code and not code.startswith("File ") else ""
            frames.append((match[1], f"{match[1]}:{match[2]}{name}{shown}"))
    users = [text for filename, text in frames if is_users(filename)]
    return (users or [text for _, text in frames] or [""])[-1]
