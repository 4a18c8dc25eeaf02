// Owns rms_norm and fused_add_rms_norm, plain, Gemma's and quantising. Included by kernels_body.h, inside the namespace of
// one instruction set.

// Sum of squares of the row, in float32. With kAdd the row is x + residual rounded to T, which is written to `sum_row`;
// that may be the residual itself.
// Four accumulators hide the latency of the addition and bound the rounding error of long rows.
template <bool kAdd, typename T>
static float sum_of_squares(const T* x, const T* residual, T* sum_row, int64_t cols) {
  F total[4] = {F{}, F{}, F{}, F{}};
  int64_t i = 0;
  for (; i + 4 * W <= cols; i += 4 * W) {
    for (int k = 0; k < 4; k += 2) {
      Two v = load_two<T>(x + i + k * W);
      if (kAdd) {
        const Two r = load_two<T>(residual + i + k * W);
        v = {rounded<T>(v.a + r.a), rounded<T>(v.b + r.b)};
        store_two(sum_row + i + k * W, v);
      }
      total[k] = multiply_add(v.a, v.a, total[k]);
      total[k + 1] = multiply_add(v.b, v.b, total[k + 1]);
    }
  }
  for (; i < cols; i += W) {
    const int64_t count = cols - i < W ? cols - i : W;
    F v = load(x + i, count);
    if (kAdd) {
      v = rounded<T>(v + load(residual + i, count));
      store(sum_row + i, v, count);
    }
    total[0] = multiply_add(v, v, total[0]);
  }
  return sum((total[0] + total[1]) + (total[2] + total[3]));
}

struct NoWeight {};

// A weight that is how far the scale is from one.
template <typename WT>
struct OnePlus {};

template <typename WT>
constexpr bool is_one_plus = false;
template <typename WT>
constexpr bool is_one_plus<OnePlus<WT>> = true;

// Native rounds the normalised value to the weight's type, multiplies in that type, and rounds to the type of x. The last
// rounding is left to the sink, and so is the one before it where both types are the same.
template <typename T, typename WT>
IRF_INLINE F scaled(F v, float scale, F weight) {
  F normalised = v * scale;
  if (__is_same(WT, NoWeight)) return normalised;
  if (is_one_plus<WT>) return normalised * weight;
  if (__is_same(WT, bf16) && !__is_same(T, bf16)) normalised = plain_nan(normalised);
  if (__is_same(T, bf16) && !__is_same(WT, bf16)) weight = plain_nan(weight);
  const F product = rounded<WT>(normalised) * weight;
  return __is_same(T, WT) ? product : rounded<WT>(product);
}

template <typename T, typename WT>
IRF_INLINE Two load_weight(const WT* weight, int64_t i) {
  return load_two<T>(weight + i);
}
template <typename T>
IRF_INLINE Two load_weight(const NoWeight*, int64_t) {
  return {F{}, F{}};
}
template <typename WT>
IRF_INLINE F load_weight(const WT* weight, int64_t i, int64_t count) {
  return load(weight + i, count);
}
IRF_INLINE F load_weight(const NoWeight*, int64_t, int64_t) { return F{}; }
// rounded_upper() expects plain NaN.
template <typename WT>
IRF_INLINE F one_plus(F weight) {
  return __is_same(WT, float) ? plain_nan(1.0f + weight) : 1.0f + weight;
}
template <typename T, typename WT>
IRF_INLINE Two load_weight(const OnePlus<WT>* weight, int64_t i) {
  const Two w = load_two<T>((const WT*)weight + i);
  return {one_plus<WT>(w.a), one_plus<WT>(w.b)};
}
template <typename WT>
IRF_INLINE F load_weight(const OnePlus<WT>* weight, int64_t i, int64_t count) {
  return one_plus<WT>(load((const WT*)weight + i, count));
}

template <typename T, typename WT, typename Sink>
IRF_INLINE void write_scaled(const T* row, Sink& sink, const WT* weight, float scale, int64_t cols) {
  int64_t i = 0;
  for (; i + 2 * W <= cols; i += 2 * W) {
    const Two v = load_two<T>(row + i), w = load_weight<T>(weight, i);
    sink.two(i, {scaled<T, WT>(v.a, scale, w.a), scaled<T, WT>(v.b, scale, w.b)});
  }
  for (; i < cols; i += W) {
    const int64_t count = cols - i < W ? cols - i : W;
    sink.some(i, scaled<T, WT>(load(row + i, count), scale, load_weight(weight, i, count)), count);
  }
}

template <typename T, typename WT>
static bool write_codes(const NormArgs& a, const T* source, const WT* weight, float scale, int64_t row, int64_t out_offset,
                        T* scratch) {
  uint8_t* codes = (uint8_t*)a.out + out_offset;
  if (a.groups.size > 0) {
    TensorSink<false, T> sink{scratch};
    write_scaled(source, sink, weight, scale, a.cols);
    return quantise_groups_of_row(a.groups, (const T*)scratch, codes, a.scales, row, a.cols, a.stream);
  }
  if (a.quantisation == Quantisation::dynamic) {
    MeasuringSink<T> sink{scratch, {U{}}};
    write_scaled(source, sink, weight, scale, a.cols);
    a.scales[row] = scale_of(sink.largest.value());
    return quantise_row((const T*)scratch, codes, 1.0f / a.scales[row], a.cols, a.stream);
  }
  const float inverse = 1.0f / *a.scale;
  if (a.stream && may_stream(codes, a.cols)) {
    CodeSink<true, T> sink{codes, inverse};
    write_scaled(source, sink, weight, scale, a.cols);
    return true;
  }
  CodeSink<false, T> sink{codes, inverse};
  write_scaled(source, sink, weight, scale, a.cols);
  return false;
}

// Normalises one row, of which `scale` is 1 / rms, into the tensor or the codes of `a`. Returns whether it streamed.
template <typename T, typename WT>
static bool write_row(const NormArgs& a, const T* source, float scale, int64_t row, int64_t out_offset, T* scratch) {
  const WT* weight = (const WT*)a.weight;
  if (a.quantisation == Quantisation::none) {
    T* out = (T*)a.out + out_offset;
    if (a.stream && may_stream(out, a.cols)) {
      TensorSink<true, T> sink{out};
      write_scaled(source, sink, weight, scale, a.cols);
      return true;
    }
    TensorSink<false, T> sink{out};
    write_scaled(source, sink, weight, scale, a.cols);
    return false;
  }
  if constexpr (!is_one_plus<WT>) return write_codes(a, source, weight, scale, row, out_offset, scratch);
  return false;
}

template <typename T, typename WT>
static void norm_rows(const NormArgs& a, int64_t begin, int64_t end, void* scratch) {
  const bool add = a.residual != nullptr;
  RowCursor x_cursor, residual_cursor, sum_cursor, out_cursor;
  seek(x_cursor, a.x_rows, begin);
  seek(residual_cursor, a.residual_rows, begin);
  seek(sum_cursor, a.sum_rows, begin);
  seek(out_cursor, a.out_rows, begin);
  bool streamed = false;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)a.x + x_cursor.offset;
    const T* source = x;
    float squares;
    if (add) {
      T* sum_row = (T*)a.sum + sum_cursor.offset;
      squares = sum_of_squares<true>(x, (const T*)a.residual + residual_cursor.offset, sum_row, a.cols);
      source = sum_row;
      advance(residual_cursor);
      advance(sum_cursor);
    } else {
      squares = sum_of_squares<false, T>(x, nullptr, nullptr, a.cols);
    }
    const float scale = 1.0f / __builtin_sqrtf(squares / (float)a.cols + a.epsilon);
    streamed |= write_row<T, WT>(a, source, scale, row, out_cursor.offset, (T*)scratch);
    advance(x_cursor);
    advance(out_cursor);
  }
  if (streamed) finish_stream();
}

template <typename T>
static void norm_of_type(const NormArgs& a, int64_t begin, int64_t end, void* scratch) {
  if (a.weight == nullptr) return norm_rows<T, NoWeight>(a, begin, end, scratch);
  if (a.one_plus) {
    switch (a.weight_type) {
      case Type::f32:
        return norm_rows<T, OnePlus<float>>(a, begin, end, scratch);
      case Type::bf16:
        return norm_rows<T, OnePlus<bf16>>(a, begin, end, scratch);
      case Type::f16:
        return norm_rows<T, OnePlus<f16>>(a, begin, end, scratch);
    }
  }
  switch (a.weight_type) {
    case Type::f32:
      return norm_rows<T, float>(a, begin, end, scratch);
    case Type::bf16:
      return norm_rows<T, bf16>(a, begin, end, scratch);
    case Type::f16:
      return norm_rows<T, f16>(a, begin, end, scratch);
  }
}

static void norm(const NormArgs& a, int64_t begin, int64_t end, void* scratch) {
  switch (a.type) {
    case Type::f32:
      return norm_of_type<float>(a, begin, end, scratch);
    case Type::bf16:
      return norm_of_type<bf16>(a, begin, end, scratch);
    case Type::f16:
      return norm_of_type<f16>(a, begin, end, scratch);
  }
}
