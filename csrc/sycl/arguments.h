// Owns the sizes and strides that the host gives a kernel, in the layout that both see. The host reads this file when
// it is compiled; the run-time compiler reads it beside kernels.cpp.
#pragma once
#include <cstdint>

namespace irframework_xpu_sycl {

// Where the rows of a tensor begin, in elements: up to three leading dimensions of any strides. A row's number is split
// by the sizes of the two inner ones; a tensor whose rows follow each other with one stride has middle = inner = 1.
struct Rows {
  int64_t middle, inner;
  int64_t outer_stride, middle_stride, inner_stride;
};

struct RowSizes {
  int64_t rows, columns;
  Rows x, residual, sum, y;  // of y only where it is no code
  float epsilon;
};

struct RotarySizes {
  int64_t tokens, cache_rows, cache_stride;
  int64_t half, head_size;  // half of the elements that are rotated; elements of a head
  int64_t query_heads, key_heads;
  int64_t query_head_stride, key_head_stride;
  Rows query, key;
  int32_t neighbours;      // rotate even and odd elements, not halves
  int32_t long_positions;  // int64, else int32
};

}  // namespace irframework_xpu_sycl
