"""Owns the loaded host library: queues, compiled kernels, and launches on tensors.

On an Intel GPU the queue is torch's own: the current stream of the tensor's device, whose pointer torch gives
(`torch.xpu.current_stream(device).sycl_queue`; an in-order queue on the context that torch allocates from). Launches
go there and return at once. On the CPU, which is for tests, the queue is ours, on the OpenCL device of the CPU; the
kernels read and write torch's memory itself, and a launch returns when it is done.

Kernels are compiled by the run-time library when the first of a dtype is needed, for each device, once per process.

Knows nothing of irframework. Which tensors the kernels take is in `sycl_implementations`.
"""

import ctypes
import functools
import os
import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from irframework_xpu_sycl import sycl_runtime
from irframework_xpu_sycl.sycl_runtime import SyclError

Rows = tuple[int, int, int, int, int]

ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# The order is that of the numbers that launches are given. Behind the first line: weights and angles in float32.
NAMES = (
    *("norm_own", "norm_quant_own", "rotary_own", "silu", "gelu", "gelu_tanh", "silu_quant", "quant"),
    *("norm_float", "norm_quant_float", "rotary_float"),
)
_NUMBERS = {name: number for number, name in enumerate(NAMES)}
_OPTIONS = ("-ffp-contract=off", "-fno-fast-math")
_NO_ROWS: Rows = (1, 1, 0, 0, 0)
_RowPointers = ctypes.c_void_p * 8
_RowSizes = ctypes.c_int64 * 22
_RotaryPointers = ctypes.c_void_p * 6
_RotarySizes = ctypes.c_int64 * 19

_lock = threading.RLock()
_compiled: dict[tuple[torch.dtype, str, int | None], int] = {}
_failed: dict[tuple[torch.dtype, str, int | None], str] = {}
_used_before_fork = False


def _after_fork() -> None:
    global _used_before_fork
    _used_before_fork = bool(_compiled)


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_after_fork)


# ---- the library and its queues ------------------------------------------------------------------------------------


@functools.cache
def host() -> ctypes.CDLL:
    """Load the host library, after building it if need be.

    Raises:
        SyclError: There is no run-time library or compiler, the build fails, or the loader refuses the result.
    """
    with _lock:
        runtime = sycl_runtime.find_runtime()
        sycl_runtime.check_loaded(runtime)
        path = sycl_runtime.host_library(runtime)
        try:
            library = ctypes.CDLL(str(path))
        except OSError as error:
            raise SyclError(f"the host library of the SYCL kernels does not load: {error}") from error
        pointer, text, number = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32
        sizes = ctypes.POINTER(ctypes.c_int64)
        signatures: dict[str, list[object]] = {
            "cpu_queue": [ctypes.POINTER(pointer)],
            "compile": [pointer, text, text, ctypes.POINTER(text), number, ctypes.POINTER(text), number]
            + [ctypes.POINTER(pointer)],
            "rows": [pointer, number, pointer, number, ctypes.POINTER(pointer), sizes, ctypes.c_float],
            "rotary": [pointer, number, pointer, number, ctypes.POINTER(pointer), sizes, number, number],
        }
        for name, arguments in signatures.items():
            function = getattr(library, f"irframework_sycl_{name}")
            function.argtypes, function.restype = arguments, text
        return library


@functools.cache
def cpu_queue() -> int:
    """Return the queue on the OpenCL device of the CPU.

    Raises:
        SyclError: See `host`; or the run-time library finds no such device.
    """
    with _lock:
        queue = ctypes.c_void_p()
        problem = host().irframework_sycl_cpu_queue(ctypes.byref(queue))
        if problem is not None:
            raise SyclError(f"the SYCL run-time library does not start: {problem.decode(errors='replace')}")
        if queue.value is None:
            raise SyclError(f"the SYCL run-time library finds no CPU device of OpenCL; {_advice()}")
        return queue.value


def _advice() -> str:
    driver = sycl_runtime.opencl_driver()
    if driver is None:
        return f"install one ({sycl_runtime.OPENCL_DISTRIBUTION}; the extra `cpu-test` of irframework-xpu-sycl has it)"
    if os.environ.get("OCL_ICD_FILENAMES") != str(driver):
        return f"set OCL_ICD_FILENAMES={driver} before the program starts"
    return f"{driver} is named in OCL_ICD_FILENAMES, so this version of the run-time library may have no adapter for it"


def queue_of(device: torch.device) -> int:
    """Return the queue that work on a device goes to now."""
    if device.type == "cpu":
        return cpu_queue()
    queue: int = torch.xpu.current_stream(device).sycl_queue
    return queue


# ---- compilation -----------------------------------------------------------------------------------------------


def compiled(dtype: torch.dtype, device: torch.device) -> int:
    """Return the kernels of a dtype for a device; they are compiled at the first call, which takes seconds.

    Raises:
        SyclError: See `host` and `cpu_queue`; or the compiler in the run-time library refuses the kernels. The first
            lines of its log are in the message, and in that of every later call.
    """
    key = (dtype, device.type, device.index)
    found = _compiled.get(key)
    if found is not None:
        return found
    with _lock:
        if key in _failed:
            raise SyclError(_failed[key])
        if key not in _compiled:
            try:
                _compiled[key] = _compile(ELEMENTS[dtype], queue_of(device))
            except SyclError as error:
                _failed[key] = str(error)
                raise
        return _compiled[key]


def _compile(element: int, queue: int) -> int:
    runtime = sycl_runtime.find_runtime()
    options = _texts((f"-DELEMENT={element}", *_OPTIONS, *runtime.compile_options))
    names = _texts(NAMES if element else [name for name in NAMES if not name.endswith("_float")])
    source, header = ((sycl_runtime.SOURCES / name).read_bytes() for name in ("kernels.cpp", "arguments.h"))
    kernels = ctypes.c_void_p()
    problem = host().irframework_sycl_compile(
        queue, source, header, options, len(options), names, len(names), ctypes.byref(kernels)
    )
    if problem is not None or kernels.value is None:
        log = sycl_runtime.first_lines(problem.decode(errors="replace")) if problem else "no log"
        raise SyclError(f"the SYCL kernels do not compile with {sycl_runtime.DISTRIBUTION} {runtime.version}:\n{log}")
    return kernels.value


def _texts(texts: Sequence[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


# ---- launches ----------------------------------------------------------------------------------------------------


def rows_of(x: Tensor, lead: int | None = None) -> Rows:
    """Return sizes and strides from which a kernel finds where a row begins: see `Rows` in `arguments.h`.

    Args:
        x: A tensor with at most three leading dimensions, or a contiguous one.
        lead: How many dimensions lead; default: all but the last.
    """
    lead = x.dim() - 1 if lead is None else lead
    strides = x.stride()
    if lead == 1:
        return 1, 1, strides[0], 0, 0
    if lead == 0:
        return _NO_ROWS
    if x.is_contiguous():  # the stride of a dimension of size 1 may be anything
        return 1, 1, x.shape[lead:].numel(), 0, 0
    if lead == 2:
        return 1, x.shape[1], strides[0], 0, strides[1]
    return x.shape[1], x.shape[2], strides[0], strides[1], strides[2]


def launch_rows(
    name: str,
    x: Tensor,
    columns: int,
    *,
    residual: Tensor | None = None,
    weight: Tensor | None = None,
    scale: Tensor | None = None,
    y: Tensor | None = None,
    codes: Tensor | None = None,
    scales: Tensor | None = None,
    total: Tensor | None = None,
    epsilon: float = 0.0,
) -> None:
    """Run a kernel on the rows of x.

    Args:
        name: One of `NAMES`.
        x: `[..., hidden]`, float32, bfloat16 or float16, stride 1 in the last dimension.
        columns: Elements of a row of the result.
        residual: Added to x; like x.
        weight: `[columns]`, contiguous, in the dtype of x (for `*_float` in float32).
        scale: One float32 number: the scale of all codes; else each row gets its own.
        y: The result, in the dtype of x, with rows of its own strides.
        codes: The result as contiguous codes.
        scales: The rows' own scales, one float32 number for each.
        total: Where the sum of x and residual goes.
        epsilon: Added to the mean square.

    Raises:
        RuntimeError: SYCL refuses the launch, or an error of the device was met.
    """
    rows = x.numel() // x.shape[-1] if x.shape[-1] else x.shape[:-1].numel()
    if not rows or (not columns and scales is None):
        return
    tensors = (x, residual, weight, scale, y, codes, scales, total)
    pointers = _RowPointers(*(None if t is None else t.data_ptr() for t in tensors))
    sizes = _RowSizes(
        rows,
        columns,
        *rows_of(x),
        *(_NO_ROWS if residual is None else rows_of(residual)),
        *(_NO_ROWS if total is None else rows_of(total)),
        *(_NO_ROWS if y is None else rows_of(y)),
    )
    kernels, queue, wait = _ready(x)
    _check(name, host().irframework_sycl_rows(kernels, _NUMBERS[name], queue, wait, pointers, sizes, epsilon))


def launch_rotary(
    name: str,
    positions: Tensor,
    query: Tensor,
    key: Tensor | None,
    cache: Tensor,
    query_out: Tensor,
    key_out: Tensor | None,
    head_size: int,
    is_neox: bool,
) -> None:
    """Rotate the heads of every token into contiguous results; see `irframework.ops.rotary_embedding`.

    Raises:
        RuntimeError: SYCL refuses the launch, or an error of the device was met.
    """
    tokens, lead = positions.numel(), positions.dim()
    if not tokens:
        return
    tensors = (positions, query, key, cache, query_out, key_out)
    pointers = _RotaryPointers(*(None if t is None else t.data_ptr() for t in tensors))
    (heads, stride), (key_heads, key_stride) = (
        (0, 0) if x is None else _heads(x, lead, head_size) for x in (query, key)
    )
    sizes = _RotarySizes(
        *(tokens, cache.shape[0], cache.stride(0), cache.shape[1] // 2, head_size),
        *(heads, key_heads, stride, key_stride),
        *rows_of(query, lead),
        *(_NO_ROWS if key is None else rows_of(key, lead)),
    )
    kernels, queue, wait = _ready(query)
    switches = not is_neox, positions.dtype is torch.int64
    _check(name, host().irframework_sycl_rotary(kernels, _NUMBERS[name], queue, wait, pointers, sizes, *switches))


def _heads(x: Tensor, lead: int, head_size: int) -> tuple[int, int]:
    if x.dim() == lead + 2:
        return x.shape[-2], x.stride(-2)
    return x.shape[-1] // head_size, head_size


def _ready(x: Tensor) -> tuple[int, int, bool]:
    if _used_before_fork:
        raise RuntimeError(
            "irframework_xpu_sycl: SYCL was used before this process was forked, and cannot be used in it. Start "
            "processes by spawn (multiprocessing.set_start_method('spawn'))."
        )
    device = x.device
    return compiled(x.dtype, device), queue_of(device), device.type == "cpu"


def _check(name: str, problem: bytes | None) -> None:
    if problem is not None:
        raise RuntimeError(f"irframework_xpu_sycl: the kernel {name} was not run: {problem.decode(errors='replace')}")
