// Owns the ops rms_norm and fused_add_rms_norm, on every device, alone and with a quantisation, and Gemma's norms, on the
// CPU: their checks, outputs and arguments.
#include <torch/csrc/stable/ops.h>

#include "launch.h"
#include "ops.h"

namespace irframework_vllm_c {
namespace {

// Replaces a weight that is not dense by a copy, which the caller keeps alive.
NormArgs norm_arguments(const char* op, const View& x, OptionalTensor& weight, double epsilon, bool one_plus = false) {
  check_rank(op, x, 1);
  check_dense_rows(op, x);
  NormArgs args{};
  args.type = args.weight_type = floating_type(op, x);
  args.cols = x.size(-1);
  args.epsilon = static_cast<float>(epsilon);
  args.one_plus = one_plus;
  args.x = data_of(x);
  args.x_rows = rows_of(op, x, x.dims - 1);
  args.out_rows = contiguous_rows(product(x, x.dims - 1), args.cols);
  if (weight) {
    const View w = view_of(op, "weight", *weight, x.device);
    args.weight_type = floating_type(op, w);
    if (w.dims != 1 || w.size(0) != args.cols) {
      fail(op, "weight must have shape [" + std::to_string(args.cols) + "], the last dimension of x, got " +
                   shape_of(w));
    }
    if (args.cols > 1 && w.stride(0) != 1) weight = torch::stable::contiguous(*weight);
    args.weight = weight->data_ptr();
  }
  return args;
}

// The residual is read; unless set otherwise, the sum replaces it.
void add_residual(const char* op, const View& x, const View& residual, NormArgs& args) {
  check_same_shape(op, x, residual);
  check_dense_rows(op, residual);
  if (residual.dtype != x.dtype) fail(op, "x_residual must have the dtype of x");
  args.residual = args.sum = data_of(residual);
  args.residual_rows = args.sum_rows = rows_of(op, residual, residual.dims - 1);
}

// The sum replaces the residual, and with `both` the norm replaces x. Refuses what would be overwritten before it is read.
void check_overwritten(const char* op, const View& x, const View& residual, const Tensor* scale, bool both,
                       const NormArgs& args) {
  if (residual.numel() == 0) return;
  const Region sum = region_of("x_residual", args.residual, args.type, args.cols, args.residual_rows);
  const Region norm = region_of("x", args.x, args.type, args.cols, args.x_rows);
  check_distinct_rows(op, residual, args.residual_rows);
  if (both) check_distinct_rows(op, x, args.x_rows);
  check_apart(op, sum, norm);
  if (args.weight != nullptr) {
    const Region weight = region_of("weight", args.weight, args.weight_type, args.cols);
    check_apart(op, sum, weight);
    if (both) check_apart(op, norm, weight);
  }
  if (scale != nullptr) check_apart(op, sum, region_of("scale", scale->data_ptr(), Type::f32, 1));
}

void run_norm(const char* op, const View& x, NormArgs& args, const Tensor& out) {
  args.out = out.data_ptr();
  const int64_t rows = product(x, x.dims - 1);
  if (rows > 0 && args.cols > 0) run(op, x.device, args, rows);
}

// Quantises the norm: with `scale`, or with one for each group, or for each row if both are null.
CodesAndScales quantised(const char* op, const View& x, NormArgs& args, const Tensor* scale, const Grouping* grouping,
                         const Tensor* out = nullptr, const Tensor* scales_out = nullptr) {
  const bool dynamic = scale == nullptr;
  if (!dynamic) args.scale = scale_data(op, *scale, x.device);
  if (grouping != nullptr) args.groups = groups_of(op, x, args.cols, *grouping);
  const bool only = !dynamic && args.sum == args.residual;  // there are no scales to return, and no new sum
  Tensor codes = output_for(op, only ? "out" : "out0", out, x, x.sizes, code_dtype());
  Tensor scales = !dynamic              ? codes
                  : grouping != nullptr ? group_scales_for(op, x, args.cols, args.groups, scales_out)
                                        : scales_for(op, x, scales_out);
  args.out = codes.data_ptr();
  args.quantisation = dynamic ? Quantisation::dynamic : Quantisation::fixed;
  if (dynamic) args.scales = static_cast<float*>(scales.data_ptr());
  const int64_t rows = product(x, x.dims - 1);
  if (rows > 0) run(op, x.device, args, rows);
  return {codes, scales};
}

}  // namespace

// ---- rms_norm ----------------------------------------------------------------------------------------------------

static Tensor rms_norm_to(const char* op, bool one_plus, const Tensor& x, OptionalTensor& weight, double epsilon,
                          const Tensor* given) {
  const View view = view_of(op, "x", x);
  NormArgs args = norm_arguments(op, view, weight, epsilon, one_plus);
  Tensor out = output_for(op, "out", given, view, view.sizes, view.dtype);
  run_norm(op, view, args, out);
  return out;
}

Tensor rms_norm(const Tensor& x, OptionalTensor weight, double epsilon) {
  return rms_norm_to("rms_norm", false, x, weight, epsilon, nullptr);
}

void rms_norm_out(const Tensor& x, OptionalTensor weight, double epsilon, Tensor out) {
  rms_norm_to("rms_norm", false, x, weight, epsilon, &out);
}

static CodesAndScales rms_norm_quantised(const char* op, const Tensor& x, OptionalTensor& weight, const Tensor* scale,
                                         const Grouping* grouping, double epsilon, const Tensor* out,
                                         const Tensor* scales_out) {
  const View view = view_of(op, "x", x);
  NormArgs args = norm_arguments(op, view, weight, epsilon);
  return quantised(op, view, args, scale, grouping, out, scales_out);
}

Tensor rms_norm_static_quant_fp8(const Tensor& x, OptionalTensor weight, const Tensor& scale, double epsilon) {
  return std::get<0>(
      rms_norm_quantised("rms_norm_static_quant_fp8", x, weight, &scale, nullptr, epsilon, nullptr, nullptr));
}

void rms_norm_static_quant_fp8_out(const Tensor& x, OptionalTensor weight, const Tensor& scale, double epsilon,
                                   Tensor out) {
  rms_norm_quantised("rms_norm_static_quant_fp8", x, weight, &scale, nullptr, epsilon, &out, nullptr);
}

CodesAndScales rms_norm_dynamic_quant_fp8(const Tensor& x, OptionalTensor weight, double epsilon) {
  return rms_norm_quantised("rms_norm_dynamic_quant_fp8", x, weight, nullptr, nullptr, epsilon, nullptr, nullptr);
}

void rms_norm_dynamic_quant_fp8_out(const Tensor& x, OptionalTensor weight, double epsilon, Tensor out0, Tensor out1) {
  rms_norm_quantised("rms_norm_dynamic_quant_fp8", x, weight, nullptr, nullptr, epsilon, &out0, &out1);
}

CodesAndScales rms_norm_group_quant_fp8(const Tensor& x, OptionalTensor weight, double epsilon, int64_t group_size,
                                        bool column_major_scales, bool power_of_two_scales) {
  const Grouping grouping{group_size, column_major_scales, power_of_two_scales};
  return rms_norm_quantised("rms_norm_group_quant_fp8", x, weight, nullptr, &grouping, epsilon, nullptr, nullptr);
}

void rms_norm_group_quant_fp8_out(const Tensor& x, OptionalTensor weight, double epsilon, int64_t group_size,
                                  bool column_major_scales, bool power_of_two_scales, Tensor out0, Tensor out1) {
  const Grouping grouping{group_size, column_major_scales, power_of_two_scales};
  rms_norm_quantised("rms_norm_group_quant_fp8", x, weight, nullptr, &grouping, epsilon, &out0, &out1);
}

// ---- fused_add_rms_norm ------------------------------------------------------------------------------------------

static void fused_add_rms_norm_in_place(const char* op, bool one_plus, const Tensor& x, const Tensor& x_residual,
                                        OptionalTensor& weight, double epsilon) {
  const View view = view_of(op, "x", x), residual = view_of(op, "x_residual", x_residual, view.device);
  NormArgs args = norm_arguments(op, view, weight, epsilon, one_plus);
  add_residual(op, view, residual, args);
  args.out_rows = args.x_rows;
  const int64_t rows = product(view, view.dims - 1);
  if (rows == 0 || args.cols == 0) return;
  check_overwritten(op, view, residual, nullptr, true, args);
  args.out = data_of(view);
  run(op, view.device, args, rows);
}

void fused_add_rms_norm(const Tensor& x, const Tensor& x_residual, OptionalTensor weight, double epsilon) {
  fused_add_rms_norm_in_place("fused_add_rms_norm", false, x, x_residual, weight, epsilon);
}

static std::tuple<Tensor, Tensor> fused_add_rms_norm_to(const char* op, bool one_plus, const Tensor& x,
                                                        const Tensor& x_residual, OptionalTensor& weight,
                                                        double epsilon, const Tensor* given, const Tensor* given_sum) {
  const View view = view_of(op, "x", x), residual = view_of(op, "x_residual", x_residual, view.device);
  NormArgs args = norm_arguments(op, view, weight, epsilon, one_plus);
  add_residual(op, view, residual, args);
  Tensor out = output_for(op, "out0", given, view, view.sizes, view.dtype);
  Tensor sum = output_for(op, "out1", given_sum, view, view.sizes, view.dtype);
  args.sum = sum.data_ptr();
  args.sum_rows = args.out_rows;
  run_norm(op, view, args, out);
  return {out, sum};
}

std::tuple<Tensor, Tensor> fused_add_rms_norm_functional(const Tensor& x, const Tensor& x_residual,
                                                         OptionalTensor weight, double epsilon) {
  return fused_add_rms_norm_to("fused_add_rms_norm_functional", false, x, x_residual, weight, epsilon, nullptr, nullptr);
}

void fused_add_rms_norm_functional_out(const Tensor& x, const Tensor& x_residual, OptionalTensor weight,
                                       double epsilon, Tensor out0, Tensor out1) {
  fused_add_rms_norm_to("fused_add_rms_norm_functional", false, x, x_residual, weight, epsilon, &out0, &out1);
}

// Overwrites the residual with the sum.
static CodesAndScales fused_add_quantised(const char* op, const Tensor& x, const Tensor& x_residual,
                                          OptionalTensor& weight, const Tensor* scale, const Grouping* grouping,
                                          double epsilon) {
  const View view = view_of(op, "x", x), residual = view_of(op, "x_residual", x_residual, view.device);
  NormArgs args = norm_arguments(op, view, weight, epsilon);
  add_residual(op, view, residual, args);
  check_overwritten(op, view, residual, scale, false, args);
  return quantised(op, view, args, scale, grouping);
}

// Overwrites nothing: the sum goes to `given_sum`, or else to a new tensor.
static CodesScalesAndSum fused_add_quantised_to(const char* op, const Tensor& x, const Tensor& x_residual,
                                                OptionalTensor& weight, const Tensor* scale, const Grouping* grouping,
                                                double epsilon, const Tensor* out = nullptr,
                                                const Tensor* scales_out = nullptr, const Tensor* given_sum = nullptr) {
  const View view = view_of(op, "x", x), residual = view_of(op, "x_residual", x_residual, view.device);
  NormArgs args = norm_arguments(op, view, weight, epsilon);
  add_residual(op, view, residual, args);
  Tensor sum = output_for(op, scale != nullptr ? "out1" : "out2", given_sum, view, view.sizes, view.dtype);
  args.sum = sum.data_ptr();
  args.sum_rows = args.out_rows;
  auto [codes, scales] = quantised(op, view, args, scale, grouping, out, scales_out);
  return {codes, scales, sum};
}

Tensor fused_add_rms_norm_static_quant_fp8(const Tensor& x, const Tensor& x_residual, OptionalTensor weight,
                                           const Tensor& scale, double epsilon) {
  return std::get<0>(
      fused_add_quantised("fused_add_rms_norm_static_quant_fp8", x, x_residual, weight, &scale, nullptr, epsilon));
}

CodesAndScales fused_add_rms_norm_dynamic_quant_fp8(const Tensor& x, const Tensor& x_residual, OptionalTensor weight,
                                                    double epsilon) {
  return fused_add_quantised("fused_add_rms_norm_dynamic_quant_fp8", x, x_residual, weight, nullptr, nullptr, epsilon);
}

CodesAndScales fused_add_rms_norm_group_quant_fp8(const Tensor& x, const Tensor& x_residual, OptionalTensor weight,
                                                  double epsilon, int64_t group_size, bool column_major_scales,
                                                  bool power_of_two_scales) {
  const Grouping grouping{group_size, column_major_scales, power_of_two_scales};
  return fused_add_quantised("fused_add_rms_norm_group_quant_fp8", x, x_residual, weight, nullptr, &grouping, epsilon);
}

CodesScalesAndSum fused_add_rms_norm_group_quant_fp8_functional(const Tensor& x, const Tensor& x_residual,
                                                                OptionalTensor weight, double epsilon,
                                                                int64_t group_size, bool column_major_scales,
                                                                bool power_of_two_scales) {
  const Grouping grouping{group_size, column_major_scales, power_of_two_scales};
  return fused_add_quantised_to("fused_add_rms_norm_group_quant_fp8_functional", x, x_residual, weight, nullptr,
                                &grouping, epsilon);
}

void fused_add_rms_norm_group_quant_fp8_functional_out(const Tensor& x, const Tensor& x_residual, OptionalTensor weight,
                                                       double epsilon, int64_t group_size, bool column_major_scales,
                                                       bool power_of_two_scales, Tensor out0, Tensor out1, Tensor out2) {
  const Grouping grouping{group_size, column_major_scales, power_of_two_scales};
  fused_add_quantised_to("fused_add_rms_norm_group_quant_fp8_functional", x, x_residual, weight, nullptr, &grouping,
                         epsilon, &out0, &out1, &out2);
}

std::tuple<Tensor, Tensor> fused_add_rms_norm_static_quant_fp8_functional(const Tensor& x, const Tensor& x_residual,
                                                                          OptionalTensor weight, const Tensor& scale,
                                                                          double epsilon) {
  auto [codes, scales, sum] = fused_add_quantised_to("fused_add_rms_norm_static_quant_fp8_functional", x, x_residual,
                                                     weight, &scale, nullptr, epsilon);
  return {codes, sum};
}

void fused_add_rms_norm_static_quant_fp8_functional_out(const Tensor& x, const Tensor& x_residual,
                                                        OptionalTensor weight, const Tensor& scale, double epsilon,
                                                        Tensor out0, Tensor out1) {
  fused_add_quantised_to("fused_add_rms_norm_static_quant_fp8_functional", x, x_residual, weight, &scale, nullptr,
                         epsilon, &out0, nullptr, &out1);
}

CodesScalesAndSum fused_add_rms_norm_dynamic_quant_fp8_functional(const Tensor& x, const Tensor& x_residual,
                                                                  OptionalTensor weight, double epsilon) {
  return fused_add_quantised_to("fused_add_rms_norm_dynamic_quant_fp8_functional", x, x_residual, weight, nullptr,
                                nullptr, epsilon);
}

void fused_add_rms_norm_dynamic_quant_fp8_functional_out(const Tensor& x, const Tensor& x_residual,
                                                         OptionalTensor weight, double epsilon, Tensor out0, Tensor out1,
                                                         Tensor out2) {
  fused_add_quantised_to("fused_add_rms_norm_dynamic_quant_fp8_functional", x, x_residual, weight, nullptr, nullptr,
                         epsilon, &out0, &out1, &out2);
}

// ---- Gemma's norms, which scale by 1 + weight ------------------------------------------------------------------------

Tensor gemma_rms_norm(const Tensor& x, const Tensor& weight, double epsilon) {
  OptionalTensor given(weight);
  return rms_norm_to("gemma_rms_norm", true, x, given, epsilon, nullptr);
}

void gemma_rms_norm_out(const Tensor& x, const Tensor& weight, double epsilon, Tensor out) {
  OptionalTensor given(weight);
  rms_norm_to("gemma_rms_norm", true, x, given, epsilon, &out);
}

void fused_add_gemma_rms_norm(const Tensor& x, const Tensor& x_residual, const Tensor& weight, double epsilon) {
  OptionalTensor given(weight);
  fused_add_rms_norm_in_place("fused_add_gemma_rms_norm", true, x, x_residual, given, epsilon);
}

std::tuple<Tensor, Tensor> fused_add_gemma_rms_norm_functional(const Tensor& x, const Tensor& x_residual,
                                                               const Tensor& weight, double epsilon) {
  OptionalTensor given(weight);
  return fused_add_rms_norm_to("fused_add_gemma_rms_norm_functional", true, x, x_residual, given, epsilon, nullptr,
                               nullptr);
}

void fused_add_gemma_rms_norm_functional_out(const Tensor& x, const Tensor& x_residual, const Tensor& weight,
                                             double epsilon, Tensor out0, Tensor out1) {
  OptionalTensor given(weight);
  fused_add_rms_norm_to("fused_add_gemma_rms_norm_functional", true, x, x_residual, given, epsilon, &out0, &out1);
}

}  // namespace irframework_vllm_c
