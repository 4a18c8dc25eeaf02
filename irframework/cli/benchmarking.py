"""How long one call takes on a device whose cache is cold, and what a copy manages there.

Owns the measuring, for `irframework bench` and for the programs under `benchmarks/`: the clocks, the copy that results
are compared with, and the bytes that a call must move. Does not own who is measured (`contestants.py`), nor how results
look.

Private torch API used here (read in 2.11 and 2.13): `torch.cuda._sleep`, a kernel that only waits.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

Arguments = tuple[Any, ...]
Call = Callable[..., Any]

_WAIT_CYCLES = 400_000  # 0.2 ms: a graph of a hundred kernels is in the queue before its first one runs
_UNKNOWN_CACHE = 64 << 20
_MOST_FLUSHED = 1 << 30


@dataclass(frozen=True, slots=True)
class Timing:
    """Microseconds of one call, measured repeatedly: median, 10th and 90th percentile."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Timing:
        """The timing of at least one measurement."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        tenths = statistics.quantiles(values, n=10, method="inclusive")
        return cls(statistics.median(values), tenths[0], tenths[-1])

    def to_dict(self) -> dict[str, float]:
        """The timing as plain JSON types."""
        return {"median": self.median, "low": self.low, "high": self.high}


@dataclass(frozen=True, slots=True)
class Race:
    """What `race` measured.

    Attributes:
        times: Microseconds of one call in each round, by name: those of a round were measured side by side.
        failed: What else was raised.
    """

    times: dict[str, list[float]]
    failed: dict[str, Exception]

    def timing(self, name: str) -> Timing:
        """The timing of one of `times`."""
        return Timing.of(self.times[name])


class Clock(Protocol):
    """What times calls on one device.

    Attributes:
        how: How it measures, for people.
        cache: Bytes of the device's last cache.
    """

    how: str
    cache: int

    def sets_for(self, moved: int) -> int:
        """How many sets of arguments a call should be given that moves `moved` bytes."""

    def time(self, call: Call, sets: Sequence[Arguments], rounds: int = 15, cold: bool = True) -> Timing:
        """Times a call.

        Args:
            call: Called with each set once per round.
            sets: Arguments in memory of their own. A call may overwrite them.
            rounds: How often it is measured.
            cold: Whether other memory passes through the cache before each round.
        """

    def prepare(self, call: Call, sets: Sequence[Arguments], cold: bool = True) -> Callable[[], float]:
        """Readies a call to be timed beside others that take turns with it.

        Args:
            call: As for `time`.
            sets: As for `time`.
            cold: As for `time`.

        Returns:
            A function that runs one round and returns microseconds of one call. The first two rounds should not count.
        """

    def synchronize(self) -> None:
        """Waits for the device."""


def clock_for(device: str) -> Clock:
    """CUDA graphs on a GPU that torch calls `cuda`, the wall clock on every other device."""
    return GraphClock(device) if torch.device(device).type == "cuda" else WallClock(device)


class GraphClock:
    """Times calls inside CUDA graphs, so that the host's time does not blur small shapes.

    A graph holds one call per set of arguments; each call has results of its own. Before a round a kernel reads memory
    that is larger than the cache, and another waits until the whole graph is in the queue.
    """

    how = "inside CUDA graphs"

    def __init__(self, device: str = "cuda") -> None:
        self.device = torch.device(device)
        self.cache: int = torch.cuda.get_device_properties(self.device).L2_cache_size
        self._other_memory = torch.ones(max(4 * self.cache, 256 << 20) // 4, device=self.device)
        self._sum = torch.zeros((), device=self.device)
        self._broken_off: list[Any] = []  # the allocator may go on asking a graph whose capture failed
        self._begin()

    def _begin(self) -> None:
        self._stream, self._pool = torch.cuda.Stream(self.device), torch.cuda.graph_pool_handle()
        # A graph that stays alive keeps the pool's memory from one measurement to the next.
        self._kept_alive = self._capture(lambda: torch.cuda._sleep(0))

    def sets_for(self, moved: int) -> int:
        """At least four; enough to exceed the cache four times, where 64 do."""
        return max(4, min(64, math.ceil(4 * self.cache / max(moved, 1))))

    def time(self, call: Call, sets: Sequence[Arguments], rounds: int = 15, cold: bool = True) -> Timing:
        """See `Clock.time`."""
        once = self.prepare(call, sets, cold)
        return Timing.of([once() for _ in range(rounds + 2)][2:])

    def prepare(self, call: Call, sets: Sequence[Arguments], cold: bool = True) -> Callable[[], float]:
        """See `Clock.prepare`. The memory of results is shared by all graphs, as they are replayed one at a time."""
        self.synchronize()  # the arguments were made in another stream
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream), torch.no_grad():
            for arguments in (*sets[:1], *sets[:3]):  # compiles, tunes, loads
                call(*arguments)
            self._stream.synchronize()
            try:
                graph, _ = self._capture(lambda: [call(*arguments) for arguments in sets])
            except Exception:
                self._begin()
                raise
        return lambda: self._replay(graph, cold) / len(sets)

    def empty_kernel(self, calls: int = 64, rounds: int = 15, cold: bool = True) -> Timing:
        """What a kernel of one thread costs that does nothing, inside a graph of `calls` of them."""
        return self.time(lambda: torch.cuda._sleep(0), [()] * calls, rounds, cold)

    def synchronize(self) -> None:
        """See `Clock.synchronize`."""
        torch.cuda.synchronize(self.device)

    def _replay(self, graph: Any, cold: bool) -> float:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream), torch.no_grad():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if cold:
                torch.sum(self._other_memory, dim=0, out=self._sum)
            torch.cuda._sleep(_WAIT_CYCLES)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) * 1e3

    def _capture(self, run: Callable[[], Any]) -> tuple[Any, Any]:
        """The graph, and what `run` returned, whose memory stays in the pool.

        Not by `torch.cuda.graph`, which gives all cached memory back each time.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                results = run()
            except BaseException:
                self._broken_off.append(graph)
                with suppress(RuntimeError):  # it would say only that the capture was broken off
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph, results


class WallClock:
    """Times calls by the wall clock: on CPUs, and on devices without graphs, where the host's time counts too."""

    how = "by the wall clock"

    def __init__(self, device: str = "cpu") -> None:
        self.device = torch.device(device)
        self.cache = _cpu_cache() if self.device.type == "cpu" else _UNKNOWN_CACHE
        self._other_memory = torch.ones(min(2 * self.cache, _MOST_FLUSHED) // 4, device=self.device)
        module = None if self.device.type == "cpu" else torch.get_device_module(self.device)
        self._wait: Callable[[], object] = getattr(module, "synchronize", lambda: None)

    def sets_for(self, moved: int) -> int:
        """From 2 to 16, together 32 MiB where that is enough."""
        return max(2, min(16, (32 << 20) // max(moved, 1)))

    def time(self, call: Call, sets: Sequence[Arguments], rounds: int = 15, cold: bool = True) -> Timing:
        """See `Clock.time`."""
        once = self.prepare(call, sets, cold)
        return Timing.of([once() for _ in range(rounds)])

    def prepare(self, call: Call, sets: Sequence[Arguments], cold: bool = True) -> Callable[[], float]:
        """See `Clock.prepare`."""
        with torch.no_grad():
            for arguments in sets[:2]:
                call(*arguments)

        def once() -> float:
            with torch.no_grad():
                if cold:
                    self._other_memory.sum()
                self.synchronize()
                start = time.perf_counter()
                for arguments in sets:
                    call(*arguments)
                self.synchronize()
                return (time.perf_counter() - start) / len(sets) * 1e6

        return once

    def synchronize(self) -> None:
        """See `Clock.synchronize`."""
        self._wait()


def copy_bandwidth(device: str, clock: Clock) -> float:
    """Bytes per microsecond that a large copy reads and writes.

    Never timed in a graph: there a copy is a node for the copy engines, which are slower than a kernel.
    """
    on_gpu = torch.device(device).type == "cuda"
    source = torch.ones((2 << 30 if on_gpu else min(4 * clock.cache, 256 << 20)) // 4, device=device)
    target = torch.empty_like(source)
    moved = 2 * source.numel() * source.element_size()
    if not on_gpu:
        taken = clock.time(lambda: target.copy_(source), [()], rounds=7, cold=False)
        return moved / taken.median
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) * 1e3)
    return moved / Timing.of(times[5:]).median


def race(
    entries: Iterable[tuple[str, Call, Sequence[Arguments]]], clock: Clock, rounds: int = 15, cold: bool = True
) -> Race:
    """Times calls that take turns, in an order of chance that is another one in each round.

    One after the other they could not be compared: whoever comes first after a pause finds a GPU at a lower clock, and
    one that draws much power leaves the next one less of it.

    Args:
        entries: Each call's name, the call, and its sets of arguments; as for `Clock.prepare`, in this order.
        clock: Of the device.
        rounds: How often each is measured.
        cold: Whether other memory passes through the cache before each measurement.
    """
    ready: dict[str, Callable[[], float]] = {}
    result = Race({}, {})
    for name, call, sets in entries:
        try:
            ready[name] = clock.prepare(call, sets, cold)
        except Exception as error:  # one that fails must not take the others with it
            result.failed[name] = error
    result.times.update({name: [] for name in ready})
    chance = random.Random(0)
    for index in range(rounds + 2):
        for name in chance.sample(list(ready), len(ready)):
            try:
                took = ready[name]()
            except Exception as error:
                result.failed[name] = error
                del ready[name], result.times[name]
                continue
            if index >= 2:
                result.times[name].append(took)
    return result


def host_times(
    calls: dict[str, Call], arguments: Arguments, clock: Clock, rounds: int = 25, per_round: int = 20
) -> dict[str, list[float]]:
    """Microseconds until a call has returned, the device idle before; the calls take turns in each round.

    Args:
        calls: What is called, by name.
        arguments: Of all calls.
        clock: Of the device.
        rounds: How many values there are per call.
        per_round: Calls per value; as many fit into a GPU's queue.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.no_grad():
        for call in calls.values():
            for _ in range(3):
                call(*arguments)
        for index in range(rounds):
            names = list(calls)
            turn = index % len(names)
            for name in names[turn:] + names[:turn]:
                call = calls[name]
                clock.synchronize()
                repeat = itertools.repeat(None, per_round)
                start = time.perf_counter()
                for _ in repeat:
                    call(*arguments)
                times[name].append((time.perf_counter() - start) / per_round * 1e6)
        clock.synchronize()
    return times


def moved_bytes(arguments: Arguments, results: Any) -> int:
    """Bytes that every implementation must move: each argument read once, each result written once.

    Arguments count whole, also where an op reads a part of one only (the cache of a rotary embedding).
    """
    return sum(_bytes_of(tensor) for tensor in (*_tensors(arguments), *_tensors(results)))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)


def _bytes_of(tensor: Tensor) -> int:
    """An expanded dimension lies in memory once."""
    held = math.prod(
        size if stride else min(size, 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return held * tensor.element_size()


def _cpu_cache() -> int:
    """Bytes of the largest cache that Linux tells of."""
    sizes = [_UNKNOWN_CACHE]
    with suppress(OSError, ValueError):
        found = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
        sizes = [int(text.removesuffix("K")) << 10 for text in found if text.endswith("K")] or sizes
    return max(sizes)


@contextmanager
def freed_memory_is_kept() -> Iterator[None]:
    """Lets glibc keep freed memory: otherwise large results cost page faults, ten times as much as any kernel here."""
    mmap_max, trim_threshold = -4, -1
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if Path("/proc/self").exists() else None
    if mallopt is None:
        yield
        return
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    try:
        yield
    finally:
        mallopt(mmap_max, 65536)  # glibc's defaults
        mallopt(trim_threshold, 128 << 10)
