"""Turns a Python function over tensors into a functional graph of torch ops.

Owns the one call to `make_fx`, functionalization of what is traced, and the making of fake tensors. Does not know IR
ops, implementations or graphs that something is inlined into.

Private torch APIs, read in 2.11 and 2.13: `make_fx`, `FunctionalTensor` and its mode,
`torch._functionalize_has_data_mutation`, `_has_metadata_mutation` and `_was_storage_changed`,
`in_kernel_invocation_manager`, `torch.utils._python_dispatch._disable_current_modes`,
`_inductor.decomposition.select_decomp_table`, `_inductor.config.enable_auto_functionalized_v2`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import GraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

Place = tuple[int, int | None]
"""Where an argument stands: the position in the signature, and the item if a list is there."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A function as a functional graph.

    Attributes:
        module: The graph; its placeholders are the tensor and symbolic arguments, also those in lists, in order. It
            always returns a tuple.
        dynamic: Where the arguments stand that are placeholders; all others are constants inside the graph.
        written: Positions of tensor arguments that the function overwrote. The graph returns what it would have left
            there only where the function returns it; it never writes to a placeholder.
        is_tuple: Whether the function returned a tuple or list, not one tensor.
    """

    module: GraphModule
    dynamic: tuple[Place, ...]
    written: tuple[int, ...]
    is_tuple: bool


def apart() -> AbstractContextManager[Any]:
    """Outside of the modes of whoever compiles just now, in which tensors hold no data and belong to a graph."""
    modes: AbstractContextManager[Any] = _disable_current_modes()
    return modes


def _is_dynamic(argument: object) -> bool:
    return isinstance(argument, (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool))


def _places(arguments: Sequence[Any]) -> Iterator[Place]:
    for index, argument in enumerate(arguments):
        if isinstance(argument, (list, tuple)):
            yield from ((index, item) for item, value in enumerate(argument) if _is_dynamic(value))
        elif _is_dynamic(argument):
            yield index, None


def places_of(arguments: Sequence[Any]) -> tuple[Place, ...]:
    """Where the arguments stand for which a trace has placeholders: tensors and symbolic numbers, also in lists."""
    return tuple(_places(arguments))


def argument_at(arguments: Sequence[Any], place: Place) -> Any:
    """The argument that stands at a place."""
    index, item = place
    return arguments[index] if item is None else arguments[index][item]


def trace(function: Callable[..., Any], arguments: Sequence[Any], mode: FakeTensorMode) -> Trace:
    """Trace `function` over fake tensors with Inductor's decompositions.

    Mutations become functional: of torch ops by their functional forms, of custom ops by the higher-order op
    `auto_functionalized`. Ops without a decomposition, IR ops among them, stay single nodes.

    Args:
        function: Takes `arguments` by position; returns a tensor or a flat tuple of tensors.
        arguments: Fake tensors of `mode`, symbolic numbers, constants, and lists of these. Each tensor has storage of
            its own.
        mode: The fake mode of the graph the trace is meant for.

    Raises:
        TypeError: The function returned something else than tensors.
        ClosedOverWriteError: It writes to a real tensor.
    """
    dynamic = places_of(arguments)
    written: list[int] = []
    is_tuple = False

    def functional(*values: Any) -> tuple[torch.Tensor, ...]:
        nonlocal is_tuple
        written.clear()
        full = [list(each) if isinstance(each, (list, tuple)) else each for each in arguments]
        exclude = torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.Functionalize))
        with exclude, FunctionalTensorMode(), _KeepOff():
            for (index, item), value in zip(dynamic, values, strict=True):
                given = FunctionalTensor.to_functional(value) if isinstance(value, torch.Tensor) else value
                if item is None:
                    full[index] = given
                else:
                    full[index][item] = given
            result = function(*full)
            is_tuple = isinstance(result, (tuple, list))
            outputs = tuple(_unwrap(value) for value in (result if is_tuple else (result,)))
            for place in dynamic:
                value = argument_at(full, place)
                if isinstance(value, FunctionalTensor):
                    _sync(value)
                    if any(changed(value.elem) for changed in _CHANGES):
                        written.append(place[0])
        return outputs

    from torch._inductor import config as inductor_config
    from torch._inductor.decomposition import select_decomp_table

    with ExitStack() as stack:
        stack.enter_context(_use_lazy_graph_module(True))
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(inductor_config.patch(enable_auto_functionalized_v2=False))
        stack.enter_context(_constants_allowed(mode))
        module = make_fx(
            functional,
            decomposition_table=select_decomp_table(),
            tracing_mode="symbolic" if mode.shape_env is not None else "fake",
            _allow_non_fake_inputs=True,
        )(*(argument_at(arguments, place) for place in dynamic))
        for node in module.graph.find_nodes(op="get_attr"):
            value = getattr(module, str(node.target))
            if isinstance(value, torch.Tensor) and "val" not in node.meta:
                node.meta["val"] = mode.from_tensor(value, static_shapes=True)
    return Trace(module, dynamic, tuple(written), is_tuple)


class ClosedOverWriteError(Exception):
    """The function writes to a tensor that is neither an argument nor its own; the message names the torch op."""


class _KeepOff(TorchDispatchMode):
    """Lets nobody write to a real tensor: under functionalization, the function's own tensors are not real."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.views: dict[int, torch.Tensor] = {}  # of real tensors; kept, so that their ids stay theirs

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch op that writes to nothing real."""
        schema = getattr(func, "_schema", None)
        closed_over = False
        for index, argument in enumerate(() if schema is None else schema.arguments):
            if argument.alias_info is not None:
                value = (kwargs or {}).get(argument.name, args[index] if index < len(args) else None)
                if any(map(self._is_real, value if isinstance(value, (list, tuple)) else (value,))):
                    closed_over = True
                    if argument.alias_info.is_write:
                        raise ClosedOverWriteError(str(func))
        result = func(*args, **(kwargs or {}))
        if closed_over:
            views = result if isinstance(result, (list, tuple)) else (result,)
            self.views.update({id(view): view for view in views})
        return result

    def _is_real(self, value: object) -> bool:
        return type(value) in (torch.Tensor, torch.nn.Parameter) or id(value) in self.views


@contextmanager
def _constants_allowed(mode: FakeTensorMode) -> Iterator[None]:
    """Let the function use real tensors that it closes over; they become attributes of the graph."""
    before = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True
    try:
        yield
    finally:
        mode.allow_non_fake_inputs = before


_CHANGES: tuple[Callable[[torch.Tensor], bool], ...] = (
    torch._functionalize_has_data_mutation,  # type: ignore[attr-defined]
    torch._functionalize_has_metadata_mutation,  # t_, squeeze_, ...
    torch._functionalize_was_storage_changed,  # set_
)
_sync: Callable[[torch.Tensor], None] = torch._sync  # type: ignore[attr-defined]


def _unwrap(value: object) -> torch.Tensor:
    if isinstance(value, FunctionalTensor):
        _sync(value)
        inner = torch._from_functional_tensor(value.elem)
        assert isinstance(inner, torch.Tensor)
        return inner
    if isinstance(value, torch.Tensor):
        return value
    raise TypeError(f"returned a {type(value).__name__} where a tensor is expected")


def fake_like(value: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor with the sizes, strides and offset of `value` and storage that nothing else shares."""
    if value.layout is not torch.strided or type(value) is not FakeTensor:
        with mode:
            return torch.empty_like(value)
    offset = value.storage_offset()
    with torch._C._DisableTorchDispatch():
        if statically_known_true(offset == 0):
            meta = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        else:
            extent = sum((size - 1) * stride for size, stride in zip(value.size(), value.stride(), strict=True)) + 1
            meta = torch.empty(offset + extent, dtype=value.dtype, device="meta")
            meta = meta.as_strided(value.size(), value.stride(), offset)
    return FakeTensor(mode, meta, value.device)


def fake_reshaped(base: torch.Tensor, shape: Sequence[Any], mode: FakeTensorMode) -> torch.Tensor:
    """A contiguous fake tensor in another shape, on the same storage."""
    return _shown(base, torch.ops.aten.view.default, shape, mode)


def fake_permuted(base: torch.Tensor, dims: Sequence[int], mode: FakeTensorMode) -> torch.Tensor:
    """A fake tensor with its dimensions in another order, on the same storage."""
    return _shown(base, torch.ops.aten.permute.default, dims, mode)


def _shown(base: torch.Tensor, view: Any, numbers: Sequence[Any], mode: FakeTensorMode) -> torch.Tensor:
    """What a view op makes of a fake tensor; without the fake mode where all sizes are plain, which is faster."""
    plain = all(type(number) is int for number in (*numbers, *base.shape, *base.stride()))
    if type(base) is not FakeTensor or not plain:
        with mode, torch.no_grad():
            return view(base, numbers)  # type: ignore[no-any-return]
    with in_kernel_invocation_manager(mode), torch.no_grad():
        meta = view(base, numbers)
    return FakeTensor(mode, meta, base.device)


def is_plainly_contiguous(value: torch.Tensor) -> bool:
    """Whether a tensor is contiguous for all values that its sizes can have, told without a guard."""
    numbers = (*value.shape, *value.stride())
    return all(type(each) is int for each in numbers) and value.stride() == contiguous_strides(value)


def fake_view(base: torch.Tensor, like: torch.Tensor) -> torch.Tensor | None:
    """A fake tensor that lies on the storage of `base` as `like` lies on its own; None where that cannot be said."""
    if type(base) is not FakeTensor or base.dtype != like.dtype or like.layout is not torch.strided:
        return None
    with in_kernel_invocation_manager(base.fake_mode), torch.no_grad():
        meta = torch.as_strided(base, like.size(), like.stride(), like.storage_offset())
    return FakeTensor(base.fake_mode, meta, base.device)


def has_strides(value: torch.Tensor, strides: Sequence[Any]) -> bool:
    """Whether a value is known to have these strides. That of a dimension of one element says nothing."""
    steps = zip(value.shape, value.stride(), strides, strict=True)
    return all(statically_known_true(size == 1) or statically_known_true(own == other) for size, own, other in steps)


def is_contiguous(value: torch.Tensor) -> bool:
    """Whether a value is known to be contiguous, whatever its symbolic sizes are."""
    return has_strides(value, contiguous_strides(value))


def contiguous_strides(value: torch.Tensor) -> tuple[Any, ...]:
    """The strides a contiguous tensor of this one's shape has."""
    return strides_for(value.shape)


def strides_for(shape: Sequence[Any]) -> tuple[Any, ...]:
    """The strides of a contiguous tensor of a shape."""
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * (max(size, 1) if type(size) is int else size)
    return tuple(reversed(strides))
