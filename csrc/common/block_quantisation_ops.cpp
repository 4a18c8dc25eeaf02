// Owns the quantisations that only the CPU has kernels for (one scale for a tensor, for a group of a row, to int8), and the
// way back: their checks, outputs and arguments.
#include <cmath>

#include "launch.h"
#include "ops.h"

namespace irframework_vllm_c {
namespace {

constexpr int64_t kBlock = 4096;  // elements, where a tensor can be cut anywhere

CodesAndScales with_one_scale(const Tensor& x, const Tensor* out = nullptr, const Tensor* scales_out = nullptr) {
  const char* op = "tensor_quant_fp8";
  const View view = view_of(op, "x", x);
  QuantArgs args{};
  args.type = floating_type(op, view);
  args.numel = view.numel();
  int64_t rows;
  if (x.is_contiguous()) {
    args.cols = kBlock;
    rows = (args.numel + kBlock - 1) / kBlock;
    args.x_rows = contiguous_rows(rows, kBlock);
  } else {
    check_dense_rows(op, view);
    args.cols = view.size(-1);
    rows = product(view, view.dims - 1);
    args.x_rows = rows_of(op, view, view.dims - 1);
  }
  const int64_t one = 1;
  Tensor codes = output_for(op, "out0", out, view, view.sizes, code_dtype());
  Tensor scale = floats_for(op, view, 1, &one, scales_out);
  args.x = data_of(view);
  args.codes = static_cast<uint8_t*>(codes.data_ptr());
  run_with_one_scale(op, view.device, args, rows, static_cast<float*>(scale.data_ptr()));
  return {codes, scale};
}

CodesAndScales to_int8(const Tensor& x, const Tensor* out = nullptr, const Tensor* scales_out = nullptr) {
  static const int32_t int8 = aoti_torch_dtype_int8();
  const char* op = "dynamic_quant_int8";
  const View view = view_of(op, "x", x);
  check_rank(op, view, 1);
  check_dense_rows(op, view);
  QuantArgs args{};
  args.type = floating_type(op, view);
  args.coding = Coding::int8;
  args.numel = view.numel();
  args.cols = view.size(-1);
  args.x_rows = rows_of(op, view, view.dims - 1);
  Tensor codes = output_for(op, "out0", out, view, view.sizes, int8);
  Tensor scales = scales_for(op, view, scales_out);
  args.x = data_of(view);
  args.codes = static_cast<uint8_t*>(codes.data_ptr());
  args.scales = static_cast<float*>(scales.data_ptr());
  const int64_t rows = product(view, view.dims - 1);
  if (rows > 0) run(op, view.device, args, rows);
  return {codes, scales};
}

CodesAndScales with_scale_per_group(const Tensor& x, const Grouping& grouping, const Tensor* out = nullptr,
                                    const Tensor* scales_out = nullptr) {
  const char* op = "group_quant_fp8";
  const View view = view_of(op, "x", x);
  check_rank(op, view, 1);
  check_dense_rows(op, view);
  GroupQuantArgs args{};
  args.type = floating_type(op, view);
  args.cols = view.size(-1);
  args.groups = groups_of(op, view, args.cols, grouping);
  args.x_rows = rows_of(op, view, view.dims - 1);
  Tensor codes = output_for(op, "out0", out, view, view.sizes, code_dtype());
  Tensor scales = group_scales_for(op, view, args.cols, args.groups, scales_out);
  args.x = data_of(view);
  args.codes = static_cast<uint8_t*>(codes.data_ptr());
  args.scales = static_cast<float*>(scales.data_ptr());
  const int64_t rows = product(view, view.dims - 1);
  if (rows > 0 && args.cols > 0) run(op, view.device, args, rows);
  return {codes, scales};
}

// Reads the layout of the scales out of their shape: one for the tensor, or groups of each row.
void lay_out_scales(const char* op, const View& codes, const View& scale, DequantArgs& args) {
  const bool one = !args.column_major && (scale.dims == 0 || (scale.dims == 1 && codes.dims != 1));
  if (one && scale.numel() == 1) return;
  const int64_t least = args.column_major ? 2 : 1;
  bool fits = !one && codes.dims >= least && scale.dims == codes.dims;
  for (int64_t d = 0; fits && d < codes.dims - least; ++d) fits = scale.sizes[d] == codes.sizes[d];
  if (fits) {
    args.groups = scale.size(args.column_major ? -2 : -1);
    fits = !args.column_major || scale.size(-1) == codes.size(-2);
    fits = fits && (args.cols == 0 || (args.groups > 0 && args.cols % args.groups == 0));
  }
  if (!fits) fail(op, "scale does not fit q, they have shapes " + shape_of(scale) + " and " + shape_of(codes));
}

// Zero and what is not finite are refused, as the op's value check does.
void check_scale_values(const char* op, const float* scales, int64_t count) {
  bool wrong = false;
  for (int64_t i = 0; i < count; ++i) wrong |= scales[i] == 0.0f || !std::isfinite(scales[i]);
  if (wrong) fail(op, "scale must be finite and not zero");
}

Type result_type(const char* op, ScalarType dtype) {
  if (dtype == ScalarType::Float) return Type::f32;
  if (dtype == ScalarType::BFloat16) return Type::bf16;
  if (dtype == ScalarType::Half) return Type::f16;
  fail(op, "dtype must be float32, bfloat16 or float16");
}

Tensor values(const Tensor& q, const Tensor& scale, ScalarType dtype, bool column_major, const Tensor* given = nullptr) {
  static const int32_t f32 = aoti_torch_dtype_float32(), int8 = aoti_torch_dtype_int8(),
                       dtypes[3] = {f32, aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float16()};
  const char* op = "dequant";
  const View view = view_of(op, "q", q), scales = view_of(op, "scale", scale, view.device);
  check_rank(op, view, 1);
  check_dense_rows(op, view);
  if (view.dtype != int8 && view.dtype != code_dtype()) fail(op, "q must hold codes in float8_e4m3fn or int8");
  if (scales.dtype != f32 || !scale.is_contiguous()) fail(op, "scale must be float32 and contiguous");
  DequantArgs args{};
  args.type = result_type(op, dtype);
  args.coding = view.dtype == int8 ? Coding::int8 : Coding::e4m3;
  args.cols = view.size(-1);
  args.tokens = view.dims > 1 ? view.size(-2) : 1;
  args.column_major = column_major;
  lay_out_scales(op, view, scales, args);
  args.code_rows = rows_of(op, view, view.dims - 1);
  args.scales = static_cast<const float*>(data_of(scales));
  check_scale_values(op, args.scales, scales.numel());
  Tensor out = output_for(op, "out", given, view, view.sizes, dtypes[static_cast<int>(args.type)]);
  args.codes = static_cast<const uint8_t*>(data_of(view));
  args.out = out.data_ptr();
  const int64_t rows = product(view, view.dims - 1);
  if (rows > 0 && args.cols > 0) run(op, view.device, args, rows);
  return out;
}

}  // namespace

CodesAndScales tensor_quant_fp8(const Tensor& x) { return with_one_scale(x); }
void tensor_quant_fp8_out(const Tensor& x, Tensor out0, Tensor out1) { with_one_scale(x, &out0, &out1); }

CodesAndScales dynamic_quant_int8(const Tensor& x) { return to_int8(x); }
void dynamic_quant_int8_out(const Tensor& x, Tensor out0, Tensor out1) { to_int8(x, &out0, &out1); }

CodesAndScales group_quant_fp8(const Tensor& x, int64_t group_size, bool column_major_scales, bool power_of_two_scales) {
  return with_scale_per_group(x, {group_size, column_major_scales, power_of_two_scales});
}
void group_quant_fp8_out(const Tensor& x, int64_t group_size, bool column_major_scales, bool power_of_two_scales,
                         Tensor out0, Tensor out1) {
  with_scale_per_group(x, {group_size, column_major_scales, power_of_two_scales}, &out0, &out1);
}

Tensor dequant(const Tensor& q, const Tensor& scale, ScalarType dtype, bool column_major_scales) {
  return values(q, scale, dtype, column_major_scales);
}
void dequant_out(const Tensor& q, const Tensor& scale, ScalarType dtype, bool column_major_scales, Tensor out) {
  values(q, scale, dtype, column_major_scales, &out);
}

}  // namespace irframework_vllm_c
