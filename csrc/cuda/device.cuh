// Owns what the kernels share on the device: 16-byte vectors of the element types, rounding, fp8 codes, offsets of rows,
// and the order of dependent launches. Written on PTX instructions; no header of CUDA's number types is needed.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace irframework_vllm_c::cuda {

struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};

template <typename T>
constexpr int kElements = 16 / sizeof(T);  // of one vector

constexpr float kLargestCode = 448.0f;
constexpr float kSmallestScale = static_cast<float>(1.0 / (448.0 * 512.0));

// ---- dependent launches -----------------------------------------------------------------------------------------------

// Before anything is read or written: waits until the kernels before this one are done, where the launch let it begin
// early. Then lets the next one begin, which will wait likewise.
__device__ __forceinline__ void enter() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- memory -----------------------------------------------------------------------------------------------------------

// What is read once need not stay in the first-level cache.
__device__ __forceinline__ uint4 load_once(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// Brings what will be loaded soon as near as the second-level cache, and takes no register meanwhile.
__device__ __forceinline__ void announce(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ __forceinline__ bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// The offset of a row in elements.
__device__ __forceinline__ int64_t offset_of(const Rows& rows, uint32_t row) {
  if (rows.dims <= 1) return row * rows.stride[0];
  int64_t offset = 0;
  for (int d = rows.dims - 1; d > 0; --d) {
    const uint32_t size = static_cast<uint32_t>(rows.size[d]), outer = row / size;
    offset += (row - outer * size) * rows.stride[d];
    row = outer;
  }
  return offset + row * rows.stride[0];
}

// ---- element types --------------------------------------------------------------------------------------------------

__device__ __forceinline__ float widen(float v) { return v; }
__device__ __forceinline__ float widen(bf16 v) { return __uint_as_float(static_cast<uint32_t>(v.bits) << 16); }
__device__ __forceinline__ float widen(f16 v) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(v.bits));
  return wide;
}

template <typename T>
__device__ __forceinline__ T narrow(float v);
template <>
__device__ __forceinline__ float narrow<float>(float v) {
  return v;
}
template <>
__device__ __forceinline__ bf16 narrow<bf16>(float v) {
  bf16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
  return r;
}
template <>
__device__ __forceinline__ f16 narrow<f16>(float v) {
  f16 r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r.bits) : "f"(v));
  return r;
}

template <typename T>
__device__ __forceinline__ uint32_t narrow_pair(float low, float high);
template <>
__device__ __forceinline__ uint32_t narrow_pair<bf16>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
template <>
__device__ __forceinline__ uint32_t narrow_pair<f16>(float low, float high) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

template <typename T>
__device__ __forceinline__ void widen_vector(const uint4& v, float (&to)[kElements<T>]) {
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      to[i] = __uint_as_float(words[i]);
    } else {
      to[2 * i] = widen(T{static_cast<uint16_t>(words[i] & 0xffff)});
      to[2 * i + 1] = widen(T{static_cast<uint16_t>(words[i] >> 16)});
    }
  }
}

template <typename T>
__device__ __forceinline__ uint4 narrow_vector(const float (&from)[kElements<T>]) {
  uint32_t words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(from[i]);
    } else {
      words[i] = narrow_pair<T>(from[2 * i], from[2 * i + 1]);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// Keeps a vector as it is packed: else the compiler holds on to its widened elements, in twice the registers.
__device__ __forceinline__ void keep_packed(uint4& v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)); }

// ---- pieces of a vector's length, at any address ------------------------------------------------------------------

// `left`: how many elements there are; those behind them read as zero, and are not written.
template <typename T>
__device__ __forceinline__ uint4 load_piece(const T* p, int64_t left, bool aligned) {
  if (aligned && left >= kElements<T>) return *reinterpret_cast<const uint4*>(p);
  float v[kElements<T>];
#pragma unroll
  for (int i = 0; i < kElements<T>; ++i) v[i] = i < left ? widen(p[i]) : 0.0f;
  return narrow_vector<T>(v);
}

template <typename T>
__device__ __forceinline__ void store_piece(T* p, const uint4& v, int64_t left, bool aligned) {
  if (aligned && left >= kElements<T>) {
    *reinterpret_cast<uint4*>(p) = v;
    return;
  }
  float wide[kElements<T>];
  widen_vector<T>(v, wide);
#pragma unroll
  for (int i = 0; i < kElements<T>; ++i) {
    if (i < left) p[i] = narrow<T>(wide[i]);
  }
}

// ---- fp8 codes ----------------------------------------------------------------------------------------------------------

// Two codes of float8_e4m3fn, the first in the low byte: clamped to +-448, rounded to nearest even, NaN kept.
__device__ __forceinline__ uint32_t two_codes(float low, float high) {
#if __CUDA_ARCH__ >= 890
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
#else
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float v = i == 0 ? low : high;
    const uint32_t bits = __float_as_uint(v), sign = (bits >> 24) & 0x80;
    const float size = fabsf(v);
    uint32_t code;
    if (!(size <= kLargestCode)) {
      code = size > kLargestCode ? 0x7e : 0x7f;
    } else if (size < 0.015625f) {  // below 2^-6 codes are steps of 2^-9, which is the last bit of a number near 2^14
      code = __float_as_uint(size + 16384.0f) & 0xff;
    } else {
      const uint32_t b = __float_as_uint(size);
      code = ((b + 0x7ffff + ((b >> 20) & 1)) >> 20) - ((127 - 7) << 3);
    }
    codes |= (sign | code) << (8 * i);
  }
  return codes;
#endif
}

template <int N>
struct Codes;
template <>
struct Codes<4> {
  using type = uint32_t;
};
template <>
struct Codes<8> {
  using type = uint2;
};

// The codes of one vector, times `inverse`, the reciprocal of the scale.
template <typename T>
__device__ __forceinline__ typename Codes<kElements<T>>::type codes_of(const uint4& v, float inverse) {
  float h[kElements<T>];
  widen_vector<T>(v, h);
#pragma unroll
  for (float& each : h) each *= inverse;
  const uint32_t first = two_codes(h[0], h[1]) | two_codes(h[2], h[3]) << 16;
  if constexpr (kElements<T> == 4) {
    return first;
  } else {
    return make_uint2(first, two_codes(h[4], h[5]) | two_codes(h[6], h[7]) << 16);
  }
}

template <typename T>
__device__ __forceinline__ void store_codes(uint8_t* p, const typename Codes<kElements<T>>::type& codes) {
  *reinterpret_cast<typename Codes<kElements<T>>::type*>(p) = codes;
}

template <typename T>
__device__ __forceinline__ void store_codes_piece(uint8_t* p, const typename Codes<kElements<T>>::type& codes,
                                                  int64_t left) {
  constexpr int E = kElements<T>;
  if (left >= E && reinterpret_cast<uintptr_t>(p) % E == 0) return store_codes<T>(p, codes);
  const auto* bytes = reinterpret_cast<const uint32_t*>(&codes);
#pragma unroll
  for (int i = 0; i < E; ++i) {
    if (i < left) p[i] = static_cast<uint8_t>(bytes[i / 4] >> (8 * (i % 4)));
  }
}

// ---- activations --------------------------------------------------------------------------------------------------------

// 1 / (1 + exp(-v)) times v. Through exp(-|v|), so that nothing overflows and the denominator lies in [1, 2].
template <typename T>
__device__ __forceinline__ float times_sigmoid(float v, float at) {
  const float e = expf(-fabsf(at));
  const float part = at >= 0.0f ? 1.0f : e;
  if constexpr (sizeof(T) == 4) {
    return v * __fdiv_rn(part, 1.0f + e);
  } else {
    return v * __fdividef(part, 1.0f + e);
  }
}

template <typename T>
__device__ __forceinline__ float silu(float v) {
  return times_sigmoid<T>(v, v);
}
// v * Phi(v), in a form that does not cancel for negative v.
__device__ __forceinline__ float gelu_erf(float v) { return v * normcdff(v); }
// 0.5 * (1 + tanh(u)) is the sigmoid of 2 u.
template <typename T>
__device__ __forceinline__ float gelu_tanh(float v) {
  constexpr float kTwice = 1.5957691216057308f;  // 2 * sqrt(2 / pi)
  return times_sigmoid<T>(v, kTwice * (v + 0.044715f * v * v * v));
}

}  // namespace irframework_vllm_c::cuda
