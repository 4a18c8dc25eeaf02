"""What all launches share: plain tensors or traced ones, rows, grids, and what the device can do.

Owns the one place where a kernel is called, and the torch ops' declaration. Does not know what kernels do.
"""

import inspect
import threading
from collections.abc import Callable
from functools import cache, wraps
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton
from triton.compiler import CompiledKernel

from irframework_triton_kernels.kernels import codes, order
from irframework_triton_kernels.tiles import Tile

NAMESPACE = "irframework_triton_kernels"
FP8 = torch.float8_e4m3fn
SMALLEST_SCALE: float = codes.SMALLEST_SCALE.value
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
Kernel = Any
F = TypeVar("F", bound=Callable[..., Any])


class Abilities(NamedTuple):
    """What a device can do that kernels are compiled for.

    Attributes:
        codes: It converts float32 to float8_e4m3fn.
        early: It loads a kernel before the one in front of it has ended, if told to.
        alike: Triton compiles tensors apart by dtype and by whether they begin at a multiple of 16 bytes, by nothing
            else. (On AMD devices, by the size of their storage, too.)
    """

    codes: bool
    early: bool
    alike: bool


@cache
def abilities(device: int | None) -> Abilities:
    """What a device can do; the current one while a kernel is traced, which is the one it is compiled for."""
    if triton.knobs.runtime.interpret:
        return Abilities(False, False, False)
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "cuda":
        return Abilities(target.arch >= 89, target.arch >= 90 and order.CAN_WAIT, True)
    return Abilities(target.backend == "hip" and target.arch == "gfx950", False, False)


@cache
def multiprocessors(device: int | None) -> int:
    """How many multiprocessors a device has; None: the current one, for which a kernel is traced."""
    return _property("multiprocessor_count", device, 2)


@cache
def shared_memory(device: int | None) -> int:
    """Bytes of shared memory that one program can have at most; as `multiprocessors`."""
    return _property("max_shared_mem", device, 232448)


def _property(name: str, device: int | None, interpreted: int) -> int:
    if triton.knobs.runtime.interpret:
        return interpreted
    driver = triton.runtime.driver.active
    value: int = driver.utils.get_device_properties(driver.get_current_device() if device is None else device)[name]
    return value


def is_plain(x: Tensor) -> bool:
    """Whether a tensor holds data and nobody traces it."""
    return type(x) is Tensor or type(x) is torch.nn.Parameter


def torch_op(name: str | None = None, mutates: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Give a function that launches a kernel a torch op, `torch.ops.irframework_triton_kernels.<name>`.

    Plain tensors go straight to the function; all others go through the op, which is a `triton_op`: whoever traces it
    sees the kernel and not a black box, so Inductor plans its memory and launches it itself.

    Args:
        name: The op's name; default: the function's.
        mutates: The parameters that the kernel overwrites.
    """

    def decorate(fn: F) -> F:
        op = triton_op(f"{NAMESPACE}::{name or fn.__name__}", _without_tile(fn), mutates_args=mutates)

        @wraps(fn)
        def call(x: Tensor, *args: Any, **options: Any) -> Any:
            if is_plain(x):
                return fn(x, *args, **options)
            return op(x, *args, **options)

        return call  # type: ignore[return-value]

    return decorate


def _without_tile(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function as a torch op has it: without the parameter for experiments."""

    def traced(*args: Any) -> Any:
        return fn(*args)

    parameters = inspect.signature(fn)
    kept = [parameter for parameter in parameters.parameters.values() if parameter.name != "tile"]
    traced.__signature__ = parameters.replace(parameters=kept)  # type: ignore[attr-defined]
    return traced


def opaque_op(name: str, mutates: tuple[str, ...]) -> Callable[[F], F]:
    """Give a function a torch op that nobody looks into.

    There are three reasons. It overwrites what is kept between calls: for a kernel that it sees, Inductor copies what
    the kernel overwrites of the graph's inputs; for an op that says what it overwrites, the framework proves that this
    is not needed. It reads what other processes wrote, which is no tensor of the call. Or it does something else for
    few rows than for many, which a trace for any number of rows cannot.

    Args:
        name: The op's name.
        mutates: The parameters that the kernel overwrites.
    """

    def decorate(fn: F) -> F:
        traced = _without_tile(fn)
        _library.define(f"{name}{torch.library.infer_schema(traced, mutates_args=mutates)}")
        _library.impl(name, traced, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", lambda *args: _without_launch(fn, args), lib=_library)
        op = getattr(getattr(torch.ops, NAMESPACE), name).default

        @wraps(fn)
        def call(x: Tensor, *args: Any, **options: Any) -> Any:
            return fn(x, *args, **options) if is_plain(x) else op(x, *args, **options)

        return call  # type: ignore[return-value]

    return decorate


class _OfThread(threading.local):
    launches: bool = True


_of_thread = _OfThread()


def is_launching() -> bool:
    """Whether a function that launches kernels is called for what they write, and not only for its outputs' shapes."""
    return _of_thread.launches


def _without_launch(fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The outputs of a function, which nothing is written to."""
    _of_thread.launches = False
    try:
        return fn(*args)
    finally:
        _of_thread.launches = True


def rows_of(x: Tensor) -> Tensor:
    """`[rows, hidden]`; a copy only where the leading dimensions have no common stride."""
    return x if x.dim() == 2 else x.reshape(-1, x.shape[-1])


def check_overwritten(**tensors: Tensor) -> None:
    """Refuse what `rows_of` must not copy, for the copy would be overwritten instead.

    Raises:
        ValueError: A tensor is not contiguous.
    """
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(f"fused_add_rms_norm in place: {name} has strides {tensor.stride()}, must be contiguous")


def static(length: Any) -> int | None:
    """A length that is known while a kernel is traced."""
    return length if isinstance(length, int) else None


def as_float(number: Any) -> Any:
    """A whole number as a float: Triton would compile for each."""
    return float(number) if type(number) is int else number


def tiles_of(count: Any, size: int) -> Any:
    """How many tiles of a size there are in `count`, which may be symbolic."""
    return count if size == 1 else (count + size - 1) // size


def new_like(x: Tensor) -> Tensor:
    """Contiguous memory like x."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def code_dtype(x: Tensor) -> torch.dtype:
    """How codes are written: as such where the device converts, else as the bytes that the kernels make of them."""
    return FP8 if abilities_for(x).codes else torch.uint8


def new_codes(x: Tensor) -> Tensor:
    """Contiguous memory for codes of x."""
    return torch.empty_like(x, dtype=code_dtype(x), memory_format=torch.contiguous_format)


def as_codes(q: Tensor) -> Tensor:
    """Codes in the dtype that the ops return."""
    return q if q.dtype is FP8 else q.view(FP8)


def new_scales(x: Tensor, smallest: float = SMALLEST_SCALE) -> Tensor:
    """Memory for the scales of rows; filled where there is nothing that a kernel could find them from."""
    scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    return scales if static(x.shape[-1]) != 0 else scales.fill_(smallest)


def abilities_for(x: Tensor) -> Abilities:
    """What the device of a tensor can do; without data, what the current device can do."""
    return abilities(device_of(x))


def device_of(x: Tensor) -> int | None:
    """The number of a tensor's device; None without data: the current device is what is compiled for."""
    return x.get_device() if is_plain(x) else None


@cache
def _several_devices() -> bool:
    return torch.accelerator.device_count() > 1


# Compiled kernels by all that Triton compiles apart, and by more: every number, where Triton asks whether it is 1 or a
# multiple of 16. To find out which kernel a call needs takes Triton longer than to launch it.
_compiled: dict[tuple[Any, ...], Any] = {}
_MOST_COMPILED = 4096
# How Triton 3.6 launches what it compiled was read there; without what it collects for hooks that nobody set, a launch
# takes Python a third of the time.
_READ_TRITON = triton.__version__.startswith("3.6.")


def launch(
    kernel: Kernel,
    tiles: Any,
    tensors: tuple[Tensor, ...],
    count: Any,
    numbers: tuple[Any, ...],
    tile: Tile,
) -> None:
    """Call a kernel, or show the call to whoever traces it.

    Args:
        kernel: The kernel. Its parameters are `tensors`, `count`, `numbers` and `early`.
        tiles: How many programs there is work for; a symbolic number while traced.
        tensors: The first is a tensor of the call; on its device the kernel is launched.
        count: A number that the kernel is not compiled for: how many rows there are.
        numbers: All others: sizes, strides and constants.
        tile: The tile.
    """
    first = tensors[0]
    if not _of_thread.launches:
        return
    if not is_plain(first):
        # Never early: Inductor (2.11 and 2.13) has no way to say so where it launches, and an instruction with effects,
        # as the wait is one, makes it believe that the kernel overwrites all of its arguments.
        wrap_triton(kernel)[(tiles,)](*tensors, count, *numbers, False, **_options(tile))
        return
    if not tiles:
        return
    device = first.get_device()
    if _several_devices() and device != torch.accelerator.current_device_index():
        with torch.accelerator.device_index(device):
            launch(kernel, tiles, tensors, count, numbers, tile)
        return
    if tile.resident:
        tiles = min(tiles, tile.resident * multiprocessors(device))
    early = tile.early and abilities(device).early
    places = [(tensor.dtype, tensor.data_ptr() % 16) for tensor in tensors]
    key = (id(kernel), device, tile.warps, tile.stages, early, count < 2**31, *places, *numbers)
    again = _compiled.get(key)
    if again is not None:
        again(tiles, *tensors, count, *numbers, early)
        return
    compiled = _by_triton(kernel, tiles, (*tensors, count, *numbers, early), tile, early)
    if abilities(device).alike and isinstance(compiled, CompiledKernel):
        if len(_compiled) >= _MOST_COMPILED:
            _compiled.clear()
        _compiled[key] = _launcher(compiled, device)


def _launcher(compiled: Any, device: int) -> Callable[..., None]:
    """Return what launches a kernel once more: a function of the number of programs and all arguments."""

    def by_triton(tiles: int, *arguments: Any) -> None:
        compiled[(tiles, 1, 1)](*arguments)

    def directly(tiles: int, *arguments: Any) -> None:
        if _hooked(runtime.launch_enter_hook) or _hooked(runtime.launch_exit_hook):
            by_triton(tiles, *arguments)
        else:
            run(tiles, 1, 1, stream_of(device), function, metadata, None, None, None, *arguments)

    if not _READ_TRITON:
        return by_triton
    runtime: Any = triton.knobs.runtime
    stream_of: Callable[[int], int] = triton.runtime.driver.active.get_current_stream
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    return directly


def _hooked(hook: Any) -> bool:
    """Whether somebody, a profiler say, wants to know of launches."""
    return hook is not None and (type(hook) is not triton.knobs.HookChain or bool(hook.calls))


def _by_triton(kernel: Kernel, tiles: Any, arguments: tuple[Any, ...], tile: Tile, early: bool) -> Any:
    options = _options(tile)
    if early:
        options["launch_pdl"] = True
    return kernel[(tiles,)](*arguments, **options)


def _options(tile: Tile) -> dict[str, Any]:
    """What a kernel is compiled with. Triton's own number of stages is a device's, so it is not named."""
    return {"num_warps": tile.warps, **({"num_stages": tile.stages} if tile.stages else {})}
