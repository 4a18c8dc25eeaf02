"""How an implementation works with CUDA's streams and graphs.

Owns the rules `streams` and `graph_capture`. Both are skipped on other devices.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework import contract
from irframework.contract import described_call
from irframework.dispatch import tensors_of
from irframework.testing.findings import Findings, bits_of, check_alive, same_bits, wait_for
from irframework.testing.samples import map_tensors, of_their_own, usual_call

_CALLS: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (
    ((37, 256), torch.float32),
    ((5, 34), torch.bfloat16),
    ((513, 128), torch.bfloat16),
)
_BUSY = 8  # products of large matrices: some 10 ms, longer than a launch takes


def try_streams(findings: Findings, device: str) -> None:
    """On a stream that is busy: what the call needs is written there only after it was queued."""
    if not _on_cuda(findings, "streams", device):
        return
    impl = findings.impl
    where = torch.device(device)
    large = torch.ones(4096, 4096, device=where)
    for args, other, call in _pairs(findings, device):
        findings.tried("streams")
        try:
            with torch.no_grad():
                expected = bits_of(impl.apply(of_their_own(impl, other)))
                given, fresh = of_their_own(impl, args), of_their_own(impl, other)
                impl.apply(of_their_own(impl, args))  # what is compiled at the first call is compiled now
                wait_for(where)
                stream = torch.cuda.Stream(where)
                with torch.cuda.stream(stream):
                    for _ in range(_BUSY):
                        torch.mm(large, large)
                    _refill(findings, given, fresh)
                    result = impl.apply(given)
                    kept = map_tensors(torch.clone, result)
                wait_for(where)
        except Exception as error:
            findings.note(contract.raises_when("streams", "on a stream of its own", error), "raises", call)
            check_alive(where, error)
            continue
        if not same_bits(expected, bits_of(kept)):
            when = "on a busy stream than on an idle one, as if it did not wait there"
            findings.note(contract.unlike_itself("streams", when), "bits", call)


def try_capture(findings: Findings, device: str) -> None:
    """Captured once, replayed with other data."""
    if not _on_cuda(findings, "graph_capture", device):
        return
    impl = findings.impl
    where = torch.device(device)
    for args, other, call in _pairs(findings, device):
        findings.tried("graph_capture")
        try:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = bits_of(impl.apply(of_their_own(impl, other)))
                given = of_their_own(impl, args)
                _warm_up(findings, args, where)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    result = impl.apply(given)
                _refill(findings, given, other)
                graph.replay()
                wait_for(where)
                first = bits_of(result)
                _refill(findings, given, other)
                graph.replay()
                wait_for(where)
        except Exception as error:
            findings.note(contract.raises_when("graph_capture", "in a CUDA graph", error), "raises", call)
            check_alive(where, error)
            continue
        if not (same_bits(expected, first) and same_bits(expected, bits_of(result))):
            when = "when a CUDA graph replays it with other data than when it is called with them"
            findings.note(contract.unlike_itself("graph_capture", when), "bits", call)


def _warm_up(findings: Findings, args: tuple[Any, ...], where: torch.device) -> None:
    """Torch asks for it: on a stream of its own, before the capture."""
    stream = torch.cuda.Stream(where)
    stream.wait_stream(torch.cuda.current_stream(where))
    with torch.cuda.stream(stream):
        for _ in range(2):
            findings.impl.apply(of_their_own(findings.impl, args))
    torch.cuda.current_stream(where).wait_stream(stream)
    wait_for(where)


def _refill(findings: Findings, given: tuple[Any, ...], other: tuple[Any, ...]) -> None:
    op = findings.impl.op
    pairs: Iterator[tuple[tuple[str, Tensor], tuple[str, Tensor]]] = zip(
        tensors_of(op, given), tensors_of(op, other), strict=True
    )
    for (_, tensor), (_, values) in pairs:
        tensor.copy_(values)


def _pairs(findings: Findings, device: str) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...], str]]:
    """The same call with two sets of data, and its words."""
    for shape, dtype in _CALLS:
        args, other = (usual_call(findings.impl, shape, dtype, device, seed) for seed in (1, 2))
        if args is not None and other is not None:
            call = described_call(findings.impl.op, args)
            findings.told(call)
            yield args, other, call


def _on_cuda(findings: Findings, rule: str, device: str) -> bool:
    if torch.device(device).type != "cuda":
        findings.skip(rule, f"needs a CUDA device, it was tried on {device}")
        return False
    if findings.broken("deterministic"):
        findings.skip(rule, "it is not deterministic")
        return False
    return True
