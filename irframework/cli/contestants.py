"""Who is measured by `irframework bench`, and what was found, as values.

Owns the contestants of an op: its supported providers and Inductor's native; and which of them take which call. The
measuring itself is `benchmarking.py`'s.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from irframework.cli.benchmarking import (
    Arguments,
    Call,
    Clock,
    Timing,
    clock_for,
    copy_bandwidth,
    host_times,
    moved_bytes,
    race,
)
from irframework.dispatch import why_never
from irframework.errors import (
    ArgumentError,
    IrError,
    NothingToMeasureError,
    UnknownProviderError,
    suggest,
)
from irframework.priority import priority

if TYPE_CHECKING:
    from irframework.op import IrOp

INDUCTOR = "inductor"


@dataclass(frozen=True, slots=True)
class Line:
    """One contestant at one shape and dtype.

    Attributes:
        shape: What the op's input generator was asked for.
        dtype: The same, e.g. `bfloat16`.
        contestant: A provider, or `inductor`.
        moved: Bytes that the call must move.
        time: Of one call.
        share: Of the bandwidth of a copy in the same run.
        host: Until a call through irframework has returned, for one row; None where one row is not taken.
        direct: The same, calling the implementation's function itself (or the compiled native).
    """

    shape: tuple[int, ...]
    dtype: str
    contestant: str
    moved: int
    time: Timing
    share: float
    host: Timing | None
    direct: Timing | None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A contestant that does not take a call, or failed at it.

    Attributes:
        shape: As of a line.
        dtype: As of a line.
        contestant: As of a line.
        reason: Why, in words.
        failed: It takes the call, and raised.
    """

    shape: tuple[int, ...]
    dtype: str
    contestant: str
    reason: str
    failed: bool = False


@dataclass(slots=True)
class Benchmark:
    """All that one run found.

    Attributes:
        op: The op's name.
        device: The device that was asked for, and its name.
        how: How calls were timed.
        copy: Bytes per microsecond that a copy read and wrote.
        cache: Bytes of the device's last cache.
        lines: What was measured.
        left_out: What was not, and why.
    """

    op: str
    device: tuple[str, str]
    how: str
    copy: float
    cache: int
    lines: list[Line] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON types; times in microseconds, bandwidths in GB/s."""
        return {
            "op": self.op,
            "device": self.device[0],
            "device_name": self.device[1],
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "timed": self.how,
            "copy_gb_per_second": self.copy / 1e3,
            "cache_bytes": self.cache,
            "lines": [
                {
                    "shape": list(line.shape),
                    "dtype": line.dtype,
                    "provider": line.contestant,
                    "moved_bytes": line.moved,
                    "microseconds": line.time.to_dict(),
                    "gb_per_second": line.moved / line.time.median / 1e3,
                    "share_of_copy": line.share,
                    "host_microseconds": line.host and line.host.to_dict(),
                    "direct_host_microseconds": line.direct and line.direct.to_dict(),
                }
                for line in self.lines
            ],
            "left_out": [
                {
                    "shape": list(entry.shape),
                    "dtype": entry.dtype,
                    "provider": entry.contestant,
                    "reason": entry.reason,
                    "failed": entry.failed,
                }
                for entry in self.left_out
            ],
        }


def measure(
    op: IrOp,
    shapes: Sequence[tuple[int, ...]],
    dtypes: Sequence[torch.dtype],
    device: str,
    contestants: Sequence[str] = (),
    rounds: int = 15,
) -> Benchmark:
    """Measures an op.

    Args:
        op: The op; it has an input generator.
        shapes: Of the op's first activation.
        dtypes: Of the activations.
        device: Where; one that can be used.
        contestants: Providers, or `inductor`; none means all that are supported here.
        rounds: How often each is measured.

    Raises:
        UnknownProviderError: A contestant has no implementation of the op.
        InvalidOpError: The op has no input generator.
        ArgumentError: The op refuses a shape.
        NothingToMeasureError: None of the contestants takes any of the calls.
    """
    asked = _asked(op, contestants)
    clock = clock_for(device)
    result = Benchmark(op.name, (device, _name_of(device)), clock.how, copy_bandwidth(device, clock), clock.cache)
    for dtype in dtypes:
        for shape in shapes:
            _measure_call(result, op, asked, shape, dtype, clock, rounds)
    if not result.lines:
        reasons = "; ".join(dict.fromkeys(f"{entry.contestant}: {entry.reason}" for entry in result.left_out))
        raise NothingToMeasureError(f"Op {op.name!r}: nothing here takes any of these calls on {device!r}. {reasons}.")
    return result


def _asked(op: IrOp, contestants: Sequence[str]) -> list[str]:
    known = [*op.impls, INDUCTOR]
    for name in contestants:
        if name not in known:
            raise UnknownProviderError(f"Op {op.name!r} has no provider {name!r}.{suggest(name, known)}")
    return list(dict.fromkeys(contestants)) or known


def _name_of(device: str) -> str:
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return platform.machine() if device == "cpu" else torch.device(device).type


def _measure_call(
    result: Benchmark,
    op: IrOp,
    asked: Sequence[str],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    clock: Clock,
    rounds: int,
) -> None:
    """Adds the lines of one shape and dtype."""
    device = result.device[0]
    named = str(dtype).removeprefix("torch.")
    sample = _sample(op, shape, dtype, device)
    moved = moved_bytes(sample, _native_results(op, sample, shape, named))
    shared = [_sample(op, shape, dtype, device) for _ in range(clock.sets_for(moved))]
    reasons = {name: _why_left_out(op, name, sample, device) for name in asked}
    calls: dict[str, Call] = {}

    def entries() -> Iterator[tuple[str, Call, Sequence[Arguments]]]:
        for name in (name for name in asked if reasons[name] is None):
            calls[name] = _call_of(op, name)
            # New sets for one that works in place: it must not leave its results to the others.
            in_place = name != INDUCTOR and op.impls[name].inplace
            yield name, calls[name], [_sample(op, shape, dtype, device) for _ in shared] if in_place else shared

    raced = race(entries(), clock, rounds)
    for name in asked:
        reason, failed = reasons[name], name in raced.failed
        if name in raced.times:
            try:
                timing = raced.timing(name)
                host, direct = _host(op, name, calls[name], _one_row(op, shape, dtype, device), clock)
                share = moved / timing.median / result.copy
                result.lines.append(Line(shape, named, name, moved, timing, share, host, direct))
                continue
            except Exception as error:  # one that fails must not take the others with it
                reason, failed = _words(error), True
        elif failed:
            reason = _words(raced.failed[name])
        result.left_out.append(LeftOut(shape, named, name, reason or "", failed))


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _sample(op: IrOp, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Arguments:
    try:
        return op.generate_inputs(shape=shape, dtype=dtype, device=device)
    except IrError:
        raise
    except Exception as error:
        sizes = "x".join(map(str, shape))
        first = str(error).splitlines()[0] if str(error) else ""
        raise ArgumentError(
            f"Op {op.name!r}: its input generator makes no arguments of shape {sizes} and {dtype}: "
            f"{type(error).__name__}: {first}"
        ) from error


def _native_results(op: IrOp, sample: Arguments, shape: tuple[int, ...], dtype: str) -> Any:
    """What native returns: how many bytes a result has, and whether the op takes the call at all."""
    try:
        with torch.no_grad():
            return op.impls["native"].apply(sample)
    except Exception as error:
        sizes = "x".join(map(str, shape))
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ArgumentError(f"Op {op.name!r} does not take shape {sizes} in {dtype}: {first}") from error


def _why_left_out(op: IrOp, name: str, sample: Arguments, device: str) -> str | None:
    if name == INDUCTOR:
        return None
    impl = op.impls[name]
    never = why_never(impl, torch.device(device).type)
    if never is not None:
        return never
    answer = impl.accepts(sample)
    return None if answer is True else getattr(answer, "reason", "supports_args said no")


def _call_of(op: IrOp, name: str) -> Call:
    """The contestant's own function, given an op's arguments in order."""
    if name == INDUCTOR:
        torch._dynamo.reset()  # static shapes, each compiled anew: no limit on how many
        return torch.compile(op.native, dynamic=False)
    impl = op.impls[name]
    keyword_only = any(p.kind is p.KEYWORD_ONLY for p in op.signature.parameters.values())
    if impl.missing or keyword_only:
        return lambda *arguments: impl.apply(arguments)
    return impl.fn


def _one_row(op: IrOp, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Arguments:
    return _sample(op, (*(1 for _ in shape[:-1]), *shape[-1:]), dtype, device)


def _host(op: IrOp, name: str, call: Call, arguments: Arguments, clock: Clock) -> tuple[Timing | None, Timing | None]:
    if name == INDUCTOR:
        times = host_times({"direct": call}, arguments, clock)
        return None, Timing.of(times["direct"])
    if op.impls[name].accepts(arguments) is not True:
        return None, None
    form = op.maybe_inplace if op.allow_inplace else op
    with priority({op.name: [name]}):
        times = host_times({"host": form, "direct": call}, arguments, clock)
    return Timing.of(times["host"]), Timing.of(times["direct"])
