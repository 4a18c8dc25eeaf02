// Owns the torch ops of the namespace irframework_vllm_c: their schemas, for every device, and which functions they are on
// the CPU. Written on torch's stable C ABI (target 2.11). What the kernels do not take is refused in the *_ops.cpp, before
// anything is launched, because the message of an error raised inside a shim call is lost with that target.
#include "../common/ops.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

STABLE_TORCH_LIBRARY_FRAGMENT(irframework_vllm_c, m) {
  m.def("rms_norm(Tensor x, Tensor? weight, float epsilon) -> Tensor");
  m.def("fused_add_rms_norm(Tensor(a!) x, Tensor(b!) x_residual, Tensor? weight, float epsilon) -> ()");
  m.def("silu_and_mul(Tensor x) -> Tensor");
  m.def("gelu_and_mul(Tensor x, bool tanh_approximation) -> Tensor");
  m.def(
      "rotary_embedding(Tensor positions, Tensor query, Tensor key, Tensor cos_sin_cache, int head_size, "
      "bool is_neox) -> (Tensor, Tensor)");
  m.def(
      "rotary_embedding_query(Tensor positions, Tensor query, Tensor cos_sin_cache, int head_size, bool is_neox)"
      " -> Tensor");
  m.def("fused_add_rms_norm_functional(Tensor x, Tensor x_residual, Tensor? weight, float epsilon) -> (Tensor, Tensor)");
  m.def("static_quant_fp8(Tensor x, Tensor scale) -> Tensor");
  m.def("dynamic_quant_fp8(Tensor x) -> (Tensor, Tensor)");
  m.def("rms_norm_static_quant_fp8(Tensor x, Tensor? weight, Tensor scale, float epsilon) -> Tensor");
  m.def("rms_norm_dynamic_quant_fp8(Tensor x, Tensor? weight, float epsilon) -> (Tensor, Tensor)");
  m.def(
      "fused_add_rms_norm_static_quant_fp8(Tensor x, Tensor(a!) x_residual, Tensor? weight, Tensor scale, "
      "float epsilon) -> Tensor");
  m.def(
      "fused_add_rms_norm_dynamic_quant_fp8(Tensor x, Tensor(a!) x_residual, Tensor? weight, float epsilon)"
      " -> (Tensor, Tensor)");
  m.def(
      "fused_add_rms_norm_static_quant_fp8_functional(Tensor x, Tensor x_residual, Tensor? weight, Tensor scale, "
      "float epsilon) -> (Tensor, Tensor)");
  m.def(
      "fused_add_rms_norm_dynamic_quant_fp8_functional(Tensor x, Tensor x_residual, Tensor? weight, float epsilon)"
      " -> (Tensor, Tensor, Tensor)");
  m.def("silu_and_mul_static_quant_fp8(Tensor x, Tensor scale) -> Tensor");
  m.def("silu_and_mul_dynamic_quant_fp8(Tensor x) -> (Tensor, Tensor)");
  m.def(
      "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping)"
      " -> ()");
  m.def(
      "rotary_embedding_reshape_and_cache(Tensor positions, Tensor query, Tensor key, Tensor value, "
      "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, Tensor cos_sin_cache, int head_size, "
      "bool is_neox) -> (Tensor, Tensor)");
  m.def(
      "decode_attention(Tensor query, Tensor keys, Tensor values, Tensor cu_seqlens_q, Tensor? seq_lens, "
      "int? max_seqlen_k, Tensor? block_table, float scale, int? window, float? soft_cap, Tensor? sinks) -> Tensor");
  m.def(
      "qk_norm_rotary_embedding(Tensor positions, Tensor query, Tensor key, Tensor? query_weight, Tensor? key_weight, "
      "Tensor cos_sin_cache, int head_size, float epsilon, bool is_neox) -> (Tensor, Tensor)");
  m.def(
      "qk_norm_rotary_embedding_query(Tensor positions, Tensor query, Tensor? query_weight, Tensor cos_sin_cache, "
      "int head_size, float epsilon, bool is_neox) -> Tensor");
  m.def(
      "qk_norm_rotary_embedding_reshape_and_cache(Tensor positions, Tensor query, Tensor key, Tensor value, "
      "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, Tensor? query_weight, Tensor? key_weight, "
      "Tensor cos_sin_cache, int head_size, float epsilon, bool is_neox) -> (Tensor, Tensor)");
  m.def(
      "rms_norm_group_quant_fp8(Tensor x, Tensor? weight, float epsilon, int group_size, bool column_major_scales, "
      "bool power_of_two_scales) -> (Tensor, Tensor)");
  m.def(
      "fused_add_rms_norm_group_quant_fp8(Tensor x, Tensor(a!) x_residual, Tensor? weight, float epsilon, "
      "int group_size, bool column_major_scales, bool power_of_two_scales) -> (Tensor, Tensor)");
  m.def(
      "fused_add_rms_norm_group_quant_fp8_functional(Tensor x, Tensor x_residual, Tensor? weight, float epsilon, "
      "int group_size, bool column_major_scales, bool power_of_two_scales) -> (Tensor, Tensor, Tensor)");
  m.def(
      "silu_and_mul_group_quant_fp8(Tensor x, int group_size, bool column_major_scales, bool power_of_two_scales)"
      " -> (Tensor, Tensor)");
  m.def("gelu_and_mul_static_quant_fp8(Tensor x, Tensor scale, bool tanh_approximation) -> Tensor");
  m.def("gelu_and_mul_dynamic_quant_fp8(Tensor x, bool tanh_approximation) -> (Tensor, Tensor)");
  m.def(
      "gelu_and_mul_group_quant_fp8(Tensor x, bool tanh_approximation, int group_size, bool column_major_scales, "
      "bool power_of_two_scales) -> (Tensor, Tensor)");
  m.def("gelu_new(Tensor x) -> Tensor");
  m.def("quick_gelu(Tensor x) -> Tensor");
  m.def("relu2(Tensor x) -> Tensor");
  m.def("xielu(Tensor x, Tensor alpha_p, Tensor alpha_n, float beta, float epsilon) -> Tensor");
  m.def("mul_and_silu(Tensor x) -> Tensor");
  m.def("fatrelu_and_mul(Tensor x, float threshold) -> Tensor");
  m.def("swigluoai_and_mul(Tensor x, float alpha, float limit) -> Tensor");
  m.def("gelu_and_mul_sparse(Tensor x, float deviations, bool tanh_approximation) -> Tensor");
  m.def("silu_mul(Tensor gate, Tensor up) -> Tensor");
  m.def("gelu_mul(Tensor gate, Tensor up, bool tanh_approximation) -> Tensor");
  m.def("apply_rotary_pos_emb(Tensor x, Tensor cos, Tensor sin) -> Tensor");
  m.def("tensor_quant_fp8(Tensor x) -> (Tensor, Tensor)");
  m.def("dynamic_quant_int8(Tensor x) -> (Tensor, Tensor)");
  m.def(
      "group_quant_fp8(Tensor x, int group_size, bool column_major_scales, bool power_of_two_scales)"
      " -> (Tensor, Tensor)");
  m.def("dequant(Tensor q, Tensor scale, ScalarType dtype, bool column_major_scales) -> Tensor");
  m.def("gemma_rms_norm(Tensor x, Tensor weight, float epsilon) -> Tensor");
  m.def("fused_add_gemma_rms_norm(Tensor(a!) x, Tensor(b!) x_residual, Tensor weight, float epsilon) -> ()");
  m.def(
      "fused_add_gemma_rms_norm_functional(Tensor x, Tensor x_residual, Tensor weight, float epsilon)"
      " -> (Tensor, Tensor)");
}

namespace irframework_vllm_c {

// What no other device has.
static void implement_on_the_cpu(torch::stable::detail::StableLibrary& m) {
  m.impl("gelu_new", TORCH_BOX(&gelu_new));
  m.impl("gelu_new.out", TORCH_BOX(&gelu_new_out));
  m.impl("quick_gelu", TORCH_BOX(&quick_gelu));
  m.impl("quick_gelu.out", TORCH_BOX(&quick_gelu_out));
  m.impl("relu2", TORCH_BOX(&relu2));
  m.impl("relu2.out", TORCH_BOX(&relu2_out));
  m.impl("xielu", TORCH_BOX(&xielu));
  m.impl("xielu.out", TORCH_BOX(&xielu_out));
  m.impl("mul_and_silu", TORCH_BOX(&mul_and_silu));
  m.impl("mul_and_silu.out", TORCH_BOX(&mul_and_silu_out));
  m.impl("fatrelu_and_mul", TORCH_BOX(&fatrelu_and_mul));
  m.impl("fatrelu_and_mul.out", TORCH_BOX(&fatrelu_and_mul_out));
  m.impl("swigluoai_and_mul", TORCH_BOX(&swigluoai_and_mul));
  m.impl("swigluoai_and_mul.out", TORCH_BOX(&swigluoai_and_mul_out));
  m.impl("gelu_and_mul_sparse", TORCH_BOX(&gelu_and_mul_sparse));
  m.impl("gelu_and_mul_sparse.out", TORCH_BOX(&gelu_and_mul_sparse_out));
  m.impl("silu_mul", TORCH_BOX(&silu_mul));
  m.impl("silu_mul.out", TORCH_BOX(&silu_mul_out));
  m.impl("gelu_mul", TORCH_BOX(&gelu_mul));
  m.impl("gelu_mul.out", TORCH_BOX(&gelu_mul_out));
  m.impl("apply_rotary_pos_emb", TORCH_BOX(&apply_rotary_pos_emb));
  m.impl("apply_rotary_pos_emb.out", TORCH_BOX(&apply_rotary_pos_emb_out));
  m.impl("tensor_quant_fp8", TORCH_BOX(&tensor_quant_fp8));
  m.impl("tensor_quant_fp8.out", TORCH_BOX(&tensor_quant_fp8_out));
  m.impl("dynamic_quant_int8", TORCH_BOX(&dynamic_quant_int8));
  m.impl("dynamic_quant_int8.out", TORCH_BOX(&dynamic_quant_int8_out));
  m.impl("group_quant_fp8", TORCH_BOX(&group_quant_fp8));
  m.impl("group_quant_fp8.out", TORCH_BOX(&group_quant_fp8_out));
  m.impl("dequant", TORCH_BOX(&dequant));
  m.impl("dequant.out", TORCH_BOX(&dequant_out));
  m.impl("gemma_rms_norm", TORCH_BOX(&gemma_rms_norm));
  m.impl("gemma_rms_norm.out", TORCH_BOX(&gemma_rms_norm_out));
  m.impl("fused_add_gemma_rms_norm_functional", TORCH_BOX(&fused_add_gemma_rms_norm_functional));
  m.impl("fused_add_gemma_rms_norm_functional.out", TORCH_BOX(&fused_add_gemma_rms_norm_functional_out));
  m.impl("fused_add_gemma_rms_norm", TORCH_BOX(&fused_add_gemma_rms_norm));
  m.impl("reshape_and_cache", TORCH_BOX(&reshape_and_cache));
  m.impl("rotary_embedding_reshape_and_cache", TORCH_BOX(&rotary_embedding_reshape_and_cache));
  m.impl("qk_norm_rotary_embedding", TORCH_BOX(&qk_norm_rotary_embedding));
  m.impl("qk_norm_rotary_embedding.out", TORCH_BOX(&qk_norm_rotary_embedding_out));
  m.impl("qk_norm_rotary_embedding_query", TORCH_BOX(&qk_norm_rotary_embedding_query));
  m.impl("qk_norm_rotary_embedding_query.out", TORCH_BOX(&qk_norm_rotary_embedding_query_out));
  m.impl("qk_norm_rotary_embedding_reshape_and_cache", TORCH_BOX(&qk_norm_rotary_embedding_reshape_and_cache));
  m.impl("rms_norm_group_quant_fp8", TORCH_BOX(&rms_norm_group_quant_fp8));
  m.impl("rms_norm_group_quant_fp8.out", TORCH_BOX(&rms_norm_group_quant_fp8_out));
  m.impl("fused_add_rms_norm_group_quant_fp8", TORCH_BOX(&fused_add_rms_norm_group_quant_fp8));
  m.impl("fused_add_rms_norm_group_quant_fp8_functional", TORCH_BOX(&fused_add_rms_norm_group_quant_fp8_functional));
  m.impl("fused_add_rms_norm_group_quant_fp8_functional.out",
         TORCH_BOX(&fused_add_rms_norm_group_quant_fp8_functional_out));
  m.impl("silu_and_mul_group_quant_fp8", TORCH_BOX(&silu_and_mul_group_quant_fp8));
  m.impl("silu_and_mul_group_quant_fp8.out", TORCH_BOX(&silu_and_mul_group_quant_fp8_out));
  m.impl("gelu_and_mul_static_quant_fp8", TORCH_BOX(&gelu_and_mul_static_quant_fp8));
  m.impl("gelu_and_mul_static_quant_fp8.out", TORCH_BOX(&gelu_and_mul_static_quant_fp8_out));
  m.impl("gelu_and_mul_dynamic_quant_fp8", TORCH_BOX(&gelu_and_mul_dynamic_quant_fp8));
  m.impl("gelu_and_mul_dynamic_quant_fp8.out", TORCH_BOX(&gelu_and_mul_dynamic_quant_fp8_out));
  m.impl("gelu_and_mul_group_quant_fp8", TORCH_BOX(&gelu_and_mul_group_quant_fp8));
  m.impl("gelu_and_mul_group_quant_fp8.out", TORCH_BOX(&gelu_and_mul_group_quant_fp8_out));
  m.impl("decode_attention", TORCH_BOX(&decode_attention));
  m.impl("decode_attention.out", TORCH_BOX(&decode_attention_out));
}

}  // namespace irframework_vllm_c

STABLE_TORCH_LIBRARY_IMPL(irframework_vllm_c, CPU, m) {
  irframework_vllm_c::implement(m);
  irframework_vllm_c::implement_on_the_cpu(m);
}
