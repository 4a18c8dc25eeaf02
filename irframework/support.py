"""Whether an implementation can run on this machine at all: the answer to `register_impl(supported=...)`.

Owns asking, once and at first need, and keeping the reason. Does not look at a call: that is `supports_args`.
"""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from irframework.decision import Rejected
from irframework.errors import ConditionError

logger = logging.getLogger(__name__)

Answer = bool | Rejected | Callable[[], bool | Rejected]


class Support:
    """What a registration says of this machine, as a whole or for each device type.

    Args:
        name: `op:provider`, for messages.
        said: A bool, `ir.reject(reason)` or a callable without arguments; or a mapping of device types to such.

    Raises:
        ConditionError: It is none of these.
    """

    __slots__ = ("_name", "_reasons", "_said", "by_device")

    def __init__(self, name: str, said: "Answer | Mapping[str, Answer]" = True) -> None:
        self._name = name
        self.by_device = isinstance(said, Mapping)
        self._said: dict[str, Any] = dict(said) if isinstance(said, Mapping) else {"": said}
        self._reasons: dict[str, str | None] = {}
        for answer in self._said.values():
            if not (isinstance(answer, (bool, Rejected)) or callable(answer)):
                raise ConditionError(
                    f"{name}: supported must be True, False, ir.reject(reason), a function without arguments, or a "
                    f"mapping of device types to such; got {answer!r:.60}."
                )
        if not self._said:
            raise ConditionError(f"{name}: supported is an empty mapping; name the device types it runs on.")

    @property
    def device_types(self) -> tuple[str, ...] | None:
        """The device types that it tells apart, or None."""
        return tuple(self._said) if self.by_device else None

    def reason(self, device: str | None = None) -> str | None:
        """Why the implementation cannot run here, or None if it can.

        Args:
            device: A device type; None asks whether it runs on any.
        """
        if not self.by_device:
            return self._ask("")
        if device is not None:
            return self._ask(device) if device in self._said else None
        reasons = {each: self._ask(each) for each in self._said}
        if None in reasons.values():
            return None
        return "; ".join(f"on {each}: {reason}" for each, reason in reasons.items())

    def _ask(self, key: str) -> str | None:
        if key not in self._reasons:
            said = self._said[key]
            try:
                answer = said() if callable(said) else said
            except (Exception, SystemExit) as error:  # a library that it imports may exit
                logger.debug("supported() of %s raised", self._name, exc_info=True)
                self._reasons[key] = f"supported() raised {type(error).__name__}: {error}"
            else:
                no = "supported() said no on this machine" if callable(said) else "registered with supported=False"
                reason = answer.reason if isinstance(answer, Rejected) else None if answer else no
                self._reasons[key] = reason
        return self._reasons[key]
