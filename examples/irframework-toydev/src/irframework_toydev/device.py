"""The device: `toy`, which is torch's PrivateUse1 under another name, in pure Python.

Owns the device's memory and how torch's ops run on it. Behind each storage of the device stands one of the CPU, with
the numbers; sizes, strides and views are torch's own. Every op without a kernel of the device runs on the CPU's memory.
A real device has a C++ extension in the place of this module.

Private torch API used here (read in 2.11 and 2.13): `_setup_privateuseone_for_python_backend`,
`torch._C._acc.create_empty_tensor`; `redispatch` of `aten.as_strided`, whose meta kernel writes only sizes and strides.
"""

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

NAME = "toy"
_libraries: list[torch.library.Library] = []


class DeviceModule:
    """What `torch.toy` is: how many devices there are, and their random numbers, which are the CPU's."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def synchronize(self, device: Any = None) -> None:
        pass

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def _is_in_bad_fork(self) -> bool:
        return False


def add_device() -> None:
    """Tell torch of the device; once per process, since torch has one such name to give away."""
    if not _libraries:
        from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

        _setup_privateuseone_for_python_backend(NAME, DeviceModule())
        every_op, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
        every_op.fallback(_run_on_the_cpu, "PrivateUse1")
        aten.impl("as_strided_", _as_strided_, "PrivateUse1")
        aten.impl("convolution_overrideable", _convolution, "PrivateUse1")
        aten.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
        _libraries.extend((every_op, aten))


def memory_of(tensor: Tensor) -> Tensor:
    """A tensor's numbers: a CPU tensor over the device's memory. What is written to it is written to the device."""
    held = torch.empty(0, dtype=tensor.dtype)
    return held.set_(tensor.untyped_storage().held, tensor.storage_offset(), tensor.shape, tensor.stride())


def on_device(held: Tensor) -> Tensor:
    """A tensor of the device over the memory of a CPU tensor, with its sizes and strides."""
    whole = torch._C._acc.create_empty_tensor((0,), held.dtype)
    whole.untyped_storage().held = held.untyped_storage()
    return _strided(whole, held.shape, held.stride(), held.storage_offset())


def _strided(tensor: Tensor, size: Any, stride: Any, offset: int) -> Tensor:
    """A tensor of the device over the memory of another, with other sizes and strides."""
    meta = torch._C.DispatchKeySet(torch._C.DispatchKey.Meta)
    viewed: Tensor = torch.ops.aten.as_strided.default.redispatch(meta, tensor, size, stride, offset)
    return viewed


def _as_strided_(tensor: Tensor, size: Any, stride: Any, offset: int | None = None) -> Tensor:
    """What `t_`, `unsqueeze_` and the like are made of."""
    tensor.data = _strided(tensor, size, stride, tensor.storage_offset() if offset is None else offset)
    return tensor


def _convolution(*args: Any) -> Any:
    """torch asks a device that it does not know for a convolution under a name that no CPU has."""
    return _run_on_the_cpu(torch.ops.aten.convolution.default, *args)


def _convolution_backward(gradient: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    op = torch.ops.aten.convolution_backward.default
    return _run_on_the_cpu(op, gradient, x, weight, [gradient.shape[1]], *rest)


def _is_ours(value: Any) -> bool:
    device = value if isinstance(value, torch.device) else getattr(value, "device", None)
    return device is not None and device.type == NAME


def _on_the_cpu(value: Any) -> Any:
    """What stands for a value of the device."""
    if not _is_ours(value):
        return value
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return memory_of(value) if isinstance(value, Tensor) else value.held


def _as_tensors(op: Any, args: tuple[Any, ...]) -> list[Any]:
    """Arguments with tensors where the op has tensors: torch hands a number in such a place over as a number."""
    others = [value for value in args if isinstance(value, Tensor)]
    wanted = [isinstance(parameter.type, torch.TensorType) for parameter in op._schema.arguments[: len(args)]]

    def tensor(number: Any) -> Tensor:
        return torch.tensor(number, dtype=torch.result_type(others[-1], number) if others else None)

    pairs = zip(args, wanted, strict=True)
    return [tensor(v) if a_tensor and isinstance(v, (int, float, complex)) else v for v, a_tensor in pairs]


def _run_on_the_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an op over the memory of its arguments; what it returns is on the device if an argument was."""
    flat, spec = pytree.tree_flatten((_as_tensors(op, args), kwargs))
    plain = [_on_the_cpu(value) for value in flat]
    pairs = [(mine, given) for mine, given in zip(plain, flat, strict=True) if isinstance(mine, Tensor)]
    memory = {mine.untyped_storage()._cdata: given for mine, given in pairs if _is_ours(given)}
    arguments, keywords = pytree.tree_unflatten(plain, spec)
    if op._opname == "_copy_from":
        arguments[1].copy_(arguments[0])
        return args[1]
    results = op(*arguments, **keywords)

    def back(result: Tensor) -> Tensor:
        base = memory.get(result.untyped_storage()._cdata)
        for mine, given in pairs:
            if mine is result:
                if base is None or given.shape != result.shape:  # `set_`, or an `out=` of another size
                    given.data = on_device(result)
                return given
        if base is None or base.dtype != result.dtype:
            return on_device(result)
        return _strided(base, result.shape, result.stride(), result.storage_offset())

    return pytree.tree_map_only(Tensor, back, results) if any(map(_is_ours, flat)) else results
