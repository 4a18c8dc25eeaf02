"""The compile pipeline: how IR ops in a captured graph become kernels.

Owns its public entries: `install`, `lower`, `register_pass`, `run_pre_grad_stage`, `last_report`. They are imported on
first use, since `import irframework` must not import Inductor.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from irframework.compiler.backend import lower, run_pre_grad_stage
    from irframework.compiler.foreign_passes import register_pass
    from irframework.compiler.hooks import install
    from irframework.compiler.report import Report, last_report, recent_reports

_HOMES = {
    "install": "hooks",
    "lower": "backend",
    "register_pass": "foreign_passes",
    "run_pre_grad_stage": "backend",
    "last_report": "report",
    "Report": "report",
    "recent_reports": "report",
}

__all__ = ["Report", "install", "last_report", "lower", "recent_reports", "register_pass", "run_pre_grad_stage"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
