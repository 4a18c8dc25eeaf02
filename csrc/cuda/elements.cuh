// Owns the kernels that write each element as they read it: the gated activations and quantisation with a given scale.
// Included by elements_*.cu, one per element type.
#pragma once
#include "device.cuh"
#include "launch.cuh"

namespace irframework_vllm_c::cuda {
namespace {

// n / divisor for n < 2^31, by a multiplication and a shift (Granlund and Montgomery, 1994).
struct Divisor {
  uint32_t divisor, factor, shift;

  explicit Divisor(uint32_t d) : divisor(d), factor(0), shift(0) {
    while ((uint64_t{1} << shift) < d) ++shift;
    factor = static_cast<uint32_t>(((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d + 1);
  }
  __device__ __forceinline__ uint32_t divide(uint32_t n) const { return (__umulhi(n, factor) + n) >> shift; }
};

struct ElementLaunch {
  ElementArgs a;
  Divisor row_chunks;
  uint32_t chunks;
};

template <Map kMap>
constexpr bool is_gated = kMap != Map::quant;
template <Map kMap>
constexpr bool is_quantised = kMap == Map::quant || kMap == Map::silu_quant;
template <Map kMap>
constexpr bool is_gelu = kMap == Map::gelu_erf || kMap == Map::gelu_tanh;

template <typename T, Map kMap>
__device__ __forceinline__ uint4 mapped(const uint4& first, const uint4& second) {
  if constexpr (!is_gated<kMap>) return first;
  float gate[kElements<T>], up[kElements<T>];
  widen_vector<T>(first, gate);
  widen_vector<T>(second, up);
#pragma unroll
  for (float& each : gate) {
    if constexpr (kMap == Map::gelu_erf) {
      each = gelu_erf(each);
    } else if constexpr (kMap == Map::gelu_tanh) {
      each = gelu_tanh<T>(each);
    } else {
      each = silu<T>(each);
    }
  }
  widen_vector<T>(narrow_vector<T>(gate), gate);
#pragma unroll
  for (int i = 0; i < kElements<T>; ++i) gate[i] *= up[i];
  return narrow_vector<T>(gate);
}

// A block takes U * blockDim.x vectors, whatever rows they belong to. `kAligned`: each of them is whole, and both its
// source and its place are aligned.
template <typename T, Map kMap, bool kAligned, int U>
__global__ void __launch_bounds__(512) elements(const __grid_constant__ ElementLaunch given) {
  constexpr int E = kElements<T>;
  const ElementArgs& a = given.a;
  const uint32_t begin = blockIdx.x * (U * blockDim.x) + threadIdx.x;
  enter();
  uint4 first[U], second[U];
  int64_t place[U], left[U];
#pragma unroll
  for (int u = 0; u < U; ++u) {
    const uint32_t chunk = begin + u * blockDim.x;
    if (chunk >= given.chunks) continue;
    const uint32_t row = given.row_chunks.divide(chunk);
    const int64_t at = int64_t{chunk - row * given.row_chunks.divisor} * E;
    const T* x = static_cast<const T*>(a.x) + offset_of(a.x_rows, row) + at;
    place[u] = row * a.cols + at;
    if constexpr (kAligned) {
      first[u] = load_once(x);
      if constexpr (is_gated<kMap>) second[u] = load_once(x + a.cols);
    } else {
      left[u] = a.cols - at;
      first[u] = load_piece(x, left[u], is_aligned(x));
      if constexpr (is_gated<kMap>) second[u] = load_piece(x + a.cols, left[u], is_aligned(x + a.cols));
    }
  }
  float reciprocal = 0.0f;
  if constexpr (is_quantised<kMap>) reciprocal = __fdiv_rn(1.0f, *a.scale);
#pragma unroll
  for (int u = 0; u < U; ++u) {
    if (begin + u * blockDim.x >= given.chunks) continue;
    const uint4 y = mapped<T, kMap>(first[u], second[u]);
    if constexpr (is_quantised<kMap>) {
      uint8_t* codes = static_cast<uint8_t*>(a.out) + place[u];
      if constexpr (kAligned) {
        store_codes<T>(codes, codes_of<T>(y, reciprocal));
      } else {
        store_codes_piece<T>(codes, codes_of<T>(y, reciprocal), left[u]);
      }
    } else {
      T* out = static_cast<T*>(a.out) + place[u];
      if constexpr (kAligned) {
        *reinterpret_cast<uint4*>(out) = y;
      } else {
        store_piece(out, y, left[u], is_aligned(out));
      }
    }
  }
}

using ElementKernel = void (*)(ElementLaunch);

template <typename T, Map kMap>
ElementKernel element_kernel(bool aligned, int vectors) {
  if (!aligned) return elements<T, kMap, false, 1>;
  if constexpr (is_gelu<kMap>) {  // bound by arithmetic
    return elements<T, kMap, true, 2>;
  } else {
    return vectors == 1 ? elements<T, kMap, true, 1> : vectors == 2 ? elements<T, kMap, true, 2> : elements<T, kMap, true, 4>;
  }
}

template <typename T, Map kMap>
void run_map(const char* op, ElementArgs a, const Place& place) {
  constexpr int E = kElements<T>;
  bool aligned = a.cols % E == 0 && reinterpret_cast<uintptr_t>(a.x) % 16 == 0;
  aligned = aligned && reinterpret_cast<uintptr_t>(a.out) % (is_quantised<kMap> ? E : 16) == 0;
  for (int d = 0; d < a.x_rows.dims; ++d) aligned = aligned && a.x_rows.stride[d] % E == 0;
  const int64_t row_chunks = (a.cols + E - 1) / E;
  constexpr int64_t kMost = int64_t{1} << 30;  // chunks of one launch
  if (row_chunks > kMost) refuse(op, "rows of more than 2^30 vectors of 16 bytes are not supported");
  if (a.x_rows.dims > 1 && a.rows * row_chunks > kMost) {
    refuse(op, "more than 2^30 vectors of 16 bytes must be in rows that are equally far apart; call .contiguous() first");
  }
  const int64_t all_rows = a.rows, rows_of_launch = kMost / row_chunks;
  const int64_t x_step = a.x_rows.dims > 0 ? a.x_rows.stride[0] : 0;
  for (int64_t row = 0; row < all_rows; row += rows_of_launch) {
    ElementArgs part = a;
    part.rows = all_rows - row < rows_of_launch ? all_rows - row : rows_of_launch;
    if (row > 0) {
      part.x = static_cast<const T*>(a.x) + row * x_step;
      part.out = static_cast<char*>(a.out) + row * a.cols * int64_t{is_quantised<kMap> ? 1 : sizeof(T)};
    }
    const int64_t chunks = part.rows * row_chunks;
    Plan plan = plan_elements(aligned);
    const ElementKernel kernel = element_kernel<T, kMap>(aligned, plan.vectors);
    if (aligned && is_gelu<kMap>) plan.vectors = 2;
    const int64_t of_block = int64_t{plan.threads} * plan.vectors;
    const ElementLaunch args{part, Divisor(static_cast<uint32_t>(row_chunks)), static_cast<uint32_t>(chunks)};
    launch(op, kernel, dim3(static_cast<unsigned>((chunks + of_block - 1) / of_block)), dim3(plan.threads), plan, args,
           place);
  }
}

template <typename T>
void run_elements_of(const char* op, Map map, const ElementArgs& args, const Place& place) {
  switch (map) {
    case Map::quant:
      return run_map<T, Map::quant>(op, args, place);
    case Map::silu:
      return run_map<T, Map::silu>(op, args, place);
    case Map::gelu_erf:
      return run_map<T, Map::gelu_erf>(op, args, place);
    case Map::gelu_tanh:
      return run_map<T, Map::gelu_tanh>(op, args, place);
    case Map::silu_quant:
      return run_map<T, Map::silu_quant>(op, args, place);
  }
}

}  // namespace
}  // namespace irframework_vllm_c::cuda
