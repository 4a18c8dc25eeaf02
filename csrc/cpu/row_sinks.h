// Owns where the results of a row go: into a tensor, into codes, or into scratch memory while the largest magnitude is
// found; and the quantisation of a finished row. Included by kernels_body.h, inside the namespace of one instruction set.
//
// A sink takes results before they are rounded to T, 2 * W at a time (`two`, split as load_two<T> splits) or fewer than
// or up to W at the end of a row (`some`).

// ---- into a tensor -----------------------------------------------------------------------------------------------

// Whether a row of `cols` can be written with streaming stores: its vectors must be aligned. A tail would be legal too,
// but then the next row is not aligned.
template <typename T>
IRF_INLINE bool may_stream(const T* p, int64_t cols) {
  constexpr uintptr_t kAlignment = __is_same(T, uint8_t) ? 2 * W : 4 * W;
  return kCanStream && (uintptr_t)p % kAlignment == 0 && cols % (2 * W) == 0;
}

template <bool kStream, typename T>
struct TensorSink {
  T* out;

  IRF_MEMBER void two(int64_t i, Two v) {
    if (kStream) {
      stream_two(out + i, v);
    } else {
      store_two(out + i, v);
    }
  }
  IRF_MEMBER void some(int64_t i, F v, int64_t count) { store(out + i, v, count); }
};

// ---- into codes --------------------------------------------------------------------------------------------------

template <bool kStream, typename T>
struct CodeSink {
  uint8_t* out;
  float inverse;

  IRF_MEMBER void two(int64_t i, Two v) {
    const TwoBytes codes = codes_of<T>({rounded<T>(v.a) * inverse, rounded<T>(v.b) * inverse});
    if (kStream) {
      stream_codes(out + i, codes);
    } else {
      store_codes(out + i, codes);
    }
  }
  IRF_MEMBER void some(int64_t i, F v, int64_t count) { store_codes(out + i, rounded<T>(v) * inverse, count); }
};

template <bool kStream, typename Code, typename T>
IRF_INLINE void quantise_elements(const T* row, uint8_t* out, float inverse, int64_t cols) {
  int64_t i = 0;
  for (; i + 2 * W <= cols; i += 2 * W) {
    const Two v = load_two<T>(row + i);
    const TwoBytes codes = codes_of<T, Code>({v.a * inverse, v.b * inverse});
    if (kStream) {
      stream_codes(out + i, codes);
    } else {
      store_codes(out + i, codes);
    }
  }
  for (; i < cols; i += W) {
    const int64_t count = cols - i < W ? cols - i : W;
    store_codes<Code>(out + i, load(row + i, count) * inverse, count);
  }
}

// Returns whether the codes were streamed.
template <typename Code = E4m3, typename T>
IRF_INLINE bool quantise_row(const T* row, uint8_t* out, float inverse, int64_t cols, bool stream) {
  const bool streamed = stream && may_stream(out, cols);
  if (streamed) {
    quantise_elements<true, Code>(row, out, inverse, cols);
  } else {
    quantise_elements<false, Code>(row, out, inverse, cols);
  }
  return streamed;
}

// ---- the largest magnitude of a row ------------------------------------------------------------------------------

// Magnitudes of floating-point numbers are ordered as the integers that their bits are, and every NaN is above
// infinity: so a NaN in a row becomes its largest magnitude, as it should.
template <typename T>
struct Largest {
  U bits;

  // The bits of W floats, or of 2 * W numbers of 16 bits.
  IRF_MEMBER void take(U u) {
    if (sizeof(T) == 4) {
      u &= 0x7fffffffu;
#if IRF_WIDTH == 16
      bits = (U)_mm512_max_epi32((__m512i)bits, (__m512i)u);
#elif IRF_WIDTH == 8
      bits = (U)_mm256_max_epi32((__m256i)bits, (__m256i)u);
#else
      bits = choose((I)((I)u > (I)bits), u, bits);
#endif
    } else {
      u &= 0x7fff7fffu;
#if IRF_WIDTH == 16
      bits = (U)_mm512_max_epi16((__m512i)bits, (__m512i)u);
#elif IRF_WIDTH == 8
      bits = (U)_mm256_max_epi16((__m256i)bits, (__m256i)u);
#else
      typedef int16_t Shorts __attribute__((vector_size(4 * IRF_WIDTH)));
      Shorts now, before;
      __builtin_memcpy(&now, &u, sizeof u);
      __builtin_memcpy(&before, &bits, sizeof bits);
      const Shorts greater = now > before;
      now = (now & greater) | (before & ~greater);
      __builtin_memcpy(&bits, &now, sizeof bits);
#endif
    }
  }

  // `count` numbers, at most W.
  IRF_MEMBER void take(const T* p, int64_t count) {
    T lanes[sizeof(U) / sizeof(T)] = {};
    for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
    U u;
    __builtin_memcpy(&u, lanes, sizeof u);
    take(u);
  }

  IRF_MEMBER float value() const {
    const U found = sizeof(T) == 4 ? bits : larger(bits & 0xffffu, bits >> 16);
#if IRF_WIDTH == 16
    const uint32_t most = (uint32_t)_mm512_reduce_max_epi32((__m512i)found);
#else
    uint32_t lanes[W];
    __builtin_memcpy(lanes, &found, sizeof found);
    for (int half = W / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    }
    const uint32_t most = lanes[0];
#endif
    if (__is_same(T, f16)) return half_to_float(narrow(splat_bits(most)))[0];
    return from_bits(splat_bits(__is_same(T, bf16) ? most << 16 : most))[0];
  }

  static IRF_MEMBER U larger(U a, U b) { return choose((I)((I)a > (I)b), a, b); }
};

template <typename T>
IRF_INLINE float largest_magnitude(const T* row, int64_t cols) {
  constexpr int64_t kStep = sizeof(U) / sizeof(T);
  Largest<T> largest[2] = {{U{}}, {U{}}};
  int64_t i = 0;
  for (; i + 2 * kStep <= cols; i += 2 * kStep) {
    for (int k = 0; k < 2; ++k) {
      U u;
      __builtin_memcpy(&u, row + i + k * kStep, sizeof u);
      largest[k].take(u);
    }
  }
  for (; i < cols; i += W) largest[0].take(row + i, cols - i < W ? cols - i : W);
  largest[0].take(largest[1].bits);
  return largest[0].value();
}

// Keeps a row as T, for a second pass that needs its scale.
template <typename T>
struct MeasuringSink {
  T* scratch;
  Largest<T> largest;

  IRF_MEMBER void two(int64_t i, Two v) {
    if (__is_same(T, bf16)) {
      const U u = joined(v);
      __builtin_memcpy(scratch + i, &u, sizeof u);
      largest.take(u);
    } else if (__is_same(T, f16)) {
      const U u = both(float_to_half(v.a), float_to_half(v.b));
      __builtin_memcpy(scratch + i, &u, sizeof u);
      largest.take(u);
    } else {
      store_two(scratch + i, v);
      largest.take(bits_of(v.a));
      largest.take(bits_of(v.b));
    }
  }
  IRF_MEMBER void some(int64_t i, F v, int64_t count) {
    store(scratch + i, v, count);
    largest.take(scratch + i, count);
  }
};

// The scale of a row, from its largest magnitude; a NaN stays. Divisions, as in the definition.
template <typename Code = E4m3>
IRF_INLINE float scale_of(float largest) {
  constexpr bool kInt8 = __is_same(Code, Int8);
  constexpr float kSmallest = kInt8 ? 0x1p-126f : (float)(1.0 / (448.0 * 512.0));
  const float scale = largest / (kInt8 ? 127.0f : kLargestCode);
  return scale < kSmallest ? kSmallest : scale;
}
