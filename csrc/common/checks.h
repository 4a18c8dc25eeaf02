// Owns reading a tensor through the stable ABI and checking what the kernels need of it, on the CPU and on GPUs alike.
// Every check names the op, the argument and what was found, and happens before anything is launched.
#pragma once
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <optional>
#include <stdexcept>
#include <string>

#include "rows.h"

namespace irframework_vllm_c {

using torch::stable::Tensor;

[[noreturn]] inline void fail(const char* op, const std::string& what) {
  throw std::runtime_error("irframework_vllm_c::" + std::string(op) + ": " + what);
}

// ---- reading tensors ---------------------------------------------------------------------------------------------

struct Device {
  int32_t type;
  int32_t index;  // always 0 on the CPU

  bool operator==(const Device& other) const { return type == other.type && index == other.index; }
};

inline Device cpu_device() {
  static const int32_t cpu = aoti_torch_device_type_cpu();
  return {cpu, 0};
}

inline Device device_of(const Tensor& tensor) {
  Device device{};
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &device.type));
  if (device.type == cpu_device().type) return device;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &device.index));
  return device;
}

inline std::string name_of(const Device& device) {
  static const int32_t cuda = aoti_torch_device_type_cuda();
  if (device == cpu_device()) return "the CPU";
  return (device.type == cuda ? "cuda:" : "device " + std::to_string(device.type) + ":") + std::to_string(device.index);
}

// What the checks need of a tensor, read once.
struct View {
  const char* name;
  AtenTensorHandle handle;
  int64_t dims;
  const int64_t* sizes;
  const int64_t* strides;
  int32_t dtype;
  Device device;

  int64_t size(int64_t dim) const { return sizes[dim < 0 ? dims + dim : dim]; }
  int64_t stride(int64_t dim) const { return strides[dim < 0 ? dims + dim : dim]; }
  int64_t numel() const {
    int64_t n = 1;
    for (int64_t d = 0; d < dims; ++d) n *= sizes[d];
    return n;
  }
};

// Of a call's first tensor, which says where the kernel runs.
inline View view_of(const char*, const char* name, const Tensor& tensor) {
  View v{name, tensor.get(), tensor.dim(), tensor.sizes().data(), tensor.strides().data(), 0, device_of(tensor)};
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(v.handle, &v.dtype));
  return v;
}

// Of each other one: refuses a tensor that is somewhere else.
inline View view_of(const char* op, const char* name, const Tensor& tensor, const Device& on) {
  const View v = view_of(op, name, tensor);
  if (!(v.device == on)) {
    fail(op, std::string(name) + " is not on " + name_of(on) + " but on " + name_of(v.device));
  }
  return v;
}

inline std::string shape_of(const View& v) {
  std::string text = "[";
  for (int64_t d = 0; d < v.dims; ++d) text += (d ? ", " : "") + std::to_string(v.sizes[d]);
  return text + "]";
}

inline std::optional<Type> type_of(const View& v) {
  static const int32_t f32 = aoti_torch_dtype_float32(), bf16 = aoti_torch_dtype_bfloat16(),
                       f16 = aoti_torch_dtype_float16();
  if (v.dtype == f32) return Type::f32;
  if (v.dtype == bf16) return Type::bf16;
  if (v.dtype == f16) return Type::f16;
  return std::nullopt;
}

inline Type floating_type(const char* op, const View& v) {
  const auto type = type_of(v);
  if (!type) fail(op, std::string(v.name) + " must be float32, bfloat16 or float16");
  return *type;
}

inline void* data_of(const View& v) {
  void* data = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(v.handle, &data));
  return data;
}

// A caller's tensor to write to: contiguous, of the shape and dtype that the op's result would have. `dtype` is that of
// `like`, unless it is given.
inline void check_output(const char* op, const char* name, const Tensor& out, const View& like, const int64_t* sizes,
                         const int32_t* dtype = nullptr) {
  const View v = view_of(op, name, out, like.device);
  bool fits = v.dtype == (dtype != nullptr ? *dtype : like.dtype) && v.dims == like.dims && out.is_contiguous();
  for (int64_t d = 0; fits && d < v.dims; ++d) fits = v.sizes[d] == sizes[d];
  if (fits) return;
  View wanted = like;
  wanted.sizes = sizes;
  const std::string type = dtype != nullptr ? "the dtype of the op's result" : "the dtype of " + std::string(like.name);
  fail(op, std::string(name) + " must be contiguous, with " + type + " and shape " + shape_of(wanted) + ", got shape " +
               shape_of(v));
}

// The scale of static quantisation: one float32 number on the device of the other tensors. On the CPU its value is read:
// zero and what is not finite are refused before anything is written, as the ops' value checks do.
inline const float* scale_data(const char* op, const Tensor& scale, const Device& on) {
  static const int32_t f32 = aoti_torch_dtype_float32();
  const View v = view_of(op, "scale", scale, on);
  if (v.dtype != f32 || v.numel() != 1) {
    fail(op, "scale must hold one float32 number, got shape " + shape_of(v) + (v.dtype != f32 ? ", another dtype" : ""));
  }
  const float* data = static_cast<const float*>(data_of(v));
  if (on == cpu_device() && (!std::isfinite(*data) || *data == 0.0f)) fail(op, "scale must be finite and not zero");
  return data;
}

inline void check_rank(const char* op, const View& v, int64_t least) {
  if (v.dims < least) {
    fail(op, std::string(v.name) + " must have at least " + std::to_string(least) + " dimension(s), got shape " +
                 shape_of(v));
  }
}

inline void check_dense_rows(const char* op, const View& v) {
  if (v.size(-1) > 1 && v.stride(-1) != 1) {
    fail(op, std::string(v.name) + " must be contiguous in its last dimension, got stride " +
                 std::to_string(v.stride(-1)) + "; call .contiguous() first");
  }
}

inline void check_same_shape(const char* op, const View& a, const View& b) {
  bool same = a.dims == b.dims;
  for (int64_t d = 0; same && d < a.dims; ++d) same = a.sizes[d] == b.sizes[d];
  if (!same) {
    fail(op, std::string(a.name) + " and " + b.name + " must have the same shape, got " + shape_of(a) + " and " +
                 shape_of(b));
  }
}

inline int64_t product(const View& v, int64_t dims) {
  int64_t n = 1;
  for (int64_t d = 0; d < dims; ++d) n *= v.sizes[d];
  return n;
}

// The rows of the first `dims` dimensions, those of size 1 left out and neighbours merged.
inline Rows rows_of(const char* op, const View& v, int64_t dims) {
  Rows rows;
  for (int64_t d = 0; d < dims; ++d) {
    const int64_t size = v.sizes[d], stride = v.strides[d];
    if (size == 1) continue;
    if (rows.dims > 0 && rows.stride[rows.dims - 1] == size * stride) {
      rows.size[rows.dims - 1] *= size;
      rows.stride[rows.dims - 1] = stride;
      continue;
    }
    if (rows.dims == kMaxLeadingDims) {
      fail(op, std::string(v.name) + " has more than " + std::to_string(kMaxLeadingDims) +
                   " leading dimensions that cannot be merged; call .contiguous() first");
    }
    rows.size[rows.dims] = size;
    rows.stride[rows.dims++] = stride;
  }
  return rows;
}

inline Rows contiguous_rows(int64_t count, int64_t stride) {
  Rows rows;
  rows.dims = 1;
  rows.size[0] = count;
  rows.stride[0] = stride;
  return rows;
}

// A tensor that is written to must not hold one element twice (an expanded tensor, a sliding window).
inline void check_distinct_rows(const char* op, const View& v, const Rows& rows) {
  int order[kMaxLeadingDims];
  for (int i = 0; i < rows.dims; ++i) {
    int at = i;
    for (; at > 0 && rows.stride[order[at - 1]] > rows.stride[i]; --at) order[at] = order[at - 1];
    order[at] = i;
  }
  int64_t extent = v.size(-1);
  for (int i = 0; i < rows.dims; ++i) {
    if (rows.stride[order[i]] < extent) {
      fail(op, std::string(v.name) + " is written to, but its rows overlap in memory; pass a copy");
    }
    extent += (rows.size[order[i]] - 1) * rows.stride[order[i]];
  }
}

// Where a tensor that is not empty lies: rows of `row` bytes; strides count elements of `item` bytes.
struct Region {
  const char* name;
  uintptr_t start;
  int64_t row;
  int64_t item;
  Rows rows;

  bool dense() const { return rows.dims == 0 || (rows.dims == 1 && rows.stride[0] * item == row); }
  uintptr_t end() const {
    int64_t bytes = row;
    for (int d = 0; d < rows.dims; ++d) bytes += (rows.size[d] - 1) * rows.stride[d] * item;
    return start + bytes;
  }
};

inline Region region_of(const char* name, const void* data, Type type, int64_t cols, const Rows& rows = {}) {
  const int64_t item = type == Type::f32 ? 4 : 2;
  return {name, reinterpret_cast<uintptr_t>(data), cols * item, item, rows};
}

inline bool has_row_within(const Region& region, uintptr_t start, uintptr_t end) {
  int64_t index[kMaxLeadingDims] = {};
  while (true) {
    uintptr_t at = region.start;
    for (int d = 0; d < region.rows.dims; ++d) at += index[d] * region.rows.stride[d] * region.item;
    if (at < end && start < at + region.row) return true;
    int d = region.rows.dims - 1;
    while (d >= 0 && ++index[d] == region.rows.size[d]) index[d--] = 0;
    if (d < 0) return false;
  }
}

// What is written to must have no byte in common with another tensor. Rows between the rows of another tensor are not
// looked at: nobody gives them away in an eager call, and a compiler that does has proved them disjoint.
inline void check_apart(const char* op, const Region& written, const Region& other) {
  if (written.end() <= other.start || other.end() <= written.start) return;
  const bool overlap = other.dense()     ? has_row_within(written, other.start, other.end())
                       : written.dense() ? has_row_within(other, written.start, written.end())
                                         : written.start == other.start;
  if (overlap) {
    fail(op, std::string(written.name) + " is written to, so it must not be the same memory as " + other.name +
                 ", nor overlap it");
  }
}

}  // namespace irframework_vllm_c
