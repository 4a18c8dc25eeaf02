// Owns the op apply_rotary_pos_emb, which only the CPU has a kernel for: its checks, output and arguments.
#include "launch.h"
#include "ops.h"

namespace irframework_vllm_c {
namespace {

// Of cos or sin: one row for each token of x, [batch, tokens, ...].
Rows angle_rows(const char* op, const View& angles, const View& x) {
  const bool fits = angles.dims == 3 && (angles.size(0) == x.size(0) || angles.size(0) == 1) &&
                    angles.size(1) == x.size(1) && angles.size(2) == x.size(3);
  if (!fits) {
    fail(op, std::string(angles.name) + " must have shape [batch, tokens, head_size] or [1, tokens, head_size] as x has " +
                 shape_of(x) + ", got " + shape_of(angles));
  }
  check_dense_rows(op, angles);
  const int64_t strides[2] = {angles.size(0) == 1 ? 0 : angles.stride(0), angles.stride(1)};
  View rows = x;
  rows.strides = strides;
  return rows_of(op, rows, 2);
}

Tensor rotated(const Tensor& x, const Tensor& cos, const Tensor& sin, const Tensor* given) {
  const char* op = "apply_rotary_pos_emb";
  const View view = view_of(op, "x", x);
  const View cosines = view_of(op, "cos", cos, view.device), sines = view_of(op, "sin", sin, view.device);
  HeadAnglesArgs args{};
  args.type = floating_type(op, view);
  args.angle_type = floating_type(op, cosines);
  if (sines.dtype != cosines.dtype) fail(op, "sin must have the dtype of cos");
  if (view.dims != 4 || view.size(3) % 2 != 0) {
    fail(op, "x must have shape [batch, tokens, heads, head_size] with an even head_size, got " + shape_of(view));
  }
  check_dense_rows(op, view);
  args.cos_rows = angle_rows(op, cosines, view);
  args.sin_rows = angle_rows(op, sines, view);
  args.head_size = view.size(3);
  args.x.heads = view.size(2);
  args.x.head_stride = view.stride(2);
  args.x.token_rows = rows_of(op, view, 2);
  Tensor out = output_for(op, "out", given, view, view.sizes, view.dtype);
  args.x.in = data_of(view);
  args.x.out = out.data_ptr();
  args.cos = data_of(cosines);
  args.sin = data_of(sines);
  if (view.numel() > 0) run(op, view.device, args, view.size(0) * view.size(1));
  return out;
}

}  // namespace

Tensor apply_rotary_pos_emb(const Tensor& x, const Tensor& cos, const Tensor& sin) { return rotated(x, cos, sin, nullptr); }

void apply_rotary_pos_emb_out(const Tensor& x, const Tensor& cos, const Tensor& sin, Tensor out) {
  rotated(x, cos, sin, &out);
}

}  // namespace irframework_vllm_c
