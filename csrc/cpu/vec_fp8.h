// Owns the conversion of float32 vectors to the codes of float8_e4m3fn and int8 and back, and the stores of codes. Included
// by kernels_body.h after vec.h, inside the namespace of one instruction set.

constexpr float kLargestCode = 448.0f;

// In each lane the code, below 256, of v clamped to +-448 and rounded to nearest even; NaN becomes 0x7f with its sign.
// Normal numbers: a rounding bias, the exponent's bias moved from 127 to 7, and 20 bits of fraction shifted out. Below
// 2^-6 the addition of 2^14, whose last bit is worth 2^-9, leaves the rounded multiple of 2^-9 in the low bits. A NaN
// leaves the first way far above every code, so a minimum finds it.
IRF_INLINE U code_of(F v) {
  constexpr uint32_t kBias = 0x7ffffu - (120u << 23), kSubnormal = 141u << 23;  // 2^14
  const U u = bits_of(v);
#if IRF_WIDTH == 16
  // minps gives its second operand when that is NaN.
  const __m512 a = _mm512_min_ps(_mm512_set1_ps(kLargestCode), (__m512)(u & 0x7fffffffu));
  const __m512i m = _mm512_castps_si512(a);
  const __mmask16 odd = _mm512_test_epi32_mask(m, _mm512_set1_epi32(0x100000));
  const __m512i bias = _mm512_mask_blend_epi32(odd, _mm512_set1_epi32(kBias), _mm512_set1_epi32(kBias + 1));
  __m512i code = _mm512_srli_epi32(_mm512_add_epi32(m, bias), 20);
  const __mmask16 small = _mm512_cmp_ps_mask(a, _mm512_set1_ps(0x1p-6f), _CMP_LT_OQ);
  const __m512i shifted = _mm512_castps_si512(_mm512_add_ps(a, _mm512_set1_ps(0x1p14f)));
  code = _mm512_mask_sub_epi32(code, small, shifted, _mm512_set1_epi32(kSubnormal));
  code = _mm512_min_epu32(code, _mm512_set1_epi32(0x7f));
  // code | ((u >> 24) & 0x80)
  return (U)_mm512_ternarylogic_epi32(code, _mm512_srli_epi32((__m512i)u, 24), _mm512_set1_epi32(0x80), 0xf8);
#else
#if IRF_WIDTH == 8
  const F a = (F)_mm256_min_ps(_mm256_set1_ps(kLargestCode), (__m256)(u & 0x7fffffffu));
#else
  F a = from_bits(u & 0x7fffffffu);
  a = choose((I)(a > kLargestCode), splat(kLargestCode), a);
#endif
  const U m = bits_of(a);
  const U normal = (m + (((m >> 20) & 1u) + kBias)) >> 20;
  const U small = bits_of(a + 0x1p14f) - kSubnormal;
  const U code = choose((I)(a < 0x1p-6f), small, normal);
#if IRF_WIDTH == 8
  const U finite = (U)_mm256_min_epu32((__m256i)code, _mm256_set1_epi32(0x7f));
#else
  const U finite = choose((I)(code > 0x7fu), splat_bits(0x7fu), code);
#endif
  return finite | ((u >> 24) & 0x80u);
#endif
}

struct E4m3 {
  static IRF_MEMBER U of(F v) { return code_of(v); }
};

// In each lane's low byte v clamped to +-127 and rounded to nearest even; NaN becomes 0. The sum with 1.5 * 2^23 has the
// rounded number in its low bits.
struct Int8 {
  static IRF_MEMBER U of(F v) {
    v = choose((I)(v == v), v, F{});
    v = choose((I)(v > 127.0f), splat(127.0f), v);
    v = choose((I)(v < -127.0f), splat(-127.0f), v);
    return bits_of(v + 12582912.0f) & 0xffu;
  }
};

// ---- stores of codes ---------------------------------------------------------------------------------------------

typedef uint8_t Bytes __attribute__((vector_size(IRF_WIDTH)));
typedef uint8_t TwoBytes __attribute__((vector_size(2 * IRF_WIDTH)));

IRF_INLINE TwoBytes both(Bytes a, Bytes b) {
#if IRF_WIDTH == 16
  return (TwoBytes)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)a), (__m128i)b, 1);
#else
  TwoBytes t;
  const Bytes halves[2] = {a, b};
  __builtin_memcpy(&t, halves, sizeof t);
  return t;
#endif
}

// The low byte of each lane.
IRF_INLINE Bytes bytes_of_lanes(U u) {
#if IRF_WIDTH == 16
  return (Bytes)_mm512_cvtepi32_epi8((__m512i)u);
#elif IRF_WIDTH == 8
  const __m128i halves = (__m128i)narrow(u);
  const int64_t packed = _mm_cvtsi128_si64(_mm_packus_epi16(halves, halves));
  Bytes b;
  __builtin_memcpy(&b, &packed, sizeof b);
  return b;
#else
  return __builtin_convertvector(u, Bytes);
#endif
}

// The codes of 2 * W neighbours, which were split as load_two<As> splits them.
template <typename As, typename Code = E4m3>
IRF_INLINE TwoBytes codes_of(Two v) {
  const U a = Code::of(v.a), b = Code::of(v.b);
  if (!__is_same(As, bf16)) return both(bytes_of_lanes(a), bytes_of_lanes(b));
  const H pairs = narrow(a | (b << 8));
  TwoBytes codes;
  __builtin_memcpy(&codes, &pairs, sizeof codes);
  return codes;
}

IRF_INLINE void store_codes(uint8_t* p, TwoBytes codes) { __builtin_memcpy(p, &codes, sizeof codes); }

template <typename Code = E4m3>
IRF_INLINE void store_codes(uint8_t* p, F v, int64_t count) {
#if IRF_WIDTH == 16
  _mm_mask_storeu_epi8(p, first(count), (__m128i)bytes_of_lanes(Code::of(v)));
#else
  const Bytes codes = bytes_of_lanes(Code::of(v));
  for (int64_t i = 0; i < count; ++i) p[i] = codes[i];
#endif
}

// Around the caches; `p` must be aligned to 2 * W.
IRF_INLINE void stream_codes(uint8_t* p, TwoBytes codes) {
#if IRF_WIDTH == 16
  _mm256_stream_si256((__m256i*)p, (__m256i)codes);
#elif IRF_WIDTH == 8
  _mm_stream_si128((__m128i*)p, (__m128i)codes);
#else
  store_codes(p, codes);
#endif
}

// ---- the way back ------------------------------------------------------------------------------------------------

// `count` codes, at most W; lanes beyond are zero.
IRF_INLINE Bytes load_codes(const uint8_t* p, int64_t count) {
  Bytes b{};
  if (count == W) {
    __builtin_memcpy(&b, p, sizeof b);
  } else {
    for (int64_t i = 0; i < count; ++i) b[i] = p[i];
  }
  return b;
}

IRF_INLINE H widen(Bytes b) {
#if IRF_WIDTH == 16
  return (H)_mm256_cvtepu8_epi16((__m128i)b);
#elif IRF_WIDTH == 8
  int64_t bits;
  __builtin_memcpy(&bits, &b, sizeof bits);
  return (H)_mm_cvtepu8_epi16(_mm_cvtsi64_si128(bits));
#else
  return __builtin_convertvector(b, H);
#endif
}

// A code's magnitude is that of a float16 with an exponent that is 8 too small; only 0x7f is not a number.
IRF_INLINE F value_of(Bytes b, E4m3) {
  const H h = widen(b);
  const H magnitude = h & 0x7f;
  const F value = half_to_float(((h & 0x80) << 8) | (magnitude << 7)) * 256.0f;
  return choose((I)(widen(magnitude) == 0x7fu), from_bits(splat_bits(0x7fc00000u)), value);
}

IRF_INLINE F value_of(Bytes b, Int8) {
  // The sign's weight is -128.
  const U u = widen(widen(b));
  const I value = (I)(u ^ 0x80u) - 128;
  return __builtin_convertvector(value, F);
}
