// Owns the ops rotary_embedding and rotary_embedding_query, on every device, and behind a norm of each head, on the CPU:
// their checks, outputs and arguments.
#include <torch/csrc/stable/ops.h>

#include "launch.h"
#include "ops.h"

namespace irframework_vllm_c {
namespace {

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

// Norms of the heads, before they are rotated: of query, and of key.
struct HeadNorms {
  OptionalTensor weights[2];
  double epsilon;
};

// Replaces a weight that is not dense by a copy, which the caller keeps alive.
void fill_norm(const char* op, const char* name, OptionalTensor& weight, const Device& device, int64_t head_size,
               RotaryTensor& to) {
  if (!weight.has_value()) return;
  const View w = view_of(op, name, *weight, device);
  to.weight_type = floating_type(op, w);
  if (w.dims != 1 || w.size(0) != head_size) {
    fail(op, std::string(name) + " must have shape [" + std::to_string(head_size) + "], that of a head, got " + shape_of(w));
  }
  if (head_size > 1 && w.stride(0) != 1) weight = torch::stable::contiguous(*weight);
  to.weight = weight->data_ptr();
}

// Writes to `outputs` if they are given, else puts new tensors there.
void rotary(const char* op, const Tensor& positions, const Tensor* const* inputs, Tensor* outputs, int count,
            const Tensor& cos_sin_cache, int64_t head_size, bool is_neox, bool given = false,
            HeadNorms* norms = nullptr) {
  static const char* const weight_names[2] = {"query_weight", "key_weight"};
  static const char* const output_names[2] = {"out0", "out1"};
  static const char* const names[2] = {"query", "key"};
  static const int32_t int64 = aoti_torch_dtype_int64();
  const View query = view_of(op, names[0], *inputs[0]), where = view_of(op, "positions", positions, query.device);
  const View cache = view_of(op, "cos_sin_cache", cos_sin_cache, query.device);
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
  args.cache_rows = cache.size(0);
  args.cache_stride = cache.stride(0);
  args.positions = static_cast<const int64_t*>(data_of(where));
  const int64_t tokens = where.numel();
  args.head_size = head_size;
  args.neox = is_neox;
  args.tensor_count = count;
  args.normed = norms != nullptr;
  args.epsilon = norms != nullptr ? static_cast<float>(norms->epsilon) : 0.0f;
  check_positions(op, query.device, args, tokens);
  for (int k = 0; k < count; ++k) {
    const View v = k == 0 ? query : view_of(op, names[k], *inputs[k], query.device);
    if (v.dtype != query.dtype) fail(op, "key must have the dtype of query");
    fill_rotary_tensor(op, v, where, head_size, args.tensors[k]);
    if (norms != nullptr) fill_norm(op, weight_names[k], norms->weights[k], v.device, head_size, args.tensors[k]);
    if (given) {
      check_output(op, count == 1 ? "out" : output_names[k], outputs[k], v, v.sizes);
    } else {
      outputs[k] = new_contiguous(v.device, v.dims, v.sizes, v.dtype);
    }
    args.tensors[k].out = outputs[k].data_ptr();
  }
  if (tokens > 0) run(op, query.device, args, tokens);
}

}  // namespace

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

// ---- behind a norm of each head, on the CPU only -------------------------------------------------------------------

std::tuple<Tensor, Tensor> qk_norm_rotary_embedding(const Tensor& positions, const Tensor& query, const Tensor& key,
                                                    OptionalTensor query_weight, OptionalTensor key_weight,
                                                    const Tensor& cos_sin_cache, int64_t head_size, double epsilon,
                                                    bool is_neox) {
  const Tensor* inputs[2] = {&query, &key};
  Tensor outputs[2] = {query, key};
  HeadNorms norms{{query_weight, key_weight}, epsilon};
  rotary("qk_norm_rotary_embedding", positions, inputs, outputs, 2, cos_sin_cache, head_size, is_neox, false, &norms);
  return {outputs[0], outputs[1]};
}

void qk_norm_rotary_embedding_out(const Tensor& positions, const Tensor& query, const Tensor& key,
                                  OptionalTensor query_weight, OptionalTensor key_weight, const Tensor& cos_sin_cache,
                                  int64_t head_size, double epsilon, bool is_neox, Tensor out0, Tensor out1) {
  const Tensor* inputs[2] = {&query, &key};
  Tensor outputs[2] = {out0, out1};
  HeadNorms norms{{query_weight, key_weight}, epsilon};
  rotary("qk_norm_rotary_embedding", positions, inputs, outputs, 2, cos_sin_cache, head_size, is_neox, true, &norms);
}

Tensor qk_norm_rotary_embedding_query(const Tensor& positions, const Tensor& query, OptionalTensor query_weight,
                                      const Tensor& cos_sin_cache, int64_t head_size, double epsilon, bool is_neox) {
  const Tensor* inputs[1] = {&query};
  Tensor outputs[1] = {query};
  HeadNorms norms{{query_weight, std::nullopt}, epsilon};
  rotary("qk_norm_rotary_embedding_query", positions, inputs, outputs, 1, cos_sin_cache, head_size, is_neox, false,
         &norms);
  return outputs[0];
}

void qk_norm_rotary_embedding_query_out(const Tensor& positions, const Tensor& query, OptionalTensor query_weight,
                                        const Tensor& cos_sin_cache, int64_t head_size, double epsilon, bool is_neox,
                                        Tensor out) {
  const Tensor* inputs[1] = {&query};
  HeadNorms norms{{query_weight, std::nullopt}, epsilon};
  rotary("qk_norm_rotary_embedding_query", positions, inputs, &out, 1, cos_sin_cache, head_size, is_neox, true, &norms);
}

}  // namespace irframework_vllm_c
