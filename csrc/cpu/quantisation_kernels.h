// Owns the quantisation of a tensor as it is, with a given scale or one scale per row. Included by kernels_body.h, inside
// the namespace of one instruction set.

template <typename T>
static void quantise_rows(const QuantArgs& a, int64_t begin, int64_t end) {
  RowCursor cursor;
  seek(cursor, a.x_rows, begin);
  bool streamed = false;
  float inverse = a.scale != nullptr ? 1.0f / *a.scale : 0.0f;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)a.x + cursor.offset;
    const int64_t at = row * a.cols, left = a.numel - at;
    const int64_t cols = left < a.cols ? left : a.cols;
    if (a.scale == nullptr) {
      a.scales[row] = scale_of(largest_magnitude(x, cols));
      inverse = 1.0f / a.scales[row];
    }
    streamed |= quantise_row(x, a.codes + at, inverse, cols, a.stream);
    advance(cursor);
  }
  if (streamed) finish_stream();
}

static void quantised(const QuantArgs& a, int64_t begin, int64_t end, void*) {
  switch (a.type) {
    case Type::f32:
      return quantise_rows<float>(a, begin, end);
    case Type::bf16:
      return quantise_rows<bf16>(a, begin, end);
    case Type::f16:
      return quantise_rows<f16>(a, begin, end);
  }
}
