"""Trying the `.out` overloads of the torch ops that an implementation calls: compiled code calls them instead.

Owns watching for such calls, and comparing what an overload leaves in the tensors it is given with what the functional
op returns. Does not own the words (`irframework/contract.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from irframework.memory import place_of
from irframework.out_variants import out_variant_of, outputs_of


class OutOverloads(TorchDispatchMode):
    """While active, each call of a torch op that has an `.out` overload is made a second time, through the overload.

    Args:
        found: Called with the functional op and what its overload does wrong, or None.
    """

    supports_higher_order_operators = True

    def __init__(self, found: Callable[[Any, str | None], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a torch op, and its overload beside it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        overload = out_variant_of(func)
        if overload is not None:
            results = [result] if isinstance(result, Tensor) else list(result)
            self.found(func, _problem(overload, args, kwargs, results))
        return result


def _problem(overload: Any, args: Sequence[Any], kwargs: dict[str, Any], results: list[Tensor]) -> str | None:
    given = [_poisoned(result) for result in results]
    handed = [tensor for tensor in (*args, *kwargs.values()) if isinstance(tensor, Tensor)]
    before = [tensor.clone() for tensor in handed]
    places = [place_of(tensor) for tensor in given]
    names = outputs_of(overload)
    try:
        overload(*args, **kwargs, **dict(zip(names, given, strict=True)))
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    for name, place, tensor, result in zip(names, places, given, results, strict=True):
        if place_of(tensor) != place:
            return f"gives {name!r} another size or memory"
        if not torch.allclose(tensor, result, rtol=0, atol=0, equal_nan=True):
            return f"leaves other values in {name!r} than the op returns"
    for tensor, earlier in zip(handed, before, strict=True):
        if not torch.allclose(tensor, earlier, rtol=0, atol=0, equal_nan=True):
            return "overwrites an argument"
    return None


def _poisoned(like: Tensor) -> Tensor:
    """A tensor of the same layout that holds what no kernel would leave there."""
    if like.is_floating_point() or like.is_complex():
        return torch.full_like(like, float("nan"))
    return torch.full_like(like, True if like.dtype is torch.bool else torch.iinfo(like.dtype).max)
