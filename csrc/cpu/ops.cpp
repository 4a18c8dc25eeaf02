// Owns the torch ops of the namespace irframework_vllm_c on the CPU: their schemas, outputs and threads. Written on torch's
// stable C ABI (target 2.11). What the kernels do not take is refused here, before anything is launched, because the
// message of an error raised inside a shim call is lost with that target.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>

#include "../common/checks.h"
#include "kernels.h"

namespace irframework_vllm_c {
namespace {

using OptionalTensor = std::optional<Tensor>;

Tensor new_contiguous(const View& like, const int64_t* sizes) {
  int64_t strides[64];
  int64_t stride = 1;
  for (int64_t d = like.dims - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= sizes[d] > 0 ? sizes[d] : 1;
  }
  static const int32_t cpu = aoti_torch_device_type_cpu();
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(like.dims, sizes, strides, like.dtype, cpu, -1, &handle));
  return Tensor(handle);
}

// ---- threads -----------------------------------------------------------------------------------------------------

// Bytes that one thread should have to move before another is worth waking; and the size of an output from which it is
// written around the caches. Such an output has left the second-level cache before anybody reads it, and lines that are
// written whole need not be fetched first: measured with a reader behind, 8 MiB and more gain 10 to 30 percent, 4 MiB lose.
constexpr int64_t kBytesPerThread = 128 * 1024;
constexpr int64_t kStreamBytes = 8 * 1024 * 1024;

template <typename Args>
void run(void (*kernel)(const Args&, int64_t, int64_t), const Args& args, int64_t rows, int64_t bytes_per_row) {
  const int64_t grain = kBytesPerThread / (bytes_per_row > 0 ? bytes_per_row : 1) + 1;
  if (rows <= grain) {
    kernel(args, 0, rows);
    return;
  }
  struct Job {
    void (*kernel)(const Args&, int64_t, int64_t);
    const Args* args;
  } job{kernel, &args};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(
      0, rows, grain,
      [](int64_t begin, int64_t end, void* context) {
        const Job& j = *static_cast<const Job*>(context);
        j.kernel(*j.args, begin, end);
      },
      &job));
}

int64_t bytes_of(Type type) { return type == Type::f32 ? 4 : 2; }

// ---- rms_norm and fused_add_rms_norm -----------------------------------------------------------------------------

// Replaces a weight that is not dense by a copy, which the caller keeps alive.
NormArgs norm_arguments(const char* op, const View& x, OptionalTensor& weight, double epsilon) {
  check_rank(op, x, 1);
  check_dense_rows(op, x);
  NormArgs args{};
  args.type = args.weight_type = floating_type(op, x);
  args.cols = x.size(-1);
  args.epsilon = static_cast<float>(epsilon);
  args.x_rows = rows_of(op, x, x.dims - 1);
  if (weight) {
    const View w = view_of(op, "weight", *weight);
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

void rms_norm_into(const View& x, NormArgs& args, const Tensor& out) {
  args.x = data_of(x);
  args.out = out.data_ptr();
  const int64_t rows = product(x, x.dims - 1), row_bytes = args.cols * bytes_of(args.type);
  args.out_rows = contiguous_rows(rows, args.cols);
  args.stream = rows * row_bytes >= kStreamBytes;
  if (rows > 0 && args.cols > 0) run(active_kernels().rms_norm, args, rows, 2 * row_bytes);
}

Tensor rms_norm(const Tensor& x, OptionalTensor weight, double epsilon) {
  const View view = view_of("rms_norm", "x", x);
  NormArgs args = norm_arguments("rms_norm", view, weight, epsilon);
  Tensor out = new_contiguous(view, view.sizes);
  rms_norm_into(view, args, out);
  return out;
}

void rms_norm_out(const Tensor& x, OptionalTensor weight, double epsilon, Tensor out) {
  const View view = view_of("rms_norm", "x", x);
  NormArgs args = norm_arguments("rms_norm", view, weight, epsilon);
  check_output("rms_norm", "out", out, view, view.sizes);
  rms_norm_into(view, args, out);
}

void fused_add_rms_norm(const Tensor& x, const Tensor& x_residual, OptionalTensor weight, double epsilon) {
  const char* op = "fused_add_rms_norm";
  const View view = view_of(op, "x", x), residual = view_of(op, "x_residual", x_residual);
  NormArgs args = norm_arguments(op, view, weight, epsilon);
  check_same_shape(op, view, residual);
  check_dense_rows(op, residual);
  if (residual.dtype != view.dtype) fail(op, "x_residual must have the dtype of x");
  args.residual_rows = rows_of(op, residual, residual.dims - 1);
  args.out_rows = args.x_rows;
  const int64_t rows = product(view, view.dims - 1);
  if (rows == 0 || args.cols == 0) return;
  check_distinct_rows(op, view, args.x_rows);
  check_distinct_rows(op, residual, args.residual_rows);
  args.x = args.out = data_of(view);
  args.residual = data_of(residual);
  if (args.x == args.residual) fail(op, "x and x_residual are both written to, so they must not be the same memory");
  run(active_kernels().fused_add_rms_norm, args, rows, 4 * args.cols * bytes_of(args.type));
}

// ---- silu_and_mul and gelu_and_mul -------------------------------------------------------------------------------

// Writes to `given`, or else to a new tensor.
Tensor gated(const char* op, const Tensor& x, Gate gate, const Tensor* given = nullptr) {
  const View view = view_of(op, "x", x);
  check_rank(op, view, 1);
  check_dense_rows(op, view);
  GateArgs args{};
  args.type = floating_type(op, view);
  args.gate = gate;
  if (view.size(-1) % 2 != 0) {
    fail(op, "the last dimension of x must be even (gate and up halves), got " + std::to_string(view.size(-1)));
  }
  if (view.dims > 64) fail(op, "x has more than 64 dimensions");
  args.cols = view.size(-1) / 2;
  args.x_rows = rows_of(op, view, view.dims - 1);
  int64_t sizes[64];
  for (int64_t d = 0; d < view.dims; ++d) sizes[d] = view.sizes[d];
  sizes[view.dims - 1] = args.cols;
  if (given != nullptr) check_output(op, "out", *given, view, sizes);
  Tensor out = given != nullptr ? *given : new_contiguous(view, sizes);
  args.x = data_of(view);
  args.out = out.data_ptr();
  const int64_t rows = product(view, view.dims - 1), row_bytes = args.cols * bytes_of(args.type);
  args.stream = rows * row_bytes >= kStreamBytes;
  if (rows > 0 && args.cols > 0) run(active_kernels().gated, args, rows, 3 * row_bytes);
  return out;
}

Tensor silu_and_mul(const Tensor& x) { return gated("silu_and_mul", x, Gate::silu); }

Tensor gelu_and_mul(const Tensor& x, bool tanh_approximation) {
  return gated("gelu_and_mul", x, tanh_approximation ? Gate::gelu_tanh : Gate::gelu_erf);
}

void silu_and_mul_out(const Tensor& x, Tensor out) { gated("silu_and_mul", x, Gate::silu, &out); }

void gelu_and_mul_out(const Tensor& x, bool tanh_approximation, Tensor out) {
  gated("gelu_and_mul", x, tanh_approximation ? Gate::gelu_tanh : Gate::gelu_erf, &out);
}

// ---- rotary_embedding --------------------------------------------------------------------------------------------

// Fills in one of query and key: the dimensions of positions, then heads * head_size, merged or apart.
void fill_rotary_tensor(const char* op, const View& v, const View& positions, int64_t head_size, RotaryTensor& to) {
  const int64_t lead = positions.dims;
  const bool merged = v.dims == lead + 1 && v.size(-1) % head_size == 0;
  const bool apart = v.dims == lead + 2 && v.size(-1) == head_size;
  bool fits = merged || apart;
  for (int64_t d = 0; fits && d < lead; ++d) fits = v.sizes[d] == positions.sizes[d];
  if (!fits) {
    fail(op, std::string(v.name) + " must have shape [..., heads * head_size] or [..., heads, head_size] with the " +
                 "leading dimensions of positions " + shape_of(positions) + " and head_size " +
                 std::to_string(head_size) + ", got " + shape_of(v));
  }
  check_dense_rows(op, v);
  to.heads = apart ? v.size(-2) : v.size(-1) / head_size;
  to.head_stride = apart ? v.stride(-2) : head_size;
  to.token_rows = rows_of(op, v, lead);
  to.in = data_of(v);
}

// Writes to `outputs` if they are given, else puts new tensors there.
void rotary(const char* op, const Tensor& positions, const Tensor* const* inputs, Tensor* outputs, int count,
            const Tensor& cos_sin_cache, int64_t head_size, bool is_neox, bool given = false) {
  static const char* const output_names[2] = {"out0", "out1"};
  static const char* const names[2] = {"query", "key"};
  static const int32_t int64 = aoti_torch_dtype_int64();
  const View where = view_of(op, "positions", positions), cache = view_of(op, "cos_sin_cache", cos_sin_cache);
  const View query = view_of(op, names[0], *inputs[0]);
  RotaryArgs args{};
  args.type = floating_type(op, query);
  args.cache_type = floating_type(op, cache);
  if (where.dtype != int64) fail(op, "positions must be int64");
  if (!positions.is_contiguous()) fail(op, "positions must be contiguous");
  if (cache.dims != 2) fail(op, "cos_sin_cache must have shape [max_position, rotary_dim], got " + shape_of(cache));
  check_dense_rows(op, cache);
  args.rotary_dim = cache.size(1);
  if (head_size < 1 || args.rotary_dim % 2 != 0 || args.rotary_dim > head_size) {
    fail(op, "rotary_dim (the width of cos_sin_cache, " + std::to_string(args.rotary_dim) +
                 ") must be even and at most head_size (" + std::to_string(head_size) + ")");
  }
  args.cache = data_of(cache);
  args.cache_stride = cache.stride(0);
  args.positions = static_cast<const int64_t*>(data_of(where));
  const int64_t tokens = where.numel();
  args.head_size = head_size;
  args.neox = is_neox;
  args.tensor_count = count;
  for (int64_t i = 0; i < tokens; ++i) {
    if (args.positions[i] < 0 || args.positions[i] >= cache.size(0)) {
      fail(op, "position " + std::to_string(args.positions[i]) + " is outside cos_sin_cache, which has " +
                   std::to_string(cache.size(0)) + " rows");
    }
  }
  int64_t token_bytes = 0;
  for (int k = 0; k < count; ++k) {
    const View v = k == 0 ? query : view_of(op, names[k], *inputs[k]);
    if (v.dtype != query.dtype) fail(op, "key must have the dtype of query");
    fill_rotary_tensor(op, v, where, head_size, args.tensors[k]);
    token_bytes += 2 * args.tensors[k].heads * head_size * bytes_of(args.type);
    if (given) {
      check_output(op, count == 1 ? "out" : output_names[k], outputs[k], v, v.sizes);
    } else {
      outputs[k] = new_contiguous(v, v.sizes);
    }
    args.tensors[k].out = outputs[k].data_ptr();
  }
  if (tokens > 0) run(active_kernels().rotary, args, tokens, token_bytes);
}

std::tuple<Tensor, Tensor> rotary_embedding(const Tensor& positions, const Tensor& query, const Tensor& key,
                                            const Tensor& cos_sin_cache, int64_t head_size, bool is_neox) {
  const Tensor* inputs[2] = {&query, &key};
  Tensor outputs[2] = {query, key};
  rotary("rotary_embedding", positions, inputs, outputs, 2, cos_sin_cache, head_size, is_neox);
  return {outputs[0], outputs[1]};
}

Tensor rotary_embedding_query(const Tensor& positions, const Tensor& query, const Tensor& cos_sin_cache,
                              int64_t head_size, bool is_neox) {
  const Tensor* inputs[1] = {&query};
  Tensor outputs[1] = {query};
  rotary("rotary_embedding_query", positions, inputs, outputs, 1, cos_sin_cache, head_size, is_neox);
  return outputs[0];
}

void rotary_embedding_out(const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& cos_sin_cache,
                          int64_t head_size, bool is_neox, Tensor out0, Tensor out1) {
  const Tensor* inputs[2] = {&query, &key};
  Tensor outputs[2] = {out0, out1};
  rotary("rotary_embedding", positions, inputs, outputs, 2, cos_sin_cache, head_size, is_neox, true);
}

void rotary_embedding_query_out(const Tensor& positions, const Tensor& query, const Tensor& cos_sin_cache,
                                int64_t head_size, bool is_neox, Tensor out) {
  const Tensor* inputs[1] = {&query};
  rotary("rotary_embedding_query", positions, inputs, &out, 1, cos_sin_cache, head_size, is_neox, true);
}

}  // namespace
}  // namespace irframework_vllm_c

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
  m.impl("fused_add_rms_norm", TORCH_BOX(&irframework_vllm_c::fused_add_rms_norm));
  m.impl("silu_and_mul", TORCH_BOX(&irframework_vllm_c::silu_and_mul));
  m.impl("gelu_and_mul", TORCH_BOX(&irframework_vllm_c::gelu_and_mul));
  m.impl("rotary_embedding", TORCH_BOX(&irframework_vllm_c::rotary_embedding));
  m.impl("rotary_embedding_query", TORCH_BOX(&irframework_vllm_c::rotary_embedding_query));
  m.impl("rms_norm.out", TORCH_BOX(&irframework_vllm_c::rms_norm_out));
  m.impl("silu_and_mul.out", TORCH_BOX(&irframework_vllm_c::silu_and_mul_out));
  m.impl("gelu_and_mul.out", TORCH_BOX(&irframework_vllm_c::gelu_and_mul_out));
  m.impl("rotary_embedding.out", TORCH_BOX(&irframework_vllm_c::rotary_embedding_out));
  m.impl("rotary_embedding_query.out", TORCH_BOX(&irframework_vllm_c::rotary_embedding_query_out));
}
