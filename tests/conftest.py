"""Fixtures that every suite may use."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import irframework as ir

_numbers = itertools.count()


def scale(x: Tensor, weight: Tensor | None = None, epsilon: float = 1e-6) -> Tensor:
    """Twice x, or x times a weight: the body of ops whose meaning does not matter."""
    return x * 2 if weight is None else x * weight


@pytest.fixture
def declare() -> Callable[..., ir.IrOp]:
    """Declare an op under a name that no other test uses."""

    def declare(native: Callable[..., Any] = scale, **options: Any) -> ir.IrOp:
        return ir.register_op(name=f"test_op_{next(_numbers)}", **options)(native)

    return declare


@pytest.fixture
def configured() -> Iterator[Callable[..., None]]:
    """Configure the program for one test."""

    def configure(**values: Any) -> None:
        ir.configure(ir.KernelConfig(**values))

    yield configure
    ir.configure(ir.KernelConfig())


@pytest.fixture
def seeded() -> None:
    torch.manual_seed(0)
