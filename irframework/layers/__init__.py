"""Layers: modules over the ops, and `CustomOp` and `PluggableLayer`, which programs of the older kind derive from.

Owns the public names. Each is imported at first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from irframework.layers.activation import GeluAndMul, SiluAndMul
    from irframework.layers.custom_op import CustomOp, disabled_custom_ops, enabled_custom_ops
    from irframework.layers.encoder import Conv2d, Conv3d, EncoderAttention
    from irframework.layers.latent_attention import MLA
    from irframework.layers.mamba import MambaMixer
    from irframework.layers.mamba2 import MambaMixer2, Mixer2GatedRMSNorm
    from irframework.layers.moe import FusedMoE
    from irframework.layers.norm import GemmaRMSNorm, RMSNorm
    from irframework.layers.normed_rotary import NormedRotaryEmbedding
    from irframework.layers.parallel_layer import Group, ParallelLayer, load_full
    from irframework.layers.parallel_linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
    from irframework.layers.pluggable_layer import PluggableLayer
    from irframework.layers.quantization import Quantization
    from irframework.layers.rotary import RotaryEmbedding
    from irframework.layers.short_convolution import ShortConv
    from irframework.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding

_MODULES = {
    "ColumnParallelLinear": "parallel_linear",
    "Conv2d": "encoder",
    "Conv3d": "encoder",
    "CustomOp": "custom_op",
    "EncoderAttention": "encoder",
    "FusedMoE": "moe",
    "GeluAndMul": "activation",
    "GemmaRMSNorm": "norm",
    "Group": "parallel_layer",
    "MLA": "latent_attention",
    "MambaMixer": "mamba",
    "MambaMixer2": "mamba2",
    "Mixer2GatedRMSNorm": "mamba2",
    "NormedRotaryEmbedding": "normed_rotary",
    "ParallelLMHead": "vocabulary",
    "ParallelLayer": "parallel_layer",
    "PluggableLayer": "pluggable_layer",
    "Quantization": "quantization",
    "RMSNorm": "norm",
    "ReplicatedLinear": "parallel_linear",
    "RotaryEmbedding": "rotary",
    "RowParallelLinear": "parallel_linear",
    "ShortConv": "short_convolution",
    "SiluAndMul": "activation",
    "VocabParallelEmbedding": "vocabulary",
    "disabled_custom_ops": "custom_op",
    "enabled_custom_ops": "custom_op",
    "load_full": "parallel_layer",
}

__all__ = [
    "MLA",
    "ColumnParallelLinear",
    "Conv2d",
    "Conv3d",
    "CustomOp",
    "EncoderAttention",
    "FusedMoE",
    "GeluAndMul",
    "GemmaRMSNorm",
    "Group",
    "MambaMixer",
    "MambaMixer2",
    "Mixer2GatedRMSNorm",
    "NormedRotaryEmbedding",
    "ParallelLMHead",
    "ParallelLayer",
    "PluggableLayer",
    "Quantization",
    "RMSNorm",
    "ReplicatedLinear",
    "RotaryEmbedding",
    "RowParallelLinear",
    "ShortConv",
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
