"""Layers: modules over the ops, and `CustomOp` and `PluggableLayer`, which programs of the older kind derive from.

Owns the public names. Each is imported at first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from irframework.layers.activation import GeluAndMul, SiluAndMul
    from irframework.layers.custom_op import CustomOp, disabled_custom_ops, enabled_custom_ops
    from irframework.layers.norm import GemmaRMSNorm, RMSNorm
    from irframework.layers.parallel_layer import Group, ParallelLayer, load_full
    from irframework.layers.parallel_linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
    from irframework.layers.pluggable_layer import PluggableLayer
    from irframework.layers.rotary import RotaryEmbedding
    from irframework.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding

_MODULES = {
    "ColumnParallelLinear": "parallel_linear",
    "CustomOp": "custom_op",
    "GeluAndMul": "activation",
    "GemmaRMSNorm": "norm",
    "Group": "parallel_layer",
    "ParallelLMHead": "vocabulary",
    "ParallelLayer": "parallel_layer",
    "PluggableLayer": "pluggable_layer",
    "RMSNorm": "norm",
    "ReplicatedLinear": "parallel_linear",
    "RotaryEmbedding": "rotary",
    "RowParallelLinear": "parallel_linear",
    "SiluAndMul": "activation",
    "VocabParallelEmbedding": "vocabulary",
    "disabled_custom_ops": "custom_op",
    "enabled_custom_ops": "custom_op",
    "load_full": "parallel_layer",
}

__all__ = [
    "ColumnParallelLinear",
    "CustomOp",
    "GeluAndMul",
    "GemmaRMSNorm",
    "Group",
    "ParallelLMHead",
    "ParallelLayer",
    "PluggableLayer",
    "RMSNorm",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "RowParallelLinear",
    "SiluAndMul",
    "VocabParallelEmbedding",
    "disabled_custom_ops",
    "enabled_custom_ops",
    "load_full",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *globals()})
