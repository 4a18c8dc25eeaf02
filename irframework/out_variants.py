"""Kernels that write into outputs they are given: a functional torch op with an overload `.out`.

Owns the declaration of such overloads, and what differs between torch versions about them. A compiler can plan memory
for outputs that it allocates itself; `compiler/planned_outputs.py` sees to that.

Our overloads return nothing and have no tag. That works the same in torch 2.11 and 2.13, for symbolic sizes and in C++
wrapper code too. Torch 2.13 has a convention of its own: an overload tagged `torch.Tag.out` (`out_variant` in 2.11,
where Inductor does not look at it) that returns what it wrote. Inductor 2.13 then rewrites every call of the functional
op by itself, also calls of which it makes an error. Overloads that others declared so are found here as well.

Private torch API used here (read in 2.11 and 2.13): `torch._library._out_variant.to_out_variant`.
"""

from typing import Any

import torch
from torch.library import Library

from irframework.errors import InvalidOpError


def define_out_variant(library: Library, name: str) -> Any:
    """Give a functional torch op of a plugin an overload `.out`, which a compiler can hand planned memory to.

    The overload takes the op's arguments and, by keyword, one tensor to write to for each result: `out`, or `out0`,
    `out1`, ... if there are several. It returns nothing. Its kernel is registered as any other, under `NAME.out`, in
    Python or in C++; compiled code gives it tensors of the shapes, dtypes and strides that the op's fake
    implementation says.

    Args:
        library: The library that defines the op, or a fragment of its namespace; keep it alive.
        name: The op's name, without namespace and overload.

    Returns:
        The overload.

    Raises:
        InvalidOpError: There is no such op, it writes to its arguments, or it returns something else than tensors.
    """
    qualified = f"{library.ns}::{name}"
    try:
        schema = getattr(getattr(torch.ops, library.ns), name).default._schema
    except AttributeError:
        raise InvalidOpError(
            f"define_out_variant: there is no torch op {qualified}. Define the functional op first."
        ) from None
    if schema.is_mutable or not schema.returns or any(str(r.type) != "Tensor" for r in schema.returns):
        raise InvalidOpError(
            f"define_out_variant: {schema} is not functional. Only an op that returns fresh tensors, and writes to "
            "none of its arguments, can have outputs planned for it."
        )
    outputs = ["out"] if len(schema.returns) == 1 else [f"out{index}" for index in range(len(schema.returns))]
    kinds = [f"Tensor({chr(ord('a') + index)}!)" for index in range(len(outputs))]
    arguments = str(schema).partition("(")[2].rpartition(") -> ")[0]
    separator = ", " if any(argument.kwarg_only for argument in schema.arguments) else ", *, "
    written = ", ".join(f"{kind} {output}" for kind, output in zip(kinds, outputs, strict=True))
    library.define(f"{name}.out({arguments}{separator if arguments else '*, '}{written}) -> ()")
    torch.library.register_fake(f"{qualified}.out", lambda *args, **kwargs: None, lib=library)
    packet = getattr(getattr(torch.ops, library.ns), name)
    _declared[packet.default] = packet.out
    return packet.out


_declared: dict[Any, Any] = {}


def outputs_of(overload: Any) -> list[str]:
    """Return the names of the arguments that an overload writes its outputs to, in their order."""
    return [argument.name for argument in overload._schema.arguments if argument.alias_info is not None]


def out_variant_of(target: Any) -> Any:
    """Return the overload that `define_out_variant` declared for a functional op; else None."""
    return _declared.get(target)


def rewritten_by_torch(target: Any) -> Any:
    """Return the overload that Inductor puts in the place of a functional op by itself; else None."""
    if not hasattr(torch.Tag, "out"):  # before 2.13 it does not
        return None
    if not isinstance(target, torch._ops.OpOverload) or target.namespace in ("aten", "prims"):
        return None
    from torch._library._out_variant import to_out_variant

    return None if target._schema.is_mutable or target._schema.name.endswith("_") else to_out_variant(target)
