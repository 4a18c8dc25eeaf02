"""The conformance tests for pytest: one test per op and rule.

Owns how results become tests. By option:

    pytest --pyargs irframework.testing.conformance --ir-provider=NAME

or as one line in a plugin's own tests:

    test_conformance = irframework.testing.conformance_tests("NAME")
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from irframework.contract import RULES
from irframework.registry import find_op
from irframework.testing.check import check_impl, implementations
from irframework.testing.report import FAILED, SKIPPED, Conformance


def conformance_tests(
    provider: str, ops: Sequence[str] | None = None, device: str | None = None
) -> Callable[[str, str], None]:
    """Return a test function for pytest with one case for each op that the provider implements, and rule.

    Args:
        provider: The provider's name.
        ops: Only these ops, by name.
        device: Where the implementations are tried; default: the current platform's device.

    Raises:
        UnknownProviderError: The provider has no implementation of any of the ops.
        UnknownOpError: There is no op of that name.
    """

    @pytest.mark.parametrize(("op", "rule"), _cases(provider, ops))
    def test_conformance(op: str, rule: str) -> None:
        _hold(op, provider, device, rule)

    return test_conformance


def _cases(provider: str, ops: Sequence[str] | None) -> list[Any]:
    chosen = [find_op(name) for name in ops] if ops else None
    impls = implementations(provider, chosen)
    return [pytest.param(impl.op.name, rule, id=f"{impl.op.name}-{rule}") for impl in impls for rule in RULES]


@cache
def _checked(op: str, provider: str, device: str | None) -> Conformance:
    """All rules at once: most are asked about in the same calls."""
    return check_impl(op, provider, device)


def _hold(op: str, provider: str, device: str | None, rule: str) -> None:
    __tracebackhide__ = True
    result = _checked(op, provider, device).rule(rule)
    if result.status == SKIPPED:
        pytest.skip(result.reason or "")
    if result.status == FAILED:
        pytest.fail("\n\n".join(map(str, result.violations)), pytrace=False)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Makes the cases of `test_conformance` from pytest's options."""
    providers = metafunc.config.getoption("ir_provider", [])
    if not providers:
        raise pytest.UsageError("name the provider to test: --ir-provider=NAME")
    ops = metafunc.config.getoption("ir_op")
    cases = [
        pytest.param(provider, *case.values, id=f"{provider}-{case.id}")
        for provider in providers
        for case in _cases(provider, ops)
    ]
    metafunc.parametrize(("provider", "op", "rule"), cases)


def test_conformance(provider: str, op: str, rule: str, request: pytest.FixtureRequest) -> None:
    """One rule, for one op that the provider implements."""
    _hold(op, provider, request.config.getoption("ir_device"), rule)
