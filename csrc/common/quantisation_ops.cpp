// Owns the ops static_quant_fp8 and dynamic_quant_fp8, on every device: their checks, outputs and arguments.
#include "launch.h"
#include "ops.h"

namespace irframework_vllm_c {
namespace {

// Elements of one "row" of a tensor that is quantised with one scale, and so can be cut anywhere.
constexpr int64_t kBlock = 4096;

Tensor with_fixed_scale(const Tensor& x, const Tensor& scale, const Tensor* out = nullptr) {
  const char* op = "static_quant_fp8";
  const View view = view_of(op, "x", x);
  QuantArgs args{};
  args.type = floating_type(op, view);
  args.scale = scale_data(op, scale, view.device);
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
  Tensor codes = output_for(op, "out", out, view, view.sizes, code_dtype());
  args.x = data_of(view);
  args.codes = static_cast<uint8_t*>(codes.data_ptr());
  if (args.numel > 0) run(op, view.device, args, rows);
  return codes;
}

CodesAndScales with_scale_per_row(const Tensor& x, const Tensor* out = nullptr, const Tensor* scales_out = nullptr) {
  const char* op = "dynamic_quant_fp8";
  const View view = view_of(op, "x", x);
  check_rank(op, view, 1);
  check_dense_rows(op, view);
  QuantArgs args{};
  args.type = floating_type(op, view);
  args.numel = view.numel();
  args.cols = view.size(-1);
  args.x_rows = rows_of(op, view, view.dims - 1);
  Tensor codes = output_for(op, "out0", out, view, view.sizes, code_dtype());
  Tensor scales = scales_for(op, view, scales_out);
  args.x = data_of(view);
  args.codes = static_cast<uint8_t*>(codes.data_ptr());
  args.scales = static_cast<float*>(scales.data_ptr());
  const int64_t rows = product(view, view.dims - 1);
  if (rows > 0) run(op, view.device, args, rows);
  return {codes, scales};
}

}  // namespace

Tensor static_quant_fp8(const Tensor& x, const Tensor& scale) { return with_fixed_scale(x, scale); }

void static_quant_fp8_out(const Tensor& x, const Tensor& scale, Tensor out) { with_fixed_scale(x, scale, &out); }

CodesAndScales dynamic_quant_fp8(const Tensor& x) { return with_scale_per_row(x); }

void dynamic_quant_fp8_out(const Tensor& x, Tensor out0, Tensor out1) { with_scale_per_row(x, &out0, &out1); }

}  // namespace irframework_vllm_c
