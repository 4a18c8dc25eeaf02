"""Many random programs: `python tests/fuzz/run.py --graphs 20000 --jobs 2 [--seconds S] [--fusions]`.

Owns the processes, their seeds, and what is printed. Each program has a seed of its own, `--seed` plus its number, so
`--seed N --graphs 1` draws one of them again; `--program "Program(...)"` takes the text of a report. A failing program
is made smaller before it is printed. Unlike in the tests programs are drawn evenly, by plain `random`: hypothesis
prefers small ones and near repeats. Exit status 1 if a program failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
FAILURES = 10  # status of a process that found some; an exception that nothing catches ends one with 1: a crash
# Each process compiles by itself, and kernels run in one thread.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "0",
    "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    "PYTHONUNBUFFERED": "1",
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--graphs", type=int, default=1000, help="programs to draw, over all processes")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seed", type=int, default=None, help="of the first program; default: from the clock")
    parser.add_argument("--seconds", type=float, default=None, help="stop after this time")
    parser.add_argument(
        "--backend",
        default="lowered",
        choices=["lowered", "inductor", "irframework", "stock"],
        help="inductor: irframework and stock in turn",
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--shrink", type=int, default=60, help="attempts to make a failing program smaller")
    parser.add_argument("--failures", type=int, default=20, help="stop a process after so many")
    parser.add_argument("--fusions", action="store_true", help="programs with chains that fusion finds")
    parser.add_argument("--torch-faults", action="store_true", help="print also what fails without IR ops")
    parser.add_argument("--program", help="run one program, as a report prints it")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--journal", help=argparse.SUPPRESS)
    found = parser.parse_args()
    if found.seed is None:
        found.seed = int(time.time()) * 1000
    return found


def main() -> int:
    chosen = options()
    if chosen.worker is not None or chosen.program:
        return work(chosen)
    print(f"seed {chosen.seed}, {chosen.graphs} programs, backend {chosen.backend}, device {chosen.device}")
    deadline = None if chosen.seconds is None else time.monotonic() + chosen.seconds
    with tempfile.TemporaryDirectory() as folder:
        workers = [_Worker(chosen, job, Path(folder) / f"{job}.json", deadline) for job in range(chosen.jobs)]
        for worker in workers:
            worker.start()
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            while sum(not worker.done() for worker in workers):  # all are looked at each time
                time.sleep(0.5)
        except KeyboardInterrupt:  # say what was compared until then
            for worker in workers:
                worker.stop()
        total: Counter[str] = Counter()
        for worker in workers:
            total.update(worker.counts())
    print("total: " + ", ".join(f"{name} {count}" for name, count in sorted(total.items())))
    through = sum(total[f"compared: {name}"] for name in ("irframework", "stock"))
    print(f"{total['compared']} graphs compared, {through} of them through Inductor; {total['failed']} failed")
    if chosen.fusions:
        print(f"{total['with chains']} graphs contain a chain, {total['with fusions']} a fusion")
    return 1 if total["failed"] else 0


@dataclass(slots=True)
class _Worker:
    """One process; started again behind the program that ended it, should that happen."""

    chosen: argparse.Namespace
    job: int
    journal: Path
    deadline: float | None
    process: subprocess.Popen[bytes] | None = None
    crashes: int = 0

    def start(self) -> None:
        command = [sys.executable, str(HERE), "--worker", str(self.job), "--journal", str(self.journal)]
        for name in ("graphs", "jobs", "seed", "backend", "device", "shrink", "failures"):
            command += [f"--{name}", str(getattr(self.chosen, name))]
        command += ["--torch-faults"] if self.chosen.torch_faults else []
        command += ["--fusions"] if self.chosen.fusions else []
        if self.deadline is not None:
            command += ["--seconds", str(max(self.deadline - time.monotonic(), 1))]
        self.process = subprocess.Popen(command, env={**ENVIRONMENT, **os.environ})

    def done(self) -> bool:
        assert self.process is not None
        status = self.process.poll()
        if status is None:
            late = self.deadline is not None and time.monotonic() > self.deadline + 90
            if late:
                print(f"process {self.job} does not end: stopped in seed {self._read().get('seed')}")
                self.process.kill()
            return False
        if status in (0, FAILURES) or self.journal_is_empty():
            return True
        if status != -9:
            self.crashes += 1
            print(f"process {self.job} ended with status {status} in seed {self._read().get('seed')}: a crash")
            if self.crashes < 10:
                self.start()
                return False
        return True

    def stop(self) -> None:
        assert self.process is not None
        self.process.terminate()
        self.process.wait()

    def journal_is_empty(self) -> bool:
        return not self._read()

    def _read(self) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads(self.journal.read_text())
        except (OSError, ValueError):
            return {}
        return found

    def counts(self) -> Counter[str]:
        counts = Counter(self._read().get("counts", {}))
        counts["failed"] += self.crashes
        return counts


def work(chosen: argparse.Namespace) -> int:
    """Draw and compare the programs of one process."""
    os.environ.update({name: value for name, value in ENVIRONMENT.items() if name not in os.environ})
    sys.path.insert(0, str(HERE.parent))
    import torch

    torch.set_num_threads(1)
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    _compile_quickly()
    import comparing
    from fused_ops import fused_providers
    from programs import Input, Program, Step
    from providers import standard_providers

    tally = comparing.Tally()
    check = _check(chosen)
    with standard_providers(), fused_providers() if chosen.fusions else nullcontext():
        if chosen.program:
            names = {"Program": Program, "Input": Input, "Step": Step}
            return _one(eval(chosen.program, names), chosen, tally)
        journal = Path(chosen.journal)
        earlier = json.loads(journal.read_text()) if journal.exists() else {}
        tally.counts.update(earlier.get("counts", {}))
        began, failures = time.monotonic(), 0
        start = earlier.get("seed", chosen.seed + chosen.worker - chosen.jobs) + chosen.jobs
        for seed in range(start, chosen.seed + chosen.graphs, chosen.jobs):
            late = chosen.seconds is not None and time.monotonic() - began > chosen.seconds
            if late or failures >= chosen.failures:
                break
            journal.write_text(json.dumps({"seed": seed, "counts": tally.counts}))
            if chosen.fusions and (seed - chosen.seed) // chosen.jobs % 500 == 499:
                print(f"process {chosen.worker}, {time.monotonic() - began:.0f} s: {tally}", flush=True)
            program = _drawn(chosen, seed)
            backend = _backend(chosen, seed)
            try:
                check(program, backend, chosen.device, tally)
            except AssertionError as error:
                failures += 1
                tally.counts["failed"] += 1
                text = _smaller(program, backend, chosen, str(error))
                print(
                    f"\n==== FAILED, seed {seed}, made smaller\n{text}\n---- as it was drawn\n{program!r}\n", flush=True
                )
            while tally.torch_faults:
                fault = tally.torch_faults.pop()
                if chosen.torch_faults:
                    print(f"\n==== torch's own, seed {seed}\n{fault}\n")
        journal.write_text(json.dumps({"seed": seed, "counts": tally.counts}))
        print(f"process {chosen.worker}: {time.monotonic() - began:.0f} s, {tally}", flush=True)
    return FAILURES if failures else 0


def _check(chosen: argparse.Namespace) -> Any:
    import comparing
    import fusing

    return fusing.check_fused if chosen.fusions else comparing.check


def _drawn(chosen: argparse.Namespace, seed: int) -> Any:
    from programs import drawn
    from statements import FUSABLE, KINDS, KINDS_WITH_BREAKS

    draw = random.Random(seed)
    return drawn(draw, **FUSABLE) if chosen.fusions else drawn(draw, KINDS_WITH_BREAKS if seed % 4 == 0 else KINDS)


def _backend(chosen: argparse.Namespace, seed: int) -> str:
    if chosen.backend != "inductor":
        return str(chosen.backend)
    return ("irframework", "stock")[seed // chosen.jobs % 2]


def _one(program: Any, chosen: argparse.Namespace, tally: Any) -> int:
    for backend in ("irframework", "stock") if chosen.backend == "inductor" else (chosen.backend,):
        _check(chosen)(program, backend, chosen.device, tally)
    print(tally)
    for fault in tally.torch_faults:
        print(fault)
    return 0


def _smaller(program: Any, backend: str, chosen: argparse.Namespace, text: str) -> str:
    """Take away what is not needed for the failure: steps, inputs, results, then the numbers' size."""
    check, kind = _check(chosen), _kind(text)
    attempts = chosen.shrink
    progress = True
    while progress and attempts > 0:
        progress = False
        for candidate in _candidates(program):
            attempts -= 1
            if attempts < 0:
                break
            try:
                check(candidate, backend, chosen.device)
            except AssertionError as error:
                if _kind(str(error)) == kind:
                    program, text, progress = candidate, str(error), True
                    break
    return text


def _kind(text: str) -> str:
    return text.splitlines()[0].split(":")[0]


def _candidates(program: Any) -> Any:
    for name in ("steps", "returns", "inputs"):
        items = getattr(program, name)
        least = 0 if name == "steps" else 1
        for size in (len(items) // 2, 1) if len(items) > 3 else (1,):
            for first in range(len(items) - size, -1, -size):
                rest = items[:first] + items[first + size :]
                if len(rest) >= least:
                    yield replace(program, **{name: rest})
    if program.shapes != "static":
        yield replace(program, shapes="static")
    if program.mode != "no_grad":
        yield replace(program, mode="no_grad")
    for index, number in enumerate(program.providers):
        if number:
            yield replace(program, providers=(*program.providers[:index], 0, *program.providers[index + 1 :]))


def _compile_quickly() -> None:
    """Let the C++ compiler optimize less: most of the time is its, and Inductor's own work stays the same.

    Private torch API, read in 2.11 and 2.13: `_inductor.cpp_builder._get_optimization_cflags`.
    """
    from torch._inductor import cpp_builder

    original = getattr(cpp_builder, "_get_optimization_cflags", None)
    if original is None:
        return

    def flags(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        plain = isinstance(found, list)
        cflags = ["O0" if flag in ("O3", "O2", "O1") else flag for flag in (found if plain else found[0])]
        return cflags if plain else (cflags, *found[1:])

    cpp_builder._get_optimization_cflags = flags


if __name__ == "__main__":
    sys.exit(main())
