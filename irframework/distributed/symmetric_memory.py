"""The provider `symm_mem`: torch's own kernels for collectives in memory that the GPUs of a group share.

Owns when they may be used: on CUDA, in groups for which the program asked for it, in all processes. Without that the
provider does not exist, and ops with collectives stay what they are made of. There are three:

* `linear_reduce_scatter` and `all_gather_linear`: torch's products that send while they multiply;
* `all_reduce` of few bytes: each GPU reads what the others have (*one-shot*), which takes less time to begin.

torch has none that also norms. For kernels of plugins that do, such a group has memory of its own (`shared_memory.py`),
which `memory_of` gives out.

Private torch API, read in 2.11 and 2.13: `torch.distributed._symmetric_memory` (`empty`, `rendezvous` and
`buffer_ptrs` of what it returns; `enable_symm_mem_for_group`, which 2.11 deprecates and whose table its own products
still read), and
`torch.ops.symm_mem` (`fused_matmul_reduce_scatter`, `fused_all_gather_matmul`, `one_shot_all_reduce_copy`).
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from irframework.conditions import supports
from irframework.decision import Rejected, reject
from irframework.distributed.shared_memory import SharedMemory, bytes_of, laid_out
from irframework.errors import DeviceUnavailableError
from irframework.ops.collectives import all_reduce, group_named, group_sizes
from irframework.ops.fused_collectives import all_gather_linear, linear_reduce_scatter
from irframework.registry import registry
from irframework.untraced import run_untraced

PROVIDER = "symm_mem"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
_PRODUCTS = supports(dtype={"x": _FLOATS}, same_dtype=("x", "weight"), ndim={"x": 2}, contiguous=("x",))
_SUMS = supports(dtype={"x": (torch.bfloat16, torch.float32)}, contiguous=("x",))
_STEP = 16  # torch's one-shot sum reads so many bytes at a time

_buffers: dict[str, Tensor] = {}  # of each group that was asked for
_memories: dict[str, tuple[SharedMemory, Tensor]] = {}  # and what keeps it
_libraries: list[Library] = []


def enable_symmetric_memory(group: Any = None, one_shot_bytes: int = 1024 * 1024) -> None:
    """Let the collectives of a group use memory that its GPUs share. Call it in all its processes, once.

    What is compiled after it may fuse a linear layer with the reduce-scatter behind it or the all-gather before it.

    Args:
        group: A `ProcessGroup` of processes on one host, each with a GPU of its own, which is the current one. None:
            all processes.
        one_shot_bytes: Sums of at most so many bytes, a multiple of 16, are one-shot; 0 leaves all sums to the group's
            backend. Each GPU reads that much of each other one: with many GPUs, less may be better.

    Raises:
        DeviceUnavailableError: torch.distributed is not in use, there is no CUDA device, or torch cannot share memory
            between these devices.
    """
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized() or not torch.cuda.is_available():
        raise DeviceUnavailableError(
            "enable_symmetric_memory needs CUDA and a process group: call torch.distributed.init_process_group first."
        )
    given: Any = distributed.group.WORLD if group is None else group
    name = str(given.group_name)
    if name in _buffers:
        return
    from torch.distributed import _symmetric_memory as shared

    device = torch.device("cuda", torch.cuda.current_device())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            shared.enable_symm_mem_for_group(name)  # type: ignore[arg-type]
        buffer = shared.empty(max(one_shot_bytes, 16), dtype=torch.uint8, device=device)
        shared.rendezvous(buffer, name)  # type: ignore[arg-type]
        _memories[name] = _memory_for(shared, name, given.size(), one_shot_bytes, device)
    except RuntimeError as error:
        raise DeviceUnavailableError(
            f"The processes of group {name!r} cannot share GPU memory: {error}. They must be on one host, each with a "
            "GPU of its own."
        ) from error
    _buffers[name] = buffer[:one_shot_bytes]
    register()
    registry.changed()


def _memory_for(shared: Any, name: str, size: int, capacity: int, device: torch.device) -> tuple[SharedMemory, Tensor]:
    """Memory for kernels of plugins. Its signals are zero in all processes before any of them may send one."""
    memory: Tensor = shared.empty(bytes_of(size, capacity), dtype=torch.uint8, device=device).zero_()
    torch.cuda.synchronize(device)
    handle = shared.rendezvous(memory, name)  # returns when all have come, and all have come from the line above
    into = memory.data_ptr() - handle.buffer_ptrs[handle.rank]  # torch's memory may begin before ours, in all alike
    return laid_out([start + into for start in handle.buffer_ptrs], handle.rank, capacity, device), memory


def memory_of(group: str) -> SharedMemory | None:
    """The memory in which kernels of plugins may add up for a group; None where nobody asked for it."""
    found = _memories.get(group)
    return None if found is None else found[0]


def state() -> str:
    """What the choice of the provider rests on beside a call's arguments, for cache keys."""
    return repr([(name, buffer.numel(), group_sizes().get(name)) for name, buffer in sorted(_buffers.items())])


def register() -> None:
    """Register the provider; calling it again changes nothing."""
    if PROVIDER in linear_reduce_scatter.impls:
        return
    one_shot_all_reduce()
    for op, fn, condition in (
        (linear_reduce_scatter, product_and_scatter, _PRODUCTS & _product_in_group),
        (all_gather_linear, gather_and_product, _PRODUCTS & _product_in_group),
        (all_reduce, sum_by_one_shot, _SUMS & _sum_in_group),
    ):
        op.register_impl(PROVIDER, supports_args=condition, device_types=("cuda",))(fn)


def shares_memory(group: str) -> Rejected | bool:
    """Whether `enable_symmetric_memory` was called for a group; the reason when not."""
    if group in _buffers:
        return True
    return reject(f"group {group!r} shares no memory: irframework.distributed.enable_symmetric_memory(group)")


def _product_in_group(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, group_size: int) -> Rejected | bool:
    return shares_memory(group)


def _sum_in_group(x: Tensor, group: str, op: str = "sum") -> Rejected | bool:
    return shares_memory(group) if op == "sum" else reject("only sums are one-shot")


def product_and_scatter(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, group_size: int) -> Tensor:
    """`linear_reduce_scatter` by torch's product that sends each part as soon as it is there.

    Of a layer that is divided by columns, one process has a bias and the others have not: all must call the same torch
    op. So the bias becomes one more column of the weight.
    """
    if bias is not None:
        x = torch.cat((x, x.new_ones((x.shape[0], 1))), -1)
        weight = torch.cat((weight, bias.unsqueeze(-1)), -1)
    y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 0, group)
    return y


def gather_and_product(x: Tensor, weight: Tensor, bias: Tensor | None, group: str, group_size: int) -> Tensor:
    """`all_gather_linear` by torch's product that begins with the part that is there."""
    _, products = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight.t()], 0, group, return_A=False)
    y: Tensor = products[0]
    return y if bias is None else y + bias


def sum_by_one_shot(x: Tensor, group: str, op: str = "sum") -> Tensor:
    """`all_reduce` by reading what the others have, where that is little."""
    y: Tensor = one_shot_all_reduce()(x, group)
    return y


def one_shot_all_reduce() -> Any:
    """Define `irframework_distributed::one_shot_all_reduce(Tensor x, str group) -> Tensor` once and return it.

    How much there is to send is looked at when it runs: the choice is the same in all processes.
    """
    if not _libraries:
        library = Library("irframework_distributed", "FRAGMENT")
        library.define("one_shot_all_reduce(Tensor x, str group) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))

        def run(x: Tensor, group: str) -> Tensor:
            buffer, size = _buffers.get(group), x.numel() * x.element_size()
            if buffer is None or not 0 < size <= buffer.numel() or size % _STEP:
                begun = torch.ops._c10d_functional.all_reduce(x, "sum", group_named("all_reduce", group).group_name)
                waited: Tensor = torch.ops._c10d_functional.wait_tensor(begun)
                return waited
            place = buffer[:size].view(x.dtype).view(x.shape)
            y: Tensor = torch.ops.symm_mem.one_shot_all_reduce_copy(place, x, "sum", group)
            return y

        library.impl("one_shot_all_reduce", run_untraced(run), "CompositeExplicitAutograd")
        torch.library.register_fake(
            "irframework_distributed::one_shot_all_reduce", lambda x, group: torch.empty_like(x), lib=library
        )
        _libraries.append(library)
    return torch.ops.irframework_distributed.one_shot_all_reduce.default
