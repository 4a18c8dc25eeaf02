"""Fixtures that every suite may use."""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch import Tensor

import irframework as ir
from irframework.registry import registry

DECLARED_ONCE = ("irframework", "fused_ops")  # by a process: the library's ops, and those of random programs

# A machine that pauses for seconds while an example is drawn is no fault of the strategy.
settings.register_profile("any machine", suppress_health_check=[HealthCheck.too_slow], deadline=None)
settings.load_profile("any machine")

_numbers = itertools.count()


def scale(x: Tensor, weight: Tensor | None = None, epsilon: float = 1e-6) -> Tensor:
    """Twice x, or x times a weight: the body of ops whose meaning does not matter."""
    return x * 2 if weight is None else x * weight


def _fusions_end() -> Iterator[None]:
    """What fuses nothing any more afterwards: the ops that tests declared since, which others' programs may contain."""
    before = set(registry.ops)
    yield
    ours = [op for name, op in registry.ops.items() if name not in before and op.fuse and op.plugin is None]
    ended = [op for op in ours if op.native.__module__.partition(".")[0] not in DECLARED_ONCE]
    for op in ended:
        op.fuse = False
    if ended:
        registry.changed()


_of_a_module = pytest.fixture(_fusions_end, scope="module", autouse=True, name="_fusions_end_with_the_module")
_of_a_test = pytest.fixture(_fusions_end, autouse=True, name="_fusions_end_with_the_test")


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
