"""The conformance kit: does an implementation keep what its op promises?

    irframework.testing.check_impl("rms_norm", "acme")

Owns the public names. They are imported at first use: pytest loads the plugin beside this file in every run.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from irframework.testing.check import check_impl, check_provider
    from irframework.testing.conformance import conformance_tests
    from irframework.testing.report import Accuracy, Conformance, Overhead, RuleResult, Violation

_HOMES = {
    "Accuracy": "report",
    "Conformance": "report",
    "Overhead": "report",
    "RuleResult": "report",
    "Violation": "report",
    "check_impl": "check",
    "check_provider": "check",
    "conformance_tests": "conformance",
}

__all__ = [
    "Accuracy",
    "Conformance",
    "Overhead",
    "RuleResult",
    "Violation",
    "check_impl",
    "check_provider",
    "conformance_tests",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
