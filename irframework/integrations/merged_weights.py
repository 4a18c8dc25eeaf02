"""One weight for an MLP's gate and up projections, with no second copy of the memory.

`merge` allocates `[2 * intermediate, hidden]`, copies both weights into it and makes the two parameters views of its
halves: the same `Parameter` objects, the same `state_dict`, the same values, the same memory in total (for a moment
one MLP more; memory that was mapped from a file becomes the process's own). In-place updates (`load_state_dict`,
optimisers) go through the views. What gives a parameter other memory afterwards is seen at the next eager call, which
then uses the two projections apart; a compiled graph cannot see a swapped `.data` and needs `apply` again. With
gradients wanted, the projections are used apart as well: the merged tensor is no leaf of the parameters' graph.

Private torch API used here (read in 2.13): what `nn.Module` keeps under `_parameters`, `_modules` and in
its four `_*_hooks`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

ATTRIBUTE = "ir_merged_gate_up"


@dataclass(frozen=True, slots=True, eq=False)
class MergedWeight:
    """The memory that gate and up share, and what it was made from.

    `weight` is [2 * intermediate, hidden], `bias` [2 * intermediate] or None. They are Parameters so that the compiler
    takes their sizes as static, and live outside the module's registries so that nothing counts or saves them twice.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    gate: nn.Linear
    up: nn.Linear


def obstacle(mlp: nn.Module) -> str | None:
    """Why the weights of `mlp.gate_proj` and `mlp.up_proj` cannot be merged, or None."""
    gate: Any = mlp.gate_proj
    up: Any = mlp.up_proj
    for name, linear in (("gate_proj", gate), ("up_proj", up)):
        if type(linear) is not nn.Linear:
            return f"{name} is a {type(linear).__name__}, not a plain nn.Linear"
        if type(linear.weight) is not nn.Parameter:
            return f"{name}.weight is a {type(linear.weight).__name__}, not a plain Parameter"
        if _has_hooks(linear):
            return f"{name} has hooks, which one merged product would not call"
        if linear.weight.is_meta:
            return f"{name}.weight is on the meta device"
    if gate.weight.shape != up.weight.shape:
        return "gate_proj and up_proj differ in shape"
    if (gate.weight.dtype, gate.weight.device) != (up.weight.dtype, up.weight.device):
        return "gate_proj and up_proj differ in dtype or device"
    if (gate.bias is None) != (up.bias is None):
        return "only one of gate_proj and up_proj has a bias"
    return None


def merge(mlp: Any) -> bool:
    """Makes gate's and up's parameters views of one tensor; False, and nothing changed, where that is impossible."""
    mlp.__dict__.pop(ATTRIBUTE, None)
    if obstacle(mlp) is not None:
        return False
    gate, up = mlp.gate_proj, mlp.up_proj
    weight = _joined(gate.weight, up.weight)
    bias = None if gate.bias is None else _joined(gate.bias, up.bias)
    mlp.__dict__[ATTRIBUTE] = MergedWeight(weight, bias, gate, up)
    return True


def split(mlp: Any) -> None:
    """Gives gate and up memory of their own again, with the same values."""
    if mlp.__dict__.pop(ATTRIBUTE, None) is None:
        return
    for linear in (mlp.gate_proj, mlp.up_proj):
        for parameter in (linear.weight, linear.bias):
            if parameter is not None:
                parameter.data = parameter.data.clone()


def current(mlp: Any) -> MergedWeight | None:
    """The merged weight of `mlp` if it may be used for this call, else None."""
    merged: MergedWeight | None = mlp.__dict__.get(ATTRIBUTE)
    if merged is None:
        return None
    gate, up = merged.gate, merged.up
    weight, other = gate._parameters["weight"], up._parameters["weight"]
    modules = mlp._modules
    if modules["gate_proj"] is not gate or modules["up_proj"] is not up or weight is None or other is None:
        return None
    if torch.is_grad_enabled() and (weight.requires_grad or other.requires_grad):
        return None
    if gate._forward_hooks or gate._forward_pre_hooks or up._forward_hooks or up._forward_pre_hooks:
        return None
    if torch.compiler.is_compiling():
        return merged
    start = merged.weight.data_ptr()
    # Up's half begins after gate's: both where they were put, so nothing has replaced either.
    if weight.data_ptr() != start or other.data_ptr() != start + weight.nbytes:
        return None
    return merged


def _joined(first: nn.Parameter, second: nn.Parameter) -> nn.Parameter:
    data = torch.cat((first.data, second.data))
    size = first.shape[0]
    first.data, second.data = data[:size], data[size:]
    return nn.Parameter(data, requires_grad=False)


def _has_hooks(module: nn.Module) -> bool:
    hooks: tuple[Any, ...] = (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )
    return any(hooks) or "forward" in module.__dict__


def owners_of_memory(model: nn.Module) -> Counter[int]:
    """How many different parameters and buffers lie at each storage address: two may be one memory by intent."""
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers()) if not t.is_meta}
    return Counter(t.untyped_storage().data_ptr() for t in tensors.values())
