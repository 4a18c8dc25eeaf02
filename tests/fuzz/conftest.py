"""Providers of the standard ops for every test here, a clean Dynamo, and numbers at the end."""

from collections.abc import Iterator

import pytest
import torch
from comparing import Tally
from providers import declare, standard_providers

_tallies: dict[str, Tally] = {}


@pytest.fixture(autouse=True)
def _providers() -> Iterator[None]:
    declare()
    with standard_providers(), torch._inductor.config.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()


@pytest.fixture
def tally(request: pytest.FixtureRequest) -> Tally:
    """What this test compared; said at the end of the session."""
    return _tallies.setdefault(request.node.name, Tally())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, tally in _tallies.items():
        terminalreporter.write_line(f"{name}: {tally}")
