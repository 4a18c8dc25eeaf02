// Owns what the ops on the CPU share: their outputs, their threads, and when an output is written around the caches.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <string>

#include "../common/checks.h"
#include "kernels.h"

namespace irframework_vllm_c {

constexpr int64_t kMaxDims = 64;

inline Tensor new_contiguous(int64_t dims, const int64_t* sizes, int32_t dtype) {
  int64_t strides[kMaxDims];
  int64_t stride = 1;
  for (int64_t d = dims - 1; d >= 0; --d) {
    strides[d] = stride;
    stride *= sizes[d] > 0 ? sizes[d] : 1;
  }
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(
      aoti_torch_empty_strided(dims, sizes, strides, dtype, cpu_device().type, -1, &handle));
  return Tensor(handle);
}

// The tensor that a result goes to: `given`, after a check, or a new one.
inline Tensor output_for(const char* op, const char* name, const Tensor* given, const View& like, const int64_t* sizes,
                         int32_t dtype) {
  if (given == nullptr) return new_contiguous(like.dims, sizes, dtype);
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

inline int64_t bytes_of(Type type) { return type == Type::f32 ? 4 : 2; }

// Bytes that one thread should have to move before another is worth waking; and the size of an output from which it is
// written around the caches. Such an output has left the second-level cache before anybody reads it, and lines that are
// written whole need not be fetched first: measured with a reader behind, 8 MiB and more gain 10 to 30 percent, 4 MiB lose.
constexpr int64_t kBytesPerThread = 128 * 1024;
constexpr int64_t kStreamBytes = 8 * 1024 * 1024;

// Runs a kernel over all rows, on as many threads as pay. Each gets `scratch_bytes` of its own.
template <typename Args>
void run(void (*kernel)(const Args&, int64_t, int64_t, void*), const Args& args, int64_t rows, int64_t bytes_per_row,
         int64_t scratch_bytes = 0) {
  struct Job {
    void (*kernel)(const Args&, int64_t, int64_t, void*);
    const Args* args;
    int64_t scratch_bytes;

    void operator()(int64_t begin, int64_t end) const {
      const std::unique_ptr<char[]> scratch(scratch_bytes > 0 ? new char[scratch_bytes] : nullptr);
      kernel(*args, begin, end, scratch.get());
    }
  } const job{kernel, &args, scratch_bytes};
  const int64_t grain = kBytesPerThread / (bytes_per_row > 0 ? bytes_per_row : 1) + 1;
  if (rows <= grain) {
    job(0, rows);
    return;
  }
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(
      0, rows, grain,
      [](int64_t begin, int64_t end, void* context) { (*static_cast<const Job*>(context))(begin, end); },
      const_cast<Job*>(&job)));
}

// ---- quantisation ------------------------------------------------------------------------------------------------

inline int32_t code_dtype() {
  static const int32_t f8 = aoti_torch_dtype_float8_e4m3fn();
  return f8;
}

// One float32 for each row of `x`.
inline Tensor scales_for(const char* op, const View& x, const Tensor* given) {
  static const int32_t f32 = aoti_torch_dtype_float32();
  const Sizes sizes = sizes_with_last(op, x, 1);
  if (given == nullptr) return new_contiguous(x.dims, sizes.at, f32);
  check_output(op, "out1", *given, x, sizes.at, &f32);
  return *given;
}

}  // namespace irframework_vllm_c
