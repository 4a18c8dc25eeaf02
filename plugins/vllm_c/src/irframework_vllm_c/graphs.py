"""Owns which calls compiled code on CPUs gives to the kernels, where nobody names them (`compiled_where`).

Inductor makes one loop of each of these ops, in place and without a call. A kernel is faster over many numbers; over
few its call through torch costs more than its work does. What a model has written out is not to become slower by being
found. Measured by `benchmarks/in_graphs_cpu.py`.
"""

from collections.abc import Callable, Mapping

from torch import Tensor

import irframework as ir

MANY = 1 << 15


def many_in_x(x: Tensor) -> bool | ir.Rejected:
    """Whether the rows pay for a call."""
    return _many("x", x)


def many_in_gate(gate: Tensor) -> bool | ir.Rejected:
    """Whether the gate pays for a call."""
    return _many("gate", gate)


def many_in_query(query: Tensor) -> bool | ir.Rejected:
    """Whether the queries pay for a call."""
    return _many("query", query)


def only_on_gpus(x: Tensor) -> bool | ir.Rejected:
    """Nothing was gained on CPUs, over any number of rows."""
    return x.device.type != "cpu" or never()


def never() -> ir.Rejected:
    """Nothing was gained over any number of rows, and only CPUs have the kernel."""
    return ir.reject("Inductor's own loop takes no longer than the kernel, and needs no call")


def _many(name: str, x: Tensor) -> bool | ir.Rejected:
    """A size that is not known when code is compiled counts as large."""
    if x.device.type != "cpu" or not all(type(size) is int for size in x.shape) or x.numel() >= MANY:
        return True
    return ir.reject(
        f"{name} has {x.numel()} numbers; over fewer than {MANY} Inductor's own loop costs less than a call"
    )


COMPILED_WHERE: Mapping[str, Callable[..., bool | ir.Rejected]] = {
    "rms_norm": many_in_x,
    "fused_add_rms_norm": many_in_x,
    "gemma_rms_norm": many_in_x,
    "fused_add_gemma_rms_norm": many_in_x,
    "silu_and_mul": only_on_gpus,
    "gelu_and_mul": many_in_x,
    "silu_mul": never,
    "gelu_mul": many_in_gate,
    "rotary_embedding": many_in_query,
    "apply_rotary_pos_emb": many_in_x,
}
