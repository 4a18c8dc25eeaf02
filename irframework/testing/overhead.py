"""What the framework adds to the host time of a call.

Owns the rule `overhead`: a generous bound, so that it fails for a slow predicate and not for a busy machine.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable

import torch

from irframework import contract
from irframework.contract import described_call
from irframework.priority import priority
from irframework.testing.findings import Findings, wait_for
from irframework.testing.report import Overhead
from irframework.testing.samples import DTYPES, of_their_own, usual_call

BOUND_US = 100.0
_SHAPES = ((16, 64), (5, 34))
_ROUNDS = 9
_SECONDS = 0.01  # of one round, about


def measure(findings: Findings, device: str) -> Overhead | None:
    """Time a small call through the op and of the function itself, in turns.

    Returns:
        The least times, or None where the implementation takes no such call.
    """
    impl = findings.impl
    taken = [usual_call(impl, shape, dtype, device) for dtype in DTYPES for shape in _SHAPES]
    args = next((each for each in taken if each is not None), None)
    if args is None:
        findings.skip("overhead", "it takes none of the small calls")
        return None
    named = impl.op.named(of_their_own(impl, args))
    known = inspect.signature(impl.fn).parameters
    passed = {name: value for name, value in named.items() if name in known}
    form = impl.op.maybe_inplace if impl.inplace else impl.op
    where = torch.device(device)
    with torch.no_grad(), priority({impl.op.name: [impl.provider]}):
        if impl.op.dispatch(**named) is not impl:
            findings.skip("overhead", "the framework does not choose it now")
            return None
        for _ in range(3):  # the first calls make a dispatcher
            form(**named)
        times: tuple[list[float], list[float]] = ([], [])
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # threads that wait for each other on a busy machine would be all that is measured
        try:
            for _ in range(_ROUNDS):
                times[0].append(_per_call(lambda: form(**named), where))
                times[1].append(_per_call(lambda: impl.fn(**passed), where))
        finally:
            torch.set_num_threads(threads)
    found = Overhead(min(times[0]), min(times[1]))
    findings.tried("overhead")
    if found.framework_us > 2 * found.direct_us + BOUND_US:
        breach = contract.slow_dispatch(found.framework_us, found.direct_us)
        findings.note(breach, None, described_call(impl.op, args))
    return found


def _per_call(call: Callable[[], object], device: torch.device) -> float:
    wait_for(device)
    start = time.perf_counter()
    call()
    count = max(2, min(200, int(_SECONDS / max(time.perf_counter() - start, 1e-6))))
    wait_for(device)
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count * 1e6
