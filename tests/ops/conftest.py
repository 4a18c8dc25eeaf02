"""What every file of op tests may use."""

from collections.abc import Iterator

import pytest
import torch

import irframework as ir


@pytest.fixture
def natively() -> Iterator[None]:
    """The ops' own functions run, from the same random numbers."""
    torch.manual_seed(0)
    with ir.priority(dict.fromkeys(ir.ops.__all__, "native")):
        yield
