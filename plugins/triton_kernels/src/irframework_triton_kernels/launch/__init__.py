"""Launches the kernels: directly for plain tensors, through `torch.ops.irframework_triton_kernels` for all others.

Owns the arguments and the grid of each launch, and the torch ops, one module per family. A direct launch skips torch's
dispatcher, which costs as much again as Triton's own launcher. Every function takes a `tile` in the place of the usual
one, for experiments (`benchmarks/triton_tiles.py`).

Does not decide which calls the kernels take: `implementations` does. Importing this package imports Triton.
"""

from irframework_triton_kernels.launch.activations import activated, gated_by, xielu
from irframework_triton_kernels.launch.decoding import decode_attention
from irframework_triton_kernels.launch.gated import (
    dynamic_quant_fp8,
    dynamic_quant_int8,
    gated,
    gated_apart,
    gelu_and_mul_dynamic_quant_fp8,
    gelu_and_mul_static_quant_fp8,
    silu_and_mul_dynamic_quant_fp8,
    silu_and_mul_static_quant_fp8,
    static_quant_fp8,
)
from irframework_triton_kernels.launch.group_codes import gated_group_quant_fp8, group_quant_fp8, tensor_quant_fp8
from irframework_triton_kernels.launch.kv_cache import (
    qk_norm_rotary_embedding_reshape_and_cache_inplace,
    reshape_and_cache_inplace,
    rotary_embedding_reshape_and_cache_inplace,
)
from irframework_triton_kernels.launch.latent import decode_latent_attention
from irframework_triton_kernels.launch.norm_groups import (
    fused_add_rms_norm_group_quant_fp8,
    fused_add_rms_norm_group_quant_fp8_inplace,
    rms_norm_group_quant_fp8,
)
from irframework_triton_kernels.launch.norms import (
    fused_add_gemma_rms_norm,
    fused_add_gemma_rms_norm_inplace,
    fused_add_rms_norm,
    fused_add_rms_norm_dynamic_quant_fp8,
    fused_add_rms_norm_dynamic_quant_fp8_inplace,
    fused_add_rms_norm_inplace,
    fused_add_rms_norm_static_quant_fp8,
    fused_add_rms_norm_static_quant_fp8_inplace,
    gemma_rms_norm,
    rms_norm,
    rms_norm_dynamic_quant_fp8,
    rms_norm_static_quant_fp8,
)
from irframework_triton_kernels.launch.nvfp4 import (
    fused_add_rms_norm_quant_nvfp4,
    fused_add_rms_norm_quant_nvfp4_inplace,
    gated_quant_nvfp4,
    quant_nvfp4,
    rms_norm_quant_nvfp4,
)
from irframework_triton_kernels.launch.products import linear_silu_and_mul, scaled_linear_silu_and_mul_static_quant_fp8
from irframework_triton_kernels.launch.rotary import qk_norm_rotary_embedding, rotary_embedding
from irframework_triton_kernels.launch.rotate_half import apply_rotary_pos_emb
from irframework_triton_kernels.launch.routing import fused_topk, grouped_topk
from irframework_triton_kernels.launch.sums import (
    all_reduce_fused_add_rms_norm,
    all_reduce_fused_add_rms_norm_dynamic_quant_fp8,
    all_reduce_fused_add_rms_norm_static_quant_fp8,
    all_reduce_rms_norm,
)

__all__ = [
    "activated",
    "all_reduce_fused_add_rms_norm",
    "all_reduce_fused_add_rms_norm_dynamic_quant_fp8",
    "all_reduce_fused_add_rms_norm_static_quant_fp8",
    "all_reduce_rms_norm",
    "apply_rotary_pos_emb",
    "decode_attention",
    "decode_latent_attention",
    "dynamic_quant_fp8",
    "dynamic_quant_int8",
    "fused_add_gemma_rms_norm",
    "fused_add_gemma_rms_norm_inplace",
    "fused_add_rms_norm",
    "fused_add_rms_norm_dynamic_quant_fp8",
    "fused_add_rms_norm_dynamic_quant_fp8_inplace",
    "fused_add_rms_norm_group_quant_fp8",
    "fused_add_rms_norm_group_quant_fp8_inplace",
    "fused_add_rms_norm_inplace",
    "fused_add_rms_norm_quant_nvfp4",
    "fused_add_rms_norm_quant_nvfp4_inplace",
    "fused_add_rms_norm_static_quant_fp8",
    "fused_add_rms_norm_static_quant_fp8_inplace",
    "fused_topk",
    "gated",
    "gated_apart",
    "gated_by",
    "gated_group_quant_fp8",
    "gated_quant_nvfp4",
    "gelu_and_mul_dynamic_quant_fp8",
    "gelu_and_mul_static_quant_fp8",
    "gemma_rms_norm",
    "group_quant_fp8",
    "grouped_topk",
    "linear_silu_and_mul",
    "qk_norm_rotary_embedding",
    "qk_norm_rotary_embedding_reshape_and_cache_inplace",
    "quant_nvfp4",
    "reshape_and_cache_inplace",
    "rms_norm",
    "rms_norm_dynamic_quant_fp8",
    "rms_norm_group_quant_fp8",
    "rms_norm_quant_nvfp4",
    "rms_norm_static_quant_fp8",
    "rotary_embedding",
    "rotary_embedding_reshape_and_cache_inplace",
    "scaled_linear_silu_and_mul_static_quant_fp8",
    "silu_and_mul_dynamic_quant_fp8",
    "silu_and_mul_static_quant_fp8",
    "static_quant_fp8",
    "tensor_quant_fp8",
    "xielu",
]
