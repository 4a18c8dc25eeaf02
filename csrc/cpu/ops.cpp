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
  m.def("silu_and_mul_static_quant_fp8(Tensor x, Tensor scale) -> Tensor");
  m.def("silu_and_mul_dynamic_quant_fp8(Tensor x) -> (Tensor, Tensor)");
  m.def(
      "reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping)"
      " -> ()");
  m.def(
      "rotary_embedding_reshape_and_cache(Tensor positions, Tensor query, Tensor key, Tensor value, "
      "Tensor(a!) key_cache, Tensor(b!) value_cache, Tensor slot_mapping, Tensor cos_sin_cache, int head_size, "
      "bool is_neox) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(irframework_vllm_c, CPU, m) {
  irframework_vllm_c::implement(m);
  m.impl("reshape_and_cache", TORCH_BOX(&irframework_vllm_c::reshape_and_cache));
  m.impl("rotary_embedding_reshape_and_cache", TORCH_BOX(&irframework_vllm_c::rotary_embedding_reshape_and_cache));
}
