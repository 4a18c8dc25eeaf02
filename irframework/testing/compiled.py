"""What torch and the compiler say about one call of an implementation: slow to ask, so they are asked once or twice.

Owns the rules `opcheck` and `compiled`.

Private torch API used here (read in 2.11 and 2.13): `torch.utils._python_dispatch.TorchDispatchMode`.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from irframework import contract
from irframework.contract import described_call
from irframework.errors import ImplementationContractError, LoweringError
from irframework.priority import priority
from irframework.testing.findings import Findings, wait_for
from irframework.testing.samples import DTYPES, map_tensors, of_their_own, usual_call

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl

_SHAPES = ((5, 34), (16, 64))
_NOT_ITS_OWN = ("aten", "prim", "prims", "irframework", "higher_order", "_c10d_functional")


def lower_once(findings: Findings, args: tuple[Any, ...], call: str) -> None:
    """Let the compiler hold the implementation to what only a trace shows."""
    if findings.broken():  # else the compiler would only say the same again
        findings.skip("compiled", "another rule is broken")
        return
    findings.tried("compiled")
    try:
        with _in_silence():
            _lowered(findings.impl, args)
    except (ImplementationContractError, LoweringError) as error:
        findings.note(contract.not_lowered(findings.impl, error), None, call)


def _lowered(impl: IrOpImpl, args: tuple[Any, ...]) -> None:
    from irframework import compiler

    graph = torch.fx.Graph()
    inputs: list[Tensor] = []

    def placeholder(tensor: Tensor) -> Any:
        inputs.append(tensor)
        return graph.placeholder(f"input_{len(inputs)}")

    graph.output(graph.call_function(impl.op.torch_op, *_split(impl, map_tensors(placeholder, args))))
    with priority({impl.op.name: [impl.provider]}):
        compiler.lower(torch.fx.GraphModule(torch.nn.Module(), graph), inputs, inference=True)


def ask_opcheck(findings: Findings, device: str) -> None:
    """Run all tests of `torch.library.opcheck` on the op with this provider, and on the torch ops that it calls."""
    impl = findings.impl
    taken = (usual_call(impl, shape, dtype, device) for dtype in DTYPES for shape in _SHAPES)
    args = next((each for each in taken if each is not None), None)
    if args is None:
        findings.skip("opcheck", "it takes none of the small calls")
        return
    call = described_call(impl.op, args)
    with priority({impl.op.name: [impl.provider]}), _in_silence():
        positional, keywords = _split(impl, args)
        _opcheck(findings, impl.op.torch_op, positional, keywords, call)
        called = _Called()
        with torch.no_grad(), called:
            impl.apply(of_their_own(impl, args))
        wait_for(torch.device(device))
        for op, (given, named) in called.ops.items():
            _opcheck(findings, op, given, named, call)


_CODES = (torch.float8_e4m3fn, torch.float8_e5m2)
# The first one computes with copies of the arguments, which torch cannot with 8-bit floats.
_TESTS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def _opcheck(findings: Findings, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: str) -> None:
    findings.tried("opcheck")
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    tests = _TESTS[1:] if any(tensor.dtype in _CODES for tensor in tensors) else _TESTS
    results: dict[str, Any] = torch.library.opcheck(op, args, kwargs, test_utils=tests, raise_exception=False)
    for test, result in results.items():
        if isinstance(result, BaseException):
            lines = [line.strip() for line in str(result).splitlines() if line.strip()] or [type(result).__name__]
            findings.note(contract.registered_wrongly(f"{op}, {test}", lines[0][:300]), (op, test), call)


def _split(impl: IrOpImpl, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    values = impl.op.named(args)
    kinds = {name: p.kind for name, p in impl.op.signature.parameters.items()}
    keywords = {name: values.pop(name) for name, kind in kinds.items() if kind is inspect.Parameter.KEYWORD_ONLY}
    return tuple(values.values()), keywords


class _Called(TorchDispatchMode):
    """Keeps the first call of each torch op that is not torch's own."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch op."""
        kwargs = kwargs or {}
        own = isinstance(func, torch._ops.OpOverload) and func.namespace not in _NOT_ITS_OWN
        if own and func not in self.ops:
            copies = map_tensors(torch.clone, tuple(args))
            self.ops[func] = copies, {name: map_tensors(torch.clone, value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


@contextmanager
def _in_silence() -> Iterator[None]:
    """Torch's own warnings are not about the implementation."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
