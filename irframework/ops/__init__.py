"""The standard ops, and the namespace through which every op is called: `irframework.ops.<name>`.

One file per family holds the meanings. Does not own the table of ops: an attribute of this module is the op of that
name in the registry, whoever declared it.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

from irframework.ops.activation import (
    fatrelu_and_mul,
    gelu_and_mul,
    gelu_and_mul_sparse,
    gelu_mul,
    mul_and_silu,
    silu_and_mul,
    silu_mul,
    swigluoai_and_mul,
)
from irframework.ops.block_quantization import (
    dequant,
    dequant_nvfp4,
    dynamic_quant_int8,
    group_quant_fp8,
    quant_nvfp4,
)
from irframework.ops.causal_convolution import causal_conv1d, causal_conv1d_update, short_conv
from irframework.ops.collectives import all_gather, all_reduce, reduce_scatter
from irframework.ops.convolution import conv2d, conv3d
from irframework.ops.encoder_attention import mm_encoder_attention, rel_pos_attention
from irframework.ops.fused_block_quantization import (
    fused_add_rms_norm_group_quant_fp8,
    fused_add_rms_norm_quant_nvfp4,
    gelu_and_mul_group_quant_fp8,
    rms_norm_group_quant_fp8,
    rms_norm_quant_nvfp4,
    silu_and_mul_group_quant_fp8,
    silu_and_mul_quant_nvfp4,
)
from irframework.ops.fused_collectives import (
    all_gather_linear,
    all_reduce_fused_add_rms_norm,
    all_reduce_fused_add_rms_norm_dynamic_quant_fp8,
    all_reduce_fused_add_rms_norm_static_quant_fp8,
    all_reduce_rms_norm,
    linear_reduce_scatter,
)
from irframework.ops.fused_latent_attention import mla_attention_group_quant_fp8
from irframework.ops.fused_projection import linear_silu_and_mul, scaled_linear_silu_and_mul_static_quant_fp8
from irframework.ops.fused_quantization import (
    fused_add_rms_norm_dynamic_quant_fp8,
    fused_add_rms_norm_static_quant_fp8,
    gelu_and_mul_dynamic_quant_fp8,
    gelu_and_mul_static_quant_fp8,
    rms_norm_dynamic_quant_fp8,
    rms_norm_static_quant_fp8,
    silu_and_mul_dynamic_quant_fp8,
    silu_and_mul_static_quant_fp8,
)
from irframework.ops.gated_norm import mixer2_gated_rms_norm, rms_norm_gated
from irframework.ops.kv_cache import reshape_and_cache, rotary_embedding_reshape_and_cache
from irframework.ops.latent_attention import mla_attention
from irframework.ops.layernorm import (
    fused_add_gemma_rms_norm,
    fused_add_layer_norm,
    fused_add_rms_norm,
    gemma_rms_norm,
    layer_norm,
    rms_norm,
)
from irframework.ops.mixture_of_experts import fused_moe, fused_topk, grouped_topk, moe_align_block_size
from irframework.ops.multimodal_rotary import apply_rotary_emb, dual_chunk_rotary_embedding, mrope
from irframework.ops.normed_rotary import qk_norm_rotary_embedding, qk_norm_rotary_embedding_reshape_and_cache
from irframework.ops.pointwise_activation import gelu_fast, gelu_new, quick_gelu, relu2, xielu
from irframework.ops.projection import linear, logits, vocab_parallel_embedding
from irframework.ops.quantization import dynamic_quant_fp8, static_quant_fp8, tensor_quant_fp8
from irframework.ops.rotary import rotary_embedding
from irframework.ops.rotate_half import apply_rotary_pos_emb
from irframework.ops.scaled_projection import scaled_linear
from irframework.ops.softmax_attention import attention
from irframework.ops.state_space import selective_scan, selective_state_update
from irframework.ops.state_space_dual import mamba2_chunk_scan
from irframework.registry import registry as _registry

if _TYPE_CHECKING:
    from irframework.op import IrOp

__all__ = [
    "all_gather",
    "all_gather_linear",
    "all_reduce",
    "all_reduce_fused_add_rms_norm",
    "all_reduce_fused_add_rms_norm_dynamic_quant_fp8",
    "all_reduce_fused_add_rms_norm_static_quant_fp8",
    "all_reduce_rms_norm",
    "apply_rotary_emb",
    "apply_rotary_pos_emb",
    "attention",
    "causal_conv1d",
    "causal_conv1d_update",
    "conv2d",
    "conv3d",
    "dequant",
    "dequant_nvfp4",
    "dual_chunk_rotary_embedding",
    "dynamic_quant_fp8",
    "dynamic_quant_int8",
    "fatrelu_and_mul",
    "fused_add_gemma_rms_norm",
    "fused_add_layer_norm",
    "fused_add_rms_norm",
    "fused_add_rms_norm_dynamic_quant_fp8",
    "fused_add_rms_norm_group_quant_fp8",
    "fused_add_rms_norm_quant_nvfp4",
    "fused_add_rms_norm_static_quant_fp8",
    "fused_moe",
    "fused_topk",
    "gelu_and_mul",
    "gelu_and_mul_dynamic_quant_fp8",
    "gelu_and_mul_group_quant_fp8",
    "gelu_and_mul_sparse",
    "gelu_and_mul_static_quant_fp8",
    "gelu_fast",
    "gelu_mul",
    "gelu_new",
    "gemma_rms_norm",
    "group_quant_fp8",
    "grouped_topk",
    "layer_norm",
    "linear",
    "linear_reduce_scatter",
    "linear_silu_and_mul",
    "logits",
    "mamba2_chunk_scan",
    "mixer2_gated_rms_norm",
    "mla_attention",
    "mla_attention_group_quant_fp8",
    "mm_encoder_attention",
    "moe_align_block_size",
    "mrope",
    "mul_and_silu",
    "qk_norm_rotary_embedding",
    "qk_norm_rotary_embedding_reshape_and_cache",
    "quant_nvfp4",
    "quick_gelu",
    "reduce_scatter",
    "rel_pos_attention",
    "relu2",
    "reshape_and_cache",
    "rms_norm",
    "rms_norm_dynamic_quant_fp8",
    "rms_norm_gated",
    "rms_norm_group_quant_fp8",
    "rms_norm_quant_nvfp4",
    "rms_norm_static_quant_fp8",
    "rotary_embedding",
    "rotary_embedding_reshape_and_cache",
    "scaled_linear",
    "scaled_linear_silu_and_mul_static_quant_fp8",
    "selective_scan",
    "selective_state_update",
    "short_conv",
    "silu_and_mul",
    "silu_and_mul_dynamic_quant_fp8",
    "silu_and_mul_group_quant_fp8",
    "silu_and_mul_quant_nvfp4",
    "silu_and_mul_static_quant_fp8",
    "silu_mul",
    "static_quant_fp8",
    "swigluoai_and_mul",
    "tensor_quant_fp8",
    "vocab_parallel_embedding",
    "xielu",
]


def __getattr__(name: str) -> "IrOp":
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from irframework.registry import find_op

    return find_op(name)


def __dir__() -> list[str]:
    return sorted({*_registry.ops, *globals()})
