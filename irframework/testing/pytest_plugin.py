"""Options for pytest: `pytest --pyargs irframework.testing.conformance --ir-provider=NAME`.

Owns the options. pytest loads this module in every run in an environment with irframework, so it imports nothing heavy.
The tests are in `conformance.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the options."""
    group = parser.getgroup("irframework", "conformance of irframework's implementations")
    group.addoption("--ir-provider", action="append", default=[], metavar="NAME", help="test this provider")
    group.addoption("--ir-op", action="append", default=[], metavar="OP", help="only its implementation of this op")
    group.addoption("--ir-device", default=None, metavar="DEVICE", help="where (default: the platform's device)")
