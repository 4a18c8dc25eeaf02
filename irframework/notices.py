"""Things said once.

Owns which notices were given already, so that a thousand equal calls give one line. Does not own any message.
"""

import logging

logger = logging.getLogger(__name__)

_said: set[tuple[object, ...]] = set()


def say_once(level: int, key: tuple[object, ...], message: str, *args: object) -> None:
    """Log a message the first time its key is seen."""
    if key not in _said:
        _said.add(key)
        logger.log(level, message, *args)
