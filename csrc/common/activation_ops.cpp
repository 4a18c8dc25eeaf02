// Owns the ops silu_and_mul and gelu_and_mul, on every device, and with a quantisation (on GPUs silu_and_mul only): their
// checks, outputs and arguments.
#include "launch.h"
#include "ops.h"

namespace irframework_vllm_c {
namespace {

GateArgs gate_arguments(const char* op, const View& x, Gate gate) {
  check_rank(op, x, 1);
  check_dense_rows(op, x);
  GateArgs args{};
  args.type = floating_type(op, x);
  args.gate = gate;
  if (x.size(-1) % 2 != 0) {
    fail(op, "the last dimension of x must be even (gate and up halves), got " + std::to_string(x.size(-1)));
  }
  args.cols = x.size(-1) / 2;
  args.x_rows = rows_of(op, x, x.dims - 1);
  args.x = data_of(x);
  return args;
}

// Writes to `given`, or else to a new tensor.
Tensor gated(const char* op, const Tensor& x, Gate gate, const Tensor* given = nullptr) {
  const View view = view_of(op, "x", x);
  GateArgs args = gate_arguments(op, view, gate);
  const Sizes sizes = sizes_with_last(op, view, args.cols);
  Tensor out = output_for(op, "out", given, view, sizes.at, view.dtype);
  args.out = out.data_ptr();
  const int64_t rows = product(view, view.dims - 1);
  if (rows > 0 && args.cols > 0) run(op, view.device, args, rows);
  return out;
}

// With `scale`, or with one for each group, or for each row if both are null.
CodesAndScales quantised(const char* op, const Tensor& x, Gate gate, const Tensor* scale, const Grouping* grouping,
                         const Tensor* out = nullptr, const Tensor* scales_out = nullptr) {
  const View view = view_of(op, "x", x);
  GateArgs args = gate_arguments(op, view, gate);
  const Sizes sizes = sizes_with_last(op, view, args.cols);
  const bool dynamic = scale == nullptr;
  if (!dynamic) args.scale = scale_data(op, *scale, view.device);
  if (grouping != nullptr) args.groups = groups_of(op, view, args.cols, *grouping);
  Tensor codes = output_for(op, dynamic ? "out0" : "out", out, view, sizes.at, code_dtype());
  Tensor scales = !dynamic              ? codes
                  : grouping != nullptr ? group_scales_for(op, view, args.cols, args.groups, scales_out)
                                        : scales_for(op, view, scales_out);
  args.out = codes.data_ptr();
  args.quantisation = dynamic ? Quantisation::dynamic : Quantisation::fixed;
  if (dynamic) args.scales = static_cast<float*>(scales.data_ptr());
  const int64_t rows = product(view, view.dims - 1);
  if (rows > 0) run(op, view.device, args, rows);
  return {codes, scales};
}

Gate gelu(bool tanh_approximation) { return tanh_approximation ? Gate::gelu_tanh : Gate::gelu_erf; }

}  // namespace

Tensor silu_and_mul(const Tensor& x) { return gated("silu_and_mul", x, Gate::silu); }

Tensor gelu_and_mul(const Tensor& x, bool tanh_approximation) {
  return gated("gelu_and_mul", x, gelu(tanh_approximation));
}

void silu_and_mul_out(const Tensor& x, Tensor out) { gated("silu_and_mul", x, Gate::silu, &out); }

void gelu_and_mul_out(const Tensor& x, bool tanh_approximation, Tensor out) {
  gated("gelu_and_mul", x, gelu(tanh_approximation), &out);
}

Tensor silu_and_mul_static_quant_fp8(const Tensor& x, const Tensor& scale) {
  return std::get<0>(quantised("silu_and_mul_static_quant_fp8", x, Gate::silu, &scale, nullptr));
}

void silu_and_mul_static_quant_fp8_out(const Tensor& x, const Tensor& scale, Tensor out) {
  quantised("silu_and_mul_static_quant_fp8", x, Gate::silu, &scale, nullptr, &out);
}

CodesAndScales silu_and_mul_dynamic_quant_fp8(const Tensor& x) {
  return quantised("silu_and_mul_dynamic_quant_fp8", x, Gate::silu, nullptr, nullptr);
}

void silu_and_mul_dynamic_quant_fp8_out(const Tensor& x, Tensor out0, Tensor out1) {
  quantised("silu_and_mul_dynamic_quant_fp8", x, Gate::silu, nullptr, nullptr, &out0, &out1);
}

// ---- on the CPU only ---------------------------------------------------------------------------------------------

CodesAndScales silu_and_mul_group_quant_fp8(const Tensor& x, int64_t group_size, bool column_major_scales,
                                            bool power_of_two_scales) {
  const Grouping grouping{group_size, column_major_scales, power_of_two_scales};
  return quantised("silu_and_mul_group_quant_fp8", x, Gate::silu, nullptr, &grouping);
}

void silu_and_mul_group_quant_fp8_out(const Tensor& x, int64_t group_size, bool column_major_scales,
                                      bool power_of_two_scales, Tensor out0, Tensor out1) {
  const Grouping grouping{group_size, column_major_scales, power_of_two_scales};
  quantised("silu_and_mul_group_quant_fp8", x, Gate::silu, nullptr, &grouping, &out0, &out1);
}

Tensor gelu_and_mul_static_quant_fp8(const Tensor& x, const Tensor& scale, bool tanh_approximation) {
  return std::get<0>(quantised("gelu_and_mul_static_quant_fp8", x, gelu(tanh_approximation), &scale, nullptr));
}

void gelu_and_mul_static_quant_fp8_out(const Tensor& x, const Tensor& scale, bool tanh_approximation, Tensor out) {
  quantised("gelu_and_mul_static_quant_fp8", x, gelu(tanh_approximation), &scale, nullptr, &out);
}

CodesAndScales gelu_and_mul_dynamic_quant_fp8(const Tensor& x, bool tanh_approximation) {
  return quantised("gelu_and_mul_dynamic_quant_fp8", x, gelu(tanh_approximation), nullptr, nullptr);
}

void gelu_and_mul_dynamic_quant_fp8_out(const Tensor& x, bool tanh_approximation, Tensor out0, Tensor out1) {
  quantised("gelu_and_mul_dynamic_quant_fp8", x, gelu(tanh_approximation), nullptr, nullptr, &out0, &out1);
}

CodesAndScales gelu_and_mul_group_quant_fp8(const Tensor& x, bool tanh_approximation, int64_t group_size,
                                            bool column_major_scales, bool power_of_two_scales) {
  const Grouping grouping{group_size, column_major_scales, power_of_two_scales};
  return quantised("gelu_and_mul_group_quant_fp8", x, gelu(tanh_approximation), nullptr, &grouping);
}

void gelu_and_mul_group_quant_fp8_out(const Tensor& x, bool tanh_approximation, int64_t group_size,
                                      bool column_major_scales, bool power_of_two_scales, Tensor out0, Tensor out1) {
  const Grouping grouping{group_size, column_major_scales, power_of_two_scales};
  quantised("gelu_and_mul_group_quant_fp8", x, gelu(tanh_approximation), nullptr, &grouping, &out0, &out1);
}

}  // namespace irframework_vllm_c
