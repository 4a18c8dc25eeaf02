// Owns the ops reshape_and_cache, rotary_embedding_reshape_and_cache and qk_norm_rotary_embedding_reshape_and_cache: their
// checks and arguments. Only the CPU library has them.
#include "launch.h"
#include "ops.h"

namespace irframework_vllm_c {
namespace {

// Fills in one of key and value: [tokens, heads, size] or [tokens, heads * size], and where it goes.
void fill_cached(const char* op, const View& x, const View& cache, int64_t tokens, CachedTensor& to) {
  const int64_t bytes = floating_type(op, x) == Type::f32 ? 4 : 2;
  if (cache.dtype != x.dtype) fail(op, std::string(cache.name) + " must have the dtype of " + x.name);
  const bool apart = x.dims == 3;
  bool fits = cache.dims == 4 && (apart || x.dims == 2) && x.sizes[0] == tokens;
  fits = fits && (apart ? x.size(1) == cache.size(2) && x.size(2) == cache.size(3)
                        : x.size(1) == cache.size(2) * cache.size(3));
  if (!fits) {
    fail(op, std::string(x.name) + " must have shape [tokens, heads, size] or [tokens, heads * size] with " +
                 std::to_string(tokens) + " tokens, and " + cache.name + " [blocks, block_size, heads, size]; got " +
                 shape_of(x) + " and " + shape_of(cache));
  }
  check_dense_rows(op, x);
  int64_t stride = 1;
  for (int64_t d = 3; d >= 0; --d) {
    if (cache.size(d) > 1 && cache.stride(d) != stride) fail(op, std::string(cache.name) + " must be contiguous");
    stride *= cache.size(d);
  }
  to.in = static_cast<const char*>(data_of(x));
  to.out = static_cast<char*>(data_of(cache));
  to.heads = cache.size(2);
  to.head_bytes = cache.size(3) * bytes;
  to.token_stride = x.stride(0) * bytes;
  to.head_stride = apart ? x.stride(1) * bytes : to.head_bytes;
}

// A negative slot is none; one behind the end of the cache is a mistake.
void check_slots(const char* op, const CacheArgs& args, int64_t tokens, int64_t slot_count) {
  int64_t largest = -1;
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t slot = args.wide_slots ? static_cast<const int64_t*>(args.slots)[i]
                                         : static_cast<const int32_t*>(args.slots)[i];
    largest = slot > largest ? slot : largest;
  }
  if (largest >= slot_count) {
    fail(op, "slot_mapping holds " + std::to_string(largest) + ", but the cache has " + std::to_string(slot_count) +
                 " slots");
  }
}

void cached(const char* op, const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
            const Tensor& slot_mapping) {
  static const int32_t int32 = aoti_torch_dtype_int32(), int64 = aoti_torch_dtype_int64();
  const View k = view_of(op, "key", key), v = view_of(op, "value", value, k.device);
  const View keys = view_of(op, "key_cache", key_cache, k.device);
  const View values = view_of(op, "value_cache", value_cache, k.device);
  const View slots = view_of(op, "slot_mapping", slot_mapping, k.device);
  if (slots.dims != 1 || (slots.dtype != int32 && slots.dtype != int64)) {
    fail(op, "slot_mapping must be a vector of int32 or int64, got shape " + shape_of(slots));
  }
  const int64_t tokens = slots.size(0);
  if (tokens > 1 && slots.stride(0) != 1) fail(op, "slot_mapping must be contiguous");
  CacheArgs args{};
  fill_cached(op, k, keys, tokens, args.tensors[0]);
  fill_cached(op, v, values, tokens, args.tensors[1]);
  if (keys.size(0) != values.size(0) || keys.size(1) != values.size(1)) {
    fail(op, "the caches must have the same number of blocks, of the same size, got " + shape_of(keys) + " and " +
                 shape_of(values));
  }
  args.slots = data_of(slots);
  args.wide_slots = slots.dtype == int64;
  check_slots(op, args, tokens, keys.size(0) * keys.size(1));
  if (tokens > 0) run(op, k.device, args, tokens);
}

}  // namespace

void reshape_and_cache(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& slot_mapping) {
  cached("reshape_and_cache", key, value, key_cache, value_cache, slot_mapping);
}

// The rotated keys of a few tokens are in the processor's caches when they are copied.
std::tuple<Tensor, Tensor> rotary_embedding_reshape_and_cache(const Tensor& positions, const Tensor& query,
                                                              const Tensor& key, const Tensor& value,
                                                              const Tensor& key_cache, const Tensor& value_cache,
                                                              const Tensor& slot_mapping, const Tensor& cos_sin_cache,
                                                              int64_t head_size, bool is_neox) {
  auto rotated = rotary_embedding(positions, query, key, cos_sin_cache, head_size, is_neox);
  cached("rotary_embedding_reshape_and_cache", std::get<1>(rotated), value, key_cache, value_cache, slot_mapping);
  return rotated;
}

std::tuple<Tensor, Tensor> qk_norm_rotary_embedding_reshape_and_cache(
    const Tensor& positions, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
    const Tensor& value_cache, const Tensor& slot_mapping, OptionalTensor query_weight, OptionalTensor key_weight,
    const Tensor& cos_sin_cache, int64_t head_size, double epsilon, bool is_neox) {
  auto rotated = qk_norm_rotary_embedding(positions, query, key, query_weight, key_weight, cos_sin_cache, head_size,
                                          epsilon, is_neox);
  cached("qk_norm_rotary_embedding_reshape_and_cache", std::get<1>(rotated), value, key_cache, value_cache, slot_mapping);
  return rotated;
}

}  // namespace irframework_vllm_c
