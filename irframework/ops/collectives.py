"""Meanings of the collectives: what the processes of a group send each other. Does not hold kernels.

A group is given by its name, `process_group.group_name`, so that it is a constant of a graph; the empty name means this
process alone. The size of a group is an argument of its own where a shape depends on it: caches of compiled code know
arguments, and not how many processes a name stands for. All processes of a group make the same calls in the same order.

Private torch API, read in 2.11 and 2.13: `torch.ops._c10d_functional` (`all_reduce`, `all_gather_into_tensor`,
`reduce_scatter_tensor`, `wait_tensor`), whose shape functions are in `torch.distributed._functional_collectives`, and
`torch.distributed.distributed_c10d._resolve_process_group` and `_world.pg_names`.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from irframework.declaration import register_op
from irframework.errors import ArgumentError

_ALONE = ""
_REDUCTIONS = ("sum", "max", "min", "product")


@register_op
def all_reduce(x: Tensor, group: str, op: str = "sum") -> Tensor:
    """Add up a tensor over the processes of a group, element by element: `y = sum over r of x[r]`, in every process.

    The order of the sum is the backend's. Gradients are added up over the processes as well, as if the loss were the
    sum of the losses of all of them; only `sum` has one.

    Args:
        x: `[...]`, numbers; the same shape and dtype in every process.
        group: Name of a process group; the empty name for this process alone, which gives a copy.
        op: `sum`, `max`, `min` or `product`.

    Returns:
        Like x.

    Raises:
        ArgumentError: There is no such group, x is not numbers, or `op` is another word.

    Source: MPI's Allreduce; torch's `all_reduce`.
    """
    _check("all_reduce", x, group, op)
    if group == _ALONE:
        return x.clone(memory_format=torch.contiguous_format)
    return _waited(_functional().all_reduce(x, op, group))


@register_op
def all_gather(x: Tensor, group: str, group_size: int, dim: int = 0) -> Tensor:
    """Put the tensors of the processes of a group side by side, by rank: `y = cat(x[0], ..., x[n - 1])` over `dim`.

    The gradient of a process is the sum over the processes of the gradients of its part.

    Args:
        x: `[...]`, at least one dimension; the same shape and dtype in every process.
        group: Name of a process group; the empty name for this process alone, which gives a copy.
        group_size: How many processes the group has.
        dim: The dimension that grows; negative ones count from the last.

    Returns:
        Like x, with `group_size` times as many elements along `dim`.

    Raises:
        ArgumentError: There is no such group or it has another size, or x has no such dimension.

    Source: MPI's Allgather; torch's `all_gather_into_tensor`.
    """
    _check("all_gather", x, group, "sum", group_size)
    dim = _dimension("all_gather", x, dim)
    if group == _ALONE:
        return x.clone(memory_format=torch.contiguous_format)
    gathered = _waited(_functional().all_gather_into_tensor(x.contiguous(), group_size, group))
    if dim == 0:
        return gathered
    parts: Tensor = gathered.unflatten(0, (group_size, x.shape[0]))
    return parts.movedim(0, dim).flatten(dim, dim + 1).contiguous()


@register_op
def reduce_scatter(x: Tensor, group: str, group_size: int, dim: int = 0, op: str = "sum") -> Tensor:
    """Add up a tensor over the processes of a group, and leave each process its part, by rank.

    `y = chunk(sum over r of x[r], n)[rank]` over `dim`. The gradient is gathered; only `sum` has one.

    Args:
        x: `[...]`, numbers; the same shape and dtype in every process. Its size along `dim` is a multiple of the
            group's.
        group: Name of a process group; the empty name for this process alone, which gives a copy.
        group_size: How many processes the group has.
        dim: The dimension that is divided; negative ones count from the last.
        op: `sum`, `max`, `min` or `product`.

    Returns:
        Like x, with one in `group_size` elements along `dim`.

    Raises:
        ArgumentError: There is no such group or it has another size, x has no such dimension or is not numbers, the
            group's size does not divide it, or `op` is another word.

    Source: MPI's Reduce_scatter; torch's `reduce_scatter_tensor`.
    """
    _check("reduce_scatter", x, group, op, group_size)
    dim = _dimension("reduce_scatter", x, dim)
    if group == _ALONE:
        return x.clone(memory_format=torch.contiguous_format)
    size = x.shape[dim]
    if type(size) is int:
        if size % group_size:
            raise ArgumentError(
                f"Op 'reduce_scatter': dimension {dim} of argument 'x' of shape {tuple(x.shape)} has {size} elements, "
                f"which the {group_size} processes of group {group!r} cannot divide evenly. Pad it."
            )
    else:  # the one guard that the op's meaning needs
        torch._check(size % group_size == 0, lambda: "reduce_scatter: the group's size must divide the dimension")
    first = x.movedim(dim, 0).contiguous()
    part = _waited(_functional().reduce_scatter_tensor(first, op, group_size, group))
    return part.movedim(0, dim).contiguous()


def _functional() -> Any:
    import torch.distributed._functional_collectives  # its shape functions; takes long to import

    return torch.ops._c10d_functional


def _waited(pending: Tensor) -> Tensor:
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(pending)
    return waited


def _check(op: str, x: Tensor, group: str, reduction: str, group_size: int | None = None) -> None:
    if reduction not in _REDUCTIONS:
        raise ArgumentError(f"Op {op!r}: op must be one of {', '.join(map(repr, _REDUCTIONS))}, got {reduction!r}.")
    if x.dtype == torch.bool or x.is_complex():
        raise ArgumentError(f"Op {op!r}: argument 'x' must be numbers, it has dtype {x.dtype}.")
    if group_size is not None and group_size < 1:
        raise ArgumentError(f"Op {op!r}: group_size={group_size} must be at least 1.")
    size = 1 if group == _ALONE else int(group_named(op, group).size())
    if group_size is not None and group_size != size:
        who = "this process alone" if group == _ALONE else f"group {group!r}"
        raise ArgumentError(f"Op {op!r}: group_size={group_size}, but {who} has size {size}.")


def group_named(op: str, name: str) -> Any:
    """Return the process group of a name.

    Raises:
        ArgumentError: There is none; names the op.
    """
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        raise ArgumentError(
            f"Op {op!r}: there is no process group {name!r}, torch.distributed is not initialised. Call "
            "torch.distributed.init_process_group first; the empty name means this process alone."
        )
    from torch.distributed import distributed_c10d as c10d

    resolve: Any = c10d._resolve_process_group  # type: ignore[attr-defined]
    try:
        return resolve(name)
    except RuntimeError:
        raise ArgumentError(
            f"Op {op!r}: there is no process group {name!r}. Give the name of one, process_group.group_name; that of "
            f"all processes is {distributed.group.WORLD.group_name!r}."  # type: ignore[union-attr]
        ) from None


def group_sizes() -> dict[str, int]:
    """Return the sizes of all process groups of this process, by name; none where torch.distributed is not in use."""
    from torch import distributed

    if not distributed.is_available() or not distributed.is_initialized():
        return {}
    names: Any = distributed.distributed_c10d._world.pg_names
    return {name: group.size() for group, name in sorted(names.items(), key=lambda item: str(item[1]))}


def _dimension(op: str, x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ArgumentError(f"Op {op!r}: dim={dim} is no dimension of argument 'x' of shape {tuple(x.shape)}.")
    return dim % x.dim()


def _only_of_sums(op: str, reduction: str) -> None:
    if reduction != "sum":
        raise ArgumentError(f"Op {op!r}: op={reduction!r} has no gradient, only 'sum' has. Call it under no_grad.")


@all_reduce.register_backward
def _all_reduce_backward(grads: tuple[Tensor, ...], x: Tensor, group: str, op: str = "sum") -> tuple[Tensor]:
    _only_of_sums("all_reduce", op)
    return (all_reduce(grads[0], group),)


@all_gather.register_backward
def _all_gather_backward(
    grads: tuple[Tensor, ...], x: Tensor, group: str, group_size: int, dim: int = 0
) -> tuple[Tensor]:
    return (reduce_scatter(grads[0], group, group_size, dim),)


@reduce_scatter.register_backward
def _reduce_scatter_backward(
    grads: tuple[Tensor, ...], x: Tensor, group: str, group_size: int, dim: int = 0, op: str = "sum"
) -> tuple[Tensor]:
    _only_of_sums("reduce_scatter", op)
    return (all_gather(grads[0], group, group_size, dim),)


@all_reduce.register_input_generator
def _all_reduce_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    """Of a process alone: calls of several processes need them."""
    x = torch.randn(shape, **options)
    yield x, _ALONE
    yield x, _ALONE, "max"


@all_gather.register_input_generator
def _all_gather_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, **options)
    yield x, _ALONE, 1
    yield x, _ALONE, 1, -1


@reduce_scatter.register_input_generator
def _reduce_scatter_inputs(shape: tuple[int, ...], **options: Any) -> Iterator[tuple[Any, ...]]:
    x = torch.randn(shape, **options)
    yield x, _ALONE, 1
    yield x, _ALONE, 1, -1, "min"
