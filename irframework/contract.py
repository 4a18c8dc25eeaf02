"""What an implementation must keep to, and the words for each way of breaking it.

Owns the rules by name, and what is said and advised about each. Lowering (`compiler/lowering.py`) holds every compiled
implementation to some of them; the conformance kit (`testing/`) asks about all. Does not look at an implementation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp
    from irframework.tolerance import Tolerance


RULES: dict[str, str] = {
    "raises": "a call that it takes is computed: it raises nothing where native raises nothing",
    "count": "it returns as many tensors as native, as a tuple exactly where native does",
    "output": "each output has native's shape, dtype and device",
    "strides": "each output is contiguous, or laid out as native's",
    "offset": "each output begins where its storage begins",
    "sharing": "no output lies in memory of an argument, of another output or of an earlier call",
    "writes": "nothing is overwritten but, with inplace=True, the activations",
    "in_place": "with inplace=True it works in place",
    "values": "results agree with native computed in float64, within the op's tolerance",
    "special_values": "so do results for inf, nan, denormal and large numbers, and for constant rows",
    "fake": "tensors without data give outputs of the same shape, dtype, strides and place as real ones",
    "predicate_guards": "supports_args does not look at the number of rows",
    "predicate_fakes": "supports_args gives real tensors and tensors without data the same answer",
    "predicate_raises": "supports_args answers, and raises nothing",
    "deterministic": "the same call gives the same bits again",
    "batch_invariant": "with batch_invariant=True a row's bits do not depend on the other rows",
    "threads": "several threads, each on a stream of its own where there are streams, get the same bits as one",
    "streams": "on a CUDA stream it waits for what is queued there before it, and works there",
    "graph_capture": "a CUDA graph captures it, and gives the results for new data when it is replayed",
    "opcheck": "torch.library.opcheck finds nothing, neither in the op with this provider nor in its own torch ops",
    "out_overload": "the .out overloads of its own torch ops do what the ops do",
    "compiled": "the compiler can lower it",
    "checks_tensors": "with checks_tensors=True it refuses what overlaps memory that it overwrites, before it writes",
    "overhead": "a call through the framework costs at most 100 us more than calling the function itself twice",
    "ends": "the check comes to its end: no crash, no hang",
}
"""The promises by name, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Breach:
    """One way of breaking the contract.

    Attributes:
        rule: Which promise: a name in `RULES`.
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


_LOOKS = "Calls ask for storages and shapes only where it raised. Look at all tensors before anything is written, or "


def takes_what_it_should_refuse(what: str) -> Breach:
    """An implementation that is declared to look at tensors itself must refuse what overlaps, and other shapes."""
    return Breach(
        "checks_tensors",
        f"is registered with checks_tensors=True, and takes {what}",
        f"{_LOOKS}register it without.",
    )


def writes_what_it_refuses(name: str, what: str) -> Breach:
    """It must do so before it writes anything: the call goes on with the same tensors."""
    return Breach(
        "checks_tensors",
        f"refuses {what} after it has written to {name!r}",
        f"{_LOOKS}register it without checks_tensors=True.",
    )


def values(index: int, distance: float, wrong: str, dtype: torch.dtype, tolerance: "Tolerance") -> Breach:
    """A result is near native's."""
    what = f"returns an output {index} that is up to {distance:.3g} away from native's, in {wrong} elements"
    return Breach("values", what, _allowed(dtype, tolerance))


def special_values(index: int, distance: float, wrong: str, dtype: torch.dtype, tolerance: "Tolerance") -> Breach:
    """A result is near native's for numbers that kernels forget, too."""
    what = f"returns an output {index} that is up to {distance:.3g} away from native's, in {wrong} elements"
    return Breach("special_values", what, f"Native is the meaning for such numbers, too. {_allowed(dtype, tolerance)}")


def _allowed(dtype: torch.dtype, tolerance: "Tolerance") -> str:
    return (
        f"The op allows {tolerance.atol} + {tolerance.rtol} * |native| in {dtype}, around native in float64 or in the "
        "call's own dtype."
    )


def raises(error: Exception) -> Breach:
    """What an implementation takes, it computes."""
    what = f"raises {type(error).__name__} where native does not: {_first_line(error)}"
    return Breach("raises", what, "Let supports_args state what it takes.")


def native_raises(impl: "IrOpImpl", error: Exception) -> Breach:
    """What an implementation is compared with, can be computed."""
    what = f"cannot be compared: native raises {type(error).__name__}: {_first_line(error)}"
    return Breach("raises", what, f"Native is the meaning of op {impl.op.name!r}: it must compute each call it allows.")


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


def sharing_with_earlier(index: int) -> Breach:
    """An output is the caller's for as long as it is kept."""
    what = f"returns output {index} in the memory of what an earlier call returned"
    return Breach("sharing", what, "The earlier caller's result is overwritten. Return a tensor of its own.")


def guard(message: str) -> Breach:
    """The choice holds for every number of rows."""
    return Breach(
        "predicate_guards",
        f"looks at the number of rows in supports_args: {message.rstrip('.')}",
        "The answer is compiled in. Look at dtypes, ranks, strides, the length of rows and numbers only.",
    )


def fickle(real: str, other: str, whose: str) -> Breach:
    """What is decided without data is decided with it."""
    what = f"says {real} in supports_args for tensors, and {other} for the same ones {whose}"
    return Breach("predicate_fakes", what, "Look at nothing that only data has, such as its address.")


def predicate_raises(reason: str) -> Breach:
    """A predicate that raises is taken for no, and hides what its author did not think of."""
    return Breach("predicate_raises", f"answers no where {reason}", "It is taken for no. Let it answer with ir.reject.")


def unlike_itself(rule: str, when: str) -> Breach:
    """The same call has one result."""
    return Breach(rule, f"returns other bits {when}", _STEADY[rule])


def raises_when(rule: str, when: str, error: BaseException) -> Breach:
    """What is computed alone is computed there, too."""
    what = f"raises {type(error).__name__} {when}: {_first_line(error)}"
    return Breach(rule, what, _STEADY[rule])


_STEADY = {
    "deterministic": "Results that differ cannot be compared or reproduced. Do without atomics on floating-point "
    "numbers, random numbers and memory that nothing was written to.",
    "batch_invariant": "Choose the order of a row's sums by its length alone, or drop batch_invariant=True.",
    "threads": "Let each call allocate its work space; keep nothing that changes in a global.",
    "streams": "Launch on the current stream of the arguments' device, and let nothing else wait.",
    "graph_capture": "Launch on the current stream; no synchronisation, no .item(), no copy to the host; keep the "
    "addresses of no tensors.",
}


def hangs(rule: str, when: str, seconds: float) -> Breach:
    """A call comes back."""
    return Breach(rule, f"does not come back within {seconds:.0f} s {when}", _STEADY[rule])


def registered_wrongly(what: str, problem: str) -> Breach:
    """What `torch.library.opcheck` says, in its own words."""
    advice = "The torch op behind it is not what its schema or its function for shapes says."
    return Breach("opcheck", f"fails torch.library.opcheck on {what}: {problem}", advice)


def slow_dispatch(framework: float, direct: float) -> Breach:
    """Deciding a call is nearly free."""
    what = f"takes {framework:.0f} us a call through the framework, and {direct:.0f} us when it is called itself"
    advice = (
        "A slow supports_args function, or outputs that must be repaired by a copy. State conditions as ir.supports."
    )
    return Breach("overhead", what, advice)


def ended(how: str) -> Breach:
    """A kernel that ends the process takes the program with it."""
    return Breach("ends", how, "The last call that it was tried on was the one named here, or the one after it.")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")
