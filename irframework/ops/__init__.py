"""The standard ops, and the namespace through which every op is called: `irframework.ops.<name>`.

One file per family holds the meanings. Does not own the table of ops: an attribute of this module is the op of that
name in the registry, whoever declared it.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from irframework.ops.activation import gelu_and_mul, silu_and_mul
from irframework.ops.fused_quantization import (
    fused_add_rms_norm_dynamic_quant_fp8,
    fused_add_rms_norm_static_quant_fp8,
    rms_norm_dynamic_quant_fp8,
    rms_norm_static_quant_fp8,
    silu_and_mul_dynamic_quant_fp8,
    silu_and_mul_static_quant_fp8,
)
from irframework.ops.kv_cache import reshape_and_cache, rotary_embedding_reshape_and_cache
from irframework.ops.layernorm import fused_add_rms_norm, rms_norm
from irframework.ops.quantization import dynamic_quant_fp8, static_quant_fp8
from irframework.ops.rotary import rotary_embedding
from irframework.registry import registry as _registry

if _TYPE_CHECKING:
    from irframework.op import IrOp

__all__ = [
    "dynamic_quant_fp8",
    "fused_add_rms_norm",
    "fused_add_rms_norm_dynamic_quant_fp8",
    "fused_add_rms_norm_static_quant_fp8",
    "gelu_and_mul",
    "reshape_and_cache",
    "rms_norm",
    "rms_norm_dynamic_quant_fp8",
    "rms_norm_static_quant_fp8",
    "rotary_embedding",
    "rotary_embedding_reshape_and_cache",
    "silu_and_mul",
    "silu_and_mul_dynamic_quant_fp8",
    "silu_and_mul_static_quant_fp8",
    "static_quant_fp8",
]


def __getattr__(name: str) -> "IrOp":
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from irframework.registry import find_op

    return find_op(name)


def __dir__() -> list[str]:
    return sorted({*_registry.ops, *globals()})
