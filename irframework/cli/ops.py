"""`irframework ops`: the registered ops and who implements them."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from irframework.impl import IrOpImpl
    from irframework.op import IrOp


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    parser.add_argument("op", nargs="*", help="only these ops (default: all)")


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 0, or an `IrError` that the entry turns into 1."""
    from irframework.cli.tables import print_table
    from irframework.registry import all_ops, find_op

    found = [find_op(name) for name in arguments.op] or list(all_ops().values())
    if arguments.json:
        print(json.dumps([describe(op) for op in found], indent=2))
        return 0
    for op in found:
        print(f"\n{op.name}{op.schema}")
        print(f"  declared at {op.source}{f' by plugin {op.plugin}' if op.plugin else ''}")
        if op.allow_inplace:
            print(f"  maybe_inplace gives away: {', '.join(op.activations)}")
        rows = [_cells(impl) for impl in op.impls.values()]
        print_table("Implementations", ("provider", "supported", "devices", "in place", "from", "why not"), rows)
    return 0


def describe(op: IrOp) -> dict[str, Any]:
    """An op and its implementations as plain JSON types."""
    return {
        "name": op.name,
        "schema": op.schema,
        "activations": list(op.activations),
        "allow_inplace": op.allow_inplace,
        "fuse": bool(op.fuse),
        "plugin": op.plugin,
        "source": op.source,
        "priority": op.get_priority(),
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
