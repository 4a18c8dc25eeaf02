"""What an implementation must keep to, and the words for each way of breaking it.

Owns the rules by name, and what is said and advised about each. Lowering (`compiler/lowering.py`) holds every compiled
implementation to them; `irframework check` (`testing/contracts.py`) asks on demand. Does not look at an implementation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp, Tolerance


@dataclass(frozen=True, slots=True)
class Breach:
    """One way of breaking the contract.

    Attributes:
        rule: `writes`, `count`, `output`, `strides`, `offset`, `sharing`, `in_place`, `values`, `raises`, `fake`,
            `out_overload` or `compiled`.
        what: What the implementation does, without its subject: `overwrites its argument 'x'`.
        advice: What to do about it, one or two sentences.
    """

    rule: str
    what: str
    advice: str


def titled(impl: "IrOpImpl") -> str:
    """Who broke the contract, as the beginning of a sentence."""
    return impl.described[0].upper() + impl.described[1:]


def dtype_and_shape(value: Tensor) -> str:
    """What most mistakes about a tensor are about: `float32[4, 8]`."""
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


def described_tensor(value: Tensor) -> str:
    """A tensor without its values: `float32[4, 8] strides (8, 1) on cpu`."""
    offset = value.storage_offset()
    inside = f" at offset {offset}" if isinstance(offset, int) and offset else ""
    strides = ", ".join(map(str, value.stride()))
    return f"{dtype_and_shape(value)} strides ({strides}){inside} on {value.device}"


def described_call(op: "IrOp", values: Sequence[Any]) -> str:
    """A call without the values of its tensors."""
    parts = []
    for name, value in zip(op.signature.parameters, values, strict=False):
        parts.append(f"{name}={described_tensor(value) if isinstance(value, Tensor) else repr(value)}")
    return f"{op.name}({', '.join(parts)})"


def write(impl: "IrOpImpl", argument: str) -> Breach | None:
    """Only an in-place implementation may write, and only to what a caller can give away."""
    if not impl.inplace:
        advice = "Register it with inplace=True, or let it write to a tensor of its own."
        return Breach("writes", f"overwrites its argument {argument!r}", advice)
    if argument in impl.op.activations:
        return None
    return Breach(
        "writes",
        f"overwrites its argument {argument!r}, which is no activation of the op",
        f"Only {', '.join(map(repr, impl.op.activations))} may be overwritten.",
    )


def write_beside(argument: str) -> Breach:
    """Memory around a tensor is somebody else's."""
    return Breach(
        "writes",
        f"writes to memory beside its argument {argument!r}",
        "The tensor is a part of a larger one. Keep to its sizes and strides.",
    )


def closed_over_write(by: str) -> Breach:
    """What an implementation closes over is no argument: nobody knows that it changes."""
    return Breach(
        "writes",
        f"{by} a tensor that the implementation closes over",
        "Let it allocate its work space, or pass it in as an argument.",
    )


def out_overload(op: object, problem: str) -> Breach:
    """Compiled code calls the overload in the op's place, so both compute the same."""
    return Breach(
        "out_overload",
        f"calls {op}, whose .out overload {problem}",
        "Compiled code calls the overload instead of the op: it must fill every tensor that it is given with what the "
        "op returns, and touch nothing else.",
    )


def count(found: int, is_tuple: bool, wanted: int, wants_tuple: bool) -> Breach | None:
    """As many tensors as native returns, and a tuple exactly where native returns one."""
    if found == wanted and is_tuple == wants_tuple:
        return None
    return Breach("count", f"returns {_tensors(found, is_tuple)}", f"The op returns {_tensors(wanted, wants_tuple)}.")


def no_tensors(kinds: Sequence[str], wanted: int, wants_tuple: bool) -> Breach:
    """Tensors, and nothing else."""
    return Breach("count", f"returns {', '.join(kinds)}", f"The op returns {_tensors(wanted, wants_tuple)}.")


def _tensors(number: int, is_tuple: bool) -> str:
    return f"a tuple of {number} tensors" if is_tuple else "one tensor"


def output(index: int, got: Tensor, want: Tensor) -> Breach:
    """Same dtype, device and shape as the op's own."""
    what = f"returns {described_tensor(got)} as output {index}"
    return Breach("output", what, f"The op returns {described_tensor(want)}.")


def strides(index: int, got: Tensor, want: Sequence[Any]) -> Breach:
    """An output is contiguous."""
    what = f"returns output {index} with strides {tuple(got.stride())} where the op promises {tuple(want)}"
    return Breach("strides", what, "A copy repairs it. Return a contiguous tensor.")


def offset(index: int, got: Tensor) -> Breach:
    """An output begins where its storage begins."""
    what = f"returns output {index} as a part of a larger tensor, at offset {got.storage_offset()} of its storage"
    return Breach("offset", what, "A copy repairs it. Return a tensor of its own.")


def sharing(index: int, other: str) -> Breach:
    """An output is nobody else's memory."""
    what = f"returns output {index} in the memory of {other}"
    return Breach("sharing", what, "A copy repairs it. Return a tensor of its own.")


def not_in_place(impl: "IrOpImpl") -> Breach:
    """An implementation that is declared in place must work in place."""
    return Breach(
        "in_place",
        f"is registered with inplace=True, and neither overwrites nor returns {' or '.join(impl.op.activations)}",
        "Each call pays for a copy that nobody needs. Register it without inplace=True.",
    )


def values(index: int, distance: float, dtype: torch.dtype, tolerance: "Tolerance") -> Breach:
    """A result is near native's."""
    what = f"returns an output {index} that is up to {distance:.3g} away from native's"
    return Breach("values", what, f"The op allows {tolerance.atol} + {tolerance.rtol} * |native| in {dtype}.")


def raises(error: Exception) -> Breach:
    """What an implementation takes, it computes."""
    what = f"raises {type(error).__name__} where native does not: {_first_line(error)}"
    return Breach("raises", what, "Let supports_args state what it takes.")


def raises_without_data(error: Exception) -> Breach:
    """An implementation can be traced."""
    what = f"raises {type(error).__name__} for tensors without data: {_first_line(error)}"
    advice = "It cannot be compiled. Give its kernel to torch as an operator with a function for shapes."
    return Breach("fake", what, advice)


def differs_without_data(planned: str, found: str) -> Breach:
    """What is planned without data is what comes with data."""
    what = f"returns {planned} for tensors without data, and {found} for others"
    return Breach("fake", what, "Compiled code is planned by the former. Correct the function for the kernel's shapes.")


def not_lowered(impl: "IrOpImpl", error: Exception) -> Breach:
    """The compiler takes it: what it refuses is said in its own words."""
    return Breach("compiled", str(error).removeprefix(f"{titled(impl)} ").rstrip("."), "It cannot be compiled.")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")
