"""The search for the choice of a kernel, or the compiler pass, that makes a command fail.

Owns running the command under a limit, reading what it logged, comparing runs, and the order of the runs. Does not own
the numbers (`irframework/bisecting.py`), nor how a finding is shown (`bisect.py`). Imports no torch: what is known of
the command's kernels is in its log.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from irframework.bisecting import LIMIT, LOG, Choice
from irframework.settings import PREFIX

_DISABLE, _PRIORITY = f"{PREFIX}DISABLE_PASSES", f"{PREFIX}OP_PRIORITY"
_FUSIONS = f"{PREFIX}DISABLE_FUSIONS"
_TAIL = 12  # lines of the command's output that are worth showing
_NOTHING: Mapping[str, str] = {}
_LOWERING = ("fuse", "lower_functional", "lower_inplace", "verify")  # without them other code is what runs


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the command.

    Attributes:
        environment: The variables that it was given beside the caller's own.
        code: Exit code; the negative number of the signal that killed it; None if it was ended for taking too long.
        seconds: How long it took.
        processes: The numbered choices of each process that made any, in the order in which they began.
        passes: The compiler passes that ran and can be switched off.
        tail: The end of its output.
    """

    environment: Mapping[str, str]
    code: int | None
    seconds: float
    processes: tuple[tuple[Choice, ...], ...]
    passes: tuple[str, ...]
    tail: tuple[str, ...]

    @property
    def failed(self) -> bool:
        """A code other than 0, a signal, and taking too long are failures."""
        return self.code != 0

    @property
    def outcome(self) -> str:
        """What happened, in a few words."""
        if self.code is None:
            return f"fails (no end after {self.seconds:.0f} s)"
        if self.code < 0:
            return f"fails (killed by {_signal_name(-self.code)})"
        return f"fails (exit code {self.code})" if self.code else "succeeds"

    @property
    def count(self) -> int:
        """The largest number that a process took."""
        return max(map(len, self.processes), default=0)

    def to_dict(self) -> dict[str, Any]:
        """The run as plain JSON types, without the choices."""
        return {
            "environment": dict(self.environment),
            "exit_code": self.code,
            "seconds": round(self.seconds, 3),
            "outcome": self.outcome,
            "choices": self.count,
        }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@dataclass(frozen=True, slots=True)
class Finding:
    """How the search ended.

    Attributes:
        verdict: `implementation`, `fusion` or `pass` (found); `always_fails`, `never_fails`, `only_unwatched`,
            `not_repeatable` or `nothing_counted` (not found).
        text: One or two sentences for a person.
        culprits: The choices of that number: one, or one for each process that makes different ones.
        passes: The passes that make the command succeed when they are switched off.
        reproduce: {command line environment: outcome} of the last success and the first failure.
        avoid: The setting that keeps the culprit from being chosen; None where there is none.
        avoided: Whether the command succeeds with that setting.
        tail: The end of the failing run's output.
    """

    verdict: str
    text: str
    culprits: tuple[Choice, ...] = ()
    passes: tuple[str, ...] = ()
    reproduce: Mapping[str, str] = field(default_factory=dict)
    avoid: str | None = None
    avoided: bool | None = None
    tail: tuple[str, ...] = ()

    @property
    def found(self) -> bool:
        """Whether the search found what it looked for."""
        return self.verdict in ("implementation", "fusion", "pass")

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain JSON types."""
        return {"found": self.found, **asdict(self)}


class Command:
    """A command that is run again and again, each time in a process group of its own.

    Args:
        argv: The program and its arguments.
        timeout: Seconds after which a run is ended and counts as failed; None waits for ever.
        announce: Called with what is about to be run, as a text.
        tell: Called with each run when it is over.
    """

    def __init__(
        self,
        argv: Sequence[str],
        timeout: float | None = None,
        announce: Callable[[str], None] = lambda what: None,
        tell: Callable[[Run], None] = lambda run: None,
    ) -> None:
        self.argv = list(argv)
        self.timeout = timeout
        self.announce = announce
        self.tell = tell
        self.runs: list[Run] = []

    def run(
        self, limit: int | None = None, more: Mapping[str, str] = _NOTHING, *, watched: bool = True, note: str = ""
    ) -> Run:
        """Run the command once.

        Args:
            limit: How many choices stand; None sets no limit.
            more: More environment variables.
            watched: Whether choices are numbered and logged.
            note: What the run is for.

        Raises:
            OSError: The command cannot be started.
        """
        own = dict(more) if limit is None else {LIMIT: str(limit), **more}
        self.announce(f"{_assignments(own) or 'no limit'}{note and f', {note}'}")
        environment = {name: value for name, value in os.environ.items() if name not in (LIMIT, LOG)} | own
        with tempfile.TemporaryDirectory(prefix="irframework-bisect-") as folder:
            log, output = Path(folder, "choices.jsonl"), Path(folder, "output.txt")
            if watched:
                environment[LOG] = str(log)
            began = time.perf_counter()
            code = _exit_code(self.argv, environment, output, self.timeout)
            seconds = time.perf_counter() - began
            processes, passes = read_log(log)
            run = Run(own, code, seconds, processes, passes, _tail(output))
        self.runs.append(run)
        self.tell(run)
        return run


def _assignments(variables: Mapping[str, str]) -> str:
    return " ".join(f'{name}="{value}"' if ";" in value else f"{name}={value}" for name, value in variables.items())


def _tail(output: Path) -> tuple[str, ...]:
    with output.open("rb") as file:
        file.seek(max(0, output.stat().st_size - 2**14))
        return tuple(file.read().decode(errors="replace").splitlines()[-_TAIL:])


def _exit_code(argv: Sequence[str], environment: Mapping[str, str], output: Path, timeout: float | None) -> int | None:
    """Run a command with its output in a file, and end whatever it leaves running."""
    with output.open("wb") as sink:
        child = subprocess.Popen(
            argv,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all of its processes can be ended, and Ctrl-C reaches only us
        )
        try:
            return child.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def read_log(path: Path) -> tuple[tuple[tuple[Choice, ...], ...], tuple[str, ...]]:
    """Read what one run logged: the choices of each process, and the names of the passes that ran."""
    processes: dict[int, list[Choice]] = {}
    passes: dict[str, None] = {}
    for line in path.read_bytes().splitlines() if path.exists() else ():
        # The last line of a process that was killed while it wrote, or what the command itself wrote there.
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            entry = json.loads(line)
            pid = entry.pop("pid")
            if "passes" in entry:
                passes.update(dict.fromkeys(entry["passes"]))
            else:
                choice = Choice(**entry)
                processes.setdefault(pid, []).append(choice)
    return tuple(map(tuple, processes.values())), tuple(passes)


def search(command: Command) -> Finding:
    """Find the first choice that makes a command fail, or the pass.

    First all is native: if the command fails even so, the passes are left out one by one. Then nothing is limited: that
    run must fail, and tells how many choices there are. Between the two, halving finds a number N such that the command
    succeeds with N - 1 and fails with N; both are run again to be sure.
    """
    native = command.run(0, note="all native")
    if native.failed:
        return _search_passes(command, native)
    whole = command.run(note="all that the command chooses")
    if not whole.failed:
        return _did_not_fail(command)
    if not whole.processes:
        return Finding(
            "nothing_counted",
            "The command fails without a limit and succeeds with IRFRAMEWORK_BISECT_LIMIT=0, but no process of it "
            "chose an implementation other than native. Either it does not do the same each time, or it reads that "
            "variable itself, or it does not hand its environment on.",
            tail=whole.tail,
        )
    good, bad, failing = 0, whole.count, whole
    while bad - good > 1:
        middle = (good + bad) // 2
        run = command.run(middle, note=f"choice {good + 1} to {bad}")
        changed = _difference(whole, run, middle)
        if changed:
            return _not_repeatable(changed, run)
        if run.failed:
            bad, failing = middle, run
        else:
            good = middle
    for limit, fails in ((good, False), (bad, True)):
        run = command.run(limit, note="once more, to be sure")
        changed = _difference(whole, run, limit)
        if changed or run.failed is not fails:
            before = "failed" if fails else "succeeded"
            return _not_repeatable(changed or f"with {LIMIT}={limit} it {before} before, and now it {run.outcome}", run)
        failing = run if fails else failing
    return _report(command, failing, good, bad)


def _report(command: Command, failing: Run, good: int, bad: int) -> Finding:
    culprits = tuple(dict.fromkeys(process[bad - 1] for process in failing.processes if len(process) >= bad))
    if not culprits:
        return _not_repeatable(f"no process took number {bad} this time", failing)
    passes = _helpful_passes(command, failing, bad) if any(choice.node for choice in culprits) else ()
    avoid = _avoiding(culprits)
    avoided = not command.run(None, avoid, note="is the culprit avoided?").failed
    fusion = all(choice.is_fusion for choice in culprits)
    text = f"{'Fusion' if fusion else 'Choice'} {bad} makes it fail: {' and '.join(map(_named, culprits))}."
    if passes:
        text += (
            f" With it the command succeeds if {' or '.join(passes)} is switched off: the pass may be at fault, and "
            f"not the {'fusion' if fusion else 'kernel'}."
        )
    reproduce = {f"{LIMIT}={good}": "succeeds", f"{LIMIT}={bad}": failing.outcome}
    verdict = "fusion" if fusion else "implementation"
    return Finding(verdict, text, culprits, passes, reproduce, _assignments(avoid), avoided, failing.tail)


def _named(choice: Choice) -> str:
    if choice.is_fusion:
        return f"op {choice.op!r} at {choice.node}"
    return f"{choice.provider!r} of op {choice.op!r}"


def _avoiding(culprits: Sequence[Choice]) -> dict[str, str]:
    """The settings without which the culprits are not chosen."""
    fused = [choice.op for choice in culprits if choice.is_fusion]
    ops = [choice.op for choice in culprits if not choice.is_fusion]
    before = [name.strip() for name in os.environ.get(_FUSIONS, "").split(",") if name.strip()]
    avoid = {_FUSIONS: ",".join(dict.fromkeys([*before, *fused]))} if fused else {}
    return avoid | ({_PRIORITY: _native_first(os.environ.get(_PRIORITY, ""), ops)} if ops else {})


def _helpful_passes(command: Command, failing: Run, limit: int) -> tuple[str, ...]:
    """Passes that, switched off, make the command succeed with the same choices."""
    optional = [name for name in failing.passes if name not in _LOWERING]
    return tuple(name for name in optional if not _without_pass(command, name, limit).failed)


def _without_pass(command: Command, name: str, limit: int) -> Run:
    disabled = ",".join(filter(None, [os.environ.get(_DISABLE, ""), name]))
    return command.run(limit, {_DISABLE: disabled}, note="is it the pass?")


def _search_passes(command: Command, native: Run) -> Finding:
    for name in native.passes:
        run = _without_pass(command, name, 0)
        if not run.failed:
            setting = _assignments(run.environment)
            return Finding(
                "pass",
                f"The command fails with native implementations only, and succeeds when the compiler pass {name!r} is "
                "switched off: the pass is at fault, and not a kernel.",
                passes=(name,),
                reproduce={setting: run.outcome, f"{LIMIT}=0": native.outcome},
                avoid=f"{_DISABLE}={run.environment[_DISABLE]}",
                avoided=None,
                tail=native.tail,
            )
    tried = f", and with each of the passes {', '.join(native.passes)} switched off" if native.passes else ""
    return Finding(
        "always_fails",
        f"The command {native.outcome} with native implementations only{tried}: this is not the fault of a kernel.",
        tail=native.tail,
    )


def _did_not_fail(command: Command) -> Finding:
    if command.run(watched=False, note="not watched").failed:
        return Finding(
            "only_unwatched",
            "The command fails only while its choices are not numbered. Numbering them takes the generated dispatchers "
            "and all compile caches out of the way: try it with TORCHINDUCTOR_FORCE_DISABLE_CACHES=1, which shows "
            "whether a cache is at fault.",
            tail=command.runs[-1].tail,
        )
    return Finding("never_fails", "The command succeeds with all of its kernels: there is nothing to find.")


def _not_repeatable(what: str, run: Run) -> Finding:
    return Finding(
        "not_repeatable",
        f"The command does not do the same each time: {what}. Seed its random numbers, let one thread make the calls, "
        "and try again.",
        tail=run.tail,
    )


def _difference(reference: Run, run: Run, limit: int) -> str:
    """How the numbers of a run differ from those of the unlimited one, up to the limit; empty if they do not.

    Of several processes, one that ends others when it fails cuts their logs short: they are compared as far as they go.
    """
    alone = len(reference.processes) == len(run.processes) == 1
    for process in run.processes:
        differences = [_first_difference(known[:limit], process, whole=alone) for known in reference.processes]
        if all(differences):
            return differences[0]
    if limit and not run.processes:
        return f"with {LIMIT}={limit} no choice was made, where there were {reference.count} before"
    return ""


def _first_difference(known: Sequence[Choice], now: Sequence[Choice], *, whole: bool) -> str:
    for before, after in zip(known, now, strict=False):
        if before != after:
            return f"choice {before.number} was {describe(before)}, and is now {describe(after)}"
    if whole and len(now) < len(known):
        missing = known[len(now)]
        return f"choice {missing.number} was {describe(missing)}, and is now missing"
    return ""


def describe(choice: Choice) -> str:
    """Op, provider and place in one line."""
    node = f"node {choice.node} of graph {choice.graph}, " if choice.node else ""
    return f"{choice.op}:{choice.provider} ({node}{choice.call_site})"


def _native_first(priorities: str, ops: Sequence[str]) -> str:
    """What `IRFRAMEWORK_OP_PRIORITY` says now, with native for some ops instead."""
    kept = [part for part in priorities.split(";") if part.strip() and part.partition("=")[0].strip() not in ops]
    return ";".join([*kept, *(f"{op}=native" for op in dict.fromkeys(ops))])
