"""The calls that show in which ways an op's arguments steer its body.

Owns which calls these are: those that its input generator yields, and the first of them without each optional tensor
that none of them leaves out. Does not trace them (`skeletons.py`), nor guess any for an op without a generator.

Private torch API, read in 2.11 and 2.13: `torch.utils._python_dispatch._disable_current_modes`: graphs are compiled
under modes in which tensors hold no data.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from irframework.op import IrOp

_SAMPLE = (6, 64)


def shown_calls(op: IrOp) -> list[tuple[Any, ...]]:
    """Small calls in float32 on the CPU, in the order of the signature; none where the op has no input generator."""
    if op.input_generator is None:
        return []
    with _disable_current_modes(), torch.no_grad():
        made = op.input_generator(shape=_SAMPLE, dtype=torch.float32, device="cpu")
        calls = [op.bind(tuple(call)) for call in ([made] if isinstance(made, tuple) else made)]
        for index, (name, parameter) in enumerate(op.signature.parameters.items()):
            given = name in op.tensors and all(isinstance(call[index], Tensor) for call in calls)
            if calls and given and parameter.annotation is not Tensor:
                without = (*calls[0][:index], None, *calls[0][index + 1 :])
                try:
                    op.registered["native"].apply(without)
                except Exception:  # it needs that tensor where it has the others
                    continue
                calls.append(without)
    return calls
