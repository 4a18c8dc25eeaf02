// Owns what the kernels of every device know of a tensor: its element type and where its rows lie. Plain structs: no
// torch header, no std template, because units compiled for one instruction set or for a GPU include it too.
#pragma once
#include <cstdint>

namespace irframework_vllm_c {

enum class Type : int32_t { f32 = 0, bf16 = 1, f16 = 2 };

constexpr int kMaxLeadingDims = 8;

// Offsets, in elements, of the rows of a tensor whose last dimension is dense. Adjacent dimensions that can be
// walked with one stride are merged, so a contiguous tensor has one.
struct Rows {
  int dims = 0;
  int64_t size[kMaxLeadingDims] = {};
  int64_t stride[kMaxLeadingDims] = {};
};

}  // namespace irframework_vllm_c
