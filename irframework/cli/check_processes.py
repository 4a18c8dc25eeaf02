"""Checking each implementation in a process of its own, several at a time.

Owns the processes of `irframework check --jobs`: a kernel that ends its process or never comes back is a finding about
that implementation and about no other, and a fault that takes the device away does not reach the others.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from irframework import contract

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp
    from irframework.testing import Conformance


def check_in_processes(
    provider: str | None,
    ops: Sequence[IrOp] | None,
    device: str | None,
    rules: Sequence[str] | None,
    jobs: int,
    timeout: float,
) -> list[Conformance]:
    """Check implementations as `check_provider` does, each with `irframework check` in a new process.

    Args:
        provider: Only this provider's.
        ops: Only these ops'.
        device: Where they are tried.
        rules: Only these.
        jobs: How many processes run at a time.
        timeout: After so many seconds a process is ended.

    Raises:
        UnknownProviderError: The provider has no implementation of any of the ops.
        DeviceUnavailableError: torch cannot use the device here.
    """
    from irframework.platform import usable_device
    from irframework.testing.check import implementations

    where = usable_device(device)
    impls = implementations(provider, ops)

    def check(impl: IrOpImpl) -> Conformance:
        return _check(impl, where, rules or (), timeout)

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(check, impls))


def _check(impl: IrOpImpl, device: str, rules: Sequence[str], timeout: float) -> Conformance:
    from irframework.testing import Conformance

    command = [sys.executable, "-X", "faulthandler", "-m", "irframework", "check", impl.provider, "--json"]
    command += ["--op", impl.op.name, "--device", device]
    command += [word for rule in rules for word in ("--rule", rule)]
    with tempfile.TemporaryDirectory() as directory:
        last = Path(directory) / "call"
        command += ["--note-calls", str(last)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired:
            return _ended(impl, device, f"does not come back within {timeout:.0f} s", last)
        try:
            (document,) = json.loads(done.stdout)["results"]
        except (ValueError, KeyError):
            how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
            told = [line for line in done.stderr.splitlines() if line.strip()]
            why = next((line for line in told if line.startswith("Fatal")), told[-1] if told else "")
            return _ended(impl, device, f"ends the process ({how}): {why}".rstrip(": "), last)
    return Conformance.from_dict(document)


def _ended(impl: IrOpImpl, device: str, how: str, last: Path) -> Conformance:
    from irframework.testing.check import blank
    from irframework.testing.findings import Findings

    findings = Findings(impl, tuple(contract.RULES))
    call = last.read_text() if last.exists() else "what comes before the first call"
    findings.note(contract.ended(how), None, call)
    return replace(blank(impl, device), rules=findings.results("the check did not come to its end"))
