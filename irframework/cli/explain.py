"""`irframework explain`: which implementation one call would get, and why not the others.

Owns the command's options. The decision is the core's, on arguments without data. What is fused in a model
(`--fusions`) is `fusions.py`'s.
"""

from __future__ import annotations

import argparse
import json
import math

from irframework.cli.dtype_names import DTYPE_NAMES, dtype_called


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options, one `--ir-op-priority.<op>` per op included."""
    from irframework.config import add_cli_args
    from irframework.priority import MODES

    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("op", nargs="?", help="name of the op, e.g. rms_norm")
    asked.add_argument(
        "--fusions",
        metavar="MODEL",
        help="instead: what is fused in a model's forward (MODEL as for `irframework run`)",
    )
    parser.add_argument(
        "--patched", action="store_true", help="with --fusions: put IR ops into the model first, as `run`"
    )
    parser.add_argument(
        "--shape", type=shape, default=(8, 4096), metavar="8x4096", help="of the op's first tensor (default: 8x4096)"
    )
    parser.add_argument("--dtype", choices=DTYPE_NAMES, default="float32")
    parser.add_argument("--device", default="cpu", help="a device type; it need not be here (default: cpu)")
    parser.add_argument("--mode", choices=MODES, default="eager", help="whose default priorities count")
    add_cli_args(parser)


def shape(text: str) -> tuple[int, ...]:
    """Reads `8x4096`."""
    try:
        sizes = tuple(int(part) for part in text.lower().split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; write it as 8x4096") from None
    if any(size < 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"{text!r} has a negative size")
    if math.prod(sizes) >= 2**40:
        raise argparse.ArgumentTypeError(f"{text!r} is larger than any memory")
    return sizes


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; 0, or an `IrError` that the entry turns into 1."""
    import torch

    from irframework.cli.sample_arguments import sample_arguments
    from irframework.cli.tables import print_table
    from irframework.config import KernelConfig, configure
    from irframework.dispatch import resolve
    from irframework.errors import DeviceUnavailableError
    from irframework.registry import find_op

    configure(KernelConfig.from_cli_args(arguments))
    if arguments.fusions is not None:
        from irframework.cli.fusions import explain_fusions

        return explain_fusions(arguments)
    op = find_op(arguments.op)
    dtype = dtype_called(arguments.dtype)
    try:
        torch.device(arguments.device)
    except RuntimeError as error:
        first = str(error).splitlines()[0]
        raise DeviceUnavailableError(f"{arguments.device!r} is no device that torch knows: {first}") from error
    values = sample_arguments(op, arguments.shape, dtype, arguments.device)
    decision = resolve(op, values, arguments.mode, stop_at_first=False)
    call = {
        "shape": list(arguments.shape),
        "dtype": str(dtype).removeprefix("torch."),
        "device": arguments.device,
        "mode": arguments.mode,
    }
    if arguments.json:
        print(json.dumps({**decision.to_dict(), **call}, indent=2))
        return 0
    sizes = "x".join(map(str, arguments.shape))
    print(f"{op.name}{op.schema}")
    what = f"{sizes}, {call['dtype']}, {arguments.device}, {arguments.mode}"
    print(f"{what}: {decision.provider}, {decision.impl.source}")
    columns = ("", "provider", "origin", "decision")
    print_table("Candidates, in the order in which they are asked", columns, decision.rows())
    return 0
