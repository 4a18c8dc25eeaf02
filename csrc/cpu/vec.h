// Owns the vector type of one instruction set: loads, stores, conversions and the few functions the kernels need.
// Included once per translation unit, inside that unit's own namespace, with IRF_WIDTH floats per vector. Everything
// is `static`, because two units must never share a definition.
//
// The arithmetic is written with the compilers' vector extensions; intrinsics appear only where they have no
// counterpart (conversions, fused multiply-add, masks, streaming stores).

typedef float F __attribute__((vector_size(4 * IRF_WIDTH)));
typedef int32_t I __attribute__((vector_size(4 * IRF_WIDTH)));
typedef uint32_t U __attribute__((vector_size(4 * IRF_WIDTH)));
typedef uint16_t H __attribute__((vector_size(2 * IRF_WIDTH)));

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

#define IRF_INLINE static inline __attribute__((always_inline))
#define IRF_MEMBER inline __attribute__((always_inline))

constexpr int W = IRF_WIDTH;

IRF_INLINE F splat(float v) { return v - F{}; }
IRF_INLINE U splat_bits(uint32_t v) { return v - U{}; }
IRF_INLINE U bits_of(F v) {
  U u;
  __builtin_memcpy(&u, &v, sizeof u);
  return u;
}
IRF_INLINE F from_bits(U u) {
  F v;
  __builtin_memcpy(&v, &u, sizeof v);
  return v;
}
IRF_INLINE U mask_of(I m) {
  U u;
  __builtin_memcpy(&u, &m, sizeof u);
  return u;
}
IRF_INLINE U choose(I mask, U yes, U no) {
  const U m = mask_of(mask);
  return (yes & m) | (no & ~m);
}
IRF_INLINE F choose(I mask, F yes, F no) { return from_bits(choose(mask, bits_of(yes), bits_of(no))); }

IRF_INLINE F multiply_add(F a, F b, F c) {
#if IRF_WIDTH == 16
  return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif IRF_WIDTH == 8
  return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

IRF_INLINE float sum(F v) {
#if IRF_WIDTH == 16
  return _mm512_reduce_add_ps((__m512)v);
#else
  float lanes[W];
  __builtin_memcpy(lanes, &v, sizeof v);
  for (int half = W / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
#endif
}

// ---- 16-bit conversions, round to nearest even -------------------------------------------------------------------

IRF_INLINE U widen(H h) {
#if IRF_WIDTH == 16
  return (U)_mm512_cvtepu16_epi32((__m256i)h);
#elif IRF_WIDTH == 8
  return (U)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, U);
#endif
}

// Keeps the low 16 bits of each lane, which must hold a value below 2^16.
IRF_INLINE H narrow(U u) {
#if IRF_WIDTH == 16
  return (H)_mm512_cvtepi32_epi16((__m512i)u);
#elif IRF_WIDTH == 8
  const __m256i packed = _mm256_packus_epi32((__m256i)u, (__m256i)u);
  return (H)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  return __builtin_convertvector(u, H);
#endif
}

// Two vectors of 16-bit numbers, one after the other. An array of the two, read as one, would wait for its own stores.
IRF_INLINE U both(H a, H b) {
#if IRF_WIDTH == 16
  return (U)_mm512_inserti64x4(_mm512_castsi256_si512((__m256i)a), (__m256i)b, 1);
#elif IRF_WIDTH == 8
  return (U)_mm256_inserti128_si256(_mm256_castsi128_si256((__m128i)a), (__m128i)b, 1);
#else
  U u;
  const H halves[2] = {a, b};
  __builtin_memcpy(&u, halves, sizeof u);
  return u;
#endif
}

// v with its bits rounded so that the upper 16 are the nearest bfloat16; the lower 16 are left over. The rounding bias
// would carry a NaN with all bits set into a zero, but none gets here: a NaN comes out of a bfloat16 input, or is the
// processor's own, and then its low bits are zero; inputs of other types pass through plain_nan() on their way here.
IRF_INLINE U rounded_upper(F v) {
  const U u = bits_of(v);
#if IRF_WIDTH == 16
  const __mmask16 odd = _mm512_test_epi32_mask((__m512i)u, _mm512_set1_epi32(0x10000));
  return u + (U)_mm512_mask_blend_epi32(odd, _mm512_set1_epi32(0x7fff), _mm512_set1_epi32(0x8000));
#else
  return u + (((u >> 16) & 1u) + 0x7fffu);
#endif
}

IRF_INLINE F plain_nan(F v) { return choose((I)(v == v), v, from_bits(splat_bits(0x7fc00000u))); }

IRF_INLINE F half_to_float(H h) {
#if IRF_WIDTH == 16
  return (F)_mm512_cvtph_ps((__m256i)h);
#elif IRF_WIDTH == 8
  return (F)_mm256_cvtph_ps((__m128i)h);
#else
  // Exponent and fraction in place, then one multiplication moves the bias and normalises subnormals.
  const U u = widen(h);
  const U magnitude = (u & 0x7fffu) << 13;
  const F scaled = from_bits(magnitude) * 0x1p112f;
  const U special = mask_of((I)(magnitude >= 0x0f800000u)) & 0x7f800000u;
  return from_bits(bits_of(scaled) | special | ((u & 0x8000u) << 16));
#endif
}

IRF_INLINE H float_to_half(F v) {
#if IRF_WIDTH == 16
  return (H)_mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif IRF_WIDTH == 8
  return (H)_mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  const U u = bits_of(v);
  const U sign = (u >> 16) & 0x8000u;
  const U magnitude = u & 0x7fffffffu;
  // Below 2^-14: let the addition of 0.5 shift the fraction to where a subnormal half has it, rounding on the way.
  const U small = bits_of(from_bits(magnitude) + 0.5f) - 0x3f000000u;
  const U normal = (magnitude + (((magnitude >> 13) & 1u) + 0xfffu) - 0x38000000u) >> 13;
  const U finite = choose((I)(magnitude < 0x38800000u), small, normal);
  const U special = choose((I)(magnitude > 0x7f800000u), splat_bits(0x7e00u), splat_bits(0x7c00u));
  return narrow(sign | choose((I)(magnitude >= 0x477ff000u), special, finite));
#endif
}

// ---- loads and stores; the forms with a count touch only that many elements --------------------------------------

IRF_INLINE F load(const float* p) {
  F v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}
IRF_INLINE H load_16(const void* p) {
  H h;
  __builtin_memcpy(&h, p, sizeof h);
  return h;
}
IRF_INLINE F load(const bf16* p) { return from_bits(widen(load_16(p)) << 16); }
IRF_INLINE F load(const f16* p) { return half_to_float(load_16(p)); }

IRF_INLINE void store(float* p, F v) { __builtin_memcpy(p, &v, sizeof v); }
IRF_INLINE void store(bf16* p, F v) {
  const H h = narrow(rounded_upper(v) >> 16);
  __builtin_memcpy(p, &h, sizeof h);
}
IRF_INLINE void store(f16* p, F v) {
  const H h = float_to_half(v);
  __builtin_memcpy(p, &h, sizeof h);
}

#if IRF_WIDTH == 16
IRF_INLINE __mmask16 first(int64_t count) { return (__mmask16)((1u << count) - 1u); }
IRF_INLINE F load(const float* p, int64_t count) { return (F)_mm512_maskz_loadu_ps(first(count), p); }
IRF_INLINE F load(const bf16* p, int64_t count) {
  return from_bits(widen((H)_mm256_maskz_loadu_epi16(first(count), p)) << 16);
}
IRF_INLINE F load(const f16* p, int64_t count) {
  return half_to_float((H)_mm256_maskz_loadu_epi16(first(count), p));
}
IRF_INLINE void store(float* p, F v, int64_t count) { _mm512_mask_storeu_ps(p, first(count), (__m512)v); }
IRF_INLINE void store(bf16* p, F v, int64_t count) {
  _mm256_mask_storeu_epi16(p, first(count), (__m256i)narrow(rounded_upper(v) >> 16));
}
IRF_INLINE void store(f16* p, F v, int64_t count) {
  _mm256_mask_storeu_epi16(p, first(count), (__m256i)float_to_half(v));
}
#else
template <typename T>
IRF_INLINE F load(const T* p, int64_t count) {
  T lanes[W] = {};
  for (int64_t i = 0; i < count; ++i) lanes[i] = p[i];
  return load(lanes);
}
template <typename T>
IRF_INLINE void store(T* p, F v, int64_t count) {
  T lanes[W];
  store(lanes, v);
  for (int64_t i = 0; i < count; ++i) p[i] = lanes[i];
}
#endif

// ---- two vectors at a time ---------------------------------------------------------------------------------------

// 2 * W neighbours. For bfloat16 they are split into even and odd elements, which costs one operation each way and no
// narrowing; for the other types into a first and a second vector. Elementwise work does not care, as long as all its
// operands are split alike: `As` is the type that decides.
struct Two {
  F a, b;
};

IRF_INLINE Two split_even_odd(F first, F second) {
#if IRF_WIDTH == 16
  return {__builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
          __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
#elif IRF_WIDTH == 8
  return {__builtin_shufflevector(first, second, 0, 2, 4, 6, 8, 10, 12, 14),
          __builtin_shufflevector(first, second, 1, 3, 5, 7, 9, 11, 13, 15)};
#else
  return {__builtin_shufflevector(first, second, 0, 2, 4, 6), __builtin_shufflevector(first, second, 1, 3, 5, 7)};
#endif
}

template <typename As, typename T>
IRF_INLINE Two load_two(const T* p) {
  if (!__is_same(As, bf16)) return {load(p), load(p + W)};
  if (!__is_same(T, bf16)) return split_even_odd(load(p), load(p + W));
  U u;
  __builtin_memcpy(&u, p, sizeof u);
  return {from_bits(u << 16), from_bits(u & 0xffff0000u)};
}

// The 2 * W bfloat16 of an even and an odd half.
IRF_INLINE U joined(Two v) { return (rounded_upper(v.a) >> 16) | (rounded_upper(v.b) & 0xffff0000u); }

IRF_INLINE void store_two(float* p, Two v) { store(p, v.a), store(p + W, v.b); }
IRF_INLINE void store_two(f16* p, Two v) { store(p, v.a), store(p + W, v.b); }
IRF_INLINE void store_two(bf16* p, Two v) {
  const U u = joined(v);
  __builtin_memcpy(p, &u, sizeof u);
}

// Streaming stores write around the caches. `p` must be aligned to the bytes of one vector of what it points to (two of
// a 16-bit type); finish_stream() orders them before later stores.
#if IRF_WIDTH >= 8
constexpr bool kCanStream = true;
IRF_INLINE void stream_bits(void* p, U u) {
#if IRF_WIDTH == 16
  _mm512_stream_si512((__m512i*)p, (__m512i)u);
#else
  _mm256_stream_si256((__m256i*)p, (__m256i)u);
#endif
}
IRF_INLINE void stream_two(float* p, Two v) { stream_bits(p, bits_of(v.a)), stream_bits(p + W, bits_of(v.b)); }
IRF_INLINE void stream_two(bf16* p, Two v) { stream_bits(p, joined(v)); }
IRF_INLINE void stream_two(f16* p, Two v) {
  stream_bits(p, both(float_to_half(v.a), float_to_half(v.b)));
}
IRF_INLINE void finish_stream() { _mm_sfence(); }
#else
constexpr bool kCanStream = false;
template <typename T>
IRF_INLINE void stream_two(T* p, Two v) {
  store_two(p, v);
}
IRF_INLINE void finish_stream() {}
#endif

// The value that a tensor of type T would hold, as a float.
template <typename T>
IRF_INLINE F rounded(F v) {
  if (__is_same(T, bf16)) return from_bits(rounded_upper(v) & 0xffff0000u);
  if (__is_same(T, f16)) return half_to_float(float_to_half(v));
  return v;
}

// Each pair of neighbours exchanged.
IRF_INLINE F swap_pairs(F v) {
#if IRF_WIDTH == 16
  return (F)_mm512_permute_ps((__m512)v, 0xb1);
#elif IRF_WIDTH == 8
  return (F)_mm256_permute_ps((__m256)v, 0xb1);
#else
  return F{v[1], v[0], v[3], v[2]};
#endif
}

// e^x within about 1 ulp; overflows to infinity, underflows through the subnormals to zero, keeps NaN.
// x = n ln 2 + r with |r| <= ln 2 / 2; the Taylor series to r^7 leaves 5e-9.
IRF_INLINE F exponential(F x) {
  x = choose((I)(x > 89.0f), splat(89.0f), x);
  x = choose((I)(x < -104.0f), splat(-104.0f), x);
  constexpr float kRoundingBias = 12582912.0f;  // 1.5 * 2^23: the sum's low bits are the nearest integer
  const F biased = multiply_add(x, splat(1.44269504088896341f), splat(kRoundingBias));
  const F n = biased - kRoundingBias;
  F r = multiply_add(n, splat(-0.693145751953125f), x);
  r = multiply_add(n, splat(-1.42860682030941723e-6f), r);
  F p = splat(1.0f / 5040.0f);
  p = multiply_add(p, r, splat(1.0f / 720.0f));
  p = multiply_add(p, r, splat(1.0f / 120.0f));
  p = multiply_add(p, r, splat(1.0f / 24.0f));
  p = multiply_add(p, r, splat(1.0f / 6.0f));
  p = multiply_add(p, r, splat(0.5f));
  p = multiply_add(p, r, splat(1.0f));
  p = multiply_add(p, r, splat(1.0f));
#if IRF_WIDTH == 16
  return (F)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
  // 2^n in two factors, since n reaches 128 and -150.
  const I whole = (I)(bits_of(biased) - 0x4b400000u);
  const I half = whole >> 1;
  const I rest = whole - half;
  return p * from_bits(mask_of((half + 127) << 23)) * from_bits(mask_of((rest + 127) << 23));
#endif
}

// e^x - 1 for x <= 0, without cancellation near zero; keeps NaN. With the x = n ln 2 + r of exponential():
// 2^n (e^r - 1) + (2^n - 1), where the first factor has no 1 to lose, and n = 0 leaves it alone.
IRF_INLINE F exponential_less_one(F x) {
  x = choose((I)(x < -87.0f), splat(-87.0f), x);
  constexpr float kRoundingBias = 12582912.0f;
  const F biased = multiply_add(x, splat(1.44269504088896341f), splat(kRoundingBias));
  const F n = biased - kRoundingBias;
  F r = multiply_add(n, splat(-0.693145751953125f), x);
  r = multiply_add(n, splat(-1.42860682030941723e-6f), r);
  F p = splat(1.0f / 5040.0f);
  p = multiply_add(p, r, splat(1.0f / 720.0f));
  p = multiply_add(p, r, splat(1.0f / 120.0f));
  p = multiply_add(p, r, splat(1.0f / 24.0f));
  p = multiply_add(p, r, splat(1.0f / 6.0f));
  p = multiply_add(p, r, splat(0.5f));
  p = multiply_add(p * r, r, r);
  const I whole = (I)(bits_of(biased) - 0x4b400000u);
  const F power = from_bits(mask_of((whole + 127) << 23));
  return multiply_add(p, power, power - 1.0f);
}

IRF_INLINE F silu(F x) { return x / (1.0f + exponential(-x)); }

// 0.5 x (1 + tanh(u)) = x / (1 + e^(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)   (Hendrycks and Gimpel, 2016)
IRF_INLINE F gelu_tanh(F x) {
  const F u = 0.79788456080286536f * multiply_add(0.044715f * x * x, x, x);
  return x / (1.0f + exponential(-2.0f * u));
}

// x Phi(x). The lower tail Phi(-a) = e^(-a^2/2) G(1 / (1 + 0.35 a)); G is a polynomial fitted to erfcx on [0, 14]
// with a relative error of 3.2e-8.
IRF_INLINE F gelu_erf(F x) {
  const F a = from_bits(bits_of(x) & 0x7fffffffu);
  const F t = 1.0f / multiply_add(splat(0.35f), a, splat(1.0f));
  F g = splat(-0.02914610502f);
  g = multiply_add(g, t, splat(0.1439725207f));
  g = multiply_add(g, t, splat(-0.2557158869f));
  g = multiply_add(g, t, splat(0.1591759335f));
  g = multiply_add(g, t, splat(-0.02311098114f));
  g = multiply_add(g, t, splat(0.1055084521f));
  g = multiply_add(g, t, splat(0.1198327651f));
  g = multiply_add(g, t, splat(0.1398618821f));
  g = multiply_add(g, t, splat(0.1396214037f));
  const F tail = exponential(-0.5f * a * a) * g * t;
  return x * choose((I)(x < 0.0f), tail, 1.0f - tail);
}
