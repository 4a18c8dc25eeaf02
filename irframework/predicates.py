"""Functions in which providers say which calls they take.

Owns how one is called, and how its answer is read. Does not decide when one is asked: see `impl.py`, `dispatch.py`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from irframework import symbolic
from irframework.decision import Rejected

RAISED = "raised"  # what the reason of an answer that was an exception says behind the option's name


def answer_of(predicate: Callable[..., Any], named: Mapping[str, Any], option: str) -> Rejected | None:
    """Ask a predicate about a call.

    Args:
        predicate: A function of some of the op's parameters.
        named: All arguments of the call, by the op's names.
        option: What it was registered as, for reasons.

    Returns:
        None if it says yes, else why not. An exception means no, unless it is one of torch about a symbolic size.
    """
    parameters = inspect.signature(predicate).parameters
    # What can be is passed by position: predicates may be C functions, or lambdas with other ideas of keywords.
    keyword_only = {name for name, p in parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}
    positional = [value for name, value in named.items() if name in parameters and name not in keyword_only]
    try:
        answer = predicate(*positional, **{name: value for name, value in named.items() if name in keyword_only})
        accepted = bool(answer)
    except Exception as error:
        if symbolic.is_guard_error(error):
            raise
        return Rejected(f"{option} {RAISED} {type(error).__name__}: {error}")
    if isinstance(answer, Rejected):
        return answer
    return None if accepted else Rejected(f"{option} said no")
