// Owns the list of the torch ops. Each is defined in its family's *_ops.cpp, which every library compiles for its device;
// each library's ops.cpp registers them for it.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <tuple>

namespace irframework_vllm_c {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using CodesAndScales = std::tuple<Tensor, Tensor>;
using CodesScalesAndSum = std::tuple<Tensor, Tensor, Tensor>;
using torch::headeronly::ScalarType;

// norm_ops.cpp
Tensor rms_norm(const Tensor& x, OptionalTensor weight, double epsilon);
void rms_norm_out(const Tensor& x, OptionalTensor weight, double epsilon, Tensor out);
Tensor rms_norm_static_quant_fp8(const Tensor& x, OptionalTensor weight, const Tensor& scale, double epsilon);
void rms_norm_static_quant_fp8_out(const Tensor& x, OptionalTensor weight, const Tensor& scale, double epsilon,
                                   Tensor out);
CodesAndScales rms_norm_dynamic_quant_fp8(const Tensor& x, OptionalTensor weight, double epsilon);
void rms_norm_dynamic_quant_fp8_out(const Tensor& x, OptionalTensor weight, double epsilon, Tensor out0, Tensor out1);
void fused_add_rms_norm(const Tensor& x, const Tensor& x_residual, OptionalTensor weight, double epsilon);
std::tuple<Tensor, Tensor> fused_add_rms_norm_functional(const Tensor& x, const Tensor& x_residual,
                                                         OptionalTensor weight, double epsilon);
void fused_add_rms_norm_functional_out(const Tensor& x, const Tensor& x_residual, OptionalTensor weight,
                                       double epsilon, Tensor out0, Tensor out1);
Tensor fused_add_rms_norm_static_quant_fp8(const Tensor& x, const Tensor& x_residual, OptionalTensor weight,
                                           const Tensor& scale, double epsilon);
CodesAndScales fused_add_rms_norm_dynamic_quant_fp8(const Tensor& x, const Tensor& x_residual, OptionalTensor weight,
                                                    double epsilon);
std::tuple<Tensor, Tensor> fused_add_rms_norm_static_quant_fp8_functional(const Tensor& x, const Tensor& x_residual,
                                                                          OptionalTensor weight, const Tensor& scale,
                                                                          double epsilon);
void fused_add_rms_norm_static_quant_fp8_functional_out(const Tensor& x, const Tensor& x_residual,
                                                        OptionalTensor weight, const Tensor& scale, double epsilon,
                                                        Tensor out0, Tensor out1);
CodesScalesAndSum fused_add_rms_norm_dynamic_quant_fp8_functional(const Tensor& x, const Tensor& x_residual,
                                                                  OptionalTensor weight, double epsilon);
void fused_add_rms_norm_dynamic_quant_fp8_functional_out(const Tensor& x, const Tensor& x_residual,
                                                         OptionalTensor weight, double epsilon, Tensor out0, Tensor out1,
                                                         Tensor out2);
// of which the CPU only:
CodesAndScales rms_norm_group_quant_fp8(const Tensor& x, OptionalTensor weight, double epsilon, int64_t group_size,
                                        bool column_major_scales, bool power_of_two_scales);
void rms_norm_group_quant_fp8_out(const Tensor& x, OptionalTensor weight, double epsilon, int64_t group_size,
                                  bool column_major_scales, bool power_of_two_scales, Tensor out0, Tensor out1);
CodesAndScales fused_add_rms_norm_group_quant_fp8(const Tensor& x, const Tensor& x_residual, OptionalTensor weight,
                                                  double epsilon, int64_t group_size, bool column_major_scales,
                                                  bool power_of_two_scales);
CodesScalesAndSum fused_add_rms_norm_group_quant_fp8_functional(const Tensor& x, const Tensor& x_residual,
                                                                OptionalTensor weight, double epsilon,
                                                                int64_t group_size, bool column_major_scales,
                                                                bool power_of_two_scales);
void fused_add_rms_norm_group_quant_fp8_functional_out(const Tensor& x, const Tensor& x_residual, OptionalTensor weight,
                                                       double epsilon, int64_t group_size, bool column_major_scales,
                                                       bool power_of_two_scales, Tensor out0, Tensor out1, Tensor out2);
Tensor gemma_rms_norm(const Tensor& x, const Tensor& weight, double epsilon);
void gemma_rms_norm_out(const Tensor& x, const Tensor& weight, double epsilon, Tensor out);
void fused_add_gemma_rms_norm(const Tensor& x, const Tensor& x_residual, const Tensor& weight, double epsilon);
std::tuple<Tensor, Tensor> fused_add_gemma_rms_norm_functional(const Tensor& x, const Tensor& x_residual,
                                                               const Tensor& weight, double epsilon);
void fused_add_gemma_rms_norm_functional_out(const Tensor& x, const Tensor& x_residual, const Tensor& weight,
                                             double epsilon, Tensor out0, Tensor out1);

// activation_ops.cpp
Tensor silu_and_mul(const Tensor& x);
void silu_and_mul_out(const Tensor& x, Tensor out);
Tensor gelu_and_mul(const Tensor& x, bool tanh_approximation);
void gelu_and_mul_out(const Tensor& x, bool tanh_approximation, Tensor out);
Tensor silu_and_mul_static_quant_fp8(const Tensor& x, const Tensor& scale);
void silu_and_mul_static_quant_fp8_out(const Tensor& x, const Tensor& scale, Tensor out);
CodesAndScales silu_and_mul_dynamic_quant_fp8(const Tensor& x);
void silu_and_mul_dynamic_quant_fp8_out(const Tensor& x, Tensor out0, Tensor out1);
// of which the CPU only:
CodesAndScales silu_and_mul_group_quant_fp8(const Tensor& x, int64_t group_size, bool column_major_scales,
                                            bool power_of_two_scales);
void silu_and_mul_group_quant_fp8_out(const Tensor& x, int64_t group_size, bool column_major_scales,
                                      bool power_of_two_scales, Tensor out0, Tensor out1);
Tensor gelu_and_mul_static_quant_fp8(const Tensor& x, const Tensor& scale, bool tanh_approximation);
void gelu_and_mul_static_quant_fp8_out(const Tensor& x, const Tensor& scale, bool tanh_approximation, Tensor out);
CodesAndScales gelu_and_mul_dynamic_quant_fp8(const Tensor& x, bool tanh_approximation);
void gelu_and_mul_dynamic_quant_fp8_out(const Tensor& x, bool tanh_approximation, Tensor out0, Tensor out1);
CodesAndScales gelu_and_mul_group_quant_fp8(const Tensor& x, bool tanh_approximation, int64_t group_size,
                                            bool column_major_scales, bool power_of_two_scales);
void gelu_and_mul_group_quant_fp8_out(const Tensor& x, bool tanh_approximation, int64_t group_size,
                                      bool column_major_scales, bool power_of_two_scales, Tensor out0, Tensor out1);

// quantisation_ops.cpp
Tensor static_quant_fp8(const Tensor& x, const Tensor& scale);
void static_quant_fp8_out(const Tensor& x, const Tensor& scale, Tensor out);
CodesAndScales dynamic_quant_fp8(const Tensor& x);
void dynamic_quant_fp8_out(const Tensor& x, Tensor out0, Tensor out1);

// rotary_ops.cpp
std::tuple<Tensor, Tensor> rotary_embedding(const Tensor& positions, const Tensor& query, const Tensor& key,
                                            const Tensor& cos_sin_cache, int64_t head_size, bool is_neox);
void rotary_embedding_out(const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& cos_sin_cache,
                          int64_t head_size, bool is_neox, Tensor out0, Tensor out1);
Tensor rotary_embedding_query(const Tensor& positions, const Tensor& query, const Tensor& cos_sin_cache,
                              int64_t head_size, bool is_neox);
void rotary_embedding_query_out(const Tensor& positions, const Tensor& query, const Tensor& cos_sin_cache,
                                int64_t head_size, bool is_neox, Tensor out);

// of which the CPU only:
std::tuple<Tensor, Tensor> qk_norm_rotary_embedding(const Tensor& positions, const Tensor& query, const Tensor& key,
                                                    OptionalTensor query_weight, OptionalTensor key_weight,
                                                    const Tensor& cos_sin_cache, int64_t head_size, double epsilon,
                                                    bool is_neox);
void qk_norm_rotary_embedding_out(const Tensor& positions, const Tensor& query, const Tensor& key,
                                  OptionalTensor query_weight, OptionalTensor key_weight, const Tensor& cos_sin_cache,
                                  int64_t head_size, double epsilon, bool is_neox, Tensor out0, Tensor out1);
Tensor qk_norm_rotary_embedding_query(const Tensor& positions, const Tensor& query, OptionalTensor query_weight,
                                      const Tensor& cos_sin_cache, int64_t head_size, double epsilon, bool is_neox);
void qk_norm_rotary_embedding_query_out(const Tensor& positions, const Tensor& query, OptionalTensor query_weight,
                                        const Tensor& cos_sin_cache, int64_t head_size, double epsilon, bool is_neox,
                                        Tensor out);

// cache_ops.cpp, on the CPU only
std::tuple<Tensor, Tensor> qk_norm_rotary_embedding_reshape_and_cache(
    const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
    const Tensor& value_cache, const Tensor& slot_mapping, OptionalTensor query_weight, OptionalTensor key_weight,
    const Tensor& cos_sin_cache, int64_t head_size, double epsilon, bool is_neox);
void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& slot_mapping);
std::tuple<Tensor, Tensor> rotary_embedding_reshape_and_cache(const Tensor& positions, const Tensor& query,
                                                              const Tensor& key, const Tensor& value,
                                                              const Tensor& key_cache, const Tensor& value_cache,
                                                              const Tensor& slot_mapping, const Tensor& cos_sin_cache,
                                                              int64_t head_size, bool is_neox);

// attention_ops.cpp, on the CPU only
Tensor decode_attention(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& cu_seqlens_q,
                        OptionalTensor seq_lens, std::optional<int64_t> max_seqlen_k, OptionalTensor block_table,
                        double scale, std::optional<int64_t> window, std::optional<double> soft_cap,
                        OptionalTensor sinks);
void decode_attention_out(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& cu_seqlens_q,
                          OptionalTensor seq_lens, std::optional<int64_t> max_seqlen_k, OptionalTensor block_table,
                          double scale, std::optional<int64_t> window, std::optional<double> soft_cap,
                          OptionalTensor sinks, Tensor out);

// pointwise_ops.cpp, on the CPU only
Tensor gelu_new(const Tensor& x);
void gelu_new_out(const Tensor& x, Tensor out);
Tensor quick_gelu(const Tensor& x);
void quick_gelu_out(const Tensor& x, Tensor out);
Tensor relu2(const Tensor& x);
void relu2_out(const Tensor& x, Tensor out);
Tensor xielu(const Tensor& x, const Tensor& alpha_p, const Tensor& alpha_n, double beta, double epsilon);
void xielu_out(const Tensor& x, const Tensor& alpha_p, const Tensor& alpha_n, double beta, double epsilon, Tensor out);
Tensor mul_and_silu(const Tensor& x);
void mul_and_silu_out(const Tensor& x, Tensor out);
Tensor fatrelu_and_mul(const Tensor& x, double threshold);
void fatrelu_and_mul_out(const Tensor& x, double threshold, Tensor out);
Tensor swigluoai_and_mul(const Tensor& x, double alpha, double limit);
void swigluoai_and_mul_out(const Tensor& x, double alpha, double limit, Tensor out);
Tensor gelu_and_mul_sparse(const Tensor& x, double deviations, bool tanh_approximation);
void gelu_and_mul_sparse_out(const Tensor& x, double deviations, bool tanh_approximation, Tensor out);
Tensor silu_mul(const Tensor& gate, const Tensor& up);
void silu_mul_out(const Tensor& gate, const Tensor& up, Tensor out);
Tensor gelu_mul(const Tensor& gate, const Tensor& up, bool tanh_approximation);
void gelu_mul_out(const Tensor& gate, const Tensor& up, bool tanh_approximation, Tensor out);

// head_angles_ops.cpp, on the CPU only
Tensor apply_rotary_pos_emb(const Tensor& x, const Tensor& cos, const Tensor& sin);
void apply_rotary_pos_emb_out(const Tensor& x, const Tensor& cos, const Tensor& sin, Tensor out);

// block_quantisation_ops.cpp, on the CPU only
CodesAndScales tensor_quant_fp8(const Tensor& x);
void tensor_quant_fp8_out(const Tensor& x, Tensor out0, Tensor out1);
CodesAndScales dynamic_quant_int8(const Tensor& x);
void dynamic_quant_int8_out(const Tensor& x, Tensor out0, Tensor out1);
CodesAndScales group_quant_fp8(const Tensor& x, int64_t group_size, bool column_major_scales, bool power_of_two_scales);
void group_quant_fp8_out(const Tensor& x, int64_t group_size, bool column_major_scales, bool power_of_two_scales,
                         Tensor out0, Tensor out1);
Tensor dequant(const Tensor& q, const Tensor& scale, ScalarType dtype, bool column_major_scales);
void dequant_out(const Tensor& q, const Tensor& scale, ScalarType dtype, bool column_major_scales, Tensor out);

// Makes the ops those of the device that `m` is about. The overloads `.out` are declared by the plugin's Python part.
inline void implement(torch::stable::detail::StableLibrary& m) {
  m.impl("rms_norm", TORCH_BOX(&rms_norm));
  m.impl("rms_norm.out", TORCH_BOX(&rms_norm_out));
  m.impl("rms_norm_static_quant_fp8", TORCH_BOX(&rms_norm_static_quant_fp8));
  m.impl("rms_norm_static_quant_fp8.out", TORCH_BOX(&rms_norm_static_quant_fp8_out));
  m.impl("rms_norm_dynamic_quant_fp8", TORCH_BOX(&rms_norm_dynamic_quant_fp8));
  m.impl("rms_norm_dynamic_quant_fp8.out", TORCH_BOX(&rms_norm_dynamic_quant_fp8_out));
  m.impl("fused_add_rms_norm", TORCH_BOX(&fused_add_rms_norm));
  m.impl("fused_add_rms_norm_functional", TORCH_BOX(&fused_add_rms_norm_functional));
  m.impl("fused_add_rms_norm_functional.out", TORCH_BOX(&fused_add_rms_norm_functional_out));
  m.impl("fused_add_rms_norm_static_quant_fp8", TORCH_BOX(&fused_add_rms_norm_static_quant_fp8));
  m.impl("fused_add_rms_norm_dynamic_quant_fp8", TORCH_BOX(&fused_add_rms_norm_dynamic_quant_fp8));
  m.impl("fused_add_rms_norm_static_quant_fp8_functional", TORCH_BOX(&fused_add_rms_norm_static_quant_fp8_functional));
  m.impl("fused_add_rms_norm_static_quant_fp8_functional.out",
         TORCH_BOX(&fused_add_rms_norm_static_quant_fp8_functional_out));
  m.impl("fused_add_rms_norm_dynamic_quant_fp8_functional", TORCH_BOX(&fused_add_rms_norm_dynamic_quant_fp8_functional));
  m.impl("fused_add_rms_norm_dynamic_quant_fp8_functional.out",
         TORCH_BOX(&fused_add_rms_norm_dynamic_quant_fp8_functional_out));
  m.impl("silu_and_mul", TORCH_BOX(&silu_and_mul));
  m.impl("silu_and_mul.out", TORCH_BOX(&silu_and_mul_out));
  m.impl("silu_and_mul_static_quant_fp8", TORCH_BOX(&silu_and_mul_static_quant_fp8));
  m.impl("silu_and_mul_static_quant_fp8.out", TORCH_BOX(&silu_and_mul_static_quant_fp8_out));
  m.impl("silu_and_mul_dynamic_quant_fp8", TORCH_BOX(&silu_and_mul_dynamic_quant_fp8));
  m.impl("silu_and_mul_dynamic_quant_fp8.out", TORCH_BOX(&silu_and_mul_dynamic_quant_fp8_out));
  m.impl("gelu_and_mul", TORCH_BOX(&gelu_and_mul));
  m.impl("gelu_and_mul.out", TORCH_BOX(&gelu_and_mul_out));
  m.impl("static_quant_fp8", TORCH_BOX(&static_quant_fp8));
  m.impl("static_quant_fp8.out", TORCH_BOX(&static_quant_fp8_out));
  m.impl("dynamic_quant_fp8", TORCH_BOX(&dynamic_quant_fp8));
  m.impl("dynamic_quant_fp8.out", TORCH_BOX(&dynamic_quant_fp8_out));
  m.impl("rotary_embedding", TORCH_BOX(&rotary_embedding));
  m.impl("rotary_embedding.out", TORCH_BOX(&rotary_embedding_out));
  m.impl("rotary_embedding_query", TORCH_BOX(&rotary_embedding_query));
  m.impl("rotary_embedding_query.out", TORCH_BOX(&rotary_embedding_query_out));
}

}  // namespace irframework_vllm_c
