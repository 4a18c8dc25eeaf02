"""The form of an op that gives its activations away.

Owns the object behind `op.maybe_inplace`. Does not own its calls: they are generated (`dispatcher.py`), and donation is
`donation.py`'s.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from irframework.errors import InplaceError
from irframework.registry import find_op

if TYPE_CHECKING:
    from irframework.op import IrOp


class MaybeInplace:
    """Callable form of an op that gives its activations away: the implementation may overwrite them."""

    def __init__(self, op: "IrOp") -> None:
        self.op = op
        self.torch_op: Any = None
        self.first_call: Callable[..., Any] | None = None
        self.generated: dict[Any, Callable[..., Any]] = {}
        self.misses = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: the op was not declared with `allow_inplace`. Replaced where it was."""
        raise InplaceError(
            f"Op {self.op.name!r} was not declared with allow_inplace=True ({self.op.source}), so it has no "
            f"maybe_inplace form. Call ir.ops.{self.op.name}(...) instead."
        )

    def __repr__(self) -> str:
        return f"<maybe_inplace form of {self.op!r}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _maybe_inplace_named, (self.op.name,)


def _maybe_inplace_named(name: str) -> Any:
    return find_op(name).maybe_inplace
