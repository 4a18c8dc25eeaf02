"""Ops that are declared for one test, and a clean Dynamo for every test."""

import itertools
import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from compiler_support import Kernels, fused_add
from fusion_support import Family
from torch import Tensor

import irframework as ir
from irframework import notices
from irframework.registry import Transaction, registry

_numbers = itertools.count()


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def add() -> Kernels:
    """The op with the provider `inp`, whose kernel works in place."""
    number = next(_numbers)
    op = ir.register_op(name=f"tc_add_{number}", allow_inplace=True)(fused_add)
    library = torch.library.Library(f"tc{number}", "DEF")
    library.define("k_(Tensor(a!) x, Tensor(b!) r, Tensor w) -> ()")

    def kernel(x: Tensor, r: Tensor, w: Tensor) -> None:
        r.add_(x)
        torch.mul(r, w, out=x)

    library.impl("k_", kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tc{number}::k_", lambda x, r, w: None, lib=library)
    overload = getattr(torch.ops, f"tc{number}").k_

    @op.register_impl("inp", inplace=True)
    def inp(x: Tensor, x_residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        overload(x, x_residual, weight)
        return x, x_residual

    return Kernels(op, overload, library)


@pytest.fixture
def scale() -> Any:
    """A functional op of one activation with its native implementation only."""

    def native(x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    return ir.register_op(name=f"tc_scale_{next(_numbers)}", allow_inplace=True)(native)


@pytest.fixture
def fused() -> Iterator[Any]:
    """Declare fused ops, each with a provider; they are gone after the test. `plugin=` says whose they are."""
    transaction = Transaction("acme")

    def declare(
        native: Any, plugin: Any = None, supports_args: Any = None, fuse: Any = True, **options: Any
    ) -> ir.IrOp:
        name = f"tfd_{native.__name__.strip('_')}_{os.getpid()}_{next(_numbers)}"
        with registry.registering(transaction):
            op = ir.register_op(name=name, fuse=fuse, **options)(native)
            op.register_impl("k", supports_args=supports_args)(native)
        op.plugin = plugin
        return op

    notices._said.clear()
    yield declare
    transaction.roll_back()


@pytest.fixture
def family() -> Family:
    return Family()
