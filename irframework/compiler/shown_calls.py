"""The calls that show in which ways an op's arguments steer its body.

Owns which calls these are: those that its input generator yields, and the first of them without each optional tensor
that none of them leaves out. Does not trace them (`skeletons.py`), nor guess any for an op without a generator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from irframework.compiler.tracing import apart

if TYPE_CHECKING:
    from irframework.op import IrOp

SAMPLE = (6, 64)  # the shape of the first activation: small, and with no two sizes alike


def generated_calls(op: IrOp, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Any, ...]]:
    """Small calls on the CPU that an op's input generator yields, in the order of the signature; none without one."""
    if op.input_generator is None:
        return
    made = op.input_generator(shape=SAMPLE, dtype=dtype, device="cpu")
    for call in [made] if isinstance(made, tuple) else made:
        yield op.bind(tuple(call))


def shown_calls(op: IrOp) -> list[tuple[Any, ...]]:
    """Small calls in float32 on the CPU, in the order of the signature; none where the op has no input generator."""
    with apart(), torch.no_grad():
        calls = list(generated_calls(op))
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
