// Owns silu_and_mul and gelu_and_mul, plain and quantising. Included by kernels_body.h, inside the namespace of
// one instruction set.

template <Gate kGate>
IRF_INLINE F activation(F x) {
  if (kGate == Gate::silu) return silu(x);
  if (kGate == Gate::gelu_erf) return gelu_erf(x);
  return gelu_tanh(x);
}

template <Gate kGate>
struct Activation {
  IRF_MEMBER F operator()(F x) const { return activation<kGate>(x); }
};

// function(gate) * up, the first rounded to T.
template <typename T, typename Function, typename Sink>
IRF_INLINE void product_row(const T* gate, const T* up, const Function& function, Sink& sink, int64_t cols) {
  int64_t i = 0;
  for (; i + 2 * W <= cols; i += 2 * W) {
    const Two v = load_two<T>(gate + i), u = load_two<T>(up + i);
    sink.two(i, {rounded<T>(function(v.a)) * u.a, rounded<T>(function(v.b)) * u.b});
  }
  for (; i < cols; i += W) {
    const int64_t count = cols - i < W ? cols - i : W;
    sink.some(i, rounded<T>(function(load(gate + i, count))) * load(up + i, count), count);
  }
}

template <Gate kGate, typename T, typename Sink>
IRF_INLINE void gate_row(const T* x, Sink& sink, int64_t cols) {
  product_row(x, x + cols, Activation<kGate>{}, sink, cols);
}

// Returns whether it streamed.
template <Gate kGate, typename T>
IRF_INLINE bool gate_to_tensor(const GateArgs& a, const T* x, T* out) {
  if (a.stream && may_stream(out, a.cols)) {
    TensorSink<true, T> sink{out};
    gate_row<kGate>(x, sink, a.cols);
    return true;
  }
  TensorSink<false, T> sink{out};
  gate_row<kGate>(x, sink, a.cols);
  return false;
}

// Through `scratch` with a fixed scale too: gate and codes in one loop need more registers than there are.
template <Gate kGate, typename T>
IRF_INLINE bool gate_to_codes(const GateArgs& a, const T* x, uint8_t* codes, int64_t row, T* scratch) {
  if (a.groups.size > 0) {
    TensorSink<false, T> sink{scratch};
    gate_row<kGate>(x, sink, a.cols);
    return quantise_groups_of_row(a.groups, (const T*)scratch, codes, a.scales, row, a.cols, a.stream);
  }
  float scale;
  if (a.quantisation == Quantisation::dynamic) {
    MeasuringSink<T> sink{scratch, {U{}}};
    gate_row<kGate>(x, sink, a.cols);
    scale = a.scales[row] = scale_of(sink.largest.value());
  } else {
    TensorSink<false, T> sink{scratch};
    gate_row<kGate>(x, sink, a.cols);
    scale = *a.scale;
  }
  return quantise_row((const T*)scratch, codes, 1.0f / scale, a.cols, a.stream);
}

template <Gate kGate, typename T>
static void gate_rows(const GateArgs& a, int64_t begin, int64_t end, void* scratch) {
  RowCursor cursor;
  seek(cursor, a.x_rows, begin);
  bool streamed = false;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)a.x + cursor.offset;
    if (a.quantisation == Quantisation::none) {
      streamed |= gate_to_tensor<kGate>(a, x, (T*)a.out + row * a.cols);
    } else {
      streamed |= gate_to_codes<kGate>(a, x, (uint8_t*)a.out + row * a.cols, row, (T*)scratch);
    }
    advance(cursor);
  }
  if (streamed) finish_stream();
}

template <typename T>
static void gated_of_type(const GateArgs& a, int64_t begin, int64_t end, void* scratch) {
  switch (a.gate) {
    case Gate::silu:
      return gate_rows<Gate::silu, T>(a, begin, end, scratch);
    case Gate::gelu_erf:
      return gate_rows<Gate::gelu_erf, T>(a, begin, end, scratch);
    case Gate::gelu_tanh:
      return gate_rows<Gate::gelu_tanh, T>(a, begin, end, scratch);
  }
}

static void gated(const GateArgs& a, int64_t begin, int64_t end, void* scratch) {
  switch (a.type) {
    case Type::f32:
      return gated_of_type<float>(a, begin, end, scratch);
    case Type::bf16:
      return gated_of_type<bf16>(a, begin, end, scratch);
    case Type::f16:
      return gated_of_type<f16>(a, begin, end, scratch);
  }
}
