// Owns what the ops of every device share besides their checks: their outputs, and the functions that run a kernel, which
// each library has its own of.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <string>

#include "arguments.h"
#include "checks.h"

namespace irframework_vllm_c {

// ---- outputs -----------------------------------------------------------------------------------------------------

constexpr int64_t kMaxDims = 64;

inline Tensor new_contiguous(const Device& device, int64_t dims, const int64_t* sizes, int32_t dtype) {
  int64_t strides[kMaxDims];
  int64_t stride = 1;
  for (int64_t d = dims - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= sizes[d] > 0 ? sizes[d] : 1;
  }
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dims, sizes, strides, dtype, device.type, device.index, &handle));
  return Tensor(handle);
}

// The tensor that a result goes to: `given`, after a check, or a new one.
inline Tensor output_for(const char* op, const char* name, const Tensor* given, const View& like, const int64_t* sizes,
                         int32_t dtype) {
  if (given == nullptr) return new_contiguous(like.device, like.dims, sizes, dtype);
  check_output(op, name, *given, like, sizes, dtype == like.dtype ? nullptr : &dtype);
  return *given;
}

// The sizes of `v` with another last dimension.
struct Sizes {
  int64_t at[kMaxDims];
};

inline Sizes sizes_with_last(const char* op, const View& v, int64_t last) {
  if (v.dims > kMaxDims) fail(op, std::string(v.name) + " has more than 64 dimensions");
  Sizes sizes;
  for (int64_t d = 0; d + 1 < v.dims; ++d) sizes.at[d] = v.sizes[d];
  sizes.at[v.dims - 1] = last;
  return sizes;
}

inline int32_t code_dtype() {
  static const int32_t f8 = aoti_torch_dtype_float8_e4m3fn();
  return f8;
}

// One float32 for each row of `x`.
inline Tensor scales_for(const char* op, const View& x, const Tensor* given) {
  static const int32_t f32 = aoti_torch_dtype_float32();
  const Sizes sizes = sizes_with_last(op, x, 1);
  if (given == nullptr) return new_contiguous(x.device, x.dims, sizes.at, f32);
  check_output(op, "out1", *given, x, sizes.at, &f32);
  return *given;
}

// A contiguous float32 tensor: `given`, after a check, or a new one.
inline Tensor floats_for(const char* op, const View& x, int64_t dims, const int64_t* sizes, const Tensor* given) {
  static const int32_t f32 = aoti_torch_dtype_float32();
  if (given == nullptr) return new_contiguous(x.device, dims, sizes, f32);
  View like = x;
  like.dims = dims;
  check_output(op, "out1", *given, like, sizes, &f32);
  return *given;
}

// How codes are cut into groups, as a caller says it.
struct Grouping {
  int64_t size;
  bool column_major;
  bool power_of_two;
};

// The groups of codes with rows of `cols` elements, one for each row of x. Refuses a size that does not divide the rows.
inline Groups groups_of(const char* op, const View& x, int64_t cols, const Grouping& grouping) {
  check_rank(op, x, grouping.column_major ? 2 : 1);
  if (grouping.size < 1 || cols % grouping.size != 0) {
    fail(op, "group_size must divide the last dimension of " + std::string(cols == x.size(-1) ? "x" : "the codes") + ", " +
                 std::to_string(cols) + ", got " + std::to_string(grouping.size));
  }
  return {grouping.size, x.dims > 1 ? x.size(-2) : 1, grouping.column_major, grouping.power_of_two};
}

// One float32 for each group of each row of x.
inline Tensor group_scales_for(const char* op, const View& x, int64_t cols, const Groups& groups, const Tensor* given) {
  const int64_t count = cols / groups.size;
  Sizes sizes = sizes_with_last(op, x, groups.column_major ? groups.tokens : count);
  if (groups.column_major) sizes.at[x.dims - 2] = count;
  return floats_for(op, x, x.dims, sizes.at, given);
}

// ---- running a kernel over all rows (tokens) -----------------------------------------------------------------------

void run(const char* op, const Device& device, NormArgs& args, int64_t rows);
void run(const char* op, const Device& device, GateArgs& args, int64_t rows);
void run(const char* op, const Device& device, QuantArgs& args, int64_t rows);
void run(const char* op, const Device& device, RotaryArgs& args, int64_t tokens);

// The CPU only:
void run(const char* op, const Device& device, CacheArgs& args, int64_t tokens);
void run(const char* op, const Device& device, PointwiseArgs& args, int64_t rows);
void run(const char* op, const Device& device, HeadAnglesArgs& args, int64_t tokens);
void run(const char* op, const Device& device, GroupQuantArgs& args, int64_t rows);
void run(const char* op, const Device& device, DequantArgs& args, int64_t rows);
// With one scale for all rows, which is found first and written to `scale`.
void run_with_one_scale(const char* op, const Device& device, QuantArgs& args, int64_t rows, float* scale);

// Runs the spans, which hold `keys` keys in all, then puts together what was cut into parts. The CPU only.
void run(const char* op, const Device& device, AttentionArgs& args, int64_t spans, int64_t keys, int64_t joins);

// Refuses positions outside the cache, where the host can read them.
void check_positions(const char* op, const Device& device, const RotaryArgs& args, int64_t tokens);

}  // namespace irframework_vllm_c
