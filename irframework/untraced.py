"""Functions that Dynamo must run as they are.

Owns the one way to say so without importing Dynamo. What would go wrong otherwise: after a graph break Dynamo goes on
to compile every Python function that is called from there, the framework's own among them; it cannot see priorities
(they live in a context variable), takes what it meets for constant, and a changed priority is ignored.

Private torch API, read in 2.11 and 2.13: `torch._C._dynamo.eval_frame.set_code_exec_strategy` with `_FrameExecStrategy`
and `_FrameAction`; the attributes `_torchdynamo_disable` and `_torchdynamo_disable_msg` of a function, which
`torch.compiler.disable` sets too.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._dynamo import eval_frame

_SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
F = TypeVar("F", bound=Callable[..., Any])


def run_untraced(fn: F) -> F:
    """Let Dynamo compile neither a function that runs outside a compiled graph, nor what it calls."""
    eval_frame.set_code_exec_strategy(fn.__code__, _SKIP)
    return fn


def breaks_graph(fn: F, reason: str) -> F:
    """Let a call in a compiled function break the graph, or be an error under `fullgraph=True`, for a reason."""
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    fn._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]
    return fn
