// Owns the activations that only the CPU has kernels for: their checks, outputs and arguments.
#include "launch.h"
#include "ops.h"

namespace irframework_vllm_c {
namespace {

// Elements of one "row" of a tensor whose rows do not matter, and so can be cut anywhere.
constexpr int64_t kBlock = 4096;

PointwiseArgs arguments(const char* op, const View& x, Pointwise function) {
  PointwiseArgs args{};
  args.type = floating_type(op, x);
  args.function = function;
  return args;
}

// Writes to `given`, or else to a new tensor. `contiguous`: all that is read is.
Tensor of_elements(const char* op, const View& view, PointwiseArgs& args, bool contiguous, const Tensor* given) {
  args.numel = view.numel();
  int64_t rows;
  if (contiguous) {
    args.cols = kBlock;
    rows = (args.numel + kBlock - 1) / kBlock;
    args.x_rows = contiguous_rows(rows, kBlock);
  } else {
    check_dense_rows(op, view);
    args.cols = view.size(-1);
    rows = product(view, view.dims - 1);
    args.x_rows = rows_of(op, view, view.dims - 1);
  }
  Tensor out = output_for(op, "out", given, view, view.sizes, view.dtype);
  args.x = data_of(view);
  args.out = out.data_ptr();
  if (args.numel > 0) run(op, view.device, args, rows);
  return out;
}

Tensor of_elements(const char* op, const Tensor& x, Pointwise function, const Tensor* given = nullptr) {
  const View view = view_of(op, "x", x);
  PointwiseArgs args = arguments(op, view, function);
  return of_elements(op, view, args, x.is_contiguous(), given);
}

Tensor of_halves(const char* op, const View& view, PointwiseArgs& args, const Tensor* given) {
  check_rank(op, view, 1);
  check_dense_rows(op, view);
  if (view.size(-1) % 2 != 0) {
    fail(op, "the last dimension of x must be even (gate and up halves), got " + std::to_string(view.size(-1)));
  }
  args.cols = view.size(-1) / 2;
  args.x_rows = rows_of(op, view, view.dims - 1);
  const int64_t rows = product(view, view.dims - 1);
  args.numel = rows * args.cols;
  const Sizes sizes = sizes_with_last(op, view, args.cols);
  Tensor out = output_for(op, "out", given, view, sizes.at, view.dtype);
  args.x = data_of(view);
  args.out = out.data_ptr();
  if (args.numel > 0) run(op, view.device, args, rows);
  return out;
}

Tensor gated(const char* op, const Tensor& x, Pointwise function, double first, double second, bool tanh,
             const Tensor* given) {
  const View view = view_of(op, "x", x);
  PointwiseArgs args = arguments(op, view, function);
  args.first = static_cast<float>(first);
  args.second = static_cast<float>(second);
  args.tanh = tanh;
  return of_halves(op, view, args, given);
}

// With a gate in a tensor of its own.
Tensor of_two(const char* op, const Tensor& gate, const Tensor& up, Pointwise function, bool tanh, const Tensor* given) {
  const View view = view_of(op, "gate", gate), other = view_of(op, "up", up, view.device);
  PointwiseArgs args = arguments(op, view, function);
  if (other.dtype != view.dtype) fail(op, "up must have the dtype of gate");
  check_same_shape(op, view, other);
  args.tanh = tanh;
  args.up = data_of(other);
  const bool contiguous = gate.is_contiguous() && up.is_contiguous();
  if (contiguous) {
    args.up_rows = contiguous_rows((view.numel() + kBlock - 1) / kBlock, kBlock);
  } else {
    check_dense_rows(op, other);
    args.up_rows = rows_of(op, other, other.dims - 1);
  }
  return of_elements(op, view, args, contiguous, given);
}

Tensor xielu_to(const Tensor& x, const Tensor& alpha_p, const Tensor& alpha_n, double beta, double epsilon,
                const Tensor* given) {
  const char* op = "xielu";
  const View view = view_of(op, "x", x);
  PointwiseArgs args = arguments(op, view, Pointwise::xielu);
  const View alphas[2] = {view_of(op, "alpha_p", alpha_p, view.device), view_of(op, "alpha_n", alpha_n, view.device)};
  for (int k = 0; k < 2; ++k) {
    if (alphas[k].numel() != 1) {
      fail(op, std::string(alphas[k].name) + " must hold one number, got shape " + shape_of(alphas[k]));
    }
    args.alpha_types[k] = floating_type(op, alphas[k]);
    args.alphas[k] = data_of(alphas[k]);
  }
  args.first = static_cast<float>(beta);
  args.second = static_cast<float>(epsilon);
  return of_elements(op, view, args, x.is_contiguous(), given);
}

}  // namespace

Tensor gelu_new(const Tensor& x) { return of_elements("gelu_new", x, Pointwise::gelu_tanh); }
void gelu_new_out(const Tensor& x, Tensor out) { of_elements("gelu_new", x, Pointwise::gelu_tanh, &out); }

Tensor quick_gelu(const Tensor& x) { return of_elements("quick_gelu", x, Pointwise::quick_gelu); }
void quick_gelu_out(const Tensor& x, Tensor out) { of_elements("quick_gelu", x, Pointwise::quick_gelu, &out); }

Tensor relu2(const Tensor& x) { return of_elements("relu2", x, Pointwise::relu2); }
void relu2_out(const Tensor& x, Tensor out) { of_elements("relu2", x, Pointwise::relu2, &out); }

Tensor xielu(const Tensor& x, const Tensor& alpha_p, const Tensor& alpha_n, double beta, double epsilon) {
  return xielu_to(x, alpha_p, alpha_n, beta, epsilon, nullptr);
}
void xielu_out(const Tensor& x, const Tensor& alpha_p, const Tensor& alpha_n, double beta, double epsilon, Tensor out) {
  xielu_to(x, alpha_p, alpha_n, beta, epsilon, &out);
}

Tensor mul_and_silu(const Tensor& x) {
  return gated("mul_and_silu", x, Pointwise::mul_and_silu, 0, 0, false, nullptr);
}
void mul_and_silu_out(const Tensor& x, Tensor out) {
  gated("mul_and_silu", x, Pointwise::mul_and_silu, 0, 0, false, &out);
}

Tensor fatrelu_and_mul(const Tensor& x, double threshold) {
  return gated("fatrelu_and_mul", x, Pointwise::fatrelu_and_mul, threshold, 0, false, nullptr);
}
void fatrelu_and_mul_out(const Tensor& x, double threshold, Tensor out) {
  gated("fatrelu_and_mul", x, Pointwise::fatrelu_and_mul, threshold, 0, false, &out);
}

Tensor swigluoai_and_mul(const Tensor& x, double alpha, double limit) {
  return gated("swigluoai_and_mul", x, Pointwise::swigluoai_and_mul, alpha, limit, false, nullptr);
}
void swigluoai_and_mul_out(const Tensor& x, double alpha, double limit, Tensor out) {
  gated("swigluoai_and_mul", x, Pointwise::swigluoai_and_mul, alpha, limit, false, &out);
}

Tensor gelu_and_mul_sparse(const Tensor& x, double deviations, bool tanh_approximation) {
  return gated("gelu_and_mul_sparse", x, Pointwise::gelu_and_mul_sparse, deviations, 0, tanh_approximation, nullptr);
}
void gelu_and_mul_sparse_out(const Tensor& x, double deviations, bool tanh_approximation, Tensor out) {
  gated("gelu_and_mul_sparse", x, Pointwise::gelu_and_mul_sparse, deviations, 0, tanh_approximation, &out);
}

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  return of_two("silu_mul", gate, up, Pointwise::silu_mul, false, nullptr);
}
void silu_mul_out(const Tensor& gate, const Tensor& up, Tensor out) {
  of_two("silu_mul", gate, up, Pointwise::silu_mul, false, &out);
}

Tensor gelu_mul(const Tensor& gate, const Tensor& up, bool tanh_approximation) {
  return of_two("gelu_mul", gate, up, Pointwise::gelu_mul, tanh_approximation, nullptr);
}
void gelu_mul_out(const Tensor& gate, const Tensor& up, bool tanh_approximation, Tensor out) {
  of_two("gelu_mul", gate, up, Pointwise::gelu_mul, tanh_approximation, &out);
}

}  // namespace irframework_vllm_c
