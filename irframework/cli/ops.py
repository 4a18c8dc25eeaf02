"""`irframework ops`: the registered ops and who implements them.

Owns how they are shown: a matrix of all, or everything that is known of some.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from irframework.cli import op_matrix

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp


# What stands in the table for a state: short, so that five providers fit beside the longest name.
_CELLS = {"chosen": "chosen", "supported": "yes", "unsupported": "x", "no": "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("op", nargs="*", help="what is known of these ops (default: who implements which, of all)")
    parser.add_argument("--verbose", action="store_true", help="what is known of all ops, not only who implements them")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 0, or an `IrError` that the entry turns into 1."""
    from irframework.registry import all_ops, find_op

    found = [find_op(name) for name in arguments.op] or list(all_ops().values())
    if arguments.json:
        providers = op_matrix.providers_of(all_ops().values())
        print(json.dumps([describe(op, providers) for op in found], indent=2))
    elif arguments.op or arguments.verbose:
        _print_each(found)
    else:
        _print_matrix(found)
    return 0


def _print_matrix(ops: list[IrOp]) -> None:
    from irframework.cli.tables import print_groups
    from irframework.platform import current_platform

    providers = op_matrix.providers_of(ops)
    groups = {
        family: [(op.name, *(_CELLS[state] for state in op_matrix.states(op, providers).values())) for op in members]
        for family, members in op_matrix.by_family(ops).items()
    }
    print_groups(("op", *providers), groups)
    print(
        f"\nchosen  by a usual call (8x4096, float32, eager) on {current_platform().name}\n"
        "yes     can run here, for other calls or in another order\n"
        "x       cannot run here: `irframework ops OP` says why\n"
        "-       has no implementation"
    )


def _print_each(ops: list[IrOp]) -> None:
    from irframework.cli.tables import print_table

    for op in ops:
        print(f"\n{op.name}{op.schema}")
        print(f"  declared at {op.source}{f' by plugin {op.plugin}' if op.plugin else ''}")
        if op.allow_inplace:
            print(f"  maybe_inplace gives away: {', '.join(op.activations)}")
        rows = [_cells(impl) for impl in op.impls.values()]
        print_table("Implementations", ("provider", "supported", "devices", "in place", "from", "why not"), rows)


def describe(op: IrOp, providers: Iterable[str]) -> dict[str, Any]:
    """An op and its implementations as plain JSON types; what each of some providers is to it."""
    return {
        "name": op.name,
        "family": op_matrix.family_of(op),
        "schema": op.schema,
        "activations": list(op.activations),
        "allow_inplace": op.allow_inplace,
        "fuse": bool(op.fuse),
        "plugin": op.plugin,
        "source": op.source,
        "priority": op.get_priority(),
        "providers": op_matrix.states(op, providers),
        "implementations": [describe_impl(impl) for impl in op.impls.values()],
    }


def describe_impl(impl: IrOpImpl) -> dict[str, Any]:
    """An implementation as plain JSON types."""
    return {
        "provider": impl.provider,
        "supported": impl.supported,
        "unsupported_reason": impl.unsupported_reason,
        "inplace": impl.inplace,
        "device_types": None if impl.device_types is None else list(impl.device_types),
        "batch_invariant": impl.batch_invariant,
        "plugin": impl.plugin,
        "source": impl.source,
    }


def _cells(impl: IrOpImpl) -> tuple[str, ...]:
    return (
        impl.provider,
        "yes" if impl.supported else "no",
        "any" if impl.device_types is None else ", ".join(impl.device_types),
        "yes" if impl.inplace else "no",
        impl.source,
        impl.unsupported_reason or "-",
    )
