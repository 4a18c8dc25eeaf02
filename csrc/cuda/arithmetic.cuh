// Owns what is computed with one vector of a row, and where it is rounded, as the ops' native functions round. Knows
// nothing of threads and rows. Included by rows.cuh.
#pragma once
#include "device.cuh"
#include "together.cuh"

namespace irframework_vllm_c::cuda {
namespace {

template <typename T, Source kSource>
__device__ __forceinline__ uint4 joined(const uint4& first, const uint4& second) {
  float a[kElements<T>], b[kElements<T>];
  widen_vector<T>(first, a);
  widen_vector<T>(second, b);
  if constexpr (kSource == Source::silu) {
#pragma unroll
    for (float& each : a) each = silu<T>(each);
    widen_vector<T>(narrow_vector<T>(a), a);
  }
#pragma unroll
  for (int i = 0; i < kElements<T>; ++i) a[i] = kSource == Source::silu ? a[i] * b[i] : a[i] + b[i];
  return narrow_vector<T>(a);
}

template <typename T>
__device__ __forceinline__ float squares(const uint4& v) {
  float a[kElements<T>], total = 0.0f;
  widen_vector<T>(v, a);
#pragma unroll
  for (const float each : a) total = fmaf(each, each, total);
  return total;
}

template <typename T>
__device__ __forceinline__ float largest(const uint4& v) {
  float a[kElements<T>], most = 0.0f;
  widen_vector<T>(v, a);
#pragma unroll
  for (const float each : a) most = Largest::join(most, fabsf(each));
  return most;
}

// Rounded to the weight's type, times the weight, rounded to it, and then to T.
template <typename T, typename W>
__device__ __forceinline__ uint4 weighted(const uint4& v, float scale, const W* weight, int64_t left) {
  constexpr int E = kElements<T>;
  float h[E];
  widen_vector<T>(v, h);
#pragma unroll
  for (int i = 0; i < E; ++i) {
    const float w = i < left ? widen(weight[i]) : 0.0f;
    h[i] = widen(narrow<W>(widen(narrow<W>(h[i] * scale)) * w));
  }
  return narrow_vector<T>(h);
}

template <typename T>
__device__ __forceinline__ uint4 weighted(const uint4& v, float scale, const uint4& weight) {
  constexpr int E = kElements<T>;
  float h[E], w[E];
  widen_vector<T>(v, h);
  widen_vector<T>(weight, w);
#pragma unroll
  for (float& each : h) each *= scale;
  widen_vector<T>(narrow_vector<T>(h), h);
#pragma unroll
  for (int i = 0; i < E; ++i) h[i] *= w[i];
  return narrow_vector<T>(h);
}

// `at`: the element of the row that the vector begins with; `left`: how many elements there are from it on.
template <typename T>
__device__ __forceinline__ uint4 weighted_by_any(const uint4& v, float scale, const RowArgs& a, int64_t at, int64_t left) {
  switch (a.weight_type) {
    case Weight::f32:
      return weighted<T>(v, scale, static_cast<const float*>(a.weight) + at, left);
    case Weight::bf16:
      return weighted<T>(v, scale, static_cast<const bf16*>(a.weight) + at, left);
    case Weight::f16:
      return weighted<T>(v, scale, static_cast<const f16*>(a.weight) + at, left);
    case Weight::none:
      break;
  }
  float h[kElements<T>];
  widen_vector<T>(v, h);
#pragma unroll
  for (float& each : h) each *= scale;
  return narrow_vector<T>(h);
}

__device__ __forceinline__ float scale_of_row(float largest_number) {
  const float scale = __fdiv_rn(largest_number, kLargestCode);
  return scale < kSmallestScale ? kSmallestScale : scale;  // NaN stays
}

}  // namespace
}  // namespace irframework_vllm_c::cuda
