// Owns the quantisation of a tensor as it is, with a given scale, or one for the tensor, for a row or for a group, and the
// way back. Included by kernels_body.h, inside the namespace of one instruction set.

template <typename T, typename Code>
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
      a.scales[row] = scale_of<Code>(largest_magnitude(x, cols));
      inverse = 1.0f / a.scales[row];
    }
    streamed |= quantise_row<Code>(x, a.codes + at, inverse, cols, a.stream);
    advance(cursor);
  }
  if (streamed) finish_stream();
}

template <typename T>
static void quantise_rows(const QuantArgs& a, int64_t begin, int64_t end) {
  if (a.coding == Coding::int8) return quantise_rows<T, Int8>(a, begin, end);
  return quantise_rows<T, E4m3>(a, begin, end);
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

// ---- one scale for the tensor ------------------------------------------------------------------------------------

template <typename T>
static void row_magnitudes(const QuantArgs& a, int64_t begin, int64_t end) {
  RowCursor cursor;
  seek(cursor, a.x_rows, begin);
  for (int64_t row = begin; row < end; ++row) {
    const int64_t left = a.numel - row * a.cols;
    a.scales[row] = largest_magnitude((const T*)a.x + cursor.offset, left < a.cols ? left : a.cols);
    advance(cursor);
  }
}

static void magnitudes(const QuantArgs& a, int64_t begin, int64_t end, void*) {
  switch (a.type) {
    case Type::f32:
      return row_magnitudes<float>(a, begin, end);
    case Type::bf16:
      return row_magnitudes<bf16>(a, begin, end);
    case Type::f16:
      return row_magnitudes<f16>(a, begin, end);
  }
}

static float scale_of_all(const float* magnitudes, int64_t count) { return scale_of(largest_magnitude(magnitudes, count)); }

// ---- a scale for each group of a row -----------------------------------------------------------------------------

template <typename T>
static void quantise_groups(const GroupQuantArgs& a, int64_t begin, int64_t end) {
  RowCursor cursor;
  seek(cursor, a.x_rows, begin);
  bool streamed = false;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)a.x + cursor.offset;
    streamed |= quantise_groups_of_row(a.groups, x, a.codes + row * a.cols, a.scales, row, a.cols, a.stream);
    advance(cursor);
  }
  if (streamed) finish_stream();
}

static void group_quantised(const GroupQuantArgs& a, int64_t begin, int64_t end, void*) {
  switch (a.type) {
    case Type::f32:
      return quantise_groups<float>(a, begin, end);
    case Type::bf16:
      return quantise_groups<bf16>(a, begin, end);
    case Type::f16:
      return quantise_groups<f16>(a, begin, end);
  }
}

// ---- the way back ------------------------------------------------------------------------------------------------

template <typename Code, typename T, typename Sink>
IRF_INLINE void write_values(const uint8_t* codes, Sink& sink, float scale, int64_t cols) {
  int64_t i = 0;
  for (; i + 2 * W <= cols; i += 2 * W) {
    const F a = value_of(load_codes(codes + i, W), Code{}) * scale;
    const F b = value_of(load_codes(codes + i + W, W), Code{}) * scale;
    const Two v = {a, b};
    sink.two(i, __is_same(T, bf16) ? split_even_odd(a, b) : v);
  }
  for (; i < cols; i += W) {
    const int64_t count = cols - i < W ? cols - i : W;
    sink.some(i, value_of(load_codes(codes + i, count), Code{}) * scale, count);
  }
}

template <typename Code, typename T>
static void dequantise_rows(const DequantArgs& a, int64_t begin, int64_t end) {
  RowCursor cursor;
  seek(cursor, a.code_rows, begin);
  const int64_t groups = a.groups > 0 ? a.groups : 1, size = a.cols / groups, step = a.column_major ? a.tokens : 1;
  bool streamed = false;
  for (int64_t row = begin; row < end; ++row) {
    const float* scales = a.scales + (a.groups > 0 ? first_scale(row, groups, a.tokens, a.column_major) : 0);
    for (int64_t group = 0; group < groups; ++group) {
      const uint8_t* codes = a.codes + cursor.offset + group * size;
      T* out = (T*)a.out + row * a.cols + group * size;
      const float given = scales[group * step];
      const float scale = given == given ? given : __builtin_nanf("");  // rounded_upper() expects the plain one
      if (a.stream && may_stream(out, size)) {
        TensorSink<true, T> sink{out};
        write_values<Code, T>(codes, sink, scale, size);
        streamed = true;
      } else {
        TensorSink<false, T> sink{out};
        write_values<Code, T>(codes, sink, scale, size);
      }
    }
    advance(cursor);
  }
  if (streamed) finish_stream();
}

template <typename Code>
static void dequantise_codes(const DequantArgs& a, int64_t begin, int64_t end) {
  switch (a.type) {
    case Type::f32:
      return dequantise_rows<Code, float>(a, begin, end);
    case Type::bf16:
      return dequantise_rows<Code, bf16>(a, begin, end);
    case Type::f16:
      return dequantise_rows<Code, f16>(a, begin, end);
  }
}

static void dequantised(const DequantArgs& a, int64_t begin, int64_t end, void*) {
  if (a.coding == Coding::int8) return dequantise_codes<Int8>(a, begin, end);
  return dequantise_codes<E4m3>(a, begin, end);
}
