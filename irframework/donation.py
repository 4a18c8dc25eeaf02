"""`IRFRAMEWORK_CHECK_DONATION=1`: finds, in eager mode, who uses a tensor after it was donated.

After a `maybe_inplace` call the donated memory is dead. With the check on, it is filled with a value that nobody takes
for a result, whatever the implementation did with it: outputs that took it over are moved to memory of their own first.
So the storage of a donated tensor never holds anything good again, and whoever reads or writes that part of it made a
mistake, through whatever alias. A dispatch mode looks at every torch op of the thread for such an argument.

Owns what is remembered of donations, and the mode. Without the setting nothing here is
imported in eager mode. Does not look inside implementations, nor at compiled graphs: the compiler has a check of its
own (`compiler/functionalize.py`).

Private torch API used here (read in 2.11 and 2.13): in `torch.utils._python_dispatch`, `_push_mode`, `_pop_mode`,
`_disable_current_modes` and `_get_current_dispatch_mode_stack`, and the class methods `ignore_compile_internals` and
`is_infra_mode` of a mode; `torch._C._disabled_torch_dispatch_impl`.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from irframework.call_site import call_site
from irframework.contract import dtype_and_shape
from irframework.errors import use_after_donation
from irframework.execution import of_a_parameter
from irframework.memory import Region, StorageWeakRef, share_a_byte, storage_key

if TYPE_CHECKING:
    from irframework.op import IrOp


# They ask a tensor for its shape, dtype and device only.
_LIKE_TEXT = (
    "empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like rand_like randint_like "
    "randn_like zeros_like"
)
_LIKE = frozenset(_LIKE_TEXT.split())


@dataclass(frozen=True, slots=True)
class _Donation:
    """One donated tensor: the bytes of its storage, and where it was given away."""

    region: Region
    shown: str
    op: str
    argument: str
    place: str


@dataclass(frozen=True, slots=True)
class _Storage:
    """What was donated of one storage. The weak reference keeps its key from being given to another one."""

    alive: StorageWeakRef
    donations: tuple[_Donation, ...]


@dataclass(slots=True)
class _Remembered:
    """The donations of all threads, by storage."""

    storages: dict[int, _Storage]
    lock: Any

    def add(self, tensor: Tensor, donation: _Donation) -> None:
        key = storage_key(tensor)
        if key is None:
            return
        with self.lock:
            for other in [other for other, known in self.storages.items() if known.alive.expired()]:
                del self.storages[other]
            known = self.storages.get(key)
            if known is None:
                self.storages[key] = _Storage(StorageWeakRef(tensor.untyped_storage()), (donation,))
            else:
                self.storages[key] = _Storage(known.alive, (*known.donations, donation))

    def find(self, tensor: Tensor) -> _Donation | None:
        """The donation that a tensor has memory of, or None."""
        known = self.storages.get(storage_key(tensor) or 0)
        if known is None:
            return None
        region = Region.of(tensor)
        return next((one for one in known.donations if share_a_byte(one.region, region)), None)


class _OfThread(threading.local):
    mode: "_Watch | None" = None
    inside: bool = False  # an implementation is running


_remembered = _Remembered({}, threading.Lock())
_of_thread = _OfThread()


def _reset_in_child() -> None:
    """After a fork: another thread may have held the lock."""
    _remembered.lock = threading.Lock()


os.register_at_fork(after_in_child=_reset_in_child)


def checked(op: "IrOp", donated: bool, args: tuple[Any, ...], call: Callable[[], Any]) -> Any:
    """Run a call, and see to it that nobody uses what it was given.

    Parameters and tensors that require a gradient are left alone: no call ever overwrites them. A call that takes part
    in a gradient takes nothing away at all.

    Args:
        op: The op.
        donated: Whether the call is a `maybe_inplace` call.
        args: All arguments in the order of the signature.
        call: Makes the call; the thread's mode does not look at what the implementation does.

    Returns:
        The outputs; those that had taken over donated memory as copies.

    Raises:
        DonationError: An argument was donated before.
    """
    _check(args, repr(op.name))
    inside = _of_thread.inside
    _of_thread.inside = True
    try:
        with _looking_away():
            outputs = call()
    finally:
        _of_thread.inside = inside
    if donated and not _traced() and not _needs_gradient(args):
        with _disable_current_modes():
            outputs = _take_away(op, args, outputs)
    if _remembered.storages and not inside:
        _watch_this_thread()
    return outputs


def _needs_gradient(args: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in _tensors(args))


def _take_away(op: "IrOp", args: tuple[Any, ...], outputs: Any) -> Any:
    given = {name: value for name, value in op.named(args).items() if name in op.activations and _is_dead(value)}
    storages = {storage_key(tensor) for tensor in given.values()}
    if isinstance(outputs, Tensor):
        outputs = _moved(outputs, storages)
    else:
        outputs = type(outputs)(_moved(output, storages) for output in outputs)
    place = call_site().text if given else ""
    for name, tensor in given.items():
        _poison(tensor)
        _remembered.add(tensor, _Donation(Region.of(tensor), dtype_and_shape(tensor), op.name, name, place))
    return outputs


def _is_dead(value: object) -> bool:
    if type(value) is not Tensor or value.requires_grad:  # no Parameter, and nothing that a gradient may need
        return False
    if of_a_parameter(value):
        return False
    return value.device.type != "meta" and value.numel() > 0 and storage_key(value) is not None


def _moved(output: Tensor, storages: set[int | None]) -> Tensor:
    return output.clone() if storage_key(output) in storages else output


def _poison(tensor: Tensor) -> None:
    """Fill a tensor with NaN, an integer that is no index, or True."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return  # torch lets nobody write to it here
    with torch.no_grad():
        for dim, stride in enumerate(tensor.stride()):
            if stride == 0:  # its elements are one
                tensor = tensor.narrow(dim, 0, 1)
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))
        elif tensor.dtype is torch.bool:
            tensor.fill_(True)
        else:
            tensor.fill_(torch.iinfo(tensor.dtype).max)


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


def _check(arguments: object, user: str) -> None:
    if not _remembered.storages:
        return
    for tensor in _tensors(arguments):
        found = _remembered.find(tensor)
        if found is not None:
            shown = dtype_and_shape(tensor)
            same = Region.of(tensor) == found.region
            through = "" if same else f" through a tensor {shown}, which shares its memory,"
            raise use_after_donation(
                f"A tensor {found.shown}",
                found.op,
                found.argument,
                f"used by {user}{through}",
                found.place,
                call_site().text,
            )


def _only_looks(func: Any) -> bool:
    """Whether a torch op makes a view, which is looked at when it is used itself, or asks for no value."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    viewing = not schema.is_mutable and any(item.alias_info is not None for item in schema.returns)
    return viewing or _name(schema) in _LIKE


def _name(schema: Any) -> str:
    return str(schema.name.partition("::")[2])


def _traced() -> bool:
    """Whether torch is tracing: what runs now is only written down."""
    return any(mode.is_infra_mode() for mode in _get_current_dispatch_mode_stack())


def _has_its_own_ops(kind: type[Any]) -> bool:
    return kind is not Tensor and kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl


class _Watch(TorchDispatchMode):
    """Looks at the arguments of every torch op of a thread.

    Dynamo would skip every frame under an ordinary mode. This one is not there while Dynamo compiles
    (`ignore_compile_internals`), and is there again when compiled code runs, of which it sees what calls torch ops.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Do not keep Dynamo from compiling."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch op unless it uses donated memory."""
        if any(map(_has_its_own_ops, types)) and not _traced():
            return NotImplemented  # subclasses: their own ops on the tensors that they wrap come next
        if _remembered.storages and not _only_looks(func) and not _traced():
            schema = getattr(func, "_schema", None)
            _check((args, kwargs or {}), repr(func.name() if schema is None else _name(schema)))
        return func(*args, **(kwargs or {}))


def _watch_this_thread() -> None:
    if _of_thread.mode is None and not _traced():
        _of_thread.mode = _Watch()  # type: ignore[no-untyped-call]
        _put_below_all_others(_of_thread.mode)


def forget() -> None:
    """Forget all donations, and no longer look at this thread's torch ops (for tests and notebooks)."""
    _remembered.storages.clear()
    mode, _of_thread.mode = _of_thread.mode, None
    if mode is not None:
        _take_off(mode)


@contextmanager
def _looking_away() -> Iterator[None]:
    mode = _of_thread.mode
    if mode is None or _traced() or not _take_off(mode):
        yield
        return
    try:
        yield
    finally:
        _put_below_all_others(mode)


def _put_below_all_others(mode: _Watch) -> None:
    """Modes leave by taking the topmost away, so this one must never be it.

    It is pushed, not entered: what `__enter__` notes of the modes around would be wrong once those have left.
    """
    others = []
    while _get_current_dispatch_mode_stack():
        others.append(_pop_mode())
    _push_mode(mode)
    for other in reversed(others):
        _push_mode(other)


def _take_off(mode: _Watch) -> bool:
    """Take the mode off this thread's stack; False if it is not there, as while its own handler runs."""
    if not any(other is mode for other in _get_current_dispatch_mode_stack()):
        return False
    others = []
    while (other := _pop_mode()) is not mode:
        others.append(other)
    for other in reversed(others):
        _push_mode(other)
    return True
