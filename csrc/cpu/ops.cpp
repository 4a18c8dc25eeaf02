// Owns the torch ops of the namespace irframework_vllm_c: their schemas, for every device, and which functions they are on
// the CPU. Written on torch's stable C ABI (target 2.11). What the kernels do not take is refused in the *_ops.cpp, before
// anything is launched, because the message of an error raised inside a shim call is lost with that target.
#include "ops.h"

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

// The overloads `.out` are declared by the plugin's Python part, through irframework.
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
  m.def("silu_and_mul_static_quant_fp8(Tensor x, Tensor scale) -> Tensor");
  m.def("silu_and_mul_dynamic_quant_fp8(Tensor x) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(irframework_vllm_c, CPU, m) {
  m.impl("rms_norm", TORCH_BOX(&irframework_vllm_c::rms_norm));
  m.impl("rms_norm.out", TORCH_BOX(&irframework_vllm_c::rms_norm_out));
  m.impl("rms_norm_static_quant_fp8", TORCH_BOX(&irframework_vllm_c::rms_norm_static_quant_fp8));
  m.impl("rms_norm_static_quant_fp8.out", TORCH_BOX(&irframework_vllm_c::rms_norm_static_quant_fp8_out));
  m.impl("rms_norm_dynamic_quant_fp8", TORCH_BOX(&irframework_vllm_c::rms_norm_dynamic_quant_fp8));
  m.impl("rms_norm_dynamic_quant_fp8.out", TORCH_BOX(&irframework_vllm_c::rms_norm_dynamic_quant_fp8_out));
  m.impl("fused_add_rms_norm", TORCH_BOX(&irframework_vllm_c::fused_add_rms_norm));
  m.impl("fused_add_rms_norm_functional", TORCH_BOX(&irframework_vllm_c::fused_add_rms_norm_functional));
  m.impl("fused_add_rms_norm_functional.out", TORCH_BOX(&irframework_vllm_c::fused_add_rms_norm_functional_out));
  m.impl("fused_add_rms_norm_static_quant_fp8", TORCH_BOX(&irframework_vllm_c::fused_add_rms_norm_static_quant_fp8));
  m.impl("fused_add_rms_norm_dynamic_quant_fp8", TORCH_BOX(&irframework_vllm_c::fused_add_rms_norm_dynamic_quant_fp8));
  m.impl("silu_and_mul", TORCH_BOX(&irframework_vllm_c::silu_and_mul));
  m.impl("silu_and_mul.out", TORCH_BOX(&irframework_vllm_c::silu_and_mul_out));
  m.impl("silu_and_mul_static_quant_fp8", TORCH_BOX(&irframework_vllm_c::silu_and_mul_static_quant_fp8));
  m.impl("silu_and_mul_static_quant_fp8.out", TORCH_BOX(&irframework_vllm_c::silu_and_mul_static_quant_fp8_out));
  m.impl("silu_and_mul_dynamic_quant_fp8", TORCH_BOX(&irframework_vllm_c::silu_and_mul_dynamic_quant_fp8));
  m.impl("silu_and_mul_dynamic_quant_fp8.out", TORCH_BOX(&irframework_vllm_c::silu_and_mul_dynamic_quant_fp8_out));
  m.impl("gelu_and_mul", TORCH_BOX(&irframework_vllm_c::gelu_and_mul));
  m.impl("gelu_and_mul.out", TORCH_BOX(&irframework_vllm_c::gelu_and_mul_out));
  m.impl("static_quant_fp8", TORCH_BOX(&irframework_vllm_c::static_quant_fp8));
  m.impl("static_quant_fp8.out", TORCH_BOX(&irframework_vllm_c::static_quant_fp8_out));
  m.impl("dynamic_quant_fp8", TORCH_BOX(&irframework_vllm_c::dynamic_quant_fp8));
  m.impl("dynamic_quant_fp8.out", TORCH_BOX(&irframework_vllm_c::dynamic_quant_fp8_out));
  m.impl("rotary_embedding", TORCH_BOX(&irframework_vllm_c::rotary_embedding));
  m.impl("rotary_embedding.out", TORCH_BOX(&irframework_vllm_c::rotary_embedding_out));
  m.impl("rotary_embedding_query", TORCH_BOX(&irframework_vllm_c::rotary_embedding_query));
  m.impl("rotary_embedding_query.out", TORCH_BOX(&irframework_vllm_c::rotary_embedding_query_out));
}
