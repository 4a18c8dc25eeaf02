"""Classes of calls that a dispatcher has met, each recognised by one question of torch.

Asking tensors for their dtypes, devices, sizes and gradients one by one takes longer than all else in a dispatcher.
torch has one function for Dynamo's guards that compares several tensors with what others were: class, dispatch keys as
the thread sees them, dtype, device and its number, whether gradients are needed, rank, and those sizes and strides that
are asked for. The first size is not asked for where it is a batch's. What is the same for a whole class need not be
asked again: this module owns making such a class from one call of it, and saying which conditions it settles.

The keys tell more than the tensors do: a dispatch mode of the user's, a torch.func transform, tracing, inference mode,
autocast on the tensors' device are in them, and so are conjugated, negated and functorch's tensors. They do not tell of
infrastructure modes (fake tensors, tracing by make_fx), forward-mode differentiation, the gradient mode, and autocast
on other devices: a dispatcher asks for those.

An inference tensor in inference mode is the only one without the key of views and in-place writes, if an ordinary
tensor beside it has that key: without one the thread may be below that key, as the body of a custom op is. Such a
tensor is a view of nothing and counts no writes, so neither need be asked or done.

Does not own the text of dispatchers: see `dispatcher_text.py`.

Private torch API used here (read in 2.11 and 2.13): `torch._C._dynamo.guards.TensorGuards`; without it no class is ever
known, and all is asked one by one. `torch._C._dispatch_tls_local_exclude_set`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from irframework.conditions import Check

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp

_TensorGuards: Any = getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), "TensorGuards", None)


@dataclass(frozen=True, slots=True)
class KnownCalls:
    """A class of calls.

    Attributes:
        guard: Whether tensors are of the class; asked with those named in `present`, in order.
        present: The op's tensor parameters that are not None.
        absent: Those that are.
        device: Type of the device.
        candidates: Number of the dispatcher's list of candidates.
        needs_grad: Whether a tensor requires gradients: then calls are plain in no-grad mode only.
        inference: Whether it was met in inference mode.
        untracked: Whether all that is given away are inference tensors; then the guard says that inference mode is on.
        ordinary: An ordinary tensor that the guard is asked with last, where none of the others is one.
        settled: By its text, a test that means the same for the whole class: what is left of it, where "" is nothing
            since it holds, and None says that it does not.
    """

    guard: Callable[..., bool]
    present: tuple[str, ...]
    absent: tuple[str, ...]
    device: str
    candidates: int
    needs_grad: bool
    inference: bool
    untracked: bool
    ordinary: Tensor | None
    settled: dict[str, str | None]


def known_from(
    op: "IrOp", donated: bool, args: tuple[Any, ...], candidates: int, impls: Iterable["IrOpImpl"]
) -> KnownCalls | None:
    """Return the class of a call that a dispatcher's plain path takes, outside any torch.func transform.

    Args:
        op: The op.
        donated: Whether it is a call of `maybe_inplace`.
        args: All arguments in the order of the signature.
        candidates: Number of the dispatcher's list of candidates.
        impls: That list.

    Returns:
        None where there is no such class: a layout other than strided, one tensor given twice, memory that may not be
        overwritten, or a state of the thread that the keys would not tell from the usual one.
    """
    values = op.named(args)
    tensors = {name: values[name] for name in op.tensors if values[name] is not None}
    given = [tensors[name] for name in op.activations if name in tensors] if donated else []
    inference = torch.is_inference_mode_enabled()
    if (
        _TensorGuards is None
        or not tensors
        or len({id(value) for value in tensors.values()}) < len(tensors)
        or any(value.layout is not torch.strided for value in tensors.values())
        or any(value.requires_grad or (value.is_inference() and not inference) for value in given)
        or (_excluded("AutogradFunctionality") and not inference)  # by hand: inference mode does so, too
    ):
        return None
    layouts = {name: _Layout.of(value) for name, value in tensors.items()}
    checks = [check for impl in impls for check in impl.checks]
    if donated:
        checks += [dense(name) for name in op.activations if name in tensors]
    settled: dict[str, str | None] = {}
    for check in checks:
        if all(name in op.tensors for name in check.parameters):
            rest = _settled(check, values, layouts)
            if rest != check.test:
                settled[check.test] = rest
    untracked = bool(given) and inference and all(value.is_inference() for value in given)
    untracked = untracked and not _excluded("ADInplaceOrView")  # or else ordinary tensors would look like them
    asked = list(tensors.values())
    sizes, strides = [layout.sizes for layout in layouts.values()], [layout.strides for layout in layouts.values()]
    ordinary = None
    if untracked and all(value.is_inference() for value in asked):
        with torch.inference_mode(False):
            ordinary = torch.empty((), device="cpu")
        asked.append(ordinary)
        sizes.append([])
        strides.append([])
    guard = _TensorGuards(*asked, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return KnownCalls(
        guard.check,
        tuple(tensors),
        tuple(name for name in op.tensors if name not in tensors),
        next(iter(tensors.values())).device.type,
        candidates,
        any(value.requires_grad for value in tensors.values()),
        inference,
        untracked,
        ordinary,
        settled,
    )


def dense(name: str) -> Check:
    """Return the test that a tensor is contiguous."""
    return Check(f"{name}.is_contiguous()", "", (name,), "dense")


def _excluded(key: str) -> bool:
    """Whether the thread leaves out a dispatch key of its tensors."""
    excluded: bool = torch._C._dispatch_tls_local_exclude_set().has(getattr(torch._C.DispatchKey, key))
    return excluded


@dataclass(slots=True)
class _Layout:
    """The sizes and strides that one tensor of a class has, and those of them that all have: the others are None."""

    tensor: Tensor
    sizes: list[int | None]
    strides: list[int | None]

    @classmethod
    def of(cls, tensor: Tensor) -> "_Layout":
        return cls(tensor, [None] * tensor.dim(), [None] * tensor.dim())

    def fix_last(self) -> None:
        if self.sizes:
            self.sizes[-1] = self.tensor.shape[-1]

    def fix_all(self) -> None:
        self.sizes[:] = self.tensor.shape

    def fix_row(self) -> bool:
        """Fix a last stride of 1."""
        if not self.strides or self.tensor.stride(-1) != 1:
            return False
        self.strides[-1] = 1
        return True

    def fix_dense(self) -> bool:
        """Fix all but the first size where that makes a tensor contiguous, however many rows it has."""
        if self.tensor.dim() > 2 or not self.has_usual_strides():
            return False
        self.sizes[1:] = self.tensor.shape[1:]
        self.strides[:] = self.tensor.stride()
        return True

    def has_usual_strides(self) -> bool:
        """Contiguous tensors may have others along dimensions of size 1, which say nothing of larger ones."""
        step = 1
        for size, stride in zip(reversed(self.tensor.shape), reversed(self.tensor.stride()), strict=True):
            if stride != step:
                return False
            step *= max(size, 1)
        return True


def _settled(check: Check, values: dict[str, Any], layouts: dict[str, _Layout]) -> str | None:
    """Return what is left of a test about tensors in the class of a call; fix what of them that rests on."""
    holds = bool(eval(check.test, {"torch": torch}, values))
    present = [layouts[name] for name in check.parameters if name in layouts]
    answer = "" if holds else None
    if check.rests_on == "kind" or len(present) < len(check.parameters):  # of a tensor that is not there all holds
        return answer
    if check.rests_on == "last":
        for layout in present:
            layout.fix_last()
        return answer
    if check.rests_on == "sizes":
        for layout in present:
            layout.fix_all()
        return answer
    # The others may hold for one number of rows and not for another: only what holds for all is settled.
    if holds and check.rests_on == "row" and all(layout.fix_row() for layout in present):
        return ""
    if holds and check.rests_on == "dense" and all(layout.fix_dense() for layout in present):
        return ""
    if holds and check.rests_on == "shape" and _differ_in_rows_only([layout.tensor for layout in present]):
        for layout in present:
            layout.sizes[1:] = layout.tensor.shape[1:]
        return f"{check.parameters[0]}.nbytes == {check.parameters[1]}.nbytes"
    return check.test


def _differ_in_rows_only(tensors: list[Tensor]) -> bool:
    """Whether tensors of one shape have, in their class, as many rows exactly if they have as many bytes."""
    first = tensors[0]
    return first.dim() in (1, 2) and 0 not in first.shape[1:] and len({tensor.itemsize for tensor in tensors}) == 1
