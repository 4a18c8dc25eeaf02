"""Functions in which providers say which calls they take.

Owns how one is called, how its answer is read, and which parameters one of compiled code may have. Does not decide when
they are asked: see `impl.py` and `dispatch.py`.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from irframework import symbolic
from irframework.decision import Rejected
from irframework.errors import ConditionError

if TYPE_CHECKING:
    from irframework.op import IrOp

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


def check_compiled_where(op: "IrOp", provider: str, predicate: object) -> None:
    """Check the option `compiled_where` of a registration, which may be None.

    Raises:
        ConditionError: It is no function.
        SignatureError: It takes other parameters than the op has, or takes them in another order.
    """
    from irframework.impl import check_parameters

    if predicate is None:
        return
    if not callable(predicate):
        raise ConditionError(
            f"Op {op.name!r}, provider {provider!r}: compiled_where must be a function of some of the op's parameters, "
            f"got {predicate!r:.60}."
        )
    check_parameters(op, predicate, f"compiled_where of provider {provider!r}")
