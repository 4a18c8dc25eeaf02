"""Whether implementations keep what their op promises: what `irframework check` and the tests of a plugin ask.

Owns which implementations and which rules are asked about, and in which order. Does not own how a rule is asked about
(`trial.py`, `repetition.py`, `symbolic_rows.py`, `streams.py`, `compiled.py`, `refusals.py`, `overhead.py`), nor the
rules (`irframework/contract.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from irframework.contract import RULES, raises
from irframework.errors import ArgumentError, UnknownProviderError, suggest
from irframework.op import NATIVE, IrOp
from irframework.platform import usable_device
from irframework.registry import all_ops, find_op, load_plugins
from irframework.testing import compiled, overhead, refusals, repetition, streams, symbolic_rows, trial
from irframework.testing.findings import DeviceLostError, Findings, check_alive
from irframework.testing.report import Conformance, Overhead, all_skipped
from irframework.testing.samples import samples

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl


def check_impl(
    op: IrOp | str,
    provider: str,
    device: str | None = None,
    *,
    rules: Iterable[str] | None = None,
    told: Callable[[str], None] = lambda call: None,
) -> Conformance:
    """Hold one implementation to every rule.

    Args:
        op: The op or its name.
        provider: The provider, e.g. `"triton"`.
        device: Where it is tried; default: the current platform's device.
        rules: Only these; default: all of `irframework.contract.RULES`.
        told: Called with each call before it is made: where a kernel ends the process, it was the last one.

    Returns:
        What was found. An implementation that cannot be tried here breaks nothing: see `skipped`.

    Raises:
        UnknownOpError: There is no op of that name.
        UnknownProviderError: The provider has no implementation of the op.
        DeviceUnavailableError: torch cannot use the device here.
        ArgumentError: There is no rule of that name.
    """
    load_plugins()
    found = find_op(op) if isinstance(op, str) else op
    impls = found.impls
    if provider not in impls:
        raise UnknownProviderError(
            f"Provider {provider!r} has no implementation of op {found.name!r}.{suggest(provider, impls)}"
        )
    return _check(impls[provider], usable_device(device), _named(rules), told)


def check_provider(
    provider: str | None = None,
    ops: Sequence[IrOp] | None = None,
    device: str | None = None,
    *,
    rules: Iterable[str] | None = None,
    told: Callable[[str], None] = lambda call: None,
) -> list[Conformance]:
    """Hold implementations to every rule, those of all providers but native if none is named.

    Args:
        provider: Only this provider's.
        ops: Only these ops' (default: all).
        device: Where they are tried; default: the current platform's.
        rules: As for `check_impl`.
        told: As for `check_impl`.

    Returns:
        One result per implementation, by op and provider.

    Raises:
        UnknownProviderError: The provider has no implementation of any of the ops.
        DeviceUnavailableError: torch cannot use the device here.
        ArgumentError: There is no rule of that name.
    """
    where, wanted = usable_device(device), _named(rules)
    return [_check(impl, where, wanted, told) for impl in implementations(provider, ops)]


def implementations(provider: str | None = None, ops: Sequence[IrOp] | None = None) -> list[IrOpImpl]:
    """The implementations of a provider, or those of all but native, by op and provider.

    Raises:
        UnknownProviderError: The provider has no implementation of any of the ops.
    """
    load_plugins()
    impls = [impl for op in (ops or all_ops().values()) for impl in op.impls.values()]
    if provider is not None and provider not in {impl.provider for impl in impls}:
        which = f"op {', '.join(op.name for op in ops)}" if ops else "any op"
        known = suggest(provider, {impl.provider for impl in impls})
        raise UnknownProviderError(f"Provider {provider!r} has no implementation of {which}.{known}")
    chosen = [impl for impl in impls if impl.provider == provider or (provider is None and impl.provider != NATIVE)]
    return sorted(chosen, key=lambda impl: (impl.op.name, impl.provider))


def blank(impl: IrOpImpl, device: str) -> Conformance:
    """A result without findings."""
    from irframework.plugins import version_of

    version = version_of(impl.plugin) if impl.plugin else None
    return Conformance(impl.op.name, impl.provider, impl.plugin, version, impl.source, device)


def _named(rules: Iterable[str] | None) -> tuple[str, ...]:
    wanted = set(RULES if rules is None else rules)
    for rule in sorted(wanted - RULES.keys()):
        raise ArgumentError(f"There is no rule {rule!r}.{suggest(rule, RULES)}")
    return tuple(rule for rule in RULES if rule in wanted)


def _why_not_tried(impl: IrOpImpl, device: str) -> str | None:
    kind = torch.device(device).type
    unsupported = impl.support.reason(kind)
    if unsupported is not None:
        return unsupported
    if impl.device_types is not None and kind not in impl.device_types:
        return f"runs on {', '.join(impl.device_types)}, not on {kind}"
    if impl.op.input_generator is None:
        return f"op {impl.op.name!r} has no input generator: register one with register_input_generator"
    return None


def _check(impl: IrOpImpl, device: str, wanted: tuple[str, ...], told: Callable[[str], None]) -> Conformance:
    start = time.perf_counter()
    result = blank(impl, device)
    reason = _why_not_tried(impl, device)
    if reason is not None:
        return replace(result, skipped=reason, rules=all_skipped(wanted, reason))
    findings = Findings(impl, wanted, told)
    tried = trial.Trial(impl, device, findings)
    time_of_call: Overhead | None = None
    lost = None
    try:
        _try_samples(tried, device)
        if not tried.calls:
            reason = f"it takes none of the calls that were tried: {tried.reason}"
            skipped = () if findings.broken() else all_skipped(wanted, reason)
            return replace(result, declined=tried.declined, skipped=reason, rules=skipped or findings.results(reason))
        time_of_call = _ask_the_rest(tried, findings, device)
        findings.tried("ends")
    except DeviceLostError as error:
        lost = str(error)
    return replace(
        result,
        calls=tried.calls,
        declined=tried.declined,
        seconds=round(time.perf_counter() - start, 2),
        rules=findings.results(lost or "nothing that was tried shows it"),
        accuracy=tried.errors.accuracy(),
        overhead=time_of_call,
    )


def _try_samples(tried: trial.Trial, device: str) -> None:
    everything = tried.findings.asks(*trial.RULES)
    # Comparing is many small steps: on a busy machine, threads that wait for each other would take most of the time.
    torch.set_num_threads(1)
    try:
        for sample in samples(tried.impl.op, device):
            tried.try_on(sample)
            if tried.calls and not everything:  # one call, for what the compiler is asked
                return
        tried.finish()
        if tried.impl.functional is not None:  # what an in-place implementation runs where nothing may be overwritten
            other = trial.Trial(tried.impl.functional, device, tried.findings)
            other.threads = tried.threads
            for sample in samples(tried.impl.op, device):
                other.try_on(sample)
    finally:
        torch.set_num_threads(tried.threads)


def _ask_the_rest(tried: trial.Trial, findings: Findings, device: str) -> Overhead | None:
    def lower() -> None:
        if tried.first is not None:
            compiled.lower_once(findings, *tried.first)

    questions: dict[str, Callable[[], object]] = {
        "deterministic": lambda: repetition.try_again(findings, device),
        "batch_invariant": lambda: repetition.try_rows_alone(findings, device),
        "threads": lambda: repetition.try_in_threads(findings, device),
        "streams": lambda: streams.try_streams(findings, device),
        "opcheck": lambda: compiled.ask_opcheck(findings, device),
        "compiled": lower,
        "checks_tensors": lambda: refusals.try_refusals(findings, device),
    }
    if findings.asks("predicate_guards"):
        symbolic_rows.try_symbolic_rows(findings, device)
    for rule, ask in questions.items():
        if findings.asks(rule):
            _ask(findings, rule, ask, device)
    times: list[Overhead | None] = []
    if findings.asks("overhead"):
        _ask(findings, "overhead", lambda: times.append(overhead.measure(findings, device)), device)
    if findings.asks("graph_capture"):  # last: torch does not recover wholly from a capture that failed
        _ask(findings, "graph_capture", lambda: streams.try_capture(findings, device), device)
    return times[0] if times else None


def _ask(findings: Findings, rule: str, ask: Callable[[], object], device: str) -> None:
    """Ask about a rule of several calls. One that raises, or returns no tensors, would only be found to do so again."""
    if findings.broken("raises", "count"):
        findings.skip(rule, "it does not compute what it takes: see the rules raises and count")
        return
    try:
        ask()
    except DeviceLostError:
        raise
    except Exception as error:
        findings.skip(rule, f"{type(error).__name__}: {error}")
        findings.note(raises(error), rule, f"what was tried for the rule {rule}")
        check_alive(torch.device(device), error)
