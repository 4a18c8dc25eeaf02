"""Settings of one test, and Dynamo without what other tests compiled."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import irframework as ir

WITHOUT = {"fusion": False}  # what is fused is looked at elsewhere, and deriving all definitions takes seconds


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    with ir.priority(dict.fromkeys(ir.ops.__all__, "native")):
        yield
    torch._dynamo.reset()


@pytest.fixture
def divided() -> Iterator[Callable[..., None]]:
    """Switch sequence parallelism on for one test, from one token on unless it says otherwise; fusion is off."""

    def configure(tokens: int = 1, **values: Any) -> None:
        ir.configure(ir.KernelConfig(sequence_parallel=tokens, **{**WITHOUT, **values}))

    yield configure
    ir.configure(ir.KernelConfig())
