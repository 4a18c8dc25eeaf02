// Owns the activations of one element each, and the gated ones that are not in gated_kernels.h. Included by kernels_body.h
// after gated_kernels.h, inside the namespace of one instruction set.

// ---- functions of one element ------------------------------------------------------------------------------------

struct GeluTanh {
  IRF_MEMBER F operator()(F x) const { return gelu_tanh(x); }
};

struct GeluErf {
  IRF_MEMBER F operator()(F x) const { return gelu_erf(x); }
};

struct QuickGelu {
  IRF_MEMBER F operator()(F x) const { return x / (1.0f + exponential(-1.702f * x)); }
};

struct Relu2 {
  IRF_MEMBER F operator()(F x) const {
    const F above = choose((I)(x < 0.0f), F{}, x);
    return above * above;
  }
};

struct Xielu {
  float positive, negative, beta, epsilon;

  IRF_MEMBER F operator()(F x) const {
    const F stopped = choose((I)(x > epsilon), splat(epsilon), x);
    const F below = (exponential_less_one(stopped) - x) * negative;
    return choose((I)(x > 0.0f), positive * x * x, below) + beta * x;
  }
};

// log(1 + e^x); a NaN becomes the plain one, which rounded_upper() expects.
static float softplus(const void* number, Type type) {
  const F lanes = type == Type::f32    ? load((const float*)number, 1)
                  : type == Type::bf16 ? load((const bf16*)number, 1)
                                       : load((const f16*)number, 1);
  const float x = lanes[0];
  if (x != x) return __builtin_nanf("");
  return x > 20.0f ? x : (float)__builtin_log1p(__builtin_exp((double)x));
}

struct FatRelu {
  float threshold;

  IRF_MEMBER F operator()(F x) const { return choose((I)(x <= threshold), F{}, x); }
};

template <typename Gelu>
struct AboveCutoff {
  float cutoff;

  IRF_MEMBER F operator()(F x) const {
    const F above = x - cutoff;
    return Gelu{}(choose((I)(above < 0.0f), F{}, above));
  }
};

// ---- rows --------------------------------------------------------------------------------------------------------

template <typename Function>
struct OfElements {
  Function function;

  template <typename T, typename Sink>
  IRF_MEMBER void operator()(const T* x, Sink& sink, int64_t cols) const {
    int64_t i = 0;
    for (; i + 2 * W <= cols; i += 2 * W) {
      const Two v = load_two<T>(x + i);
      sink.two(i, {function(v.a), function(v.b)});
    }
    for (; i < cols; i += W) {
      const int64_t count = cols - i < W ? cols - i : W;
      sink.some(i, function(load(x + i, count)), count);
    }
  }
};

// function(gate) * up, where a row is [gate, up], or [up, gate].
template <typename Function, bool kGateFirst>
struct OfHalves {
  Function function;

  template <typename T, typename Sink>
  IRF_MEMBER void operator()(const T* x, Sink& sink, int64_t cols) const {
    product_row(kGateFirst ? x : x + cols, kGateFirst ? x + cols : x, function, sink, cols);
  }
};

// Gate and up are neighbours.
struct SwigluOai {
  float alpha, limit;

  IRF_MEMBER F value(Two v) const {
    const F gate = choose((I)(v.a > limit), splat(limit), v.a);
    F up = choose((I)(v.b > limit), splat(limit), v.b);
    up = choose((I)(up < -limit), splat(-limit), up);
    return gate / (1.0f + exponential(-(gate * alpha))) * (up + 1.0f);
  }

  // Two vectors of W gates and ups each.
  template <typename T>
  static IRF_MEMBER Two apart(const T* x) {
    const Two v = load_two<T>(x);
    return __is_same(T, bf16) ? v : split_even_odd(v.a, v.b);
  }

  template <typename T, typename Sink>
  IRF_MEMBER void operator()(const T* x, Sink& sink, int64_t cols) const {
    int64_t i = 0;
    for (; i + 2 * W <= cols; i += 2 * W) {
      const F a = value(apart(x + 2 * i)), b = value(apart(x + 2 * i + 2 * W));
      const Two v = {a, b};
      sink.two(i, __is_same(T, bf16) ? split_even_odd(a, b) : v);
    }
    for (; i < cols; i += W) {
      const int64_t count = cols - i < W ? cols - i : W, read = 2 * count < W ? 2 * count : W;
      const F first_part = load(x + 2 * i, read), rest = load(x + 2 * i + read, 2 * count - read);
      sink.some(i, value(split_even_odd(first_part, rest)), count);
    }
  }
};

// The gates that are so many standard deviations above the mean of their row.
template <typename Gelu>
struct LargestGates {
  float deviations;

  template <typename T, typename Sink>
  IRF_MEMBER void operator()(const T* x, Sink& sink, int64_t cols) const {
    const float mean = sum_of(x, cols, [](F v) { return v; }) / (float)cols;
    const float squares = sum_of(x, cols, [mean](F v) { return (v - mean) * (v - mean); });
    const float cutoff = mean + __builtin_sqrtf(squares) / __builtin_sqrtf((float)cols) * deviations;
    product_row(x, x + cols, AboveCutoff<Gelu>{cutoff}, sink, cols);
  }

  // In four parts, for speed and for the accuracy of long rows.
  template <typename T, typename Function>
  static float sum_of(const T* x, int64_t cols, const Function& function) {
    F total[4] = {F{}, F{}, F{}, F{}};
    int64_t i = 0;
    for (; i + 4 * W <= cols; i += 4 * W) {
      for (int k = 0; k < 4; k += 2) {
        const Two v = load_two<T>(x + i + k * W);
        total[k] += function(v.a);
        total[k + 1] += function(v.b);
      }
    }
    float rest = 0.0f;
    for (; i < cols; ++i) rest += function(load(x + i, 1))[0];
    return sum((total[0] + total[1]) + (total[2] + total[3])) + rest;
  }
};

// ---- tensors -----------------------------------------------------------------------------------------------------

// `write` writes the results of a row, of as many columns as it is told, to a sink. Returns whether they were streamed.
template <typename T, typename Write>
IRF_INLINE bool write_row(const PointwiseArgs& a, int64_t row, const Write& write) {
  const int64_t at = row * a.cols, left = a.numel - at;
  const int64_t cols = left < a.cols ? left : a.cols;
  T* out = (T*)a.out + at;
  if (a.stream && may_stream(out, cols)) {
    TensorSink<true, T> sink{out};
    write(sink, cols);
    return true;
  }
  TensorSink<false, T> sink{out};
  write(sink, cols);
  return false;
}

template <typename T, typename Row>
static void pointwise_rows(const PointwiseArgs& a, int64_t begin, int64_t end, const Row& of_row) {
  RowCursor cursor;
  seek(cursor, a.x_rows, begin);
  bool streamed = false;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)a.x + cursor.offset;
    streamed |= write_row<T>(a, row, [&](auto& sink, int64_t cols) { of_row(x, sink, cols); });
    advance(cursor);
  }
  if (streamed) finish_stream();
}

// function(gate) * up, of two tensors.
template <typename T, typename Function>
static void product_rows(const PointwiseArgs& a, int64_t begin, int64_t end, const Function& function) {
  RowCursor gates, ups;
  seek(gates, a.x_rows, begin);
  seek(ups, a.up_rows, begin);
  bool streamed = false;
  for (int64_t row = begin; row < end; ++row) {
    const T *gate = (const T*)a.x + gates.offset, *up = (const T*)a.up + ups.offset;
    streamed |= write_row<T>(a, row, [&](auto& sink, int64_t cols) { product_row(gate, up, function, sink, cols); });
    advance(gates);
    advance(ups);
  }
  if (streamed) finish_stream();
}

template <typename T>
static void pointwise_of_type(const PointwiseArgs& a, int64_t begin, int64_t end) {
  switch (a.function) {
    case Pointwise::gelu_tanh:
      return pointwise_rows<T>(a, begin, end, OfElements<GeluTanh>{});
    case Pointwise::quick_gelu:
      return pointwise_rows<T>(a, begin, end, OfElements<QuickGelu>{});
    case Pointwise::relu2:
      return pointwise_rows<T>(a, begin, end, OfElements<Relu2>{});
    case Pointwise::xielu: {
      const float positive = softplus(a.alphas[0], a.alpha_types[0]);
      const float negative = a.first + softplus(a.alphas[1], a.alpha_types[1]);
      return pointwise_rows<T>(a, begin, end, OfElements<Xielu>{{positive, negative, a.first, a.second}});
    }
    case Pointwise::mul_and_silu:
      return pointwise_rows<T>(a, begin, end, OfHalves<Activation<Gate::silu>, false>{});
    case Pointwise::fatrelu_and_mul:
      return pointwise_rows<T>(a, begin, end, OfHalves<FatRelu, true>{{a.first}});
    case Pointwise::swigluoai_and_mul:
      return pointwise_rows<T>(a, begin, end, SwigluOai{a.first, a.second});
    case Pointwise::gelu_and_mul_sparse:
      if (a.tanh) return pointwise_rows<T>(a, begin, end, LargestGates<GeluTanh>{a.first});
      return pointwise_rows<T>(a, begin, end, LargestGates<GeluErf>{a.first});
    case Pointwise::silu_mul:
      return product_rows<T>(a, begin, end, Activation<Gate::silu>{});
    case Pointwise::gelu_mul:
      if (a.tanh) return product_rows<T>(a, begin, end, Activation<Gate::gelu_tanh>{});
      return product_rows<T>(a, begin, end, Activation<Gate::gelu_erf>{});
  }
}

static void pointwise(const PointwiseArgs& a, int64_t begin, int64_t end, void*) {
  switch (a.type) {
    case Type::f32:
      return pointwise_of_type<float>(a, begin, end);
    case Type::bf16:
      return pointwise_of_type<bf16>(a, begin, end);
    case Type::f16:
      return pointwise_of_type<f16>(a, begin, end);
  }
}
