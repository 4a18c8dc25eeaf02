"""Further spellings of an op's definition: functions that compute the same in other torch ops.

Owns their registration. Each is another pattern for fusion, and nothing else: it never runs. Whether it computes the
same is looked at when a graph is first searched for it (`compiler/spelling_check.py`).
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from irframework.errors import InvalidOpError, SignatureError
from irframework.impl import IrOpImpl, check_signature, declared_again, place_of
from irframework.registry import registry

if TYPE_CHECKING:
    from irframework.op import IrOp

SPELLING = "spelling"


def with_spelling(op: "IrOp", fn: Callable[..., Any]) -> tuple[IrOpImpl, ...]:
    """Return an op's spellings with one more, or with a reloaded one in its place.

    Raises:
        InvalidOpError: The op is not declared with `fuse`, so nothing would look for it; or `fn` is no function.
        SignatureError: It does not have the op's signature.
    """
    if not callable(fn):
        raise InvalidOpError(f"Op {op.name!r}: register_spelling expects a function, got {fn!r:.60}.")
    if not op.fuse:
        raise InvalidOpError(
            f"Op {op.name!r} ({op.source}) is not declared with fuse, so no graph is searched for its spelling "
            f"({place_of(fn)}). Declare it with @ir.register_op(fuse=True)."
        )
    missing = check_signature(op, fn, "The spelling", SPELLING)
    if missing:
        raise SignatureError(f"The spelling of op {op.name!r} ({place_of(fn)}) lacks {', '.join(missing)}.")
    plugin = registry.transaction.plugin if registry.transaction is not None else None
    spelling = IrOpImpl(op, SPELLING, fn, plugin=plugin, source=place_of(fn))
    others = [other for other in op.spellings if not declared_again(other.fn, fn)]
    return (*others, spelling)
