// Owns the list of the torch ops. Each is defined in its family's *_ops.cpp, which every library compiles for its device;
// each library's ops.cpp registers them for it.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

namespace irframework_vllm_c {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;
using CodesAndScales = std::tuple<Tensor, Tensor>;

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

// activation_ops.cpp
Tensor silu_and_mul(const Tensor& x);
void silu_and_mul_out(const Tensor& x, Tensor out);
Tensor gelu_and_mul(const Tensor& x, bool tanh_approximation);
void gelu_and_mul_out(const Tensor& x, bool tanh_approximation, Tensor out);
Tensor silu_and_mul_static_quant_fp8(const Tensor& x, const Tensor& scale);
void silu_and_mul_static_quant_fp8_out(const Tensor& x, const Tensor& scale, Tensor out);
CodesAndScales silu_and_mul_dynamic_quant_fp8(const Tensor& x);
void silu_and_mul_dynamic_quant_fp8_out(const Tensor& x, Tensor out0, Tensor out1);

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

// cache_ops.cpp, on the CPU only
void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& slot_mapping);
std::tuple<Tensor, Tensor> rotary_embedding_reshape_and_cache(const Tensor& positions, const Tensor& query,
                                                              const Tensor& key, const Tensor& value,
                                                              const Tensor& key_cache, const Tensor& value_cache,
                                                              const Tensor& slot_mapping, const Tensor& cos_sin_cache,
                                                              int64_t head_size, bool is_neox);

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
