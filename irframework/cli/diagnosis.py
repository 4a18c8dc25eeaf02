"""What `irframework doctor` finds: facts of this installation, and findings that are wrong or worth knowing.

Owns the collection, as values; `doctor` prints them. A finding is a problem (the command exits 1) or a note.
"""

from __future__ import annotations

import os
import platform as machine
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from irframework.cli import installed_metadata

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp
    from irframework.plugins import PluginInfo

_SHAPE = (8, 4096)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong (`problem`) or worth knowing (`note`), about a subject."""

    severity: str
    subject: str
    text: str


@dataclass(frozen=True, slots=True)
class DecisionNow:
    """How one op would be decided now, in one mode, for a usual call."""

    op: str
    mode: str
    provider: str
    priority: tuple[tuple[str, str], ...]
    others: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Everything that `doctor` shows."""

    environment: tuple[tuple[str, str], ...]
    plugins: tuple[PluginInfo, ...]
    implementations: tuple[IrOpImpl, ...]
    decisions: tuple[DecisionNow, ...]
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        """Whether no finding is a problem."""
        return all(finding.severity != "problem" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """The diagnosis as plain JSON types."""
        from irframework.cli.ops import describe_impl

        return {
            "healthy": self.healthy,
            "environment": dict(self.environment),
            "plugins": [asdict(plugin) for plugin in self.plugins],
            "implementations": [{"op": impl.op.name, **describe_impl(impl)} for impl in self.implementations],
            "decisions": [
                {
                    "op": now.op,
                    "mode": now.mode,
                    "provider": now.provider,
                    "priority": [{"provider": p, "origin": origin} for p, origin in now.priority],
                    "others": [{"provider": p, "reason": reason} for p, reason in now.others],
                }
                for now in self.decisions
            ],
            "findings": [asdict(finding) for finding in self.findings],
        }


def diagnose() -> Diagnosis:
    """Loads the plugins and looks at everything.

    Raises:
        PluginError: a plugin failed, and strict mode is on.
        ConfigError: an environment variable cannot be read.
    """
    from irframework.discovery import GROUP
    from irframework.plugins import plugins
    from irframework.priority import MODES
    from irframework.registry import all_ops

    infos = tuple(plugins())
    ops = all_ops()
    findings = [*_plugin_findings(infos), *_setting_findings(infos), *_platform_findings()]
    findings += [
        Finding("problem", "metadata", text) for text in installed_metadata.problems(installed_metadata.scan(GROUP))
    ]
    decisions: list[DecisionNow] = []
    for op in ops.values():
        for mode in MODES:
            outcome = usual_decision(op, mode)
            if isinstance(outcome, DecisionNow):
                decisions.append(outcome)
            elif outcome not in findings:
                findings.append(outcome)
        if not any(finding.subject == op.name for finding in findings):
            findings += _reach_findings(op)
    implementations = tuple(impl for op in ops.values() for impl in op.impls.values())
    return Diagnosis(_environment(), infos, implementations, tuple(decisions), tuple(findings))


def usual_decision(op: IrOp, mode: str) -> DecisionNow | Finding:
    """The decision for a usual call (8x4096, float32) on the current platform, or why there is none."""
    import torch

    from irframework.cli.sample_arguments import sample_arguments
    from irframework.dispatch import resolve
    from irframework.errors import InvalidOpError, IrError
    from irframework.platform import current_platform
    from irframework.priority import entries_for

    device = current_platform().device_types[0]
    try:
        priority = tuple((entry.provider, entry.origin) for entry in entries_for(op, device, mode))
        values = sample_arguments(op, _SHAPE, torch.float32, device)
        decision = resolve(op, values, mode, stop_at_first=False)
    except InvalidOpError as error:
        return Finding("note", op.name, str(error))
    except IrError as error:
        return Finding("problem", op.name, str(error))
    except Exception as error:  # a plugin's input generator
        return Finding("problem", op.name, f"its input generator raised {type(error).__name__}: {error}")
    others = tuple((c.provider, c.reason or "") for c in decision.candidates if c.provider != decision.provider)
    return DecisionNow(op.name, mode, decision.provider, priority, others)


def _environment() -> tuple[tuple[str, str], ...]:
    import torch

    import irframework
    from irframework import fusion_state
    from irframework.platform import current_platform, platforms

    current = current_platform()
    others = [p.name for p in platforms() if p.name != current.name and _is_available(p)]
    pairs = [
        ("irframework", irframework.__version__),
        ("Python", f"{machine.python_version()} ({sys.executable})"),
        ("torch", torch.__version__),
        ("machine", f"{machine.machine()}, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"),
        ("platform", f"{current.name} (devices {', '.join(current.device_types)})"),
        ("other platforms here", ", ".join(others) or "none"),
        ("fusion in compiled graphs", str(fusion_state.current())),
    ]
    pairs += [(name, os.environ[name]) for name in sorted(os.environ) if name.startswith("IRFRAMEWORK_")]
    return tuple(pairs)


def _is_available(platform: Any) -> bool:
    try:
        return bool(platform.is_available())
    except Exception:  # a plugin's code; the core has warned with the reason
        return False


def _plugin_findings(infos: tuple[PluginInfo, ...]) -> Iterator[Finding]:
    for info in infos:
        who = f"{info.name} ({info.dist} {info.version}, {info.location})"
        if info.status == "quarantined":
            yield Finding("problem", f"plugin {info.name}", f"{who} failed to load: {info.reason}")
        elif info.status == "disabled":
            yield Finding("note", f"plugin {info.name}", f"{who} is installed and disabled: {info.reason}")
        elif not (info.providers or info.ops):
            yield Finding("note", f"plugin {info.name}", f"{who} is loaded and has registered no op and no provider")
    if not infos:
        yield Finding("note", "plugins", "no plugin is installed: every op runs native")


def _setting_findings(infos: tuple[PluginInfo, ...]) -> Iterator[Finding]:
    from irframework import fusion_state
    from irframework.discovery import listed_and_not_installed
    from irframework.errors import PrioritySyntaxError, suggest
    from irframework.priority import env_priorities
    from irframework.registry import all_ops
    from irframework.settings import PREFIX, misspelt_variables, settings

    for name, meant in misspelt_variables():
        yield Finding("problem", name, f"there is no such setting; did you mean {meant}?")
    for variable, text in listed_and_not_installed([info.name for info in infos]):
        yield Finding("problem", variable, text)
    try:
        named = env_priorities()
    except PrioritySyntaxError:  # said where the ops are decided
        named = {}
    for name in named:
        if name not in all_ops():
            text = f"names the op {name!r}, which does not exist.{suggest(name, all_ops())}"
            yield Finding("problem", PREFIX + "OP_PRIORITY", text)
    for name, hint in fusion_state.unknown_names().items():
        yield Finding("problem", PREFIX + "DISABLE_FUSIONS", f"names {name!r}, which is no fused op.{hint}")
    contradiction = fusion_state.contradiction()
    if contradiction is not None:
        yield Finding("problem", "fusion", contradiction)
    if settings().plugins == () and infos:
        yield Finding("note", PREFIX + "PLUGINS", "is empty, so no plugin is loaded")


def _platform_findings() -> Iterator[Finding]:
    from irframework.platform import BUILT_IN, current_platform, platforms
    from irframework.settings import settings

    claiming = [p for p in platforms() if p not in BUILT_IN and _is_available(p)]
    if len(claiming) > 1 and settings().platform is None:
        names = ", ".join(f"{p.name} ({type(p).__module__})" for p in claiming)
        text = f"several say that they are here: {names}; {current_platform().name} is used"
        yield Finding("problem", "platform", f"{text}. Set IRFRAMEWORK_PLATFORM to choose.")


def _reach_findings(op: IrOp) -> Iterator[Finding]:
    """Implementations that no call can reach in any mode, and those that no list names."""
    from irframework.platform import current_platform
    from irframework.priority import MODES, entries_for

    devices = tuple(dict.fromkeys((*current_platform().device_types, "cpu")))
    named = {e.provider for d in devices for m in MODES for e in entries_for(op, d, m) if e.origin != "registered"}
    for provider, impl in op.impls.items():
        if provider == "native" or not impl.supported:
            continue
        obstacles = {_obstacle(op, impl, device, mode) for device in devices for mode in MODES}
        if None not in obstacles:
            reasons = "; ".join(sorted(str(obstacle) for obstacle in obstacles))
            yield Finding("note", f"{op.name}:{provider}", f"no call can reach it: {reasons}")
        elif provider not in named:
            text = "is supported but in no priority list of this op; it is asked after those that are, in order of name"
            yield Finding("note", f"{op.name}:{provider}", text)


def _obstacle(op: IrOp, impl: IrOpImpl, device: str, mode: str) -> str | None:
    """Why no call on a device in a mode can reach an implementation, or None."""
    from irframework.dispatch import why_never
    from irframework.priority import entries_for

    never = why_never(impl, device)
    if never is not None:
        return never
    for entry in entries_for(op, device, mode):
        if entry.provider == impl.provider:
            return None
        other = op.impls[entry.provider]
        asked = other.checks or other.predicates or other.missing or (mode != "eager" and other.compiled_where)
        if why_never(other, device) is None and not asked:
            return f"{entry.provider} stands before it ({entry.origin}) and takes every call on {device}"
    return "the list ends before it"
